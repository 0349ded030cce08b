"""Straight runs of scalar bundles, translated to Python functions once.

A bundle's slots all read the registers before any of them writes. Registers hold unsigned 32-bit integers (floats by
their bits) or None as long as nothing wrote them. Source: docs/chip.md, section Units.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from coral import isa
from coral.chip.errors import RuleViolation, UnknownInstruction
from coral.chip.layout import SCALAR_WORDS

MASK = 0xFFFFFFFF
_pack, _unpack = struct.Struct("<f").pack, struct.Struct("<I").unpack
_pack_int, _unpack_float = struct.Struct("<I").pack, struct.Struct("<f").unpack


def to_float(bits: int) -> float:
    """The float32 with these bits."""
    return _unpack_float(_pack_int(bits))[0]


def to_bits(value: float) -> int:
    """Bits of the float32 nearest to ``value``; infinity when it is too large."""
    try:
        return _unpack(_pack(value))[0]
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def signed(value: int) -> int:
    """A register as a two's complement number."""
    return value - (1 << 32) if value >> 31 else value


def shift(value: int, amount: int, kind: int) -> int:
    """Shift left, right or arithmetically right by 0..31."""
    if amount > 31:
        raise RuleViolation(f"a shift by {amount}; known are 0 to 31")
    if kind == isa.AluOp.SHL:
        return value << amount & MASK
    return (value if kind == isa.AluOp.SHR else signed(value)) >> amount & MASK


def to_integer(bits: int) -> int:
    """Round a float32 to the nearest integer, ties to even."""
    value = to_float(bits)
    if not -(2.0**31) <= value < 2.0**32:
        raise RuleViolation(f"conversion of {value} to an integer: outside 32 bits")
    return round(value) & MASK


def special(op: int, bits: int) -> int:
    """The special-function slot: reciprocal or 2^x, correctly rounded."""
    value = to_float(bits)
    if op == 2:
        if value == 0:
            return bits & 0x80000000 | 0x7F800000
        return to_bits(1.0 / value)
    try:
        return to_bits(math.exp2(value))
    except OverflowError:
        return 0x7F800000


class Partial:
    """A word of which nobody wrote the bits of ``holes`` (they are 0 in ``value``); only masks and shifts accept it.

    Programs store a byte by loading its word, masking and storing it, also when the word is new. Anything else that
    uses the word raises TypeError, which the core reports as an unwritten read.
    """

    __slots__ = ("holes", "value")

    def __init__(self, value: int, holes: int) -> None:
        self.value, self.holes = value, holes

    @staticmethod
    def of(value: int, holes: int) -> Any:
        """The word; a plain number if it has no holes."""
        return Partial(value & ~holes, holes) if holes else value

    def __and__(self, other: Any) -> Any:
        value, holes = (other.value, other.holes) if isinstance(other, Partial) else (other, 0)
        return Partial.of(self.value & value, (self.holes | holes) & (self.holes | self.value) & (holes | value))

    def __or__(self, other: Any) -> Any:
        value, holes = (other.value, other.holes) if isinstance(other, Partial) else (other, 0)
        return Partial.of(self.value | value, (self.holes | holes) & ~(self.value | value))

    def __xor__(self, other: Any) -> Any:
        value, holes = (other.value, other.holes) if isinstance(other, Partial) else (other, 0)
        return Partial.of(self.value ^ value, self.holes | holes)

    def __lshift__(self, amount: int) -> Any:
        return Partial.of(self.value << amount, self.holes << amount)

    def __rshift__(self, amount: int) -> Any:
        return Partial.of(self.value >> amount, self.holes >> amount)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__


_ALU = {
    isa.AluOp.ADD: "(a + b) & 0xFFFFFFFF",
    isa.AluOp.SUB: "(a - b) & 0xFFFFFFFF",
    isa.AluOp.AND: "a & b",
    isa.AluOp.OR: "a | b",
    isa.AluOp.XOR: "a ^ b",
    isa.AluOp.SHL: "shift(a, b, 6)",
    isa.AluOp.SHR: "shift(a, b, 7)",
    isa.AluOp.ASR: "shift(a, b, 8)",
    isa.AluOp.EQ: "a - b == 0",
    isa.AluOp.NE: "a - b != 0",
    isa.AluOp.GT: "signed(a) > signed(b)",
    isa.AluOp.LT: "signed(a) < signed(b)",
    isa.AluOp.GEU: "a >= b",
    isa.AluOp.GE: "signed(a) >= signed(b)",
    isa.AluOp.MOV: "b & 0xFFFFFFFF",
    isa.AluOp.I2F: "to_bits(float(signed(b)))",
    isa.AluOp.F2I: "to_integer(b)",
    isa.AluOp.FADD: "to_bits(to_float(a) + to_float(b))",
    isa.AluOp.FSUB: "to_bits(to_float(a) - to_float(b))",
    isa.AluOp.FMUL: "to_bits(to_float(a) * to_float(b))",
    isa.AluOp.FMAX: "a if to_float(a) > to_float(b) else b",
    isa.AluOp.FMIN: "a if to_float(a) < to_float(b) else b",
}
_COMPARES = range(isa.AluOp.EQ, isa.AluOp.GE + 1)

Run = Callable[[list[Any], list[Any], Any], None]
"""Function of (registers, predicates, core)."""


def translate(bundles: Sequence[tuple[int, Any]], loop: int | None = None) -> Run:
    """A function that executes the bundles, given with their words, ``loop`` times (once if None)."""
    lines = ["def run(r, p, core):", "    m = core.memory.words"]
    indent = "    "
    if loop is not None:
        lines.append(f"    for _ in range({loop}):")
        indent = "        "
    for word, bundle in bundles:
        lines += [indent + line for line in _bundle(word, bundle)]
    names: dict[str, Any] = {
        f.__name__: f for f in (to_float, to_bits, signed, shift, to_integer, special, RuleViolation)
    }
    exec("\n".join([*lines, f"{indent}pass"]), names)
    return names["run"]


def _bundle(word: int, i: Any) -> list[str]:
    """Statements of one bundle."""
    slots = [_load(word, i), _store(word, i), _alu(word, i), _special(word, i)]
    lines = [line for reads, _ in slots for line in reads] + [line for _, writes in slots for line in writes]
    if i.pred_en and lines:
        unwritten, chosen = f"if p[{i.pred_reg}] is None: raise TypeError", f"if p[{i.pred_reg}] == {i.pred_val}:"
        return [unwritten, chosen, *(f"    {line}" for line in lines)]
    return lines


def _unknown(word: int, i: Any, field: str) -> UnknownInstruction:
    return UnknownInstruction.of(i.opcode, field, getattr(i, field), f"scalar at word {word}")


def _load(word: int, i: Any) -> tuple[list[str], list[str]]:
    if not i.ld_mode:
        return [], []
    register, step = i.ld_addr & 31, i.ld_addr >> 5
    address = str(i.ld_addr) if i.ld_mode == 1 else f"r[{register}]"
    reads = [f"la = {address}", "lv = m.get(la)", "if lv is None: lv = core.memory.load(la)"]
    writes = [f"r[{i.ld_dst}] = lv"]
    if i.ld_mode == 3:
        writes.append(f"r[{register}] = (la + {step}) & 0xFFFFFFFF")
    return reads, writes


def _store(word: int, i: Any) -> tuple[list[str], list[str]]:
    op, source = i.st_op, f"sv = r[{i.st_src}]"
    if op == isa.StoreOp.NONE:
        return [], []
    if op in (isa.StoreOp.STORE, isa.StoreOp.STORE_AT, isa.StoreOp.STORE_INC):
        register, step = i.st_addr & 31, i.st_addr >> 5
        address = str(i.st_addr) if op == isa.StoreOp.STORE else f"r[{register}]"
        reads = [source, f"sa = {address}", f"if not 0 <= sa < {SCALAR_WORDS}: core.memory.outside(sa)"]
        writes = ["core.memory.store(sa, sv)"]
        if op == isa.StoreOp.STORE_INC:
            writes.append(f"r[{register}] = (sa + {step}) & 0xFFFFFFFF")
        return reads, writes
    if op == isa.StoreOp.PUSH:
        return [source], ["core.push(sv)"]
    if op == isa.StoreOp.DESCRIPTOR and i.st_addr < 4:
        return [source], [f"core.descriptor[{i.st_addr}] = sv + 0"]
    if op == isa.StoreOp.ISSUE:
        return [], [f"core.issue({word})"]
    raise _unknown(word, i, "st_addr" if op == isa.StoreOp.DESCRIPTOR else "st_op")


def _alu(word: int, i: Any) -> tuple[list[str], list[str]]:
    op, immediate = i.alu_op & 0x1F, i.alu_op & isa.IMMEDIATE
    if op == isa.AluOp.NONE and not immediate:
        return [], []
    if op not in _ALU:
        raise _unknown(word, i, "alu_op")
    text = _ALU[isa.AluOp(op)]
    reads = [f"b = {i.alu_imm}" if immediate else f"b = r[{i.alu_imm & 31}]"]
    if op not in (isa.AluOp.MOV, isa.AluOp.I2F, isa.AluOp.F2I):
        reads.append(f"a = r[{i.alu_src}]")
    reads.append(f"x = {text}")
    target = f"p[{i.alu_dst & 7}]" if op in _COMPARES else f"r[{i.alu_dst}]"
    return reads, [f"{target} = x"]


def _special(word: int, i: Any) -> tuple[list[str], list[str]]:
    if not i.sfu_op:
        return [], []
    if i.sfu_op not in (2, 3):
        raise _unknown(word, i, "sfu_op")
    return [f"y = special({i.sfu_op}, r[{i.sfu_src}])"], [f"r[{i.sfu_dst}] = y"]
