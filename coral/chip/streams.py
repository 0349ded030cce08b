"""The scalar side's data movers: pop, infeed, outfeed, and the host's DMAs.

Source: docs/chip.md, section Units.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from coral import isa
from coral.chip.errors import RuleViolation
from coral.chip.layout import LEVEL_HOST, ROW_BYTES, ROW_WORDS, SCALAR_NODE, SCALAR_WORDS, STAGING_UNITS, UNIT_BYTES
from coral.chip.machine import BLOCKED, DONE, MORE, Job, Machine
from coral.chip.memories import Ids
from coral.chip.movers import announce
from coral.chip.plans import Plan, done
from coral.chip.recording import Arrival, Recording
from coral.chip.walks import gates

if TYPE_CHECKING:
    from coral.chip.memories import Values

PARAMETERS, ACTIVATIONS, SCALAR_MEMORY = 0, 1, 2
STREAM_OF_TAG = {isa.Tag.INPUT: ACTIVATIONS, isa.Tag.PARAMETERS: PARAMETERS}
POP_COUNTERS = (isa.ScalarCounter.PARAMETER_POP, isa.ScalarCounter.AVDATA_POP)
INFEED_COUNTERS = (isa.ScalarCounter.PARAMETER_INFEED, isa.ScalarCounter.AVDATA_INFEED, isa.ScalarCounter.SCALAR_INFEED)


class Host:
    """What the host sends and receives: streams by descriptor, output DMAs and interrupts in order."""

    def __init__(self, values: Values, recording: Recording) -> None:
        self.values, self.recording = values, recording
        self.fed: dict[int, deque[bytes]] = {isa.Tag.INPUT: deque(), isa.Tag.PARAMETERS: deque()}
        self.wanted: dict[int, deque[int]] = {isa.Tag.INPUT: deque(), isa.Tag.PARAMETERS: deque()}
        self.stream: dict[int, list[Ids]] = {ACTIVATIONS: [], PARAMETERS: []}
        self.leaving: deque[tuple[int, int]] = deque()
        self.out: list[Ids] = []
        self.out_size = 0
        self.descriptors: list[tuple[int, int]] = []
        self.addresses: list[int] = []
        self.delivered: list[Ids | int] = []

    def issue(self, low: int, high: int, length: int, tag: int, where: str) -> None:
        """The scalar core issues a descriptor."""
        self.descriptors.append((tag, length))
        self.addresses.append(high << 32 | low)
        if tag in self.wanted:
            self.wanted[tag].append(length)
        elif tag == isa.Tag.OUTPUT or isa.Tag.INTERRUPT0 <= tag <= isa.Tag.INTERRUPT0 + 3:
            self.leaving.append((tag, length))
            self.deliver()
        else:
            raise RuleViolation(f"{where}: a host DMA descriptor with tag {tag}, known are 1 to 7")

    def fetch(self, tag: int) -> bool:
        """Move the next fed DMA, if a descriptor asks for it, into its stream."""
        if not self.wanted[tag] or not self.fed[tag]:
            return False
        length, data = self.wanted[tag].popleft(), self.fed[tag].popleft()
        if len(data) != length:
            raise RuleViolation(
                f"the host sent {len(data)} bytes with tag {tag}, the program's descriptor asks for {length}"
            )
        base = self.values.make(length, LEVEL_HOST)
        self.values.data[base : base + length] = np.frombuffer(data, np.uint8)
        self.recording.actions.append(Arrival(tag, base, length))
        self.stream[STREAM_OF_TAG[isa.Tag(tag)]].append(np.arange(base, base + length, dtype=np.int32))
        return True

    def take(self, stream: int, units: int) -> Ids:
        """Up to ``units`` units of a stream, ``[n, unit bytes]`` identifiers."""
        size = UNIT_BYTES[stream]
        tag = next(t for t, s in STREAM_OF_TAG.items() if s == stream)
        pieces = self.stream[stream]
        while sum(map(len, pieces)) < units * size and self.fetch(tag):
            pass
        if not pieces:
            return np.zeros((0, size), np.int32)
        whole = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
        count = min(units, len(whole) // size)
        self.stream[stream] = [whole[count * size :]] if len(whole) > count * size else []
        return whole[: count * size].reshape(count, size)

    def push(self, ids: Ids) -> None:
        """Bytes on their way to the host."""
        self.out.append(ids)
        self.out_size += len(ids)
        self.deliver()

    def deliver(self) -> None:
        """Complete output DMAs and interrupts, in the order of their descriptors."""
        while self.leaving:
            tag, length = self.leaving[0]
            if tag != isa.Tag.OUTPUT:
                self.delivered.append(tag - isa.Tag.INTERRUPT0)
            elif self.out_size >= length:
                whole = np.concatenate(self.out) if self.out else np.zeros(0, np.int32)
                self.delivered.append(whole[:length])
                self.out, self.out_size = [whole[length:]], self.out_size - length
            else:
                return
            self.leaving.popleft()

    def left(self) -> list[tuple[str, int]]:
        """Bytes that came from the host or are on their way to it and that nothing took, by stream."""
        names = {ACTIVATIONS: "of activations", PARAMETERS: "of parameters"}
        found = [(names[s], sum(map(len, pieces))) for s, pieces in self.stream.items()]
        return [*found, ("to the host", self.out_size)]

    def missing(self) -> tuple[int, int] | None:
        """(tag, bytes) of a descriptor that waits for the host."""
        for tag, lengths in self.wanted.items():
            if lengths and not self.fed[tag]:
                return int(tag), lengths[0]
        return None


class PopJob(Job):
    """Takes units of a host stream into the staging buffer."""

    plan: Pop

    def advance(self) -> int:
        plan, machine = self.plan, self.machine
        while self.position < plan.nest.steps:
            start = self.position
            limit = min(self.limit(plan.gates, start), plan.nest.steps)
            if limit == start:
                return BLOCKED
            units = machine.host.take(plan.stream, self.trim(start, limit) - start)
            if not len(units):
                self.waiting.append(f"bytes of host stream {('parameters', 'activations')[plan.stream]}")
                machine.starving.add(self.unit)
                return BLOCKED
            end = start + len(units)
            machine.memory.staging[plan.stream][plan.units[start:end]] = units
            self.position = end
            machine.bump(SCALAR_NODE, POP_COUNTERS[plan.stream], done(plan.popped, start, end))
            if machine.rng is not None and end < plan.nest.steps:
                return MORE
        return DONE


class Pop(Plan):
    """Plan of 0x25."""

    job_class = PopJob

    def __init__(self, instruction: Any, word: int) -> None:
        super().__init__(instruction, word)
        self.stream = instruction.stream
        self.unit = ("parameter_pop", "activation_pop")[self.stream]
        self.nest = self.walk("buf")
        self.units = self.nest.within(STAGING_UNITS[self.stream], "staging units").at(0)
        self.gates = gates(instruction, (self.nest,))
        self.popped = self.signal("sig_pop", self.nest)


class InfeedJob(Job):
    """Sends staging units or words of scalar memory as ring packets."""

    plan: Infeed

    def __init__(self, machine: Machine, plan: Plan, place: int) -> None:
        super().__init__(machine, plan, place)
        self.rest: Ids = np.zeros(0, np.int32)

    def advance(self) -> int:
        plan, machine = self.plan, self.machine
        while self.position < plan.nest.steps:
            start = self.position
            limit = min(self.limit(plan.gates, start), plan.nest.steps)
            if limit == start:
                return BLOCKED
            end = self.trim(start, limit)
            units = plan.units[start:end]
            if plan.stream == SCALAR_MEMORY:
                ids = machine.scalar_memory.read(units)
            else:
                ids = machine.memory.staging[plan.stream][units]
            self.gather(ids.reshape(-1), end == plan.nest.steps)
            self.position = end
            machine.bump(SCALAR_NODE, INFEED_COUNTERS[plan.stream], done(plan.fed, start, end))
            if plan.stream == SCALAR_MEMORY:
                announce(machine, 0, plan.packets_used(end) - plan.packets_used(start))
            if machine.rng is not None and end < plan.nest.steps:
                return MORE
        return DONE

    def gather(self, ids: Ids, last: bool) -> None:
        """Cut the bytes read so far into packets and send the complete ones, at the end also a short one."""
        plan = self.plan
        self.rest = np.concatenate((self.rest, ids)) if len(self.rest) else ids
        size = plan.packet_bytes
        count = -(-len(self.rest) // size) if last else len(self.rest) // size
        packets = np.zeros((count, ROW_BYTES), np.int32)
        whole = np.zeros(count * size, np.int32)
        part = self.rest[: count * size]
        whole[: len(part)] = part
        packets[:, :size] = whole.reshape(count, size)
        self.rest = self.rest[count * size :]
        if plan.stream == PARAMETERS and size < ROW_BYTES:
            self.machine.small.update(packets[:, 0].tolist())
        if count:
            self.machine.send(plan.dest_mask, 0, packets, self.where)


class Infeed(Plan):
    """Plan of 0x26."""

    job_class = InfeedJob

    def __init__(self, instruction: Any, word: int) -> None:
        super().__init__(instruction, word)
        self.stream = self.field_is("stream", PARAMETERS, ACTIVATIONS, SCALAR_MEMORY)
        self.field_is("hdr_on", 1)
        self.field_is("smem_308", 3 if self.stream == SCALAR_MEMORY else 0)
        self.nest = self.walk("buf")
        if self.stream == SCALAR_MEMORY:
            self.units = self.nest.within(SCALAR_WORDS, "scalar memory words").at(0)
        else:
            self.units = self.nest.at(0) % STAGING_UNITS[self.stream]
        self.gates = gates(instruction, (self.nest,))
        self.fed = self.signal("sig_infeed", self.nest)
        self.dest_mask = instruction.dest_mask
        self.require(self.dest_mask != 0, "dest_mask = 0, the ring packets go to nobody")
        self.packet_bytes = 4 * (instruction.lane_words + 1) * (instruction.lanes + 1)

    def packets_used(self, words: int) -> int:
        """256-byte pieces of a relay that are free again after ``words`` words."""
        return -(-words // ROW_WORDS) if words == self.nest.steps else words // ROW_WORDS


class OutfeedJob(Job):
    """Takes ring packets to the host or to scalar memory; what is left of the last packet is dropped."""

    plan: Outfeed

    def __init__(self, machine: Machine, plan: Plan, place: int) -> None:
        super().__init__(machine, plan, place)
        self.rest: Ids = np.zeros((0, 4), np.int32)

    def advance(self) -> int:
        plan, machine = self.plan, self.machine
        queue = machine.ring[SCALAR_NODE, 0]
        while self.position < plan.nest.steps:
            start = self.position
            limit = min(self.limit(plan.gates, start), plan.nest.steps)
            if limit == start:
                return BLOCKED
            if not len(self.rest):
                if not queue.size:
                    self.waiting.append("ring packets for the scalar core")
                    return BLOCKED
                self.rest = queue.take(1).reshape(-1, plan.unit_bytes)
            end = min(limit, start + len(self.rest))
            data, self.rest = self.rest[: end - start], self.rest[end - start :]
            if plan.to_host:
                machine.host.push(data.reshape(-1))
            else:
                machine.scalar_memory.write(plan.targets[start:end], data)
            self.position = end
            machine.bump(SCALAR_NODE, isa.ScalarCounter.RING_OUTFEED, done(plan.taken, start, end))
        return DONE


class Outfeed(Plan):
    """Plan of 0x27."""

    job_class = OutfeedJob

    def __init__(self, instruction: Any, word: int) -> None:
        super().__init__(instruction, word)
        self.to_host = instruction.to_host
        self.field_is("pkt_words", ROW_WORDS - 1)
        self.unit_bytes = 8 if self.to_host else 4
        self.nest = self.walk("dst")
        self.gates = gates(instruction, (self.nest,))
        self.taken = self.signal("sig_outfeed", self.nest)
        if not self.to_host:
            self.nest.within(SCALAR_WORDS, "scalar memory words")
        self.targets = self.nest.at(0)
