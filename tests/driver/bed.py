"""The two test beds of the driver, with one face: sticks in this process, and sticks behind the real libusb.

Layer 1 needs umockdev's library preloaded, so its tests run in a child process that conftest.py starts (child.py).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from stick.fake_chip import FakeChip, caching_program, execution_program, output_bytes

from coral import driver
from coral.driver.transport import Bus
from coral.stick import FaultPlan, SoftwareStick, StickBus, WallClock, stand_in_firmware
from coral.stick.bus import StickHandle

RECOVERY_S = 5.0


def preloaded() -> bool:
    return "umockdev" in os.environ.get("LD_PRELOAD", "")


class Bed:
    """Sticks and a bus on which the driver finds them. ``close`` fails when something is left over."""

    layer = 0
    stall_s = 2.0
    firmware = stand_in_firmware()

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="coralbed"))
        self._opened: list[driver.Stick] = []
        self._before = self._leaks()
        self.sticks: list[SoftwareStick] = []

    def bus(self, count: int = 1, *, chip: Any = FakeChip, cut: bool = False, **options: Any) -> Bus:
        """A bus with new sticks; ``cut``: the host splits transfers to 16 KiB."""
        self.sticks = [self._stick(chip=chip(), **options) for _ in range(count)]
        return self._attach(16384 if cut else None)

    def open(self, bus: Bus | None = None, **options: Any) -> driver.Stick:
        """A driver's stick, closed with the bed."""
        settings = {
            "firmware": self.firmware,
            "check_firmware_hash": False,
            "lock_dir": self.directory,
            "stall_timeout_s": self.stall_s,
            **options,
        }
        stick = driver.open_stick(bus if bus is not None else self.bus(), **settings)
        self._opened.append(stick)
        return stick

    def start(self, *faults: Any, **options: Any) -> driver.Stick:
        """A stick of a bus of its own, with a fault plan and a canary."""
        bus = self.bus(fault_plan=FaultPlan(*faults), **options)
        return self.open(bus, canary=CANARY)

    @property
    def stick(self) -> SoftwareStick:
        return self.sticks[0]

    def now(self) -> float:
        return self.stick.clock.now()

    def sleep(self, seconds: float) -> None:
        self.stick.clock.sleep(seconds)

    def plug(self) -> None:
        """Power-cycles the stick; returns when it can be found."""
        self.stick.plug()

    def close(self) -> None:
        for stick in self._opened:
            stick.close()
        self._detach()
        deadline = time.monotonic() + 3
        while (left := self._leaks()) - self._before and time.monotonic() < deadline:
            time.sleep(0.02)
        for file in self.directory.glob("*.lock"):
            driver.StickLock(file.stem.removeprefix("stick-"), self.directory).release()
        shutil.rmtree(self.directory)
        assert not left - self._before, f"left over: {sorted(left - self._before)}"

    @staticmethod
    def _leaks() -> set[str]:
        """Threads and open files, by name."""
        names = {str(thread) for thread in threading.enumerate()}
        for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
            with suppress(OSError):
                names.add(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
        return names

    def libusb(self) -> Bus:
        return self._bus

    def _stick(self, **options: Any) -> SoftwareStick:
        return SoftwareStick(**options)

    def _attach(self, split_bytes: int | None) -> Bus:
        self._bus = RecordingBus(self.sticks, split_bytes=split_bytes)
        return self._bus

    def _detach(self) -> None:
        if self.sticks:
            assert self._bus._owners == {}, "an interface is still claimed"
            pending = [queue for handle in self._bus.handles for queue in handle.pending.values() if queue]
            assert not pending, f"transfers are under way: {pending}"


class RecordingBus(StickBus):
    """Remembers every handle, so that transfers that were left can be found."""

    def __init__(self, sticks: Any, **options: Any) -> None:
        super().__init__(sticks, **options)
        self.handles: list[StickHandle] = []

    def claim(self, handle: StickHandle) -> None:
        self.handles.append(handle)
        super().claim(handle)


class LibusbBed(Bed):
    layer = 1
    stall_s = 0.3

    def _stick(self, **options: Any) -> SoftwareStick:
        return SoftwareStick(clock=WallClock(), **options)

    def libusb(self) -> Bus:
        """What another process would search."""
        from coral.driver.libusb import LibusbBus

        return LibusbBus()

    def plug(self) -> None:
        super().plug()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            node = self.server._nodes.get(self.stick)
            if node is not None and node.generation == self.stick.generation:
                return
            time.sleep(0.01)

    def _attach(self, split_bytes: int | None) -> Bus:
        from coral.stick.usbfs import CAPABILITIES, UsbfsServer

        self._detach()
        self.server = UsbfsServer(self.sticks, capabilities=0x13 if split_bytes else CAPABILITIES)
        os.environ["UMOCKDEV_DIR"] = str(self.server.root)
        return self.libusb()

    def _detach(self) -> None:
        if hasattr(self, "server"):
            self.server.close()
            deadline = time.monotonic() + 2
            while self.server.connections and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not self.server.connections, "a device is still open"
            del self.server


WEIGHTS = b"w" * 4096
CACHING = caching_program(WEIGHTS)
PROGRAM = execution_program("A640 P64 O3000 O1024 P64 O16 !", parameters=bytes(128))
CANARY = driver.Canary(
    execution_program("A64 O64 !", token=99),
    {"in0": bytes(range(64))},
    {"out0": output_bytes(b"canary", bytes(range(64)), 0, 64)},
    caching_program(b"canary", token=99),
)
