"""``coral devices``."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from apps.conftest import Command, OnBus
from coral import devices, driver
from coral.apps import devices as listing
from coral.apps.probes.bench import Bench
from coral.driver.errors import LibusbMissing
from coral.stick import SoftwareStick
from coral.stick.dfu import stand_in_firmware


def test_both_sticks_with_mode_speed_owner_and_trouble(run: Command, on_bus: OnBus, home: Path) -> None:
    on_bus(SoftwareStick(speed="high"), SoftwareStick(firmware_required=False))
    with_lock = driver.StickLock("1-2")
    (home / "tinycoral" / "stick-1-1.hung").write_text("TransferFailed: nothing happened\n")
    found = run("devices", "--json").json
    first = {"index": 0, "path": "1-1", "serial": None, "speed": "high", "mode": "boot", "owner_pid": None}
    second = {"index": 1, "path": "1-2", "serial": None, "speed": "super", "mode": "application"}
    second |= {"owner_pid": os.getpid()}
    assert found["usb"] == [
        first | {"trouble": "TransferFailed: nothing happened"},
        second | {"trouble": None},
    ]
    assert (found["note"], found["firmware"]["installed"]) == (None, False)
    shown = run("devices").stdout
    assert "CORAL:0  USB 1-1, high speed, boot mode, free\n" in shown
    assert f"CORAL:1  USB 1-2, super speed, application mode, in use by process {os.getpid()}\n" in shown
    assert "its last run failed: TransferFailed: nothing happened" in shown
    with_lock.release()
    assert run("devices", "--json").json["usb"][1]["owner_pid"] is None


def test_the_lock_file_of_a_dead_process_names_nobody(run: Command, on_bus: OnBus, home: Path) -> None:
    on_bus(SoftwareStick())
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for text in (f"{dead.pid}\n", "", "not a number"):
        (home / "tinycoral" / "stick-1-1.lock").write_text(text)
        assert run("devices", "--json").json["usb"][0]["owner_pid"] is None


@pytest.mark.parametrize(("process", "owner"), [(7, 4711), (0, None)])
def test_on_windows_no_signal_is_sent(
    process: int, owner: int | None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """os.kill(pid, 0) is a Ctrl-C there."""
    kernel = SimpleNamespace(OpenProcess=lambda *_: process, CloseHandle=lambda handle: 1)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal was sent"))
    (home / "tinycoral" / "stick-1-1.lock").write_text("4711\n")
    assert listing.owner("1-1") == owner


def test_sticks_are_numbered_by_path_or_serial_number(on_bus: OnBus, monkeypatch: pytest.MonkeyPatch) -> None:
    sticks = [SoftwareStick(firmware_required=False, serial=name) for name in ("", "A17", "")]
    on_bus(*sticks)
    assert [stick.path for stick in devices.sticks_on_usb()] == ["1-1", "1-2", "1-3"]
    monkeypatch.setenv("CORAL_STICKS", "A17, 1-1")
    assert [stick.path for stick in devices.sticks_on_usb()] == ["1-2", "1-1"]
    assert Bench("usb", 0).path == "1-2"
    with devices.open_stick("usb", 1) as opened:
        assert opened.path == "1-1"
    with pytest.raises(devices.DeviceError, match=r"stick 2: CORAL_STICKS names only 2 \(A17, 1-1\)"):
        devices.open_stick("usb", 2)
    monkeypatch.setenv("CORAL_STICKS", "1-9")
    assert devices.sticks_on_usb() == []
    with pytest.raises(driver.NoStick, match="no stick '1-9'; plugged in are: 0 at 1-1, 1 at 1-2"):
        devices.open_stick("usb", 0)


def test_the_serial_number_is_shown(run: Command, on_bus: OnBus) -> None:
    on_bus(SoftwareStick(serial="A17"))
    assert "CORAL:0  USB 1-1, serial A17, super speed, boot mode, free\n" in run("devices").stdout


def test_without_libusb_an_empty_list_and_the_reason(run: Command, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(kind: str, index: int = 0) -> None:
        raise LibusbMissing("no such file")

    monkeypatch.setattr(devices, "bus_of", missing)
    result = run("devices", "--json")
    assert (result.returncode, result.json["usb"]) == (0, [])
    assert "libusb-1.0 cannot be loaded (no such file). Install it with:" in result.json["note"]
    assert "libusb-1.0 cannot be loaded" in run("devices").stdout


def test_no_stick_and_the_firmware(run: Command, on_bus: OnBus, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_bus()
    shown = run("devices").stdout.splitlines()
    assert shown[0] == "no stick on USB; `coral doctor` helps"
    assert shown[2] == "firmware: not installed; `coral firmware` says how"
    wrong = home / "wrong.bin"
    wrong.write_bytes(stand_in_firmware())
    monkeypatch.setenv("CORAL_FIRMWARE", str(wrong))
    assert "is not the stick's firmware" in run("devices", "--json").json["firmware"]["problem"]
    assert "is not the stick's firmware" in run("devices").stdout


def test_the_driver_opens_what_tools_find() -> None:
    """``devices.open_stick`` and ``devices.bus_of`` speak of the same simulated sticks; wrong kinds are refused."""
    assert [device.path for device in devices.bus_of("sim", 1).devices()][:2] == ["1-1", "1-2"]
    with devices.open_stick("sim", 1, clock="max") as stick:
        assert (stick.path, stick.clock) == ("1-2", "max")
    with pytest.raises(devices.DeviceError, match="no kind of device 'nvme'"):
        devices.bus_of("nvme")  # pyright: ignore[reportArgumentType]
    with pytest.raises(devices.DeviceError, match=r"simulated stick 16: a process has 0\.\.15"):
        devices.open_stick("sim", 16)
