"""An opened stick: life cycle, runs, residency of parameters, recovery. Source: docs/driver.md."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from coral.driver import dfu, firmware
from coral.driver.bringup import CLOCK_HZ, bring_up, clock_name, shut_down
from coral.driver.discovery import await_application, find, identity, open_and_claim
from coral.driver.errors import (
    DFU_ID,
    DfuFailed,
    DriverError,
    NoFirmware,
    StickGone,
    StickHung,
    TransferFailed,
)
from coral.driver.link import Counters, Link
from coral.driver.lock import StickLock
from coral.driver.pipes import Pipes
from coral.driver.registers import Registers, field
from coral.driver.segments import Prepared, prepare
from coral.driver.transport import Buffer, Bus, UsbDevice
from coral.package.program import Kind, Program

PROBE_TIMEOUT_S = 0.5
STALL_TIMEOUT_S = 2.0
PREPARED_PROGRAMS = 64
REPLUG = "unplug the stick, wait a second and plug it in again"


def open_stick(
    bus: Bus,
    *,
    index: int | str = 0,
    clock: str | None = None,
    firmware: bytes | None = None,
    check_firmware_hash: bool = True,
    lock_dir: Path | str | None = None,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> Stick:
    """Takes a stick: locks it, loads its firmware if it has none, brings the chip up.

    ``index`` counts sticks by bus and port, or is a path such as "1-2". ``clock`` is one of max, std, medium, low (by
    default CORAL_CLOCK, else std). ``firmware`` is needed by a stick that has just been plugged in; it has to be the
    known image unless ``check_firmware_hash`` is False. ``lock_dir``: where processes meet; by default a directory of
    the user for sticks that other processes can see, and no lock for others. A run fails when the stick is silent for
    ``stall_timeout_s`` seconds.

    Raises NoStick, StickBusy, PermissionDenied, NoFirmware, BadFirmware, DfuFailed, BringUpFailed, StickHung and other
    DriverErrors; nothing stays open or locked then.
    """
    name = clock_name(clock)
    device = find(bus, index)
    lock = StickLock(device.path, lock_dir) if bus.shared or lock_dir is not None else None
    try:
        return Stick(bus, device, name, firmware, check_firmware_hash, lock, stall_timeout_s)
    except BaseException:
        if lock is not None:
            lock.release()
        raise


class Stick:
    """A stick that this process owns; made by ``open_stick``. Any thread may call; one call runs at a time.

    After a failed transfer everything under way is cancelled; the next call re-opens the stick first, with all
    parameters forgotten.
    """

    def __init__(
        self,
        bus: Bus,
        device: UsbDevice,
        clock: str,
        image: bytes | None,
        check_firmware_hash: bool,
        lock: StickLock | None,
        stall_timeout_s: float,
    ) -> None:
        """Use ``open_stick``."""
        self.path, self.speed, self.clock, self.clock_hz = device.path, device.speed, clock, CLOCK_HZ[clock]
        self.counters = Counters()
        self._bus, self._lock, self._stall_timeout_s = bus, lock, stall_timeout_s
        self._image, self._check_firmware_hash = image, check_firmware_hash
        self._mutex = threading.RLock()
        self._prepared: OrderedDict[Program, Prepared] = OrderedDict()
        self._resident: set[Program] = set()
        self._token = 0
        self._closed = False
        self._failure: str | None = None
        self._noted = lock is not None and lock.hung_reason is not None
        self._open(device)

    # public

    def run(self, program: Program | Prepared, inputs: Mapping[str, Buffer] | None = None) -> dict[str, bytes]:
        """Runs a program once; returns the padded bytes of every output layer by name.

        ``inputs`` has the padded bytes of every input layer. A program that is run often is best given as
        ``prepare(program)``. Raises PackageError and InputError (nothing was sent), TransferFailed and its kinds;
        errors of a simulated chip pass through as they are.
        """
        prepared = self._prepare(program)
        prepared.check_inputs(inputs or {})
        with self._mutex:
            self._ready()
            caching = prepared.program.kind is Kind.PARAMETER_CACHING
            self._follow_token(prepared.program)
            outputs = self._guarded(prepared, inputs or {})
            self.counters.calls += 1
            if caching:
                self._resident.add(prepared.program)
                self.counters.uploads += 1
            return outputs

    def ensure_cached(self, caching: Program) -> bool:
        """Runs a parameter caching program unless its parameters are on the chip; True when it had to.

        Programs are the same when their content is. A program with another token displaces all others, so programs
        that are to stay resident together need one token and disjoint parameter memory. Raises as ``run``.
        """
        if caching.kind is not Kind.PARAMETER_CACHING:
            raise DriverError(f"program {caching.name!r} is {caching.kind.name}, not a parameter caching program")
        with self._mutex:
            self._ready()
            if caching.token == self._token and caching in self._resident:
                return False
            self.run(caching)
            return True

    def forget(self) -> None:
        """Every parameter is sent again before its next use."""
        with self._mutex:
            self._resident.clear()
            self._token = 0

    def temperature_c(self) -> float | None:
        """Degrees Celsius from the chip's sensor; None where it does not measure (docs/usb.md: never seen over USB)."""
        with self._mutex:
            self._ready()
            reading = field("omc0_dc", "data", self._registers.read("omc0_dc"))
            return None if reading in (0, 0x3FF) else ((662 - reading) * 250 + 550) / 1000

    def close(self) -> None:
        """Stops the chip and gives the stick back; never fails, may be called twice."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            with suppress(Exception):  # a stick that does not answer is left as it is; the next open resets the chip
                self._pipes.abandon()
                if self._failure is None:
                    shut_down(self._registers)
            self._let_go()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Stick:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # opening

    def _open(self, device: UsbDevice) -> None:
        """Raises DriverErrors; no handle is left open then."""
        found_running = identity(device) != DFU_ID
        if not found_running:
            device = self._boot(device)
        self._handle = open_and_claim(device, 0, fresh=not found_running)
        try:
            self._link = Link(self._handle, device.clock, self.counters)
            self._registers = Registers(self._link)
            self._pipes = Pipes(self._link, self._registers, device.speed, self._stall_timeout_s)
            self._probe()
            if found_running:
                self._pipes.drain()
            bring_up(self._registers, clock=self.clock, speed=device.speed)
        except BaseException:
            self._let_go()
            raise

    def _boot(self, device: UsbDevice) -> UsbDevice:
        if self._image is None:
            raise NoFirmware(self.path)
        if self._check_firmware_hash:
            firmware.check(self._image, "the given firmware")
        handle = open_and_claim(device, 0)
        try:
            link = Link(handle, device.clock, self.counters)
            interface, block_bytes = dfu.read_interface(link)
            dfu.download(link, self._image, interface=interface, block_bytes=block_bytes)
            handle.release(interface)
            with suppress(OSError):  # the device that was reset is gone, which some systems report as an error
                handle.reset()
        finally:
            handle.close()
        running = await_application(self._bus, self.path, device.clock)
        if running is None:
            raise DfuFailed(f"the stick at {self.path} did not come back with its firmware running; {REPLUG}")
        return running

    def _probe(self) -> None:
        try:
            self._registers.read("scu_ctrl_0", timeout_s=PROBE_TIMEOUT_S)
        except StickGone:
            raise
        except TransferFailed as error:
            noted = self._lock.hung_reason if self._lock is not None else None
            before = f" (an earlier run noted: {noted})" if noted else ""
            raise StickHung(f"the stick at {self.path} does not answer{before}: {error}; {REPLUG}") from error

    def _let_go(self) -> None:
        with suppress(Exception):  # what is closed may be gone already
            self._handle.release(0)
        with suppress(Exception):
            self._handle.close()

    def _ready(self) -> None:
        if self._closed:
            raise DriverError(f"the stick at {self.path} was closed; open it again")
        if self._failure is not None:
            self._let_go()
            self._open(find(self._bus, self.path))
            self._failure = None
            self.counters.recoveries += 1

    # running

    def _prepare(self, program: Program | Prepared) -> Prepared:
        if isinstance(program, Prepared):
            return program
        with self._mutex:
            prepared = self._prepared.get(program) or prepare(program)
            if program.kind is not Kind.PARAMETER_CACHING:
                self._prepared[program] = prepared
                self._prepared.move_to_end(program)
                if len(self._prepared) > PREPARED_PROGRAMS:
                    self._prepared.popitem(last=False)
            return prepared

    def _follow_token(self, program: Program) -> None:
        if program.token == 0 or program.token != self._token:
            self.forget()
            self._token = program.token

    def _guarded(self, prepared: Prepared, inputs: Mapping[str, Buffer]) -> dict[str, bytes]:
        try:
            outputs = self._pipes.run(prepared, inputs)
        except BaseException as error:
            self._failed(error)
            if type(error) is TransferFailed:
                raise self._diagnosed(error) from error
            raise
        if self._lock is not None and self._noted:
            self._lock.clear_note()
            self._noted = False
        return outputs

    def _failed(self, error: BaseException) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        self.counters.faults[type(error).__name__] += 1
        self.forget()
        if self._lock is not None:
            self._lock.note_hung(self._failure)
            self._noted = True
        with suppress(Exception):  # the first error is the one to report
            self._pipes.abandon()

    def _diagnosed(self, error: TransferFailed) -> TransferFailed:
        """The same error with what the registers say, or StickHung when they say nothing."""
        names = ("hib_error_status", "hib_first_error_status", "scalarCoreRunStatus", "currentPc", "Error_ScalarCore")
        try:
            self._registers.read("scu_ctrl_0", timeout_s=PROBE_TIMEOUT_S)
            values = ", ".join(f"{name} {self._registers.read(name):#x}" for name in names)
        except StickGone as gone:
            return gone
        except TransferFailed:
            self.counters.faults["hung"] += 1
            return StickHung(f"{error}; control requests are not answered any more: {REPLUG}")
        return TransferFailed(f"{error} (registers: {values}); the stick is re-opened before the next call")
