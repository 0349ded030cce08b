"""What can go wrong on the chip; every error names the rule, the value and the place (instruction, word, tile)."""

from __future__ import annotations

from typing import Self

from coral import CoralError


class ChipError(CoralError):
    """A program did something that the chip cannot do, or that no working program is known to do."""


class UnknownInstruction(ChipError):
    """An opcode, or a value of a field, whose effect is not known and therefore not modelled."""

    @classmethod
    def of(cls, opcode: int, field: str, value: int, where: str, known: str = "") -> Self:
        """The error for a field of an instruction: ``known`` says which values are understood."""
        limit = f"; known: {known}" if known else ""
        return cls(f"opcode {opcode:#04x} field {field} value {value}: not modelled (seen in {where}{limit})")


class RuleViolation(ChipError):
    """A rule of the hardware is broken: addresses, masks, walk lengths, leftovers, budgets."""


class UnwrittenRead(ChipError):
    """A byte that nothing wrote was used as data, address, counter or instruction operand."""


class Hazard(ChipError):
    """Data was overwritten before its reader took it, or read before it was complete."""


class Deadlock(ChipError):
    """Nothing can go on although something is unfinished; the message lists every waiting unit."""
