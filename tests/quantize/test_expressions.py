"""The quantised operations as tinygrad graphs: one kernel each, and the same bytes as exact arithmetic everywhere."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from exact_float import exact_requantise
from tinygrad import Device, Tensor, dtypes

from coral import CoralError
from coral.quantize.expressions import QuantizeError, dequantise_expression, qlinear_expression, quantise_expression

DEVICES = list(dict.fromkeys([Device.DEFAULT, "PYTHON"]))
RNG = np.random.default_rng(11)


def codes(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


def on(device: str, array: np.ndarray | None) -> Any:
    return None if array is None else Tensor(array, device=device).realize()


def linear(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, z_x: int, z_w: int) -> np.ndarray:
    acc = (x.astype(np.int64) - z_x) @ (w.astype(np.int64) - z_w).T + (0 if b is None else b)
    assert np.abs(acc).max() < 2**31
    return acc


def exact_codes(acc: np.ndarray, mult: float, lo: int, hi: int, z_y: int) -> np.ndarray:
    m = Fraction(float(np.float32(mult)))
    exact = [exact_requantise(int(a), m, Fraction(lo - z_y), Fraction(hi - z_y), z_y) for a in acc.ravel()]
    return np.array(exact, np.uint8).reshape(acc.shape)


LINEARS = [
    ((1, 16), True, (3, 130, 0.01, 0, 255, 7)),
    ((5, 16), False, (0, 0, 2.0**-9, 0, 255, 0)),
    ((5, 1), True, (128, 255, 0.5, 20, 200, 128)),
    ((2, 3, 16), True, (255, 1, 1.0, 9, 9, 9)),
    ((2, 1, 16), False, (77, 128, 0.004, 33, 255, 33)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "bias", "quant"), LINEARS)
def test_linear(device: str, shape: tuple[int, ...], bias: bool, quant: tuple[Any, ...]) -> None:
    x, w = codes(*shape), codes(7, shape[-1])
    b = RNG.integers(-4000, 4000, 7, np.int32) if bias else None
    z_x, z_w, mult, lo, hi, z_y = quant
    operands = on(device, x), on(device, w), on(device, b)
    assert len(qlinear_expression(*operands, *quant).schedule_linear().src) == 1
    y = qlinear_expression(*operands, *quant)
    assert y.dtype == dtypes.uint8
    assert np.array_equal(y.numpy(), exact_codes(linear(x, w, b, z_x, z_w), mult, lo, hi, z_y))


@pytest.mark.parametrize("device", DEVICES)
def test_ties_and_products_that_float32_moves_across_them(device: str) -> None:
    """Accumulators -40..40 as one-element rows; the multipliers make ties, and products whose rounding shows."""
    acc = np.arange(-40, 41)
    x = np.uint8(acc + 40)[:, None]
    for mult in (0.5, 0.25, 1.5, 1.1666666269302368, 0.026315787807106972):
        y = qlinear_expression(on(device, x), on(device, np.uint8([[1]])), None, 40, 0, mult, 0, 255, 100)
        expected = exact_codes(acc, mult, 0, 255, 100)
        assert np.array_equal(y.numpy().ravel(), expected)
        if mult == 0.5:
            assert np.count_nonzero(np.floor(acc * 0.5 + 0.5) + 100 != expected) == 20  # half up would be caught


@pytest.mark.parametrize("device", DEVICES)
def test_quantise_next_to_rounding_boundaries(device: str) -> None:
    """The order scale, clamp, round, shift leaves nothing for fused multiply-add or re-association to change."""
    for scale, zero in ((0.1, 131), (0.0123, 0), (3.7, 255)):
        inverse = np.float32(1) / np.float32(scale)
        edges = (np.arange(-300, 300) + 0.5) * scale
        x = np.float32(edges)
        x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
        x = np.concatenate([x, np.float32([0, -0.0, 1e30, -1e30, np.inf, -np.inf])])
        got = quantise_expression(on(device, x), scale, zero).numpy()
        with np.errstate(over="ignore"):
            steps = np.rint(np.clip(x * inverse, np.float32(-zero), np.float32(255 - zero)))
        assert np.array_equal(got, (steps + zero).astype(np.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_dequantise(device: str) -> None:
    every = np.arange(256, dtype=np.uint8)
    a = dequantise_expression(on(device, every), 0.037, 77)
    b = dequantise_expression(on(device, every), 0.0191, 200)
    reals = [(every.astype(np.float32) - z) * np.float32(s) for z, s in ((77, 0.037), (200, 0.0191))]
    assert np.array_equal(a.numpy(), reals[0])
    assert np.array_equal((a + b).numpy(), reals[0] + reals[1])  # no fused multiply-add with what follows


def test_integer_inputs_are_quantised_as_numbers() -> None:
    assert quantise_expression(Tensor([-3, 0, 300], dtype=dtypes.int32), 2.0, 1).tolist() == [0, 1, 151]


U8, I32 = dtypes.uint8, dtypes.int32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, b: qlinear_expression(x, w, b, 256, 0, 1, 0, 255, 0), "in_zp is 256"),
        (lambda x, w, b: qlinear_expression(x, w, b, 0, -1, 1, 0, 255, 0), "w_zp is -1"),
        (lambda x, w, b: qlinear_expression(x, w, b, 0, 0, 1, 9, 8, 0), "lo=9, hi=8"),
        (lambda x, w, b: qlinear_expression(x, w, b, 0, 0, float("nan"), 0, 255, 0), "multiplier is nan"),
        (lambda x, w, b: qlinear_expression(x, w, b, 0, 0, 0.0, 0, 255, 0), "multiplier is 0"),
        (lambda x, w, b: qlinear_expression(x.float(), w, b, 0, 0, 1, 0, 255, 0), "float"),
        (lambda x, w, b: qlinear_expression(x, w, b.float(), 0, 0, 1, 0, 255, 0), "int32"),
        (lambda x, w, b: qlinear_expression(x, w.T, b, 0, 0, 1, 0, 255, 0), r"\(8, 4\)"),
        (lambda x, w, b: qlinear_expression(x, w, b[:2], 0, 0, 1, 0, 255, 0), r"\(2,\)"),
        (lambda x, w, b: qlinear_expression(x[0], w, b, 0, 0, 1, 0, 255, 0), r"\(8,\)"),
        (lambda x, w, b: quantise_expression(x, 1.0, 300), "zero_point is 300"),
        (lambda x, w, b: quantise_expression(x, 0.0, 0), "scale is 0"),
    ],
)
def test_errors(call: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(CoralError, match=message):
        call(Tensor.empty(3, 8, dtype=U8), Tensor.empty(4, 8, dtype=U8), Tensor.empty(4, dtype=I32))


def test_sums_that_could_overflow_are_refused() -> None:
    x, w = Tensor.empty(1, 33026, dtype=U8), Tensor.empty(1, 33026, dtype=U8)
    with pytest.raises(QuantizeError, match="K is 33026"):
        qlinear_expression(x, w, None, 0, 0, 1.0, 0, 255, 0)
