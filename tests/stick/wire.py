"""The plainest possible host for tests of the stick: no rules, no retries, no checks."""

from __future__ import annotations

import struct

from coral.stick import SoftwareStick, StickBus
from coral.stick.bus import StickHandle
from coral.stick.host import HostTransfer
from coral.stick.registers import RUN_CONTROLS


def header(tag: int, size: int) -> bytes:
    return struct.pack("<IB3x", size, tag)


def dma(tag: int, payload: bytes) -> bytes:
    return header(tag, len(payload)) + payload


class Wire:
    def __init__(self, handle: StickHandle) -> None:
        self.handle, self.stick = handle, handle.stick

    @classmethod
    def started(cls, stick: SoftwareStick, *, chunk_bytes: int = 1024, split_bytes: int | None = None) -> Wire:
        wire = cls(StickBus([stick], split_bytes=split_bytes).devices()[0].open())
        wire.handle.claim(0)
        wire.write32(0x1A318, 0x00850404)
        wire.write64(0x4C148, 0xF0)
        wire.write64(0x4C058, chunk_bytes // 8)
        for offset in RUN_CONTROLS.values():
            wire.write64(offset, 1)
        return wire

    def control(self, request_type: int, request: int, value: int, index: int, data: bytes | int) -> HostTransfer:
        return self.handle.submit_control(request_type, request, value, index, data)

    def read32(self, offset: int) -> int:
        return int.from_bytes(self.control(0xC0, 1, offset & 0xFFFF, offset >> 16, 4).data, "little")

    def read64(self, offset: int) -> int:
        return int.from_bytes(self.control(0xC0, 0, offset & 0xFFFF, offset >> 16, 8).data, "little")

    def write32(self, offset: int, value: int) -> None:
        assert self.control(0x40, 1, offset & 0xFFFF, offset >> 16, value.to_bytes(4, "little")).status == "done"

    def write64(self, offset: int, value: int) -> None:
        assert self.control(0x40, 0, offset & 0xFFFF, offset >> 16, value.to_bytes(8, "little")).status == "done"

    def out(self, data: bytes) -> HostTransfer:
        return self.handle.submit_out(0x01, data)

    def read(self, size: int, endpoint: int = 0x81) -> HostTransfer:
        return self.handle.submit_in(endpoint, size)

    def settle(self) -> None:
        """Lets the chip work as far as it gets."""
        self.handle.wait(0.0)
