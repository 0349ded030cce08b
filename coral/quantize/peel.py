"""Reading a tensor's graph backwards to the layer results it was made from, and making it again from their codes.

Steps that codes follow exactly: movements, maxima (also padded), ReLU and ReLU6. Sums of two such values and means over
windows have their own uint8 operations. Layers use this to hand codes to each other without a way through real values;
calibration uses it to see which layers are neighbours. Source: docs/quantize.md, "Linked layers".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor
from tinygrad.uop import Ops
from tinygrad.uop.ops import UOp

from coral import numerics
from coral.quantize.expressions import dequantise_expression, in_buffer, output_stage
from coral.quantize.expressions_pointwise import qadd_expression, qclip_expression
from coral.quantize.tape import note

_MOVEMENTS = {Ops.RESHAPE, Ops.PERMUTE, Ops.SHRINK, Ops.EXPAND, Ops.FLIP}
_UNBOUNDED = (-math.inf, math.inf)
_DEPTH = 4
"""How many nodes above its operand an activation's last node may lie."""


@dataclass(frozen=True)
class Quant:
    """Asymmetric uint8 quantisation: real value = (code - zero_point) * scale, scale a float32 value."""

    scale: float
    zero_point: int

    @classmethod
    def of_range(cls, lo: float, hi: float) -> Quant:
        """The quantisation of real values lo..hi. :raises coral.numerics.NumericsError: not finite or lo > hi."""
        return cls(*numerics.scale_and_zero_point(lo, hi))

    def code(self, value: float) -> int:
        """The code of a real value, saturated to 0..255."""
        return int(numerics.quantise(value, self.scale, self.zero_point))


@dataclass(frozen=True)
class Source:
    """How a value comes out of layers, without the graph: ``key`` is a layer's name (or its result's quantisation) or,
    with ``parts``, "sum" or "mean". ``bounds`` are those of ReLU or ReLU6; ``steps`` tells of movements and maxima.
    """

    key: Any
    parts: tuple[Source, ...] = ()
    bounds: tuple[float, float] = _UNBOUNDED
    steps: frozenset[str] = frozenset()

    @property
    def bare(self) -> Source:
        """The same value before bounds and steps: what all its readers have in common."""
        return replace(self, bounds=_UNBOUNDED, steps=frozenset())

    def rekeyed(self, keys: Mapping[Any, Any]) -> Source:
        """With other keys of the leaves."""
        if not self.parts:
            return replace(self, key=keys[self.key])
        return replace(self, parts=tuple(part.rekeyed(keys) for part in self.parts))

    def walk(self) -> Iterator[Source]:
        """This one, then everything that it is made of."""
        yield self
        for part in self.parts:
            yield from part.walk()


@dataclass(frozen=True)
class Reading:
    """A graph read backwards: ``base`` is what ``leaf`` gave for the node that was found, or None for a sum (two parts)
    or a mean (one part, with the movements and paddings under the reduction). ``steps`` are outermost first.
    """

    node: UOp
    base: Any = None
    parts: tuple[Reading, ...] = ()
    moves: tuple[UOp, ...] = ()
    bounds: tuple[float, float] = _UNBOUNDED
    steps: tuple[UOp, ...] = field(default=())

    def source(self, key: Callable[[Any], Any]) -> Source:
        """The reading without its graph; ``key`` turns bases into keys."""
        parts = tuple(part.source(key) for part in self.parts)
        own = key(self.base) if not parts else "sum" if len(parts) == 2 else "mean"
        steps = frozenset("move" if step.op in _MOVEMENTS else "max" for step in self.steps)
        return Source(own, parts, self.bounds, steps)

    def walk(self) -> Iterator[Reading]:
        """This one, then everything that it is made of."""
        yield self
        for part in self.parts:
            yield from part.walk()


def read(node: UOp, leaf: Callable[[UOp], Any]) -> Reading | None:
    """What a float32 value was made from, or None if something else than the known steps lies on the way.

    :param leaf: gives a layer result's base for its node, None for every other node
    """
    steps: list[UOp] = []
    bounds = _UNBOUNDED
    while (base := leaf(node)) is None:
        if node.op in _MOVEMENTS or (node.op is Ops.REDUCE and node.arg[0] is Ops.MAX):
            steps.append(node)
            node = node.src[0]
        elif node.op is Ops.CONTIGUOUS:
            node = node.src[0]
        elif (inner := _under_padding(node)) is not None:
            steps.append(node)
            node = inner
        elif (activation := _activation(node)) is not None:
            node, (lo, hi) = activation
            bounds = (max(bounds[0], lo), min(bounds[1], hi))
        else:
            found = _mean(node, leaf) or _sum(node, leaf)
            return None if found is None else replace(found, bounds=bounds, steps=tuple(steps))
    return Reading(node, base, (), (), bounds, tuple(steps))


def _under_padding(node: UOp) -> UOp | None:
    """The value under a padding that no maximum takes: ``where(inside, padded value, -inf)``."""
    if node.op is not Ops.WHERE or node.src[2].op is not Ops.CONST or node.src[2].val != -math.inf:
        return None
    inside, value, _ = node.src
    if value.op is Ops.PAD:
        if inside.op is not Ops.PAD or inside.src[1:] != value.src[1:]:
            return None
        inside, value = inside.src[0], value.src[0]
    everywhere = inside.src[0] if inside.op is Ops.EXPAND else inside
    return value if everywhere.op is Ops.CONST and everywhere.val and value.dtype == dtypes.float32 else None


def _activation(node: UOp) -> tuple[UOp, tuple[float, float]] | None:
    """Operand and bounds, if the node is a ReLU or ReLU6 of another one."""
    candidates, layer = [], [node]
    for _ in range(_DEPTH):
        layer = [source for parent in layer for source in parent.src if source.dtype == dtypes.float32]
        candidates += layer
    for source in dict.fromkeys(candidates):
        # Equal graphs are the same object: a rebuilt ReLU that is this node proves what the node computes.
        t = Tensor(source)
        if any(r.uop is node for r in (t.relu(), t.maximum(0), t.clip(0))):
            return source, (0.0, math.inf)
        if any(r.uop is node for r in (t.relu6(), t.clip(0, 6), t.relu().minimum(6))):
            return source, (0.0, 6.0)
    return None


def _sum(node: UOp, leaf: Callable[[UOp], Any]) -> Reading | None:
    if node.op is not Ops.ADD or node.dtype != dtypes.float32:
        return None
    left, right = (read(source, leaf) for source in node.src)
    return None if left is None or right is None else Reading(node, parts=(left, right))


def _mean(node: UOp, leaf: Callable[[UOp], Any]) -> Reading | None:
    """The mean over windows or axes: a sum times the reciprocal of the number of its terms."""
    if node.op is not Ops.MUL or node.src[0].op is not Ops.REDUCE or node.src[1].op is not Ops.RECIPROCAL:
        return None
    total, count = node.src[0], node.src[1].src[0]
    if total.arg[0] is not Ops.ADD or count.op is not Ops.CONST or count.val != _terms(total):
        return None
    moves, inner = [], total.src[0]
    while inner.op in _MOVEMENTS or inner.op is Ops.PAD:
        moves.append(inner)
        inner = inner.src[0]
    reading = read(inner, leaf)
    return None if reading is None else Reading(node, parts=(reading,), moves=(total, *moves))


def _terms(total: UOp) -> int:
    return math.prod(int(size) for size in total.src[0].shape[: total.arg[1]])


def dequantised(node: UOp) -> tuple[UOp, Quant] | None:
    """Codes and quantisation, if the node is :func:`dequantise_expression` of uint8 codes."""
    found, path = node, []
    for op in (Ops.MAX, Ops.MUL, Ops.ADD):
        if found.op is not op or found.dtype != dtypes.float32:
            return None
        path.append(found.src[1])
        found = found.src[0]
    _, factor, shift = path
    if factor.op is not Ops.CONST or shift.op is not Ops.MUL or shift.src[0].op is not Ops.CONST:
        return None
    if found.op is not Ops.CAST or found.src[0].dtype != dtypes.uint8:
        return None
    codes, scale, zero_point = found.src[0], float(factor.val), float(shift.src[0].val)
    if not zero_point.is_integer() or not 0 <= zero_point <= 255 or not 0 < scale < math.inf:
        return None
    quant = Quant(scale, int(zero_point))
    proof = dequantise_expression(Tensor(codes), quant.scale, quant.zero_point)
    return (codes, quant) if proof.uop is node else None


def codes_behind(x: Tensor, scale: float, zero_point: int, sums: Mapping[Source, Quant] | None = None) -> Tensor | None:
    """The uint8 codes of x, if it was made from results of layers and comes out in this quantisation.

    Without sums and means on the way, quantising x would give exactly these codes: the round trip through float32 is
    the identity on all 256 codes.

    :param sums: quantisation of every sum that may be met, keyed by :attr:`Source.bare` with quantisations as keys
    :return: uint8 tensor of x's shape, or None if x was made in another way
    """
    reading = read(x.uop, dequantised)
    made = None if reading is None else _codes(reading, sums or {})
    return None if made is None or made[1] != Quant(float(numerics.f32(scale)), zero_point) else made[0]


def pools_on_codes(x: Tensor) -> Tensor:
    """The same values, with maxima (max pools) over dequantised codes taken from the codes."""
    nodes = x.uop.toposort(gate=lambda node: dequantised(node) is None)
    swaps: dict[UOp, UOp] = {}
    for node in nodes:
        if node.op is Ops.REDUCE and node.arg[0] is Ops.MAX and node.dtype == dtypes.float32:
            reading = read(node, dequantised)
            if reading is not None and reading.base is not None and (made := _codes(reading, {})) is not None:
                swaps[node] = dequantise_expression(made[0], made[1].scale, made[1].zero_point).uop
    return Tensor(x.uop.substitute(swaps)) if swaps else x


def _codes(reading: Reading, sums: Mapping[Source, Quant]) -> tuple[Tensor, Quant] | None:
    if reading.base is not None:
        codes, quant = in_buffer(Tensor(reading.base[0])), reading.base[1]
        lo, hi = _clamp(reading, quant)
        if (lo, hi) != (0, 255):
            codes = note("clip", qclip_expression(codes, lo, hi), (codes,), quant, (lo, hi))
    else:
        parts = [_codes(part, sums) for part in reading.parts]
        made = [part for part in parts if part is not None]
        if len(made) < len(parts):
            return None
        total = reading.source(lambda base: base[1]).bare
        quant = made[0][1] if len(made) == 1 else sums.get(total)
        if quant is None:
            return None
        codes = (_mean_codes if len(made) == 1 else _sum_codes)(reading, made, quant)
    under = codes
    for step in reversed(reading.steps):
        codes = _follow(step, codes)
        if step.op is Ops.REDUCE:
            under = note("max", codes, (under,), quant)
    return codes, quant


def _clamp(reading: Reading, quant: Quant) -> tuple[int, int]:
    lo, hi = reading.bounds
    return 0 if lo == -math.inf else quant.code(lo), 255 if hi == math.inf else quant.code(hi)


def _sum_codes(reading: Reading, made: list[tuple[Tensor, Quant]], quant: Quant) -> Tensor:
    (a, q_a), (b, q_b) = made
    weights = numerics.add_weights(q_a.scale, q_b.scale)
    mult = float(numerics.add_multiplier(q_a.scale, weights[0], quant.scale))
    zero_points = q_a.zero_point, q_b.zero_point
    limits = _clamp(reading, quant)
    codes = qadd_expression(a, b, *zero_points, weights, mult, *limits, quant.zero_point)
    return note("sum", codes, (a, b), quant, limits)


def _mean_codes(reading: Reading, made: list[tuple[Tensor, Quant]], quant: Quant) -> Tensor:
    total, *moves = reading.moves
    acc = (in_buffer(made[0][0]).cast(dtypes.int32) - quant.zero_point).uop
    for move in reversed((total, *moves)):
        acc = UOp(move.op, dtypes.int32, (acc, *move.src[1:]), move.arg)
    mult = float(numerics.average_multiplier(quant.scale, _terms(total), quant.scale, newer=True))
    limits = _clamp(reading, quant)
    codes = output_stage(Tensor(acc), mult, *limits, quant.zero_point)
    return note("mean", codes, (made[0][0],), quant, limits)


def _follow(step: UOp, codes: Tensor) -> Tensor:
    """A movement, a maximum or the padding under one, on codes instead of real values."""
    if step.op is not Ops.WHERE:
        moved = Tensor(UOp(step.op, dtypes.uint8, (codes.uop, *step.src[1:]), step.arg))
        return moved.contiguous() if step.op is Ops.REDUCE else moved
    padded = step.src[1]
    if padded.op is not Ops.PAD:
        return codes
    return Tensor(UOp(Ops.PAD, dtypes.uint8, (codes.uop, *padded.src[1:]), padded.arg))
