"""Groups of stages that are computed band by band, so that what lies between them never exists as a whole.

Source: docs/network.md, section Bands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coral.codegen.errors import ShapeError
from coral.codegen.machine import WORD_BYTES, ceil_div
from coral.codegen.network.graph import (
    Add,
    AveragePool,
    Conv,
    Dense,
    Depthwise,
    MaxPool,
    Multiply,
    Network,
    Requantise,
    Stack,
    Stage,
)
from coral.codegen.network.tiling import Grid, Split

IN_BANDS = Conv | MaxPool | AveragePool | Add | Multiply | Requantise
MOST_BANDS = 64
Splits = dict[str, tuple[Split, Split]]


@dataclass(frozen=True)
class Group:
    """The stages from the one that writes ``first`` to the one that writes ``last``, in ``count`` bands per tile."""

    first: str
    last: str
    count: int


def banded(network: Network, grid: Grid, groups: tuple[Group, ...]) -> tuple[Network, Splits]:
    """The network with a copy of a group's stages for every band, and where the bands of all tensors lie.

    Tiles compute what they need of inner tensors themselves, also what neighbours compute. ShapeError: a group that
    cannot be computed so.
    """
    tensors, stages, splits = dict(network.tensors), list(network.stages), {}
    for group in groups:
        first, last = (next(k for k, s in enumerate(stages) if s.output == n) for n in (group.first, group.last))
        members = stages[first : last + 1]
        _check(network, members)
        y = tensors[group.last]
        rows, columns = Split.of(y.y, grid.rows), Split.of(y.x, grid.columns)
        size = ceil_div(rows.extent, group.count)
        results = [n for n in (s.output for s in members) if n == y.name or _is_read_outside(network, members, n)]
        copies: list[Stage] = []
        count = ceil_div(rows.extent, size)
        for k in range(count):
            band = Split(y.y, grid.rows, min(size, rows.extent - k * size), rows.extent, k * size)
            needs = _needs(network, members, dict.fromkeys(results, (band, columns)))
            splits |= {f"{n}@{k}": need for n, need in needs.items()}
            tensors |= {f"{n}@{k}": replace(tensors[n], name=f"{n}@{k}") for n in needs}
            for s in members:
                inputs = tuple(f"{n}@{k}" if n in needs else n for n in s.inputs)
                copies.append(replace(s, inputs=inputs, output=f"{s.output}@{k}"))
        stacks = [Stack(tuple(f"{n}@{k}" for k in range(count)), n, (0.0, 0.0)) for n in results]
        stages[first : last + 1] = [*copies, *stacks]
        for n in {s.output for s in members}.difference(results):
            del tensors[n]
    return replace(network, tensors=tensors, stages=tuple(stages)), splits


def enlarged(network: Network, grid: Grid, groups: tuple[Group, ...], name: str, *, alone: bool) -> tuple[Group, ...]:
    """The groups such that tensor ``name`` takes less room: it becomes an inner tensor of one, or there are more bands.

    ``alone``: the stage that writes it must do less at a time, no matter what becomes of the tensor. ShapeError: there
    is no such group.
    """
    index = {s.output: k for k, s in enumerate(network.stages)}
    spans = {g: (index[g.first], index[g.last]) for g in groups}
    readers = [index[s.output] for s in network.readers(name)]
    inner = next((g for g, (a, b) in spans.items() if name in index and a <= index[name] <= b), None)
    if inner is not None and (alone or _is_inner(network, spans[inner], name)):
        group = replace(inner, count=_more(network.tensors[inner.last].y, grid, inner.count))
        return _checked(network, grid, (*(g for g in groups if g is not inner), group))
    if name not in index or (not alone and (name in network.outputs or not readers)):
        raise ShapeError(f"{name!r} comes from the host or goes to it")
    first, last = index[name], index[name] if alone else max(readers)
    stages, count = network.stages, 2
    if isinstance(stages[last], Depthwise):
        after = [s for s in network.readers(stages[last].output) if type(s) is Conv and s.window.pointwise]
        last = max([last, *(index[s.output] for s in after)]) if len(after) == 1 else last
    left = []
    for g, (a, b) in spans.items():
        if a <= last and first <= b:
            first, last, count = min(first, a), max(last, b), max(count, g.count)
        else:
            left.append(g)
    return _checked(network, grid, (*left, Group(stages[first].output, stages[last].output, count)))


def _is_inner(network: Network, span: tuple[int, int], name: str) -> bool:
    members = list(network.stages[span[0] : span[1] + 1])
    return members[-1].output != name and not _is_read_outside(network, members, name)


def _more(rows: int, grid: Grid, count: int) -> int:
    """The next number of bands that makes bands smaller."""
    extent = ceil_div(rows, grid.rows)
    size = ceil_div(extent, count)
    more = ceil_div(extent, min(size - 1, size * 9 // 10 + 1)) if size > 1 else MOST_BANDS + 1
    if more > MOST_BANDS:
        raise ShapeError(f"{count} bands of {rows} rows are not enough; more than {MOST_BANDS} are not tried")
    return more


def _checked(network: Network, grid: Grid, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    banded(network, grid, groups)
    return groups


def _check(network: Network, members: list[Stage]) -> None:
    for s in members:
        in_bytes = any(n in network.inputs and network.tensors[n].c % WORD_BYTES for n in s.inputs)
        if isinstance(s, Dense) or not isinstance(s, IN_BANDS) or in_bytes or 0 in s.window.stride:
            raise ShapeError(f"network {network.name!r}: {type(s).__name__} {s.output!r} cannot be computed in bands")


def _is_read_outside(network: Network, members: list[Stage], name: str) -> bool:
    return name in network.outputs or any(s not in members for s in network.readers(name))


def _needs(network: Network, members: list[Stage], results: Splits) -> Splits:
    """What is computed of every tensor that a band's stages write."""
    needs = dict(results)
    for s in reversed(members):
        for name in s.inputs:
            if not any(m.output == name for m in members):
                continue
            t = network.tensors[name]
            mine = tuple(
                _before(needs[s.output][axis], (t.y, t.x)[axis], s.window.extent[axis], s.window.stride[axis], pad)
                for axis, pad in enumerate(s.window.pad)
            )
            needs[name] = (_both(name, needs.get(name, mine), mine, 0), _both(name, needs.get(name, mine), mine, 1))
            if name in results and needs[name] != results[name]:
                raise ShapeError(f"network {network.name!r}: {name!r} is needed outside of its band")
    return needs


def _before(outputs: Split, size: int, kernel: int, stride: int, pad: int) -> Split:
    """What windows read for some outputs."""
    extent = (outputs.extent - 1) * stride + kernel
    return Split(size, outputs.parts, extent, outputs.step * stride, outputs.offset * stride - pad)


def _both(name: str, a: tuple[Split, ...], b: tuple[Split, ...], axis: int) -> Split:
    one, other = a[axis], b[axis]
    if one.step != other.step:
        raise ShapeError(f"{name!r} is read in different steps and cannot be computed in bands")
    start, end = min(one.offset, other.offset), max(one.offset + one.extent, other.offset + other.extent)
    return replace(one, extent=end - start, offset=start, pitch=one.step)


__all__ = ["Group", "banded", "enlarged"]
