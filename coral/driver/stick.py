"""An opened stick: calls, residency of parameters, recovery. Source: docs/driver.md."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from coral.driver.bringup import CLOCK_HZ, clock_name
from coral.driver.discovery import await_stick, find, open_and_claim
from coral.driver.errors import BringUpFailed, DriverError, GivenUp, NoStick, StickGone, StickHung, TransferFailed
from coral.driver.link import Counters
from coral.driver.lock import StickLock
from coral.driver.registers import field
from coral.driver.segments import Prepared, prepare
from coral.driver.session import REPLUG, Canary, Options, Session
from coral.driver.transport import Buffer, Bus, UsbDevice
from coral.package.program import Kind, Program

STALL_TIMEOUT_S = 2.0
RECOVERY_S = 5.0
REOPENINGS = 2
RETURN_S, PAUSE_S, AFTER_RESET_S = 1.0, 0.3, 1.2
"""How long a stick that has left is waited for; pauses after a failed opening and a port reset."""
PREPARED_PROGRAMS = 64
RESIDENT_BYTES = 16 << 20
"""Twice what the chip holds: what was loaded before is forgotten, whether or not it is still there."""


def open_stick(
    bus: Bus,
    *,
    index: int | str = 0,
    clock: str | None = None,
    firmware: bytes | None = None,
    check_firmware_hash: bool = True,
    lock_dir: Path | str | None = None,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    canary: Canary | None = None,
    port_reset: bool = False,
) -> Stick:
    """Takes a stick: locks it, loads its firmware if it has none, brings the chip up.

    ``index`` counts sticks by bus and port, or is a path such as "1-2", or a serial number. ``clock`` is one of max,
    std, medium, low (by default CORAL_CLOCK, else std). ``firmware`` is needed by a stick that has just been plugged
    in; it has to be the known image unless ``check_firmware_hash`` is False. ``lock_dir``: where processes meet; by
    default a directory of the user for sticks that other processes can see, and no lock for others. A run fails when
    the stick is silent for ``stall_timeout_s`` seconds. ``canary`` is run after every recovery. ``port_reset``: whether
    a recovery may try a reset of the USB port as its last resort, which can make a stick vanish until it is replugged.

    Raises NoStick, StickBusy, PermissionDenied, NoFirmware, BadFirmware, DfuFailed, BringUpFailed, StickHung and other
    DriverErrors; nothing stays open or locked then.
    """
    options = Options(clock_name(clock), firmware, check_firmware_hash, stall_timeout_s, port_reset)
    device = find(bus, index)
    lock = StickLock(device.path, lock_dir) if bus.shared or lock_dir is not None else None
    try:
        return Stick(bus, device, options, lock, canary)
    except BaseException:
        if lock is not None:
            lock.release()
        raise


class Call:
    """A program that was started; ``result`` waits for it and may be called again."""

    def __init__(self, stick: Stick, prepared: Prepared, inputs: Mapping[str, Buffer] | None) -> None:
        """Use ``Stick.start`` or ``Stick.announce``."""
        self.prepared, self.waiting = prepared, inputs is None
        """``waiting``: for its inputs."""
        self.wires, self.inputs = prepared.wires(inputs or {}), prepared.kept(inputs or {})
        self.steps: Iterator[bool] | None = None
        self.buffers: dict[str, Buffer] = {}
        self.outputs: dict[str, bytes] | None = None
        self.error: BaseException | None = None
        self._stick = stick

    def give(self, inputs: Mapping[str, Buffer]) -> Call:
        """The inputs of an announced program, which may be changed afterwards. Raises as ``Stick.run``; GivenUp if
        another call came between, so that the program has to be started again."""
        self._stick.give(self, inputs)
        return self

    def fill(self, inputs: Mapping[str, Buffer]) -> None:
        """Use ``give``."""
        self.waiting, self.wires = False, self.prepared.wires(inputs)
        self.buffers.update((name, bytes(data)) for name, data in inputs.items())

    def result(self) -> dict[str, bytes]:
        """Padded bytes of every output layer by name; raises what ``Stick.run`` raises."""
        return self._stick.collect(self)


class Stick:
    """A stick that this process owns; made by ``open_stick``. Any thread may call; one call runs at a time.

    After a failed transfer everything under way is cancelled, the stick is re-opened, the canary is run, parameters
    that were resident are loaded again, and the call is repeated once, unless its program is not idempotent.
    """

    def __init__(
        self, bus: Bus, device: UsbDevice, options: Options, lock: StickLock | None, canary: Canary | None
    ) -> None:
        """Use ``open_stick``."""
        self.path, self.speed, self.clock, self.clock_hz = (
            device.path,
            device.speed,
            options.clock,
            CLOCK_HZ[options.clock],
        )
        self.counters = Counters()
        self.canary = canary
        self._bus, self._options, self._lock, self._time = bus, options, lock, device.clock
        self._mutex = threading.RLock()
        self._prepared: OrderedDict[Program, Prepared] = OrderedDict()
        self._resident: OrderedDict[Program, None] = OrderedDict()
        self._lost: OrderedDict[Program, None] = OrderedDict()
        self._token = 0
        self._closed = False
        self._current: Call | None = None
        self._failure: str | None = None
        self._suspect = lock is not None and lock.hung_reason is not None
        try:
            self._session = Session(bus, device, options, self.counters)
        except StickHung as error:
            raise self._hung(error) from error

    # public

    def run(self, program: Program | Prepared, inputs: Mapping[str, Buffer] | None = None) -> dict[str, bytes]:
        """Runs a program once; returns the padded bytes of every output layer by name.

        ``inputs`` has the padded bytes of every input layer. A program that is run often is best given as
        ``prepare(program)``. Raises PackageError and InputError (nothing was sent), TransferFailed and its kinds;
        errors of a simulated chip pass through as they are.
        """
        prepared = self._prepare(program)
        with self._mutex:
            return self.start(prepared, inputs).result()

    def start(self, program: Program | Prepared, inputs: Mapping[str, Buffer] | None = None) -> Call:
        """Begins to send a program and returns without waiting for it, so that it runs while the caller works on the
        results of the one before. A program that is still running is waited for first; if it has failed, its error is
        raised here too. ``inputs`` may be changed afterwards. Raises as ``run``.
        """
        prepared = self._prepare(program)
        prepared.check_inputs(inputs or {})
        call = Call(self, prepared, inputs or {})
        with self._mutex:
            self._settle()
            self._attempt(call, finish=False)
        return call

    def announce(self, program: Program | Prepared) -> Call:
        """Begins to send a program whose inputs are not known yet: its instructions go to the chip while the caller
        works, ``call.give`` sends the rest.

        Until then any other call makes the program run on zeros, and its results are dropped: what it leaves on the
        chip must not matter. Raises as ``start``; DriverError for a program that asks for its own transfers.
        """
        prepared = self._prepare(program)
        if prepared.places:
            raise DriverError(f"program {prepared.program.name!r} asks for its own transfers, it cannot be announced")
        call = Call(self, prepared, None)
        with self._mutex:
            self._settle()
            self._attempt(call, finish=False)
        return call

    def give(self, call: Call, inputs: Mapping[str, Buffer]) -> None:
        """What ``call.give`` does."""
        call.prepared.check_inputs(inputs)
        with self._mutex:
            if call is not self._current or not call.waiting:
                name = call.prepared.program.name
                raise call.error or DriverError(f"program {name!r} has its inputs, or the stick was closed")
            call.fill(inputs)
            self._current = None
            self._attempt(call, finish=False)

    def collect(self, call: Call) -> dict[str, bytes]:
        """What ``call.result()`` returns."""
        with self._mutex:
            if call.waiting:
                raise call.error or DriverError(f"program {call.prepared.program.name!r} still waits for its inputs")
            if call is self._current:
                self._settle()
        if call.error is not None:
            raise call.error
        if call.outputs is None:
            raise DriverError(f"the stick at {self.path} was closed before the program had ended")
        return call.outputs

    def ensure_cached(self, caching: Program) -> bool:
        """Runs a parameter caching program unless its parameters are on the chip; True when it had to.

        Programs are the same when their content is. A program with another token displaces all others, so programs
        that are to stay resident together need one token and disjoint parameter memory. Raises as ``run``.
        """
        if caching.kind is not Kind.PARAMETER_CACHING:
            raise DriverError(f"program {caching.name!r} is {caching.kind.name}, not a parameter caching program")
        with self._mutex:
            self._settle()
            self._ready()
            if caching.token == self._token and caching in self._resident:
                return False
            self.run(caching)
            return True

    def evict(self, caching: Program) -> None:
        """Others may have taken the place of these parameters: they are not loaded again after a recovery."""
        with self._mutex:
            self._resident.pop(caching, None)
            self._lost.pop(caching, None)

    def forget(self) -> None:
        """Every parameter is sent again before its next use."""
        with self._mutex:
            self._resident.clear()
            self._lost.clear()
            self._token = 0

    def temperature_c(self) -> float | None:
        """Degrees Celsius from the chip's sensor; None where it does not measure (docs/usb.md: never seen over USB)."""
        with self._mutex:
            self._ready()
            reading = field("omc0_dc", "data", self._session.registers.read("omc0_dc"))
            return None if reading in (0, 0x3FF) else ((662 - reading) * 250 + 550) / 1000

    def status(self) -> dict[str, int]:
        """Error and run registers of the chip by name; raises StickGone or StickHung."""
        with self._mutex:
            self._ready()
            return self._session.status()

    def close(self) -> None:
        """Stops the chip and gives the stick back; never fails, may be called twice."""
        with self._mutex:
            if self._closed:
                return
            self._closed, self._current = True, None
            self._session.close(orderly=self._failure is None)
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Stick:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # calls

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

    def _settle(self) -> None:
        """Ends the call that is under way; raises its error. One that waits for its inputs is given up."""
        call, self._current = self._current, None
        if call is None:
            return
        if not call.waiting:
            self._attempt(call, finish=True)
            return
        call.error = GivenUp(f"program {call.prepared.program.name!r}: another one was started before its inputs came")
        call.fill({name: bytes(size) for name, size in call.prepared.input_bytes.items()})
        call.waiting = True
        with suppress(DriverError):  # the stick is re-opened before the next call
            self._advance(call, finish=True)

    def _attempt(self, call: Call, *, finish: bool) -> None:
        """Brings a call to its start or to its end, with one repetition."""
        try:
            if call.steps is None:
                self._ready()
            try:
                self._advance(call, finish)
            except TransferFailed as error:
                hopeless = isinstance(error, StickHung) and not self._options.port_reset
                if hopeless or not call.prepared.idempotent:
                    raise
                self.counters.retries += 1
                call.steps = None
                try:
                    self._ready()
                except NoStick:
                    raise error from None
                self._advance(call, finish)
        except BaseException as error:
            call.error = error
            raise
        if finish:
            self._succeeded(call)
        else:
            self._current = call

    def _advance(self, call: Call, finish: bool) -> None:
        try:
            if call.steps is None:
                self._launch(call)
            elif not finish:
                next(call.steps, None)
            if finish and call.steps is not None:
                self._session.pipes.finish(call.steps)
        except BaseException as error:
            worse = self._failed(error)
            if worse is error:
                raise
            raise worse from error

    def _launch(self, call: Call) -> None:
        program = call.prepared.program
        if program.token == 0 or program.token != self._token:
            self.forget()
            self._token = program.token
        elif program.kind is not Kind.PARAMETER_CACHING:
            for lost in list(self._lost):
                self._session.run(prepare(lost), {})
                self._uploaded(lost)
        call.buffers = call.prepared.buffers(call.inputs)
        call.steps = self._session.pipes.begin(call.prepared, call.wires, call.buffers)

    def _succeeded(self, call: Call) -> None:
        call.outputs = {name: bytes(call.buffers[name]) for name in call.prepared.output_bytes}
        call.wires, call.buffers = [], {}
        self.counters.calls += 1
        if call.prepared.program.kind is Kind.PARAMETER_CACHING:
            self._uploaded(call.prepared.program)
        if self._suspect:
            self._trust()

    def _uploaded(self, caching: Program) -> None:
        self._lost.pop(caching, None)
        self._resident[caching] = None
        self._resident.move_to_end(caching)
        self.counters.uploads += 1
        while sum(len(program.parameters) for program in self._resident) > RESIDENT_BYTES:
            self._resident.popitem(last=False)

    # failure

    def _failed(self, error: BaseException) -> BaseException:
        """Notes a failed run and ends its transfers; returns the error, if possible with what the registers say."""
        self._failure, self._suspect = f"{type(error).__name__}: {error}", True
        self.counters.faults[type(error).__name__] += 1
        self._lost = OrderedDict({**self._lost, **self._resident})
        self._resident.clear()
        if self._lock is not None:
            self._lock.note_hung(self._failure)
        with suppress(Exception):  # the first error is the one to report
            self._session.pipes.abandon()
        if type(error) is not TransferFailed:
            return error
        try:
            values = ", ".join(f"{name} {value:#x}" for name, value in self._session.status().items())
        except StickHung:
            self.counters.faults["hung"] += 1
            return StickHung(f"{error}; control requests are not answered any more: {REPLUG}")
        except StickGone as gone:
            return gone
        except TransferFailed as second:
            values = str(second)
        return TransferFailed(f"{error} (registers: {values}); the stick is re-opened before the next call")

    def _trust(self) -> None:
        """The stick has computed rightly again."""
        self._suspect = False
        if self._lock is not None:
            self._lock.clear_note()

    def _ready(self) -> None:
        if self._closed:
            raise DriverError(f"the stick at {self.path} was closed; open it again")
        if self._failure is not None or (self._suspect and self.canary is not None):
            self._recover()

    def _recover(self) -> None:
        """Opens the stick again until the canary is right; raises StickHung within 5 s (a download of the firmware not
        counted), or what keeps the stick from being opened."""
        until = self._time.now() + RECOVERY_S
        error: DriverError = StickGone(f"the stick at {self.path} left the bus; plug it in again")
        with_reset = [False] * REOPENINGS + [True] * self._options.port_reset
        while with_reset:
            self._session.close(orderly=False)
            device = await_stick(self._bus, self.path, self._time, seconds=RETURN_S) or find(self._bus, self.path)
            try:
                if with_reset.pop(0):
                    device = self._reset_port(device)
                self._session = Session(self._bus, device, self._options, self.counters, until=until)
                if self.canary is not None:
                    self._session.sing(self.canary)
            except (TransferFailed, BringUpFailed) as failure:
                self.counters.faults["recovery"] += 1
                error = failure
                if isinstance(failure, StickHung):
                    with_reset = [reset for reset in with_reset if reset]
                else:
                    self._time.sleep(PAUSE_S)
                continue
            self._session.link.until = math.inf
            self.counters.recoveries += 1
            self._failure = None
            if self.canary is not None:
                self._trust()
            return
        raise error if isinstance(error, StickGone) else self._hung(error)

    def _reset_port(self, device: UsbDevice) -> UsbDevice:
        """The last resort: may clear a light wedge, or make the stick vanish."""
        self.counters.port_resets += 1
        handle = open_and_claim(device, 0, patience_s=0.0)
        with suppress(OSError):
            handle.reset()
        handle.close()
        self._time.sleep(AFTER_RESET_S)
        back = await_stick(self._bus, self.path, self._time, seconds=RETURN_S)
        if back is None:
            raise StickGone(f"the stick at {self.path} vanished in the port reset; {REPLUG}")
        return back

    def _hung(self, error: DriverError) -> StickHung:
        noted = self._lock.hung_reason if self._lock is not None else None
        before = f" (an earlier run noted: {noted})" if noted else ""
        return StickHung(f"the stick at {self.path} could not be brought back{before}: {error}; {REPLUG}")
