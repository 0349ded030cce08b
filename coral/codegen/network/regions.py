"""Late layers on small maps: channels divided among tiles instead of positions. Source: docs/network.md, Regions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from coral.codegen.errors import ShapeError
from coral.codegen.machine import WORD_BYTES, ceil_div
from coral.codegen.network.cost import stage_cycles
from coral.codegen.network.graph import Add, Conv, Depthwise, Requantise, Stage
from coral.codegen.network.places import sums_shape
from coral.codegen.network.plan import Plan
from coral.codegen.network.tiling import Grid, Region, Split

GRIDS = (Grid(2, 2), Grid(4, 2), Grid(2, 4))


def with_region(plan: Plan) -> Plan | None:
    """The cheapest plan for one image on all tiles in which the channels of some layers are divided; None if none is
    cheaper than without.
    """
    best, least = None, predicted(plan)
    for region in regions(plan):
        with suppress(ShapeError):
            found = Plan(plan.source, replace(plan.form, region=region))
            if (cycles := predicted(found)) < least:
                best, least = found, cycles
    return best


def predicted(plan: Plan) -> float:
    """Predicted cycles of all stages."""
    return sum(stage_cycles(plan, stage) for stage in plan.stages)


def regions(plan: Plan) -> Iterator[Region]:
    """What may be tried: from a map of some size on that does not fill all tiles evenly, up to an average over it."""
    if plan.grid != Grid() or plan.images > 1 or plan.form.groups:
        return
    maps = {(plan.tensors[s.output].y, plan.tensors[s.output].x) for s in plan.stages if s.output not in plan.spread}
    for largest in sorted((y, x) for y, x in maps if (y % plan.grid.rows or x % plan.grid.columns) and y * x > 1):
        for grid in GRIDS:
            names = _divided(plan, grid, largest)
            if names:
                yield Region(grid, frozenset(names))


def _divided(plan: Plan, grid: Grid, largest: tuple[int, int]) -> set[str]:
    """Results of the stages that can be computed so, on maps up to ``largest``."""
    names = {s.output for s in plan.stages if _possible(plan, s, grid, largest)}
    while True:
        wrong = {
            s.output
            for s in plan.stages
            if s.output in names and not (_reads(plan, s, names, grid) and _is_read(plan, s.output, names, grid))
        }
        if not wrong:
            return names
        names -= wrong


def _possible(plan: Plan, stage: Stage, grid: Grid, largest: tuple[int, int]) -> bool:
    y, x = plan.tensors[stage.output], plan.tensors[stage.inputs[0]]
    if y.c % (WORD_BYTES * grid.slots) or y.y > largest[0] or y.x > largest[1] or y.y * y.x == 1:
        return False
    if y.name in plan.network.outputs or y.name in plan.spread or y.name in plan.lattices:
        return False
    if (
        any(root == y.name for name, (root, _) in plan.roots.items() if name != y.name)
        or plan.roots[y.name][0] != y.name
    ):
        return False
    match stage:
        case Depthwise():
            return x.c == y.c and stage.window.dilation == (1, 1)
        case Conv():
            return type(stage) is Conv and stage.window.pointwise and x.c % WORD_BYTES == 0
        case Add() | Requantise():
            return (y.y, y.x) == (x.y, x.x) and stage.window.pointwise
    return False


def _reads(plan: Plan, stage: Stage, names: set[str], grid: Grid) -> bool:
    """Whether a stage finds its operands: among the others, or, for convolutions, a whole tensor cut in positions,
    phantoms included.
    """
    if set(stage.inputs) <= names:
        return True
    (name, *others) = stage.inputs
    for cut, parts in zip(plan.splits[name], (grid.rows, grid.columns), strict=True):
        if Split.of(cut.size, parts).extent * parts > cut.extent * ceil_div(cut.size, cut.extent):
            return False
    whole = plan.roots[name] == (name, 0) and name not in plan.network.inputs and name not in plan.spread
    alone = whole and name not in plan.lattices and not any(n != name and r == name for n, (r, _) in plan.roots.items())
    return type(stage) is Conv and alone and not others


def _is_read(plan: Plan, name: str, names: set[str], grid: Grid) -> bool:
    """Whether only the others, and averages over the whole map, read a result."""
    for reader in plan.network.readers(name):
        if reader.output in plan.summed:
            if sums_shape(plan, reader)[1] * grid.rows * grid.columns % 2:
                return False
        elif reader.output not in names:
            return False
    return True
