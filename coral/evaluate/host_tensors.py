"""More operators of the host: comparisons, what moves or repeats elements, reductions and softmax of float32.

Elements move as they are, codes too; everything else is TFLite's arithmetic in float32 or integers.
Source: docs/evaluate.md, "Operators of the host".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral.evaluate.host import F32, host, moved, real, result
from coral.evaluate.operands import MAX_ELEMENTS, Call, EvaluateError, axis_of

COMPARISONS: dict[str, Callable[..., NDArray[Any]]] = {
    "EQUAL": np.equal, "NOT_EQUAL": np.not_equal, "GREATER": np.greater, "GREATER_EQUAL": np.greater_equal,
    "LESS": np.less, "LESS_EQUAL": np.less_equal, "LOGICAL_AND": np.logical_and, "LOGICAL_OR": np.logical_or,
}  # fmt: skip
REDUCTIONS: dict[str, Callable[..., NDArray[Any]]] = {
    "MEAN": np.mean, "SUM": np.sum, "REDUCE_PROD": np.prod, "REDUCE_ANY": np.any, "REDUCE_ALL": np.all,
}  # fmt: skip
MODES = {0: "reflect", 1: "symmetric"}
"""Of MIRROR_PAD."""


def _fitting(call: Call, function: Callable[..., Any], *arrays: NDArray[Any]) -> NDArray[Any]:
    """A NumPy function whose complaints about shapes become sentences."""
    if math.prod(call.output.shape) > MAX_ELEMENTS:
        raise EvaluateError(f"{call.output.shape} has more than {MAX_ELEMENTS} elements")
    try:
        return np.asarray(function(*arrays))
    except (ValueError, IndexError) as error:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise EvaluateError(f"operands of the shapes {shapes} do not fit: {error}") from None


@host(*COMPARISONS)
def compare(call: Call) -> tuple[NDArray[Any], ...]:
    """Of real values, broadcast."""
    a, b = real(call.input(0)), real(call.input(1))
    return (moved(call.output, _fitting(call, COMPARISONS[call.name], a, b)),)


@host("LOGICAL_NOT")
def logical_not(call: Call) -> tuple[NDArray[Any], ...]:
    """Of truths."""
    return (moved(call.output, np.logical_not(call.input(0).array)),)


@host("SELECT", "SELECT_V2")
def select(call: Call) -> tuple[NDArray[Any], ...]:
    """Of two tensors by a third; the first kind's condition may be one truth per row."""
    condition, a, b = (call.input(i).array for i in range(3))
    if call.name == "SELECT" and condition.ndim == 1 < a.ndim:
        condition = condition.reshape(-1, *(1,) * (a.ndim - 1))
    return (moved(call.output, _fitting(call, np.where, condition, a, b)),)


@host(*REDUCTIONS)
def reduce(call: Call) -> tuple[NDArray[Any], ...]:
    """Over constant axes, of other dtypes than codes."""
    x = call.input(0).array
    if not x.size:
        raise EvaluateError(f"reduces {x.shape}, which has no elements")
    axes = tuple({axis_of(axis, x.ndim) for axis in call.constant(1).ravel().tolist()})
    kept = {"keepdims": True} if call.options.get("keep_dims") else {}
    integers = x.dtype.kind in "iu" and call.name == "MEAN"
    function = REDUCTIONS[call.name] if not integers else lambda x, **k: np.trunc(np.mean(x, **k))
    with np.errstate(all="ignore"):
        return result(call.output, np.asarray(function(x, axis=axes, **kept)))


@host("SOFTMAX", "LOG_SOFTMAX")
def softmax(call: Call) -> tuple[NDArray[Any], ...]:
    """Over the last axis, float32."""
    x = call.input(0).array.astype(F32) * F32(call.options.get("beta", 1.0) if call.name == "SOFTMAX" else 1.0)
    if not x.shape or 0 in x.shape:
        raise EvaluateError(f"takes {x.shape}")
    with np.errstate(all="ignore"):
        lower = x - x.max(-1, keepdims=True)
        total = np.exp(lower).sum(-1, keepdims=True, dtype=F32)
        return result(call.output, lower - np.log(total) if call.name == "LOG_SOFTMAX" else np.exp(lower) / total)


@host("PAD", "PADV2", "MIRROR_PAD")
def pad(call: Call) -> tuple[NDArray[Any], ...]:
    """Of other dtypes than codes with zeros; with a value, or mirrored, of all."""
    x, borders = call.input(0).array, call.constant(1)
    if borders.shape != (x.ndim, 2) or borders.min(initial=0) < 0:
        raise EvaluateError(f"paddings {borders.tolist()} of a tensor with {x.ndim} dimensions")
    if call.name == "MIRROR_PAD":
        mode: Any = MODES.get(call.options.get("mode", 0), "reflect")
        return (moved(call.output, _fitting(call, lambda x: np.pad(x, borders, mode), x)),)
    value = call.input(2).array.reshape(-1)[:1] if call.name == "PADV2" else np.zeros(1, x.dtype)
    return (moved(call.output, _fitting(call, lambda x: np.pad(x, borders, constant_values=value[0]), x)),)


@host("TILE", "BROADCAST_TO", "REVERSE_V2")
def repeat(call: Call) -> tuple[NDArray[Any], ...]:
    """Repeated along axes, to a shape, or backwards along one."""
    x, how = call.input(0).array, call.constant(1).ravel().tolist()
    if call.name == "TILE":
        return (moved(call.output, _fitting(call, lambda x: np.tile(x, how), x)),)
    if call.name == "BROADCAST_TO":
        return (moved(call.output, _fitting(call, lambda x: np.broadcast_to(x, how), x).copy()),)
    return (moved(call.output, np.flip(x, tuple(axis_of(axis, x.ndim) for axis in how)).copy()),)


@host("DEPTH_TO_SPACE", "SPACE_TO_DEPTH")
def blocks(call: Call) -> tuple[NDArray[Any], ...]:
    """Blocks of positions to channels, and back."""
    x, size = call.image(0).array, call.options.get("block_size", 0)
    n, h, w, c = x.shape
    sizes = (c,) if call.name == "DEPTH_TO_SPACE" else (h, w)
    if size < 1 or any(value % (size * size if len(sizes) == 1 else size) for value in sizes):
        raise EvaluateError(f"blocks of {size} of {x.shape}")
    if call.name == "DEPTH_TO_SPACE":
        parts = x.reshape(n, h, w, size, size, c // (size * size)).transpose(0, 1, 3, 2, 4, 5)
        return (moved(call.output, parts.reshape(n, h * size, w * size, -1)),)
    parts = x.reshape(n, h // size, size, w // size, size, c).transpose(0, 1, 3, 2, 4, 5)
    return (moved(call.output, parts.reshape(n, h // size, w // size, -1)),)


@host("SPACE_TO_BATCH_ND", "BATCH_TO_SPACE_ND")
def batches(call: Call) -> tuple[NDArray[Any], ...]:
    """Positions to images, and back (dilated convolutions of older converters), of ``[N, H, W, C]``; codes are padded
    with their zero point."""
    x, y = call.image(0), call.output
    (by, bx), ((top, bottom), (left, right)) = (
        call.constant(i).tolist() if call.constant(i).shape == shape else _refused(call, i)
        for i, shape in ((1, (2,)), (2, (2, 2)))
    )
    if min(by, bx) < 1 or min(top, bottom, left, right) < 0:
        raise EvaluateError(f"blocks of {by} x {bx} with borders {top, bottom, left, right}")
    if call.name == "SPACE_TO_BATCH_ND":
        zero = x.tensor.zero_points[0] if len(x.tensor.zero_points) else 0
        padded = np.pad(x.array, ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=zero)
        n, h, w, c = padded.shape
        parts = _fitting(call, lambda a: a.reshape(n, h // by, by, w // bx, bx, c), padded).transpose(2, 4, 0, 1, 3, 5)
        return (moved(y, parts.reshape(by * bx * n, h // by, w // bx, c)),)
    n, h, w, c = x.shape
    parts = _fitting(call, lambda a: a.reshape(by, bx, n // (by * bx), h, w, c), x.array).transpose(2, 3, 0, 4, 1, 5)
    whole = parts.reshape(-1, h * by, w * bx, c)
    return (moved(y, whole[:, top : h * by - bottom, left : w * bx - right].copy()),)


def _refused(call: Call, index: int) -> Any:
    raise EvaluateError(f"input {index} has the shape {call.constant(index).shape}, two dimensions are supported")


@host("CUMSUM")
def cumsum(call: Call) -> tuple[NDArray[Any], ...]:
    """Along a constant axis; from the end, or without an element itself, as the options say."""
    x = call.input(0).array
    axis = axis_of(call.number(1), x.ndim)
    x = np.flip(x, axis) if call.options.get("reverse") else x
    with np.errstate(all="ignore"):
        sums = np.cumsum(x, axis, dtype=x.dtype)
        if call.options.get("exclusive"):
            before = np.zeros_like(x.take([0][: x.shape[axis]], axis))
            sums = np.concatenate([before, sums.take(range(x.shape[axis] - 1), axis)], axis)
    return (moved(call.output, np.flip(sums, axis).copy() if call.options.get("reverse") else sums),)


@host("TOPK_V2")
def top(call: Call) -> tuple[NDArray[Any], ...]:
    """The largest of the last axis and where they are; of equal ones the first."""
    x, k = call.input(0).array, call.number(1)
    if len(call.outputs) != 2 or not x.ndim or not 0 <= k <= x.shape[-1]:
        raise EvaluateError(f"the largest {k} of {x.shape}")
    order = x.shape[-1] - 1 - np.argsort(x[..., ::-1], axis=-1, kind="stable")[..., ::-1][..., :k]
    return moved(call.outputs[0], np.take_along_axis(x, order, -1)), moved(call.outputs[1], order.astype(np.int32))


@host("ONE_HOT")
def one_hot(call: Call) -> tuple[NDArray[Any], ...]:
    """One of two values where an index is the position."""
    indices, depth = call.input(0).array, call.number(1)
    on, off = (call.input(i).array.reshape(-1) for i in (2, 3))
    axis = axis_of(call.options.get("axis", -1), indices.ndim + 1)
    if on.size != 1 or off.size != 1 or depth < 0 or depth * indices.size > MAX_ELEMENTS:
        raise EvaluateError(f"{depth} positions for {indices.size} indices, values of {on.shape} and {off.shape}")
    places = np.arange(depth).reshape([-1 if i == axis else 1 for i in range(indices.ndim + 1)])
    return (moved(call.output, np.where(np.expand_dims(indices, axis) == places, on, off)),)


@host("BATCH_MATMUL")
def matmul(call: Call) -> tuple[NDArray[Any], ...]:
    """Of float32; transposed as the options say."""
    a, b = call.input(0).array, call.input(1).array
    if a.dtype != np.float32 or b.dtype != np.float32 or min(a.ndim, b.ndim) < 2:
        raise EvaluateError(f"multiplies {a.dtype} {a.shape} by {b.dtype} {b.shape}, supported is float32")
    a, b = (x.swapaxes(-1, -2) if call.options.get(key) else x for x, key in ((a, "adj_x"), (b, "adj_y")))
    return (moved(call.output, _fitting(call, np.matmul, a, b)),)
