"""Wide rows that stages use besides weight FIFOs, below the fixed ones. Source: docs/network.md, Wide memory."""

from __future__ import annotations

from coral.codegen.machine import GROUP, ROW_BYTES, WIDE_ROWS, WORD_BYTES, ceil_div
from coral.codegen.network.graph import Dense, MaxPool, Multiply
from coral.codegen.network.plan import Plan, gathered_bytes, gathered_tiles
from coral.codegen.network.steps import MAX_BLOCK

FIXED_ROW = WIDE_ROWS - 4
"""Two rows for the host's input, then two for results."""


def gather_rows(plan: Plan) -> list[int]:
    """Wide rows that collecting takes, for every dense layer over all tiles."""
    found = []
    for stage in plan.stages:
        if isinstance(stage, Dense) and stage.output in plan.spread and stage.inputs[0] not in plan.network.inputs:
            packets = ceil_div(gathered_bytes(plan, stage.inputs[0]), ROW_BYTES)
            found.append(packets * (1 + len(gathered_tiles(plan, stage.inputs[0]))))
    return found


def factor_rows(plan: Plan) -> list[int]:
    """Wide rows of the FIFO through which a product's second factor goes."""
    return [2 * MAX_BLOCK for stage in plan.stages if isinstance(stage, Multiply)]


def pool_shape(plan: Plan, stage: MaxPool) -> tuple[int, int, int]:
    """(rows of a window block, wide rows per row, channel groups) of a maximum pool on one image."""
    (rows, columns), w = plan.splits[stage.output], stage.window
    height = (rows.extent - 1) * w.stride[0] + w.extent[0]
    width = (columns.extent - 1) * w.stride[1] + w.extent[1]
    return height, ceil_div(width, WORD_BYTES), ceil_div(plan.tensors[stage.output].c, GROUP)


def pool_rows(plan: Plan) -> list[int]:
    """Wide rows that every maximum pool takes."""
    found = []
    for stage in plan.stages:
        if isinstance(stage, MaxPool):
            height, quads, groups = pool_shape(plan, stage)
            found.append(height * quads * groups)
    return found
