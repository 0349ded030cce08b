"""The chip's arithmetic where its variants give different codes. Source: docs/numerics.md."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from coral import isa, numerics
from coral.apps.probes import Finding, step
from coral.apps.probes.bench import Bench
from coral.apps.probes.layers import compare, run_elementwise
from coral.apps.probes.programs import INPUT, changed
from coral.codegen.eltwise import Requantise, elementwise
from coral.codegen.fc import FcQuant, fully_connected

CODES = np.arange(256, dtype=np.uint8)


def _which(codes: np.ndarray, **variants: np.ndarray) -> str:
    """The variant with these codes, or the codes."""
    return next((name for name, v in variants.items() if np.array_equal(v, codes)), f"none: {codes.tolist()}")


@step(2)
def rounding_of_ties(bench: Bench) -> Finding:
    """Accumulators -5 to 5 times one half."""
    acc = np.arange(-5, 6)
    fc = fully_connected(acc.size, 4, FcQuant(9, 0, 100, 0.5, -100.0, 155.0))
    bench.stick.run(fc.caching(fc.blob(np.zeros((acc.size, 4), np.uint8), acc.astype(np.int32))))
    codes = np.frombuffer(bench.run(fc.execution, {INPUT: bytes([9] * 8)}), np.uint8)[: acc.size].astype(int) - 100
    half, away = acc / 2, np.copysign(0.5, acc)
    return Finding(
        _which(codes, even=np.rint(half), up=np.floor(half + 0.5), away=np.trunc(half + away), zero=np.trunc(half)),
        "even",
        {"codes": codes.tolist()},
    )


@step(6)
def saturation(bench: Bench) -> Finding:
    """Values outside 8 bits with infinite clamps."""
    value = 4 * (CODES.astype(int) - 128)
    codes, _ = run_elementwise(bench, CODES, Requantise(4.0, -inf, inf, in_zp=128))
    return Finding(_which(codes, saturates=np.clip(value, 0, 255), wraps=value & 255), "saturates")


def _spline(*coefficients: float, breakpoints: tuple[float, ...] = ()) -> numerics.Spline:
    """One polynomial everywhere, constant first; with breakpoints: constants between them."""
    rows = [[c, 0, 0, 0, 0] for c in coefficients] if breakpoints else [[*coefficients, 0, 0, 0, 0][:5]]
    table = np.array([*rows, *[rows[-1]] * (8 - len(rows))], np.float32)
    return numerics.Spline(table, np.array([*breakpoints, *[inf] * (7 - len(breakpoints))], np.float32))


def _through(bench: Bench, x: list[int], mult: float, spline: numerics.Spline, offset: int = 0) -> list[int]:
    op = Requantise(mult, -inf, inf, offset=offset, spline=spline)
    return run_elementwise(bench, np.array(x, np.uint8), op)[0].tolist()


@step(4)
def nlu_multiply_add(bench: Bench) -> Finding:
    """One polynomial whose result is 8 when products are rounded before they are added, and 24 when they are not."""
    # x = 16 (1 + 2^-12); c4 x is a tie of float32 that rounds to -c3, or leaves 2^-8, which x^3 makes visible
    spline = _spline(8, 0, 0, -(2.0**16) * (1 + 2.0**-11), 2.0**12 * (1 + 2.0**-12))
    code = _through(bench, [0] * 8, 2.0**-8, spline, offset=4097)[0]
    return Finding({8: "separate", 24: "fused"}.get(code, f"neither: {code}"), "separate")


@step(4)
def nlu_edges(bench: Bench) -> Finding:
    """Arguments that equal breakpoints, results that are ties, results outside 8 bits."""
    edges = _through(bench, [*range(9)], 1.0, _spline(*range(0, 80, 10), breakpoints=(1, 2, 3, 4, 5, 6, 7)))
    halves, ends = _through(bench, [*range(9)], 0.5, _spline(0, 1)), _through(bench, [0, 200], 3.0, _spline(-7, 1))
    assumed = [[*range(0, 80, 10), 70], np.rint(np.arange(9) / 2).astype(int).tolist(), [0, 255]]
    return Finding(f"{[edges, halves, ends]}", f"{assumed}")


@step(4)
def nlu_functions(bench: Bench) -> Finding:
    """LOGISTIC and the reciprocal square root of all 256 codes at many scales; 8-bit results."""
    logistic, roots, limit = numerics.LOGISTIC.scaled(256), numerics.RSQRT.scaled(200), numerics.LOGISTIC_CLAMP
    table = replace(roots, range_reduce=False)  # the generator has no form with reduction: the op is changed below
    differ = {}
    for scale in (float(np.float32(0.04 * 1.07**i)) for i in range(12)):
        op = Requantise(scale, -limit, limit, in_zp=128, spline=logistic)
        differ[f"logistic {scale:.6f}"] = run_elementwise(bench, CODES, op)[1]
        plain = elementwise(256, [Requantise(scale, scale, inf, spline=table)])
        program = changed(plain, lambda i: {"nlu_range_reduce": 1} if isinstance(i, isa.Op) else {})
        expected = numerics.requantise(CODES.astype(np.int32), scale, scale, inf, 0, nlu=roots)
        differ[f"rsqrt {scale:.6f}"] = compare(bench.run(program, {INPUT: CODES.tobytes()}), expected)
    return Finding(f"{sum(differ.values())} codes differ", "0 codes differ", differ)
