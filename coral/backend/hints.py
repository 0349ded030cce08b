"""What a scheduled kernel looks like: candidates of layers that it could be, none of them trusted.

Shapes come from the loops, geometry of windows from evaluating the index arithmetic at points. Source: docs/backend.md,
"Selection".
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tinygrad.dtype import dtypes
from tinygrad.uop import Ops
from tinygrad.uop.ops import AxisType, KernelInfo, UOp

from coral.backend.layers import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER, Add, Clip, Layer, Linear, Multiply, Requantise
from coral.backend.windows import convolutions, pools


class NoLayer(Exception):
    """The kernel cannot be a layer; the message is the first hint that failed."""


@dataclass(frozen=True)
class Match:
    """A claim: the kernel computes ``layer`` on the PARAMs ``buffers`` (result, activations, weights, bias, ...)."""

    layer: Layer
    buffers: tuple[UOp, ...]


@dataclass(frozen=True)
class Kernel:
    """The parts of a kernel with one store: the write, the stored value, the loops from outside in."""

    store: UOp
    axes: tuple[UOp, ...]

    @property
    def out(self) -> UOp:
        """The PARAM that is written."""
        return self.store.src[0].src[0]

    @property
    def value(self) -> UOp:
        """What is stored."""
        return self.store.src[1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Passes of the loops."""
        return tuple(size(axis) for axis in self.axes)


@dataclass(frozen=True)
class Stage:
    """An output stage: the int32 value under it, its numbers, the read of the multipliers if each channel has one."""

    acc: UOp
    mult: float | None
    multipliers: UOp | None
    lo: int
    hi: int
    out_zp: int

    @property
    def numbers(self) -> dict[str, Any]:
        """The fields of a :class:`~coral.backend.layers.Layer`."""
        return {"mult": self.mult, "lo": self.lo, "hi": self.hi, "out_zp": self.out_zp}


def read(ast: UOp) -> Iterator[Match]:
    """Layers that the kernel may be, likeliest first.

    :raises NoLayer: something that every layer has is not there; also while iterating
    """
    kernel = _kernel(ast)
    loads = [n for n in kernel.value.toposort() if n.op is Ops.INDEX]
    if kernel.value.op is not Ops.CAST:
        yield from _on_codes(kernel, loads)
        return
    stage = _stage(kernel.value)
    loads = [load for load in loads if load is not stage.multipliers]
    total, bias = _split_bias(stage.acc)
    tail = tuple(load.src[0] for load in (bias, stage.multipliers) if load is not None)
    numbers = {**stage.numbers, "bias": bias is not None}
    loads = [load for load in loads if load is not bias]
    product = total.src[0] if total.op is Ops.REDUCE else total
    if product.op is Ops.MUL and not _constant_factor(product):
        need(total.op is Ops.MUL or total.arg[0] is Ops.ADD, "the reduction is not a sum")
        need(product.dtype == dtypes.int, "the sum is not over int32 products")
        (x, in_zp), (w, w_zp) = (_operand(factor) for factor in product.src)
        need(len(loads) == len({x, w}), f"{len(loads)} buffer reads, more than x, w and bias")
        zero_points = {"in_zps": (in_zp,), "w_zp": w_zp}
        buffers = (kernel.out, x.src[0], w.src[0], *tail)
        if (linear := _linear(kernel, total, x, w)) is not None:
            yield Match(Linear(**linear, **zero_points, **numbers), buffers)
        for layer in convolutions(kernel.axes, total, x, w, {**zero_points, **numbers}):
            yield Match(layer, buffers)
        if total.op is Ops.MUL and bias is None and stage.mult is not None:
            layer = Multiply(shape=kernel.sizes, in_zps=(in_zp, w_zp), **stage.numbers)
            yield Match(layer, (kernel.out, x.src[0], w.src[0]))
        return
    need(bias is None and stage.multipliers is None, "a bias or multipliers without a sum of products")
    if total.op is Ops.REDUCE:
        need(total.arg[0] is Ops.ADD, "the reduction is not a sum")
        x, in_zp = _operand(product)
        for layer in pools(kernel.axes, total, x, {"in_zps": (in_zp,), **stage.numbers}, average=True):
            yield Match(layer, (kernel.out, x.src[0]))
    elif len(loads) == 2:
        yield from _sums(kernel, total, stage)
    else:
        x, in_zp = _operand(total)
        layer = Requantise(shape=kernel.sizes, in_zps=(in_zp,), **stage.numbers)
        yield Match(layer, (kernel.out, x.src[0]))


def need(condition: object, reason: str) -> None:
    """:raises NoLayer: with the reason, if the condition does not hold."""
    if not condition:
        raise NoLayer(reason)


def size(axis: UOp) -> int:
    """Passes of a loop."""
    return int(axis.src[0].val)


def _kernel(ast: UOp) -> Kernel:
    need(ast.op is Ops.SINK and isinstance(ast.arg, KernelInfo) and len(ast.src) == 1, "not a kernel with one store")
    end = ast.src[0]
    store = end.src[0] if end.op is Ops.END else end
    need(store.op is Ops.STORE and store.src[0].op is Ops.INDEX, "not a plain store to a buffer")
    ranges = [node for node in store.toposort() if node.op is Ops.RANGE]
    need(all(node.src[0].op is Ops.CONST for node in ranges), "symbolic sizes")
    need(all(node.arg[1] in (AxisType.WEAK, AxisType.REDUCE) for node in ranges), "loops of an unknown kind")
    kernel = Kernel(store, tuple(end.src[1:]) if end.op is Ops.END else ())
    need(kernel.out.op is Ops.PARAM and kernel.out.dtype == dtypes.uint8, "the result is not stored as uint8")
    need(isinstance(kernel.out.arg.device, str), "spread over several devices")
    return kernel


def _stage(value: UOp) -> Stage:
    nodes = list(value.toposort())
    to_float = _only(
        (n for n in nodes if n.op is Ops.CAST and n.dtype == dtypes.float and n.src[0].dtype == dtypes.int),
        "conversions of an int32 sum to float",
    )
    low = _only((node for node in nodes if node.op is Ops.MAX and node.dtype == dtypes.float), "lower clamps")
    high = _only((node for node in nodes if node.op is Ops.WHERE and node.src[2] is low), "upper clamps")
    out_zp = _integer(_added_constant(value.src[0]) or 0.0, "output zero point")
    mult, multipliers = _multiplier(to_float, low)
    lo = _integer(_constant(low.src[1], "lower clamp"), "lower clamp") + out_zp
    hi = _integer(_constant(high.src[1], "upper clamp"), "upper clamp") + out_zp
    return Stage(to_float.src[0], mult, multipliers, lo, hi, out_zp)


def _multiplier(to_float: UOp, low: UOp) -> tuple[float | None, UOp | None]:
    """The factor of the converted sum: a constant, or a read of a buffer; a factor of 1 leaves no trace."""
    scaled = low.src[0]
    if scaled is to_float:
        return 1.0, None
    need(
        scaled.op is Ops.MUL and scaled.src[0] is to_float, "the clamped value is not the converted sum times a factor"
    )
    if scaled.src[1].op is Ops.INDEX:
        return None, scaled.src[1]
    mult = float(_constant(scaled.src[1], "multiplier"))
    need(SMALLEST_MULTIPLIER <= mult < LARGEST_MULTIPLIER, f"the multiplier {mult} is outside 2^-126..2^96")
    need(struct.unpack("<f", struct.pack("<f", mult))[0] == mult, f"the multiplier {mult!r} is not a float32 value")
    return mult, None


def _linear(kernel: Kernel, total: UOp, x: UOp, w: UOp) -> dict[str, Any] | None:
    """Shape and outputs of a linear layer, if the loops can be those of one."""
    axes, reduced = list(kernel.axes), list(total.src[1:]) if total.op is Ops.REDUCE else []
    if len(reduced) > 1:
        return None
    x_axes, w_axes = set(x.toposort()), set(w.toposort())
    outputs = 1
    if axes and axes[-1] in w_axes and axes[-1] not in x_axes:
        outputs = size(axes.pop())
    if any(axis in w_axes for axis in axes):
        return None
    shape = tuple(size(axis) for axis in axes) or (1,)
    return {"shape": (*shape, size(reduced[0]) if reduced else 1), "outputs": outputs}


def _sums(kernel: Kernel, total: UOp, stage: Stage) -> Iterator[Match]:
    """ADD of two operands: any zero points that give the constant are as good as the true ones."""
    constant = _added_constant(total)
    pair = total.src[0] if constant is not None else total
    need(pair.op is Ops.ADD, "two buffers are read, but not for a sum or product of codes")
    (a, w_1), (b, w_2) = (_weighted(term) for term in pair.src)
    wanted = -int(constant or 0)
    for zp in range(256):
        rest, remainder = divmod(wanted - w_1 * zp, w_2)
        if not remainder and 0 <= rest <= 255:
            layer = Add(shape=kernel.sizes, in_zps=(zp, rest), weights=(w_1, w_2), **stage.numbers)
            yield Match(layer, (kernel.out, a.src[0], b.src[0]))
            return
    raise NoLayer(f"the constant {wanted} is no sum of {w_1} and {w_2} times zero points")


def _weighted(term: UOp) -> tuple[UOp, int]:
    """The read and the weight of a summand ``int(code) * weight``."""
    weight = int(_constant(term.src[1], "weight of a summand")) if term.op is Ops.MUL else 1
    load, zero_point = _operand(term.src[0] if term.op is Ops.MUL else term)
    need(zero_point == 0 and weight, "a summand is not a code times a weight")
    return load, weight


def _on_codes(kernel: Kernel, loads: list[UOp]) -> Iterator[Match]:
    """Maximum pools and clamps, which compute in uint8."""
    value, load = kernel.value, _only(loads, "buffer reads")
    need(load.dtype == dtypes.uint8 and load.src[0].op is Ops.PARAM, "what is read is not uint8")
    if value.op is Ops.REDUCE:
        need(value.arg[0] is Ops.MAX, "a sum in uint8")
        for layer in pools(kernel.axes, value, load, {}, average=False):
            yield Match(layer, (kernel.out, load.src[0]))
        return
    need(value.op in (Ops.MAX, Ops.WHERE), "neither a rounded value nor a clamp or maximum of codes")
    low = value.src[2] if value.op is Ops.WHERE else value
    lo = int(_constant(low.src[1], "lower clamp")) if low.op is Ops.MAX else 0
    hi = int(_constant(value.src[1], "upper clamp")) if value.op is Ops.WHERE else 255
    need(0 <= lo <= hi <= 255, f"the clamps {lo}, {hi} are not in order")
    yield Match(Clip(shape=kernel.sizes, lo=lo, hi=hi), (kernel.out, load.src[0]))


def _split_bias(acc: UOp) -> tuple[UOp, UOp | None]:
    """The sum and the read of the bias, if an int32 buffer is added to the sum."""
    if acc.op is Ops.ADD:
        for total, bias in (acc.src, acc.src[::-1]):
            if bias.op is Ops.INDEX and bias.dtype == dtypes.int:
                return total, bias
    return acc, None


def _operand(factor: UOp) -> tuple[UOp, int]:
    """The uint8 read and the zero point of one factor ``int(code) - zero_point``, perhaps padded with 0."""
    if factor.op is Ops.WHERE:
        branches = [branch for branch in factor.src[1:] if branch.op is not Ops.CONST or branch.val != 0]
        factor = _only(branches, "values beside the padding")
    added = _added_constant(factor)
    cast = factor.src[0] if added is not None else factor
    need(
        cast.op is Ops.CAST
        and cast.src[0].op is Ops.INDEX
        and cast.src[0].dtype == dtypes.uint8
        and cast.src[0].src[0].op is Ops.PARAM,
        "an operand is not a uint8 code minus a zero point",
    )
    return cast.src[0], -int(added or 0)


def _constant_factor(product: UOp) -> bool:
    return product.src[1].op is Ops.CONST


def _only(nodes: Iterable[UOp], what: str) -> UOp:
    found = list(nodes)
    need(len(found) == 1, f"{len(found)} {what} instead of 1")
    return found[0]


def _added_constant(node: UOp) -> float | None:
    return node.src[1].val if node.op is Ops.ADD and node.src[1].op is Ops.CONST else None


def _constant(node: UOp, what: str) -> float:
    need(node.op is Ops.CONST, f"the {what} is not a constant")
    return node.val


def _integer(value: float, what: str) -> int:
    need(math.isfinite(value) and float(value).is_integer(), f"the {what} {value} is not an integer")
    return int(value)
