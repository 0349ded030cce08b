"""Walks as index arrays: which addresses, in which order, and where their blocks begin and end.

Source: docs/chip.md, section Walks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import isa
from coral.chip.errors import RuleViolation, UnknownInstruction
from coral.chip.layout import MAX_WALK_STEPS
from coral.isa import signed16

Index = NDArray[np.int64]


class Blocks:
    """The traversals of the dimensions below one level: where each begins, and how many are complete after a step."""

    def __init__(self, steps: int, size: int, starts: Index | None = None) -> None:
        self.steps, self.size, self.starts = steps, size, starts
        self.count = len(starts) if starts is not None else -(-steps // size)

    def start(self, block: int) -> int:
        """First step of ``block``; the number of steps for blocks past the end."""
        if block >= self.count:
            return self.steps
        return int(self.starts[block]) if self.starts is not None else block * self.size

    def index(self, step: int) -> int:
        """The block that ``step`` belongs to."""
        if self.starts is not None:
            return int(np.searchsorted(self.starts, step, side="right")) - 1
        return step // self.size

    def completed(self, step: int) -> int:
        """Blocks complete when ``step`` steps are done."""
        if step >= self.steps:
            return self.count
        return self.index(step)


class Nest:
    """A loop nest, innermost first, with its shortened pass: the kept steps in order.

    ``last_dim`` != 0: while that dimension is in its final iteration, dimension ``short_dim`` runs at most ``last_cnt``
    + 1 times. (A longer final pass is written by some programs; its extra steps only ever move discarded words.)
    """

    def __init__(
        self,
        counts: Sequence[int],
        last_dim: int = 0,
        last_cnt: int = 0,
        where: str = "walk",
        short_dim: int = 0,
        opcode: int = 0,
    ) -> None:
        if math.prod(counts) > MAX_WALK_STEPS:
            raise RuleViolation(f"{where}: a loop nest of {math.prod(counts)} steps; the budget is {MAX_WALK_STEPS}")
        if last_dim >= len(counts):
            raise UnknownInstruction.of(opcode, "last_dim", last_dim, where, f"dimensions 0 to {len(counts) - 1}")
        self.counts, self.where, self.opcode = tuple(counts), where, opcode
        self._blocks: dict[int, Blocks] = {}
        self.kept: Index | None = None
        self.steps = math.prod(counts)
        if last_dim and last_cnt + 1 < counts[short_dim]:
            full = np.arange(self.steps)
            last = self.outer(full, last_dim) % counts[last_dim] == counts[last_dim] - 1
            self.kept = np.flatnonzero(~(last & (self.outer(full, short_dim) % counts[short_dim] > last_cnt)))
            self.steps = len(self.kept)

    @cached_property
    def full(self) -> Index:
        """Index in the unshortened nest of every kept step."""
        return np.arange(self.steps) if self.kept is None else self.kept

    def outer(self, full: Index, level: int) -> Index:
        """Joint index of the dimensions from ``level`` on."""
        return full // math.prod(self.counts[:level])

    def index(self, dim: int) -> Index:
        """Index of one dimension at every kept step."""
        return self.outer(self.full, dim) % self.counts[dim]

    def blocks(self, level: int) -> Blocks:
        """Traversals of the dimensions below ``level``."""
        if level > len(self.counts):
            raise UnknownInstruction.of(self.opcode, "level", level, self.where, f"levels 0 to {len(self.counts)}")
        found = self._blocks.get(level)
        if found is None:
            size = math.prod(self.counts[:level])
            starts = None
            if self.kept is not None and level:
                outer = self.kept // size
                starts = np.flatnonzero(np.r_[True, outer[1:] != outer[:-1]])
            found = self._blocks[level] = Blocks(self.steps, size, starts)
        return found


class Addresses(Nest):
    """A walk: the nest and the address of every kept step.

    A double-buffered walk begins in one of its two slots (``phase``) and changes slot whenever the dimensions below
    ``slot_level`` complete.
    """

    def __init__(self, walk: isa.Walk, where: str, short_dim: int = 0, opcode: int = 0) -> None:
        super().__init__(tuple(walk.counts), walk.last_dim, walk.last_cnt, where, short_dim, opcode)
        self.walk = walk
        self._at: list[Index | None] = [None, None]
        self.limit: tuple[int, str] | None = None

    @cached_property
    def toggles(self) -> int:
        """1 if the walk ends in the other slot than it began with."""
        return self.blocks(self.walk.slot_level).count & 1 if self.walk.slot_stride else 0

    def within(self, limit: int, unit: str) -> Addresses:
        """This walk, whose addresses must be below ``limit``; RuleViolation otherwise."""
        self.limit = limit, unit
        self.at(0)
        return self

    def at(self, phase: int) -> Index:
        """Address per step, in the unit of the walk, beginning in slot ``phase``."""
        if not self.walk.slot_stride:
            phase = 0
        found = self._at[phase]
        if found is None:
            found = self._at[phase] = self._addresses(phase)
            if self.limit:
                low, high = int(found.min()), int(found.max())
                if low < 0 or high >= self.limit[0]:
                    bad = low if low < 0 else high
                    raise RuleViolation(
                        f"{self.where}: address {bad} is outside 0..{self.limit[0] - 1} ({self.limit[1]})"
                    )
        return found

    def _addresses(self, phase: int) -> Index:
        walk = self.walk
        out = np.full(self.steps, walk.addr, np.int64)
        for dim, (stride, count) in enumerate(zip(walk.strides, walk.counts, strict=True)):
            if stride and count > 1:
                out += stride * self.index(dim)
        if walk.slot_stride:
            slot = self.outer(self.full, walk.slot_level) if walk.slot_level else np.arange(self.steps)
            out += walk.slot_stride * (slot + phase & 1)
        return out


class Gate:
    """One wait record, bound to the blocks it counts: block i starts only when counter >= base + i * step."""

    __slots__ = ("base", "blocks", "ctr", "level", "side", "step")

    def __init__(self, wait: isa.Wait, nest: Nest) -> None:
        self.ctr, self.base, self.step = int(wait.ctr), wait.base, wait.step
        self.level, self.side = wait.level, wait.side
        self.blocks = nest.blocks(wait.level)

    def limit(self, position: int, value: int) -> tuple[int, int]:
        """(steps that may be done, threshold of the block that holds it up) with the counter at ``value``.

        Counters and thresholds are 16 bits wide and wrap: the signed difference decides.
        """
        blocks = self.blocks
        block = blocks.index(position)
        if blocks.start(block) != position:
            block += 1
        threshold = self.base + self.step * block
        spare = signed16(value - threshold)
        if spare < 0:
            return blocks.start(block), threshold
        if self.step == 0:
            return blocks.steps, threshold
        more = spare // self.step if self.step > 0 else 0
        return blocks.start(block + more + 1), threshold + self.step * (more + 1)


def gates(instruction: Any, sides: Sequence[Nest]) -> tuple[Gate, ...]:
    """The wait records of an instruction; ``sides`` are its source and destination nests (or the only one).

    :raises UnknownInstruction: a record names a counter that does not exist
    """
    counters = type(instruction).wait_spec.counters
    for wait in instruction.waits():
        if wait.ctr >= len(counters):
            raise UnknownInstruction.of(
                instruction.opcode, "wait.ctr", wait.ctr, sides[0].where, f"counters 0 to {len(counters) - 1}"
            )
    return tuple(Gate(w, sides[w.side if len(sides) > 1 else 0]) for w in instruction.waits())
