"""Dense layers over all tiles: each gets the whole input and computes its share. Source: docs/network.md, Vectors."""

from __future__ import annotations

from itertools import groupby

from coral import isa
from coral.codegen import blocks
from coral.codegen.builder import Builder
from coral.codegen.machine import ALL_TILES, GROUP, ROW_BYTES, ROW_UNITS, TILES, WORD_BYTES, ceil_div, mask_of, round_up
from coral.codegen.network.emit import output_stage
from coral.codegen.network.graph import Conv, Stage
from coral.codegen.network.places import gathered, gathered_bytes, gathered_tiles, scratchpad, shared
from coral.codegen.network.plan import Plan
from coral.codegen.network.products import Level, merge
from coral.codegen.network.scratch import FIXED_ROW
from coral.codegen.network.wide import Wide
from coral.isa import TileCounter, Wait, Walk


def gather(b: Builder, plan: Plan, stage: Stage) -> None:
    """All tiles' own parts of a tensor, or sums of them, to every tile, one behind the other; or those of the tiles
    that hold channels of the same positions.
    """
    (name,) = stage.inputs
    size = gathered_bytes(plan, stage)
    source, nest = plan.own(name), own_words(plan, name)
    if stage.output in plan.summed:
        source, nest = plan.own(scratchpad(stage)), ((1, size // WORD_BYTES),)
    senders = dict.fromkeys(gathered_tiles(plan, stage), ALL_TILES)
    count, everybody = len(senders), ALL_TILES
    if plan.shares(name) > 1 and stage.output not in plan.summed:
        grid, everybody = plan.grid_of(name), plan.working(name)
        masks = [grid.mask(*part) for part in plan.active(name)]
        senders = {tile: mask for tile in range(TILES) for mask in masks if mask >> tile & 1}
    packets = ceil_div(size, ROW_BYTES)
    arrivals, fifo = FIXED_ROW - packets * count, FIXED_ROW - packets * (count + 1)
    places = _as_a_map(plan, name) if shared(plan, stage) and plan.shares(name) == 1 else _one_by_one(size, count)
    first = b.count(TileCounter.RING_READ_A, everybody) + 1
    b.emit(
        isa.W2n,
        tile_mask=everybody,
        src=Walk(arrivals, [1], [packets * count]),
        dst=Walk(plan.own(gathered(stage)) // WORD_BYTES, [s for s, _ in places], [n for _, n in places]),
        sig_dst=0,
        waits=[Wait(TileCounter.RING_READ_A, first, level=0)],
        unpack_level=len(places) // 2,
    )
    b.emit(isa.RingRecv0, tile_mask=everybody, dst=Walk(arrivals, [1], [packets * count]), sig_dst=0)
    tiles = mask_of(senders)
    ready = b.count(TileCounter.NARROW_TO_WIDE, tiles) + 1
    b.emit(
        isa.N2w,
        tile_mask=tiles,
        src=Walk(source // WORD_BYTES, [s for s, _ in nest], [n for _, n in nest]),
        dst=Walk(fifo, [1], [packets]),
        sig_dst=1,
        pack_level=len(nest),
    )
    sent: dict[tuple[int, int], int] = {}
    for (tile, receivers), turn in zip(senders.items(), b.turns(list(senders)), strict=True):
        sent[turn, receivers] = sent.get((turn, receivers), 0) | 1 << tile
    for (turn, receivers), mask in sent.items():
        b.emit(
            isa.RingSend,
            tile_mask=mask,
            src=Walk(fifo, [1], [packets]),
            sig_ring=1,
            waits=[Wait(TileCounter.RING_PRODUCER_A, turn, level=1), Wait(TileCounter.NARROW_TO_WIDE, ready, level=1)],
            dest_mask=receivers,
        )
    b.drain()


def _one_by_one(size: int, count: int) -> list[Level]:
    return [(1, size // WORD_BYTES), (size // WORD_BYTES, count)]


def _as_a_map(plan: Plan, name: str) -> list[Level]:
    """Where the words of all tiles' parts go, tile by tile, so that they are one map."""
    (rows, columns), parts = plan.splits[name], plan.active(name)
    down, across = len({r for r, _ in parts}), len({c for _, c in parts})
    words = columns.extent * plan.channels(name) // WORD_BYTES
    pitch = words * across
    return [(1, words), (pitch, rows.extent), (words, across), (pitch * rows.extent, down)]


def own_words(plan: Plan, name: str) -> tuple[Level, ...]:
    """Walk, in words, over what a tile owns of a tensor."""
    block = plan.blocks[name]
    if name in plan.spread:
        return ((1, block.position // WORD_BYTES),)
    if block.inner != (1, 1):
        return ((1, block.image // WORD_BYTES),)
    rows, columns = plan.splits[name]
    words = plan.channels(name) // WORD_BYTES
    return merge([(1, words), (block.position // WORD_BYTES, columns.extent), (block.row // WORD_BYTES, rows.extent)])


def dense(b: Builder, plan: Plan, wide: Wide, stage: Conv) -> None:
    """Every tile's share of the outputs, with weights that stay on it."""
    p, row = wide.products[stage.output], wide.spread_rows[stage.output]
    per_tile = plan.spread[stage.output]
    rows_per_group = p.header + p.steps
    outputs = plan.tensors[stage.output].c
    from_host = stage.inputs[0] in plan.network.inputs
    if not from_host:
        gather(b, plan, stage)
    x = plan.own(stage.inputs[0] if from_host else gathered(stage))

    def share(tile: int) -> tuple[int, int]:
        mine = min(outputs - GROUP * per_tile * tile, GROUP * per_tile)
        groups = ceil_div(mine, GROUP)
        return groups, round_up(mine - GROUP * (groups - 1), WORD_BYTES)

    used = range(ceil_div(outputs, GROUP * per_tile))
    for (groups, last), same in groupby(used, share):
        tiles = mask_of(same)
        first = b.count(TileCounter.WIDE_TO_SCALING, tiles) + 1
        blocks.load_scaling(b, tiles, row, groups, row_step=rows_per_group, scale=p.scale is not None, bias=True)
        columns = p.columns if groups > 1 else last
        short = {"last_dim": 1, "last_cnt": last // WORD_BYTES - 1} if groups > 1 and last != columns else {}
        loops = [p.steps, groups]
        b.emit(
            isa.Op,
            tile_mask=tiles,
            loops=loops,
            inp=Walk(x, [WORD_BYTES, 0], loops),
            out=Walk(plan.own(stage.output), [WORD_BYTES, GROUP], [columns // WORD_BYTES, groups], **short),
            par=Walk(ROW_UNITS * (row + p.header), [ROW_UNITS, ROW_UNITS * rows_per_group], loops),
            psum=Walk(0, [0, 0], loops, slot_level=1, slot_stride=ROW_UNITS),
            sig_av=1,
            waits=[Wait(TileCounter.WIDE_TO_SCALING, first, level=1)],
            acc_chain=1,
            acc_init=1,
            w_zp=stage.w_zp,
            mult=float(stage.mult) if p.scale is None else 1.0,
            group_loop=1,
            reduce_mask=1,
            bias_en=1,
            scale_en=int(p.scale is not None),
            out_ch=columns - 1,
            out_ch_last=last - 1,
            **output_stage(plan, stage),
        )
