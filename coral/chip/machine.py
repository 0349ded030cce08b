"""The machinery under the units: counters, jobs, and who runs next.

Units are cooperating processes with an in-order queue of jobs each. A job runs as far as its wait records allow, then
says which counter it waits for; raising that counter wakes it. Ring consumers are lazy: they take packets only when
nothing else on the chip can move. Source: docs/chip.md, section Scheduling.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from coral import isa
from coral.chip.blas import one_thread
from coral.chip.errors import Hazard, RuleViolation
from coral.chip.layout import (
    MAX_WALK_STEPS,
    SCALAR_COUNTERS,
    SCALAR_NODE,
    TILE_COUNTERS,
    TILES,
)
from coral.chip.memories import Ids, Memory, Queue, ScalingStore, Values
from coral.chip.recording import Compute, Recording
from coral.chip.trace import Trace
from coral.chip.walks import Addresses, Gate, Index
from coral.isa import signed16

if TYPE_CHECKING:
    from coral.chip.plans import Plan

BLOCKED, MORE, DONE = range(3)
MESH_UNITS = ("mesh_south", "mesh_west", "mesh_north", "mesh_east")


class Job:
    """One instruction on one tile (or on the scalar side), as far as it has come."""

    __slots__ = ("machine", "place", "plan", "position", "unit", "waiting")

    def __init__(self, machine: Machine, plan: Plan, place: int) -> None:
        self.machine, self.plan, self.place = machine, plan, place
        self.position = 0
        self.waiting: list[tuple[int, int] | str] = []

    def begin(self) -> None:
        """The unit starts with this job: fix the slots that its double-buffered walks begin with."""

    def slot(self, name: str, walk: Addresses) -> Index:
        """Addresses of a walk, beginning in the slot where the unit's last such walk ended."""
        return walk.at(self.phase(name, walk.toggles))

    def phase(self, name: str, toggles: int) -> int:
        """The slot to begin with, while the next job will begin ``toggles`` slots further."""
        phases = self.machine.phases[self.place]
        key = (self.unit.name, name)
        phase = phases.get(key, 0)
        phases[key] = phase ^ toggles
        return phase

    def advance(self) -> int:
        """Go on as far as the waits allow: BLOCKED, MORE (could go on, others first) or DONE."""
        raise NotImplementedError

    @property
    def where(self) -> str:
        """Instruction and tile, for messages."""
        return self.plan.where if self.place == SCALAR_NODE else f"{self.plan.where} on tile {self.place}"

    def limit(self, gates: Iterable[Gate], position: int) -> int:
        """Steps that the gates allow, starting from ``position``; registers the wait if that is none."""
        values = self.machine.counters[self.place]
        allowed = MAX_WALK_STEPS
        for gate in gates:
            limit, threshold = gate.limit(position, values[gate.ctr])
            if limit < allowed:
                allowed = limit
            if limit <= position:
                self.wait(gate.ctr, threshold)
        return allowed

    def wait(self, ctr: int, threshold: int) -> None:
        """Wake this job's unit when the counter reaches the threshold."""
        self.waiting.append((ctr, threshold))
        self.machine.waiters[self.place][ctr][self.unit] = threshold

    def trim(self, position: int, limit: int) -> int:
        """With a seed: a random part of the steps that could be done now."""
        rng = self.machine.rng
        if rng is None or limit - position < 2:
            return limit
        return rng.choice((limit, rng.randint(position + 1, limit)))


MAX_QUEUED_PACKETS = 1 << 16
"""Ring packets that may wait for one consumer; a tile's wide memory holds 2,080."""
TURN_BUNDLES = 4
"""What a turn of a unit weighs, in bundles of the program's budget: slices of single steps cost time, not steps."""


class Unit:
    """A functional unit of a tile or of the scalar side."""

    __slots__ = ("job", "lazy", "machine", "name", "place", "queue", "queued")

    def __init__(self, machine: Machine, name: str, place: int, lazy: bool = False) -> None:
        self.machine, self.name, self.place, self.lazy = machine, name, place, lazy
        self.queue: deque[Job] = deque()
        self.job: Job | None = None
        self.queued = False

    @property
    def idle(self) -> bool:
        return self.job is None and not self.queue

    def put(self, job: Job) -> None:
        """Append a job; it starts when the earlier ones are done."""
        job.unit = self
        self.queue.append(job)
        self.machine.wake(self)

    def run(self) -> None:
        """Go on until blocked or out of jobs."""
        while True:
            if self.job is None:
                if not self.queue:
                    self.machine.went_idle(self)
                    return
                self.job = self.queue.popleft()
                self.job.begin()
            self.job.waiting.clear()
            self.machine.core.spend(TURN_BUNDLES)
            self.machine.before(self.job)
            state = self.job.advance()
            self.machine.after(self.job, state)
            if state == DONE:
                self.job = None
                if not self.queue or not (self.lazy or self.machine.rng):
                    continue
            if state != BLOCKED:
                self.machine.wake(self)
            return


class Machine:
    """Memories, counters and units of one chip while a program runs. ``bold``: see ``Chip``."""

    bold = False

    def __init__(self, memory: Memory, values: Values, seed: int | None, budget: int) -> None:
        from coral.chip.nodes import Builder
        from coral.chip.scalar import Dispatcher, ScalarCore, ScalarMemory
        from coral.chip.streams import Host

        self.memory, self.values = memory, values
        self.rng = None if seed is None else random.Random(seed)
        self.counters = [[0] * TILE_COUNTERS for _ in range(TILES)] + [[0] * SCALAR_COUNTERS]
        self.waiters: list[list[dict[Unit, int]]] = [[{} for _ in c] for c in self.counters]
        self.ready: deque[Unit] = deque()
        self.lazy: deque[Unit] = deque()
        self.ring = {(node, c): Queue() for node in range(TILES + 1) for c in range(2)}
        self.units: list[dict[str, Unit]] = [{} for _ in range(TILES + 1)]
        self.idle_watchers: list[Unit | None] = [None] * (TILES + 1)
        self.mesh = {(tile, unit): Queue() for tile in range(TILES) for unit in MESH_UNITS}
        self.scaling = [ScalingStore() for _ in range(TILES)]
        self.phases: list[dict[tuple[str, str], int]] = [{} for _ in range(TILES + 1)]
        self.tables: list[Any] = [None] * TILES
        self.trace = Trace()
        self.builder = Builder(self.trace, values)
        self.recording = Recording()
        self.host = Host(values, self.recording)
        self.small: set[int] = set()
        self.starving: set[Unit] = set()
        self.tokens = [0] * TILES
        self.busy = [0.0] * TILES
        self.dispatchers = [Dispatcher(self, tile) for tile in range(TILES)]
        self.scalar_memory = ScalarMemory(self)
        self.core = ScalarCore(self, budget)

    def dispatched(self, entry: Any) -> None:
        """The scalar core hands out a job or a tile fence. This and the next three do nothing: they are for subclasses
        that watch (see ``Chip``)."""

    def before(self, job: Job) -> None:
        """A job is about to go on."""

    def after(self, job: Job, state: int) -> None:
        """It went on: BLOCKED, MORE or DONE."""

    def passed(self, place: int, fence: Any) -> None:
        """A fence of a tile is about to be passed, or one of the scalar core (place 16) was."""

    def unit(self, place: int, name: str) -> Unit:
        """The unit ``name`` of a tile, or of the scalar side (place 16); made when first needed."""
        found = self.units[place].get(name)
        if found is None:
            found = self.units[place][name] = Unit(self, name, place, lazy=name.startswith("ring_consumer"))
        return found

    def wake(self, unit: Unit) -> None:
        """Let the unit look again whether it can go on."""
        if not unit.queued:
            unit.queued = True
            (self.lazy if unit.lazy else self.ready).append(unit)

    def went_idle(self, unit: Unit) -> None:
        """Tell whoever waits for units of this place to be idle."""
        watcher = self.idle_watchers[unit.place]
        if watcher is not None:
            self.wake(watcher)

    def bump(self, place: int, ctr: int, amount: int) -> None:
        """Raise a counter and wake the units whose threshold is reached."""
        if amount:
            self.assign(place, ctr, self.counters[place][ctr] + amount)

    def assign(self, place: int, ctr: int, value: int) -> None:
        """Set a counter; units whose threshold is reached look again."""
        self.counters[place][ctr] = value
        waiting = self.waiters[place][ctr]
        if waiting:
            for unit in [u for u, threshold in waiting.items() if signed16(value - threshold) >= 0]:
                del waiting[unit]
                self.wake(unit)

    def send(self, dest_mask: int, consumer: int, packets: Ids, where: str) -> None:
        """Put packets into the input queues of tiles and, with bit 16, of the scalar core."""
        for node in range(TILES + 1):
            if dest_mask >> node & 1:
                queue = self.ring[node, 0 if node == SCALAR_NODE else consumer]
                queue.put(packets)
                if queue.size > MAX_QUEUED_PACKETS:
                    who = "the scalar core" if node == SCALAR_NODE else f"consumer {consumer} of tile {node}"
                    raise RuleViolation(
                        f"{where}: {queue.size} ring packets wait for {who}, the limit is {MAX_QUEUED_PACKETS}"
                    )
                self.wake(self.unit(node, "outfeed" if node == SCALAR_NODE else f"ring_consumer{consumer}"))

    def write_rows(self, job: Job, rows: NDArray[Any], data: Ids, fifo: bool, stay: bool = False) -> None:
        """Store packets in wide memory; Hazard if a row of a FIFO is overwritten that nobody has read yet."""
        memory, tile = self.memory, job.place
        waiting = memory.unread[tile, rows]
        if waiting.any():
            lost = waiting & (memory.wide[tile, rows] != data).any(axis=1)
            if lost.any():
                row = int(rows[lost.argmax()])
                raise Hazard(f"{job.where} overwrites row {row} of wide memory before anything has read it")
        memory.wide[tile, rows] = data
        memory.unread[tile, rows] = fifo
        memory.note(tile, rows, stay)

    def run(self) -> None:
        """Until nothing can move any more."""
        while True:
            if self.ready:
                if self.rng is not None:
                    self.ready.rotate(-self.rng.randrange(len(self.ready)))
                unit = self.ready.popleft()
                unit.queued = False
                unit.run()
            elif self.lazy:
                turn, self.lazy = list(self.lazy), deque()
                if self.rng is not None:
                    self.rng.shuffle(turn)
                for unit in turn:
                    unit.queued = False
                    unit.run()
            else:
                return

    def release(self) -> None:
        """Break the circles of references when all is done, so that memory is free at once."""
        for name in ("units", "dispatchers", "core", "scalar_memory", "idle_watchers", "waiters", "ready", "lazy"):
            self.__dict__.pop(name, None)

    def evaluate(self) -> None:
        """Compute the values of everything recorded so far."""
        if self.trace.items:
            nodes = self.builder.build()
            self.recording.actions.append(Compute(nodes))
            with one_thread():
                for node in nodes:
                    node.run(self.values)

    def unfinished(self) -> list[Unit]:
        """Units with jobs left."""
        units = [unit for place in self.units for unit in place.values() if not unit.idle]
        return units + [d for d in self.dispatchers if d.queue]

    def report(self, units: list[Unit]) -> str:
        """Who waits for what."""
        lines = []
        for unit in [self.core, *units]:
            name = unit.name if unit.place == SCALAR_NODE else f"{unit.name} of tile {unit.place}"
            if unit is self.core:
                where, waiting = self.core.where, self.core.waiting
                if self.core.finished:
                    continue
            elif unit.job is not None:
                where, waiting = unit.job.plan.where, unit.job.waiting
            else:
                entry: Any = unit.queue[0]
                where, waiting = entry.where, ["units to be idle"] if unit.name == "dispatcher" else []
            texts = [w if isinstance(w, str) else self.shortfall(unit.place, *w) for w in waiting]
            lines.append(f"{name}: {where} waits for {' and '.join(texts) or 'its turn'}")
        return "nothing can go on:\n  " + "\n  ".join(lines)

    def shortfall(self, place: int, ctr: int, threshold: int) -> str:
        """A counter, the threshold and its value."""
        names = isa.ScalarCounter if place == SCALAR_NODE else isa.TileCounter
        return f"{names(ctr).name} >= {threshold} (is {self.counters[place][ctr]})"
