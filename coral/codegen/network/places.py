"""Narrow memory of stages besides their operands: what is collected, spread, or kept for a moment.

Source: docs/network.md, section Memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coral.codegen.machine import GROUP, WORD_BYTES, ceil_div
from coral.codegen.network.graph import AveragePool, Conv, Dense, L2Normalise, Multiply, Softmax, Stage
from coral.codegen.network.steps import chunk_shape

if TYPE_CHECKING:
    from coral.codegen.network.layout import Layout
    from coral.codegen.network.plan import Plan

MAX_SUMMED = 257
"""Codes whose sum fits 16 bits."""


def temporaries(plan: Plan) -> dict[str, tuple[int, int]]:
    """Name of a place -> (number of the stage that uses it, bytes for all images)."""
    found: dict[str, tuple[int, int]] = {}
    for index, stage in enumerate(plan.stages):
        if collects(plan, stage):
            size = gathered_bytes(plan, stage) * len(gathered_tiles(plan, stage))
            found[gathered(stage)] = index, size + gathered_bytes(plan, stage)
        if stage.output in plan.summed:
            found[scratchpad(stage)] = index, gathered_bytes(plan, stage)
        if isinstance(stage, Softmax | L2Normalise):
            rows, columns = plan.splits[stage.output]
            words = plan.channels(stage.output) // WORD_BYTES
            wide, high = chunk_shape(stage, rows.extent, columns.extent, words)
            found[scratchpad(stage)] = index, 2 * WORD_BYTES * wide * high * (2 * words + 1)
        if isinstance(stage, Multiply):
            rows, columns = plan.splits[stage.output]
            words = rows.extent * columns.extent * plan.channels(stage.output) // WORD_BYTES * plan.images
            found[factors(stage)] = index, WORD_BYTES * WORD_BYTES * words
    return found


def collects(plan: Plan, stage: Stage) -> bool:
    """Whether a stage needs all tiles' parts of its input, or sums of them, on every tile that works."""
    if isinstance(stage, Dense):
        return stage.output in plan.spread and stage.inputs[0] not in plan.network.inputs
    if stage.output in plan.summed or shared(plan, stage):
        return True
    return isinstance(stage, Softmax | L2Normalise) and stage.inputs[0] in plan.spread


def shared(plan: Layout, stage: Stage) -> bool:
    """Whether a stage needs all channels of its positions, which several tiles hold."""
    return type(stage) is Conv and plan.shares(stage.output) > 1


def summed(plan: Layout) -> set[str]:
    """Averages over whole maps that are cut over all tiles: each sums its part, one adds up the sums."""
    found = set()
    for stage in plan.stages:
        if isinstance(stage, AveragePool) and plan.grid.slots == 1:
            x, y, w = plan.tensors[stage.inputs[0]], plan.tensors[stage.output], stage.window
            whole = (w.kernel, w.pad, w.dilation, y.y, y.x) == ((x.y, x.x), (0, 0), (1, 1), 1, 1)
            inside = plan.roots[x.name][0] not in plan.network.inputs and not {x.name, y.name} & {
                *plan.spread,
                *plan.bands,
            }
            several = len(plan.active(x.name)) > 1 or plan.shares(x.name) > 1
            if whole and inside and several and plan.splits[x.name][1].extent <= MAX_SUMMED:
                found.add(y.name)
    return found


def sums_shape(plan: Plan, stage: Stage) -> tuple[int, int]:
    """(rows of a tile's part that go into one sum, sums per tile)."""
    rows, columns = plan.splits[stage.inputs[0]]
    high = MAX_SUMMED // columns.extent
    return high, ceil_div(rows.extent, high)


def gathered(stage: Stage) -> str:
    """Name of the place where a stage finds its whole input, or all sums of it."""
    return f"{stage.output}:gathered"


def scratchpad(stage: Stage) -> str:
    """Name of the place for what a stage makes on the way."""
    return f"{stage.output}:scratch"


def factors(stage: Stage) -> str:
    """Name of the place where the second factor of a product is spread."""
    return f"{stage.output}:factors"


def gathered_bytes(plan: Plan, stage: Stage) -> int:
    """Bytes that every tile sends when a stage's input, or sums of it, are collected."""
    (name,) = stage.inputs
    if name in plan.spread:
        return GROUP * plan.spread[name]
    if stage.output in plan.summed:
        return 2 * plan.channels(name) * sums_shape(plan, stage)[1]
    rows, columns = plan.splits[name]
    return rows.extent * columns.extent * plan.channels(name)


def gathered_tiles(plan: Plan, stage: Stage) -> list[int]:
    """Tiles that send, in the order of their pieces; those of the first block where every block collects its own."""
    (name,) = stage.inputs
    if plan.shares(name) > 1:
        grid, parts = plan.grid_of(name), plan.active(name) if stage.output in plan.summed else [(0, 0)]
        return [grid.tile(slot, *part) for slot in range(grid.slots) for part in parts]
    if name in plan.spread:
        return list(range(ceil_div(plan.tensors[name].c, GROUP * plan.spread[name])))
    return [plan.grid.tile(0, *part) for part in plan.active(name)]
