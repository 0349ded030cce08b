"""Running commands in this process, and sticks on a bus that the commands take for USB."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from coral import devices
from coral.cli import main
from coral.driver import firmware
from coral.stick import SoftwareStick, StickBus, StickError, usbfs


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


Command = Callable[..., Result]
OnBus = Callable[..., StickBus]


def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """Exit code, output and errors of ``coral ARGUMENTS`` in this process."""
    monkeypatch.setattr(sys, "argv", ["coral", *map(str, arguments)])
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    return int(code or 0) if isinstance(code, int | None) else 1, *capsys.readouterr()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``coral ARGUMENTS`` in this process."""

    def command(*arguments: object) -> Result:
        return Result(*command_line(monkeypatch, capsys, *arguments))

    return command


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Locks, notes and firmware of nobody else."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("CORAL_FIRMWARE", raising=False)
    monkeypatch.setattr(firmware, "LIBRARY_PATTERNS", ())
    (tmp_path / "tinycoral").mkdir()
    return tmp_path


@pytest.fixture
def on_bus(monkeypatch: pytest.MonkeyPatch, home: Path) -> OnBus:
    """Puts simulated sticks where the commands search for a kind of device."""
    usual = devices.bus_of

    def put(*sticks: SoftwareStick, kind: str = "usb") -> StickBus:
        bus = StickBus(sticks)
        monkeypatch.setattr(devices, "bus_of", lambda wanted, index=0: bus if wanted == kind else usual(wanted, index))
        return bus

    return put


@pytest.fixture
def no_umockdev(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without umockdev."""

    def missing() -> str:
        raise StickError("install umockdev")

    monkeypatch.setattr(usbfs, "preload_library", missing)
