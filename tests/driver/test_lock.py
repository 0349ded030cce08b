"""One process per stick, also when the owner is killed; and the note that a hung stick leaves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from stick.fake_chip import execution_program

from coral import driver
from coral.driver.lock import StickLock
from coral.stick import Effect, Fault, FaultPlan, Kind, StickBus
from driver.bench import check, make_bus, open_on

HOLD = """
import sys, time
from coral.driver.lock import StickLock
lock = StickLock("1-1", sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def holder(directory: Path) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_refusal_names_the_owner_and_a_killed_owner_frees_the_stick(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        bus = make_bus()
        with pytest.raises(driver.StickBusy, match=f"used by process {process.pid} "):
            open_on(bus, lock_dir=tmp_path)
        assert bus.sticks[0].faults.seen.total() == 0, "the owner's stick is not touched"
        StickLock("1-2", tmp_path).release()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        stick = open_on(bus, lock_dir=tmp_path)
        check(stick, execution_program("A64 O64 !"))
        stick.close()
    finally:
        process.kill()
        process.wait()


def test_second_opener_in_the_same_process(tmp_path: Path) -> None:
    bus = make_bus()
    first = open_on(bus, lock_dir=tmp_path)
    with pytest.raises(driver.StickBusy, match=f"used by process {os.getpid()} "):
        open_on(bus, lock_dir=tmp_path)
    first.close()
    open_on(bus, lock_dir=tmp_path).close()


def test_failed_open_frees_the_lock(tmp_path: Path) -> None:
    bus = make_bus()
    with pytest.raises(driver.NoFirmware):
        open_on(bus, lock_dir=tmp_path, firmware=None)
    open_on(bus, lock_dir=tmp_path).close()


def _sleep() -> None:
    time.sleep(60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    lock = StickLock("1-1", tmp_path)
    child = multiprocessing.get_context("fork").Process(target=_sleep)
    child.start()
    try:
        descriptor = lock._descriptor
        assert descriptor is not None
        time.sleep(0.2)
        os.close(descriptor)  # what the kernel does when the parent dies
        lock._descriptor = None
        StickLock("1-1", tmp_path).release()
    finally:
        child.kill()
        child.join()


def test_only_shared_buses_are_locked_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    open_on(make_bus()).close()
    assert list(tmp_path.iterdir()) == []

    class Shared(StickBus):
        shared = True

    open_on(Shared(make_bus().sticks)).close()
    assert [path.name for path in tmp_path.rglob("*.lock")] == ["stick-1-1.lock"]


def test_a_folder_that_somebody_else_has_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files may be links: nothing is opened in it."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"tinycoral-{os.getuid()}"
    driver.StickLock("1-1").release()
    assert folder.is_dir()
    (folder / "stick-1-1.lock").unlink()
    (tmp_path / "mine").write_text("keep")
    (folder / "stick-1-1.lock").symlink_to(tmp_path / "mine")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    folder.rename(tmp_path / f"tinycoral-{owner + 1}")
    with pytest.raises(driver.DriverError, match=f"tinycoral-{owner + 1} belongs to another user: remove it"):
        driver.StickLock("1-1")
    monkeypatch.setattr(os, "getuid", lambda: owner)
    folder.symlink_to(tmp_path / f"tinycoral-{owner + 1}")
    with pytest.raises(driver.DriverError, match="belongs to another user"):
        driver.StickLock("1-1")
    assert (tmp_path / "mine").read_text() == "keep"


def test_unusable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(driver.DriverError, match="cannot be opened"):
        StickLock("1-1", tmp_path / "file")


def test_hung_note_outlives_its_process_and_goes_with_the_first_good_run(tmp_path: Path) -> None:
    plan = FaultPlan(Fault(Kind.OUT, 0, Effect.TIMEOUT, times=9))
    bus = make_bus(fault_plan=plan)
    stick = open_on(bus, lock_dir=tmp_path)
    with pytest.raises(driver.TransferFailed):
        check(stick, execution_program("A64 O64 !"))
    stick.close()
    (note,) = tmp_path.glob("*.hung")
    assert "nothing happened for 2 s" in note.read_text()
    bus.sticks[0].faults = FaultPlan()
    bus.sticks[0].wedged = True
    with pytest.raises(driver.StickHung, match="an earlier run noted: TransferFailed: nothing happened"):
        open_on(bus, lock_dir=tmp_path)
    bus.sticks[0].plug()
    with open_on(bus, lock_dir=tmp_path) as again:
        assert note.exists()
        check(again, execution_program("A64 O64 !"))
        assert not note.exists()
