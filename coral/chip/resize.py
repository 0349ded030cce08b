"""Resizing by two: the op whose activations come from coordinate generators and whose weights are their fractions.

Source: docs/chip.md, section Resize.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral.chip.layout import NARROW_BYTES
from coral.chip.op_plan import OpPlan, Stage
from coral.chip.walks import Addresses, Index

QUARTERS = 4
"""Coordinates count quarters of a source pixel; weights have 7 fractional bits per axis."""
TAP_WEIGHT = 128 // QUARTERS


class ResizePlan(OpPlan):
    """Plan of 0x05: loops are tap x, tap y, output x, output y, any, channel word."""

    def measure_operands(self) -> None:
        i = self.instruction
        for name, known in (("act16", 0), ("par16", 1), ("lane_off", 6), ("acc_init", 1), ("out16", 0), ("nlu_en", 0)):
            self.field_is(name, known)
        for name, loop in (("rs_x_loop", 2), ("rs_y_loop", 3), ("rs_x_step", 2), ("rs_y_step", 2)):
            self.field_is(name, loop)
        for axis in "xy":
            self.field_is(f"rs_{axis}_nearest", i.rs_nearest)
            self.field_is(f"rs_{axis}_start", *(range(QUARTERS) if i.rs_nearest else (1, 3)))
        self.elements, self.x_bytes, self.w_bytes = 4, 4, 0
        self.nlu = self.bias_en = self.scale_en = 0
        self.scaled, self.scaling_rows, self.zp_rows = False, [], None

    def arithmetic(self) -> Stage:
        return Stage(self.where, self.kind, 0, 0, 0, 0, False, 0, 0, 0, self.instruction.mult, -np.inf, np.inf, 0, 1)

    def bind_parameters(self) -> None:
        """The weight of every step, from the coordinates' fractions."""
        taps = 1 if self.instruction.rs_nearest else 2
        self.require(
            self.nest.counts[:2] == (taps, taps), f"tap loops {self.nest.counts[:2]}, needed are {taps} x {taps}"
        )
        self.coefficients = self.fraction("x", 0) * self.fraction("y", 1)

    def coordinate(self, axis: str) -> Index:
        i = self.instruction
        loop, start, step = (getattr(i, f"rs_{axis}_{part}") for part in ("loop", "start", "step"))
        return start + step * self.nest.index(loop)

    def fraction(self, axis: str, tap_loop: int) -> NDArray[np.int32]:
        if self.instruction.rs_nearest:
            return np.ones(self.nest.steps, np.int32)
        part = self.coordinate(axis) % QUARTERS
        return (TAP_WEIGHT * np.where(self.nest.index(tap_loop) == 0, QUARTERS - part, part)).astype(np.int32)

    def bind_activations(self, walk: Addresses) -> Addresses:
        i = self.instruction
        half = QUARTERS // 2 if i.rs_nearest else 0
        self.x_offset = sum(
            (self.coordinate(axis) + half) // QUARTERS * stride
            for axis, stride in (("x", i.rs_pos_stride), ("y", i.rs_row_stride))
        )
        self.x, self.x_aligned = walk, False
        address = self.x_addresses(0)
        low, high = int(address.min()), int(address.max())
        self.require(low >= 0 and high <= NARROW_BYTES - 4, f"source bytes {low}..{high} outside narrow memory")
        self.field_is("in_slot_stride", 0)
        self.x_aligned = not (address & 3).any()
        return walk
