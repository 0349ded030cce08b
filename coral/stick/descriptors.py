"""Descriptors of the stick's two personalities. Source: docs/usb.md (application mode: bytes of the firmware image)."""

from __future__ import annotations

import struct

DFU_ID = (0x1A6E, 0x089A)
APPLICATION_ID = (0x18D1, 0x9302)

MAX_PACKET_BYTES = {"high": 512, "super": 1024}
_USB = {"high": (0x0210, 64), "super": (0x0310, 9)}
_POWER = {"high": 0x31, "super": 0x0C}
_BULK_ENDPOINTS = (0x01, 0x02, 0x03, 0x81, 0x82)

DFU_CONFIGURATION = bytes.fromhex("09 02 1b 00 01 01 00 80 31  09 04 00 00 00 fe 01 02 00  09 21 07 00 00 00 01 10 01")
BOS = bytes.fromhex("05 0f 16 00 02  07 10 02 02 00 00 00  0a 10 03 00 0c 00 02 00 00 00")
LANGUAGES = bytes.fromhex("04 03 09 04")
QUALIFIER = bytes.fromhex("0a 06 10 02 00 00 00 40 01 00")


def device_descriptor(identity: tuple[int, int], speed: str) -> bytes:
    """18 bytes for (vendor, product) at "high" or "super" speed."""
    bcd_usb, packet0 = _USB[speed]
    return struct.pack("<BBHBBBBHHHBBBB", 18, 1, bcd_usb, 0, 0, 0, packet0, *identity, 0x0100, 0, 0, 0, 1)


def application_configuration(speed: str) -> bytes:
    """96 (super) or 60 (high speed) bytes: one vendor interface with five bulk endpoints and one interrupt endpoint."""
    body = bytes((9, 4, 0, 0, 6, 0xFF, 0xFF, 0xFF, 0))
    for endpoint in (*_BULK_ENDPOINTS, 0x83):
        bulk = endpoint in _BULK_ENDPOINTS
        packet = MAX_PACKET_BYTES[speed] if bulk else 64
        body += struct.pack("<BBBBHB", 7, 5, endpoint, 2 if bulk else 3, packet, 0 if bulk else 1)
        if speed == "super":
            body += struct.pack("<BBBBH", 6, 0x30, 15 if bulk else 0, 0, 0 if bulk else 4)
    return struct.pack("<BBHBBBBB", 9, 2, 9 + len(body), 1, 1, 0, 0xC0, _POWER[speed]) + body


def descriptor(kind: int, *, application: bool, speed: str) -> bytes | None:
    """Answer to GET_DESCRIPTOR of type ``kind``, whole; None where the stick has no such descriptor."""
    return {
        1: device_descriptor(APPLICATION_ID if application else DFU_ID, speed),
        2: application_configuration(speed) if application else DFU_CONFIGURATION,
        3: LANGUAGES,
        6: QUALIFIER if speed == "high" else None,
        15: BOS if speed == "super" else None,
    }.get(kind)
