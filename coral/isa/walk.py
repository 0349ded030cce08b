"""Walks and waits as people think of them: logical strides and counts, thresholds and levels.

The hardware stores a walk as *rewinding increments*: one addition per step, of the increment that belongs to the
outermost dimension that advances. ``Walk`` converts both ways. Source: docs/isa/README.md, section Walks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coral.isa.fields import FieldError

if TYPE_CHECKING:
    from coral.isa.families import WaitSpec, WalkSpec


def _wrap(value: int, width: int) -> int:
    """``value`` modulo 2**width as a signed number: the hardware adds modulo the increment's width."""
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def signed16(value: int) -> int:
    """``value`` modulo 2**16 as the signed number that a threshold field holds; sync counters wrap the same way."""
    return _wrap(value, 16)


@dataclass(frozen=True)
class Walk:
    """A loop nest of addresses: base + sum of index * stride, innermost dimension first.

    ``addr`` and ``strides`` are in the unit of the walk (bytes, words, rows, 64-byte units); ``counts`` are iterations.
    ``slot_stride`` != 0: two buffer slots, exchanged whenever the dimensions below ``slot_level`` complete.
    ``last_dim`` != 0: while that dimension is in its final iteration, dimension 0 runs ``last_cnt`` + 1 times only.
    ``nz_mask`` and ``last_skip`` follow the rule of the hardware unless given. (In a transposing n2w the shortened
    dimension of ``src`` is 1: give ``last_skip`` = (count_1 - 1 - last_cnt) * stride_1 there.)
    """

    addr: int
    strides: Sequence[int] = ()
    counts: Sequence[int] = ()
    slot_level: int = 0
    slot_stride: int = 0
    last_dim: int = 0
    last_cnt: int = 0
    last_skip: int | None = None
    nz_mask: int | None = None

    def __post_init__(self) -> None:
        if len(self.strides) != len(self.counts):
            raise FieldError(f"a walk needs as many strides as counts, got {len(self.strides)} and {len(self.counts)}")
        if any(n < 1 for n in self.counts):
            raise FieldError(f"a walk's counts are at least 1, got {tuple(self.counts)}")

    def to_fields(self, spec: WalkSpec) -> dict[str, int]:
        """Field values (by flat name) that encode this walk at ``spec``; FieldError if it has too many dimensions."""
        extra = spec.levels - len(self.strides)
        if extra < 0:
            raise FieldError(f"walk {spec.prefix} has {spec.levels} dimensions, {len(self.strides)} were given")
        p, rewind = spec.prefix, 0
        values: dict[str, int] = {f"{p}_addr": self.addr}
        for k, (stride, count) in enumerate(
            zip([*self.strides, *[0] * extra], [*self.counts, *[1] * extra], strict=True)
        ):
            values[f"{p}_inc{k}"] = _wrap(stride - rewind, spec.inc)
            values[f"{p}_cnt{k}"] = count - 1
            rewind += (count - 1) * stride
        rule = sum(1 << k for k, stride in enumerate(self.strides) if _wrap(stride, spec.inc))
        values[f"{p}_nz_mask"] = rule if self.nz_mask is None else self.nz_mask
        values[f"{p}_slot_level"], values[f"{p}_slot_stride"] = self.slot_level, self.slot_stride
        values[f"{p}_last_dim"], values[f"{p}_last_cnt"] = self.last_dim, self.last_cnt
        skip = self.last_skip
        if skip is None:
            skip = (self.counts[0] - 1 - self.last_cnt) * self.strides[0] if self.last_dim and self.counts else 0
        values[f"{p}_last_skip"] = skip
        return values

    @classmethod
    def from_fields(cls, spec: WalkSpec, values: Mapping[str, int]) -> Walk:
        """The walk of a decoded instruction, with all of the hardware's dimensions."""
        p, rewind = spec.prefix, 0
        strides, counts = [], []
        for k in range(spec.levels):
            stride = _wrap(values[f"{p}_inc{k}"] + rewind, spec.inc)
            strides.append(stride)
            counts.append(values[f"{p}_cnt{k}"] + 1)
            rewind += values[f"{p}_cnt{k}"] * stride
        names = ("slot_level", "slot_stride", "last_dim", "last_cnt", "last_skip", "nz_mask")
        rest = {name: values[f"{p}_{name}"] for name in names}
        return cls(values[f"{p}_addr"], tuple(strides), tuple(counts), **rest)

    @property
    def steps(self) -> int:
        """Steps of the whole nest, the shortened pass included."""
        if not self.last_dim:
            return math.prod(self.counts)
        outer = math.prod(n for k, n in enumerate(self.counts) if k not in (0, self.last_dim))
        return outer * ((self.counts[self.last_dim] - 1) * self.counts[0] + self.last_cnt + 1)


@dataclass(frozen=True)
class Wait:
    """Before block i of the dimensions below ``level``: wait until counter ``ctr`` >= ``base`` + i * ``step``.

    ``side``: whose dimensions define the blocks, 0 the source walk, 1 the destination walk (tile DMAs only).
    """

    ctr: int
    base: int
    level: int = 0
    step: int = 1
    side: int = 0

    def to_fields(self, k: int, spec: WaitSpec) -> dict[str, int]:
        values = {"ctr": int(self.ctr), "level": self.level, "base": self.base, "step": self.step, "valid": 1}
        if spec.side:
            values["side"] = self.side
        elif self.side:
            raise FieldError("this instruction's wait records have no side")
        return {f"wait{k}_{name}": value for name, value in values.items()}
