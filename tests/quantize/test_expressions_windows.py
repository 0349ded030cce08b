"""Convolutions and pools as tinygrad graphs: one kernel each, and the bytes of exact integer sums on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from tinygrad import Device, Tensor, dtypes

from coral import numerics
from coral.quantize.expressions import QuantizeError
from coral.quantize.expressions_windows import qavg_pool_expression, qconv2d_expression, qmax_pool_expression

DEVICES = [Device.DEFAULT, "PYTHON", pytest.param("CPU:X86", marks=pytest.mark.slow)]
RNG = np.random.default_rng(12)
Array = np.ndarray


def on(device: str, array: Array | None) -> Any:
    return None if array is None else Tensor(array, device=device).realize()


def windows(x: Array, kernel: tuple[int, int], stride: Any, padding: Any, dilation: Any, fill: int) -> Array:
    """``[N, C, rows, columns, kh, kw]`` of an image; padding as nn.Conv2d has it."""
    (sy, sx), (dy, dx) = np.broadcast_to(stride, 2), np.broadcast_to(dilation, 2)
    pads = np.ravel(padding)
    left, right, top, bottom = pads if len(pads) == 4 else np.repeat(np.broadcast_to(pads, 2)[::-1], 2)
    x = np.pad(x.astype(np.int64), [(0, 0), (0, 0), (top, bottom), (left, right)], constant_values=fill)
    extent = (kernel[0] - 1) * dy + 1, (kernel[1] - 1) * dx + 1
    return sliding_window_view(x, extent, (2, 3))[:, :, ::sy, ::sx, ::dy, ::dx]


def convolution(x: Array, w: Array, z_x: int, z_w: int, stride: Any, padding: Any, dilation: Any, groups: int) -> Array:
    cut = windows(x, w.shape[2:], stride, padding, dilation, z_x) - z_x
    weights = w.astype(np.int64) - z_w
    parts = [
        np.einsum("ncyxij,ocij->noyx", image, weight)
        for image, weight in zip(np.split(cut, groups, 1), np.split(weights, groups), strict=True)
    ]
    return np.concatenate(parts, 1)


CONVOLUTIONS = [
    # x, w, (in_zp, w_zp, mult, lo, hi, out_zp), (stride, padding, dilation, groups), bias
    ((2, 3, 7, 6), (4, 3, 3, 3), (3, 130, 0.01, 0, 255, 7), (1, 0, 1, 1), True),
    ((1, 3, 7, 6), (4, 3, 3, 3), (255, 0, 0.0005, 0, 255, 7), (2, 1, 1, 1), True),
    ((1, 2, 5, 5), (1, 2, 5, 5), (128, 128, 2.0**-9, 128, 255, 128), (1, 2, 1, 1), False),
    ((3, 1, 4, 9), (5, 1, 1, 3), (0, 77, 0.25, 0, 200, 0), ((1, 2), (0, 1), 1, 1), True),
    ((1, 4, 6, 6), (4, 1, 3, 3), (100, 128, 0.004, 0, 255, 50), (1, 1, 1, 4), True),
    ((1, 2, 6, 6), (4, 1, 3, 3), (100, 128, 0.004, 0, 255, 50), (2, (0, 1, 0, 1), 1, 2), True),
    ((2, 5, 3, 3), (6, 5, 1, 1), (10, 20, 1.0, 0, 255, 255), (1, 0, 1, 1), False),
    ((1, 1, 9, 9), (2, 1, 3, 3), (9, 99, 0.01, 0, 255, 100), (1, 2, 2, 1), False),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", range(len(CONVOLUTIONS)))
def test_convolution(device: str, number: int) -> None:
    per_channel = number % 3 == 1  # a plain one with padding, a depthwise one, a dilated one
    x_shape, w_shape, (z_x, z_w, mult, lo, hi, z_y), geometry, bias = CONVOLUTIONS[number]
    x, w = (RNG.integers(0, 256, shape, np.uint8) for shape in (x_shape, w_shape))
    b = RNG.integers(-4000, 4000, w_shape[0], np.int32) if bias else None
    mults = np.float32(mult * RNG.uniform(0.5, 2, w_shape[0])) if per_channel else np.full(w_shape[0], mult, np.float32)
    arguments = on(device, x), on(device, w), on(device, b), z_x, z_w, on(device, mults) if per_channel else mult
    assert len(qconv2d_expression(*arguments, lo, hi, z_y, *geometry).schedule_linear().src) == 1
    y = qconv2d_expression(*arguments, lo, hi, z_y, *geometry)
    acc = convolution(x, w, z_x, z_w, *geometry) + (0 if b is None else b.reshape(-1, 1, 1))
    expected = numerics.requantise(np.int32(acc), mults.reshape(-1, 1, 1), *numerics.integer_clamps(z_y, lo, hi), z_y)
    assert y.dtype == dtypes.uint8
    assert np.array_equal(y.numpy(), expected)


POOLS = [(2, 2, 0), (3, 2, 1), (3, 1, (1, 0)), ((1, 5), (2, 1), 0), ((6, 5), 1, 0), ((2, 4), 1, (3, 2, 1, 1))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kernel", "stride", "padding"), POOLS)
def test_pools(device: str, kernel: Any, stride: Any, padding: Any) -> None:
    x, size = RNG.integers(0, 256, (2, 3, 6, 5), np.uint8), tuple(np.broadcast_to(kernel, 2).tolist())
    cut = windows(x, size, stride, padding, 1, -1)
    assert len(qmax_pool_expression(on(device, x), kernel, stride, padding).schedule_linear().src) == 1
    largest = qmax_pool_expression(on(device, x), kernel, stride, padding)
    assert np.array_equal(largest.numpy(), cut.max((4, 5)))
    z_x, mult = 77, numerics.average_multiplier(0.11, size[0] * size[1], 0.1, newer=True)
    acc = np.where(cut < 0, 0, cut - z_x).sum((4, 5))
    arguments = on(device, x), kernel, stride, z_x, float(mult), 5, 250, 30, padding
    assert len(qavg_pool_expression(*arguments).schedule_linear().src) == 1
    expected = numerics.requantise(np.int32(acc), mult, *numerics.integer_clamps(30, 5, 250), 30)
    assert np.array_equal(qavg_pool_expression(*arguments).numpy(), expected)


def test_winograd_is_kept_away(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = Tensor.empty(1, 2, 6, 6, dtype=dtypes.uint8), Tensor.empty(3, 2, 3, 3, dtype=dtypes.uint8)
    plain = qconv2d_expression(x, w, None, 1, 2, 0.5, 0, 255, 3)
    from tinygrad.helpers import Context

    with Context(WINO=1):
        assert qconv2d_expression(x, w, None, 1, 2, 0.5, 0, 255, 3).uop is plain.uop


Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, b: qconv2d_expression(x, w, b, 256, 0, 1, 0, 255, 0), "in_zp is 256"),
        (lambda x, w, b: qconv2d_expression(x, w, b, 0, 0, 1, 9, 8, 0), "lo=9, hi=8"),
        (lambda x, w, b: qconv2d_expression(x.float(), w, b, 0, 0, 1, 0, 255, 0), "float"),
        (lambda x, w, b: qconv2d_expression(x[0], w, b, 0, 0, 1, 0, 255, 0), "image of codes"),
        (lambda x, w, b: qconv2d_expression(x, w, b, 0, 0, 1, 0, 255, 0, groups=2), "2 groups"),
        (lambda x, w, b: qconv2d_expression(x, w, b[:2], 0, 0, 1, 0, 255, 0), r"shape \(2,\) for 4"),
        (lambda x, w, b: qconv2d_expression(x, w, b, 0, 0, b.float()[:2], 0, 255, 0), "2 multipliers for 4"),
        (lambda x, w, b: qconv2d_expression(x, w, b, 0, 0, b, 0, 255, 0), "float32"),
        (lambda x, w, b: qconv2d_expression(x, w, b, 0, 0, 1, 0, 255, 0, dilation=3), "windows of 7 positions"),
        (lambda x, w, b: qconv2d_expression(x, w, b, 0, 0, 1, 0, 255, 0, stride=0), "at least 1"),
        (lambda x, w, b: qconv2d_expression(x, w, b, 0, 0, 1, 0, 255, 0, padding=(1, 2, 3)), "one, two or four"),
        (lambda x, w, b: qconv2d_expression(x, w, b, 0, 0, 1, 0, 255, 0, padding=-1), "negative"),
        (lambda x, w, b: qmax_pool_expression(x, 2, 1, 2), "not smaller"),
        (lambda x, w, b: qmax_pool_expression(x, 9, 1), "windows of 9"),
        (lambda x, w, b: qmax_pool_expression(x.int(), 2, 1), "image of codes"),
        (lambda x, w, b: qavg_pool_expression(x, 2, 1, 0, float("inf"), 0, 255, 0), "multiplier is inf"),
        (lambda x, w, b: qavg_pool_expression(x[..., :1].expand(1, 3, 6, 6666), (6, 6666), 1, 0, 1, 0, 1, 0), "K is"),
    ],
)  # fmt: skip
def test_errors(call: Call, message: str) -> None:
    u8 = dtypes.uint8
    with pytest.raises(QuantizeError, match=message):
        call(
            Tensor.empty(1, 3, 6, 6, dtype=u8), Tensor.empty(4, 3, 3, 3, dtype=u8), Tensor.empty(4, dtype=dtypes.int32)
        )
