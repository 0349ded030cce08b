"""The mesh: words to the tile next door. Source: docs/chip.md, section Units."""

from __future__ import annotations

from typing import Any

import numpy as np

from coral import isa
from coral.chip.layout import GRID, NARROW_WORDS, TILES
from coral.chip.machine import BLOCKED, DONE, MORE, Job, Machine
from coral.chip.plans import COUNTER, Plan, done
from coral.chip.walks import gates

DIRECTIONS = {isa.MeshSouth: 4, isa.MeshWest: -1, isa.MeshNorth: -4, isa.MeshEast: 1}
OUT = {
    isa.MeshSouth: (COUNTER.MESH_SOUTH_OUT, COUNTER.MESH_NORTH_IN),
    isa.MeshWest: (COUNTER.MESH_WEST_OUT, COUNTER.MESH_EAST_IN),
    isa.MeshNorth: (COUNTER.MESH_NORTH_OUT, COUNTER.MESH_SOUTH_IN),
    isa.MeshEast: (COUNTER.MESH_EAST_OUT, COUNTER.MESH_WEST_IN),
}


def neighbour(tile: int, step: int) -> int | None:
    """The tile next to ``tile`` in a direction, None at the edge of the mesh."""
    if abs(step) == 1 and tile // GRID != (tile + step) // GRID:
        return None
    return tile + step if 0 <= tile + step < TILES else None


class MeshJob(Job):
    """Both halves of a mesh instruction: sends one walk to a neighbour, stores another from the opposite one."""

    plan: Mesh

    def __init__(self, machine: Machine, plan: Plan, place: int) -> None:
        super().__init__(machine, plan, place)
        self.sent = self.received = 0
        self.to = neighbour(place, self.plan.step)
        if self.plan.sends:
            self.plan.require(self.to is not None, f"tile {place} has no neighbour in this direction to send to")

    def begin(self) -> None:
        self.source, self.target = self.slot("src", self.plan.src), self.slot("dst", self.plan.dst)

    def advance(self) -> int:
        plan = self.plan
        while True:
            before = self.sent + self.received
            if self.sent < plan.sends:
                self.send()
            if self.received < plan.receives:
                self.receive()
            if self.sent == plan.sends and self.received == plan.receives:
                return DONE
            if self.sent + self.received == before:
                return BLOCKED
            if self.machine.rng is not None:
                return MORE

    def send(self) -> None:
        plan, machine, start = self.plan, self.machine, self.sent
        limit = min(self.limit(plan.data, start), plan.sends)
        if limit == start:
            return
        end = self.trim(start, limit)
        assert self.to is not None
        words = machine.memory.narrow[self.place, self.source[start:end]]
        machine.mesh[self.to, plan.unit].put(words)
        machine.wake(machine.unit(self.to, plan.unit))
        self.sent = end
        machine.bump(self.place, plan.counters[0], done(plan.out, start, end))

    def receive(self) -> None:
        plan, machine, start = self.plan, self.machine, self.received
        end = min(self.limit(plan.space, start), plan.receives)
        if end == start:
            return
        if plan.fill is None:
            queue = machine.mesh[self.place, plan.unit]
            end = min(end, start + queue.size)
            if end == start:
                self.waiting.append(f"{plan.receives - start} more words from its neighbour")
                return
            end = self.trim(start, end)
            words: Any = queue.take(end - start)
        else:
            words = machine.values.constant(plan.fill) + np.arange(4)
        machine.memory.narrow[self.place, self.target[start:end]] = words
        self.received = end
        machine.bump(self.place, plan.counters[1], done(plan.stored, start, end))


class Mesh(Plan):
    """Plan of 0x15 to 0x18."""

    job_class = MeshJob

    def __init__(self, instruction: Any, word: int) -> None:
        super().__init__(instruction, word)
        self.src = src = self.walk("src").within(NARROW_WORDS, "narrow memory words")
        self.dst = dst = self.walk("dst").within(NARROW_WORDS, "narrow memory words")
        self.step, self.counters = DIRECTIONS[type(instruction)], OUT[type(instruction)]
        bound = gates(instruction, (src, dst))
        self.data = tuple(g for g in bound if g.side == 0)
        self.space = tuple(g for g in bound if g.side == 1)
        self.out, self.stored = self.signal("sig_src", src), self.signal("sig_dst", dst)
        self.sends = src.steps if self.present("src") or self.out else 0
        self.receives = dst.steps if self.present("dst") or self.stored or instruction.fill_en else 0
        self.steps = self.sends + self.receives
        self.fill = instruction.fill_value if instruction.fill_en else None

    def present(self, name: str) -> bool:
        """Whether this half does anything: any increment or count is set."""
        i = self.instruction
        return any(getattr(i, f"{name}_{part}{k}") for part in ("inc", "cnt") for k in range(4))
