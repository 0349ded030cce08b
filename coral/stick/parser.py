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

    def transfer(self, data: bytes | bytearray | memoryview) -> list[Dma]:
        """The DMAs that end in this transfer (one at most when strict); raises ProtocolError."""
        view, done = memoryview(data).cast("B"), []
        while view:
            if done and self._strict:
                raise ProtocolError(
                    f"{len(view)} bytes follow the end of {done[-1]} in the same transfer; the firmware misparses two "
                    "DMAs in one transfer"
                )
            if len(self._header) < HEADER_BYTES:
                view = self._take_header(view)
            taken = view[: self._length - len(self._payload)]
            self._payload += taken
            view = view[len(taken) :]
            if len(self._payload) == self._length:
                done.append(Dma(self._tag, bytes(self._payload), self._read))
                self._header, self._payload = bytearray(), bytearray()
        return done

    def _take_header(self, view: memoryview) -> memoryview:
        self._read = self._read_bytes()
        if len(view) < HEADER_BYTES:
            raise ProtocolError(f"a transfer ends {len(view)} bytes into the 8-byte header of a DMA")
        self._header += view[:HEADER_BYTES]
        self._length, tag_byte, *rest = struct.unpack("<IB3B", self._header)
        self._tag = tag_byte & 0xF
        if self._tag > 2 or any(rest) or tag_byte >> 4:
            raise ProtocolError(f"DMA header {self._header.hex()}: the tag is {self._tag}, only 0, 1 and 2 are known")
        if not self._length:
            raise ProtocolError(f"DMA header {self._header.hex()}: length 0")
        return view[HEADER_BYTES:]
