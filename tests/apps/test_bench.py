"""``coral bench call``: the null chip, the split of the time, both transports."""

from __future__ import annotations

import time

import pytest

from apps.conftest import Command
from coral.apps import bench
from coral.driver import open_stick
from coral.stick import StickBus, StickError, stand_in_firmware, usbfs


def test_a_null_chip_answers_every_call(run: Command) -> None:
    with open_stick(StickBus([bench.null_stick()]), firmware=stand_in_firmware(), check_firmware_hash=False) as stick:
        for _ in range(3):
            assert stick.run(bench.program(), {"x": bytes(range(256))}) == {"y": bytes(256)}
        assert stick.counters.calls == 3
        assert not stick.counters.faults


def test_time_in_handles_is_the_transports() -> None:
    class Slow:
        value = 3

        def devices(self) -> list[Slow]:
            return [self]

        def open(self) -> Slow:
            return self

        def wait(self, seconds: float) -> str:
            time.sleep(seconds)
            return "over"

    spent = [0.0]
    handle = bench.Timed(Slow(), spent).devices()[0].open()
    assert handle.value == 3
    before = spent[0]
    assert [handle.wait(0.02), handle.wait(0.02)] == ["over", "over"]
    assert spent[0] - before >= 0.04


def test_in_process(run: Command, no_umockdev: None) -> None:
    found = run("bench", "call", "--calls", "50", "--json").json
    assert (found["program"], found["calls"]) == ("fc_256x256", 50)
    times = found["transports"]["in-process"]
    assert all(times[name] > 0 for name in ("median_us", "ours_us", "transport_us"))
    assert times["ours_us"] < times["median_us"] * 3
    assert found["transports"]["libusb/umockdev"] == {"skipped": "install umockdev"}
    shown = run("bench", "call", "--calls", "10", "--profile").stdout
    assert "in-process: " in shown
    assert "tottime" in shown


def test_over_libusb(run: Command) -> None:
    try:
        usbfs.preload_library()
    except StickError as error:
        pytest.skip(str(error))
    times = run("bench", "call", "--calls", "5", "--json").json["transports"]["libusb/umockdev"]
    assert times["transport_us"] > times["ours_us"] > 0
