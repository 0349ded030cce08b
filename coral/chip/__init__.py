"""The simulated chip: executes instruction words, byte for byte, and says when a program is wrong.

Source: docs/chip.md.
"""

from coral.chip.chip import BUDGET, Chip, ChipState
from coral.chip.errors import ChipError, Deadlock, Hazard, RuleViolation, UnknownInstruction, UnwrittenRead

__all__ = [
    "BUDGET", "Chip", "ChipError", "ChipState", "Deadlock", "Hazard", "RuleViolation", "UnknownInstruction",
    "UnwrittenRead",
]  # fmt: skip
