"""``coral stick serve``: programs that use libusb see simulated sticks, here our own commands in other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from apps.conftest import Command
from coral.stick import StickError, usbfs

CORAL = (sys.executable, "-m", "coral")


@pytest.fixture(autouse=True)
def umockdev() -> None:
    try:
        usbfs.preload_library()
    except StickError as error:
        pytest.skip(str(error))


def serve(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [*CORAL, "stick", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_another_process_lists_them(home: Path) -> None:
    found = serve("--sticks", "2", "--speed", "high", "--", *CORAL, "devices", "--json")
    assert found.returncode == 0, found.stderr
    usb = json.loads(found.stdout)["usb"]
    assert [(stick["path"], stick["speed"], stick["mode"]) for stick in usb] == [
        ("1-1", "high", "boot"),
        ("1-2", "high", "boot"),
    ]


def test_the_selftest_runs_over_the_real_libusb(home: Path) -> None:
    command = ("selftest", "--json", "--only", "registers", "--only", "canary", "--only", "comparisons")
    done = serve("--running", "--log", "--", *CORAL, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    report, log = done.stdout.split("\nstick 0: ", 1)
    found = json.loads(report)
    assert [step["status"] for step in found["steps"]] == ["ok", "ok", "ok"]
    assert (found["kind"], found["stick"]["path"], found["stick"]["running"]) == ("usb", "1-1", True)
    assert log


def test_with_the_firmware_of_a_real_stick(home: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = sorted(data.rglob("apex_latest_single_ep.bin"))
    if not images:
        pytest.skip("the stick's firmware is not among the data")
    monkeypatch.setenv("CORAL_FIRMWARE", str(images[0]))
    done = serve("--", *CORAL, "selftest", "--json", "--only", "descriptors")
    details = json.loads(done.stdout)["steps"][0]["details"]
    assert bytes.fromhex(details["boot"]["device"])[8:12] == bytes.fromhex("6e1a9a08")
    assert bytes.fromhex(details["application"]["device"])[8:12] == bytes.fromhex("d1180293")


def test_exit_codes_and_commands_that_do_not_exist(run: Command) -> None:
    assert run("stick", "serve", "--", "sh", "-c", "exit 7").returncode == 7
    result = run("stick", "serve", "--", "/nonexistent/program")
    assert (result.returncode, result.stderr) == (
        1,
        "coral: /nonexistent/program cannot be started: No such file or directory\n",
    )
    assert run("stick", "serve").returncode == 2


def test_without_umockdev_it_says_what_to_install(run: Command, no_umockdev: None) -> None:
    result = run("stick", "serve", "--", "true")
    assert (result.returncode, result.stderr) == (1, "coral: install umockdev\n")
