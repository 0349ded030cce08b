"""coral.numerics against exact rational arithmetic: every float32 operation is redone with fractions and rounded."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from exact_float import exact32, exact_requantise, fraction
from hypothesis import given, settings
from hypothesis import strategies as st

from coral import CoralError, numerics
from coral.numerics import NumericsError

scales = st.floats(2.0**-30, 2.0**10, width=32, exclude_min=True)
multipliers = st.one_of(
    st.floats(2.0**-24, 1.0, width=32),
    st.integers(0, 20).map(lambda k: 2.0**-k),
    st.integers(1, 12).map(lambda k: k / 8),
)
int32s = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-5000, 5000))
codes = st.integers(0, 255)


@given(st.one_of(st.floats(-1e30, 1e30), st.integers(-(2**40), 2**40), st.floats(-1e-38, 1e-38)))
def test_f32_is_the_nearest_float32(x: float) -> None:
    assert fraction(numerics.f32(x)) == exact32(Fraction(x))


@given(scales, scales, scales)
def test_multiplier_rounds_every_step(s_x: float, s_w: float, s_y: float) -> None:
    inverse = exact32(1 / Fraction(s_y))
    assert fraction(numerics.inv(s_y)) == inverse
    expected = exact32(exact32(Fraction(s_x) * Fraction(s_w)) * inverse)
    assert fraction(numerics.multiplier(s_x, s_w, s_y)) == expected
    assert numerics.multiplier(s_x, np.float32([s_w, 0.5]), s_y).tolist()[0] == float(expected)


def test_order_of_the_multiplier_is_visible() -> None:
    """The two shorter formulas give other floats often, so the tests above and the corpus can tell them apart."""
    rng = np.random.default_rng(7)
    triples = np.float32(10.0 ** rng.uniform(-4, 0, (2000, 3)))
    ours = [float(numerics.multiplier(*t)) for t in triples.tolist()]
    one_quotient = [float(exact32(Fraction(x) * Fraction(w) / Fraction(y))) for x, w, y in triples.tolist()]
    two_steps = [float(exact32(exact32(Fraction(x) * Fraction(w)) / Fraction(y))) for x, w, y in triples.tolist()]
    assert sum(a != b for a, b in zip(ours, one_quotient, strict=True)) > 500
    assert sum(a != b for a, b in zip(ours, two_steps, strict=True)) > 400


@given(scales, codes, st.sampled_from(sorted(numerics.ACTIVATION_RANGES)))
def test_clamps(s_y: float, z_y: int, activation: str) -> None:
    real = {"NONE": (None, None), "RELU": (0, None), "RELU6": (0, 6), "RELU_N1_TO_1": (-1, 1)}[activation]
    lo, hi = (exact32(Fraction(code - z_y) * Fraction(s_y)) for code in (0, 255))
    lo, hi = (
        lo if real[0] is None else max(lo, Fraction(real[0])),
        hi if real[1] is None else min(hi, Fraction(real[1])),
    )
    inverse = exact32(1 / Fraction(s_y))
    got = numerics.clamps(s_y, z_y, activation)
    assert tuple(map(fraction, got)) == (exact32(lo * inverse), exact32(hi * inverse))


def test_clamps_of_int8_codes_equal_those_of_shifted_codes() -> None:
    assert numerics.clamps(0.037, -5, lo_code=-128, hi_code=127) == numerics.clamps(0.037, 123)
    assert numerics.integer_clamps(7, 2, 250) == (-5.0, 243.0)


@given(int32s, multipliers, codes, st.data())
def test_requantise(acc: int, mult: float, zero_point: int, data: st.DataObject) -> None:
    low = data.draw(st.floats(-zero_point, 255 - zero_point, width=32))
    high = data.draw(st.floats(low, 255 - zero_point, width=32))
    got = numerics.requantise(np.array([acc], np.int32), mult, low, high, zero_point)
    assert got.dtype == np.uint8
    assert got[0] == exact_requantise(acc, fraction(np.float32(mult)), Fraction(low), Fraction(high), zero_point)


@given(int32s, multipliers, st.integers(0, 65535))
def test_requantise_to_16_bits_saturates(acc: int, mult: float, zero_point: int) -> None:
    got = numerics.requantise(np.array(acc, np.int32), mult, -np.inf, np.inf, zero_point, bits=16)
    bound = Fraction(2**40)
    assert got.dtype == np.uint16
    assert got == exact_requantise(acc, fraction(np.float32(mult)), -bound, bound, zero_point, 65535)


@pytest.mark.parametrize(
    ("acc", "code"), [(1, 100), (3, 102), (5, 102), (7, 104), (-1, 100), (-3, 98), (-5, 98), (2, 101)]
)
def test_ties_go_to_even(acc: int, code: int) -> None:
    """Half up would give 101 for acc 1 and half away from zero 99 for acc -1."""
    assert numerics.requantise(np.array(acc, np.int32), 0.5, -100, 155, 100) == code


@pytest.mark.parametrize(
    ("acc", "mult", "code"),
    [
        (19, 0.026315787807106972, 0),  # 19 * m is above 0.4999999; F(19 * m) = 0.49999997
        (3, 0.8333333134651184, 2),  # 2.49999994 exactly, F() = 2.5, a tie that goes to 2 as the product would
        (3, 1.1666666269302368, 4),  # 3.49999988 exactly, F() = 3.5: rounds to 4, the exact product to 3
        (2**24 + 1, 2.5 * 2.0**-24, 2),  # F(2^24 + 1) = 2^24, so a tie; the sum itself would give 2.5000002 and 3
        (-3, 1.1666666269302368, -4),
    ],
)
def test_the_product_is_rounded_to_float32_before_the_rounding_to_codes(acc: int, mult: float, code: int) -> None:
    assert float(np.float32(mult)) == mult
    assert int(numerics.requantise(np.array(acc, np.int32), mult, -128, 127, 128)) - 128 == code
    assert exact_requantise(acc, Fraction(mult), Fraction(-128), Fraction(127), 128) - 128 == code


def test_padding_channels_become_the_lower_clamp() -> None:
    """0 * inf is NaN; per-channel tables hold huge scales for channels that do not exist."""
    acc = np.array([[0, 1, -1]], np.int32)
    assert numerics.requantise(acc, np.float32([np.inf] * 3), -10, 20, 30).tolist() == [[20, 50, 20]]


@settings(max_examples=60)
@given(st.data())
def test_fully_connected(data: st.DataObject) -> None:
    m, n, k = (data.draw(st.integers(1, high)) for high in (3, 4, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x, w = rng.integers(0, 256, (m, k), np.uint8), rng.integers(0, 256, (n, k), np.uint8)
    b = data.draw(st.sampled_from([None, rng.integers(-(2**31), 2**31, n, np.int32), rng.integers(-9, 9, n, np.int32)]))
    per_channel = data.draw(st.booleans())
    w_zp = rng.integers(0, 256, n) if per_channel else data.draw(codes)
    mult = np.float32(rng.uniform(2**-12, 1, n)) if per_channel else np.float32(data.draw(multipliers))
    in_zp, out_zp = data.draw(codes), data.draw(codes)
    got = numerics.fully_connected(x, w, b, in_zp, w_zp, mult, -out_zp, 255 - out_zp, out_zp)
    zeros, mults = np.broadcast_to(w_zp, n).tolist(), np.broadcast_to(mult, n).tolist()
    for row in range(m):
        for col in range(n):
            acc = sum((int(x[row, i]) - in_zp) * (int(w[col, i]) - zeros[col]) for i in range(k))
            acc += 0 if b is None else int(b[col])
            wrapped = (acc + 2**31) % 2**32 - 2**31
            low, high = Fraction(-out_zp), Fraction(255 - out_zp)
            assert got[row, col] == exact_requantise(wrapped, Fraction(mults[col]), low, high, out_zp)


def test_fully_connected_is_exact_at_the_largest_sums() -> None:
    k = numerics.MAX_K
    x, w = np.full((1, k), 255, np.uint8), np.full((2, k), 255, np.uint8)
    w[1, 0] = 254
    acc = numerics.fully_connected(x, w, np.array([-k * 65025, -k * 65025], np.int32), 0, 0, 1.0, -255, 0, 255)
    assert acc.tolist() == [[255, 0]]
    numerics.check_accumulator(k)
    numerics.check_accumulator(k, np.array([-(2**31 - 1 - k * 65025)], np.int32))
    with pytest.raises(NumericsError, match="K = 33025 with a bias of up to 33023"):
        numerics.check_accumulator(k, np.array([-(2**31 - k * 65025)], np.int32))
    with pytest.raises(NumericsError, match="K = 33026"):
        numerics.check_accumulator(k + 1)


def test_sums_wrap_like_the_chips_registers() -> None:
    x, w = np.full((1, 2), 255, np.uint8), np.ones((2, 2), np.uint8)
    b = np.array([2**31 - 1, 2**31 - 511], np.int32)
    assert numerics.fully_connected(x, w, b, 0, 0, 1.0, -100, 155, 100).tolist() == [[0, 255]]


def reference_spline(c: np.ndarray, brk: np.ndarray, x: Fraction) -> Fraction:
    segment = sum(1 for b in brk if math.isfinite(b) and fraction(b) <= x)
    y = fraction(c[segment, 4])
    for term in (3, 2, 1, 0):
        y = exact32(fraction(c[segment, term]) + exact32(x * y))
    return y


def random_spline(seed: int, **flags: bool) -> numerics.Spline:
    rng = np.random.default_rng(seed)
    brk = np.sort(np.float32(rng.uniform(-4, 4, 7)))
    if flags:
        brk = np.sort(np.abs(brk))
        brk[-1] = np.inf
    return numerics.Spline(np.float32(rng.normal(0, 20, (8, 5))), brk, **flags)


@given(st.integers(0, 20), st.floats(-6, 6, width=32))
def test_spline(seed: int, x: float) -> None:
    spline = random_spline(seed)
    got = spline(np.float32([x, *spline.breakpoints]))
    assert got.dtype == np.float32
    for value, result in zip([x, *spline.breakpoints], got, strict=True):
        assert fraction(result) == reference_spline(spline.coefficients, spline.breakpoints, fraction(value))


@given(st.integers(0, 20), st.floats(-6, 6, width=32))
def test_odd_spline(seed: int, x: float) -> None:
    spline = random_spline(seed, odd=True)
    expected = reference_spline(spline.coefficients, spline.breakpoints, abs(Fraction(x)))
    assert fraction(spline(np.float32([x]))[0]) == (-expected if x < 0 or str(x) == "-0.0" else expected)


@given(st.integers(0, 20), st.floats(2.0**-60, 2.0**60, width=32))
def test_range_reduced_spline(seed: int, x: float) -> None:
    spline = random_spline(seed, range_reduce=True)
    exponent, mantissa = 0, Fraction(x)
    while mantissa >= 4:
        mantissa, exponent = mantissa / 4, exponent + 1
    while mantissa < 1:
        mantissa, exponent = mantissa * 4, exponent - 1
    expected = exact32(reference_spline(spline.coefficients, spline.breakpoints, mantissa) / Fraction(2) ** exponent)
    assert fraction(spline(np.float32([x]))[0]) == expected


def test_range_reduction_outside_its_domain_and_the_stored_code() -> None:
    spline = random_spline(1, range_reduce=True)
    assert np.isnan(spline(np.float32([0, -1, np.inf, np.nan]))).all()
    assert numerics.requantise(np.array([-1, 0], np.int32), 1.0, -5, 5, 9, nlu=spline).tolist() == [0, 0]


def test_requantise_evaluates_the_spline_between_clamp_and_rounding() -> None:
    square = np.zeros((8, 5), np.float32)
    square[:, 2] = 1
    spline = numerics.Spline(square, np.float32([np.inf] * 7))
    acc = np.array([-100, -3, -1, 0, 1, 3, 100], np.int32)
    assert numerics.requantise(acc, 0.5, -2, 4, 1, nlu=spline).tolist() == [5, 3, 1, 1, 1, 3, 17]


@pytest.mark.parametrize(
    ("s_2", "weights"),
    [(0.3, (10, 3)), (0.37, (100, 37)), (0.0039, (10000, 39)), (1.001, (20999, 21020)), (1.0, (1, 1)), (2.0, (1, 2))],
)
def test_add_weights_of_known_scales(s_2: float, weights: tuple[int, int]) -> None:
    """Pairs that Google's compiler chose (docs/numerics.md)."""
    assert numerics.add_weights(1.0, s_2) == weights


@settings(max_examples=25)
@given(st.floats(2.0**-7, 2.0**7, width=32), st.floats(2.0**-7, 2.0**7, width=32))
def test_add_weights_are_the_best_of_all(s_1: float, s_2: float) -> None:
    w_1, w_2 = numerics.add_weights(s_1, s_2)
    small, large = min(Fraction(s_1), Fraction(s_2)), max(Fraction(s_1), Fraction(s_2))
    ratio, chosen = small / large, Fraction(min(w_1, w_2), max(w_1, w_2))
    assert (w_1 >= w_2) == (s_1 >= s_2) or w_1 == w_2
    assert max(w_1, w_2) <= 32767
    denominators = np.arange(1, 32768)
    errors = np.abs(np.rint(float(ratio) * denominators) / denominators - float(ratio))
    assert abs(chosen - ratio) <= Fraction(float(errors.min())) + Fraction(1, 2**50)


@given(st.integers(0, 2**32), scales, scales, scales)
def test_add(seed: int, s_a: float, s_b: float, s_y: float) -> None:
    if not 1 / 30000 < s_a / s_b < 30000:
        return
    rng = np.random.default_rng(seed)
    a, b, (z_a, z_b, z_y) = (
        rng.integers(0, 256, 3, np.uint8),
        rng.integers(0, 256, 3, np.uint8),
        rng.integers(0, 256, 3),
    )
    w_1, w_2 = weights = numerics.add_weights(s_a, s_b)
    mult = numerics.add_multiplier(s_a, w_1, s_y)
    assert fraction(mult) == exact32(exact32(Fraction(s_a) / w_1) * exact32(1 / Fraction(s_y)))
    got = numerics.add(a, b, int(z_a), int(z_b), weights, mult, -float(z_y), 255.0 - z_y, int(z_y))
    for i in range(3):
        acc = w_1 * (int(a[i]) - int(z_a)) + w_2 * (int(b[i]) - int(z_b))
        assert got[i] == exact_requantise(acc, fraction(mult), Fraction(int(-z_y)), Fraction(int(255 - z_y)), int(z_y))


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_scale_and_zero_point(a: float, b: float) -> None:
    lo, hi = min(a, b), max(a, b)
    s, z = numerics.scale_and_zero_point(lo, hi)
    assert float(np.float32(s)) == s
    assert 0 <= z <= 255
    assert numerics.dequantise(np.array([z], np.uint8), s, z)[0] == 0
    if max(hi, 0) - min(lo, 0) > 1e-20:
        ends = numerics.dequantise(numerics.quantise([lo, hi], s, z), s, z)
        assert np.all(np.abs(ends - np.array([lo, hi])) <= s * 0.501 * (1 + 1e-6))


def test_ranges_without_width() -> None:
    assert numerics.scale_and_zero_point(0, 0) == (1.0, 0)
    assert numerics.scale_and_zero_point(-1e-40, 1e-40) == (1.0, 0)
    assert numerics.scale_and_zero_point(0, 255) == (1.0, 0)
    assert numerics.scale_and_zero_point(3, 5)[1] == 0
    assert numerics.scale_and_zero_point(-5, -3)[1] == 255


@given(st.floats(-1e4, 1e4, width=32), scales, codes)
def test_quantise(x: float, s: float, z: int) -> None:
    product = exact32(Fraction(x) * exact32(1 / Fraction(s)))
    expected = round(min(max(product, Fraction(-z)), Fraction(255 - z))) + z
    assert numerics.quantise([x], s, z).tolist() == [expected]


@given(scales, codes)
def test_codes_survive_the_way_through_real_values(s: float, z: int) -> None:
    every = np.arange(256, dtype=np.uint8)
    assert np.array_equal(numerics.quantise(numerics.dequantise(every, s, z), s, z), every)
    rectified = np.maximum(numerics.dequantise(every, s, z), 0)
    assert np.array_equal(numerics.quantise(rectified, s, z), np.maximum(every, z))


@given(st.floats(-10, 10, width=32), st.floats(2.0**-12, 1, width=32), st.floats(2.0**-12, 1, width=32))
def test_quantise_bias(b: float, s_x: float, s_w: float) -> None:
    assert numerics.quantise_bias([b], s_x, s_w).tolist() == [
        round(Fraction(b) / exact32(Fraction(s_x) * Fraction(s_w)))
    ]


X, W, B = np.zeros((2, 3), np.uint8), np.zeros((4, 3), np.uint8), np.zeros(4, np.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: numerics.inv(0), "scale is 0"),
        (lambda: numerics.inv(float("nan")), "positive and finite"),
        (lambda: numerics.inv(1e-39), "no float32 reciprocal"),
        (lambda: numerics.multiplier(1, [1.0, -1.0], 1), "weight scale"),
        (lambda: numerics.multiplier(1e30, 1e30, 1), "not a positive float32"),
        (lambda: numerics.multiplier(1e-30, 1e-30, 1), "not a positive float32"),
        (lambda: numerics.clamps(1, 0, "GELU"), "'GELU' is not one of NONE"),
        (lambda: numerics.clamps(1, 300), "zero point 300"),
        (lambda: numerics.integer_clamps(0, 9, 8), "lo=9, hi=8"),
        (lambda: numerics.requantise(np.zeros(1, np.int64), 1, 0, 1, 0), "int32, not int64"),
        (lambda: numerics.requantise(np.zeros(1, np.int32), 1, 0, 1, 256), "out_zp=256"),
        (lambda: numerics.requantise(np.zeros(1, np.int32), 1, 0, 1, 0, bits=9), "bits=9"),
        (lambda: numerics.fully_connected(X.astype(np.int8), W, B, 0, 0, 1, 0, 1, 0), "int8"),
        (lambda: numerics.fully_connected(X, W.T, B, 0, 0, 1, 0, 1, 0), r"\(3, 4\)"),
        (lambda: numerics.fully_connected(X, W, B[:3], 0, 0, 1, 0, 1, 0), r"\(3,\)"),
        (lambda: numerics.fully_connected(X, W, B, 0, [0, 0], 1, 0, 1, 0), r"scalars or \[4\]"),
        (lambda: numerics.fully_connected(X, W, B, -1, 0, 1, 0, 1, 0), "in_zp=-1"),
        (lambda: numerics.add_weights(1, 1e-9), "factor of 32767"),
        (lambda: numerics.add_multiplier(1, 0, 1), "ADD weight 0"),
        (lambda: numerics.add(X.astype(int), X, 0, 0, (1, 1), 1, 0, 1, 0), "uint8"),
        (lambda: numerics.scale_and_zero_point(1, float("inf")), "finite"),
        (lambda: numerics.scale_and_zero_point(1, 0), "ascending"),
        (lambda: numerics.quantise([float("nan")], 1, 0), "NaN"),
        (lambda: numerics.quantise([0.0], 1, 256), "zero point 256"),
        (lambda: numerics.quantise_bias([1.0], 1e-9, 1e-9), "does not fit int32"),
        (lambda: numerics.quantise_bias([float("nan")], 1, 1), "does not fit int32"),
        (lambda: numerics.Spline(np.zeros((8, 4), np.float32), np.zeros(7, np.float32)), r"\(8, 4\)"),
        (lambda: numerics.Spline(np.zeros((8, 5)), np.zeros(7, np.float32)), "float64"),
        (lambda: numerics.Spline(np.zeros((8, 5), np.float32), np.float32([1, 0, 0, 0, 0, 0, 0])), "ascend"),
    ],
)
def test_errors_name_value_and_limit(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(NumericsError, match=message) as caught:
        call()
    assert isinstance(caught.value, CoralError)
