"""What an instruction is described with: errors, named values, fields and must-be patterns.

A description is pure data. Everything else (constructor, encoder, decoder, text, reference pages) is derived from it.
Source: docs/isa/README.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from coral import CoralError


class IsaError(CoralError):
    """Something that the instruction description cannot express."""


class FieldError(IsaError):
    """A value does not fit the field it was given to; ``field`` is the field's name where one is to blame."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class DecodeError(IsaError):
    """Bytes that are not an instruction of the description; ``unnamed`` is the number of bits nothing accounts for."""

    def __init__(self, message: str, unnamed: int = 0) -> None:
        super().__init__(message)
        self.unnamed = unnamed


class TileCounter(IntEnum):
    """The 19 sync counters that every tile has."""

    AVDATA, PARAMETERS, PARTIAL_SUMS = range(3)
    MESH_NORTH_IN, MESH_EAST_IN, MESH_SOUTH_IN, MESH_WEST_IN = range(3, 7)
    MESH_NORTH_OUT, MESH_EAST_OUT, MESH_SOUTH_OUT, MESH_WEST_OUT = range(7, 11)
    WIDE_TO_NARROW, WIDE_TO_SCALING, NARROW_TO_WIDE = range(11, 14)
    RING_READ_A, RING_READ_B, RING_WRITE, RING_PRODUCER_A, RING_PRODUCER_B = range(14, 19)


class ScalarCounter(IntEnum):
    """The 9 sync counters of the scalar core."""

    AVDATA_POP, PARAMETER_POP, AVDATA_INFEED, PARAMETER_INFEED, SCALAR_INFEED = range(5)
    PRODUCER_A, PRODUCER_B, RING_OUTFEED, SCALAR_PIPELINE = range(5, 9)


class f32_bits(int):
    """A float32 given by its bits: how a NaN is written, because its payload does not survive as a float."""

    def __repr__(self) -> str:
        return f"f32_bits({int(self):#010x})"


@dataclass(frozen=True)
class Field:
    """``width`` bits from bit ``lo`` (absolute inside the instruction); ``kind`` is ``uint``, ``int`` or ``f32``.

    ``mark`` says how sure the meaning is: V verified by executing Google's programs, I inferred, U unknown. ``names``
    are named values, ``bit_names`` names of single bits; both together: a named value plus flag bits.
    ``ones`` (the field's bits at bit 0), ``mask`` (in place) and ``range`` (smallest and largest integer) follow.
    """

    lo: int
    width: int
    doc: str = ""
    unit: str = ""
    default: int = 0
    kind: str = "uint"
    name: str = ""
    mark: str = "V"
    names: type[IntEnum] | None = None
    bit_names: type[IntEnum] | None = None
    ones: int = field(init=False, repr=False, compare=False)
    mask: int = field(init=False, repr=False, compare=False)
    signed: bool = field(init=False, repr=False, compare=False)
    range: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ones = (1 << self.width) - 1
        signed = self.kind == "int"
        low, high = (-(ones + 1 >> 1), ones >> 1) if signed else (0, ones)
        for name, value in {"ones": ones, "mask": ones << self.lo, "signed": signed, "range": (low, high)}.items():
            object.__setattr__(self, name, value)

    def to_raw(self, value: Any, owner: str) -> int:
        """Unsigned bits of ``value``; FieldError, naming ``owner``, if the field cannot hold exactly this value."""
        if self.kind == "f32" and not isinstance(value, f32_bits):
            return self._f32_to_raw(value, owner)
        low, high = self.range
        if type(value) is int and low <= value <= high:
            return value & self.ones
        try:
            number = int(value)
            exact = number == value
        except (TypeError, ValueError, OverflowError):
            exact, number = False, 0
        if not exact:
            raise FieldError(f"{owner}.{self.name} = {value!r}: an integer is needed", self.name)
        if not low <= number <= high:
            shown = number if number.bit_length() < 128 else f"a {number.bit_length()}-bit number"
            raise FieldError(
                f"{owner}.{self.name} = {shown}: outside {low}..{high} ({self.width} bits at bit {self.lo})", self.name
            )
        return number & self.ones

    def _f32_to_raw(self, value: Any, owner: str) -> int:
        try:
            packed = struct.pack("<f", value)
        except (struct.error, OverflowError, TypeError):
            raise FieldError(f"{owner}.{self.name} = {value!r}: a float32 number is needed", self.name) from None
        back = struct.unpack("<f", packed)[0]
        if back != value and not math.isnan(value):
            raise FieldError(f"{owner}.{self.name} = {value!r}: not a float32 value (nearest is {back!r})", self.name)
        return int.from_bytes(packed, "little")

    def from_raw(self, raw: int) -> int | float:
        """Python value of the unsigned bits ``raw``."""
        if self.kind == "f32":
            return struct.unpack("<f", raw.to_bytes(4, "little"))[0]
        return raw - self.ones - 1 if raw > self.range[1] else raw

    def exact(self, bits: int) -> int | float:
        """Value in the instruction ``bits``; a NaN as ``f32_bits``, so that writing it back changes nothing."""
        value = self.from_raw(bits >> self.lo & self.ones)
        return f32_bits(bits >> self.lo & self.ones) if value != value else value

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return self.from_raw(instance._bits >> self.lo & self.ones)


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


def lay_out(prefix: str, lo: int, parts: list[tuple[str, int, str, str, str, str]]) -> Iterator[Field]:
    """Fields behind each other from bit ``lo``; each part is (name, width, kind, unit, mark, doc)."""
    for name, width, kind, unit, mark, doc in parts:
        yield Field(lo, width, doc, unit, kind=kind, name=f"{prefix}_{name}", mark=mark)
        lo += width
