"""Bulk OUT of single-endpoint mode: a stream of DMAs, each an 8-byte header and its payload. Source: docs/usb.md."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from coral.stick.errors import ProtocolError

HEADER_BYTES = 8
TAG_NAMES = {0: "instructions", 1: "input", 2: "parameters", 3: "output"}


@dataclass(frozen=True)
class Dma:
    """One DMA from the host. ``read_bytes``: how much output the host had read when the header began."""

    tag: int
    data: bytes
    read_bytes: int = 0

    def __str__(self) -> str:
        return f"{TAG_NAMES[self.tag]} (tag {self.tag}, {len(self.data)} bytes)"


class OutParser:
    """Collects DMAs out of transfers. ``read_bytes`` is asked when the first byte of a header arrives.

    With ``strict`` False, bytes behind the end of a DMA inside one transfer count as the next DMA.
    """

    def __init__(self, read_bytes: Callable[[], int], *, strict: bool = True) -> None:
        self._read_bytes, self._strict = read_bytes, strict
        self.reset()

    def reset(self) -> None:
        """Forgets a half-received DMA."""
        self._header, self._payload = bytearray(), bytearray()
        self._tag, self._length, self._read = 0, 0, 0
        self._ended: Dma | None = None

    @property
    def tag(self) -> int | None:
        """Tag of the DMA whose payload is arriving; None between DMAs."""
        return self._tag if self._header else None

    @property
    def collected_bytes(self) -> int:
        """Payload of the arriving DMA that is here."""
        return len(self._payload)

    def start(self) -> None:
        """A new transfer begins."""
        self._ended = None

    def take(self, view: memoryview) -> tuple[int, Dma | None]:
        """(bytes consumed, the DMA that ends with them): a header alone, or payload up to the DMA's end. ``view`` is
        not empty; raises ProtocolError."""
        if not self._header:
            if self._ended is not None and self._strict:
                raise ProtocolError(
                    f"{len(view)} bytes follow the end of {self._ended} in the same transfer; the firmware misparses "
                    "two DMAs in one transfer"
                )
            self._take_header(view)
            return HEADER_BYTES, None
        taken = view[: self._length - len(self._payload)]
        self._payload += taken
        if len(self._payload) < self._length:
            return len(taken), None
        self._ended = Dma(self._tag, bytes(self._payload), self._read)
        self._header, self._payload = bytearray(), bytearray()
        return len(taken), self._ended

    def _take_header(self, view: memoryview) -> None:
        self._read = self._read_bytes()
        if len(view) < HEADER_BYTES:
            raise ProtocolError(f"a transfer ends {len(view)} bytes into the 8-byte header of a DMA")
        header = bytes(view[:HEADER_BYTES])
        length, tag_byte, *rest = struct.unpack("<IB3B", header)
        if tag_byte > 2 or any(rest):
            raise ProtocolError(f"DMA header {header.hex()}: the tag is {tag_byte & 0xF}, only 0, 1 and 2 are known")
        if not length:
            raise ProtocolError(f"DMA header {header.hex()}: length 0")
        self._header, self._length, self._tag = bytearray(header), length, tag_byte
