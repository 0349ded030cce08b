"""Geometry of convolutions and pools from a kernel's index arithmetic, evaluated at points of its loops.

The answers are candidates: whoever asks rebuilds the layer and compares. Source: docs/backend.md, "Selection".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tinygrad.uop import Ops
from tinygrad.uop.ops import UOp

from coral.backend.layers import AveragePool, Conv, MaxPool

CANDIDATES = 4
"""Geometries that are tried per kernel."""
_POINTS = 512
_ALU: dict[Ops, Any] = {
    Ops.ADD: np.add,
    Ops.MUL: np.multiply,
    Ops.FLOORDIV: np.floor_divide,
    Ops.FLOORMOD: np.mod,
    Ops.CMPLT: np.less,
    Ops.CMPNE: np.not_equal,
    Ops.CMPEQ: np.equal,
    Ops.AND: np.logical_and,
    Ops.OR: np.logical_or,
    Ops.XOR: np.logical_xor,
    Ops.MAX: np.maximum,
    Ops.WHERE: np.where,
}


@dataclass(frozen=True)
class _Side:
    """Windows along one direction: ``step`` and ``tap`` are the index's increments, None where no two reads show one.

    Then every window has at most one position that is no padding; ``seen`` is the distance of one from the first tap.
    """

    outputs: int
    kernel: int
    step: int | None
    tap: int | None
    seen: int

    @property
    def blind(self) -> bool:
        """Whether the index does not tell where the windows begin."""
        return self.kernel > 1 and self.tap is None


@dataclass(frozen=True)
class _Line:
    """A solution along one direction: size of the input, stride, dilation, padding before and after."""

    size: int
    stride: int
    dilation: int
    before: int
    after: int


def convolutions(axes: Sequence[UOp], total: UOp, x: UOp, w: UOp, numbers: dict[str, Any]) -> Iterator[Conv]:
    """Convolutions that the sum of products ``total`` over reads ``x`` and ``w`` may be; ``numbers`` are its others."""
    reduced = list(total.src[1:]) if total.op is Ops.REDUCE else []
    w_axes, x_axes = set(w.toposort()), set(x.toposort())
    found: list[Conv] = []
    for roles in _assignments(axes, ("n", "o", "y", "x"), reduced, ("c", "ky", "kx")):
        if any((axis in w_axes) != (role in ("o", "c", "ky", "kx")) for role, axis in roles.items()):
            continue
        o, n, c = (_size(roles.get(role)) for role in ("o", "n", "c"))
        many = [g for g in range(2, o + 1) if o % g == 0] if roles.get("o") in x_axes else [1]
        for groups in many:
            pitches = {"n": groups * c, "c": 1, **({"o": c} if groups == o else {})}
            for rows, columns in _geometries(total, x, roles, n * groups * c, pitches):
                found.append(_convolution(n, groups * c, o, groups, roles, rows, columns, numbers))
    # One loop over positions is a row rather than a column: images of one row need less of the tiles' memory.
    yield from sorted(found, key=lambda layer: (sum(layer.padding), layer.shape[2]))[:CANDIDATES]


def _convolution(
    n: int, c: int, o: int, groups: int, roles: dict[str, UOp], rows: _Line, columns: _Line, numbers: dict[str, Any]
) -> Conv:
    return Conv(
        shape=(n, c, rows.size, columns.size),
        outputs=o,
        kernel=(_size(roles.get("ky")), _size(roles.get("kx"))),
        stride=(rows.stride, columns.stride),
        padding=(columns.before, columns.after, rows.before, rows.after),
        dilation=(rows.dilation, columns.dilation),
        groups=groups,
        **numbers,
    )


def pools(
    axes: Sequence[UOp], total: UOp, x: UOp, numbers: dict[str, Any], *, average: bool
) -> Iterator[MaxPool | AveragePool]:
    """Pools that the reduction ``total`` over the read ``x`` may be."""
    found: list[MaxPool | AveragePool] = []
    for roles in _assignments(axes, ("n", "c", "y", "x"), list(total.src[1:]), ("ky", "kx")):
        n, c = (_size(roles.get(role)) for role in ("n", "c"))
        for rows, columns in _geometries(total, x, roles, n * c, {"n": c, "c": 1}):
            if (rows.dilation, columns.dilation) != (1, 1):
                continue
            layer = (AveragePool if average else MaxPool)(
                shape=(n, c, rows.size, columns.size),
                kernel=(_size(roles.get("ky")), _size(roles.get("kx"))),
                stride=(rows.stride, columns.stride),
                padding=(columns.before, columns.after, rows.before, rows.after),
                **numbers,
            )
            found.append(layer)
    # One loop over planes is channels of one image rather than images of one channel.
    yield from sorted(found, key=lambda layer: (sum(layer.padding), layer.shape[0], layer.shape[2]))[:CANDIDATES]


def _size(axis: UOp | None) -> int:
    return 1 if axis is None else int(axis.src[0].val)


def _assignments(
    axes: Sequence[UOp], outer: tuple[str, ...], reduced: Sequence[UOp], inner: tuple[str, ...]
) -> Iterator[dict[str, UOp]]:
    """All ways to give the loops roles in their order; roles without a loop have size 1."""
    for outside in itertools.combinations(outer, len(axes)):
        for inside in itertools.combinations(inner, len(reduced)):
            yield {**dict(zip(outside, axes, strict=True)), **dict(zip(inside, reduced, strict=True))}


def _geometries(
    total: UOp, load: UOp, roles: dict[str, UOp], planes: int, pitches: dict[str, int]
) -> Iterator[tuple[_Line, _Line]]:
    """Rows and columns of windows that ``load``, under the reduction ``total``, may make over so many ``planes``.

    :param pitches: how many planes further a loop must go, by its role
    """
    elements = load.src[0].max_numel()
    found = _increments(total, load, roles)
    if found is None or elements % planes:
        return
    steps, origin, point = found
    plane = elements // planes
    if any(steps.get(role, pitch * plane) != pitch * plane for role, pitch in pitches.items()):
        return
    if any(step <= 0 for role, step in steps.items() if role in ("y", "x", "ky", "kx")):
        return
    vertical, horizontal = (
        _Side(_size(roles.get(o)), _size(roles.get(k)), steps.get(o), steps.get(k), point.get(o, 0) + point.get(k, 0))
        for o, k in (("y", "ky"), ("x", "kx"))
    )
    for width in _divisors(plane):
        scaled = _scaled(vertical, width)
        if scaled is None:
            continue
        for top in [scaled.seen] if scaled.blind else range(_extent(scaled)):
            across = -origin - (0 if scaled.blind else top * width)
            left = horizontal.seen if horizontal.blind and not across else across
            if 0 <= left < _extent(horizontal):
                rows, columns = _line(scaled, plane // width, top), _line(horizontal, width, left)
                if rows is not None and columns is not None:
                    yield rows, columns


def _increments(total: UOp, load: UOp, roles: dict[str, UOp]) -> tuple[dict[str, int], int, dict[str, int]] | None:
    """How the index of a read grows with every loop, where the read is no padding; its value for all loops at 0 if it
    went on like that; and a point that is no padding. None if there is none, or the index cannot be evaluated.
    """
    index, masks = load.src[1], []
    for node in total.toposort():
        if node.op is Ops.WHERE and load in node.toposort():
            masks.append((node.src[0], load in node.src[1].toposort()))
    if index.op is Ops.WHERE:
        inside = not index.src[1].is_invalid
        masks, index = [*masks, (index.src[0], inside)], index.src[1 if inside else 2]
    rng = np.random.default_rng(0)
    points = {axis: rng.integers(0, _size(axis), _POINTS) for axis in roles.values()}
    steps: dict[str, int] = {}
    try:
        value, valid = _evaluate(index, points), _valid(masks, points)
        for role, axis in roles.items():
            further = {**points, axis: points[axis] + 1}
            both = valid & _valid(masks, further) & (further[axis] < _size(axis))
            if both.any():
                steps[role] = int((_evaluate(index, further) - value)[both].max())
    except KeyError:
        return None
    if not valid.any():
        return None
    at = int(np.flatnonzero(valid)[0])
    point = {role: int(points[axis][at]) for role, axis in roles.items() if role in ("y", "x", "ky", "kx")}
    of_first_plane = {axis: points[axis] if role in point else 0 * points[axis] for role, axis in roles.items()}
    origin = _evaluate(index, of_first_plane)[at] - sum(steps.get(role, 0) * where for role, where in point.items())
    return steps, int(origin), point


def _valid(masks: list[tuple[UOp, bool]], points: dict[UOp, np.ndarray]) -> np.ndarray:
    """Where every condition has the value that lets the read through."""
    through = (_evaluate(mask, points) == wanted for mask, wanted in masks)
    return np.logical_and.reduce([np.full(_POINTS, True), *through])


def _evaluate(node: UOp, points: dict[UOp, np.ndarray]) -> np.ndarray:
    """The node's value at points of the loops. :raises KeyError: an operation that index arithmetic does not have."""
    values: dict[UOp, Any] = {}
    for inner in node.toposort():
        if inner.op is Ops.CONST:
            values[inner] = np.full(_POINTS, 0 if inner.is_invalid else inner.val)
        elif inner.op is Ops.RANGE:
            values[inner] = points[inner]
        else:
            values[inner] = _ALU[inner.op](*(values[source] for source in inner.src))
    return values[node]


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)}, reverse=True)


def _scaled(side: _Side, pitch: int) -> _Side | None:
    """The side in rows instead of elements, if its increments are whole rows."""
    if any(step is not None and step % pitch for step in (side.step, side.tap)):
        return None
    step, tap = (None if value is None else value // pitch for value in (side.step, side.tap))
    return replace(side, step=step, tap=tap)


def _extent(side: _Side) -> int:
    return (side.kernel - 1) * (side.tap or 1) + 1


def _line(side: _Side, size: int, before: int) -> _Line | None:
    """The one solution along a direction: the least padding behind that gives the outputs."""
    extent = _extent(side)
    alone = 1 if side.outputs > 1 else max(1, size + before - extent + 1)
    stride = side.step or alone
    after = max(0, (side.outputs - 1) * stride + extent - before - size)
    outputs = (size + before + after - extent) // stride + 1
    return _Line(size, stride, side.tap or 1, before, after) if after < extent and outputs == side.outputs else None
