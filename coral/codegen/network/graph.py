"""What a network computes: tensors, and stages that read and write them. Front ends build this, generators read it.

Codes are the chip's: uint8, int8 models plus 128. Source: docs/network.md, section Graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from coral.codegen.errors import CodegenError, ShapeError
from coral.numerics import Spline

MAX_EXTENT = 8192
"""Largest number of rows, columns or channels of a tensor."""


@dataclass(frozen=True)
class Tensor:
    """``y`` x ``x`` positions of ``c`` channels, uint8. ``scale`` is only recorded in the program's layers."""

    name: str
    y: int
    x: int
    c: int
    zero_point: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        for letter, value in (("rows", self.y), ("columns", self.x), ("channels", self.c)):
            if not 1 <= value <= MAX_EXTENT:
                raise ShapeError(f"tensor {self.name!r} has {value} {letter}, allowed are 1..{MAX_EXTENT}")
        if not 0 <= self.zero_point <= 255:
            raise CodegenError(f"tensor {self.name!r} has zero point {self.zero_point}, allowed are 0..255")

    @property
    def size(self) -> int:
        """Elements."""
        return self.y * self.x * self.c


def whole_range(x: Tensor) -> tuple[float, float]:
    """Clamps that let every code of a tensor pass."""
    return float(-x.zero_point), float(255 - x.zero_point)


@dataclass(frozen=True)
class Window:
    """Kernel, stride, padding before the first position (negative: positions left out), dilation, along both axes.

    A stride of 0, for stages with one position per window, gives every output the first position.
    """

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if min(*self.kernel, *self.dilation) < 1 or min(self.stride) < (self.kernel != (1, 1)):
            raise ShapeError(f"window {self}: kernel, stride and dilation must be at least 1")
        if any(p >= k > 1 for p, k in zip(self.pad, self.extent, strict=True)):
            raise ShapeError(f"window {self}: padding must be smaller than the kernel")

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns from the first to the last tap."""
        y, x = ((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))
        return y, x

    @property
    def pointwise(self) -> bool:
        """Whether every result needs the one position that it stands for."""
        return (self.kernel, self.stride, self.pad) == ((1, 1), (1, 1), (0, 0))


POINT = Window()


def same(
    size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int] = (1, 1)
) -> Window:
    """TFLite's SAME padding on ``size`` = (rows, columns)."""
    extent = Window(kernel, dilation=dilation).extent
    y, x = (max((-(-n // s) - 1) * s + k - n, 0) // 2 for n, k, s in zip(size, extent, stride, strict=True))
    return Window(kernel, stride, (y, x), dilation)


@dataclass(frozen=True)
class Stage:
    """One step: ``inputs`` are read (through ``window``), ``output`` is written, all by name of tensor.

    ``clamps`` are the float32 limits relative to the output's zero point.
    """

    inputs: tuple[str, ...]
    output: str
    clamps: tuple[float, float]

    @property
    def window(self) -> Window:
        """What an output position reads of every input."""
        return POINT


@dataclass(frozen=True, eq=False)
class Conv(Stage):
    """``weights`` uint8 [N, kh, kw, C], ``bias`` int32 [N] or None, ``mult`` float32 scalar or [N]."""

    weights: np.ndarray = field(repr=False)
    bias: np.ndarray | None = field(repr=False)
    w_zp: int
    mult: float | np.ndarray
    at: Window = POINT

    @property
    def window(self) -> Window:
        return self.at


@dataclass(frozen=True, eq=False)
class Depthwise(Conv):
    """As Conv, each channel with its own m kernels: ``weights`` uint8 [kh, kw, C * m], output n sees channel n // m."""


@dataclass(frozen=True, eq=False)
class Dense(Conv):
    """As Conv, every output sees the whole map: ``weights`` uint8 [N, y * x * C] in row-major order."""


@dataclass(frozen=True, eq=False)
class TransposeConv(Conv):
    """As Conv, windows lie on the output: every input position adds its products with the weights to one of them."""

    @property
    def window(self) -> Window:
        return POINT


@dataclass(frozen=True)
class MaxPool(Stage):
    """Maximum over windows; padding never wins."""

    at: Window = POINT

    @property
    def window(self) -> Window:
        return self.at


@dataclass(frozen=True)
class AveragePool(Stage):
    """Sum of (code - zero point) over windows without padding, times ``mult`` (which includes 1 / count)."""

    mult: float = 1.0
    at: Window = POINT

    @property
    def window(self) -> Window:
        return self.at


@dataclass(frozen=True)
class Add(Stage):
    """w1 * a + w2 * b + offset, times ``mult``; weights of at most 15 bits, w2 may be negative (SUB)."""

    weights: tuple[int, int] = (1, 1)
    offset: int = 0
    mult: float = 1.0


@dataclass(frozen=True)
class Multiply(Stage):
    """(a - z_a) * (b - z_b) times ``mult``."""

    mult: float = 1.0


@dataclass(frozen=True)
class Requantise(Stage):
    """(x - zero point + offset) times ``mult``, through ``spline``: RELU, QUANTIZE, LOGISTIC, TANH, constants.

    ``at``: a window of one position: what lies outside the input is its zero point (PAD), or a part is taken.
    """

    mult: float = 1.0
    offset: int = 0
    spline: Spline | None = None
    at: Window = POINT

    @property
    def window(self) -> Window:
        return self.at


@dataclass(frozen=True)
class Resize(Stage):
    """Twice as many rows and columns: on half pixel centres with edges repeated, or every position four times."""

    nearest: bool = False


@dataclass(frozen=True)
class Softmax(Stage):
    """Over the channels of every position; ``mults`` from ``numerics.softmax_multipliers``."""

    mults: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True)
class L2Normalise(Stage):
    """Over the channels of every position; ``mults`` from ``numerics.l2_multipliers``."""

    mults: tuple[float, float, float] = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Concatenate(Stage):
    """Inputs side by side along the channels; a matter of places, nothing is computed.

    ``mults``: multipliers of the inputs, if some have another quantisation than the output and are requantised.
    """

    mults: tuple[float, ...] = ()


@dataclass(frozen=True)
class Stack(Concatenate):
    """Bands of one tensor, each written by a stage of its own; a plan makes them (docs/network.md, Bands)."""


@dataclass(frozen=True)
class Slice(Stage):
    """The channels from ``begin`` on, as many as the output has; a matter of places, like Concatenate.

    ``first``, ``step``: first row and column, and how far apart the ones taken are.
    """

    begin: int = 0
    first: tuple[int, int] = (0, 0)
    step: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Pad(Stage):
    """``before`` rows and columns of zero points in front of the input, and behind it up to the output's size."""

    before: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Reshape(Stage):
    """The same elements in row-major order; at the ends of a network or in front of dense layers."""


@dataclass(frozen=True)
class Interleave(Stage):
    """Input k holds the positions (i * step + phases[k]) of the output; a matter of places.

    All inputs have as many positions as the first, so that tiles with positions of the output have some of each.
    """

    step: tuple[int, int] = (1, 1)
    phases: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Network:
    """Tensors by name and stages in order of execution; every tensor but the inputs is written by one stage."""

    name: str
    tensors: dict[str, Tensor]
    inputs: tuple[str, ...]
    stages: tuple[Stage, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        known = set(self.inputs)
        if isinstance(self.inputs, str) or not self.inputs or not known <= self.tensors.keys():
            raise CodegenError(f"network {self.name!r}: inputs {self.inputs!r}, needed are names of tensors")
        for stage in self.stages:
            unknown = [name for name in stage.inputs if name not in known]
            if unknown or stage.output in known or stage.output not in self.tensors:
                problem = (
                    f"reads {unknown[0]!r}, which nothing wrote" if unknown else "writes what exists or is unknown"
                )
                raise CodegenError(f"network {self.name!r}: the stage of {stage.output!r} {problem}")
            known.add(stage.output)
            self._check(stage)
        missing = [name for name in self.outputs if name not in known]
        if missing or not self.outputs:
            raise CodegenError(f"network {self.name!r}: outputs {list(self.outputs)}, no stage writes {missing}")

    def _check(self, stage: Stage) -> None:
        """Shapes of a stage's operands against its output."""
        y, x = self.tensors[stage.output], self.tensors[stage.inputs[0]]
        where = f"network {self.name!r}, {type(stage).__name__} {stage.output!r}"
        mults = getattr(stage, "mults", getattr(stage, "mult", 1.0))
        for what, value in (("clamps", stage.clamps), ("multiplier", mults)):
            if not np.array_equal(np.asarray(value, np.float32), np.asarray(value)):
                raise CodegenError(f"{where}: {what} {value} are no float32 values")
        if isinstance(stage, Conv):
            _check_weights(where, stage, x, y)
        if isinstance(stage, Dense):
            return
        if isinstance(stage, Requantise) and stage.at.kernel != (1, 1):
            raise ShapeError(f"{where}: a window of {stage.at.kernel}, a single position is taken")
        free = isinstance(stage, TransposeConv | Requantise | Interleave | Pad | Reshape | Resize)
        for out, size, k, s, pad in zip(
            (y.y, y.x), (x.y, x.x), stage.window.extent, stage.window.stride, stage.window.pad, strict=True
        ):
            reach = (out - 1) * s + k - pad
            if free or isinstance(stage, Slice):
                continue
            if reach - size >= k or (not isinstance(stage, Conv | MaxPool) and (pad > 0 or reach > size)):
                raise ShapeError(
                    f"{where}: {out} windows of {k} every {s} from -{pad} reach {reach}, the input has {size}"
                )
        if type(stage) is Concatenate:
            parts = [self.tensors[name] for name in stage.inputs]
            totals = {sum(t.c for t in parts), sum(-(-t.c // 4) * 4 for t in parts)}
            same_zero = stage.mults or all(t.zero_point == y.zero_point for t in parts)
            fit = all((t.y, t.x) == (y.y, y.x) for t in parts) and len(stage.mults) in (0, len(parts))
            if y.c not in totals or not fit or not same_zero:
                raise ShapeError(f"{where}: the inputs do not make up {y}")
        elif isinstance(stage, Slice):
            last = [f + (n - 1) * s for f, n, s in zip(stage.first, (y.y, y.x), stage.step, strict=True)]
            inside = 0 <= stage.begin <= x.c - y.c and min(*stage.first, *stage.step) >= 0 and min(stage.step) >= 1
            if not inside or last[0] >= x.y or last[1] >= x.x or x.zero_point != y.zero_point:
                raise ShapeError(
                    f"{where}: channels {stage.begin}..{stage.begin + y.c - 1} of positions {stage.first}..{last} of "
                    f"{x} are not {y}"
                )
        elif isinstance(stage, Pad):
            sizes = zip((x.y, x.x), stage.before, (y.y, y.x), strict=True)
            if (x.c, x.zero_point) != (y.c, y.zero_point) or any(b < 0 or n < old + b for old, b, n in sizes):
                raise ShapeError(f"{where}: {x} with {stage.before} positions in front is not {y}")
        elif isinstance(stage, Resize):
            if (2 * x.y, 2 * x.x, x.c, x.zero_point) != (y.y, y.x, y.c, y.zero_point):
                raise ShapeError(f"{where}: {y} is not twice {x}")
        elif isinstance(stage, Reshape):
            if (x.size, x.zero_point) != (y.size, y.zero_point):
                raise ShapeError(f"{where}: {x.size} elements of {x} do not become {y}")
        elif not isinstance(stage, Conv | Dense) and any(self.tensors[name].c != y.c for name in stage.inputs):
            raise ShapeError(f"{where}: {y.c} channels from inputs of {[self.tensors[n].c for n in stage.inputs]}")

    def readers(self, name: str) -> Iterator[Stage]:
        """Stages that read a tensor."""
        return (stage for stage in self.stages if name in stage.inputs)


def _check_weights(where: str, stage: Conv, x: Tensor, y: Tensor) -> None:
    w, n = stage.weights, y.c
    if isinstance(stage, Dense):
        wanted: tuple[int, ...] = (n, x.size)
        if (y.y, y.x) != (1, 1):
            raise ShapeError(f"{where}: {y.y} x {y.x} positions, a dense layer has one")
    elif isinstance(stage, Depthwise):
        wanted = (*stage.at.kernel, n)
        if n % x.c:
            raise ShapeError(f"{where}: {n} channels from {x.c}, a depthwise layer has a multiple")
    else:
        wanted = (n, *stage.at.kernel, x.c)
    if w.shape != wanted or w.dtype != np.uint8:
        raise ShapeError(f"{where}: weights are {w.dtype} {w.shape}, needed are uint8 {wanted}")
    if stage.bias is not None and (stage.bias.shape != (n,) or stage.bias.dtype != np.int32):
        raise ShapeError(f"{where}: bias is {stage.bias.dtype} {stage.bias.shape}, needed is int32 ({n},)")
    if np.shape(stage.mult) not in ((), (n,)):
        raise ShapeError(f"{where}: {math.prod(np.shape(stage.mult))} multipliers, needed are one or {n}")
    if not 0 <= stage.w_zp <= 255:
        raise CodegenError(f"{where}: weight zero point {stage.w_zp}, allowed are 0..255")
