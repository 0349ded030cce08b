"""How long a program takes: a statement, fitted to the estimates in Google's files, never measured.

Source: docs/timing.md.
"""

from __future__ import annotations

WIDE_STEP_CYCLES = 0.79 / 16
"""Cycles per step and channel of ops with more than ``NARROW_CHANNELS`` channels per group."""
NARROW_STEP_CYCLES = 0.45
"""Cycles per step of the others: depthwise, elementwise, copies."""
NARROW_CHANNELS = 8


def op_cycles(steps: int, channels: int) -> float:
    """Predicted cycles of one op on one tile."""
    return steps * (WIDE_STEP_CYCLES * channels if channels > NARROW_CHANNELS else NARROW_STEP_CYCLES)
