"""Operators that run on the host: TFLite's own arithmetic in numpy, float32 or integers; codes pass through float32.

They are used where the chip's formulas have no say: other dtypes than codes, and operators that no chip part contains.
Source: docs/evaluate.md, "Operators of the host".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import numerics
from coral.evaluate.operands import CODE_OFFSETS, MAX_ELEMENTS, Call, EvaluateError, Function, Operand, axis_of

HOST: dict[str, Function] = {}
"""The host's functions by TFLite's builtin names."""
F32 = np.float32


def host(*names: str) -> Callable[[Function], Function]:
    """Registers a host function of the builtin operators ``names``."""

    def register(function: Function) -> Function:
        HOST.update(dict.fromkeys(names, function))
        return function

    return register


def real(x: Operand) -> NDArray[Any]:
    """The values that codes stand for, float32; other dtypes as they are."""
    if x.tensor.dtype in CODE_OFFSETS and len(x.tensor.scales) == 1:
        return x.shaped(numerics.dequantise(x.codes, x.scale, x.zero_point))
    return x.array


def result(y: Operand, values: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """An output from real values: quantised as TFLite does, or in the output's dtype."""
    if y.tensor.dtype in CODE_OFFSETS and len(y.tensor.scales) == 1:
        return (y.from_codes(quantised(values.astype(F32), y)),)
    if y.tensor.dtype is None:
        raise EvaluateError(f"tensor {y.tensor.name!r} has TFLite type {y.tensor.type}, for which numpy has no type")
    return (y.shaped(np.asarray(values).astype(y.tensor.dtype)),)


def moved(y: Operand, values: NDArray[Any]) -> NDArray[Any]:
    """An output of exactly this shape. :raises EvaluateError: it has another."""
    if values.shape != y.shape:
        raise EvaluateError(f"tensor {y.tensor.name!r} has shape {y.shape}, its operator gives {values.shape}")
    return values


def quantised(x: NDArray[np.float32], y: Operand) -> NDArray[np.uint8]:
    """TFLite's own kernel divides in float32 and rounds half away from zero, unlike the chip."""
    if np.isnan(x).any():
        raise EvaluateError("the values hold NaN")
    with np.errstate(over="ignore"):
        steps = np.clip(x / numerics.f32(y.scale), -(2.0**20), 2.0**20).astype(np.float64)
    rounded = np.copysign(np.floor(np.abs(steps) + 0.5), steps)
    return np.clip(rounded + y.zero_point, 0, 255).astype(np.uint8)


def _hard_swish(x: NDArray[Any]) -> NDArray[Any]:
    return x * np.clip(x + F32(3), F32(0), F32(6)) / F32(6)


UNARY: dict[str, Callable[..., NDArray[Any]]] = {
    "ABS": np.abs, "NEG": np.negative, "SQRT": np.sqrt, "EXP": np.exp, "LOG": np.log, "SQUARE": np.square,
    "SIN": np.sin, "COS": np.cos, "FLOOR": np.floor, "CEIL": np.ceil, "ROUND": np.rint,
    "RSQRT": lambda x: F32(1) / np.sqrt(x), "HARD_SWISH": _hard_swish,
    "LOGISTIC": lambda x: F32(1) / (F32(1) + np.exp(-x)), "TANH": np.tanh,
    "ELU": lambda x: np.where(x < 0, np.expm1(x), x), "RELU": lambda x: np.maximum(x, 0),
    "RELU6": lambda x: np.clip(x, 0, 6), "RELU_N1_TO_1": lambda x: np.clip(x, -1, 1), "CAST": lambda x: x,
    "QUANTIZE": lambda x: x, "DEQUANTIZE": lambda x: x,
}  # fmt: skip
BINARY: dict[str, Callable[..., NDArray[Any]]] = {
    "ADD": np.add, "SUB": np.subtract, "MUL": np.multiply, "DIV": np.divide, "MINIMUM": np.minimum,
    "MAXIMUM": np.maximum, "FLOOR_DIV": np.floor_divide, "FLOOR_MOD": np.mod, "POW": np.power,
    "SQUARED_DIFFERENCE": lambda a, b: np.square(a - b), "PRELU": lambda x, a: np.where(x < 0, x * a, x),
}  # fmt: skip
LIMITS = {"NONE": (None, None), "RELU": (0, None), "RELU6": (0, 6), "RELU_N1_TO_1": (-1, 1)}


@host(*UNARY)
def unary(call: Call) -> tuple[NDArray[Any], ...]:
    """Functions of one value."""
    x = call.input(0)
    values = x.array if call.name == "CAST" else real(x)
    with np.errstate(all="ignore"):
        return result(call.output, np.asarray(UNARY[call.name](values)))


@host("LEAKY_RELU")
def leaky_relu(call: Call) -> tuple[NDArray[Any], ...]:
    """With a constant slope."""
    x = real(call.input(0))
    return result(call.output, np.where(x < 0, x * F32(call.options.get("alpha", 0.0)), x))


@host(*BINARY)
def binary(call: Call) -> tuple[NDArray[Any], ...]:
    """Functions of two values, broadcast; with a fused activation. Division of integers by zero is refused."""
    a, b, y = real(call.input(0)), real(call.input(1)), call.output
    if call.name in ("FLOOR_DIV", "FLOOR_MOD", "DIV") and b.dtype.kind in "iu" and not np.all(b):
        raise EvaluateError("divides an integer by 0")
    if call.activation not in LIMITS:
        raise EvaluateError(f"the activation {call.activation} is not supported on the host")
    low, high = LIMITS[call.activation]
    try:
        with np.errstate(all="ignore"):
            values = BINARY[call.name](a, b)
    except ValueError:
        raise EvaluateError(f"the operands' shapes {a.shape} and {b.shape} do not fit") from None
    return result(y, values if low is None and high is None else np.clip(values, low, high))


@host("ARG_MAX", "ARG_MIN")
def arg_max(call: Call) -> tuple[NDArray[Any], ...]:
    """The first of equal values."""
    x, axis = call.input(0).array, call.number(1)
    function = np.argmax if call.name == "ARG_MAX" else np.argmin
    return result(call.output, function(x, axis_of(axis, x.ndim)))


@host("REDUCE_MAX", "REDUCE_MIN")
def reduce(call: Call) -> tuple[NDArray[Any], ...]:
    """Over constant axes; codes of one quantisation stay codes."""
    x, y = call.input(0), call.output
    if not x.array.size:
        raise EvaluateError(f"reduces {x.shape}, which has no elements")
    axes = tuple({axis_of(axis, x.array.ndim) for axis in call.constant(1).ravel().tolist()})
    function = np.max if call.name == "REDUCE_MAX" else np.min
    return result(y, np.asarray(function(real(x), axis=axes)))


@host("PACK", "UNPACK")
def pack(call: Call) -> tuple[NDArray[Any], ...]:
    """Tensors of one shape to one with another axis, and back."""
    axis = call.options.get("axis", 0)
    if call.name == "PACK":
        parts = [call.input(i).array for i in range(len(call.inputs))]
        if len({part.shape for part in parts}) != 1:
            raise EvaluateError(f"packs tensors of different shapes {[part.shape for part in parts]}")
        return (moved(call.output, np.stack(parts, axis_of(axis, parts[0].ndim + 1))),)
    x = call.input(0).array
    axis = axis_of(axis, x.ndim)
    if x.shape[axis] != len(call.outputs):
        raise EvaluateError(f"unpacks axis {axis} of {x.shape} to {len(call.outputs)} tensors")
    return tuple(moved(y, x.take(i, axis)) for i, y in enumerate(call.outputs))


@host("GATHER", "GATHER_ND")
def gather(call: Call) -> tuple[NDArray[Any], ...]:
    """Elements by index; indices outside are refused."""
    x, index = call.input(0).array, call.input(1).array.astype(np.int64)
    try:
        if call.name == "GATHER_ND":
            return (moved(call.output, x[tuple(np.moveaxis(index, -1, 0))]),)
        return (moved(call.output, x.take(index, axis_of(call.options.get("axis", 0), x.ndim))),)
    except IndexError as error:
        raise EvaluateError(f"index outside {x.shape}: {error}") from None


@host("TRANSPOSE")
def transpose(call: Call) -> tuple[NDArray[Any], ...]:
    """With a constant order of axes."""
    x, order = call.input(0).array, call.constant(1).ravel().tolist()
    if sorted(order) != list(range(x.ndim)):
        raise EvaluateError(f"axes {order} of a tensor with {x.ndim} dimensions")
    return (moved(call.output, x.transpose(order)),)


@host("SLICE", "STRIDED_SLICE")
def cut(call: Call) -> tuple[NDArray[Any], ...]:
    """With constant bounds, positive or negative steps; no ellipsis, no new axes."""
    x = call.input(0).array
    try:
        return (moved(call.output, x[spans(call)]),)
    except IndexError as error:
        raise EvaluateError(f"index outside {x.shape}: {error}") from None


def spans(call: Call) -> tuple[slice | int, ...]:
    """What a SLICE or STRIDED_SLICE takes of every axis. :raises EvaluateError: an option or bounds it cannot have."""
    shape = call.input(0).shape
    bounds = [call.constant(i).ravel().tolist() for i in range(1, len(call.inputs))]
    if any(len(values) != len(shape) for values in bounds):
        raise EvaluateError(f"bounds {bounds} of a tensor with {len(shape)} dimensions")
    if call.name == "SLICE":
        begins, sizes = bounds
        ends = [n if size < 0 else begin + size for begin, size, n in zip(begins, sizes, shape, strict=True)]
        return tuple(slice(begin, end) for begin, end in zip(begins, ends, strict=True))
    call.require(ellipsis_mask=0, new_axis_mask=0)
    skip = [call.options.get(f"{end}_mask", 0) for end in ("begin", "end", "shrink_axis")]
    begins, ends, steps = bounds
    if 0 in steps:
        raise EvaluateError("a step of 0")
    found = [
        slice(None if skip[0] >> i & 1 else begin, None if skip[1] >> i & 1 else end, step)
        for i, (begin, end, step) in enumerate(zip(begins, ends, steps, strict=True))
    ]
    return tuple(begins[i] if skip[2] >> i & 1 else span for i, span in enumerate(found))


@host("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR")
def resize(call: Call) -> tuple[NDArray[Any], ...]:
    """To any size, in float32; codes are rounded half up."""
    x, y = call.image(0), call.output
    if len(y.shape) != 4 or (y.shape[0], y.shape[3]) != (x.shape[0], x.shape[3]) or 0 in y.shape:
        raise EvaluateError(f"takes {x.shape} to {y.shape}")
    values: NDArray[Any] = x.array if call.name.endswith("NEIGHBOR") else x.array.astype(F32)
    if int(np.prod(y.shape)) > MAX_ELEMENTS:
        raise EvaluateError(f"{y.shape} has more than {MAX_ELEMENTS} elements")
    for axis in (1, 2):
        values = _resized(call, values, axis, y.shape[axis])
    if call.name.endswith("NEIGHBOR") or x.array.dtype.kind == "f":
        return (y.shaped(values),)
    return (y.shaped(np.floor(values + F32(0.5)).astype(x.array.dtype)),)


def _resized(call: Call, x: NDArray[Any], axis: int, size: int) -> NDArray[Any]:
    low, high, share = places(call, x.shape[axis], size)
    if call.name.endswith("NEIGHBOR"):
        return x.take(low, axis)
    share = share.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    return x.take(low, axis) * (F32(1) - share) + x.take(high, axis) * share


def places(call: Call, n: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Where the ``size`` output positions of a resized axis lie among its n values, by TFLite's rules: the neighbours
    below and above, and the share of the one above."""
    corners, centres = call.options.get("align_corners", False), call.options.get("half_pixel_centers", False)
    scale = F32(n - 1) / F32(size - 1) if corners and size > 1 else F32(n) / F32(size)
    at = np.arange(size, dtype=F32)
    if call.name.endswith("NEIGHBOR"):
        nearest = (at + F32(0.5)) * scale if centres else at * scale
        nearest = np.floor(nearest + F32(0.5)) if corners else np.floor(nearest)
        low = np.clip(nearest.astype(np.int64), 0, n - 1)
        return low, low, np.zeros(size, F32)
    exact = (at + F32(0.5)) * scale - F32(0.5) if centres else at * scale
    low = np.clip(np.floor(exact), 0, n - 1).astype(np.int64)
    high = np.minimum(np.floor(exact).astype(np.int64) + 1, n - 1).clip(0)
    share = (exact - low.astype(F32)).astype(F32)
    return low, high, np.where(high == low, F32(0), share)


@host("CONCATENATION")
def concatenation(call: Call) -> tuple[NDArray[Any], ...]:
    """Of other dtypes than codes."""
    parts = [call.input(i).array for i in range(len(call.inputs))]
    axis = axis_of(call.options.get("axis", 0), len(call.output.shape))
    try:
        return (call.output.shaped(np.concatenate(parts, axis)),)
    except ValueError:
        raise EvaluateError(f"inputs {[part.shape for part in parts]} do not join along axis {axis}") from None
