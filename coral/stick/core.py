"""The simulated stick, independent of how it is attached. Source: docs/stick.md, docs/usb.md."""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Sequence
from enum import Enum

from coral import CoralError
from coral.stick import descriptors
from coral.stick.clock import Clock, VirtualClock
from coral.stick.dfu import DETACH, DfuMachine, boots
from coral.stick.engine import Chip, Engine
from coral.stick.errors import (
    Broken,
    DeadlockViolation,
    Gone,
    Later,
    NotStarted,
    ProtocolError,
    Short,
    Stall,
    StickError,
)
from coral.stick.faults import ENDPOINT_KINDS, TAG_KINDS, Effect, Fault, FaultPlan, Kind
from coral.stick.packets import InPipe
from coral.stick.parser import HEADER_BYTES, OutParser
from coral.stick.registers import ASLEEP, AWAKE, CHIP_REGISTERS, RUN_CONTROLS, STATUS_BITS, RegisterFile
from coral.stick.requests import kinds_of, standard

OUT, OUTPUTS, EVENTS, INTERRUPTS = 0x01, 0x81, 0x82, 0x83
CLOCKS_HZ = {0: 500_000_000, 1: 250_000_000, 2: 125_000_000, 3: 63_000_000}
LENGTH_0_DMA = 1 << 13
TO_CHIP_BYTES_PER_S, FROM_CHIP_BYTES_PER_S = {"super": 330e6, "high": 40e6}, {"super": 55e6, "high": 40e6}
TRANSFER_S = 65e-6
"""Per bulk transfer: makes a small cached program take the 0.28 ms that were reported of a stick."""


class Strictness(Enum):
    """What follows a mistake of the host. STRICT: a typed error for the caller. WEDGE: what hardware does, silence
    until it is replugged. LENIENT: a line in ``SoftwareStick.log``, and on."""

    STRICT = "strict"
    WEDGE = "wedge"
    LENIENT = "lenient"


class SoftwareStick:
    """One stick: boot ROM, registers, pipes and a chip.

    Requests never block and never compute: ``work`` runs the chip, and the attachment decides when. An answer of None
    means "not yet" (NAK); Stall and Gone are raised. A mistake of the host or an error of the chip leaves the chip
    stopped until its next reset; ``take_failure`` hands it out once, for attachments that can tell their caller.
    """

    def __init__(
        self,
        *,
        speed: str = "super",
        firmware_required: bool = True,
        mode: Strictness = Strictness.STRICT,
        reenumeration_s: float = 0.0,
        chip: Chip | None = None,
        fault_plan: FaultPlan | None = None,
        zero_length_packets: bool = False,
        queue_bytes: int | None = None,
        timed: bool = False,
        serial: str = "",
        clock: Clock | None = None,
    ) -> None:
        """``speed`` is "super" or "high"; with ``firmware_required`` False the stick is found running, as after a
        process that died; ``zero_length_packets`` ends outputs of whole packets with an empty one; ``queue_bytes`` is
        the most that waits per tag while the chip does not ask for it (None: no limit); with ``timed`` the clock goes
        on by what transfers and cycles take; ``serial`` is a serial number, which real sticks do not have."""
        if speed not in descriptors.MAX_PACKET_BYTES:
            raise StickError(f"speed {speed!r}: a stick runs at {sorted(descriptors.MAX_PACKET_BYTES)}")
        if chip is None:
            from coral.chip import Chip as SimulatedChip  # costs a second; tests and fakes do without

            chip = SimulatedChip()
        self.speed, self.mode, self.reenumeration_s, self.serial = speed, mode, reenumeration_s, serial
        self.faults = fault_plan or FaultPlan()
        self.clock: Clock = clock or VirtualClock()
        self.lock, self._worker = threading.RLock(), threading.Lock()
        self.log: deque[str] = deque(maxlen=4096)
        self.generation, self.port, self.suspended_until = 0, "", 0.0
        self.engine = Engine(chip, self._report, queue_bytes=queue_bytes)
        self.pipes = {
            endpoint: InPipe(ENDPOINT_KINDS[endpoint], lambda: self.faults, self.clock.now)
            for endpoint in (OUTPUTS, EVENTS, INTERRUPTS)
        }
        self._firmware_required, self._zero_length_packets, self._timed = firmware_required, zero_length_packets, timed
        self.plug()

    # presence

    def plug(self) -> None:
        """Power-cycles the stick: whatever was wrong is gone, and so is the firmware."""
        self.generation += 1
        self.registers = RegisterFile()
        self.registers.live["currentPc"] = lambda: getattr(self.engine.chip, "scalar_pc", 0)
        self.registers.effects |= {"power": self._power, "credit": self._credit}
        self.application = not self._firmware_required
        self.dfu = DfuMachine()
        self.wedged, self._detached, self._vanished = False, False, False
        self._halted: set[int] = set()
        self._appears_at = self.clock.now()
        self.parser = OutParser(lambda: self.engine.read_bytes, strict=self.mode is not Strictness.LENIENT)
        self._reset_chip()
        for pipe in self.pipes.values():
            pipe.reset(pipe_only=True)

    def unplug(self, back_after_s: float | None = None, *, running: bool = False, port: str = "") -> None:
        """Takes the stick off the bus. It comes back by itself after a time, at another address and perhaps another
        ``port`` ("bus-port"): as a DFU device, because power is lost, or still ``running``, with its chip reset."""
        self.plug()
        self.application = running
        self.port = port or self.port
        self._vanished = back_after_s is None
        self._appears_at = self.clock.now() + (back_after_s or 0.0)

    def claim(self) -> None:
        """A host claims the interface; raises Stall when the fault plan has it busy, Gone."""
        self._alive()
        self._strike(self.faults.next(Kind.CLAIM))

    def clear_halt(self, endpoint: int) -> None:
        """The host makes a stalled pipe usable again; raises Gone."""
        self._alive()
        self._halted.discard(endpoint)

    def next_alarm(self) -> float | None:
        """When something happens by itself next: the stick appears, wakes, or a late packet comes."""
        times = [self._appears_at, self.suspended_until, *(pipe.due or 0.0 for pipe in self.pipes.values())]
        return min((moment for moment in times if moment > self.clock.now()), default=None)

    @property
    def present(self) -> bool:
        """Whether the stick can be seen on the bus now."""
        return not self._vanished and self.clock.now() >= self._appears_at

    @property
    def identity(self) -> tuple[int, int]:
        """(vendor, product) of the present personality."""
        return descriptors.APPLICATION_ID if self.application else descriptors.DFU_ID

    def descriptors(self) -> bytes:
        """Device descriptor followed by the configuration, as sysfs shows them."""
        return b"".join(standard(6, kind << 8, 512, self.application, self.speed, self.serial) for kind in (1, 2))

    def reset(self) -> bool:
        """USB port reset; True when the device has to be enumerated again."""
        fault = self.faults.next(Kind.RESET)
        if fault and fault.effect is Effect.TIMEOUT:
            return False
        if fault:
            self.unplug(fault.seconds, running=fault.running, port=fault.port)
            return True
        if self.wedged:
            self._vanished = True
        elif self.application and not self._detached:
            self.parser.reset()
            self._halted.clear()
            for pipe in self.pipes.values():
                pipe.reset(pipe_only=True)
            return False
        elif self.application:
            self.application, self._detached, self.dfu = False, False, DfuMachine()
        elif self.dfu.complete:
            self.application = True
            self._vanished = not boots(self.dfu.image)
            if self._vanished:
                self.log.append(f"firmware of {len(self.dfu.image)} bytes that this stick does not know: it stays away")
        else:
            self.dfu = DfuMachine()
            return False
        self.generation += 1
        self._appears_at = self.clock.now() + self.reenumeration_s
        return True

    # endpoint 0

    def control(
        self,
        request_type: int,
        request: int,
        value: int,
        index: int,
        data_or_length: bytes | bytearray | memoryview | int,
        *,
        first: bool = True,
    ) -> bytes | None:
        """One control request; bytes for IN, empty for OUT. A request that was answered with ``Later`` is offered
        again with ``first`` False."""
        self._alive()
        payload = data_or_length if isinstance(data_or_length, int) else bytes(data_or_length)
        fault = self.faults.next(*kinds_of(request_type, request)) if first else None
        after = bool(fault and fault.effect is Effect.DISCONNECT and fault.size)
        if not after:
            self._strike(fault)
        if self.wedged or (fault and fault.effect is Effect.TIMEOUT):
            return None
        if fault and isinstance(payload, bytes):
            payload = fault.spoil(payload)
        kind = request_type & 0x60
        if kind == 0x00:
            answer = standard(request, value, payload, self.application, self.speed, self.serial)
        elif kind == 0x20 and not self.application:
            answer = self.dfu.request(request, value, payload)
        elif kind == 0x20 and request == DETACH:
            self._detached, answer = True, b""
        elif kind == 0x40 and self.application and request in (0, 1):
            answer = self._register(request, index << 16 | value, payload)
        else:
            raise Stall
        if after:
            self._strike(fault)
        return fault.spoil(answer) if fault and request_type & 0x80 else answer

    def _register(self, request: int, offset: int, payload: bytes | int) -> bytes:
        bits, known = (32 if request else 64), (64 if offset >= CHIP_REGISTERS else 32)
        if bits != known:
            self.log.append(f"{bits}-bit request for the {known}-bit register at {offset:#x}")
        if isinstance(payload, int):
            return self.registers.read(offset, bits).to_bytes(8, "little")[: bits // 8][:payload]
        if len(payload) != bits // 8:
            raise Stall
        self.registers.write(offset, bits, int.from_bytes(payload, "little"))
        return b""

    # register effects

    def _power(self, old: int, new: int) -> None:
        sleep_before, sleep_now = old >> 22 & 3, new >> 22 & 3
        if sleep_now == 3 and sleep_before != 3:
            self._reset_chip()
        status = {3: ASLEEP, 2: AWAKE}.get(sleep_now, new & STATUS_BITS)
        self.registers["scu_ctrl_3"] = new & ~STATUS_BITS | status

    def _credit(self, old: int, new: int) -> None:
        if old == 0xF and new == 0:
            self.parser.reset()
            self.engine.drop()

    def _reset_chip(self) -> None:
        self.registers.reset_chip()
        self.engine.reset()
        self.parser.reset()
        for pipe in self.pipes.values():
            pipe.reset()
        self._out_silent = False
        self._stopped = False
        self._failure: CoralError | None = None

    @property
    def clock_hz(self) -> int:
        """TPU clock that the host has chosen."""
        return CLOCKS_HZ[self.registers["scu_ctrl_3"] >> 28 & 3]

    # pipes

    def bulk_out(self, endpoint: int, data: bytes | bytearray | memoryview, *, first: bool = True) -> int:
        """Bytes taken of a host transfer, 0 for none yet; the rest is offered again with ``first`` False. Raises Short
        for a transfer that ends with fewer."""
        self._alive()
        if not self.application or endpoint != OUT or endpoint in self._halted:
            raise Stall
        if self.wedged or self._out_silent:
            return 0
        view = memoryview(data).cast("B")
        fault = None
        if first:
            self.parser.start()
            tag = self.parser.tag if self.parser.tag is not None else view[4] & 0xF if len(view) > 4 else 0
            fault = self.faults.next(Kind.OUT, *([TAG_KINDS[tag]] if tag in TAG_KINDS else []))
        if fault is None:
            return self._take(view)
        # what follows a broken transfer would be taken for a part of its DMA: the pipe is silent until the chip's reset
        self._out_silent = fault.effect in (Effect.TIMEOUT, Effect.SHORT, Effect.ERROR)
        if fault.effect in (Effect.DISCONNECT, Effect.TIMEOUT, Effect.SHORT):
            part = view[: fault.size]
            taken = self._take(part) if len(part) >= HEADER_BYTES or self.parser.tag is not None else len(part)
            if fault.effect is Effect.SHORT:
                raise Short(taken)
            if fault.effect is Effect.DISCONNECT:
                self._leave(fault)
                if taken < len(view):
                    raise Gone
            return taken
        self._halt(endpoint, fault)
        self._strike(fault)
        return 0 if self.wedged else self._take(memoryview(fault.spoil(bytes(view))))

    def _take(self, view: memoryview) -> int:
        taken = 0
        try:
            while taken < len(view):
                tag, end = self.parser.tag, len(view)
                if tag is not None:
                    running = self.registers["scalarCoreRunControl"] == 1
                    room = self.engine.room(tag, self.parser.collected_bytes, running=running)
                    end = end if room is None else min(end, taken + room)
                    if end == taken:
                        break
                count, dma = self.parser.take(view[taken:end])
                taken += count
                if dma is not None:
                    self.engine.accept(dma)
        except ProtocolError as error:
            if "length 0" in str(error):
                self.registers["hib_error_status"] = self.registers["hib_first_error_status"] = LENGTH_0_DMA
            self.parser.reset()
            self._note(error)
            taken = len(view)
        if self._timed:
            self.clock.sleep(TRANSFER_S + taken / TO_CHIP_BYTES_PER_S[self.speed])
        return taken

    def bulk_in(self, endpoint: int, max_bytes: int) -> bytes | None:
        """One packet, which ends the host's transfer when it is shorter than the pipe's packet size.

        A packet longer than ``max_bytes``, the room left in the host's buffer, is lost: the attachment, which sees
        ``len(packet) > max_bytes``, reports an overflow.
        """
        self._alive()
        if not self.application or endpoint not in self.pipes or endpoint in self._halted:
            raise Stall
        pipe = self.pipes[endpoint]
        packet = None if self.wedged else pipe.head
        if packet is None:
            return None
        fault, packet.fault = packet.fault, None
        after = bool(fault and fault.effect is Effect.DISCONNECT and fault.size)
        if fault and fault.effect in (Effect.TIMEOUT, Effect.STALE):
            pipe.silent, pipe.keeps = True, fault.effect is Effect.STALE
        elif not after:
            self._halt(endpoint, fault)
            self._strike(fault)
        if pipe.silent or self.wedged:
            return None
        pipe.pop()
        if endpoint == OUTPUTS:
            self.engine.read_bytes += packet.counts
        if self._timed:
            self.clock.sleep(len(packet.data) / FROM_CHIP_BYTES_PER_S[self.speed])
        if fault is not None and after:
            self._leave(fault)
        return packet.data

    def interrupt(self, word: int) -> None:
        """Queues a word on endpoint 0x83: bit 0 fatal error, bit 1 + i top-level interrupt i."""
        self.pipes[INTERRUPTS].put(word.to_bytes(4, "little"))

    # computing

    def work(self) -> bool:
        """Runs the chip as far as it gets with what has arrived, and queues what it produced; True when it ran.

        The chip computes outside ``lock``: requests are answered meanwhile.
        """
        if not self._worker.acquire(blocking=False):
            return False
        try:
            moved = False
            while self._turn():
                moved = True
            return moved
        finally:
            self._worker.release()

    def _turn(self) -> bool:
        engine = self.engine
        with self.lock:
            if self._stopped or self.wedged or self.registers["scalarCoreRunControl"] != 1:
                return False
            era = engine.era
            try:
                halted = [unit for unit in RUN_CONTROLS if self.registers[f"{unit}RunControl"] != 1]
                if halted and not engine.idle:
                    self._report(NotStarted(f"a program arrived, but the run control of {', '.join(halted)} is not 1"))
                orders = engine.begin()
            except CoralError as error:
                self._stop(error)
                return False
        if not orders:
            return False
        failure = None
        try:
            engine.compute(orders)
        except CoralError as error:
            failure = error
        finally:
            with self.lock:
                if engine.end(era):
                    if failure is not None:
                        self._stop(failure)
                    if self._timed and engine.finished:
                        self.clock.sleep(getattr(engine.chip, "cycles", 0) / self.clock_hz)
                    self._collect()
        return True

    def _collect(self) -> None:
        chip, wanted = self.engine.chip, self.registers["descr_ep"]
        while self.engine.issued:
            tag, length, *address = self.engine.issued.popleft()
            if 1 <= tag <= 3 and wanted >> tag & 1:
                self._event(sum(address[:1]), length, tag)
        while chip.outputs:
            for packet in self._packetise(chip.outputs.popleft()):
                self.pipes[OUTPUTS].put(packet)
        while chip.interrupts:
            tag = 4 + chip.interrupts.popleft()
            if wanted >> tag & 1:
                self._event(0, 0, tag)

    def _event(self, address: int, length: int, tag: int) -> None:
        self.pipes[EVENTS].put(struct.pack("<QIB3x", address, length, tag))

    def _packetise(self, output: bytes) -> Sequence[bytes]:
        whole = descriptors.MAX_PACKET_BYTES[self.speed]
        size = min(8 * self.registers["outfeed_chunk_length"], whole) or whole
        packets = [output[start : start + size] for start in range(0, len(output), size)]
        if self._zero_length_packets and len(output) % whole == 0:
            packets.append(b"")
        return packets

    # mistakes

    def take_failure(self) -> CoralError | None:
        """The error that stopped the chip, once; None in WEDGE mode, where a host has to find out by itself."""
        failure, self._failure = self._failure, None
        return None if self.mode is Strictness.WEDGE else failure

    def _stop(self, error: CoralError) -> None:
        self.log.append(f"{type(error).__name__}: {error}")
        self._failure, self._stopped = error, True
        if self.mode is Strictness.WEDGE and isinstance(error, DeadlockViolation | ProtocolError):
            self.wedged = True

    def _report(self, error: StickError) -> None:
        if self.mode is not Strictness.LENIENT:
            raise error
        self.log.append(f"{type(error).__name__}: {error}")

    def _note(self, error: StickError) -> None:
        try:
            self._report(error)
        except StickError:
            self._stop(error)

    def _alive(self) -> None:
        if not self.present:
            raise Gone

    def _strike(self, fault: Fault | None) -> None:
        """The effects that are the same for every kind of transfer."""
        if fault is None:
            return
        match fault.effect:
            case Effect.STALL:
                raise Stall
            case Effect.ERROR:
                raise Broken
            case Effect.DELAY:
                raise Later(fault.seconds or 0.0)
            case Effect.DISCONNECT:
                self._leave(fault)
                raise Gone
            case Effect.SUSPEND:
                self.suspended_until = self.clock.now() + (fault.seconds or 0.0)
                raise Broken
            case Effect.WEDGE:
                self.wedged = True
            case Effect.FATAL:
                self.registers["hib_error_status"] = self.registers["hib_first_error_status"] = fault.size
                self.registers["fatal_err_int_status"] = 1
                self._stopped = True
                self.interrupt(1)

    def _halt(self, endpoint: int, fault: Fault | None) -> None:
        """A stalled data pipe refuses everything until the host clears it."""
        if fault is not None and fault.effect is Effect.STALL:
            self._halted.add(endpoint)

    def _leave(self, fault: Fault) -> None:
        self.unplug(fault.seconds, running=fault.running, port=fault.port)
