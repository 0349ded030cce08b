"""Pools, MEAN, SUM, SOFTMAX, L2_NORMALIZATION, resizes. Source: docs/evaluate.md, "Reductions"."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import numerics
from coral.evaluate.operands import Call, EvaluateError, Operand, axis_of, operator
from coral.evaluate.windows import axes_of, reduce_windows, require_size


@operator("AVERAGE_POOL_2D", "MAX_POOL_2D")
def pool(call: Call) -> tuple[NDArray[Any], ...]:
    """Averages have the generation's multiplier and, in older programs without activation, no clamps."""
    x, y = call.image(0), call.output
    rows, columns = axes_of(call, x.shape, tuple(call.options.get(f"filter_{side}", 1) for side in ("height", "width")))
    require_size(y, rows.count, columns.count)
    if call.name == "MAX_POOL_2D":
        _require_same_quantisation(call)
        return call.output_stage(reduce_windows(x.centred, rows, columns, np.maximum, -255), np.float32(1))
    acc = reduce_windows(x.centred, rows, columns, np.add, 0)
    values = reduce_windows(np.ones((1, *x.shape[1:3], 1), np.int32), rows, columns, np.add, 0)
    return _average(call, acc, values if values.min() < values.max() else values.flat[0])


@operator("MEAN", "SUM")
def reduce(call: Call) -> tuple[NDArray[Any], ...]:
    """Over constant axes."""
    x = _rows(call)
    axes = {axis_of(axis, x.array.ndim) for axis in call.constant(1).ravel().tolist()}
    acc = x.centred.sum(axis=tuple(axes), dtype=np.int64)
    n = x.array.size // max(acc.size, 1)
    numerics.check_accumulator(n)
    if call.name == "MEAN":
        return _average(call, numerics.accumulators(acc), n)
    return call.output_stage(numerics.accumulators(acc), numerics.rescale_multiplier(x.scale, call.output.scale))


def _average(call: Call, acc: NDArray[np.int32], n: Any) -> tuple[NDArray[Any], ...]:
    y, newer = call.output, call.generation == "new"
    mult = numerics.average_multiplier(call.input(0).scale, n, y.scale, newer=newer)
    if newer or call.activation != "NONE":
        return call.output_stage(acc, mult)
    return (y.from_codes(numerics.requantise(acc, mult, -np.inf, np.inf, y.zero_point)),)


@operator("SOFTMAX")
def softmax(call: Call) -> tuple[NDArray[Any], ...]:
    """Over the last axis: on the tiles in newer programs, on the scalar core in older ones."""
    x, y, beta = _rows(call), call.output, call.options.get("beta", 1.0)
    if not 0 < beta < np.inf:
        raise EvaluateError(f"option beta is {beta}, it must be positive and finite")
    if call.generation == "new":
        return (y.from_codes(numerics.softmax_on_tiles(x.codes, x.scale, beta, y.scale, y.zero_point)),)
    codes = numerics.softmax_on_scalar_core(x.codes, x.scale, x.zero_point, beta, y.scale, y.zero_point)
    return (y.from_codes(codes),)


@operator("L2_NORMALIZATION")
def l2_normalization(call: Call) -> tuple[NDArray[Any], ...]:
    """Over the last axis."""
    x, y = _rows(call), call.output
    call.require(fused_activation_function="NONE")
    return (y.from_codes(numerics.l2_normalise(x.codes, x.scale, x.zero_point, y.scale, y.zero_point)),)


@operator("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR")
def resize(call: Call) -> tuple[NDArray[Any], ...]:
    """Copies; or twofold, bilinear on half pixel centres: quarters of two neighbours on each axis, edges repeated."""
    x, y = call.image(0), call.output
    _require_same_quantisation(call)
    if factors := repeats(call):
        return (y.shaped(x.array.repeat(factors[0], axis=1).repeat(factors[1], axis=2)),)
    call.require(align_corners=False, half_pixel_centers=True)
    require_size(y, 2 * x.shape[1], 2 * x.shape[2])
    acc = _double(_double(x.codes.astype(np.int32), 1), 2)
    return (y.from_codes(numerics.requantise(acc, np.float32(2.0**-14), -np.inf, np.inf, 0)),)


def repeats(call: Call) -> tuple[int, int] | None:
    """How often a resize only repeats rows and columns: the nearest, the only ones, or all once; None: it does not."""
    x, y = call.image(0), call.output
    if len(y.shape) != 4 or y.shape[1] % x.shape[1] or y.shape[2] % x.shape[2]:
        return None
    nearest = call.name == "RESIZE_NEAREST_NEIGHBOR" and not call.options.get("align_corners")
    factors = y.shape[1] // x.shape[1], y.shape[2] // x.shape[2]
    return factors if nearest or x.shape[1:3] in ((1, 1), y.shape[1:3]) else None


def resizable(call: Call) -> bool:
    """Whether a resize is one that the chip has."""
    x, y, options = call.image(0), call.output, call.options
    twofold = len(y.shape) == 4 and y.shape[1:3] == (2 * x.shape[1], 2 * x.shape[2])
    bilinear = twofold and not options.get("align_corners") and options.get("half_pixel_centers", False)
    return bilinear or repeats(call) is not None


def _double(x: NDArray[np.int32], axis: int) -> NDArray[np.int32]:
    """Twice as many values along an axis, in 128ths: 3/4 of a value and 1/4 of its neighbour."""
    size = x.shape[axis]
    before, after = (x.take(np.clip(np.arange(size) + d, 0, size - 1), axis) for d in (-1, 1))
    pairs = np.stack([96 * x + 32 * before, 96 * x + 32 * after], axis + 1)
    return pairs.reshape([n * (1 + (i == axis)) for i, n in enumerate(x.shape)])


def _rows(call: Call) -> Operand:
    x = call.input(0)
    if x.array.ndim == 0 or x.array.size == 0:
        raise EvaluateError(f"the input has shape {x.shape}: a row of values is needed")
    return x


def _require_same_quantisation(call: Call) -> None:
    if not call.input(0).same_quantisation(call.output):
        raise EvaluateError("input and output must have one quantisation")
