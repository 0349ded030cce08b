"""Pools, averages, softmax, L2 normalisation and resizes against Python integers and exact rationals."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from evaluate_graphs import RANGES, Quantised, exact_clamps, fraction, inverse, run, single, tensor
from exact_float import exact32, exact_requantise
from hypothesis import given, settings
from hypothesis import strategies as st
from test_products import geometry, windows

from coral import numerics
from coral.evaluate import EvaluateError

seeds, dtypes = st.integers(0, 2**32), st.sampled_from(["u1", "i1"])
generations = st.sampled_from(["new", "old"])
INFINITE = (Fraction(-(2**40)), Fraction(2**40))


def average(s_in: float, n: int, s_out: float, generation: str) -> Fraction:
    if generation == "new":
        return exact32(exact32(fraction(s_in) * exact32(Fraction(1, n))) * inverse(s_out))
    return exact32(exact32(fraction(s_in) * inverse(s_out)) / n)


@settings(deadline=None)
@given(seeds, geometry, geometry, dtypes, generations, st.sampled_from(sorted(RANGES)), st.booleans())
def test_pools(seed: int, rows: Any, columns: Any, dtype: str, generation: Any, activation: str, maximum: bool) -> None:
    """Windows at the border hold fewer values; the average is over these."""
    rng = np.random.default_rng(seed)
    rows, columns = (*rows[:3], 1, "SAME"), (*columns[:3], 1, "SAME")
    ys, xs = windows(*rows), windows(*columns)
    x, y = Quantised(rng, (1, rows[0], columns[0], 2), dtype), Quantised(rng, (1, len(ys), len(xs), 2), dtype)
    if maximum:
        y.scale, y.zero_point = x.scale, x.zero_point
    options = {"filter_height": rows[1], "filter_width": columns[1], "stride_h": rows[2], "stride_w": columns[2]}
    name = "MAX_POOL_2D" if maximum else "AVERAGE_POOL_2D"
    graph = single(
        name, [x.tensor("x"), y.tensor("y")], (0,), padding="SAME", fused_activation_function=activation, **options
    )
    got = y.codes(run(graph, x.values, generation=generation))
    clamps = exact_clamps(y.scale, y.zero_point, activation)
    if not maximum and generation == "old" and activation == "NONE":
        clamps = INFINITE
    for oy, ox, c in np.ndindex(got.shape[1:]):
        inside = [
            x.centred[0][row][column][c]
            for row in ys[oy]
            for column in xs[ox]
            if 0 <= row < rows[0] and 0 <= column < columns[0]
        ]
        acc, mult = (max(inside), Fraction(1)) if maximum else (
            sum(inside), average(x.scale, len(inside), y.scale, generation)
        )  # fmt: skip
        assert got[0, oy, ox, c] == exact_requantise(acc, mult, *clamps, y.zero_point)


@given(seeds, dtypes, generations, st.sampled_from([(0,), (1, 2), (-1,), (2, -2, 1), (0, 1, 2)]), st.booleans())
def test_mean_and_sum(seed: int, dtype: str, generation: Any, axes: tuple[int, ...], keep: bool) -> None:
    rng = np.random.default_rng(seed)
    x = Quantised(rng, (3, 4, 5), dtype)
    totals = np.array(x.centred).sum(axis=tuple({axis % 3 for axis in axes}), keepdims=keep)
    y, n = Quantised(rng, totals.shape, dtype), 60 // totals.size
    axis = tensor("axis", (len(axes),), "i4", data=np.int32(axes))
    for name in ("MEAN", "SUM"):
        graph = single(name, [x.tensor("x"), axis, y.tensor("y")], (0, 1), keep_dims=keep)
        got = y.codes(run(graph, x.values, generation=generation)).ravel().tolist()
        mult, clamps = average(x.scale, n, y.scale, generation), exact_clamps(y.scale, y.zero_point)
        if name == "SUM":
            mult = exact32(fraction(x.scale) * inverse(y.scale))
        elif generation == "old":
            clamps = INFINITE
        assert got == [exact_requantise(int(t), mult, *clamps, y.zero_point) for t in totals.ravel()]


def exact_spline(table: numerics.Spline, x: Fraction) -> Fraction:
    """Horner in float32 steps, with range reduction by powers of 4 where the table has it."""
    exponent = 0
    if table.range_reduce:
        while x >= 4:
            x, exponent = x / 4, exponent + 1
        while x < 1:
            x, exponent = x * 4, exponent - 1
    c = table.coefficients[sum(fraction(b) <= x for b in table.breakpoints if np.isfinite(b))]
    y = fraction(c[4])
    for term in (3, 2, 1, 0):
        y = exact32(fraction(c[term]) + exact32(x * y))
    return y / Fraction(2) ** exponent


def exact_scaled(table: numerics.Spline, factor: Fraction) -> numerics.Spline:
    scaled = [[float(exact32(fraction(c) * factor)) for c in row] for row in table.coefficients]
    return numerics.Spline(np.float32(scaled), table.breakpoints, table.odd, table.range_reduce)


def wide(value: Fraction) -> int:
    return min(max(round(value), 0), 65535)


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 12), st.floats(2.0**-10, 0.5, width=32), st.sampled_from([1.0, 0.5, 1.7]))
def test_softmax_on_the_tiles(seed: int, n: int, scale: float, beta: float) -> None:
    """Step by step in exact rationals, and at most one code from the real function."""
    rng = np.random.default_rng(seed)
    x = Quantised(rng, (2, n), "i1")
    x.scale = scale
    graph = single("SOFTMAX", [x.tensor("x"), tensor("y", (2, n), "i1", [1 / 256], [-128])], (0,), beta=beta)
    got = run(graph, x.values).astype(int) + 128
    step, root_scale = exact32(Fraction(1, 65535)), exact32(Fraction(1, 46340))
    last = exact32(exact32(step * exact32(exact32(root_scale * root_scale) * exact32(1 / step))) * 256)
    assert np.float32(float(last)).view(np.uint32) == 0x34000157
    for row, codes in zip(got, x.centred, strict=True):
        mult, low = exact32(fraction(scale) * fraction(beta)), fraction(-13.038098)
        inputs = [max(exact32((v - max(codes)) * mult), low) for v in codes]
        e = [wide(exact_spline(numerics.EXP_65535, v)) for v in inputs]
        total = exact32(exact32(Fraction(sum(e))) * step)
        root = wide(exact_spline(exact_scaled(numerics.RSQRT, Fraction(46340)), total))
        inverse_sum = min(wide(exact32(exact32(Fraction(root**2)) * step)), 32768)
        expected = [min(round(exact32(exact32(Fraction(v * inverse_sum)) * last)), 255) for v in e]
        assert row.tolist() == expected
        real = np.exp((np.array(codes) - max(codes)) * float(mult))
        assert np.abs(row - np.minimum(real / real.sum() * 256, 255)).max() < 1.5


@given(seeds, st.integers(1, 300), st.floats(2.0**-10, 0.5, width=32), st.sampled_from([0, 3]))
def test_softmax_on_the_scalar_core(seed: int, n: int, scale: float, z_out: int) -> None:
    """Sequential float32 sums; at most one code from the real function."""
    rng = np.random.default_rng(seed)
    x = Quantised(rng, (n,), "u1")
    x.scale = scale
    graph = single("SOFTMAX", [x.tensor("x"), tensor("y", (n,), "u1", [1 / 256], [z_out])], (0,), beta=1.0)
    got, f = run(graph, x.values, generation="old"), np.float32
    values = [f(v) * f(scale) for v in x.centred]
    e = [f(np.exp2(np.float64((v - max(values)) * f(1.4426950408889634)))) for v in values]
    total = f(0)
    for v in e:
        total = total + v
    expected = [min(round(float(v * (f(1) / total) * f(256))) + z_out, 255) for v in e]
    assert got.tolist() == expected
    real = np.exp((np.array(x.centred) - max(x.centred)) * scale)
    assert np.abs(got - np.minimum(real / real.sum() * 256 + z_out, 255)).max() < 1


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 12), st.floats(2.0**-7, 0.5, width=32))
def test_l2_normalization(seed: int, n: int, scale: float) -> None:
    """Step by step in exact rationals, and at most one code from the real function."""
    rng = np.random.default_rng(seed)
    x = Quantised(rng, (2, n), "u1")
    x.scale = scale
    graph = single("L2_NORMALIZATION", [x.tensor("x"), tensor("y", (2, n), "u1", [1 / 128], [128])], (0,))
    got = run(graph, x.values)
    k = exact32(65535 / exact32(1 / fraction(scale)))
    table = exact_scaled(numerics.RSQRT, k)
    for row, values in zip(got, x.centred, strict=True):
        square = exact32(fraction(scale) ** 2)
        total = max(exact32(exact32(Fraction(sum(v * v for v in values))) * square), square)
        root, mult = wide(exact_spline(table, total)), exact32(exact32(fraction(scale) * exact32(1 / k)) * 128)
        expected = [round(min(max(exact32(exact32(Fraction(v * root)) * mult), -128), 127)) + 128 for v in values]
        assert row.tolist() == expected
        norm = np.sqrt(sum(v * v for v in values)) or 1
        assert np.abs(row - np.clip(np.array(values) / norm * 128 + 128, 0, 255)).max() < 1


@given(seeds, dtypes, st.integers(1, 5), st.integers(1, 5))
def test_twofold_resizes(seed: int, dtype: str, height: int, width: int) -> None:
    """Bilinear from the definition of half pixel centres, edges repeated; nearest repeats pixels."""
    rng = np.random.default_rng(seed)
    x = Quantised(rng, (1, height, width, 2), dtype)
    y = tensor("y", (1, 2 * height, 2 * width, 2), dtype, [x.scale], [x.zero_point - x.offset])
    options = {"half_pixel_centers": True, "align_corners": False}
    bilinear = x.codes(run(single("RESIZE_BILINEAR", [x.tensor("x"), y], (0,), **options), x.values))
    nearest = run(single("RESIZE_NEAREST_NEIGHBOR", [x.tensor("x"), y], (0,), **options), x.values)
    codes = x.codes(x.values)
    for oy, ox, c in np.ndindex(bilinear.shape[1:]):
        assert nearest[0, oy, ox, c] == x.values[0, oy // 2, ox // 2, c]
        total = Fraction(0)
        centre = [(Fraction(2 * o + 1, 4) - Fraction(1, 2)) for o in (oy, ox)]
        for ty, tx in np.ndindex(2, 2):
            (row, fy), (column, fx) = ((p // 1 + t, p % 1) for p, t in zip(centre, (ty, tx), strict=True))
            weight = (fy if ty else 1 - fy) * (fx if tx else 1 - fx)
            total += weight * int(codes[0, min(max(row, 0), height - 1), min(max(column, 0), width - 1), c])
        assert bilinear[0, oy, ox, c] == round(total)


@given(seeds, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_resizes_that_repeat(seed: int, height: int, width: int, down: int, across: int) -> None:
    """Nearest by whole factors: TFLite's position floor((o + 1/2 or 0) * in / out); a single pixel in any mode."""
    rng = np.random.default_rng(seed)
    x, half = Quantised(rng, (1, height, width, 2), "u1"), bool(rng.integers(2))
    y = tensor("y", (1, down * height, across * width, 2), "u1", [x.scale], [x.zero_point])
    single_pixel = height == width == 1
    name = "RESIZE_BILINEAR" if single_pixel and rng.integers(2) else "RESIZE_NEAREST_NEIGHBOR"
    options = {"half_pixel_centers": half, "align_corners": single_pixel and bool(rng.integers(2))}
    got, add = run(single(name, [x.tensor("x"), y], (0,), **options), x.values), Fraction(int(half), 2)
    for oy, ox, c in np.ndindex(got.shape[1:]):
        assert got[0, oy, ox, c] == x.values[0, (oy + add) // down, (ox + add) // across, c]


X = tensor("x", (1, 2, 2, 1), "u1", [1], [0])


@pytest.mark.parametrize(
    ("op", "y", "options", "message"),
    [
        ("RESIZE_BILINEAR", (1, 6, 6, 1), {"half_pixel_centers": True}, r"\(1, 6, 6, 1\), its operator's .* 4 x 4"),
        ("RESIZE_BILINEAR", (1, 4, 4, 1), {"align_corners": True}, "RESIZE_BILINEAR 'y': option align_corners is True"),
        ("RESIZE_BILINEAR", (1, 4, 4, 1), {"half_pixel_centers": False}, "option half_pixel_centers is False"),
        ("RESIZE_NEAREST_NEIGHBOR", (1, 4, 4, 1), {"align_corners": True}, "option align_corners"),
        ("AVERAGE_POOL_2D", (1, 1, 1, 1), {"padding": "VALID", "filter_height": 3}, "of 3 positions do not fit"),
        ("AVERAGE_POOL_2D", (1, 2, 2, 1), {"padding": "VALID", "stride_h": -1}, "stride -1"),
        ("L2_NORMALIZATION", (1, 2, 2, 1), {"fused_activation_function": "RELU"}, "activation_function is 'RELU'"),
        ("MEAN", (1, 2, 2, 1), {}, "input 1 is missing"),
    ],
)  # fmt: skip
def test_errors(op: str, y: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluateError, match=message):
        run(single(op, [X, tensor("y", y, "u1", [1], [0])], (0,), **options), np.zeros((1, 2, 2, 1), np.uint8))


def test_quantisation_must_stay() -> None:
    options: dict[str, Any] = {"padding": "VALID", "filter_height": 1, "filter_width": 1, "half_pixel_centers": True}
    for name, y in (("MAX_POOL_2D", (1, 2, 2, 1)), ("RESIZE_BILINEAR", (1, 4, 4, 1))):
        graph = single(name, [X, tensor("y", y, "u1", [2], [0])], (0,), **options)
        with pytest.raises(EvaluateError, match="must have one quantisation"):
            run(graph, np.zeros((1, 2, 2, 1), np.uint8))


def test_axes_must_be_constant() -> None:
    axis = tensor("axis", (1,), "i4")
    graph = single("MEAN", [X, axis, tensor("y", (2, 2, 1), "u1", [1], [0])], (0, 1))
    with pytest.raises(EvaluateError, match=r"input 1 \('axis'\) must be a constant of integers"):
        run(graph, np.zeros((1, 2, 2, 1), np.uint8))
    wide_axis = tensor("axis", (1,), "i4", data=np.int32([7]))
    graph = single("SUM", [X, wide_axis, tensor("y", (2, 2, 1), "u1", [1], [0])], (0, 1))
    with pytest.raises(EvaluateError, match="axis 7"):
        run(graph, np.zeros((1, 2, 2, 1), np.uint8))


def test_rows_must_not_overflow() -> None:
    """Sums of n 16-bit values, and of n squares."""
    for name, n, message in (("SOFTMAX", 2**15 + 1, "1 to 32768 values"), ("L2_NORMALIZATION", 33026, "K = 33026")):
        graph = single(name, [tensor("x", (n,), "u1", [1], [0]), tensor("y", (n,), "u1", [1 / 256], [0])], (0,))
        with pytest.raises(EvaluateError, match=message):
            run(graph, np.zeros(n, np.uint8))
    for name in ("SOFTMAX", "L2_NORMALIZATION"):
        graph = single(name, [tensor("x", (3, 0), "u1", [1], [0]), tensor("y", (3, 0), "u1", [1], [0])], (0,))
        with pytest.raises(EvaluateError, match="a row of values is needed"):
            run(graph, np.zeros((3, 0), np.uint8))
