"""Reference functions of operators, one each, registered under TFLite's builtin name.

A function takes a :class:`~coral.evaluate.operands.Call` and returns the outputs' values, in order. What runs on the
chip is computed on codes with :mod:`coral.numerics`; what runs on the host around it, in float32 like TFLite's kernels.
Source: docs/numerics.md, "Layer references".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import numerics
from coral.evaluate.operands import Call, EvaluateError, Operand

Function = Callable[[Call], tuple[NDArray[Any], ...]]
OPERATORS: dict[str, Function] = {}


def operator(name: str) -> Callable[[Function], Function]:
    """Registers the reference function of the builtin operator ``name``."""

    def register(function: Function) -> Function:
        OPERATORS[name] = function
        return function

    return register


@operator("FULLY_CONNECTED")
def fully_connected(call: Call) -> tuple[NDArray[Any], ...]:
    """uint8 weights with one scale, or int8 weights with one scale or one per output channel; int32 bias or none."""
    x, w, bias, y = call.input(0), call.input(1), call.optional(2), call.output
    if call.options.get("weights_format", 0) != 0:
        raise EvaluateError(f"FULLY_CONNECTED {y.tensor.name!r}: shuffled weights are not a form of the Edge TPU")
    if w.array.ndim != 2 or w.array.size == 0 or x.array.size % w.array.shape[1]:
        raise EvaluateError(
            f"FULLY_CONNECTED {y.tensor.name!r}: weights {w.array.shape} do not fit the input {x.array.shape}"
        )
    w_scales, w_zeros = channel_quantisation(w)
    mult = numerics.multiplier(x.scale, w_scales, y.scale)
    activation = call.options.get("fused_activation_function", "NONE")
    low, high = numerics.clamps(y.scale, y.zero_point, activation)
    b = None if bias is None else bias.array
    rows = x.codes.reshape(-1, w.array.shape[1])
    codes = numerics.fully_connected(rows, w.codes, b, x.zero_point, w_zeros, mult, low, high, y.zero_point)
    return (y.from_codes(codes),)


def channel_quantisation(w: Operand) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Scales and code zero points of weights: scalars, or ``[N]`` for one per output channel (the first axis).

    :raises EvaluateError: quantised along another axis, or counts that do not fit
    """
    t = w.tensor
    scales, zeros, channels = t.scales, t.zero_points + w.offset, t.shape[0]
    if len(scales) == 1 and len(zeros) == 1:
        return scales[0], zeros[0]
    if t.quantized_dimension != 0 or len(scales) != channels or len(zeros) != channels:
        raise EvaluateError(
            f"weights {t.name!r} have {len(scales)} scales and {len(zeros)} zero points along axis "
            f"{t.quantized_dimension}: expected is one of each, or one per output channel ({channels}, axis 0)"
        )
    return scales, zeros


@operator("QUANTIZE")
def quantize(call: Call) -> tuple[NDArray[Any], ...]:
    """From float32 on the host, or from codes to codes with another quantisation as the chip requantises."""
    x, y = call.input(0), call.output
    if x.tensor.dtype == np.float32:
        return (y.from_codes(_host_quantise(x.array, y)),)
    acc = x.codes.astype(np.int32) - np.int32(x.zero_point)
    low, high = numerics.clamps(y.scale, y.zero_point)
    mult = numerics.rescale_multiplier(x.scale, y.scale)
    return (y.from_codes(numerics.requantise(acc, mult, low, high, y.zero_point)),)


def _host_quantise(x: NDArray[np.float32], y: Operand) -> NDArray[np.uint8]:
    """TFLite's own kernel divides in float32 and rounds half away from zero, unlike the chip."""
    if np.isnan(x).any():
        raise EvaluateError(f"QUANTIZE {y.tensor.name!r}: the input holds NaN")
    with np.errstate(over="ignore"):
        steps = np.clip(x / numerics.f32(y.scale), -(2.0**20), 2.0**20).astype(np.float64)
    rounded = np.copysign(np.floor(np.abs(steps) + 0.5), steps)
    return np.clip(rounded + y.zero_point, 0, 255).astype(np.uint8)


@operator("DEQUANTIZE")
def dequantize(call: Call) -> tuple[NDArray[Any], ...]:
    """``F((code - zero point) * scale)`` on the host."""
    x, y = call.input(0), call.output
    return (y.shaped(numerics.dequantise(x.codes, x.scale, x.zero_point)),)


@operator("RESHAPE")
def reshape(call: Call) -> tuple[NDArray[Any], ...]:
    """The same values in the output's shape."""
    return (call.output.shaped(call.input(0).array),)
