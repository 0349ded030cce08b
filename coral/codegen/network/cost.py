"""Predicted cycles of a plan, to choose between plans. Source: docs/network.md, section Cost."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from coral.codegen.errors import ShapeError
from coral.codegen.machine import GROUP, WORD_BYTES, ceil_div
from coral.codegen.network.bands import enlarged
from coral.codegen.network.graph import (
    Add,
    Concatenate,
    Conv,
    Dense,
    Depthwise,
    Interleave,
    L2Normalise,
    MaxPool,
    Network,
    Resize,
    Slice,
    Softmax,
    Stage,
)
from coral.codegen.network.layout import Form, TooLarge, rewritten
from coral.codegen.network.places import gathered_bytes, gathered_tiles, shared
from coral.codegen.network.plan import Plan
from coral.codegen.network.steps import depthwise_cycles, step_cost
from coral.codegen.network.tiling import SIDES, Grid

STAGE_CYCLES = 400
"""Fences and about ten instructions of a stage, at some 40 cycles each (docs/network.md)."""


def stage_cycles(plan: Plan, stage: Stage) -> float:
    """Predicted cycles of a stage on its busiest tile."""
    if isinstance(stage, Concatenate | Interleave | Slice):
        return 0.0
    name, words = stage.output, plan.channels(stage.inputs[0]) // WORD_BYTES
    moved = 0
    if shared(plan, stage):
        moved = gathered_bytes(plan, stage) * len(gathered_tiles(plan, stage)) // WORD_BYTES
        words = ceil_div(plan.tensors[stage.inputs[0]].c, WORD_BYTES)
    if name in plan.spread:
        steps = plan.tensors[stage.inputs[0]].size // WORD_BYTES if isinstance(stage, Dense) else 1
        return STAGE_CYCLES + steps * plan.spread[name] * step_cost(GROUP)
    rows, columns = plan.splits[name]
    positions = rows.extent * columns.extent * plan.images
    taps = stage.window.kernel[0] * stage.window.kernel[1]
    if isinstance(stage, Depthwise):
        cycles = depthwise_cycles(
            plan.tensors[stage.inputs[0]].c, positions, plan.shares(name), plan.blocking[name], stage
        )
    elif isinstance(stage, Conv):
        pack = plan.packing.get(name, 1)
        row_words = plan.packed_words(stage, pack) if name in plan.packing else words * stage.window.kernel[1]
        full, rest = divmod(pack * plan.channels(name), GROUP)
        width = full * step_cost(GROUP) + step_cost(rest)
        cycles = positions / pack * row_words * stage.window.kernel[0] * width + moved
    elif isinstance(stage, MaxPool):
        groups = ceil_div(plan.tensors[name].c, GROUP)
        cycles = positions * taps * groups * step_cost(min(GROUP, plan.channels(name)))
    elif name in plan.summed:
        rows, columns = plan.splits[stage.inputs[0]]
        senders = len(plan.active(stage.inputs[0]))
        own, sums = rows.extent * columns.extent * step_cost(WORD_BYTES), senders / 2 * step_cost(GROUP) / GROUP * 4
        cycles = words * (own + sums) + 2 * STAGE_CYCLES
    elif isinstance(stage, Softmax | L2Normalise):
        cycles = 8 * positions * words * step_cost(WORD_BYTES) + 4 * STAGE_CYCLES
    else:
        cycles = positions * words * taps * step_cost(WORD_BYTES) * (4 if isinstance(stage, Add | Resize) else 1)
    return STAGE_CYCLES + cycles


def fitting(network: Network, grid: Grid, batch: int, *, own_input: bool = False) -> Plan:
    """The plan with the most images per tile, up to what a batch needs, that fits narrow memory; else ShapeError.

    ``own_input``: only plans of that kind (docs/network.md, Input); otherwise they are the second choice. On all tiles
    the last choice are plans with bands, one image at a time.
    """
    images, problem = ceil_div(batch, grid.slots), None
    kinds = sorted({own_input, own_input or grid.columns > 1})
    while images:
        for own in kinds:
            try:
                return Plan(network, Form(grid, images, own))
            except ShapeError as error:
                problem = problem or error
        images //= 2
    for own in kinds if grid.slots == 1 else ():
        try:
            return in_bands(network, Form(grid, 1, own))
        except ShapeError as error:
            problem = error
    assert problem is not None
    raise problem


def in_bands(network: Network, form: Form) -> Plan:
    """A plan of that form whose groups of stages and numbers of bands are just large enough; or ShapeError.

    Whatever is too large for narrow memory becomes an inner tensor of a group, or its group gets more bands.
    """
    whole = rewritten(network, form)
    while True:
        try:
            return Plan(network, form)
        except TooLarge as error:
            larger = None
            for name in error.tensors:
                with suppress(ShapeError):
                    larger = enlarged(whole, form.grid, form.groups, name.partition("@")[0], alone=error.alone)
                    break
            if larger is None:
                raise
            form = replace(form, groups=larger)


def candidates(network: Network, batch: int) -> list[Plan]:
    """Plans that fit narrow memory, the cheapest for ``batch`` images first. ShapeError if none does."""
    found: list[tuple[float, int, Plan]] = []
    problem: ShapeError | None = None
    for rows in SIDES:
        for columns in SIDES:
            grid = Grid(rows, columns)
            try:
                plan = fitting(network, grid, batch)
            except ShapeError as error:
                problem = error
                continue
            passes = ceil_div(batch, grid.slots * plan.images)
            cycles = passes * sum(stage_cycles(plan, stage) for stage in plan.stages)
            found.append((cycles, len(found), plan))
    if not found:
        assert problem is not None
        raise problem
    return [plan for _, _, plan in sorted(found, key=lambda item: item[:2])]
