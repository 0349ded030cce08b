"""Groups of fields that repeat in many instructions, written and read as one value: walks, signals, waits, lists.

In a class body a family stands under the keyword of the constructor; on an instance it reads as its value.
Source: docs/isa/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

from coral.isa.fields import Field, FieldError, lay_out
from coral.isa.walk import Wait, Walk


class Family:
    """Base: ``expand`` turns a value into flat field values, ``read`` takes it from an instruction."""

    key: str

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "key", name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.read(instance)

    def fields(self) -> Iterator[Field]:
        raise NotImplementedError

    def expand(self, value: Any) -> dict[str, Any]:
        raise NotImplementedError

    def read(self, instruction: Any) -> Any:
        raise NotImplementedError

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Flat names of the fields, in bit order."""
        return tuple(f.name for f in self.fields())


@dataclass(frozen=True)
class WalkSpec(Family):
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
    key: str = field(default="", compare=False)

    def fields(self) -> Iterator[Field]:
        parts = [("addr", self.addr, "uint", self.unit, "V", f"{self.doc}: start address")]
        for k in range(self.levels):
            doc = f"added when dimension {k} advances and the inner ones rewind"
            parts.append((f"inc{k}", self.inc, "int", self.unit, "V", doc))
            parts.append((f"cnt{k}", self.cnt, "uint", "iterations-1", "V", f"iterations of dimension {k}, minus one"))
        doc = "bit k: the logical stride of dimension k is not zero; effect unknown"
        parts.append(("nz_mask", self.levels, "uint", "bitmap", "U", doc))
        doc = "the other slot is taken whenever the dimensions below this one complete"
        parts.append(("slot_level", self.level, "uint", "level", "V", doc))
        doc = "distance of the second buffer slot; 0: single buffer"
        parts.append(("slot_stride", self.inc, "int", self.unit, "V", doc))
        doc = "iterations of dimension 0, minus one, in the shortened pass"
        parts.append(("last_cnt", self.cnt, "uint", "iterations-1", "V", doc))
        doc = "dimension whose final iteration is shortened; 0: none"
        parts.append(("last_dim", self.dim, "uint", "dimension", "V", doc))
        doc = "(count - last count) * stride of the shortened dimension"
        parts.append(("last_skip", self.cnt, self.skip_kind, self.unit, "V", doc))
        return lay_out(self.prefix, self.lo, parts)

    def expand(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, Walk):
            raise FieldError(f"{self.key} = {value!r}: a Walk is needed", self.key)
        return value.to_fields(self)

    def read(self, instruction: Any) -> Walk:
        return Walk.from_fields(self, {name: getattr(instruction, name) for name in self.names})


@dataclass(frozen=True)
class SignalSpec(Family):
    """Counter that an instruction increments: enable bit, then the level of walk ``of`` at which it counts."""

    lo: int
    level: int
    counter: str
    of: str
    key: str = field(default="", compare=False)

    def fields(self) -> Iterator[Field]:
        doc = f"counts every time the dimensions of {self.of} below this level complete; 0: every step"
        parts = [("en", 1, "uint", "flag", "V", f"1: count {self.counter}")]
        return lay_out(self.key, self.lo, [*parts, ("level", self.level, "uint", "level", "V", doc)])

    def expand(self, value: Any) -> dict[str, Any]:
        return {} if value is None else {f"{self.key}_en": 1, f"{self.key}_level": value}

    def read(self, instruction: Any) -> int | None:
        enable, level = self.names
        return getattr(instruction, level) if getattr(instruction, enable) else None


@dataclass(frozen=True)
class WaitSpec(Family):
    """A packed list of wait records: counter, level, base, step, valid and, in tile DMAs, side."""

    lo: int
    records: int
    ctr: int
    level: int
    side: bool
    counters: type[IntEnum]
    key: str = field(default="waits", compare=False)

    def __set_name__(self, owner: type, name: str) -> None:
        """The keyword is ``waits`` everywhere."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The description itself; the records of an instance are ``instance.waits()``."""
        return self

    @property
    def record_bits(self) -> int:
        return self.ctr + self.level + 33 + self.side

    def _record(self, k: int) -> Iterator[Field]:
        doc = "checked before every block of the dimensions below; 0: every step"
        parts = [
            ("ctr", self.ctr, "uint", "counter", "V", f"counter waited for ({self.counters.__name__})"),
            ("level", self.level, "uint", "level", "V", doc),
            ("base", 16, "int", "count", "V", "threshold of the first block"),
            ("step", 16, "int", "count", "V", "added to the threshold per block"),
            ("valid", 1, "uint", "flag", "V", "1: record in use"),
        ]
        if self.side:
            parts.append(("side", 1, "uint", "flag", "V", "walk whose blocks count: 0 source, 1 destination"))
        for f in lay_out(f"wait{k}", self.lo + k * self.record_bits, parts):
            yield replace(f, names=self.counters) if f.unit == "counter" else f

    def fields(self) -> Iterator[Field]:
        for k in range(self.records):
            yield from self._record(k)

    def parts(self, k: int) -> tuple[str, ...]:
        """Flat field names of record ``k``: counter first."""
        n = 6 if self.side else 5
        return self.names[n * k : n * (k + 1)]

    def expand(self, value: Any) -> dict[str, Any]:
        waits = list(value)
        if len(waits) > self.records:
            raise FieldError(f"{len(waits)} waits were given, there are {self.records} wait records", self.key)
        flat: dict[str, Any] = {}
        for k, wait in enumerate(waits):
            if not isinstance(wait, Wait):
                raise FieldError(f"waits[{k}] = {wait!r}: a Wait is needed", self.key)
            flat.update(wait.to_fields(k, self))
        return flat

    def read(self, instruction: Any) -> tuple[Wait, ...]:
        found = []
        for k in range(self.records):
            if not getattr(instruction, f"wait{k}_valid"):
                break
            ctr, level, base, step, _, *side = (getattr(instruction, part) for part in self.parts(k))
            found.append(Wait(ctr, base, level, step, *side))
        return tuple(found)


@dataclass(frozen=True)
class Repeat(Family):
    """``count`` equal fields, ``width`` bits apart, named by ``name.format(k, k // 5, k % 5)``; written as a list.

    ``less`` is what the hardware subtracts: 1 for counts stored minus one. The list may be shorter than ``count``.
    """

    lo: int
    width: int
    count: int
    name: str
    doc: str
    unit: str = ""
    kind: str = "uint"
    less: int = 0
    key: str = field(default="", compare=False)

    def fields(self) -> Iterator[Field]:
        for k in range(self.count):
            name = self.name.format(k, k // 5, k % 5)
            yield Field(self.lo + k * self.width, self.width, self.doc.format(k), self.unit, kind=self.kind, name=name)

    def expand(self, value: Any) -> dict[str, Any]:
        values = list(value)
        if len(values) > self.count:
            raise FieldError(f"{self.key} holds {self.count} values, {len(values)} were given", self.key)
        return {name: v - self.less if self.less else v for name, v in zip(self.names, values, strict=False)}

    def read(self, instruction: Any) -> tuple[Any, ...]:
        return tuple(getattr(instruction, name) + self.less for name in self.names)
