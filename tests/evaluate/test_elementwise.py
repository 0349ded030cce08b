"""Operators on single values against Python integers and exact rationals."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from evaluate_graphs import RANGES, Quantised, exact_clamps, fraction, inverse, multiplier, run, single, tensor
from exact_float import exact32, exact_requantise
from hypothesis import given, settings
from hypothesis import strategies as st

from coral import evaluate, numerics
from coral.evaluate import EvaluateError

seeds, dtypes, activations = st.integers(0, 2**32), st.sampled_from(["u1", "i1"]), st.sampled_from(sorted(RANGES))


@given(seeds, dtypes, dtypes, st.sampled_from(["QUANTIZE", "RELU", "RELU6", "RELU_N1_TO_1"]))
def test_requantisation(seed: int, from_dtype: str, to_dtype: str, name: str) -> None:
    rng = np.random.default_rng(seed)
    x, y = Quantised(rng, (3, 17), from_dtype), Quantised(rng, (3, 17), to_dtype)
    got = run(single(name, [x.tensor("x"), y.tensor("y")], (0,)), x.values)
    mult = exact32(fraction(x.scale) * inverse(y.scale))
    lo, hi = exact_clamps(y.scale, y.zero_point, "NONE" if name == "QUANTIZE" else name)
    expected = [exact_requantise(v, mult, lo, hi, y.zero_point) for row in x.centred for v in row]
    assert y.codes(got).ravel().tolist() == expected


def test_float_operators_of_the_host() -> None:
    """TFLite rounds half away from zero when it quantises, and saturates."""
    quantize = single("QUANTIZE", [tensor("x", (7,), "f4"), tensor("y", (7,), "i1", [0.5], [-3])], (0,))
    x = np.float32([0, 0.25, -0.25, 0.75, 1e30, -np.inf, 0.2])
    assert run(quantize, x).tolist() == [-3, -2, -4, -1, 127, -128, -3]
    dequantize = single("DEQUANTIZE", [tensor("x", (2,), "u1", [0.1], [10]), tensor("y", (2,), "f4")], (0,))
    assert run(dequantize, np.uint8([0, 255])).tolist() == [
        np.float32(-10) * np.float32(0.1),
        np.float32(245 * np.float32(0.1)),
    ]
    with pytest.raises(EvaluateError, match="NaN"):
        run(quantize, np.full(7, np.nan, np.float32))


def two_operands(name: str, a: Quantised, b: Quantised, y: Quantised, **options: Any) -> np.ndarray:
    graph = single(name, [a.tensor("x"), b.tensor("b"), y.tensor("y")], (0, 1), **options)
    return y.codes(evaluate.evaluate(graph, {"x": a.values, "b": b.values})["y"])


@settings(deadline=None)
@given(seeds, dtypes, activations, st.sampled_from([1, -1]))
def test_add_and_sub(seed: int, dtype: str, activation: str, sign: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, y = (Quantised(rng, (2, 5), dtype) for _ in range(3))
    ratio = fraction(b.scale) / fraction(a.scale)
    best = (ratio if ratio <= 1 else 1 / ratio).limit_denominator(32767)
    w_1, w_2 = (best.denominator, best.numerator) if ratio <= 1 else (best.numerator, best.denominator)
    mult = exact32(exact32(fraction(a.scale) / w_1) * inverse(y.scale))
    lo, hi = exact_clamps(y.scale, y.zero_point, activation)
    got = two_operands("SUB" if sign < 0 else "ADD", a, b, y, fused_activation_function=activation)
    for i, j in np.ndindex(got.shape):
        acc = w_1 * a.centred[i][j] + sign * w_2 * b.centred[i][j]
        assert got[i, j] == exact_requantise(acc, mult, lo, hi, y.zero_point)


@given(seeds, dtypes, activations)
def test_mul(seed: int, dtype: str, activation: str) -> None:
    rng = np.random.default_rng(seed)
    a, b, y = (Quantised(rng, (2, 5), dtype) for _ in range(3))
    got = two_operands("MUL", a, b, y, fused_activation_function=activation)
    mult, (lo, hi) = multiplier(a.scale, b.scale, y.scale), exact_clamps(y.scale, y.zero_point, activation)
    for i, j in np.ndindex(got.shape):
        assert got[i, j] == exact_requantise(a.centred[i][j] * b.centred[i][j], mult, lo, hi, y.zero_point)


def half_away(value: Fraction) -> int:
    return int(math.copysign(math.floor(abs(value) + Fraction(1, 2)), value))


@given(
    seeds,
    dtypes,
    st.sampled_from([(), (1,), (1, 1), (3,), (1, 3)]),
    st.sampled_from(["ADD", "SUB", "MUL"]),
    st.booleans(),
)
def test_constants_are_folded(seed: int, dtype: str, shape: tuple[int, ...], name: str, first: bool) -> None:
    """One value, or one per channel: an integer addend or a float32 multiplier per channel."""
    rng = np.random.default_rng(seed)
    x, c, y = Quantised(rng, (2, 3), dtype), Quantised(rng, shape, dtype), Quantised(rng, (2, 3), dtype)
    first = first and name != "SUB"
    graph = single(name, [x.tensor("x"), c.tensor("c", constant=True), y.tensor("y")], (1, 0) if first else (0, 1))
    got, lo_hi = y.codes(run(graph, x.values)), exact_clamps(y.scale, y.zero_point)
    rescale = exact32(fraction(x.scale) * inverse(y.scale))
    for i, j in np.ndindex(got.shape):
        code = int(np.broadcast_to(c.codes(c.values), (2, 3))[i, j]) - c.zero_point
        acc, mult = x.centred[i][j], rescale
        if name == "MUL":
            real = exact32(code * fraction(c.scale))
            mult = exact32(exact32(fraction(x.scale) * real) * inverse(y.scale))
        else:
            acc += half_away((-code if name == "SUB" else code) * fraction(c.scale) / fraction(x.scale))
        assert got[i, j] == exact_requantise(acc, mult, *lo_hi, y.zero_point)


def test_the_addend_of_movenet() -> None:
    """c / s_in = 255 * 0.00392.. / 0.00784.. = 127.5 exactly; Google's program adds -128 (a bias row)."""
    assert numerics.constant_bias(0.007843137718737125, [-255], 0.003921568859368563).tolist() == [-128]


@given(seeds, dtypes)
def test_constants_that_are_not_folded(seed: int, dtype: str) -> None:
    """More than one value per channel, and a constant from which SUB subtracts, run as two operands."""
    rng = np.random.default_rng(seed)
    for name, shape, first in (
        ("ADD", (2, 3), False),
        ("MUL", (2, 3), False),
        ("SUB", (3,), True),
        ("MUL", (2, 1), False),
    ):
        x, c, y = Quantised(rng, (2, 3), dtype), Quantised(rng, shape, dtype), Quantised(rng, (2, 3), dtype)
        order = (1, 0) if first else (0, 1)
        tensors = [x.tensor("x"), c.tensor("c", constant=True), y.tensor("y")]
        as_constant = run(single(name, tensors, order), x.values)
        graph = single(name, [x.tensor("x"), c.tensor("c"), y.tensor("y")], order)
        as_operand = evaluate.evaluate(graph, {"x": x.values, "c": c.values})["y"]
        assert np.array_equal(as_constant, as_operand)


@pytest.mark.parametrize(
    ("name", "s_out", "z_out"), [("LOGISTIC", 1 / 256, 0), ("LOGISTIC", 1 / 200, 9), ("TANH", 1 / 128, 128)]
)
@pytest.mark.parametrize("s_in", [0.003, 0.02, 0.09, 0.28, 1.0])
@pytest.mark.parametrize("z_in", [0, 100, 255])
def test_splines(name: str, s_out: float, z_out: int, s_in: float, z_in: int) -> None:
    """Within half a step and the table's own error of the function, monotone, saturated at both ends."""
    tensors = [tensor("x", (256,), "u1", [s_in], [z_in]), tensor("y", (256,), "u1", [s_out], [z_out])]
    got = run(single(name, tensors, (0,)), np.arange(256).astype(np.uint8)).astype(int)
    real = (np.arange(256) - z_in) * float(np.float32(s_in))
    value = np.tanh(real) if name == "TANH" else 1 / (1 + np.exp(-real))
    exact = np.clip(value / float(np.float32(s_out)) + z_out, 0, 255)
    assert np.abs(got - exact).max() <= 0.56
    assert np.all(np.diff(got) >= 0)


def test_errors() -> None:
    a, b, y = (
        tensor("x", (2, 3), "u1", [1], [0]),
        tensor("b", (2,), "u1", [1], [0]),
        tensor("y", (2, 3), "u1", [1], [0]),
    )
    values = {"x": np.zeros((2, 3), np.uint8), "b": np.zeros(2, np.uint8)}
    for name in ("ADD", "SUB", "MUL"):
        with pytest.raises(EvaluateError, match=rf"operator 0, {name} 'y': the operands' shapes \(2, 3\) and \(2,\)"):
            evaluate.evaluate(single(name, [a, b, y], (0, 1)), values)
    far = tensor("b", (2, 3), "u1", [1e-6], [0])
    with pytest.raises(EvaluateError, match="differ by more than a factor of 32767"):
        evaluate.evaluate(single("ADD", [a, far, y], (0, 1)), values | {"b": np.zeros((2, 3), np.uint8)})
    huge = tensor("c", (1,), "u1", [1e9], [0], np.full(1, 9, np.uint8))
    with pytest.raises(EvaluateError, match="does not fit int32"):
        run(single("ADD", [a, huge, y], (0, 1)), values["x"])
    with pytest.raises(EvaluateError, match="LOGISTIC 'y': tensor 'y' is int16, the chip's codes are uint8 or int8"):
        run(single("LOGISTIC", [a, tensor("y", (2, 3), "i2", [1], [0])], (0,)), values["x"])


@pytest.mark.parametrize(
    ("s_in", "z_in", "s_out", "z_out"), [(0.05, 128, 0.03, 13), (0.4, 3, 0.4, 0), (0.01, 0, 0.02, 255)]
)
def test_hard_swish(s_in: float, z_in: int, s_out: float, z_out: int) -> None:
    tensors = [tensor("x", (256,), "u1", [s_in], [z_in]), tensor("y", (256,), "u1", [s_out], [z_out])]
    got = run(single("HARD_SWISH", tensors, (0,)), np.arange(256).astype(np.uint8)).astype(int)
    real = (np.arange(256) - z_in) * float(np.float32(s_in))
    exact = np.clip(real * np.clip(real + 3, 0, 6) / 6 / float(np.float32(s_out)) + z_out, 0, 255)
    assert np.abs(got - exact).max() <= 0.5 + 1e-3
