"""Reading a tensor's graph backwards through reshapes and ReLU, to the layer result it was made from.

Layers that share one quantisation use it to hand codes to each other without a way through real values; calibration
uses it to see which layers are neighbours. Source: docs/quantize.md, "Linked layers".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor
from tinygrad.uop import Ops
from tinygrad.uop.ops import UOp

from coral.quantize.expressions import dequantise_expression

# PAD is missing on purpose: it inserts real zeros, which are not code zero.
_MOVEMENTS = {Ops.RESHAPE, Ops.PERMUTE, Ops.SHRINK, Ops.EXPAND, Ops.FLIP}


@dataclass(frozen=True)
class Peeled:
    """What a tensor was made from: ``node``, under ``movements`` (outermost first), with a ReLU among them or not."""

    node: UOp
    movements: tuple[UOp, ...] = ()
    relu: bool = False


def peel(x: Tensor) -> Iterator[Peeled]:
    """x itself, then what remains after taking away one movement, copy or ReLU after the other from the outside."""
    stage: Peeled | None = Peeled(x.uop)
    while stage is not None:
        yield stage
        stage = _inner(stage)


def _inner(stage: Peeled) -> Peeled | None:
    node = stage.node
    if node.op in _MOVEMENTS:
        return Peeled(node.src[0], (*stage.movements, node), stage.relu)
    if node.op is Ops.CONTIGUOUS:
        return Peeled(node.src[0], stage.movements, stage.relu)
    for source in node.src:
        # Equal graphs are the same object: a rebuilt ReLU that is this node proves what the node computes.
        if source.dtype == node.dtype == dtypes.float32 and any(r.uop is node for r in _relus(Tensor(source))):
            return Peeled(source, stage.movements, True)
    return None


def _relus(t: Tensor) -> tuple[Tensor, ...]:
    return t.relu(), t.maximum(0), t.clip(0)


def codes_behind(x: Tensor, scale: float, zero_point: int) -> Tensor | None:
    """The uint8 codes of x, if x is the dequantised result of a layer with this quantisation, under ReLU and movements.

    Quantising x would give exactly these codes: the round trip through float32 is the identity on all 256 codes.

    :return: uint8 tensor of x's shape, or None if x was made in another way
    """
    for stage in peel(x):
        codes = stage.node
        while codes.op in (Ops.MAX, Ops.MUL, Ops.ADD, Ops.CAST) and codes.dtype == dtypes.float32:
            codes = codes.src[0]
        if codes.dtype == dtypes.uint8 and dequantise_expression(Tensor(codes), scale, zero_point).uop is stage.node:
            for movement in reversed(stage.movements):
                codes = UOp(movement.op, dtypes.uint8, (codes, *movement.src[1:]), movement.arg)
            moved = Tensor(codes)
            return moved.maximum(zero_point) if stage.relu and zero_point > 0 else moved
    return None
