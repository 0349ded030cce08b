"""ADD, MUL, requantisation and clamps as tinygrad graphs, against coral.evaluate and exact rationals."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from exact_float import exact_requantise
from tinygrad import Device, Tensor, dtypes

from coral import evaluate, numerics
from coral.package.graph import Graph, Operator
from coral.package.graph import Tensor as Described
from coral.quantize.expressions import QuantizeError, qlinear_expression
from coral.quantize.expressions_pointwise import (
    qadd_expression,
    qclip_expression,
    qmul_expression,
    qrequantise_expression,
)

DEVICES = [Device.DEFAULT, "PYTHON", pytest.param("CPU:X86", marks=pytest.mark.slow)]
EVERY = np.arange(256, dtype=np.uint8)
PAIRS = np.repeat(EVERY[::5], 52), np.tile(EVERY[::5], 52)
Y = (0.05, 20)


def on(device: str, array: np.ndarray) -> Any:
    return Tensor(array, device=device).realize()


def judged(operator: str, *inputs: tuple[np.ndarray, float, int]) -> np.ndarray:
    """What coral.evaluate gives for one TFLite operator on these codes, with output quantisation Y."""

    def tensor(name: str, scale: float, zero: int) -> Described:
        scales, zeros = np.array([scale], np.float32), np.array([zero], np.int64)
        return Described(name, inputs[0][0].shape, 3, np.dtype("u1"), scales, zeros, 0, None, False)

    tensors = [tensor(f"x{i}", scale, zero) for i, (_, scale, zero) in enumerate(inputs)]
    ends = tuple(range(len(inputs)))
    graph = Graph(
        "main", (*tensors, tensor("y", *Y)), ends, (len(ends),), (Operator(operator, ends, (len(ends),), {}),)
    )
    return evaluate.evaluate(graph, {f"x{i}": codes for i, (codes, _, _) in enumerate(inputs)})["y"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("s_a", "s_b"), [(0.03, 0.0471), (0.04, 0.04), (0.002, 0.7)])
def test_add_and_subtract(device: str, s_a: float, s_b: float) -> None:
    a, b = PAIRS
    weights = numerics.add_weights(s_a, s_b)
    mult = float(numerics.add_multiplier(s_a, weights[0], Y[0]))
    for name, sign in (("ADD", 1), ("SUB", -1)):
        arguments = on(device, a), on(device, b), 100, 7, (weights[0], sign * weights[1]), mult, 0, 255, Y[1]
        assert len(qadd_expression(*arguments).schedule_linear().src) == 1
        assert np.array_equal(qadd_expression(*arguments).numpy(), judged(name, (a, s_a, 100), (b, s_b, 7)))


@pytest.mark.parametrize("device", DEVICES)
def test_multiply(device: str) -> None:
    a, b = PAIRS
    mult = float(numerics.multiplier(0.03, 0.0471, Y[0]))
    arguments = on(device, a), on(device, b), 100, 7, mult, 0, 255, Y[1]
    assert len(qmul_expression(*arguments).schedule_linear().src) == 1
    assert np.array_equal(qmul_expression(*arguments).numpy(), judged("MUL", (a, 0.03, 100), (b, 0.0471, 7)))


@pytest.mark.parametrize("device", DEVICES)
def test_requantise(device: str) -> None:
    mult = float(numerics.rescale_multiplier(0.03, Y[0]))
    x = on(device, EVERY)
    assert len(qrequantise_expression(x, 90, mult, 0, 255, Y[1]).schedule_linear().src) == 1
    assert np.array_equal(
        qrequantise_expression(x, 90, mult, 0, 255, Y[1]).numpy(), judged("QUANTIZE", (EVERY, 0.03, 90))
    )
    assert np.array_equal(
        qrequantise_expression(x, 90, mult, Y[1], 255, Y[1]).numpy(), judged("RELU", (EVERY, 0.03, 90))
    )
    for factor in (0.5, 1.5, 1.1666666269302368):  # ties, and products that float32 moves onto one
        exact = [exact_requantise(int(c) - 90, Fraction(factor), Fraction(-50), Fraction(205), 50) for c in EVERY]
        assert qrequantise_expression(x, 90, factor, 0, 255, 50).tolist() == exact


@pytest.mark.parametrize("device", DEVICES)
def test_clip(device: str) -> None:
    for lo, hi in ((0, 255), (100, 255), (3, 200), (7, 7)):
        assert np.array_equal(qclip_expression(on(device, EVERY), lo, hi).numpy(), EVERY.clip(lo, hi))
    assert len(qclip_expression(on(device, EVERY), 3, 200).schedule_linear().src) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_linear_with_a_multiplier_per_channel(device: str) -> None:
    rng = np.random.default_rng(3)
    x, w = rng.integers(0, 256, (5, 9), np.uint8), rng.integers(0, 256, (7, 9), np.uint8)
    b, mults = rng.integers(-999, 999, 7, np.int32), np.float32(rng.uniform(0.001, 0.01, 7))
    arguments = on(device, x), on(device, w), on(device, b), 100, 128, on(device, mults), 0, 255, 90
    assert len(qlinear_expression(*arguments).schedule_linear().src) == 1
    expected = numerics.fully_connected(x, w, b, 100, 128, mults, -90.0, 165.0, 90)
    assert np.array_equal(qlinear_expression(*arguments).numpy(), expected)


U8 = Tensor.empty(4, dtype=dtypes.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: qadd_expression(U8, U8, 0, 0, (0, 1), 1.0, 0, 255, 0), r"\(0, 1\) must lie in 1..32767"),
        (lambda: qadd_expression(U8, U8, 0, 0, (1, 32768), 1.0, 0, 255, 0), "32768"),
        (lambda: qadd_expression(U8, U8[:1], 0, 0, (1, 1), 1.0, 0, 255, 0), "one shape"),
        (lambda: qadd_expression(U8, U8, 0, 256, (1, 1), 1.0, 0, 255, 0), "b_zp is 256"),
        (lambda: qmul_expression(U8, U8.float(), 0, 0, 1.0, 0, 255, 0), "float"),
        (lambda: qrequantise_expression(U8.int(), 0, 1.0, 0, 255, 0), "int"),
        (lambda: qrequantise_expression(U8, 0, -1.0, 0, 255, 0), "multiplier is -1"),
        (lambda: qclip_expression(U8, 9, 8), "lo=9, hi=8"),
        (lambda: qclip_expression(U8.float(), 0), "float"),
        (lambda: qlinear_expression(U8.reshape(1, 4), U8.reshape(1, 4), None, 0, 0, U8.float(), 0, 255, 0), "4 mult"),
    ],
)
def test_errors(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        call()
