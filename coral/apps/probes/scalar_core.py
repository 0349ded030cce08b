"""The scalar core: special functions, comparisons, jumps, and instructions that depend on its registers."""

from __future__ import annotations

import numpy as np

from coral import isa
from coral.apps.probes import Finding, step
from coral.apps.probes.bench import Bench
from coral.apps.probes.programs import RESULT_WORD, begin, fill, nops, push, scalar_program, tile_program
from coral.codegen.builder import Builder
from coral.isa import AluOp, SfuOp
from coral.package.program import Program

VALUES = 4096
X, Y, Z = 16, 17, 18
P = 2
LATENCY = 4
"""Bundles between a special function and the use of its result; Google's compiler leaves at least 2."""


def _special(b: Builder, op: SfuOp, start: int, step: int, scale: int | None) -> None:
    """``op`` of 4096 words from ``start`` on in steps of ``step``; with a ``scale`` of I2F(word) times that float."""
    b.scalar(AluOp.MOV, X, imm=start)
    b.emit(isa.Loop, count=VALUES, body=LATENCY + 4)
    b.scalar(AluOp.MOV if scale is None else AluOp.I2F, Y, imm=X, register=True)
    b.scalar(AluOp.ADD if scale is None else AluOp.FMUL, Y, Y, scale or 0)
    b.emit(isa.Scalar, sfu_op=op, sfu_src=Y, sfu_dst=Z)
    nops(b, LATENCY)
    b.scalar(AluOp.ADD, X, X, step & 0xFFFFFFFF, st_op=isa.StoreOp.PUSH, st_src=Z)


def _ulps(bench: Bench, exact: np.ndarray, *arguments: int | None) -> Finding:
    """Distance from the correctly rounded float32 results, in units of the last place."""
    program = scalar_program("special", VALUES, lambda b: _special(b, *arguments))  # pyright: ignore[reportArgumentType]
    bits = np.frombuffer(bench.run(program), np.int32).astype(np.int64)
    distance = np.abs(bits - exact.astype(np.float32).view(np.int32))
    answer = f"up to {distance.max()} units in the last place off"
    return Finding(answer, "up to 0 units in the last place off", {"wrong": int((distance > 0).sum())})


@step(3)
def reciprocal(bench: Bench) -> Finding:
    """1 / x of 4096 values between 1 and 2."""
    x = (0x3F800000 + (np.arange(VALUES) << 11)).astype(np.uint32).view(np.float32)
    return _ulps(bench, 1 / x.astype(np.float64), SfuOp.RECIPROCAL, 0x3F800000, 1 << 11, None)


@step(3)
def exp2(bench: Bench) -> Finding:
    """2^x of the multiples of 1/256 from 0 down to -16."""
    return _ulps(bench, np.exp2(-np.arange(VALUES) / 256), SfuOp.EXP2, 0, -1, 0x3B800000)


@step(5)
def comparisons(bench: Bench) -> Finding:
    """-1 >= 1 by the operations 13 and 14: true where the comparison is unsigned."""

    def body(b: Builder) -> None:
        b.scalar(AluOp.MOV, X, imm=0xFFFFFFFF)
        b.scalar(AluOp.MOV, Y, imm=1)
        for op in (AluOp.GEU, AluOp.GE):
            b.scalar(AluOp.MOV, Z)
            b.scalar(op, P, X, Y, register=True)
            b.scalar(AluOp.MOV, Z, imm=1, pred_en=1, pred_reg=P, pred_val=1)
            push(b, Z)

    unsigned = bench.run(scalar_program("comparisons", 2, body))[::4]
    return Finding("13 {}, 14 {}".format(*("unsigned" if u else "signed" for u in unsigned)), "13 unsigned, 14 signed")


def backward_jump(nop_words: int) -> Program:
    """Counts to 5 in a loop of ``nop_words`` and three more words, closed by a branch."""

    def body(b: Builder) -> None:
        b.scalar(AluOp.MOV, X)
        b.scalar(AluOp.ADD, X, X, 1)
        nops(b, nop_words)
        b.scalar(AluOp.LT, P, X, 5)
        b.emit(isa.Branch, cond_en=1, cond_reg=P, cond_val=1, offset=-(nop_words + 2))
        push(b, X)
        push(b, X)

    return scalar_program("backward_jump", 2, body)


@step(19)
def backward_jumps(bench: Bench) -> Finding:
    """A loop of a few words and one of 1,200, the longest in Google's programs."""
    return Finding(f"{[bench.run(backward_jump(words))[0] for words in (0, 1200)]}", "[5, 5]")


@step(19, bold=True)
def long_backward_jump(bench: Bench) -> Finding:
    """A loop of 12,000 words, which may be more than the instruction buffer holds."""
    return Finding(f"{bench.run(backward_jump(12_000))[0]}", "5")


def _second_fill(bench: Bench, tiles: int, **fields: int) -> str:
    """A word := 1, then := 2 by an instruction with more fields; which it is in the end."""
    b = begin()
    b.scalar(AluOp.MOV, X, imm=1)
    b.scalar(AluOp.NE, P, X, X, register=True)
    fill(b, 1, RESULT_WORD, 2, 1)
    b.fence()
    fill(b, tiles, RESULT_WORD, 2, 2, **fields)
    word = bench.run(tile_program(b, "second_fill", 0, 2))[0]
    return {1: "not executed", 2: "executed"}.get(word, f"neither: {word}")


@step(19, bold=True)
def predicated_tile_instruction(bench: Bench) -> Finding:
    """A mesh fill whose predicate is false."""
    return Finding(_second_fill(bench, 1, pred_en=1, pred_reg=P, pred_val=1), "not executed")


@step(19, bold=True)
def indirect_tile_mask(bench: Bench) -> Finding:
    """A mesh fill whose tile mask is in a register; known from ring sends and narrow-to-wide moves."""
    return Finding(_second_fill(bench, 0, tile_mask_indirect=1, tile_mask_reg=X), "executed")
