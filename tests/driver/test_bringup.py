"""Register log of open and close, against the log of Google's driver on an emulated stick."""

from __future__ import annotations

import pytest
from stick.fake_chip import execution_program

from coral import driver
from coral.driver.bringup import wake_steps
from coral.stick import SoftwareStick
from driver.bench import make, make_bus, open_on

OPEN = """
R32 1a30c f0959|W32 1a30c f0059|R32 1a314 190000|R32 1a318 80050410|W32 1a318 80c50410|R32 1a318 80c5065c|W32 1907c f
W32 1907c 0|R32 1a318 80c5065c|W32 1a318 85065c|R32 1a318 850404|R64 44018 0|W64 4a000 1|W64 48788 7f|R64 48788 7f
W64 40020 1e02|R32 1a314 190000|W32 1a314 150000|R32 1a000 0|W64 4c148 f0|W64 4c160 0|W64 4c058 80|W64 44018 1
W64 44158 1|W64 44198 1|W64 441d8 1|W64 44218 1|W64 48788 7f|R64 48788 7f|W64 400c0 1|W64 40150 1|W64 40110 1
W64 40250 1|W64 40298 1|W64 402e0 1|W64 40328 1|W64 40190 1|W64 401d0 1|W64 40210 1|W64 4c060 1|W64 4c070 1
W64 4c080 1|W64 4c090 1|W64 4c0a0 1|R32 1a0d4 1|W32 1a0d4 80000001|R32 1a704 70007f|W32 1a704 7f|R32 1a33c c003f
W32 1a33c 3f|W32 1a500 1|W32 1a600 1|W32 1a558 3|W32 1a658 3|R32 1a0d8 0|W32 1a0d8 80000000
"""
CLOSE = """
W64 4c070 0|W64 4c080 0|W64 4c090 0|W64 4c0a0 0|R32 1a0d4 80000001|W32 1a0d4 1|R32 1a704 7f|W32 1a704 70007f
R32 1a33c 3f|W32 1a33c c003f|W32 1a500 0|W32 1a600 0|W32 1a558 0|W32 1a658 0|R32 1a0d8 80000000|W32 1a0d8 0|W64 4c060 0
W64 44018 2|W64 44158 2|W64 44198 2|W64 441d8 2|W64 44218 2|W64 48788 7f|R64 48788 7f|W64 400c0 2|W64 40150 2
W64 40110 2|W64 40250 2|W64 40298 2|W64 402e0 2|W64 40328 2|W64 40190 2|W64 401d0 2|W64 40210 2|R32 1a318 850404
W32 1a318 c50404|R32 1a318 c5065c|W32 1907c f|W32 1907c 0
"""
PROBE = "R32 1a30c f0959"
"""Our one addition: a read that tells whether the stick answers at all, before anything is written."""


def rows(text: str) -> list[str]:
    return [row for line in text.split("\n") for row in line.split("|") if row]


def log(stick: SoftwareStick) -> list[str]:
    return [f"{access.operation} {access.offset:x} {access.value:x}" for access in stick.registers.log]


def test_open_and_close_are_googles_sequences() -> None:
    bus = make_bus()
    stick = open_on(bus, clock="max")
    assert len(rows(OPEN)) == 56
    assert log(bus.sticks[0]) == [PROBE, *rows(OPEN)]
    bus.sticks[0].registers.log.clear()
    stick.close()
    assert len(rows(CLOSE)) == 95 - 56
    assert log(bus.sticks[0]) == rows(CLOSE)
    stick.close()
    assert len(bus.sticks[0].registers.log) == 95 - 56, "closing twice does nothing"


@pytest.mark.parametrize(("clock", "bits"), [("max", 0x0), ("std", 0x5), ("medium", 0x6), ("low", 0xF)])
def test_clocks(clock: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORAL_CLOCK", clock)
    bus = make_bus()
    stick = open_on(bus)
    assert log(bus.sticks[0])[10] == f"W32 1a318 {bits << 28 | 0x85065C:x}"
    assert bus.sticks[0].clock_hz == stick.clock_hz
    bus = make_bus()
    open_on(bus, clock="std")
    assert log(bus.sticks[0])[10] == "W32 1a318 5085065c", "the argument goes before the environment"


def test_unknown_clock_is_refused_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORAL_CLOCK", "turbo")
    bus = make_bus()
    with pytest.raises(driver.DriverError, match="'turbo' is unknown, choose one of max, std, medium, low"):
        open_on(bus)
    assert bus.sticks[0].faults.seen.total() == 0


def test_high_speed_differs_in_the_chunk_only() -> None:
    bus = make_bus(speed="high")
    open_on(bus, clock="max")
    assert log(bus.sticks[0]) == [PROBE, *(row.replace("W64 4c058 80", "W64 4c058 20") for row in rows(OPEN))]


def test_gated_clock_is_forced_on_first() -> None:
    bus = make_bus(firmware_required=False)
    bus.sticks[0].registers["scu_ctrl_2"] = 0x150000
    open_on(bus, clock="max")
    assert log(bus.sticks[0])[3:7] == ["R32 1a314 150000", "R32 1a314 150000", "W32 1a314 190000", "R32 1a318 80050410"]


def test_open_on_a_running_stick_left_by_a_dead_process() -> None:
    """No port reset, no firmware; what the dead process left in the pipes is gone, and the chip is reset."""
    bus = make_bus()
    first = open_on(bus)
    bus.sticks[0].interrupt(0)
    generation = bus.sticks[0].generation
    program = execution_program("A64 O64 !")
    first._session.handle.submit_out(0x01, b"\x40\0\0\0\1\0\0\0half")  # pyright: ignore[reportArgumentType] - dies in mid-DMA
    first._session.handle.close()
    second = open_on(bus, firmware=None, clock="max")
    assert bus.sticks[0].generation == generation
    from driver.bench import check

    check(second, program)


def test_closed_stick_is_asleep_and_opens_again_without_a_second_reset() -> None:
    stick, simulated = make()
    stick.close()
    simulated.registers.log.clear()
    again = open_on(make_bus_of(simulated), clock="max")
    assert log(simulated)[6:8] == ["R32 1a318 50c5065c", "R32 1a318 50c5065c"], "force_sleep is 3 already"
    again.close()
    with pytest.raises(driver.DriverError, match="was closed"):
        again.run(execution_program("O8 !"))


def make_bus_of(stick: SoftwareStick):
    from coral.stick import StickBus

    return StickBus([stick])


def test_register_that_never_changes_is_named() -> None:
    bus = make_bus(firmware_required=False)
    bus.sticks[0].registers.live["scalarCoreRunControl"] = lambda: 1
    before = bus.sticks[0].clock.now()
    with pytest.raises(driver.BringUpFailed, match=r"scalarCoreRunControl did not become 0 within 1 s, it reads 0x1"):
        open_on(bus)
    assert 1.0 <= bus.sticks[0].clock.now() - before < 2.0
    bus.sticks[0].plug()
    open_on(bus).close()


def test_temperature() -> None:
    stick, simulated = make()
    assert stick.temperature_c() is None
    simulated.registers["omc0_dc"] = 462 << 16
    assert stick.temperature_c() == pytest.approx(50.55)


def test_tables_know_both_speeds() -> None:
    assert len(wake_steps("std", "high")) == len(wake_steps("max", "super"))
