"""The mask ROM's side of a firmware download. Source: docs/usb.md (DFU 1.1, state machine of the ROM)."""

from __future__ import annotations

import hashlib

from coral.stick.errors import Stall

BLOCK_BYTES = 256
RAM_BYTES = 32 * 1024
STAND_IN_BYTES = 10783
GOOGLE_SHA256 = "3b07311b174b81fd14fd2c887f40d646c0ebf2f140cc5ee5cf8befa0f3e3dc7f"

DETACH, DNLOAD, UPLOAD, GETSTATUS, CLRSTATUS, GETSTATE, ABORT = range(7)
IDLE, DNLOAD_SYNC, DNLOAD_IDLE, MANIFEST_SYNC, ERROR = 2, 3, 5, 6, 10
ERR_STALLEDPKT = 15


def stand_in_firmware() -> bytes:
    """An image of our own that a simulated stick boots from; as long as Google's, so that it takes as many blocks."""
    text = b"tinycoral stand-in firmware for a simulated stick\0"
    blocks = (hashlib.sha256(text + bytes([index % 256, index // 256])).digest() for index in range(RAM_BYTES // 32))
    return (text + b"".join(blocks))[:STAND_IN_BYTES]


def boots(image: bytes) -> bool:
    """Whether a stick with ``image`` in its RAM comes up as an application; any other image leaves it dead."""
    return hashlib.sha256(image).hexdigest() == GOOGLE_SHA256 or image == stand_in_firmware()


class DfuMachine:
    """State of the ROM: blocks must come in order, anything unexpected is a stall and dfuERROR."""

    def __init__(self) -> None:
        self.ram = bytearray(RAM_BYTES)
        self.image_bytes = 0
        self.complete = False
        self._state, self._status, self._block = IDLE, 0, 0

    @property
    def image(self) -> bytes:
        """What was downloaded, empty until the closing empty block."""
        return bytes(self.ram[: self.image_bytes]) if self.complete else b""

    def request(self, request: int, value: int, data_or_length: bytes | int) -> bytes:
        """Answers one class request; raises Stall."""
        match request, data_or_length:
            case 3, int():
                self._state = {DNLOAD_SYNC: DNLOAD_IDLE, MANIFEST_SYNC: IDLE}.get(self._state, self._state)
                return bytes((self._status, 0, 0, 0, self._state, 0))[:data_or_length]
            case 5, int():
                return bytes((self._state,))
            case ((4 | 6), _):
                self._state, self._status = IDLE, 0
                return b""
            case 1, bytes() if self._state in (IDLE, DNLOAD_IDLE):
                return self._download(value, data_or_length)
            case 2, int() if self._state == IDLE:
                start = value * BLOCK_BYTES
                return bytes(self.ram[start : start + data_or_length])
        self._fail()
        return b""

    def _download(self, block: int, data: bytes) -> bytes:
        if self._state == IDLE:
            self._block, self.image_bytes, self.complete = 0, 0, False
        last_was_short = self.image_bytes % BLOCK_BYTES != 0
        if block != self._block or len(data) > BLOCK_BYTES or (data and last_was_short) or not (data or block):
            self._fail()
        if self.image_bytes + len(data) > RAM_BYTES:
            self._fail()
        self.ram[self.image_bytes : self.image_bytes + len(data)] = data
        self.image_bytes += len(data)
        self._block += 1
        self.complete = not data
        self._state = DNLOAD_SYNC if data else MANIFEST_SYNC
        return b""

    def _fail(self) -> None:
        self._state, self._status = ERROR, ERR_STALLEDPKT
        raise Stall
