"""The scalar core's bundles, loops and branches, against Python's own arithmetic."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral import isa
from coral.chip import Chip, ChipState, RuleViolation
from coral.chip.scalar_code import Partial, to_bits, to_float
from coral.isa import AluOp, StoreOp
from tests.chip.builder import alu, descriptor, move, program

WORDS = st.integers(0, 0xFFFFFFFF)


def results(*bundles: isa.Instruction, registers: range = range(4, 6)) -> list[int]:
    """Registers after some bundles, pushed to the host."""
    pad = len(registers) % 2
    push = [isa.Scalar(st_op=StoreOp.PUSH, st_src=r) for r in [*registers, *[registers[0]] * pad]]
    chip = Chip()
    chip.feed(0, program(*bundles, *descriptor(3, 4 * len(push)), *push))
    assert chip.run() is ChipState.FINISHED
    return np.frombuffer(chip.outputs.popleft(), "<u4").tolist()[: len(registers)]


def signed(value: int) -> int:
    return struct.unpack("<i", struct.pack("<I", value))[0]


INTEGERS = {
    AluOp.ADD: lambda a, b: a + b,
    AluOp.SUB: lambda a, b: a - b,
    AluOp.AND: lambda a, b: a & b,
    AluOp.OR: lambda a, b: a | b,
    AluOp.XOR: lambda a, b: a ^ b,
    AluOp.MOV: lambda a, b: b,
}
SHIFTS = {
    AluOp.SHL: lambda a, n: a << n,
    AluOp.SHR: lambda a, n: a >> n,
    AluOp.ASR: lambda a, n: signed(a) >> n,
}
COMPARES = {
    AluOp.EQ: lambda a, b: a == b,
    AluOp.NE: lambda a, b: a != b,
    AluOp.GT: lambda a, b: signed(a) > signed(b),
    AluOp.LT: lambda a, b: signed(a) < signed(b),
    AluOp.GEU: lambda a, b: a >= b,
    AluOp.GE: lambda a, b: signed(a) >= signed(b),
}


@given(WORDS, WORDS, st.integers(0, 31))
@settings(max_examples=60, deadline=None)
def test_integer_operations(a: int, b: int, n: int) -> None:
    bundles, expected = [move(1, a), move(2, b), move(3, n)], []
    for k, (op, function) in enumerate([*INTEGERS.items(), *SHIFTS.items()]):
        bundles.append(alu(op, 4 + k, 1, 3 if op in SHIFTS else 2, immediate=False))
        expected.append(function(a, n if op in SHIFTS else b) & 0xFFFFFFFF)
    assert results(*bundles, registers=range(4, 4 + len(expected))) == expected


@given(WORDS, WORDS)
@settings(max_examples=60, deadline=None)
def test_comparisons_and_predication(a: int, b: int) -> None:
    bundles, expected = [move(1, a), move(2, b)], []
    for k, (op, function) in enumerate(COMPARES.items()):
        bundles += [
            alu(op, 3, 1, 2, immediate=False),
            move(4 + k, 10),
            move(4 + k, 20).replace(pred_en=1, pred_reg=3, pred_val=1),
        ]
        expected.append(20 if function(a, b) else 10)
    assert results(*bundles, registers=range(4, 4 + len(expected))) == expected


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(FLOATS, FLOATS)
@settings(max_examples=60, deadline=None)
def test_float_operations(a: float, b: float) -> None:
    """Every operation is rounded to float32 once."""
    x, y = np.float32(a), np.float32(b)
    bundles, expected = [move(1, to_bits(a)), move(2, to_bits(b))], []
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        values = {AluOp.FADD: x + y, AluOp.FSUB: x - y, AluOp.FMUL: x * y, AluOp.FMAX: max(x, y), AluOp.FMIN: min(x, y)}
        for k, (op, value) in enumerate(values.items()):
            bundles.append(alu(op, 4 + k, 1, 2, immediate=False))
            expected.append(np.float32(value))
    found = np.array(results(*bundles, registers=range(4, 9)), "<u4").view("<f4")
    assert np.array_equal(found, np.array(expected, np.float32))


@given(st.integers(-(2**31), 2**31 - 1))
@settings(max_examples=60, deadline=None)
def test_conversions(value: int) -> None:
    found = results(move(1, value), alu(AluOp.I2F, 4, 0, 1, immediate=False), registers=range(4, 5))
    assert to_float(found[0]) == np.float32(value)


@pytest.mark.parametrize(("value", "integer"), [(2.5, 2), (3.5, 4), (-2.5, -2), (0.49, 0), (-0.51, -1), (1e9, 10**9)])
def test_rounding_to_integers(value: float, integer: int) -> None:
    found = results(move(1, to_bits(value)), alu(AluOp.F2I, 4, 0, 1, immediate=False), registers=range(4, 5))
    assert signed(found[0]) == integer


@given(st.floats(-120, 120, width=32).filter(lambda v: abs(v) > 1e-20))
@settings(max_examples=60, deadline=None)
def test_special_functions_are_correctly_rounded(value: float) -> None:
    reciprocal, power = results(
        move(1, to_bits(value)), isa.Scalar(sfu_op=2, sfu_src=1, sfu_dst=4), isa.Scalar(sfu_op=3, sfu_src=1, sfu_dst=5)
    )
    assert to_float(reciprocal) == np.float32(1) / np.float32(value)
    assert to_float(power) == np.float32(math.exp2(value))


def test_slots_read_before_they_write() -> None:
    """A bundle that stores and overwrites a register stores the old value; a load may overwrite its own address."""
    both = isa.Scalar(st_op=StoreOp.STORE, st_addr=9, st_src=4, alu_op=AluOp.MOV | isa.IMMEDIATE, alu_dst=4, alu_imm=77)
    load = isa.Scalar(ld_mode=1, ld_dst=5, ld_addr=9)
    assert results(move(4, 11), both, load) == [77, 11]
    again = isa.Scalar(ld_mode=2, ld_dst=6, ld_addr=6)
    assert results(move(4, 11), both, move(6, 9), again, registers=range(6, 7)) == [11]


def test_post_increments() -> None:
    store = isa.Scalar(st_op=StoreOp.STORE_INC, st_addr=1 | 1 << 5, st_src=2)
    load = isa.Scalar(ld_mode=3, ld_dst=4, ld_addr=3 | 1 << 5)
    fill = [move(1, 50), move(2, 7), store, move(2, 8), store]
    assert results(*fill, move(3, 50), load, load, registers=range(1, 5)) == [52, 8, 52, 8]


def test_loops_run_their_body() -> None:
    assert results(move(4, 0), isa.Loop(count=1001, body=1), alu(AluOp.ADD, 4, 4, 3), registers=range(4, 5)) == [3003]


def test_branches_form_loops() -> None:
    body = [alu(AluOp.ADD, 4, 4, 5), alu(AluOp.LT, 1, 4, 50), isa.Branch(cond_en=1, cond_reg=1, cond_val=1, offset=-2)]
    assert results(move(4, 0), *body, registers=range(4, 5)) == [50]


def test_a_byte_can_be_stored_into_a_new_word() -> None:
    """Load, mask, merge, store: the other bytes of the word stay unwritten, and nothing else may use it."""
    put = [
        isa.Scalar(ld_mode=1, ld_dst=1, ld_addr=30), alu(AluOp.AND, 1, 1, 0xFFFF00FF), alu(AluOp.OR, 1, 1, 0x5A00),
        isa.Scalar(st_op=StoreOp.STORE, st_addr=30, st_src=1), isa.Scalar(ld_mode=1, ld_dst=2, ld_addr=30),
    ]  # fmt: skip
    assert results(*put, alu(AluOp.SHR, 4, 2, 8), alu(AluOp.AND, 4, 4, 0xFF), registers=range(4, 5)) == [0x5A]


@given(WORDS, WORDS, WORDS, st.integers(0, 31))
def test_partial_words(value: int, holes: int, other: int, n: int) -> None:
    """Bits that nobody wrote spread exactly as far as their value could matter."""
    value &= ~holes
    for name in ("and", "or", "xor"):
        got = getattr(Partial(value, holes), f"__{name}__")(other)
        found, unknown = (got.value, got.holes) if isinstance(got, Partial) else (got, 0)
        low, high = (getattr(value | bits, f"__{name}__")(other) for bits in (0, holes))
        assert unknown == low ^ high
        assert found & ~unknown == low & ~unknown
    shifted = Partial.of(value, holes) >> n if holes else value >> n
    assert (shifted.holes if isinstance(shifted, Partial) else 0) == holes >> n


def test_what_is_refused() -> None:
    with pytest.raises(RuleViolation, match="a shift by 32"):
        results(move(1, 1), alu(AluOp.SHL, 4, 1, 32))
    with pytest.raises(RuleViolation, match="outside 32 bits"):
        results(move(1, to_bits(1e10)), alu(AluOp.F2I, 4, 0, 1, immediate=False))
