"""Elementwise programs: byte identity with the bare programs of Google's compiler."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from codegen.compare import assert_same
from coral import isa
from coral.codegen import CodegenError, ShapeError
from coral.codegen.eltwise import Requantise, elementwise
from coral.numerics import Spline


def f32(bits: int) -> float:
    return struct.unpack("<f", bits.to_bytes(4, "little"))[0]


def step(mult: int, clamp_min: int, clamp_max: int, **more) -> Requantise:
    return Requantise(f32(mult), f32(clamp_min), f32(clamp_max), **more)


LOGISTIC = Spline(
    np.array(
        [
            [0x4200549C, 0x415DB7C6, 0x40111A70, 0x3E29F7BB, 0x3B95F260],
            [0x4304A187, 0x42AB6803, 0x41AEE024, 0x40251EB8, 0x3DF136B6],
            [0x43077562, 0x42A46B63, 0x418371FD, 0x3F05681A, 0xBE04C80F],
            [0x4300006A, 0x427FE396, 0xBEA8C7FE, 0xC0C9F57D, 0xBF94C0E4],
            [0x430000B8, 0x427FB331, 0x3EF2682D, 0xC0CF35B5, 0x3F9CB2B2],
            [0x42DDC7C6, 0x42C56C6F, 0xC1D72011, 0x405BE5C6, 0xBE2FF6D3],
            [0x4343D750, 0x41EFBC0B, 0xC0B6A9CD, 0x3EFB0C86, 0xBC82C2D7],
            [0x4374CC57, 0x4085560C, 0xBF168355, 0x3D187E2A, 0xBA69A584],
        ],
        np.uint32,
    ).view(np.float32),
    np.array([0xC0B479B1, 0xC03DC92E, 0xBFABA1F5, 0x3DB069F8, 0x3FE71FBC, 0x4099A343, 0x41078F0A], np.uint32).view(
        np.float32
    ),
)
"""Source: docs/isa, table of LOGISTIC for an output scale of 1/256."""
HALF = step(0x3EFEFF00, 0, 0x437F0000)

PROGRAMS = {
    "relu": (1, [step(0x3F800000, 0, 0x437F0000)]),
    "relu_4": (4, [step(0x3F800000, 0, 0x437F0000)]),
    "relu_2": (2, [step(0x3F800000, 0, 0x437EFFFF)]),
    "add1": (1, [step(0x3F7EFFFF, 0, 0x437EFFFF)]),
    "mul2": (1, [step(0x3EFEFF01, 0, 0x437F0000)]),
    "div2": (1, [HALF]),
    "div4": (1, [HALF]),
    "div2_8": (8, [HALF]),
    "div2_10": (16, [HALF]),
    "div2_20": (32, [HALF]),
    "div2_40": (64, [HALF]),
    "div2_80": (128, [HALF]),
    "mul2_add10": (8, [HALF, step(0x3F7B13B0, 0, 0x437EFFFF, offset=2)]),
    "sub1": (1, []),
    "sigmoid": (1, [step(0x3F800000, 0xC1265904, 0x41265904, spline=LOGISTIC)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_bare_programs(corpus, name):
    n, steps = PROGRAMS[name]
    program = elementwise(n, steps)
    program.check()
    theirs = (corpus / "legacy_programs" / f"{name}.coral").read_bytes()
    assert_same(program.bitstreams[0].data, theirs, name)


@pytest.mark.parametrize("n", [3, 63, 65, 100, 1000, 1025, 2500, 4096])
def test_other_sizes_build(n):
    program = elementwise(n, [HALF, HALF])
    program.check()
    ops = [p.instruction for p in isa.decode(program.bitstreams[0].data) if isinstance(p.instruction, isa.Op)]
    assert sum(op.loop_cnt1 + 1 for op in ops[: len(ops) // 2]) == -(-n // 4)


def test_refused():
    for n in (0, 4097):
        with pytest.raises(ShapeError, match=f"of {n} elements, allowed are 1..4096"):
            elementwise(n, [HALF])
    odd = Spline(LOGISTIC.coefficients, LOGISTIC.breakpoints, odd=True)
    with pytest.raises(CodegenError, match="odd"):
        elementwise(8, [Requantise(1.0, 0.0, 255.0, spline=odd)])
