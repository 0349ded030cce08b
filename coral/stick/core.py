"""The simulated stick, independent of how it is attached. Source: docs/stick.md, docs/usb.md."""

from __future__ import annotations

import struct
import threading
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from coral import CoralError
from coral.stick import descriptors
from coral.stick.clock import VirtualClock
from coral.stick.dfu import DETACH, DfuMachine, boots
from coral.stick.engine import Chip, Engine
from coral.stick.errors import DeadlockViolation, Gone, NotStarted, ProtocolError, Stall, StickError
from coral.stick.faults import ENDPOINT_KINDS, Effect, Fault, FaultPlan, Kind
from coral.stick.parser import OutParser
from coral.stick.registers import ASLEEP, AWAKE, CHIP_REGISTERS, RUN_CONTROLS, STATUS_BITS, RegisterFile

if TYPE_CHECKING:
    from collections.abc import Sequence

OUT, OUTPUTS, EVENTS, INTERRUPTS = 0x01, 0x81, 0x82, 0x83
CLOCKS_HZ = {0: 500_000_000, 1: 250_000_000, 2: 125_000_000, 3: 63_000_000}
LENGTH_0_DMA = 1 << 13


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
        clock: VirtualClock | None = None,
    ) -> None:
        """``speed`` is "super" or "high"; with ``firmware_required`` False the stick is found running, as after a
        process that died; ``zero_length_packets`` ends outputs of whole packets with an empty one."""
        if speed not in descriptors.MAX_PACKET_BYTES:
            raise StickError(f"speed {speed!r}: a stick runs at {sorted(descriptors.MAX_PACKET_BYTES)}")
        if chip is None:
            from coral.chip import Chip as SimulatedChip  # costs a second; tests and fakes do without

            chip = SimulatedChip()
        self.speed, self.mode, self.reenumeration_s = speed, mode, reenumeration_s
        self.faults = fault_plan or FaultPlan()
        self.clock = clock or VirtualClock()
        self.lock = threading.RLock()
        self.log: deque[str] = deque(maxlen=4096)
        self.generation = 0
        self.engine = Engine(chip, self._report)
        self._firmware_required, self._zero_length_packets = firmware_required, zero_length_packets
        self.plug()

    # presence

    def plug(self) -> None:
        """Power-cycles the stick: whatever was wrong is gone, and so is the firmware."""
        self.generation += 1
        self.registers = RegisterFile()
        self.registers.live = {"currentPc": self._pc, "scalarCoreRunStatus": self._run_status}
        self.registers.effects = {"power": self._power, "credit": self._credit, "thermal": self._thermal}
        self.application = not self._firmware_required
        self.dfu = DfuMachine()
        self.wedged, self._detached, self._vanished = False, False, False
        self._appears_at = self.clock.now()
        self.parser = OutParser(lambda: self.engine.read_bytes, strict=self.mode is not Strictness.LENIENT)
        self._reset_chip()

    def unplug(self, back_after_s: float | None = None) -> None:
        """Takes the stick off the bus; power is lost. It comes back by itself, as a DFU device, after a time."""
        self.plug()
        self._vanished = back_after_s is None
        self._appears_at = self.clock.now() + (back_after_s or 0.0)

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
        parts = (descriptors.descriptor(kind, application=self.application, speed=self.speed) for kind in (1, 2))
        return b"".join(part or b"" for part in parts)

    def reset(self) -> bool:
        """USB port reset; True when the device has to be enumerated again."""
        if self.wedged:
            self._vanished = True
        elif self.application and not self._detached:
            self.parser.reset()
            self._packets = {endpoint: deque() for endpoint in (OUTPUTS, EVENTS, INTERRUPTS)}
            return False
        elif self.application:
            self.application, self._detached, self.dfu = False, False, DfuMachine()
        elif self.dfu.complete:
            self.application = True
            self._vanished = not boots(self.dfu.image)
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
    ) -> bytes | None:
        """One control request; bytes for IN, empty for OUT."""
        self._alive()
        payload = data_or_length if isinstance(data_or_length, int) else bytes(data_or_length)
        fault = self._fault(Kind.CONTROL)
        if self.wedged or (fault and fault.effect is Effect.TIMEOUT):
            return None
        kind = request_type & 0x60
        if kind == 0x00:
            answer = self._standard(request, value, payload)
        elif kind == 0x20 and not self.application:
            answer = self.dfu.request(request, value, payload)
        elif kind == 0x20 and request == DETACH:
            self._detached, answer = True, b""
        elif kind == 0x40 and self.application and request in (0, 1):
            answer = self._register(request, index << 16 | value, payload)
        else:
            raise Stall
        return answer[: fault.keep_bytes] if fault else answer

    def _standard(self, request: int, value: int, payload: bytes | int) -> bytes:
        if not isinstance(payload, int):
            return b""
        if request != 6:
            return {0: b"\1\0", 8: b"\1", 10: b"\0"}.get(request, b"")[:payload]
        answer = descriptors.descriptor(value >> 8, application=self.application, speed=self.speed)
        if answer is None:
            raise Stall
        return answer[:payload]

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

    def _thermal(self, old: int, new: int) -> None:
        cleared = (old & ~new) >> 28 & 3
        self.registers["omc0_dc"] = new & ~(cleared << 30)

    def _pc(self) -> int:
        return getattr(self.engine.chip, "scalar_pc", 0)

    def _run_status(self) -> int:
        return {1: 1, 2: 4}.get(self.registers["scalarCoreRunControl"], 0)

    def _reset_chip(self) -> None:
        self.registers.reset_chip()
        self.engine.reset()
        self.parser.reset()
        self._packets: dict[int, deque[bytes]] = {endpoint: deque() for endpoint in (OUTPUTS, EVENTS, INTERRUPTS)}
        self._silent: set[int] = set()
        self._stopped = False
        self._failure: CoralError | None = None

    @property
    def clock_hz(self) -> int:
        """TPU clock that the host has chosen."""
        return CLOCKS_HZ[self.registers["scu_ctrl_3"] >> 28 & 3]

    # pipes

    def bulk_out(self, endpoint: int, data: bytes | bytearray | memoryview) -> int | None:
        """One host transfer; returns the bytes taken, fewer than given for a transfer that ends short."""
        self._alive()
        if not self.application or endpoint != OUT:
            raise Stall
        if self.wedged or endpoint in self._silent:
            return None
        fault = self._fault(Kind.OUT)
        if fault and fault.effect is Effect.TIMEOUT:
            self._silent.add(endpoint)
            return None
        taken = memoryview(data)[: fault.keep_bytes] if fault else memoryview(data)
        try:
            for dma in self.parser.transfer(taken):
                self.engine.accept(dma)
        except ProtocolError as error:
            if "length 0" in str(error):
                self.registers["hib_error_status"] = self.registers["hib_first_error_status"] = LENGTH_0_DMA
            self.parser.reset()
            self._note(error)
        return len(taken)

    def bulk_in(self, endpoint: int, max_bytes: int) -> bytes | None:
        """One packet, which ends the host's transfer when it is shorter than the pipe's packet size.

        A packet longer than ``max_bytes``, the room left in the host's buffer, is lost: the attachment, which sees
        ``len(packet) > max_bytes``, reports an overflow.
        """
        self._alive()
        if not self.application or endpoint not in ENDPOINT_KINDS or endpoint == OUT:
            raise Stall
        queue = self._packets[endpoint]
        if self.wedged or endpoint in self._silent or not queue:
            return None
        fault = self._fault(ENDPOINT_KINDS[endpoint])
        if fault and fault.effect is Effect.TIMEOUT:
            self._silent.add(endpoint)
            return None
        packet = queue.popleft()
        if endpoint == OUTPUTS:
            self.engine.read_bytes += len(packet)
        return packet[: fault.keep_bytes] if fault else packet

    def interrupt(self, word: int) -> None:
        """Queues a word on endpoint 0x83: bit 0 fatal error, bit 1 + i top-level interrupt i."""
        self._packets[INTERRUPTS].append(word.to_bytes(4, "little"))

    # computing

    def work(self) -> None:
        """Runs the chip as far as it gets with what has arrived, and queues what it produced."""
        if self._stopped or self.wedged or self.registers["scalarCoreRunControl"] != 1:
            return
        try:
            halted = [unit for unit in RUN_CONTROLS if self.registers[f"{unit}RunControl"] != 1]
            if halted and not self.engine.idle:
                self._report(NotStarted(f"a program arrived, but the run control of {', '.join(halted)} is not 1"))
            self.engine.work()
        except CoralError as error:
            self._stop(error)
        self._collect()

    def _collect(self) -> None:
        chip, wanted = self.engine.chip, self.registers["descr_ep"]
        while self.engine.issued:
            tag, length, *address = self.engine.issued.popleft()
            if 1 <= tag <= 3 and wanted >> tag & 1:
                self._event(sum(address[:1]), length, tag)
        while chip.outputs:
            self._packets[OUTPUTS].extend(self._packetise(chip.outputs.popleft()))
        while chip.interrupts:
            tag = 4 + chip.interrupts.popleft()
            if wanted >> tag & 1:
                self._event(0, 0, tag)

    def _event(self, address: int, length: int, tag: int) -> None:
        self._packets[EVENTS].append(struct.pack("<QIB3x", address, length, tag))

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

    def _fault(self, kind: Kind) -> Fault | None:
        """The plan's fault for this transfer, after the effects that are the same for every kind."""
        fault = self.faults.next(kind)
        if fault and fault.effect is Effect.STALL:
            raise Stall
        if fault and fault.effect is Effect.DISCONNECT:
            self.unplug(fault.back_after_s)
            raise Gone
        return fault
