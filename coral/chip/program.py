"""A bitstream, decoded once: plans of its instructions, and its runs of scalar bundles as functions.

Source: docs/chip.md.
"""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

from coral import isa
from coral.chip import mesh, movers, op_plan, resize, streams
from coral.chip.errors import RuleViolation, UnknownInstruction
from coral.chip.plans import Plan
from coral.chip.scalar_code import Run, translate

PLANS: dict[type[isa.Instruction], type[Plan]] = {
    isa.Op: op_plan.OpPlan,
    isa.OpMax: op_plan.OpPlan,
    isa.OpSum: op_plan.OpPlan,
    isa.OpResize: resize.ResizePlan,
    isa.RingSend: movers.RingSend,
    isa.RingRecv0: movers.RingRecv,
    isa.RingRecv1: movers.RingRecv,
    isa.N2w: movers.N2w,
    isa.W2n: movers.W2n,
    isa.MeshSouth: mesh.Mesh,
    isa.MeshWest: mesh.Mesh,
    isa.MeshNorth: mesh.Mesh,
    isa.MeshEast: mesh.Mesh,
    isa.NluLoad: op_plan.NluLoad,
    isa.Pop: streams.Pop,
    isa.Infeed: streams.Infeed,
    isa.Outfeed: streams.Outfeed,
}
"""The model of every instruction that a unit executes."""

CONTROL = frozenset((isa.TileFence, isa.Scalar, isa.Halt, isa.Branch, isa.Loop, isa.ScalarFence, isa.Start, isa.End))
"""Instructions that the scalar core executes itself."""


class Block(NamedTuple):
    """A run of scalar bundles as one function."""

    run: Run
    end: int
    cost: int


class Chunk:
    """One bitstream. UnknownInstruction, RuleViolation and DecodeError say what is wrong with it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.placed = {p.word: p for p in isa.decode(data)}
        for word, (_, instruction) in self.placed.items():
            kind = type(instruction)
            if kind not in PLANS and kind not in CONTROL:
                raise UnknownInstruction(
                    f"opcode {kind.opcode:#04x}: not modelled (seen in {kind.mnemonic} at word {word})"
                )
        kinds = [type(p.instruction) for p in self.placed.values()]
        if not kinds or kinds[0] is not isa.Start or kinds[-1] is not isa.End or isa.Halt not in kinds:
            raise RuleViolation("a bitstream begins with start, ends with end and has a halt")
        for kind in (isa.Start, isa.End):
            if kinds.count(kind) != 1:
                raise RuleViolation(f"a bitstream has one {kind.mnemonic}, this one {kinds.count(kind)}")
        self.check_sequence()
        branches = [w + p.instruction.offset for w, p in self.placed.items() if isinstance(p.instruction, isa.Branch)]
        loops = [w + 1 + p.instruction.body for w, p in self.placed.items() if isinstance(p.instruction, isa.Loop)]
        self.entries = sorted({*branches, *loops})
        self._plans: dict[int, Plan | None] = {}
        self._blocks: dict[int, Block | None] = {}

    def check_sequence(self) -> None:
        """Sequence numbers go up. Their top bit is where half a row of a parameter region's address would end up."""
        before = None
        for word, (_, i) in self.placed.items():
            if not isinstance(i, isa.TileInstruction | isa.TileFence):
                continue
            if before is not None and (i.seq - before) & 0xFFFF >= 0x8000:
                raise RuleViolation(
                    f"{i.mnemonic} at word {word}: seq {i.seq:#x} after {before:#x}, they only go up; a parameter "
                    "region that begins in the middle of a 256-byte row looks like this"
                )
            before = i.seq

    def at(self, word: int) -> isa.Placed:
        """The instruction that begins at ``word``."""
        found = self.placed.get(word)
        if found is None:
            raise RuleViolation(f"no instruction begins at word {word}: a jump or a loop's end goes astray")
        return found

    def plan(self, word: int) -> Plan | None:
        """What a unit has to do for the instruction at ``word``; None for the scalar core's own."""
        if word not in self._plans:
            instruction = self.placed[word].instruction
            model = PLANS.get(type(instruction))
            self._plans[word] = model(instruction, word) if model else None
        return self._plans[word]

    def forget(self) -> None:
        """Drop what was worked out; it is made again when needed."""
        self._plans.clear()
        self._blocks.clear()

    def block(self, word: int) -> Block | None:
        """The run of bundles, or the loop of nothing but bundles, that begins at ``word``."""
        if word not in self._blocks:
            self._blocks[word] = self._translate(word)
        return self._blocks[word]

    def _translate(self, word: int) -> Block | None:
        first: Any = self.at(word).instruction
        if isinstance(first, isa.Loop) and first.count and first.body and not first.pred_en:
            body = self._bundles(word + 1, word + 1 + first.body)
            if len(body) == first.body:
                return Block(translate(body, first.count), word + 1 + first.body, first.count * first.body)
        place = bisect.bisect_right(self.entries, word)
        body = self._bundles(word, self.entries[place] if place < len(self.entries) else 1 << 30)
        return Block(translate(body), word + len(body), len(body)) if body else None

    def _bundles(self, word: int, stop: int) -> list[tuple[int, Any]]:
        out = []
        while word < stop and word in self.placed and isinstance(self.placed[word].instruction, isa.Scalar):
            out.append((word, self.placed[word].instruction))
            word += 1
        return out
