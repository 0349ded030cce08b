"""Descriptors, firmware download and re-enumeration. Descriptor bytes: those inside Google's firmware image."""

from __future__ import annotations

import pytest

from coral.stick import Gone, SoftwareStick, Stall, Strictness, boots, stand_in_firmware
from coral.stick.dfu import DfuMachine
from stick.fake_chip import FakeChip

SUPER_DEVICE = "12 01 10 03 00 00 00 09 d1 18 02 93 00 01 00 00 00 01"
SUPER_CONFIGURATION = (
    "09 02 60 00 01 01 00 c0 0c 09 04 00 00 06 ff ff ff 00 07 05 01 02 00 04 00 06 30 0f 00 00 00"
    "07 05 02 02 00 04 00 06 30 0f 00 00 00 07 05 03 02 00 04 00 06 30 0f 00 00 00"
    "07 05 81 02 00 04 00 06 30 0f 00 00 00 07 05 82 02 00 04 00 06 30 0f 00 00 00"
    "07 05 83 03 40 00 01 06 30 00 00 04 00"
)
HIGH_DEVICE = "12 01 10 02 00 00 00 40 d1 18 02 93 00 01 00 00 00 01"
HIGH_CONFIGURATION = (
    "09 02 3c 00 01 01 00 c0 31 09 04 00 00 06 ff ff ff 00 07 05 01 02 00 02 00 07 05 02 02 00 02 00"
    "07 05 03 02 00 02 00 07 05 81 02 00 02 00 07 05 82 02 00 02 00 07 05 83 03 40 00 01"
)
DFU_DEVICE = "12 01 10 03 00 00 00 09 6e 1a 9a 08 00 01 00 00 00 01"
DFU_CONFIGURATION = "09 02 1b 00 01 01 00 80 31 09 04 00 00 00 fe 01 02 00 09 21 07 00 00 00 01 10 01"


def stick(**options) -> SoftwareStick:
    return SoftwareStick(chip=FakeChip(), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"firmware_required": False}, SUPER_DEVICE + SUPER_CONFIGURATION),
        ({"firmware_required": False, "speed": "high"}, HIGH_DEVICE + HIGH_CONFIGURATION),
        ({}, DFU_DEVICE + DFU_CONFIGURATION),
    ],
)
def test_descriptor_bytes(options: dict, text: str) -> None:
    subject, expected = stick(**options), bytes.fromhex(text)
    assert subject.descriptors() == expected
    assert subject.control(0x80, 6, 0x0100, 0, 64) == expected[:18]
    assert subject.control(0x80, 6, 0x0200, 0, 521) == expected[18:]
    assert subject.control(0x80, 6, 0x0200, 0, 9) == expected[18:27]


def test_requests_of_a_kernel_are_answered_calmly() -> None:
    subject = stick()
    assert subject.control(0x00, 9, 1, 0, b"") == b""
    assert subject.control(0x00, 0x31, 40, 0, b"") == b""
    assert subject.control(0x80, 8, 0, 0, 1) == b"\1"
    assert len(subject.control(0x80, 6, 0x0F00, 0, 255) or b"") == 22
    with pytest.raises(Stall):
        subject.control(0x80, 6, 0x2200, 0, 64)
    with pytest.raises(Stall):
        subject.control(0xC0, 1, 0xA30C, 1, 4)  # no registers before the firmware runs


def download(machine: DfuMachine, image: bytes) -> None:
    blocks = [image[start : start + 256] for start in range(0, len(image), 256)]
    for number, block in enumerate([*blocks, b""]):
        machine.request(1, number, block)
        assert machine.request(3, 0, 6) == bytes((0, 0, 0, 0, 5 if block else 2, 0))


def test_download_and_upload() -> None:
    machine, image = DfuMachine(), stand_in_firmware()
    download(machine, image)
    assert machine.image == image
    read = b"".join(machine.request(2, number, 256) for number in range(130))
    assert len(read) == 32 * 1024
    assert read[: len(image)] == image


@pytest.mark.parametrize("block", [1, 43, 65535])
def test_blocks_out_of_order_end_in_the_error_state_until_cleared(block: int) -> None:
    machine = DfuMachine()
    with pytest.raises(Stall):
        machine.request(1, block, bytes(256))
    assert machine.request(3, 0, 6) == bytes((15, 0, 0, 0, 10, 0))
    with pytest.raises(Stall):
        machine.request(1, 0, bytes(256))
    machine.request(4, 0, b"")
    download(machine, stand_in_firmware())


@pytest.mark.parametrize("image", [bytes(257), bytes(33 * 1024)])
def test_oversized_blocks_and_images_stall(image: bytes) -> None:
    machine = DfuMachine()
    step = 257 if len(image) == 257 else 256
    with pytest.raises(Stall):  # noqa: PT012 - the block that stalls is the last of several
        for number in range(len(image) // step):
            machine.request(1, number, image[:step])
            machine.request(3, 0, 6)


def test_only_known_images_boot() -> None:
    subject = stick(reenumeration_s=2.0)
    download(subject.dfu, stand_in_firmware())
    assert subject.reset()
    assert not subject.present
    with pytest.raises(Gone):
        subject.control(0x80, 6, 0x0100, 0, 18)
    subject.clock.sleep(2.0)
    assert subject.present
    assert subject.identity == (0x18D1, 0x9302)
    other = stick()
    download(other.dfu, stand_in_firmware()[:-1] + b"?")
    other.reset()
    other.clock.sleep(1000)
    assert not other.present
    assert list(other.log) == ["firmware of 10783 bytes that this stick does not know: it stays away"]
    other.plug()
    assert other.identity == (0x1A6E, 0x089A)


def test_googles_image_boots(data) -> None:
    assert boots((data / "firmware" / "apex_latest_single_ep.bin").read_bytes())


def test_reset_keeps_running_firmware_and_detach_leaves_it() -> None:
    subject = stick(firmware_required=False)
    assert not subject.reset()
    assert subject.application
    subject.control(0x21, 0, 100, 0, b"")
    assert subject.reset()
    assert subject.identity == (0x1A6E, 0x089A)


def test_reset_of_a_wedged_stick_makes_it_vanish_until_it_is_plugged_in_again() -> None:
    subject = stick(firmware_required=False, mode=Strictness.WEDGE)
    subject.bulk_out(0x01, b"\1\0\0")
    assert subject.wedged
    assert subject.control(0xC0, 1, 0xA30C, 1, 4) is None
    assert subject.bulk_out(0x01, bytes(8)) == 0
    subject.reset()
    subject.clock.sleep(1e6)
    assert not subject.present
    subject.plug()
    assert subject.present
    assert subject.control(0xC0, 1, 0xA30C, 1, 4) is not None
