"""Where the windows of convolutions, pools and transposed convolutions lie. Source: docs/evaluate.md, "Windows"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral.evaluate.operands import MAX_ELEMENTS, Call, EvaluateError, Operand


@dataclass(frozen=True)
class Axis:
    """Windows along one axis: ``count`` of them, window o takes positions ``o * stride - before + t * dilation``."""

    size: int
    kernel: int
    stride: int
    dilation: int
    before: int
    count: int

    @property
    def after(self) -> int:
        """Padding behind the last position that the windows reach."""
        reach = (self.count - 1) * self.stride + (self.kernel - 1) * self.dilation + 1
        return max(reach - self.before - self.size, 0)

    def tap(self, t: int) -> slice:
        """What tap t of every window reads of the padded axis."""
        start = t * self.dilation
        return slice(start, start + (self.count - 1) * self.stride + 1, self.stride)


def axes_of(call: Call, shape: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[Axis, Axis]:
    """Rows and columns of windows on an image ``[N, H, W, C]``, from an operator's padding, strides and dilations.

    :raises EvaluateError: a kernel, stride or dilation below 1, an unknown padding, no window fits
    """
    call.require(padding=("SAME", "VALID"))
    axes = []
    for letter, size, k in zip("hw", shape[1:3], kernel, strict=True):
        stride, dilation = call.options.get(f"stride_{letter}", 1), call.options.get(f"dilation_{letter}_factor", 1)
        if min(k, stride, dilation) < 1:
            raise EvaluateError(f"kernel {k}, stride {stride} and dilation {dilation} must be at least 1")
        extent = (k - 1) * dilation + 1
        if call.options.get("padding") == "SAME":
            count = -(-size // stride)
            before = max((count - 1) * stride + extent - size, 0) // 2
        else:
            count, before = (size - extent) // stride + 1, 0
        if count < 1:
            raise EvaluateError(f"windows of {extent} positions do not fit {size}")
        axes.append(Axis(size, k, stride, dilation, before, count))
    return axes[0], axes[1]


def require_size(operand: Operand, rows: int, columns: int) -> None:
    """:raises EvaluateError: a tensor is not an image of this height and width."""
    shape = operand.shape
    if len(shape) != 4 or shape[1:3] != (rows, columns):
        raise EvaluateError(f"{operand.tensor.name!r} has shape {shape}, its operator's windows are {rows} x {columns}")


def padded(x: NDArray[Any], rows: Axis, columns: Axis, value: float) -> NDArray[Any]:
    """An image ``[N, H, W, C]`` with the padding that the windows need."""
    borders = [(axis.before, axis.after) for axis in (rows, columns)]
    extent = math.prod(sum(border, axis.size) for border, axis in zip(borders, (rows, columns), strict=True))
    if extent * x.shape[0] * x.shape[3] > MAX_ELEMENTS:
        raise EvaluateError(f"padded by {borders}, the image {x.shape} has more than {MAX_ELEMENTS} elements")
    return np.pad(x, [(0, 0), *borders, (0, 0)], constant_values=value) if any(map(any, borders)) else x


def reduce_windows(x: NDArray[Any], rows: Axis, columns: Axis, function: np.ufunc, pad: int) -> NDArray[Any]:
    """``function`` (``np.add``, ``np.maximum``) over every window: ``[N, H, W, C]`` to ``[N, rows, columns, C]``."""
    x = padded(x, rows, columns, pad)
    for position, axis in ((1, rows), (2, columns)):
        lead = (slice(None),) * position
        total = x[(*lead, axis.tap(0))].copy()
        for t in range(1, axis.kernel):
            function(total, x[(*lead, axis.tap(t))], out=total)
        x = total
    return x
