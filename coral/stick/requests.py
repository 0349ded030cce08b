"""Control requests that do not depend on what the stick is doing. Source: docs/usb.md (USB and DFU standards)."""

from __future__ import annotations

from coral.stick import descriptors
from coral.stick.dfu import DNLOAD, GETSTATUS, UPLOAD
from coral.stick.errors import Stall
from coral.stick.faults import Kind

GET_DESCRIPTOR, STRING, SERIAL_INDEX = 6, 3, 1
_DFU_KINDS = {DNLOAD: Kind.DOWNLOAD, GETSTATUS: Kind.STATUS, UPLOAD: Kind.UPLOAD}
_ANSWERS = {0: b"\1\0", 8: b"\1", 10: b"\0"}


def kinds_of(request_type: int, request: int) -> tuple[Kind, ...]:
    """The kinds that a request counts as in a fault plan."""
    if request_type & 0x60 == 0x20 and request in _DFU_KINDS:
        return Kind.CONTROL, _DFU_KINDS[request]
    if request_type & 0x60 == 0x40:
        return Kind.CONTROL, Kind.READ if request_type & 0x80 else Kind.WRITE
    return (Kind.CONTROL,)


def standard(request: int, value: int, payload: bytes | int, application: bool, speed: str, serial: str) -> bytes:
    """Answer to a standard request, at most as long as asked for; raises Stall."""
    if not isinstance(payload, int):
        return b""
    if request != GET_DESCRIPTOR:
        return _ANSWERS.get(request, b"")[:payload]
    answer = descriptors.descriptor(value >> 8, application=application, speed=speed)
    if serial and value >> 8 == STRING and value & 0xFF == SERIAL_INDEX:
        text = serial.encode("utf-16-le")
        answer = bytes((2 + len(text), STRING)) + text
    if answer is None:
        raise Stall
    if serial and value >> 8 == 1:
        answer = answer[:16] + bytes((SERIAL_INDEX,)) + answer[17:]
    return answer[:payload]
