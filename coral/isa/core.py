"""The instruction base class: turns a declarative class body into constructor, encoder, decoder and ``repr``.

A subclass lists fields, must-be patterns and families as class attributes; the parent's entries are inherited. Class
creation fails unless every bit is spoken for exactly once. Source: docs/isa/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from coral.isa.fields import DecodeError, Field, FieldError, Must, Repeat, SignalSpec, WaitSpec, WalkSpec, f32_bits
from coral.isa.walk import Wait, Walk


class Instruction:
    """One instruction word group; immutable. Fields are attributes, constructed by keyword and range-checked.

    ``Cls(field=value, walk=Walk(...), signal=level, waits=[Wait(...)])``; FieldError names the field, value and range.
    """

    opcode: ClassVar[int]
    words: ClassVar[int]
    mnemonic: ClassVar[str]
    unit: ClassVar[str]
    fields: ClassVar[dict[str, Field]] = {}
    musts: ClassVar[tuple[Must, ...]] = ()
    walks: ClassVar[dict[str, WalkSpec]] = {}
    signals: ClassVar[dict[str, SignalSpec]] = {}
    wait_spec: ClassVar[WaitSpec | None] = None
    _must_mask: ClassVar[int] = 0
    _must_value: ClassVar[int] = 0

    __slots__ = ("_bits",)
    _bits: int

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        fields, musts = dict(cls.fields), list(cls.musts)
        walks, signals, wait_spec = dict(cls.walks), dict(cls.signals), cls.wait_spec
        for name, item in list(vars(cls).items()):
            if isinstance(item, Field):
                fields[name] = item
            elif isinstance(item, Must):
                musts.append(item)
            elif isinstance(item, Repeat):
                fields.update((f.name, f) for f in item.fields())
            elif isinstance(item, WalkSpec):
                walks[name] = item
                fields.update((f.name, f) for f in item.fields())
            elif isinstance(item, SignalSpec):
                signals[name] = item
                fields.update((f.name, f) for f in item.fields(name))
            elif isinstance(item, WaitSpec):
                wait_spec = item
                fields.update((f.name, f) for f in item.fields())
        for f in fields.values():
            setattr(cls, f.name, f)
        cls.walks, cls.signals, cls.wait_spec = walks, signals, wait_spec
        cls.fields = dict(sorted(fields.items(), key=lambda entry: entry[1].lo))
        cls.musts = tuple(sorted(musts, key=lambda m: m.lo))
        if "opcode" in vars(cls):
            cls.musts = tuple(sorted([*musts, Must(6, 6, cls.opcode, "opcode; fixes the length")], key=lambda m: m.lo))
            cls._seal()

    @classmethod
    def _seal(cls) -> None:
        """Every bit belongs to exactly one field or pattern, or the class is not created."""
        seen = 0
        for part in (*cls.fields.values(), *cls.musts):
            if seen & part.mask:
                raise TypeError(f"{cls.__name__}: {part} overlaps another part")
            seen |= part.mask
        missing = ~seen & ((1 << 128 * cls.words) - 1)
        if missing or seen >> 128 * cls.words:
            raise TypeError(f"{cls.__name__}: bits {bit_list(missing)} not described, or described past the end")
        cls._must_mask = sum(m.mask for m in cls.musts)
        cls._must_value = sum(m.value << m.lo for m in cls.musts)

    def __init__(self, **values: Any) -> None:
        bits = self._must_value
        for name, value in self._expand(values).items():
            bits |= self.fields[name].to_raw(value, type(self).__name__) << self.fields[name].lo
        object.__setattr__(self, "_bits", bits)

    @classmethod
    def _expand(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Flat field values: defaults, then families, then single fields."""
        flat: dict[str, Any] = {f.name: f.default for f in cls.fields.values() if f.default}
        single = {}
        for name, value in values.items():
            if name in cls.walks:
                flat.update(value.to_fields(cls.walks[name]))
            elif name in cls.signals:
                if value is not None:
                    flat.update({f"{name}_en": 1, f"{name}_level": value})
            elif name == "waits" and cls.wait_spec:
                value = list(value)
                if len(value) > cls.wait_spec.records:
                    raise FieldError(
                        f"{cls.__name__} has {cls.wait_spec.records} wait records, {len(value)} were given"
                    )
                for k, wait in enumerate(value):
                    flat.update(wait.to_fields(k, cls.wait_spec))
            elif name in cls.fields:
                single[name] = value
            else:
                raise FieldError(f"{cls.__name__} has no field {name!r}")
        return flat | single

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; use replace({name}=...)")

    def replace(self, **values: Any) -> Self:
        """A copy with other values of some fields or families."""
        return type(self)(**{**self.values(), **values})

    def values(self) -> dict[str, Any]:
        """All fields by flat name, in bit order."""
        return {name: f.__get__(self) for name, f in self.fields.items()}

    def walk(self, name: str) -> Walk:
        """The walk of that keyword (``inp``, ``out``, ``par``, ``psum``, ``src``, ``dst``, ``buf``), all dimensions."""
        spec = self.walks[name]
        return Walk.from_fields(spec, {f.name: f.__get__(self) for f in spec.fields()})

    def signal(self, name: str) -> int | None:
        """Level of the signal, or None if it is off."""
        return getattr(self, f"{name}_level") if getattr(self, f"{name}_en") else None

    def waits(self) -> tuple[Wait, ...]:
        """The wait records in use."""
        spec, found = self.wait_spec, []
        for k in range(spec.records if spec else 0):
            if not getattr(self, f"wait{k}_valid"):
                break
            ctr, level, base, step = (getattr(self, f"wait{k}_{part}") for part in ("ctr", "level", "base", "step"))
            found.append(Wait(ctr, base, level, step, getattr(self, f"wait{k}_side") if spec and spec.side else 0))
        return tuple(found)

    def to_bytes(self) -> bytes:
        """The little-endian words, 16 bytes each."""
        return self._bits.to_bytes(16 * self.words, "little")

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, word: int = 0) -> Self:
        """Decode exactly ``16 * words`` bytes; DecodeError if a must-be pattern is broken (``word`` is named in it)."""
        if len(data) != 16 * cls.words:
            raise DecodeError(f"word {word}: {cls.mnemonic} needs {16 * cls.words} bytes, got {len(data)}")
        bits = int.from_bytes(data, "little")
        wrong = (bits ^ cls._must_value) & cls._must_mask
        if wrong:
            reasons = "; ".join(
                f"bits {m.lo}..{m.lo + m.width - 1} must be {m.value:#x} ({m.reason})"
                for m in cls.musts
                if m.mask & wrong
            )
            raise DecodeError(
                f"word {word}: {cls.mnemonic} (opcode {cls.opcode:#04x}) with unknown bits {bit_list(wrong)}: {reasons}"
            )
        self = object.__new__(cls)
        object.__setattr__(self, "_bits", bits)
        return self

    def changed(self) -> dict[str, Any]:
        """Fields that differ from their default, in bit order; NaNs as ``f32_bits`` so that the value survives."""
        out: dict[str, Any] = {}
        for name, f in self.fields.items():
            raw = (self._bits >> f.lo) & ((1 << f.width) - 1)
            if raw != f.to_raw(f.default, name):
                value = f.from_raw(raw)
                out[name] = f32_bits(raw) if value != value else value
        return out

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={_literal(value)}' for name, value in self.changed().items())})"
        )

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._bits == self._bits

    def __hash__(self) -> int:
        return hash((type(self), self._bits))


def _literal(value: Any) -> str:
    """Source text of a value; an infinity has no literal, so it is given by its bits."""
    if value in (float("inf"), float("-inf")):
        return repr(f32_bits(0x7F800000 if value > 0 else 0xFF800000))
    return repr(value)


def bit_list(mask: int) -> str:
    """``3, 7, 12`` for the set bits of ``mask`` (at most eight are listed)."""
    bits = [b for b in range(mask.bit_length()) if mask >> b & 1]
    return ", ".join(map(str, bits[:8])) + (f" and {len(bits) - 8} more" if len(bits) > 8 else "")
