"""Kernels that are almost a convolution, pool, sum, product or clamp: not for the chip, and the bytes are CPU's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tinygrad import Tensor, dtypes
from tinygrad.helpers import Context

from coral.backend import reset_stats, stats
from coral.quantize.expressions import output_stage
from coral.quantize.expressions_pointwise import (
    qadd_expression,
    qclip_expression,
    qmul_expression,
    qrequantise_expression,
)
from coral.quantize.expressions_windows import qavg_pool_expression, qconv2d_expression, qmax_pool_expression

ZP, W_ZP, OUT_ZP, MULT = 120, 128, 100, 2.0**-9
RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (2, 4, 6, 5), dtype=np.uint8)
Y = RNG.integers(0, 256, (2, 4, 6, 5), dtype=np.uint8)
W = RNG.integers(90, 166, (4, 4, 3, 3), dtype=np.uint8)
D = RNG.integers(90, 166, (4, 1, 3, 3), dtype=np.uint8)
B = RNG.integers(-3000, 3000, 4).astype(np.int32)
M = np.array([0.5, 1, 2, 3], np.float32) * np.float32(MULT)


class Operands:
    """The arrays as realised tensors of one device."""

    def __init__(self, device: str) -> None:
        arrays = {"x": X, "y": Y, "w": W, "d": D, "b": B, "m": M}
        self.tensors = {name: Tensor(array, device=device).realize() for name, array in arrays.items()}

    def __getattr__(self, name: str) -> Tensor:
        return self.tensors[name]


def int_(x: Tensor, zp: int) -> Tensor:
    return x.cast(dtypes.int32) - zp


def stage(acc: Tensor, mult: float | Tensor = MULT) -> Tensor:
    return output_stage(acc, mult, 0, 255, OUT_ZP)


def conv(t: Operands, **geometry) -> Tensor:
    return qconv2d_expression(t.x, t.w, t.b, ZP, W_ZP, MULT, 0, 255, OUT_ZP, **geometry)


ACCEPTED: dict[str, Callable[[Operands], Tensor]] = {
    "convolution": lambda t: conv(t, padding=1),
    "depthwise convolution": lambda t: qconv2d_expression(
        t.x, t.d, t.b, ZP, W_ZP, MULT, 0, 255, OUT_ZP, stride=2, padding=1, groups=4
    ),
    "groups": lambda t: qconv2d_expression(
        t.x, t.w[:, :2].contiguous(), None, ZP, W_ZP, MULT, 0, 255, OUT_ZP, groups=2
    ),
    "multipliers per channel": lambda t: qconv2d_expression(t.x, t.w, t.b, ZP, W_ZP, t.m, 0, 255, OUT_ZP),
    "written out": lambda t: stage(int_(t.x, ZP).conv2d(int_(t.w, W_ZP), t.b, padding=1)),
    "maximum pool": lambda t: qmax_pool_expression(t.x, 2, 2),
    "padded maximum pool": lambda t: qmax_pool_expression(t.x, 3, 2, 1),
    "average pool": lambda t: qavg_pool_expression(t.x, 2, 2, ZP, 0.25, 0, 255, OUT_ZP),
    "padded average pool": lambda t: qavg_pool_expression(t.x, 3, 2, ZP, 0.125, 0, 255, OUT_ZP, padding=1),
    "sum": lambda t: qadd_expression(t.x, t.y, ZP, 7, (9000, -8000), 6e-5, 0, 255, OUT_ZP),
    "product": lambda t: qmul_expression(t.x, t.y, ZP, 7, 0.01, 0, 255, OUT_ZP),
    "square": lambda t: qmul_expression(t.x, t.x, ZP, ZP, 0.01, 0, 255, OUT_ZP),
    "requantisation": lambda t: qrequantise_expression(t.x, ZP, 0.7, OUT_ZP, 255, OUT_ZP),
    "clamp": lambda t: qclip_expression(t.x, 30, 200),
    "lower clamp": lambda t: qclip_expression(t.x, 30),
    "rows as depthwise": lambda t: stage((int_(t.x.reshape(48, 5), ZP) * int_(t.y.reshape(48, 5), W_ZP)).sum(1)),
}

REJECTED: dict[str, Callable[[Operands], Tensor]] = {
    "padded with code 0": lambda t: stage(int_(t.x.pad((1, 1, 1, 1)), ZP).conv2d(int_(t.w, W_ZP), t.b)),
    "padded with another zero point": lambda t: stage(
        (int_(t.x, ZP).pad((1, 1, 1, 1), value=3)).conv2d(int_(t.w, W_ZP))
    ),
    "circular padding": lambda t: stage(int_(t.x, ZP).pad((1, 1, 1, 1), mode="circular").conv2d(int_(t.w, W_ZP))),
    "flipped kernel": lambda t: stage(int_(t.x, ZP).conv2d(int_(t.w, W_ZP).flip((2, 3)), t.b)),
    "transposed kernel": lambda t: stage(int_(t.x, ZP).conv2d(int_(t.w, W_ZP).transpose(2, 3), t.b)),
    "weights input channels first": lambda t: stage(int_(t.x, ZP).conv2d(int_(t.w, W_ZP).transpose(0, 1), t.b)),
    "input transposed": lambda t: stage(int_(t.x, ZP).transpose(2, 3).conv2d(int_(t.w, W_ZP), t.b)),
    "input upside down": lambda t: stage(int_(t.x, ZP).flip(2).conv2d(int_(t.w, W_ZP), t.b)),
    "channels last": lambda t: stage(int_(t.x.reshape(2, 6, 5, 4), ZP).permute(0, 3, 1, 2).conv2d(int_(t.w, W_ZP))),
    "part of a larger image": lambda t: stage(int_(t.x, ZP)[:, :, 1:, 1:].conv2d(int_(t.w, W_ZP), t.b)),
    "bias per row": lambda t: stage(int_(t.x, ZP).conv2d(int_(t.w, W_ZP)) + t.b.reshape(1, 1, 4, 1)),
    "multipliers per row": lambda t: stage(int_(t.x, ZP).conv2d(int_(t.w, W_ZP), t.b), t.m.reshape(1, 1, 4, 1)),
    "multipliers backwards": lambda t: stage(int_(t.x, ZP).conv2d(int_(t.w, W_ZP)), t.m.flip(0).reshape(1, 4, 1, 1)),
    "two multipliers": lambda t: stage(int_(t.x, ZP).conv2d(int_(t.w, W_ZP)), t.m.reshape(1, 4, 1, 1) * 0.5),
    "maximum of products": lambda t: stage((int_(t.x, ZP) * int_(t.y, W_ZP)).max((2, 3))),
    "transposed result": lambda t: conv_transposed_out(t),
    "smallest of a window": lambda t: (255 - (255 - t.x).max_pool2d(2, 2)).cast(dtypes.uint8).contiguous(),
    "dilated pool": lambda t: t.x.max_pool2d(2, 1, dilation=2).contiguous(),
    "padding that wins": lambda t: t.x.pad((1, 1, 1, 1), value=200).max_pool2d(3, 2).contiguous(),
    "pool over channels": lambda t: t.x.reshape(2, 2, 2, 6, 5).max(2).contiguous(),
    "pool of a clamp": lambda t: t.x.clip(20, 200).max_pool2d(2, 2).contiguous(),
    "average of what is there": lambda t: stage(
        int_(t.x, ZP).cast(dtypes.float32).avg_pool2d(3, 2, padding=1, count_include_pad=False).cast(dtypes.int32), 0.7
    ),
    "zero point behind the sum": lambda t: stage(t.x.cast(dtypes.int32)._pool((2, 2), 2).sum((-2, -1)) - ZP, 0.25),
    "average with a bias": lambda t: stage(
        int_(t.x, ZP)._pool((2, 2), 2).sum((-2, -1)) + t.b.reshape(1, 4, 1, 1), 0.25
    ),
    "sum with one operand per channel": lambda t: stage(
        t.x.cast(dtypes.int32) * 9 + t.y[:1, :, :1, :1].contiguous().cast(dtypes.int32) * 7 - 99, 0.1
    ),
    "sum of three": lambda t: stage(
        t.x.cast(dtypes.int32) * 9 + t.y.cast(dtypes.int32) * 7 + t.x.flip(0).cast(dtypes.int32) - 99, 0.1
    ),
    "sum that no zero points give": lambda t: stage(
        t.x.cast(dtypes.int32) * 9 + t.y.cast(dtypes.int32) * 7 + 5000, 0.1
    ),
    "weights of 17 bits": lambda t: stage(t.x.cast(dtypes.int32) * 90000 + t.y.cast(dtypes.int32) * 7 - 700, 1e-5),
    "sum backwards": lambda t: stage(t.x.cast(dtypes.int32) * 9 + t.y.flip(3).cast(dtypes.int32) * 7 - 99, 0.1),
    "wrapping sum": lambda t: (t.x + t.y).contiguous(),
    "product with one factor per channel": lambda t: stage(
        int_(t.x, ZP) * int_(t.y[:1, :, :1, :1].contiguous(), 7), 0.01
    ),
    "product with a float factor": lambda t: output_stage(
        int_(t.x, ZP).cast(dtypes.float32) * t.y.cast(dtypes.float32), 0.01, 0, 255, OUT_ZP
    ),
    "product of three": lambda t: stage(int_(t.x, ZP) * int_(t.y, 7) * int_(t.x, 3), 1e-4),
    "absolute value": lambda t: stage(int_(t.x, ZP).abs(), 0.7),
    "zero point minus code": lambda t: stage(ZP - t.x.cast(dtypes.int32), 0.7),
    "half away from zero": lambda t: (
        (((int_(t.x, ZP).cast(dtypes.float32) * 0.5).clip(-OUT_ZP, 155) + 0.5).floor() + OUT_ZP)
        .cast(dtypes.uint8)
        .contiguous()
    ),
    "requantisation per channel": lambda t: stage(int_(t.x, ZP), t.m.reshape(1, 4, 1, 1) * 300),
    "clamped by a tensor": lambda t: t.x.maximum(t.y).contiguous(),
    "threshold": lambda t: (t.x > 99).where(t.x, 7).cast(dtypes.uint8).contiguous(),
    "clamp of another order": lambda t: t.x.minimum(200).maximum(30).contiguous(),
    "clamp backwards": lambda t: t.x.flip(3).clip(30, 200).contiguous(),
    "complement": lambda t: (255 - t.x).contiguous(),
}


def conv_transposed_out(t: Operands) -> Tensor:
    acc = int_(t.x, ZP).conv2d(int_(t.w, W_ZP), t.b)
    return output_stage(acc.transpose(2, 3), MULT, 0, 255, OUT_ZP)


def answers(computation: Callable[[Operands], Tensor], cpu: str) -> tuple[np.ndarray, np.ndarray]:
    """On CORAL and on the CPU; the counters are CORAL's."""
    results = []
    for device in (cpu, "CORAL"):
        operands = Operands(device)
        reset_stats()
        with Context(NOOPT=1):
            results.append(computation(operands).numpy())
    return results[1], results[0]


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_operation_itself_is_taken(chip, cpu: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The yardstick: these operands, and what the near misses are near to."""
    monkeypatch.setenv("CORAL_PLACE", "chip")
    got, want = answers(ACCEPTED[name], cpu)
    assert np.array_equal(got, want)
    assert np.unique(want).size > 8
    assert (stats().chip_programs, stats().host_fallbacks) == (1, 0)


@pytest.mark.parametrize("name", REJECTED)
def test_near_miss_stays_on_the_host(chip, cpu: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORAL_PLACE", "chip")
    got, want = answers(REJECTED[name], cpu)
    assert (stats().chip_programs, chip.calls, chip.network_calls) == (0, [], [])
    assert stats().host_programs >= 1
    assert got.dtype == want.dtype
    assert np.array_equal(got, want)
