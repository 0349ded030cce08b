"""What an instruction will do, worked out once and shared by all tiles and all executions: the base of all plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from coral import isa
from coral.chip.errors import RuleViolation, UnknownInstruction
from coral.chip.walks import Addresses, Blocks, Nest

if TYPE_CHECKING:
    from coral.chip.machine import Job, Machine


class Plan:
    """A decoded instruction with its walks as arrays and its place in the program."""

    job_class: ClassVar[type[Job]]
    unit: str
    cycles: float = 0
    steps: int = 1
    words: int = 1
    """Words that a step moves, as far as a program's budget is concerned."""

    def __init__(self, instruction: Any, word: int) -> None:
        self.instruction, self.word = instruction, word
        seq = f", seq {instruction.seq}" if "seq" in instruction.fields else ""
        self.where = f"{instruction.mnemonic} at word {word}{seq}"
        self.unit = instruction.unit
        self.field_is("pred_en", 0)

    def job(self, machine: Machine, place: int) -> Job:
        """This instruction on one tile."""
        return self.job_class(machine, self, place)

    def walk(self, name: str, short_dim: int = 0) -> Addresses:
        """The walk of that keyword, as addresses; ``short_dim`` is what a shortened pass shortens."""
        i = self.instruction
        return Addresses(i.walk(name), f"{self.where}, walk {name}", short_dim, i.opcode)

    def signal(self, name: str, nest: Nest) -> Blocks | None:
        """The blocks that a signal counts, or None if it is off."""
        level = self.instruction.signal(name)
        return None if level is None else nest.blocks(level)

    def field_is(self, name: str, *known: int) -> int:
        """Value of a field of which only some values are understood; UnknownInstruction for any other."""
        value = getattr(self.instruction, name)
        if value not in known:
            raise UnknownInstruction.of(self.instruction.opcode, name, value, self.where, ", ".join(map(str, known)))
        return value

    def require(self, good: bool, rule: str) -> None:
        """RuleViolation, naming the instruction, unless the rule holds."""
        if not good:
            raise RuleViolation(f"{self.where}: {rule}")


def done(blocks: Blocks | None, before: int, after: int) -> int:
    """Blocks that became complete between two positions."""
    return blocks.completed(after) - blocks.completed(before) if blocks else 0


COUNTER = isa.TileCounter
