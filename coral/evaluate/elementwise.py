"""Operators on single values: requantisation, RELU family, ADD, SUB, MUL, splines, host conversions.

Source: docs/evaluate.md, "Single values".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import numerics
from coral.evaluate.host import quantised
from coral.evaluate.operands import Call, EvaluateError, Operand, operator

RELUS = {"QUANTIZE": "NONE", "RELU": "RELU", "RELU6": "RELU6", "RELU_N1_TO_1": "RELU_N1_TO_1"}


@operator(*RELUS)
def requantise(call: Call) -> tuple[NDArray[Any], ...]:
    """Codes to codes of another quantisation, with a clamp; QUANTIZE also from float32 on the host."""
    x, y = call.input(0), call.output
    if call.name == "QUANTIZE" and x.tensor.dtype == np.float32:
        return (y.from_codes(quantised(x.array, y)),)
    mult = numerics.rescale_multiplier(x.scale, y.scale)
    return call.output_stage(x.centred, mult, activation=RELUS[call.name])


@operator("DEQUANTIZE")
def dequantize(call: Call) -> tuple[NDArray[Any], ...]:
    """``F((code - zero point) * scale)`` on the host."""
    x, y = call.input(0), call.output
    return (y.shaped(numerics.dequantise(x.codes, x.scale, x.zero_point)),)


@operator("ADD", "SUB")
def add(call: Call) -> tuple[NDArray[Any], ...]:
    """Integer weights for two scales; a constant of at most one value per channel becomes an integer addend."""
    a, b, y = call.input(0), call.input(1), call.output
    sign = -1 if call.name == "SUB" else 1
    _check_broadcast(a, b)
    for x, constant, factor in ((a, b, sign), (b, a, 1)):
        if per_channel(constant, x) and not (call.name == "SUB" and constant is a):
            addend = numerics.constant_bias(x.scale, factor * constant.centred, constant.scale)
            mult = numerics.rescale_multiplier(x.scale, y.scale)
            return call.output_stage(numerics.accumulators(x.centred.astype(np.int64) + addend), mult)
    w_1, w_2 = numerics.add_weights(a.scale, b.scale)
    low, high = numerics.clamps(y.scale, y.zero_point, call.activation)
    mult, weights = numerics.add_multiplier(a.scale, w_1, y.scale), (w_1, sign * w_2)
    codes = numerics.add(a.codes, b.codes, a.zero_point, b.zero_point, weights, mult, low, high, y.zero_point)
    return (y.from_codes(codes),)


@operator("MUL")
def mul(call: Call) -> tuple[NDArray[Any], ...]:
    """Products of differences; a constant of at most one value per channel becomes part of the multiplier."""
    a, b, y = call.input(0), call.input(1), call.output
    _check_broadcast(a, b)
    for x, constant in ((a, b), (b, a)):
        if per_channel(constant, x):
            real = numerics.dequantise(constant.codes, constant.scale, constant.zero_point)
            return call.output_stage(x.centred, numerics.constant_multiplier(x.scale, real, y.scale))
    return call.output_stage(a.centred * b.centred, numerics.multiplier(a.scale, b.scale, y.scale))


def _check_broadcast(a: Operand, b: Operand) -> None:
    try:
        np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        raise EvaluateError(f"the operands' shapes {a.shape} and {b.shape} do not fit") from None


def per_channel(constant: Operand, x: Operand) -> bool:
    """Whether the compiler folds ``constant``: one value, or one for each index of the last axis of x."""
    size = constant.array.size if constant.is_constant and not x.is_constant else 0
    return size == 1 or (size > 0 and constant.shape[-1:] == x.shape[-1:] == (size,))


SPLINES = {
    "LOGISTIC": (numerics.LOGISTIC, numerics.LOGISTIC_CLAMP),
    "TANH": (numerics.TANH, numerics.TANH_CLAMP),
    "HARD_SWISH": (numerics.HARD_SWISH, np.inf),
}
"""Table of the non-linear unit, and the largest real value that it is given, of both signs."""


@operator(*SPLINES)
def spline(call: Call) -> tuple[NDArray[Any], ...]:
    """The non-linear unit behind the multiplier ``F(s_in)``, its table in output steps."""
    x, y = call.input(0), call.output
    table, limit = SPLINES[call.name]
    table = table.scaled(numerics.inv(y.scale))
    mult = numerics.rescale_multiplier(x.scale, 1)
    centred = np.arange(256, dtype=np.int32) - x.zero_point
    of_codes = numerics.requantise(centred, mult, -limit, limit, y.zero_point, nlu=table)
    return (y.from_codes(of_codes[x.codes]),)
