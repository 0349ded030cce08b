"""The wiring: runtimes on simulated sticks through the whole driver, and what can go wrong before one is open."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from coral import devices
from coral.driver import DriverError, NoFirmware, NoStick
from coral.stick import SoftwareStick, StickBus
from runtime.test_runtime import layer, reference


@pytest.fixture(autouse=True)
def fresh(monkeypatch) -> Iterator[None]:
    """No runtime or simulated stick of another test."""
    monkeypatch.setattr(devices, "_runtimes", {})
    devices._simulated_bus.cache_clear()
    monkeypatch.delenv("CORAL_CLOCK", raising=False)
    yield
    devices.close_all()


def test_layers_run_on_the_simulated_stick():
    runtime = devices.open_runtime("sim")
    rng = np.random.default_rng(21)
    layers = [layer(rng, n, k, rows=2, bias=bool(n % 2)) for n, k in ((10, 64), (64, 300), (331, 129))]
    for _ in range(2):
        for spec, x, w, b in layers:
            np.testing.assert_array_equal(runtime.linear(spec, x, w, b), reference(spec, x, w, b))
    assert (runtime.stats.calls, runtime.stats.uploads) == (6, 3)


def test_one_runtime_per_stick_until_it_is_closed():
    first = devices.open_runtime("sim")
    assert devices.open_runtime("sim") is first
    other = devices.open_runtime("sim", 1)
    assert other is not first
    assert devices.simulated_stick(1) is not devices.simulated_stick(0)
    spec, x, w, b = layer(np.random.default_rng(22), 64, 64)
    first.linear(spec, x, w, b)
    first.close()
    again = devices.open_runtime("sim")
    assert again is not first
    np.testing.assert_array_equal(again.linear(spec, x, w, b), reference(spec, x, w, b))
    np.testing.assert_array_equal(other.linear(spec, x, w, b), reference(spec, x, w, b))
    devices.close_all()
    assert again.closed
    assert other.closed


def test_a_replugged_stick_gets_its_parameters_again():
    """The driver boots the stick, sends everything again and repeats the call."""
    runtime = devices.open_runtime("sim")
    spec, x, w, b = layer(np.random.default_rng(23), 64, 64)
    runtime.linear(spec, x, w, b)
    devices.simulated_stick(0).plug()
    np.testing.assert_array_equal(runtime.linear(spec, x, w, b), reference(spec, x, w, b))
    counters = devices.shared_stick("sim").counters
    assert (counters.uploads, counters.retries) == (2, 1)


def test_clock(monkeypatch):
    monkeypatch.setenv("CORAL_CLOCK", "max")
    devices.open_runtime("sim")
    devices.open_runtime("sim", clock="max")
    with pytest.raises(devices.DeviceError, match="open at clock 'max'; close it before opening it at 'low'"):
        devices.open_runtime("sim", clock="low")
    with pytest.raises(DriverError, match="fast"):
        devices.open_runtime("sim", 1, clock="fast")


@pytest.mark.parametrize(
    ("kind", "index", "message"),
    [("gpu", 0, "'gpu', only 'usb' and 'sim'"), ("sim", 16, "stick 16: a process has 0..15"), ("sim", -1, "stick -1")],
)
def test_no_such_device(kind, index, message):
    with pytest.raises(devices.DeviceError, match=message):
        devices.open_runtime(kind, index)


def test_usb_uses_the_system_bus_and_real_firmware(monkeypatch, tmp_path):
    """A stick on "USB": none there; there without firmware for it."""
    monkeypatch.delenv("CORAL_FIRMWARE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("coral.driver.firmware.from_libraries", lambda: None)
    monkeypatch.setattr("coral.driver.libusb.LibusbBus", lambda: StickBus([]))
    with pytest.raises(NoStick):
        devices.open_runtime("usb")
    monkeypatch.setattr("coral.driver.libusb.LibusbBus", lambda: StickBus([SoftwareStick()]))
    with pytest.raises(NoFirmware):
        devices.open_runtime("usb")
    monkeypatch.setattr("coral.driver.libusb.LibusbBus", lambda: StickBus([SoftwareStick(firmware_required=False)]))
    runtime = devices.open_runtime("usb")
    assert devices.open_runtime("usb") is runtime


def test_nothing_of_the_simulator_is_imported_for_usb():
    code = "import sys, coral.devices; sys.exit(any(m.startswith(('coral.chip', 'coral.stick')) for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
