"""Registers: what survives a chip reset, which bits a host can change, what writes set off."""

from __future__ import annotations

import pytest

from coral.driver import registers as driver_registers
from coral.stick import SoftwareStick
from coral.stick.registers import TABLE, RegisterFile
from stick.fake_chip import FakeChip
from stick.wire import Wire


def test_table_names_and_offsets_are_unique() -> None:
    assert len({register.name for register in TABLE}) == len({register.offset for register in TABLE}) == len(TABLE)


def test_driver_and_stick_wrote_the_same_addresses_down() -> None:
    ours = {register.name: register.offset for register in TABLE}
    common = ours.keys() & driver_registers.OFFSETS.keys()
    assert len(common) > 45
    assert {name: ours[name] for name in common} == {name: driver_registers.OFFSETS[name] for name in common}


@pytest.mark.parametrize(
    ("offset", "before", "written", "after"),
    [
        (0x1A33C, 0x3C003F, 0x3C003F, 0x3C003F),  # no failure latched: plain
        (0x1A33C, 0xF003F, 0xF003F, 0xC003F),  # bits 16, 17 clear where 1 is written
        (0x1A33C, 0xF003F, 0xC003F, 0xF003F),
        (0x1A704, 0x77007F, 0x02007F, 0x05007F),  # bits 18:16 likewise, 22:20 plain
        (0x4C068, 1, 0, 0),  # clear where 0 is written
        (0x4C068, 1, 1, 1),
        (0x4C068, 0, 1, 0),
        (0x44258, 0, 7, 0),  # read only
    ],
)
def test_write_masks(offset: int, before: int, written: int, after: int) -> None:
    file = RegisterFile()
    file.values[offset] = before
    file.write(offset, 64, written)
    assert file.values[offset] == after


def test_sleep_and_wake(running: Wire) -> None:
    chip = running.stick.engine.chip
    assert isinstance(chip, FakeChip)
    resets = chip.resets
    running.write32(0x1A318, 0x00C50404)
    assert running.read32(0x1A318) == 0x00C5065C
    assert chip.resets == resets + 1
    running.write32(0x1A318, 0x00C50404)
    assert chip.resets == resets + 1, "already asleep"
    for clkdiv, hertz in enumerate((500_000_000, 250_000_000, 125_000_000, 63_000_000)):
        running.write32(0x1A318, clkdiv << 28 | 0x0085065C)
        assert running.read32(0x1A318) == clkdiv << 28 | 0x00850404
        assert running.stick.clock_hz == hertz


def test_chip_registers_fall_back_at_a_chip_reset_and_bridge_registers_do_not(running: Wire) -> None:
    running.write64(0x4A000, 1)
    running.write32(0x1A0D8, 5)
    running.write64(0x48000, 77)
    assert (running.read64(0x44018), running.read64(0x4A000), running.read64(0x48000)) == (1, 1, 77)
    running.write32(0x1A318, 0x00C50404)
    assert (running.read64(0x44018), running.read64(0x4A000), running.read64(0x48000)) == (0, 0x9000, 0)
    assert running.read32(0x1A0D8) == 5


def test_unknown_registers_keep_what_was_written_and_wrong_widths_are_logged(running: Wire) -> None:
    assert running.read32(0x19018) == 0
    running.write32(0x19018, 3)
    assert running.read32(0x19018) == 3
    assert running.control(0xC0, 1, 0x4018, 4, 4).data == bytes((1, 0, 0, 0))
    assert "32-bit request for the 64-bit register at 0x44018" in running.stick.log[-1]
    assert running.control(0x40, 0, 0x4018, 4, b"\1\0\0\0").status == "stall"


def test_earlier_drivers_are_accepted() -> None:
    # tinycoral: 0x486c0 instead of 0x4c060; LibrEdgeTPU: bits 16, 17, 20, 21 of scu_ctrl_3 cleared
    wire = Wire.started(SoftwareStick(firmware_required=False, chip=FakeChip()))
    wire.write64(0x486C0, 1)
    wire.write32(0x1A318, 0x80C40410)
    assert wire.read32(0x1A318) & 0xFFF == 0x65C
    wire.write32(0x1A318, 0x8084065C)
    assert wire.read32(0x1A318) & 0x300 == 0


def test_temperature_alarm_clears_by_writing_one(running: Wire) -> None:
    running.stick.registers["omc0_dc"] = 0xF0000000 | 462 << 16
    running.write32(0x1A0DC, 1 << 29)
    assert running.read32(0x1A0DC) == 0x50000000 | 462 << 16
