"""When what happens on the chip in one call, predicted: times of every job, along the simulator's own dependencies.

The simulator has no clock: units run in any order their waits allow. Here every counter and queue remembers when it had
which value, so a job's time follows from the times of what it waited for. Source: docs/timing.md, section Timeline.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coral import isa, timing
from coral.apps.direct import DirectChip
from coral.apps.model import Array, OnChip
from coral.chip import Chip
from coral.chip.layout import SCALAR_NODE, TILES, UNIT_BYTES
from coral.chip.machine import DONE, Job, Machine
from coral.chip.memories import Queue
from coral.chip.scalar import SCALAR_UNITS, ScalarCore
from coral.isa import signed16
from coral.package.program import Base, DmaHint, InstructionHint, Program

PACKET_CYCLES = 4.0
"""Of 256 bytes on the ring."""
TO_CHIP, FROM_CHIP = "USB to the chip", "USB from the chip"
CORE, OUTFEED = "scalar core", "outfeed to the host"


class History:
    """When a number that only grows had reached which value: straight lines between known points."""

    def __init__(self, value: float = 0, time: float = 0.0) -> None:
        self.values, self.times = [float(value)], [time]

    def add(self, value: float, start: float, end: float) -> None:
        """It grows to ``value`` between two times."""
        last = self.times[-1]
        self.values += [self.values[-1], value]
        self.times += [max(start, last), max(end, last)]

    def when(self, value: float) -> float:
        """When it reached ``value``."""
        k = bisect_left(self.values, value)
        if k == 0:
            return self.times[0]
        if k == len(self.values):
            return self.times[-1]
        part = (value - self.values[k - 1]) / (self.values[k] - self.values[k - 1])
        return self.times[k - 1] + part * (self.times[k] - self.times[k - 1])


@dataclass
class Slice:
    """A job on a unit, in cycles from the call's begin. ``waits`` are (start, end, for what)."""

    place: int
    unit: str
    where: str
    begin: float
    end: float = 0.0
    busy: float = 0.0
    waits: list[tuple[float, float, str]] = field(default_factory=list)


@dataclass
class Timeline:
    """A call: slices of units (place 0..15 tiles, 16 scalar side) and transfers (unit, name, start, end).

    ``first_readers`` [tile, row] is the word of the instruction that first reads resident parameters in wide memory,
    NaN for rows that nothing reads and -1 for rows that hold none.
    """

    slices: list[Slice]
    transfers: list[tuple[str, str, float, float]]
    cycles: float
    clock_hz: float
    first_readers: np.ndarray

    @property
    def predicted_seconds(self) -> float:
        """The fixed cost of a call and the cycles."""
        return timing.CALL_S + self.cycles / self.clock_hz


def record(part: OnChip, values: Mapping[int, Array], clock_hz: float = timing.CLOCK_HZ) -> Timeline:
    """Runs a program of a model once, without USB, and times it; inputs by tensor number, zero points where there are
    none. Errors as ``DirectChip.run``.
    """
    machines: list[TimedMachine] = []
    transfers, arrivals = _arrivals(part.program, clock_hz)

    class Recorded(TimedMachine):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.clock_hz, self.arrivals = clock_hz, arrivals
            self.core_time = transfers[0][3]
            machines.append(self)

    target = DirectChip(Chip(replay=False))
    if part.caching is not None:
        target.ensure_cached(part.caching)
    target.chip.machine_type = Recorded
    target.run(part.program, part.packed(values))
    machine, rate = machines[-1], clock_hz / timing.FROM_CHIP_BYTES_PER_S
    outputs = [s for s in machine.slices if s.unit == OUTFEED]
    transfers += [(FROM_CHIP, s.where, s.begin, s.end) for s in outputs]
    pushed = sum(size for tag, size in target.chip.descriptors if tag == isa.Tag.OUTPUT) * rate
    pushed -= sum(s.busy for s in outputs)
    if pushed > 1:
        transfers.append((FROM_CHIP, "words pushed by the scalar core", machine.core_time, machine.core_time + pushed))
    ends = [s.end for s in machine.slices] + [machine.core_time] + [end for *_, end in transfers]
    return Timeline(machine.slices, transfers, max(ends), clock_hz, machine.first_readers)


def _arrivals(program: Program, clock_hz: float) -> tuple[list[tuple[str, str, float, float]], dict[int, History]]:
    """Transfers to the chip, one after the other, and by stream (1 activations, 0 parameters) when bytes are there."""
    transfers, time = [], 0.0
    arrivals = {0: History(), 1: History()}
    for hint in program.hints:
        if isinstance(hint, InstructionHint):
            name, size, stream = "instructions", len(program.bitstreams[hint.chunk].data), None
        elif isinstance(hint, DmaHint) and not hint.out:
            parameters = hint.base is Base.PARAMETER
            name, size, stream = hint.name or hint.base.name.lower(), hint.size, 0 if parameters else 1
        else:
            continue
        end = time + size / timing.TO_CHIP_BYTES_PER_S * clock_hz
        transfers.append((TO_CHIP, f"{name}, {size:,} bytes", time, end))
        if stream is not None:
            arrivals[stream].add(arrivals[stream].values[-1] + size, time, end)
        time = end
    return transfers, arrivals


class TimedCore(ScalarCore):
    """A scalar core that takes one cycle per instruction word or bundle. What else weighs in the budget of a program
    (steps and turns of units) takes none of its time."""

    __slots__ = ("stepping",)
    machine: TimedMachine

    def step(self) -> bool:
        self.stepping = True
        went_on = super().step()
        self.stepping = False
        return went_on

    def spend(self, bundles: int) -> None:
        super().spend(bundles)
        machine = self.machine
        if getattr(self, "stepping", False):
            start, machine.core_time = machine.core_time, machine.core_time + bundles
            machine.core_works(f"bundles at word {self.pc}", start, bundles)

    def dispatch(self, plan: Any, i: Any) -> None:
        self.machine.core_time += i.words - 1
        self.stepping = False
        super().dispatch(plan, i)


class TimedQueue(Queue):
    """A queue that tells its machine what comes and goes."""

    def __init__(self, machine: TimedMachine) -> None:
        super().__init__()
        self.machine, self.history, self.taken = machine, History(), 0

    def put(self, piece: Any) -> None:
        super().put(piece)
        self.machine.puts.append((self, self.taken + self.size))

    def take(self, count: int) -> Any:
        self.machine.takes += [(self, self.taken + 1), (self, self.taken + count)]
        self.taken += count
        return super().take(count)


class TimedMachine(Machine):
    """A machine that notes when everything happens."""

    clock_hz: float
    arrivals: dict[int, History]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.core = TimedCore(self, arguments[3])
        self.core_time = 0.0
        self.last_work: Slice | None = None
        self.slices: list[Slice] = []
        self.histories = [[History() for _ in counters] for counters in self.counters]
        self.free: dict[tuple[int, str], float] = {}
        self.fence_times = [0.0] * (TILES + 1)
        self.token_times: list[list[float]] = [[] for _ in range(TILES)]
        self.handed: dict[int, float] = {}
        self.open: dict[Job, Slice] = {}
        self.job: Job | None = None
        self.progress = 0.0
        self.consumed = {0: 0, 1: 0}
        self.bumps: list[tuple[int, int, int]] = []
        self.puts: list[tuple[TimedQueue, int]] = []
        self.takes: list[tuple[TimedQueue, int]] = []
        self.ring = {key: TimedQueue(self) for key in self.ring}
        self.mesh = {key: TimedQueue(self) for key in self.mesh}
        resident = (self.memory.wide > 0).any(axis=2)
        self.rows_read: dict[Any, Any] = {}
        self.first_readers = np.where(resident, np.nan, -1.0)

    def assign(self, place: int, ctr: int, value: int) -> None:
        if self.job is not None:
            self.bumps.append((place, ctr, value))
        else:
            if place == SCALAR_NODE and self.core.chunk is not None:
                i: Any = self.core.chunk.at(self.core.pc).instruction
                if i.wait_mask >> ctr & 1:
                    self.core_time = max(self.core_time, self._reached(place, ctr, getattr(i, f"thr{ctr}")))
            time = self.core_time if place == SCALAR_NODE else self.fence_times[place]
            self.histories[place][ctr] = History(value, time)
        super().assign(place, ctr, value)

    def dispatched(self, entry: Any) -> None:
        self.handed[id(entry)] = self.core_time

    def passed(self, place: int, fence: Any) -> None:
        if place == SCALAR_NODE:
            times = [self.core_time]
            for tile in range(TILES):
                if fence.token_wait and fence.token_tiles >> tile & 1 and self.token_times[tile]:
                    times.append(self.token_times[tile].pop(0))
            times += [self.free.get((place, n), 0.0) for k, n in enumerate(SCALAR_UNITS) if fence.idle_mask >> k & 1]
            if max(times) > self.core_time:
                start, self.core_time = self.core_time, max(times)
                waits = [(start, self.core_time, "its fence")]
                where = f"{fence.mnemonic} at word {self.core.pc}"
                self.slices.append(Slice(place, CORE, where, start, self.core_time, waits=waits))
            return
        times = [self.free.get((place, name), 0.0) for name in fence.drains]
        self.fence_times[place] = max(self.fence_times[place], self.handed[id(fence)], *times)
        if fence.token:
            self.token_times[place].append(self.fence_times[place])

    def core_works(self, where: str, start: float, cycles: float) -> None:
        """The scalar core is busy; work without a pause is one slice."""
        last = self.last_work
        if last is not None and last.end == start:
            last.end, last.busy = start + cycles, last.busy + cycles
        else:
            self.last_work = Slice(SCALAR_NODE, CORE, where, start, start + cycles, cycles)
            self.slices.append(self.last_work)

    def before(self, job: Job) -> None:
        self.job, self.progress = job, _progress(job)
        if job not in self.open:
            key = job.place, job.plan.unit
            ready = max(self.free.get(key, 0.0), self.handed.pop(id(job), 0.0), self.fence_times[job.place])
            name = OUTFEED if getattr(job.plan, "to_host", False) else job.plan.unit
            self.open[job] = Slice(job.place, name, job.plan.where, ready, ready)
        self.bumps, self.puts, self.takes = [], [], []

    def after(self, job: Job, state: int) -> None:
        self.job = None
        done, part = _progress(job), self.open[job]
        if done > self.progress or state == DONE:
            self._time(job, part, done)
        if state == DONE:
            self.free[job.place, job.plan.unit] = part.end
            self.slices.append(self.open.pop(job))

    def _time(self, job: Job, part: Slice, done: float) -> None:
        """Start and end of what the job has just done; when the counters and queues that it moved had which value."""
        first, last = [(part.end, "")], [part.end]
        for gate in _gates(job):
            for progress in (self.progress, done - 1e-9):
                block = gate.blocks.index(min(int(progress * gate.blocks.steps), gate.blocks.steps - 1))
                threshold = gate.base + gate.step * block
                last.append(self._reached(job.place, gate.ctr, threshold))
                if progress == self.progress:
                    first.append((last[-1], f"{self._counter(job.place, gate.ctr)} >= {threshold}"))
        for k, (queue, count) in enumerate(self.takes):
            last.append(queue.history.when(count))
            if k == 0:
                first.append((last[-1], "packets or words"))
        plan: Any = job.plan
        if isinstance(plan.instruction, isa.Pop):
            stream, size, steps = plan.stream, UNIT_BYTES[plan.stream], plan.nest.steps
            first.append((self.arrivals[stream].when(self.consumed[stream] + size), "bytes of the host"))
            self.consumed[stream] += round((done - self.progress) * steps) * size
            last.append(self.arrivals[stream].when(self.consumed[stream]))
        (start, reason), cycles = max(first), _cycles(job, self.clock_hz) * (done - self.progress)
        end = max(start + cycles, max(last) + min(cycles, 1.0))
        if start > part.end:
            part.waits.append((part.end, start, reason))
        part.busy, part.end = part.busy + cycles, end
        for place, ctr, value in self.bumps:
            self.histories[place][ctr].add(value, start, end)
        for queue, count in self.puts:
            queue.history.add(count, start, end)
        if not self.progress and job.place != SCALAR_NODE:
            self._note_reads(job)

    def _note_reads(self, job: Any) -> None:
        plan = job.plan
        if plan not in self.rows_read:
            rows = np.zeros(0, np.int64)
            if isinstance(plan.instruction, isa.RingSend | isa.W2n):
                rows = job.rows
            elif isinstance(plan.instruction, isa.Op) and plan.par is not None:
                rows = np.r_[plan.par.at(0) >> 2, plan.zp_rows or []].astype(np.int64)
            self.rows_read[plan] = np.unique(rows)
        seen, rows = self.first_readers[job.place], self.rows_read[plan]
        seen[rows[np.isnan(seen[rows])]] = plan.word

    def _reached(self, place: int, ctr: int, threshold: int) -> float:
        now = self.counters[place][ctr]
        return self.histories[place][ctr].when(now + signed16(threshold - now))

    def _counter(self, place: int, ctr: int) -> str:
        names: Any = isa.ScalarCounter if place == SCALAR_NODE else isa.TileCounter
        return names(ctr).name


def _progress(job: Any) -> float:
    """The part of a job that is done, 0..1."""
    plan = job.plan
    if hasattr(job, "sent"):
        return (job.sent + job.received) / max(1, plan.sends + plan.receives)
    if isinstance(plan.instruction, isa.NluLoad):
        return 0.0
    if isinstance(plan.instruction, isa.N2w):
        return job.position / plan.dst.steps
    return job.position / max(1, plan.nest.steps if hasattr(plan, "nest") else plan.dst.steps)


def _gates(job: Any) -> list[Any]:
    plan = job.plan
    return [gate for name in ("gates", "data", "space") for gate in getattr(plan, name, ())]


def _cycles(job: Any, clock_hz: float) -> float:
    """Cycles of a whole job without waiting (docs/timing.md, Timeline)."""
    plan, i = job.plan, job.plan.instruction
    match i:
        case isa.Op() | isa.OpMax() | isa.OpSum() | isa.OpResize():
            return timing.op_cycles(i)
        case isa.RingSend():
            return plan.nest.steps * PACKET_CYCLES
        case isa.RingRecv0() | isa.RingRecv1():
            return len(job.rows) * PACKET_CYCLES
        case isa.Outfeed() if plan.to_host:
            return plan.nest.steps * plan.unit_bytes / timing.FROM_CHIP_BYTES_PER_S * clock_hz
        case isa.NluLoad():
            return i.words
    if hasattr(job, "sent"):
        return max(plan.sends, plan.receives)
    return plan.nest.steps if hasattr(plan, "nest") else plan.steps
