"""Operators that only move values, and CONCATENATION, which may requantise. Source: docs/evaluate.md, "Movement"."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import numerics
from coral.evaluate.operands import Call, EvaluateError, axis_of, operator


@operator("RESHAPE", "SQUEEZE", "EXPAND_DIMS")
def reshape(call: Call) -> tuple[NDArray[Any], ...]:
    """The same values in the output's shape."""
    return (call.output.shaped(call.input(0).array),)


@operator("CONCATENATION")
def concatenation(call: Call) -> tuple[NDArray[Any], ...]:
    """Inputs with another quantisation than the output's are requantised first."""
    y, operands = call.output, [call.input(i) for i in range(len(call.inputs))]
    call.require(fused_activation_function="NONE")
    axis = axis_of(call.options.get("axis", 0), len(y.shape))
    others = y.shape[:axis] + y.shape[axis + 1 :]
    fits = all(len(x.shape) == len(y.shape) and x.shape[:axis] + x.shape[axis + 1 :] == others for x in operands)
    if not fits or sum(x.shape[axis] for x in operands) != y.shape[axis]:
        raise EvaluateError(f"inputs {[x.shape for x in operands]} do not join to {y.shape} along axis {axis}")
    low, high = numerics.clamps(y.scale, y.zero_point)
    parts = [
        x.codes
        if x.same_quantisation(y)
        else numerics.requantise(x.centred, numerics.rescale_multiplier(x.scale, y.scale), low, high, y.zero_point)
        for x in operands
    ]
    return (y.from_codes(np.concatenate(parts, axis)),)


@operator("SPLIT", "SPLIT_V")
def split(call: Call) -> tuple[NDArray[Any], ...]:
    """Into the outputs' sizes along a constant axis: SPLIT has the inputs (axis, x), SPLIT_V (x, sizes, axis)."""
    x, axis = (call.input(1), call.constant(0)) if call.name == "SPLIT" else (call.input(0), call.constant(2))
    axis = axis_of(int(axis.flat[0]) if axis.size else 0, x.array.ndim)
    ends = list(accumulate(y.shape[axis] if axis < len(y.shape) else 0 for y in call.outputs))
    if not ends or ends[-1] != x.shape[axis]:
        raise EvaluateError(f"outputs {[y.shape for y in call.outputs]} do not share the axis {axis} of {x.shape}")
    parts = np.split(x.array, ends[:-1], axis)
    return tuple(y.shaped(part) for y, part in zip(call.outputs, parts, strict=True))


@operator("PAD")
def pad(call: Call) -> tuple[NDArray[Any], ...]:
    """Codes as they are, between zero points of the output."""
    x, borders, y = call.input(0), call.constant(1), call.output
    fits = borders.shape == (x.array.ndim, 2) and borders.min(initial=0) >= 0 and x.array.dtype == y.tensor.dtype
    if not fits or tuple(n + sum(b) for n, b in zip(x.shape, borders.tolist(), strict=True)) != call.output.shape:
        raise EvaluateError(f"paddings {borders.tolist()} do not take {x.shape} to {y.shape} of {y.tensor.dtype}")
    return (np.pad(x.array, borders, constant_values=y.zero_point - y.offset),)
