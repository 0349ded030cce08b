"""What can go wrong on the chip; every error names the rule, the value and the place (instruction, word, tile)."""

from __future__ import annotations

from coral import CoralError


class ChipError(CoralError):
    """A program did something that the chip cannot do, or that no working program is known to do."""


class UnknownInstruction(ChipError):
    """An opcode, or a value of a field, whose effect is not known and therefore not modelled."""


class RuleViolation(ChipError):
    """A rule of the hardware is broken: addresses, masks, walk lengths, leftovers, budgets."""


class UnwrittenRead(ChipError):
    """A byte that nothing wrote was used as data, address, counter or instruction operand."""


class Hazard(ChipError):
    """Data was overwritten before its reader took it, or read before it was complete."""


class Deadlock(ChipError):
    """Nothing can go on although something is unfinished; the message lists every waiting unit."""
