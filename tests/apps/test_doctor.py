"""``coral doctor``: every check with its remedy, and the exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apps.conftest import Command, OnBus
from coral import devices, driver, install
from coral.apps import doctor
from coral.apps.doctor import Check
from coral.driver.errors import LibusbMissing
from coral.stick import Effect, Fault, FaultPlan, Kind, SoftwareStick


@pytest.fixture(autouse=True)
def free_sticks() -> None:
    """What other tests of this process left open is closed."""
    devices.close_all()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interpreters are started: registration and host code are fine."""
    monkeypatch.setattr(install, "registered", lambda: True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="[2.0, 3.0]\n", stderr=""))


def sticks(**wanted: Any) -> list[Check]:
    """Checks of the stick part with these values."""
    return [c for c in doctor.sticks() if all(getattr(c, name) == value for name, value in wanted.items())]


def test_this_machine_can_simulate(run: Command, home: Path) -> None:
    """The real thing: fresh interpreters, tinygrad, a compiler, the simulated stick."""
    result = run("doctor", "--json")
    assert result.returncode == 0, result.stdout
    assert result.json["ok"] is True
    names = [check["name"] for check in result.json["checks"]]
    assert names[:7] == ["python", "tinygrad", "registration", "clang", "host code", "simulator", "firmware"]
    assert not [check for check in result.json["checks"] if check["status"] == "fail"]


def test_what_the_simulated_stick_needs_decides_the_exit_code(
    run: Command, on_bus: OnBus, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_bus()
    assert run("doctor").returncode == 0
    monkeypatch.setattr(install, "registered", lambda: False)
    result = run("doctor")
    assert result.returncode == 1
    assert "FAIL  registration  a fresh interpreter does not find DEV=CORAL\n" in result.stdout
    assert "-m coral.install\n" in result.stdout

    def wrong() -> str:
        raise install.InstallError("tinygrad 0.13 is installed: pip install tinygrad==0.14.0")

    monkeypatch.setattr(install, "check_tinygrad", wrong)
    failed = [check for check in run("doctor", "--json").json["checks"] if check["status"] == "fail"]
    assert [(check["name"], check["simulated"]) for check in failed] == [("tinygrad", True)]
    assert "pip install tinygrad==0.14.0" in failed[0]["message"]


def test_host_code_that_does_not_run(run: Command, on_bus: OnBus, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    on_bus()
    last_words = SimpleNamespace(
        stdout="", stderr="Traceback\nHostCompilerMissing: host kernels need clang: install it\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: last_words)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    result = run("doctor")
    assert result.returncode == 1
    assert "FAIL  host code     HostCompilerMissing: host kernels need clang: install it\n" in result.stdout
    assert "WARN  clang         clang is not found" in result.stdout
    assert "-> sudo apt install clang" in result.stdout


def test_a_simulator_that_computes_wrongly(run: Command, on_bus: OnBus, quick: None) -> None:
    """One flipped byte of the output is enough; an error of the stick as well."""
    for fault in (
        Fault(Kind.IN, 0, Effect.CORRUPT, data=b"\x01"),
        Fault(Kind.INSTRUCTIONS, 0, Effect.TIMEOUT, times=9),
    ):
        on_bus(SoftwareStick(fault_plan=FaultPlan(fault)), kind="sim")
        result = run("doctor", "--json")
        assert result.returncode == 1
        (check,) = [check for check in result.json["checks"] if check["name"] == "simulator"]
        assert check["status"] == "fail"
        assert "1 wrong bytes" in check["message"] or "StickHung" in check["message"]


def test_a_good_stick(on_bus: OnBus, monkeypatch: pytest.MonkeyPatch) -> None:
    on_bus(SoftwareStick(firmware_required=False))
    checks = sticks(name="CORAL:0")
    assert [c.status for c in checks] == ["ok", "ok"]
    assert checks[0].message == "at 1-1, application mode, super speed (USB 3)"
    assert checks[1].message == "opens; temperature not readable"
    stick = SoftwareStick(firmware_required=False)
    monkeypatch.setattr(stick.registers, "reset_chip", lambda: None)
    stick.registers["omc0_dc"] = 500 << 16
    on_bus(stick)
    assert sticks(name="CORAL:0")[1].message == "opens; temperature 41.0 degrees C"


def test_no_stick_no_firmware_no_libusb(on_bus: OnBus, monkeypatch: pytest.MonkeyPatch) -> None:
    on_bus()
    (none,) = sticks(name="sticks")
    assert none.status == "warn"
    assert "Plug a Coral USB Accelerator in" in none.message
    (firmware,) = sticks(name="firmware")
    assert (firmware.status, firmware.remedy[:38]) == ("warn", "coral firmware install --from-libedget")

    def missing(kind: str, index: int = 0) -> None:
        raise LibusbMissing("no such file")

    monkeypatch.setattr(devices, "bus_of", missing)
    (libusb,) = sticks(name="libusb")
    assert libusb.status == "warn"
    assert "Install it with:" in libusb.message
    assert not sticks(name="sticks")


def test_usb_2_power_trouble_and_an_owner(on_bus: OnBus, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stick = SoftwareStick(speed="high", firmware_required=False)
    stick.port = "1-2.3"
    on_bus(stick)
    monkeypatch.setattr(doctor, "SYSFS", home)
    (home / "1-2").mkdir()
    (home / "1-2" / "bmAttributes").write_text("a0\n")
    (home / "1-2.3" / "power").mkdir(parents=True)
    (home / "1-2.3" / "power" / "control").write_text("auto\n")
    (home / "tinycoral" / "stick-1-2.3.hung").write_text("StickHung: no answer\n")
    lock = driver.StickLock("1-2.3")
    speed, supply, suspend, trouble, busy = sticks(name="CORAL:0")
    assert {c.status for c in (speed, supply, suspend, trouble, busy)} == {"warn"}
    assert "high speed (USB 2 or less)" in speed.message
    assert "USB 3 port" in speed.remedy
    assert "the hub 1-2, which has no supply of its own" in supply.message
    assert suspend.remedy == f"echo on | sudo tee {home}/1-2.3/power/control"
    assert trouble.message == "its last run failed: StickHung: no answer"
    assert (busy.message, busy.remedy) == (f"in use by process {os.getpid()}", f"wait for it, or: kill {os.getpid()}")
    lock.release()
    (home / "1-2" / "bmAttributes").write_text("e0\n")
    (home / "1-2.3" / "power" / "control").write_text("on\n")
    assert [c.status for c in sticks(name="CORAL:0")] == ["warn", "warn", "ok"]


def test_a_stick_that_does_not_open(on_bus: OnBus) -> None:
    on_bus(
        SoftwareStick(),
        SoftwareStick(firmware_required=False, fault_plan=FaultPlan(Fault(Kind.CONTROL, 0, Effect.WEDGE))),
    )
    boot, silent = (checks[-1] for checks in (sticks(name="CORAL:0"), sticks(name="CORAL:1")))
    assert (boot.status, silent.status) == ("fail", "fail")
    assert "NoFirmware" in boot.message
    assert "coral firmware install" in boot.message
    assert "StickHung" in silent.message
    assert "unplug" in silent.message
    assert not boot.simulated


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only folder of udev rules."""
    monkeypatch.setattr(doctor, "RULE_FOLDERS", (str(tmp_path / "rules"), "/nonexistent"))
    (tmp_path / "rules").mkdir()
    return tmp_path / "rules"


def test_the_udev_rule(run: Command, on_bus: OnBus, rules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_bus()
    (rules / "50-other.rules").write_text('ATTRS{idVendor}=="18d1", MODE="0666"\n')
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    (check,) = sticks(name="udev rule")
    assert (check.status, check.remedy.split(" | ")[0]) == ("warn", "coral doctor --write-udev -")
    assert "udevadm control --reload" in check.remedy
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert sticks(name="udev rule")[0].status == "ok"
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    result = run("doctor", "--write-udev", rules / "60-coral.rules")
    assert result.returncode == 0
    assert (rules / "60-coral.rules").read_text() == run("doctor", "--write-udev", "-").stdout == driver.UDEV_RULE
    assert sticks(name="udev rule")[0].message == str(rules / "60-coral.rules")
    refused = run("doctor", "--write-udev", "/nonexistent/60-coral.rules")
    assert refused.returncode == 1
    assert "/nonexistent/60-coral.rules" in refused.stderr
