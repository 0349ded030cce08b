"""What an instruction is described with: fields, must-be patterns, and the families that repeat in many of them.

A description is pure data. Everything else (constructor, encoder, decoder, text, reference pages) is derived from it.
Source: docs/isa/README.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from coral import CoralError


class IsaError(CoralError):
    """Something that the instruction description cannot express."""


class FieldError(IsaError):
    """A value does not fit the field it was given to."""


class DecodeError(IsaError):
    """Bytes that are not an instruction of the description."""


class TileCounter(IntEnum):
    """The 19 sync counters that every tile has."""

    AVDATA = 0
    PARAMETERS = 1
    PARTIAL_SUMS = 2
    MESH_NORTH_IN = 3
    MESH_EAST_IN = 4
    MESH_SOUTH_IN = 5
    MESH_WEST_IN = 6
    MESH_NORTH_OUT = 7
    MESH_EAST_OUT = 8
    MESH_SOUTH_OUT = 9
    MESH_WEST_OUT = 10
    WIDE_TO_NARROW = 11
    WIDE_TO_SCALING = 12
    NARROW_TO_WIDE = 13
    RING_READ_A = 14
    RING_READ_B = 15
    RING_WRITE = 16
    RING_PRODUCER_A = 17
    RING_PRODUCER_B = 18


class ScalarCounter(IntEnum):
    """The 9 sync counters of the scalar core."""

    AVDATA_POP = 0
    PARAMETER_POP = 1
    AVDATA_INFEED = 2
    PARAMETER_INFEED = 3
    SCALAR_INFEED = 4
    PRODUCER_A = 5
    PRODUCER_B = 6
    RING_OUTFEED = 7
    SCALAR_PIPELINE = 8


class f32_bits(int):
    """A float32 given by its bits: how a NaN is written, because its payload does not survive as a float."""

    def __repr__(self) -> str:
        return f"f32_bits({int(self):#010x})"


@dataclass(frozen=True)
class Field:
    """``width`` bits from bit ``lo`` (absolute inside the instruction); ``kind`` is ``uint``, ``int`` or ``f32``."""

    lo: int
    width: int
    doc: str = ""
    unit: str = ""
    default: int = 0
    kind: str = "uint"
    name: str = ""

    @property
    def mask(self) -> int:
        return ((1 << self.width) - 1) << self.lo

    @property
    def signed(self) -> bool:
        return self.kind == "int"

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest integer the field holds (the raw bits for ``f32``)."""
        if self.signed:
            return -(1 << (self.width - 1)), (1 << (self.width - 1)) - 1
        return 0, (1 << self.width) - 1

    def to_raw(self, value: Any, owner: str) -> int:
        """Unsigned bits of ``value``; FieldError, naming ``owner``, if the field cannot hold exactly this value."""
        if self.kind == "f32" and not isinstance(value, f32_bits):
            return self._f32_to_raw(value, owner)
        try:
            number = int(value)
            exact = number == value
        except (TypeError, ValueError, OverflowError):
            exact, number = False, 0
        if not exact:
            raise FieldError(f"{owner}.{self.name} = {value!r}: an integer is needed")
        low, high = self.range
        if not low <= number <= high:
            raise FieldError(
                f"{owner}.{self.name} = {number}: outside {low}..{high} ({self.width} bits at bit {self.lo})"
            )
        return number & ((1 << self.width) - 1)

    def _f32_to_raw(self, value: Any, owner: str) -> int:
        try:
            packed = struct.pack("<f", value)
        except (struct.error, OverflowError, TypeError):
            raise FieldError(f"{owner}.{self.name} = {value!r}: a float32 number is needed") from None
        back = struct.unpack("<f", packed)[0]
        if back != value and not math.isnan(value):
            raise FieldError(f"{owner}.{self.name} = {value!r}: not a float32 value (nearest is {back!r})")
        return int.from_bytes(packed, "little")

    def from_raw(self, raw: int) -> int | float:
        """Python value of the unsigned bits ``raw``."""
        if self.kind == "f32":
            return struct.unpack("<f", raw.to_bytes(4, "little"))[0]
        if self.signed and raw >> (self.width - 1):
            return raw - (1 << self.width)
        return raw

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return self.from_raw((instance._bits >> self.lo) & ((1 << self.width) - 1))


@dataclass(frozen=True)
class Must:
    """Bits that always have this value; decoding anything else is an error, because nobody knows what it would do."""

    lo: int
    width: int
    value: int = 0
    reason: str = "0 in every program examined"

    @property
    def mask(self) -> int:
        return ((1 << self.width) - 1) << self.lo


@dataclass(frozen=True)
class WalkSpec:
    """Where a tensor traversal unit (address generator) lies in an instruction.

    The parts follow each other without gaps: address, (increment, count) per dimension, innermost first, then the mask
    of non-zero strides, the double-buffer level and stride, and the shortened last pass (count, dimension, skip).
    """

    prefix: str
    lo: int
    levels: int
    addr: int
    inc: int
    cnt: int
    level: int
    dim: int
    unit: str
    doc: str
    skip_kind: str = "uint"

    def fields(self) -> Iterator[Field]:
        layout: list[tuple[str, int, str, str, str]] = [
            ("addr", self.addr, "uint", self.unit, f"{self.doc}: start address")
        ]
        for k in range(self.levels):
            layout += [
                (f"inc{k}", self.inc, "int", self.unit, f"added when dimension {k} advances and the inner ones rewind"),
                (f"cnt{k}", self.cnt, "uint", "iterations-1", f"iterations of dimension {k}, minus one"),
            ]
        layout += [
            ("nz_mask", self.levels, "uint", "bitmap", "bit k: the logical stride of dimension k is not zero"),
            (
                "slot_level",
                self.level,
                "uint",
                "level",
                "the other slot is taken whenever the dimensions below complete",
            ),
            ("slot_stride", self.inc, "int", self.unit, "distance of the second buffer slot; 0: single buffer"),
            (
                "last_cnt",
                self.cnt,
                "uint",
                "iterations-1",
                "iterations of dimension 0, minus one, in the shortened pass",
            ),
            ("last_dim", self.dim, "uint", "dimension", "dimension whose final iteration is shortened; 0: none"),
            (
                "last_skip",
                self.cnt,
                self.skip_kind,
                self.unit,
                "(count - last count) * stride of the shortened dimension",
            ),
        ]
        lo = self.lo
        for name, width, kind, unit, doc in layout:
            yield Field(lo, width, doc, unit, kind=kind, name=f"{self.prefix}_{name}")
            lo += width


@dataclass(frozen=True)
class SignalSpec:
    """Counter that an instruction increments: enable bit, then the level of walk ``of`` at which it counts."""

    lo: int
    level: int
    counter: str
    of: str

    def fields(self, name: str) -> Iterator[Field]:
        yield Field(self.lo, 1, f"1: count {self.counter}", "flag", name=f"{name}_en")
        doc = f"counts every time the dimensions of {self.of} below this level complete; 0: every step"
        yield Field(self.lo + 1, self.level, doc, "level", name=f"{name}_level")


@dataclass(frozen=True)
class WaitSpec:
    """A packed list of wait records: counter, level, base, step, valid and, in tile DMAs, side."""

    lo: int
    records: int
    ctr: int
    level: int
    side: bool
    counters: type[IntEnum]

    @property
    def record_bits(self) -> int:
        return self.ctr + self.level + 33 + self.side

    def fields(self) -> Iterator[Field]:
        for k in range(self.records):
            layout = [
                ("ctr", self.ctr, "uint", "counter", f"counter waited for ({self.counters.__name__})"),
                (
                    "level",
                    self.level,
                    "uint",
                    "level",
                    "checked before every block of the dimensions below; 0: every step",
                ),
                ("base", 16, "int", "count", "threshold of the first block"),
                ("step", 16, "int", "count", "added to the threshold per block"),
                ("valid", 1, "uint", "flag", "1: record in use"),
            ]
            if self.side:
                layout.append(("side", 1, "uint", "flag", "walk whose blocks count: 0 source, 1 destination"))
            lo = self.lo + k * self.record_bits
            for name, width, kind, unit, doc in layout:
                yield Field(lo, width, doc, unit, kind=kind, name=f"wait{k}_{name}")
                lo += width


@dataclass(frozen=True)
class Repeat:
    """``count`` equal fields, ``width`` bits apart, named by ``name.format(k)``."""

    lo: int
    width: int
    count: int
    name: str
    doc: str
    unit: str = ""
    kind: str = "uint"

    def fields(self) -> Iterator[Field]:
        for k in range(self.count):
            name = self.name.format(k, k // 5, k % 5)
            yield Field(self.lo + k * self.width, self.width, self.doc.format(k), self.unit, kind=self.kind, name=name)
