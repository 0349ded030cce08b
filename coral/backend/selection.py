"""Which kernels are layers the chip computes: read hints off a kernel, rebuild the layer, require the identical graph.

A hint is never trusted. The proof is that :func:`coral.quantize.expressions.qlinear_expression`, scheduled on buffers
of the hinted shapes, gives the very same UOp: identical graphs compute identical values on identical buffers.
Source: docs/backend.md, "Selection".
"""

from __future__ import annotations

import functools
import os
import struct
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tinygrad.codegen
from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import Context, Target, ansistrip
from tinygrad.tensor import Tensor
from tinygrad.uop import Ops
from tinygrad.uop.ops import AxisType, KernelInfo, UOp

from coral import CoralError
from coral.backend.chip_program import LinearKernel, chip_program
from coral.quantize.expressions import qlinear_expression

HOST_ONLY = "host-only"
"""``Target.indices`` of a renderer that must not select: part of tinygrad's cache key, and it travels to workers."""

_times_off = 0


def enabled() -> bool:
    """Whether kernels may go to the chip: not inside :func:`selection_off`, nor with CORAL_SELECT=0."""
    return not _times_off and os.environ.get("CORAL_SELECT", "1") != "0"


@contextmanager
def selection_off() -> Iterator[None]:
    """Inside, kernels that are compiled or fetched run on the host; a TinyJit keeps what it has captured."""
    global _times_off
    _times_off += 1
    try:
        yield
    finally:
        _times_off -= 1


@dataclass(frozen=True)
class Selection:
    """``program`` is the PROGRAM that replaces the kernel, or None; ``reason`` says why, in words."""

    program: UOp | None
    reason: str


class _NoLayer(Exception):
    """The kernel cannot be a layer; the message is the first hint that failed."""


@dataclass(frozen=True)
class _Layer:
    """What the hints claim: the layer, its row axes as scheduled, and the PARAMs out, x, w[, b]."""

    kernel: LinearKernel
    row_shape: tuple[int, ...]
    buffers: tuple[UOp, ...]


def select(ast: UOp, target: Target) -> Selection:
    """Decides about one scheduled kernel. Never raises and opens no device: it also runs in compile workers."""
    if target.indices == HOST_ONLY:
        return Selection(None, "selection is switched off")
    try:
        layer = _read_hints(ast)
        _prove(ast, layer)
        layer.kernel.spec()
        return Selection(chip_program(layer.kernel, layer.buffers, target), "identical to the quantised linear layer")
    except (_NoLayer, CoralError) as reason:
        return Selection(None, str(reason))
    except Exception as error:
        warnings.warn(f"coral: selection failed, the kernel runs on the host ({error!r})", stacklevel=2)
        return Selection(None, f"selection failed: {error!r}")


def install() -> None:
    """Puts selection in front of ``tinygrad.codegen.do_to_program`` in memory; other devices are not affected."""
    original = tinygrad.codegen.do_to_program
    if hasattr(original, "_coral"):
        return

    @functools.wraps(original)
    def do_to_program(ast: UOp, renderer):
        if ast.op is not Ops.SINK or not hasattr(renderer, "select"):
            return original(ast, renderer)
        selection: Selection = renderer.select(ast)
        program = original(ast if selection.program is None else selection.program, renderer)
        if os.environ.get("CORAL_DEBUG", "0") != "0":
            place = "host" if selection.program is None else "chip"
            print(
                f"coral: {place} {ansistrip(program.src[0].arg.name)}: {selection.reason}", file=sys.stderr, flush=True
            )
        return program

    do_to_program._coral = True  # pyright: ignore[reportAttributeAccessIssue]
    tinygrad.codegen.do_to_program = do_to_program


def self_test(device: str) -> bool:
    """Whether a small layer is still recognised by this tinygrad on this device (about 40 ms)."""
    kernel = LinearKernel(2, 3, 4, in_zp=5, w_zp=6, out_zp=7, mult=0.5, lo=0, hi=255, bias=True)
    try:
        ast = _scheduled(device, kernel, (2,), same=False)
        _prove(ast, _read_hints(ast))
    except Exception:
        return False
    return True


def _need(condition: object, reason: str) -> None:
    if not condition:
        raise _NoLayer(reason)


def _only(nodes: Iterable[UOp], what: str) -> UOp:
    found = list(nodes)
    _need(len(found) == 1, f"{len(found)} {what} instead of 1")
    return found[0]


def _read_hints(ast: UOp) -> _Layer:
    """The layer this kernel would be, from a look at its nodes.

    :raises _NoLayer: something a layer has is not there
    """
    _need(ast.op is Ops.SINK and isinstance(ast.arg, KernelInfo) and len(ast.src) == 1, "not a kernel with one store")
    end = ast.src[0]
    store = end.src[0] if end.op is Ops.END else end
    _need(store.op is Ops.STORE and store.src[0].op is Ops.INDEX, "not a plain store to a buffer")
    nodes = list(store.toposort())
    ranges = [node for node in nodes if node.op is Ops.RANGE]
    _need(all(node.src[0].op is Ops.CONST for node in ranges), "symbolic sizes")
    out, value = store.src[0].src[0], store.src[1]
    _need(out.op is Ops.PARAM and out.dtype == dtypes.uint8, "the result is not stored as uint8")
    _need(isinstance(out.arg.device, str), "spread over several devices")
    _need(value.op is Ops.CAST, "the result is not a rounded value cast to uint8")

    to_float = _only(
        (
            node
            for node in nodes
            if node.op is Ops.CAST and node.dtype == dtypes.float and node.src[0].dtype == dtypes.int
        ),
        "conversions of an int32 sum to float",
    )
    loads = [node for node in nodes if node.op is Ops.INDEX and node is not store.src[0]]
    total, bias = _split_bias(to_float.src[0])
    _need(total.op in (Ops.REDUCE, Ops.MUL), "no sum of products under the conversion to float")
    _need(total.op is Ops.MUL or total.arg[0] is Ops.ADD, "the reduction is not a sum")
    product = total.src[0] if total.op is Ops.REDUCE else total
    _need(product.op is Ops.MUL and product.dtype == dtypes.int, "the sum is not over int32 products")
    x, in_zp = _operand(product.src[0])
    w, w_zp = _operand(product.src[1])
    _need(len(loads) == len({x, w}) + (bias is not None), f"{len(loads)} buffer reads, more than x, w and bias")

    axes = list(end.src[1:]) if end.op is Ops.END else []
    x_axes, w_axes = set(x.toposort()), set(w.toposort())
    if any(axis in w_axes for axis in axes[:-1]) or (axes and axes[-1] in x_axes):
        row_axes, n = axes, 1
    else:
        row_axes, n = axes[:-1], axes[-1].src[0].val if axes else 1
    row_shape = tuple(axis.src[0].val for axis in row_axes) or (1,)
    rows = functools.reduce(int.__mul__, row_shape)
    reduced = [axis for axis in ranges if axis.arg[1] is AxisType.REDUCE]
    _need(len(reduced) <= 1, f"{len(reduced)} summed axes instead of 1")
    k = reduced[0].src[0].val if reduced else 1

    low = _only((node for node in nodes if node.op is Ops.MAX and node.dtype == dtypes.float), "lower clamps")
    high = _only((node for node in nodes if node.op is Ops.WHERE and node.src[2] is low), "upper clamps")
    out_zp = _integer(_added_constant(value.src[0]) or 0.0, "output zero point")
    kernel = LinearKernel(
        rows=rows,
        n=n,
        k=k,
        in_zp=in_zp,
        w_zp=w_zp,
        out_zp=out_zp,
        mult=_multiplier(to_float, low),
        lo=_integer(_constant(low.src[1], "lower clamp"), "lower clamp") + out_zp,
        hi=_integer(_constant(high.src[1], "upper clamp"), "upper clamp") + out_zp,
        bias=bias is not None,
    )
    loaded = (x, w) if bias is None else (x, w, bias)
    return _Layer(kernel, row_shape, (out, *(load.src[0] for load in loaded)))


def _split_bias(acc: UOp) -> tuple[UOp, UOp | None]:
    """The sum and the read of the bias, if an int32 buffer is added to the sum."""
    if acc.op is Ops.ADD:
        for total, bias in (acc.src, acc.src[::-1]):
            if bias.op is Ops.INDEX and bias.dtype == dtypes.int:
                return total, bias
    return acc, None


def _operand(factor: UOp) -> tuple[UOp, int]:
    """The uint8 read and the zero point of one factor ``int(code) - zero_point``."""
    added = _added_constant(factor)
    cast = factor.src[0] if added is not None else factor
    _need(
        cast.op is Ops.CAST and cast.src[0].op is Ops.INDEX and cast.src[0].dtype == dtypes.uint8,
        "a factor is not a uint8 code minus a zero point",
    )
    return cast.src[0], -int(added or 0)


def _added_constant(node: UOp) -> float | None:
    return node.src[1].val if node.op is Ops.ADD and node.src[1].op is Ops.CONST else None


def _constant(node: UOp, what: str) -> float:
    _need(node.op is Ops.CONST, f"the {what} is not a constant")
    return node.val


def _integer(value: float, what: str) -> int:
    _need(float(value).is_integer(), f"the {what} {value} is not an integer")
    return int(value)


def _multiplier(to_float: UOp, low: UOp) -> float:
    """The constant factor of the converted sum; a factor of 1 leaves no trace in the graph."""
    scaled = low.src[0]
    if scaled is to_float:
        return 1.0
    _need(
        scaled.op is Ops.MUL and scaled.src[0] is to_float, "the clamped value is not the converted sum times a factor"
    )
    mult = float(_constant(scaled.src[1], "multiplier"))
    # Outside, the chip's product could be subnormal or overflow, where its arithmetic was never observed.
    _need(2.0**-126 <= mult < 2.0**96, f"the multiplier {mult} is outside 2^-126..2^96")
    _need(struct.unpack("<f", struct.pack("<f", mult))[0] == mult, f"the multiplier {mult!r} is not a float32 value")
    return mult


def _prove(ast: UOp, layer: _Layer) -> None:
    out, x, w, *_ = layer.buffers
    rebuilt = _scheduled(out.arg.device, layer.kernel, layer.row_shape, same=x is w)
    _need(rebuilt.replace(arg=ast.arg) is ast, "differs from the quantised linear layer of its shape and constants")


def _scheduled(device: str, kernel: LinearKernel, row_shape: tuple[int, ...], *, same: bool) -> UOp:
    """The scheduled kernel of the layer on fresh, never allocated buffers; ``same``: one buffer is both x and w."""

    def empty(dtype: DType, *shape: int) -> Tensor:
        return Tensor.empty(*shape, dtype=dtype, device=device)

    with Context(CAPTURING=0, DEBUG=0, TRACK_MATCH_STATS=0):
        x = empty(dtypes.uint8, *row_shape, kernel.k)
        w = x if same else empty(dtypes.uint8, kernel.n, kernel.k)
        b = empty(dtypes.int32, kernel.n) if kernel.bias else None
        layer = qlinear_expression(x, w, b, kernel.in_zp, kernel.w_zp, kernel.mult, kernel.lo, kernel.hi, kernel.out_zp)
        calls = layer.schedule_linear().src
    _need(len(calls) == 1, f"the layer schedules as {len(calls)} kernels")
    return calls[0].src[0]
