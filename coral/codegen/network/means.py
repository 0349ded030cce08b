"""Averages over whole maps that are cut over all tiles. Source: docs/network.md, section Means."""

from __future__ import annotations

from coral import isa
from coral.codegen import blocks
from coral.codegen.builder import Builder
from coral.codegen.machine import GROUP, ROW_UNITS, WORD_BYTES, ceil_div
from coral.codegen.network.emit import levels, output_stage
from coral.codegen.network.graph import AveragePool
from coral.codegen.network.places import gathered, gathered_bytes, gathered_tiles, scratchpad, sums_shape
from coral.codegen.network.plan import Plan
from coral.codegen.network.scratch import FIXED_ROW
from coral.codegen.network.vectors import gather
from coral.codegen.network.wide import Wide, identity_rows
from coral.isa import Walk

LARGEST = float(0xFFFF)


def mean(b: Builder, plan: Plan, wide: Wide, stage: AveragePool) -> None:
    """16-bit sums on every tile, collected on all of them; those with the result add them up."""
    for image in range(plan.images):
        if image:
            b.separate()
        _sums(b, plan, wide, stage, image)
        gather(b, plan, stage)
        for share in range(plan.shares(stage.inputs[0])):
            if share:
                b.drain()
            _total(b, plan, stage, image, share)


def _sums(b: Builder, plan: Plan, wide: Wide, stage: AveragePool, image: int) -> None:
    """Sums of codes over up to 257 positions, ``[sum][channel]``; those of no positions are zero."""
    (name,), senders = stage.inputs, sum(1 << t for t in gathered_tiles(plan, stage))
    block, (rows, columns), words = plan.blocks[name], plan.splits[name], plan.channels(name) // WORD_BYTES
    high, count = sums_shape(plan, stage)
    target = plan.own(scratchpad(stage))
    fill(b, senders, target, gathered_bytes(plan, stage))
    for index in range(count):
        shapes: dict[tuple[int, int], int] = {}
        for r, c in plan.active(name):
            key = min(max(rows.real(r) - index * high, 0), high), columns.real(c)
            shapes[key] = shapes.get(key, 0) | plan.grid_of(name).mask(r, c)
        for (down, across), tiles in shapes.items():
            if not down:
                continue
            loops = [across, down, words]
            where = f"average {stage.output!r}"
            nest = [(block.position, across), (block.row, down), (WORD_BYTES, words)]
            blocks.word_op(
                b,
                tiles,
                loops,
                inp=levels(plan.own(name) + image * block.image + index * high * block.row, nest, where),
                out=Walk(target + 2 * WORD_BYTES * words * index, [WORD_BYTES], [2 * words]),
                par=Walk(ROW_UNITS * wide.constant(identity_rows()), [0, 0, 0], loops),
                psum=Walk(0, [0, 0, 0], loops, slot_level=2, slot_stride=ROW_UNITS),
                acc_chain=1,
                reduce_mask=0b11,
                out16=1,
                clamp_max=LARGEST,
            )
    b.drain()


def _total(b: Builder, plan: Plan, stage: AveragePool, image: int, share: int) -> None:
    """Two sums of 64 channels side by side in a row; all rows added up, less the zero points."""
    x, size, tiles = plan.tensors[stage.inputs[0]], plan.channels(stage.inputs[0]), plan.working(stage.output)
    count = sums_shape(plan, stage)[1] * len(gathered_tiles(plan, stage)) // plan.shares(x.name)
    source = plan.own(gathered(stage)) + 2 * size * count * share
    pairs, groups, stride = ceil_div(count, 2), ceil_div(size, GROUP), size // 2
    if count % 2:
        fill(b, tiles, source + 2 * size * count, 2 * size)
    row, words = FIXED_ROW - pairs * groups, min(size // 2, GROUP // 2)
    last = size // 2 - GROUP // 2 * (groups - 1)
    short = {"last_dim": 3, "last_cnt": last - 1, "last_skip": words - last} if last != words else {}
    b.emit(
        isa.N2w,
        tile_mask=tiles,
        src=Walk(source // WORD_BYTES, [stride, 1, 2 * stride, GROUP // 2], [2, words, pairs, groups], **short),
        dst=Walk(row, [1], [pairs * groups]),
        sig_dst=1,
        transpose=1,
        transpose16=1,
        pack_level=2,
    )
    b.drain()
    loops = [pairs, groups]
    short = {"last_dim": 1, "last_cnt": last // 2 - 1} if last != words else {}
    fields = output_stage(plan, stage) | {"in_zp": 0, "acc_offset": -x.zero_point * x.y * x.x}
    b.emit(
        isa.OpSum,
        tile_mask=tiles,
        loops=loops,
        out=Walk(
            plan.own(stage.output) + image * plan.blocks[stage.output].image + size * share,
            [WORD_BYTES, GROUP],
            [words // 2, groups],
            **short,
        ),
        par=Walk(ROW_UNITS * row, [ROW_UNITS, ROW_UNITS * pairs], loops),
        psum=Walk(0, [0, 0], loops, slot_level=1, slot_stride=ROW_UNITS),
        acc_chain=1,
        acc_init=1,
        par16=1,
        group_loop=1,
        reduce_mask=1,
        out_ch=2 * words - 1,
        out_ch_last=2 * last - 1,
        mult=stage.mult,
        **fields,
    )


def fill(b: Builder, tiles: int, address: int, size: int) -> None:
    """Zeros in narrow memory, before anything else goes on."""
    b.emit(isa.MeshNorth, tile_mask=tiles, dst=Walk(address // WORD_BYTES, [1], [size // WORD_BYTES]), fill_en=1)
    b.drain()
