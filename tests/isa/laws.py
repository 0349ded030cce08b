"""What must hold for every instruction class; used by the tests, and by the mutation test that wants to see them fail.

Expected bits come from the field table of the reference shelf or from the vectors, never from our own description.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coral import isa
from coral.isa import docs
from coral.isa.text import format_instruction, parse

from .vectors import VECTORS, words

Table = dict[str, dict[str, dict[str, Any]]]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "isa"
F32_SAMPLES = {0x3F800000: 1.0, 0xC2BF0000: -95.5, 0x7F800000: float("inf"), 1: 1.401298464324817e-45}


def entries(cls: type[isa.Instruction], table: Table) -> dict[str, dict[str, Any]]:
    """Named fields of the reference for this class."""
    return {name: f for name, f in table[cls.mnemonic].items() if name in cls.fields}


def blank(cls: type[isa.Instruction], table: Table) -> int:
    """Bits of an instruction whose fields all have their default, by the reference."""
    return sum(f["default"] << f["lo"] for name, f in table[cls.mnemonic].items() if name)


def samples(cls: type[isa.Instruction], name: str, table: Table) -> Iterator[tuple[Any, int]]:
    """Values of a field and the whole instruction's bits that hold them, by the reference."""
    f = table[cls.mnemonic][name]
    ones = (1 << f["width"]) - 1
    low, high = (-(ones + 1 >> 1), ones >> 1) if f["signed"] else (0, ones)
    rest = blank(cls, table) & ~(ones << f["lo"])
    is_float = cls.fields[name].kind == "f32"
    for raw, value in F32_SAMPLES.items() if is_float else [(v & ones, v) for v in {0, 1, low, high} if v <= high]:
        yield value, rest | raw << f["lo"]


def encode_law(cls: type[isa.Instruction], name: str, table: Table) -> None:
    for value, bits in samples(cls, name, table):
        assert cls(**{name: value}).to_bytes() == bits.to_bytes(16 * cls.words, "little")


def decode_law(cls: type[isa.Instruction], name: str, table: Table) -> None:
    for value, bits in samples(cls, name, table):
        assert getattr(cls.from_bytes(bits.to_bytes(16 * cls.words, "little")), name) == value


def text_law(cls: type[isa.Instruction], name: str, table: Table) -> None:
    for value, bits in samples(cls, name, table):
        data = bits.to_bytes(16 * cls.words, "little")
        (instruction,) = parse(f"{cls.mnemonic} {name}={value}")
        assert instruction.to_bytes() == data
        shown = format_instruction(cls.from_bytes(data))
        if not any(name in family.names for family in cls.families.values()):
            assert (f" {name}=" in shown) == (value != cls.fields[name].default)
        assert parse(shown)[0].to_bytes() == data


def vector_law(mnemonic: str) -> None:
    text, data = VECTORS[mnemonic][0], words(mnemonic)
    assert parse(text)[0].to_bytes() == data
    assert format_instruction(isa.decode_one(data)) == text


def docs_law(cls: type[isa.Instruction]) -> None:
    """The committed page is what the description says now."""
    name = f"{cls.mnemonic}.md"
    assert docs.page(cls) == (DOCS / name).read_text(encoding="utf-8")
