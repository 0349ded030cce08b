"""Wide rows that stages use besides weight FIFOs, below the fixed ones. Source: docs/network.md, Wide memory."""

from __future__ import annotations

from coral.codegen.machine import GROUP, ROW_BYTES, ROW_WORDS, WIDE_ROWS, WORD_BYTES, ceil_div
from coral.codegen.network.graph import L2Normalise, MaxPool, Multiply, Softmax
from coral.codegen.network.places import collects, gathered_bytes, gathered_tiles, sums_shape
from coral.codegen.network.plan import Plan
from coral.codegen.network.steps import MAX_BLOCK, chunk_shape

FIXED_ROW = WIDE_ROWS - 4
"""Two rows for the host's input, then two for results."""
SUM_ROWS = 512
"""Rows of values to be added up that may lie in wide memory at a time."""


def scratch_rows(plan: Plan) -> int:
    """Wide rows that the most demanding stage takes."""
    kinds = (gather_rows, pool_rows, factor_rows, normal_rows, sum_rows)
    return max((rows for kind in kinds for rows in kind(plan)), default=0)


def gather_rows(plan: Plan) -> list[int]:
    """Wide rows that collecting takes, for every stage that collects its input."""
    found = []
    for stage in plan.stages:
        if collects(plan, stage):
            packets = ceil_div(gathered_bytes(plan, stage), ROW_BYTES)
            found.append(packets * (1 + len(gathered_tiles(plan, stage))))
    return found


def sum_rows(plan: Plan) -> list[int]:
    """Wide rows of all tiles' sums, for every average that is summed in parts."""
    found = []
    for stage in plan.stages:
        if stage.output in plan.summed:
            pairs = ceil_div(sums_shape(plan, stage)[1] * len(gathered_tiles(plan, stage)), 2)
            found.append(pairs * ceil_div(plan.tensors[stage.output].c, GROUP))
    return found


def factor_rows(plan: Plan) -> list[int]:
    """Wide rows of the FIFO through which a product's second factor goes."""
    return [2 * MAX_BLOCK for stage in plan.stages if isinstance(stage, Multiply)]


def quads(words: int) -> list[tuple[int, int]]:
    """Walk over a position's words, four at a time, some of them twice if need be: the quad's levels, then steps."""
    if words <= 3:
        return [(1, min(words, 2)), (0, 4 // min(words, 2)), (1, max(words - 1, 1))]
    step = next(s for s in (4, 3, 2, 1) if (words - 4) % s == 0)
    return [(1, 4), (step, (words - 4) // step + 1)]


def normal_rows(plan: Plan) -> list[int]:
    """Wide rows that every normalising stage takes."""
    return [normalising_rows(plan, stage) for stage in plan.stages if isinstance(stage, Softmax | L2Normalise)]


def normalising_rows(plan: Plan, stage: Softmax | L2Normalise) -> int:
    """Wide rows that a normalising stage takes: the most that one of its steps needs for a chunk of positions."""
    (rows, columns), words = plan.splits[stage.output], plan.channels(stage.output) // WORD_BYTES
    wide, high = chunk_shape(stage, rows.extent, columns.extent, words)
    count, per_row = wide * high, ROW_WORDS // WORD_BYTES
    products = count * ceil_div(words, per_row)
    if isinstance(stage, L2Normalise):
        return max(count * words, products)
    sums, pairs = ceil_div(plan.tensors[stage.output].c, 2), ceil_div(count, GROUP)
    depth = sums_at_a_time(sums, pairs)
    sums = sums * pairs if depth == sums else 2 * depth
    maxima = max(quads(words)[-1][1] * ceil_div(count, per_row), ceil_div(count * words, per_row))
    return max(sums, maxima, ceil_div(count, 2), products)


def sums_at_a_time(sums: int, groups: int) -> int:
    """Rows of pairs that SOFTMAX adds up while they lie side by side: all, or one of two slots of a FIFO."""
    if groups > 1 or sums <= SUM_ROWS:
        return sums
    return max(d for d in range(1, SUM_ROWS // 2 + 1) if sums % d == 0)


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
