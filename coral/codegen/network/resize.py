"""Twofold resizing. Source: docs/network.md, section Resizing."""

from __future__ import annotations

from coral import isa
from coral.codegen import blocks
from coral.codegen.builder import Builder
from coral.codegen.errors import ShapeError
from coral.codegen.machine import ROW_UNITS, WORD_BYTES
from coral.codegen.network.emit import levels
from coral.codegen.network.graph import Resize
from coral.codegen.network.plan import Plan
from coral.codegen.network.products import Level
from coral.codegen.network.wide import Wide, identity_rows
from coral.isa import Walk

TAPS = 2
MAX_ROW_BYTES = 0xFFFF


def resize(b: Builder, plan: Plan, wide: Wide, stage: Resize) -> None:
    """One op per distinct beginning: results of even and odd numbers lie 3/4 and 1/4 behind a position."""
    (name,), y = stage.inputs, stage.output
    a, o, (rows, columns) = plan.blocks[name], plan.blocks[y], plan.splits[y]
    if a.row > MAX_ROW_BYTES:
        raise ShapeError(f"resize {y!r}: rows of {a.row} bytes on a tile, the limit is {MAX_ROW_BYTES}")
    if not stage.nearest:
        _repeat_edges(b, plan, wide, stage)
    starts: dict[tuple[int, int, int], int] = {}
    for part in plan.active(y):
        down, across = (1 if split.start(p) % 2 else 3 for split, p in zip((rows, columns), part, strict=True))
        key = plan.window_address(name, stage, part), down, across
        starts[key] = starts.get(key, 0) | plan.grid.mask(*part)
    taps, words = 1 if stage.nearest else TAPS, plan.channels(y) // WORD_BYTES
    sizes = [columns.extent, rows.extent, plan.images, words]
    loops, fields = [taps, taps, *sizes], {"rs_nearest": 1, "rs_x_nearest": 1, "rs_y_nearest": 1}
    count = columns.extent * rows.extent * plan.images * words
    for (address, down, across), tiles in starts.items():
        b.emit(
            isa.OpResize,
            tile_mask=tiles,
            loops=loops,
            inp=Walk(address, [a.position, a.row, 0, 0, a.image, WORD_BYTES], loops),
            out=Walk(plan.own(y), [WORD_BYTES, o.position, o.row, o.image, WORD_BYTES], [1, *sizes]),
            psum=Walk(0, [0, 0], [taps * taps, count], slot_level=1, slot_stride=ROW_UNITS),
            acc_init=1,
            par16=1,
            lane_off=6,
            group_loop=5,
            reduce_mask=3,
            out_ch=WORD_BYTES - 1,
            out_ch_last=WORD_BYTES - 1,
            mult=1.0 if stage.nearest else 2.0**-14,
            rs_x_loop=2,
            rs_x_start=across,
            rs_x_step=2,
            rs_y_loop=3,
            rs_y_start=down,
            rs_y_step=2,
            rs_pos_stride=a.position,
            rs_row_stride=a.row,
            **(fields if stage.nearest else {}),
        )


def _repeat_edges(b: Builder, plan: Plan, wide: Wide, stage: Resize) -> None:
    """The first and last rows and columns of the input once more, outside it: rows first, corners with the columns."""
    (name,) = stage.inputs
    t, block, (rows, columns) = plan.tensors[name], plan.blocks[name], plan.halos[plan.roots[name][0]]
    words = plan.channels(name) // WORD_BYTES
    for axis, (halo, size) in enumerate(((rows, t.y), (columns, t.x))):
        copies: dict[tuple[int, int, tuple[Level, ...]], int] = {}
        for part in plan.active(stage.output):
            (y0, y1), (x0, x1) = ((h.low[p], h.high[p]) for h, p in zip((rows, columns), part, strict=True))
            y0, y1 = max(y0, -1), min(y1, t.y + 1)
            x0, x1 = max(x0, 0), min(x1, t.x)
            count, stride = (x1 - x0, block.position) if axis == 0 else (y1 - y0, block.row)
            for edge, outside in ((0, -1), (size - 1, size)):
                if halo.low[part[axis]] <= min(edge, outside) and max(edge, outside) < halo.high[part[axis]]:
                    ends = ((edge, x0), (outside, x0)) if axis == 0 else ((y0, edge), (y0, outside))
                    source, target = (plan.at(name, part, *end) for end in ends)
                    key = source, target, ((WORD_BYTES, words), (stride, count), (block.image, plan.images))
                    copies[key] = copies.get(key, 0) | plan.grid.mask(*part)
        for (source, target, nest), tiles in copies.items():
            _copy(b, wide, f"resize {stage.output!r}", tiles, source, target, list(nest))


def _copy(b: Builder, wide: Wide, where: str, tiles: int, source: int, target: int, nest: list[Level]) -> None:
    """Words of narrow memory to other places of it, as they are."""
    loops = [n for _, n in nest]
    blocks.word_op(
        b,
        tiles,
        loops,
        inp=levels(source, nest, where),
        out=levels(target, nest, where),
        par=levels(ROW_UNITS * wide.constant(identity_rows()), [(0, n) for n in loops], where),
        clamp_max=255.0,
    )
