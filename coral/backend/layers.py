"""The layers that kernels are compared with and chip programs are made of: their numbers and reference expressions.

Every class is one operation of ``coral.quantize.expressions*``. Images are (N, C, H, W) as tinygrad has them.
Source: docs/backend.md, "Selection" and "Chip programs".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from tinygrad.dtype import DType, dtypes
from tinygrad.tensor import Tensor

from coral.quantize.expressions import qlinear_expression
from coral.quantize.expressions_pointwise import (
    qadd_expression,
    qclip_expression,
    qmul_expression,
    qrequantise_expression,
)
from coral.quantize.expressions_windows import qavg_pool_expression, qconv2d_expression, qmax_pool_expression

Image = tuple[int, int, int, int]
"""Images, channels, rows, columns."""
Operand = tuple[DType, tuple[int, ...]]
SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER = 2.0**-126, 2.0**96
"""Outside, products could be subnormal or infinite, where the chip's arithmetic was never observed."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """An operation on uint8 codes of activations of ``shape``; ``lo``..``hi`` is what it may give.

    Layers with a multiplier end in ``output_stage``; ``mult`` None means a float32 buffer with one per channel.
    """

    shape: tuple[int, ...]
    out_zp: int = 0
    lo: int = 0
    hi: int = 255
    mult: float | None = 1.0
    bias: bool = False
    in_zps: tuple[int, ...] = ()

    activations: ClassVar[int] = 1
    keeps_codes: ClassVar[bool] = False
    """The result has the quantisation of the operand, whatever that is."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """What tells layers of one ``shape`` apart, for their names."""
        return ()

    @property
    def image(self) -> Image:
        """The operand as images, when nothing else says how it is to be seen."""
        sizes = (1, *self.shape) if len(self.shape) == 3 else self.shape
        if len(sizes) == 4:
            return sizes[0], sizes[1], sizes[2], sizes[3]
        images, *rest = sizes if len(sizes) > 1 else (1, *sizes)
        return images, math.prod(rest), 1, 1

    def result(self, image: Image) -> Image | None:
        """The result as images if the operand is seen as ``image``; None if this layer cannot see it so."""
        return image if math.prod(image) == math.prod(self.shape) else None

    @property
    def zero_points(self) -> tuple[int | None, ...]:
        """What each activation's zero point has to be on the chip; None: any."""
        return self.in_zps

    @property
    def operands(self) -> tuple[Operand, ...]:
        """dtype and shape of what ``expression`` takes: activations, weights, bias, multipliers."""
        return ((dtypes.uint8, self.shape),) * self.activations

    @property
    def terms(self) -> int:
        """Products of codes in a sum; 0 if no weights take part."""
        return 0

    @property
    def operations(self) -> int:
        """Multiplications and additions, or values touched."""
        return math.prod(self.shape)

    def expression(self, *operands: Tensor) -> Tensor:
        """The reference expression: what the layer computes on any device."""
        raise NotImplementedError

    def largest_accumulator(self, bias_magnitude: int) -> int:
        """Bound of ``|accumulator|`` when no bias exceeds ``bias_magnitude``."""
        return 0

    def _output(self, multipliers: Tensor | None = None) -> dict[str, Any]:
        mult = self.mult if multipliers is None else multipliers
        return {"mult": mult, "lo": self.lo, "hi": self.hi, "out_zp": self.out_zp}

    def to_json(self) -> dict[str, Any]:
        """All numbers; the inverse of :func:`from_json`."""
        return {"kind": type(self).__name__, **asdict(self)}


def from_json(values: dict[str, Any]) -> Layer:
    """The layer that :meth:`Layer.to_json` was called on."""
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return KINDS[fields.pop("kind")](**fields)


@dataclass(frozen=True, kw_only=True)
class _Weighted(Layer):
    """A layer with weights, and perhaps a bias and multipliers per channel."""

    outputs: int = 1
    w_zp: int = 0

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """Output channels first."""
        raise NotImplementedError

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.weights_shape

    @property
    def operands(self) -> tuple[Operand, ...]:
        bias = [(dtypes.int32, (self.outputs,))] * self.bias
        multipliers = [(dtypes.float32, (self.outputs,))] * (self.mult is None)
        return (dtypes.uint8, self.shape), (dtypes.uint8, self.weights_shape), *bias, *multipliers

    @property
    def terms(self) -> int:
        return math.prod(self.weights_shape[1:])

    def largest_accumulator(self, bias_magnitude: int) -> int:
        x, w = (max(zp, 255 - zp) for zp in (self.in_zps[0], self.w_zp))
        return self.terms * x * w + bias_magnitude

    def split(self, parameters: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Weights, bias or None, multipliers or None."""
        weights, *rest = parameters
        return weights, rest[0] if self.bias else None, rest[-1] if self.mult is None else None


@dataclass(frozen=True, kw_only=True)
class Linear(_Weighted):
    """``shape`` is [..., K]; any number of row axes, none of them needed."""

    @property
    def rows(self) -> int:
        """Vectors that the layer is applied to."""
        return math.prod(self.shape[:-1])

    @property
    def image(self) -> Image:
        return self.rows, self.shape[-1], 1, 1

    def result(self, image: Image) -> Image | None:
        fits = image[0] == self.rows and math.prod(image[1:]) == self.shape[-1]
        return (self.rows, self.outputs, 1, 1) if fits else None

    @property
    def weights_shape(self) -> tuple[int, ...]:
        return self.outputs, self.shape[-1]

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.outputs * self.shape[-1]

    def expression(self, *operands: Tensor) -> Tensor:
        x, *parameters = operands
        w, b, multipliers = self.split(parameters)
        return qlinear_expression(x, w, b, self.in_zps[0], self.w_zp, **self._output(multipliers))


@dataclass(frozen=True, kw_only=True)
class Conv(_Weighted):
    """``padding`` is left, right, top, bottom; strides and dilations are rows, columns."""

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def result(self, image: Image) -> Image | None:
        return (image[0], self.outputs, *self.size) if image == self.shape else None

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        return _windows(self.shape[2:], self.kernel, self.stride, self.padding, self.dilation)

    @property
    def weights_shape(self) -> tuple[int, ...]:
        return self.outputs, self.shape[1] // self.groups, *self.kernel

    @property
    def operations(self) -> int:
        return 2 * self.shape[0] * self.outputs * math.prod(self.size) * self.terms

    def expression(self, *operands: Tensor) -> Tensor:
        x, *parameters = operands
        w, b, multipliers = self.split(parameters)
        names = ("stride", "padding", "dilation", "groups")
        geometry = {name: getattr(self, name) for name in names}
        return qconv2d_expression(x, w, b, self.in_zps[0], self.w_zp, **self._output(multipliers), **geometry)


@dataclass(frozen=True, kw_only=True)
class _Pool(Layer):
    """One window over every plane of ``shape``; images and channels are seen as whoever wrote the operand has them."""

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def operations(self) -> int:
        return math.prod(self.shape[:2]) * math.prod(self.kernel) * math.prod(_pool_size(self))

    def result(self, image: Image) -> Image | None:
        fits = image[2:] == self.shape[2:] and image[0] * image[1] == self.shape[0] * self.shape[1]
        return (*image[:2], *_pool_size(self)) if fits else None


class MaxPool(_Pool):
    """The largest code of every window."""

    keeps_codes = True

    @property
    def zero_points(self) -> tuple[int | None, ...]:
        return (None,)

    def expression(self, *operands: Tensor) -> Tensor:
        return qmax_pool_expression(operands[0], self.kernel, self.stride, self.padding)


class AveragePool(_Pool):
    """The sum over every window, requantised; padding counts as zeros."""

    def expression(self, *operands: Tensor) -> Tensor:
        return qavg_pool_expression(
            operands[0], self.kernel, self.stride, self.in_zps[0], **self._output(), padding=self.padding
        )


@dataclass(frozen=True, kw_only=True)
class Add(Layer):
    """``weights`` are the chip's two integers; only the sum of the zero points' products is known of a kernel."""

    weights: tuple[int, int] = (1, 1)
    activations = 2

    @property
    def zero_points(self) -> tuple[int | None, ...]:
        return None, None

    def expression(self, *operands: Tensor) -> Tensor:
        return qadd_expression(operands[0], operands[1], self.in_zps[0], self.in_zps[1], self.weights, **self._output())


class Multiply(Layer):
    """The product of two operands' differences from their zero points, requantised."""

    activations = 2

    def expression(self, *operands: Tensor) -> Tensor:
        return qmul_expression(operands[0], operands[1], self.in_zps[0], self.in_zps[1], **self._output())


class Requantise(Layer):
    """Codes in another quantisation."""

    def expression(self, *operands: Tensor) -> Tensor:
        return qrequantise_expression(operands[0], self.in_zps[0], **self._output())


class Clip(Layer):
    """Codes cut to ``lo``..``hi``."""

    keeps_codes = True

    @property
    def zero_points(self) -> tuple[int | None, ...]:
        return (None,)

    def expression(self, *operands: Tensor) -> Tensor:
        return qclip_expression(operands[0], self.lo, self.hi)


KINDS: dict[str, type[Layer]] = {
    kind.__name__: kind for kind in (Linear, Conv, MaxPool, AveragePool, Add, Multiply, Requantise, Clip)
}


def _windows(
    size: Sequence[int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
) -> tuple[int, int]:
    left, right, top, bottom = padding
    whole = zip(size, kernel, stride, (top + bottom, left + right), dilation, strict=True)
    rows, columns = ((n + pad - (k - 1) * d - 1) // s + 1 for n, k, s, pad, d in whole)
    return rows, columns


def _pool_size(pool: _Pool) -> tuple[int, int]:
    return _windows(pool.shape[2:], pool.kernel, pool.stride, pool.padding, (1, 1))
