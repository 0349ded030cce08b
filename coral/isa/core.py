"""The instruction base class: turns a declarative class body into constructor, encoder, decoder and ``repr``.

A subclass lists fields, must-be patterns and families as class attributes; the parent's entries are inherited. Class
creation fails unless every bit is spoken for exactly once. Source: docs/isa/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from coral.isa.families import Family, SignalSpec, WaitSpec, WalkSpec
from coral.isa.fields import DecodeError, Field, FieldError, Must, f32_bits
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
    families: ClassVar[dict[str, Family]] = {}
    walks: ClassVar[dict[str, WalkSpec]] = {}
    signals: ClassVar[dict[str, SignalSpec]] = {}
    wait_spec: ClassVar[WaitSpec | None] = None
    _must_mask: ClassVar[int] = 0
    _must_value: ClassVar[int] = 0
    _default_bits: ClassVar[int] = 0

    __slots__ = ("_bits",)
    _bits: int

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        fields, musts, families = dict(cls.fields), list(cls.musts), dict(cls.families)
        for name, item in list(vars(cls).items()):
            if isinstance(item, Field):
                fields[name] = item
            elif isinstance(item, Must):
                musts.append(item)
            elif isinstance(item, Family):
                families[item.key] = item
                for f in item.fields():
                    fields[f.name] = f
                    setattr(cls, f.name, f)
        if "opcode" in vars(cls):
            musts.append(Must(6, 6, cls.opcode, "opcode; fixes the length"))
        cls.fields = dict(sorted(fields.items(), key=lambda entry: entry[1].lo))
        cls.musts = tuple(sorted(musts, key=lambda m: m.lo))
        cls.families = families
        cls.walks = {name: f for name, f in families.items() if isinstance(f, WalkSpec)}
        cls.signals = {name: f for name, f in families.items() if isinstance(f, SignalSpec)}
        cls.wait_spec = next((f for f in families.values() if isinstance(f, WaitSpec)), None)
        if "opcode" in vars(cls):
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
        cls._default_bits = cls._must_value | sum(f.default << f.lo for f in cls.fields.values())

    def __init__(self, **values: Any) -> None:
        cls, bits = type(self), self._default_bits
        for name, value in cls._expand(values).items():
            field = cls.fields[name]
            bits = bits & ~field.mask | field.to_raw(value, cls.__name__) << field.lo
        object.__setattr__(self, "_bits", bits)

    @classmethod
    def _expand(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Flat field values; a single field given beside its family wins."""
        flat, single = {}, {}
        for name, value in values.items():
            if name in cls.fields:
                single[name] = value
            elif name not in cls.families:
                raise FieldError(f"{cls.__name__} has no field {name!r}", name)
            else:
                try:
                    flat.update(cls.families[name].expand(value))
                except (FieldError, TypeError) as error:
                    raise FieldError(f"{cls.__name__}: {error}", name) from None
        return flat | single

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; use replace({name}=...)")

    def replace(self, **values: Any) -> Self:
        """A copy with other values of some fields or families; a family is replaced as a whole."""
        old = self.values()
        for name in self.families.keys() & values.keys():
            old |= {part: self.fields[part].default for part in self.families[name].names}
        return type(self)(**old | self._expand(values))

    def values(self) -> dict[str, Any]:
        """All fields by flat name, in bit order; NaNs as ``f32_bits``, so that the values survive."""
        return {name: f.exact(self._bits) for name, f in self.fields.items()}

    def walk(self, name: str) -> Walk:
        """The walk of that keyword (``inp``, ``out``, ``par``, ``psum``, ``src``, ``dst``, ``buf``), all dimensions."""
        return self.walks["inp" if name == "in" else name].read(self)

    def signal(self, name: str) -> int | None:
        """Level of the signal, or None if it is off."""
        return self.signals[name].read(self)

    def waits(self) -> tuple[Wait, ...]:
        """The wait records in use."""
        return self.wait_spec.read(self) if self.wait_spec else ()

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
            where = f"word {word}: {cls.mnemonic} (opcode {cls.opcode:#04x})"
            raise DecodeError(f"{where} with unknown bits {bit_list(wrong)}: {reasons}", wrong.bit_count())
        self = object.__new__(cls)
        object.__setattr__(self, "_bits", bits)
        return self

    def changed(self) -> dict[str, Any]:
        """Fields that differ from their default, in bit order; NaNs as ``f32_bits`` so that the value survives."""
        changed = self._bits ^ self._default_bits
        return {name: f.exact(self._bits) for name, f in self.fields.items() if f.mask & changed}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={_literal(value)}' for name, value in self.changed().items())})"
        )

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._bits == self._bits

    def __hash__(self) -> int:
        return hash((type(self), self._bits))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_bytes, (self.to_bytes(),)


def _literal(value: Any) -> str:
    """Source text of a value; an infinity has no literal, so it is given by its bits."""
    if value in (float("inf"), float("-inf")):
        return repr(f32_bits(0x7F800000 if value > 0 else 0xFF800000))
    return repr(value)


def bit_list(mask: int) -> str:
    """``3, 7, 12`` for the set bits of ``mask`` (at most eight are listed)."""
    bits = [b for b in range(mask.bit_length()) if mask >> b & 1]
    return ", ".join(map(str, bits[:8])) + (f" and {len(bits) - 8} more" if len(bits) > 8 else "")
