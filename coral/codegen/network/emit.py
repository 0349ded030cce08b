"""Instructions of the stages that compute. Source: docs/network.md, section Products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from coral import isa
from coral.codegen import blocks
from coral.codegen.builder import ALL_SCALAR_UNITS, Builder
from coral.codegen.errors import ShapeError
from coral.codegen.machine import BIAS_ENTRY, ROW_UNITS, ROW_WORDS, SCALAR_CORE, WORD_BYTES, ceil_div, round_up
from coral.codegen.network.graph import Conv, Stage
from coral.codegen.network.plan import Plan
from coral.codegen.network.products import MAX_LOOP, Level, Product, merge
from coral.codegen.network.wide import Fifo, Piece, Wide, share_name
from coral.isa import ScalarCounter, TileCounter, Wait, Walk

RELAY_COUNTERS = 1 << ScalarCounter.SCALAR_INFEED | 1 << ScalarCounter.RING_OUTFEED
Placed = dict[int, int]
"""Input address -> tiles that begin there."""


def placed(plan: Plan, stage: Stage, name: str) -> Placed:
    """Where the windows on an input begin, for all tiles with results to compute."""
    if stage.output in plan.spread:
        return {plan.own(name): plan.spread_tiles(stage.output)}
    found: Placed = {}
    for part in plan.active(stage.output):
        address = plan.window_address(name, stage, part)
        found[address] = found.get(address, 0) | plan.grid_of(stage.output).mask(*part)
    return found


# layers with weights


def receive_weights(b: Builder, p: Product, fifo: Fifo, tiles: int, arrived: TileCounter) -> None:
    """Ring, FIFO and scaling store of a layer on ``tiles``; the op takes fill after fill."""
    receive = isa.RingRecv0 if arrived == TileCounter.RING_READ_A else isa.RingRecv1
    double, first = fifo.slots - 1, b.count(arrived, tiles) + 1
    slots = {"slot_level": 1, "slot_stride": fifo.fill} if double else {}
    b.emit(
        receive,
        tile_mask=tiles,
        dst=Walk(fifo.row, [1, 0, 0], [fifo.fill, fifo.fills, p.groups], **slots),
        hdr_en=1,
        hdr_level=1,
        hdr_first_row=fifo.header_row,
        hdr_rows=p.header - 1,
        hdr_last_row=fifo.header_row + fifo.slots * p.header - 1,
        hdr_bias=1,
        hdr_scale=int(p.scale is not None),
        sig_dst=1,
        waits=[Wait(TileCounter.PARAMETERS, b.count(TileCounter.PARAMETERS, tiles) - double, level=1, side=1)],
    )
    entries = round_up(p.columns, 16) // 2
    slots = {"slot_level": 1, "slot_stride": p.header} if double else {}
    b.emit(
        isa.W2n,
        tile_mask=tiles,
        src=Walk(fifo.header_row, [1, 0], [p.header, p.groups], **slots),
        dst=Walk(
            BIAS_ENTRY if p.scale is None else 0,
            [1, BIAS_ENTRY, 0],
            [entries, p.header, p.groups],
            slot_level=2,
            slot_stride=32,
        ),
        sig_dst=2,
        waits=[
            Wait(arrived, first, level=1, step=fifo.fills),
            Wait(TileCounter.AVDATA, b.count(TileCounter.AVDATA, tiles) - 1, level=2, side=1),
        ],
        to_scaling=1,
        unpack_level=1,
    )


def broadcast(b: Builder, p: Product, pieces: Sequence[Piece], tiles: int) -> None:
    """The owners send a layer's rows, piece after piece."""
    if p.relay:
        _relay(b, p, pieces[0], tiles)
        return
    for piece in pieces:
        before = b.count(TileCounter.RING_PRODUCER_B, piece.tiles)
        b.emit(
            isa.RingSend,
            tile_mask=piece.tiles,
            src=Walk(piece.row, [1], [piece.rows]),
            sig_ring=0,
            waits=[Wait(TileCounter.RING_PRODUCER_B, before, level=1)],
            to_consumer1=1,
            dest_mask=tiles,
        )


def stream(b: Builder, size_bytes: int, tiles: int) -> None:
    """A layer's rows come from the host. Nothing of them is left over when the layer is done: the counters of the
    scalar core begin anew with every layer.
    """
    b.scalar_fence(ctr_mask=1 << ScalarCounter.PARAMETER_POP | 1 << ScalarCounter.PARAMETER_INFEED)
    b.parameter_dma(size_bytes)
    blocks.pop_parameters(b, size_bytes)
    blocks.infeed_parameters(b, 0, size_bytes, tiles, ROW_UNITS)


def _relay(b: Builder, p: Product, piece: Piece, tiles: int) -> None:
    """Narrow rows through the scalar core's memory, which cuts the owner's rows into packets of one row each."""
    words = p.groups * (p.header + p.steps) * p.relay
    passes, left = ceil_div(words, ROW_WORDS), words % ROW_WORDS
    shortened = {"last_dim": 1, "last_cnt": left - 1} if left else {}
    free = b.count(TileCounter.RING_PRODUCER_A, piece.tiles) - 1
    ring = {"slot_level": 1, "slot_stride": ROW_WORDS}
    b.emit(
        isa.Infeed,
        stream=isa.Source.SCALAR_MEMORY,
        buf=Walk(0, [1, 0], [ROW_WORDS, passes], **ring, **shortened),
        smem_308=3,
        sig_infeed=0,
        waits=[Wait(ScalarCounter.RING_OUTFEED, 1)],
        lane_words=p.relay - 1,
        dest_mask=tiles,
    )
    b.emit(
        isa.Outfeed,
        dst=Walk(0, [1, 0], [ROW_WORDS, passes], **ring),
        sig_outfeed=0,
        waits=[Wait(ScalarCounter.SCALAR_INFEED, 1 - 2 * ROW_WORDS)],
    )
    b.emit(
        isa.RingSend,
        tile_mask=piece.tiles,
        src=Walk(piece.row, [1, 1], [1, piece.rows]),
        sig_ring=1,
        waits=[
            Wait(TileCounter.RING_PRODUCER_A, free, level=1),
            Wait(TileCounter.RING_PRODUCER_B, b.count(TileCounter.RING_PRODUCER_B, piece.tiles), level=1),
        ],
        to_consumer1=1,
        dest_mask=SCALAR_CORE,
    )


def layer(b: Builder, plan: Plan, wide: Wide, stage: Conv, exchange: Callable[[], None]) -> None:
    """A layer with broadcast weights; ``exchange`` brings the halo while the weights are on their way."""
    p, fifo = wide.products[stage.output], wide.fifos[stage.output]
    tiles = plan.working(stage.output)
    streamed = wide.streamed.get(stage.output)
    arrived = TileCounter.RING_READ_A if p.relay or streamed else TileCounter.RING_READ_B
    receive_weights(b, p, fifo, tiles, arrived)
    exchange()
    for x, same in placed(plan, stage, stage.inputs[0]).items():
        product_op(b, p, stage, plan, fifo, x, plan.own(stage.output), same, arrived)
    if streamed:
        stream(b, len(streamed), tiles)
        return
    for share in range(plan.shares(stage.output)):
        if share and p.relay:  # a fence may set counters before it waits
            b.scalar_fence(idle=ALL_SCALAR_UNITS)
            b.scalar_fence(idle=ALL_SCALAR_UNITS, ctr_mask=RELAY_COUNTERS)
        broadcast(b, p, wide.pieces[share_name(stage.output, share)], tiles & plan.share_tiles(stage.output, share))


def product_op(
    b: Builder, p: Product, stage: Conv, plan: Plan, fifo: Fifo, x: int, y: int, tiles: int, arrived: TileCounter
) -> None:
    """The multiplications of a layer on the tiles whose first window begins at ``x``."""
    inner, outer = list(fifo.inner), list(fifo.outer)
    positions, count = list(p.positions), p.count
    chunked = fifo.fills > 1
    sums = chunked and count > 1
    loops = [fifo.fill, count, *([fifo.fills] if chunked else []), p.groups]
    group_loop = len(loops) - 1
    visits = [ROW_UNITS if sums and k == 1 else 0 for k in range(len(loops))]
    toggles = {} if sums else {"slot_level": 3 if chunked else 1, "slot_stride": ROW_UNITS}
    slots = {"slot_level": 2, "slot_stride": ROW_UNITS * fifo.fill} if fifo.slots > 1 else {}
    out = output_walk(y, p, positions)
    b.emit(
        isa.Op,
        tile_mask=tiles,
        loops=loops,
        inp=levels(
            x, [*inner, *((a, n) for a, _, n in positions), *outer, (p.group_in, p.groups)], f"layer {stage.output!r}"
        ),
        out=out,
        par=Walk(ROW_UNITS * fifo.row, [ROW_UNITS, *[0] * group_loop], loops, **slots),
        psum=Walk(ROW_UNITS * fifo.sums_row if sums else 0, visits, loops, **toggles),
        sig_av=len(out.counts) - 1,
        sig_par=2,
        waits=[
            Wait(arrived, b.count(arrived, tiles) + 1 - fifo.fills * p.groups, level=2),
            Wait(
                TileCounter.WIDE_TO_SCALING,
                b.count(TileCounter.WIDE_TO_SCALING, tiles) + 1 - p.groups,
                level=group_loop,
            ),
        ],
        acc_chain=1,
        acc_init=int(not sums),
        w_zp=stage.w_zp,
        mult=float(stage.mult) if p.scale is None else 1.0,
        group_loop=group_loop,
        reduce_mask=0b101 if chunked else 0b1,
        bias_en=1,
        scale_en=int(p.scale is not None),
        out_ch=p.columns - 1,
        out_ch_last=p.last_columns - 1,
        **output_stage(plan, stage),
    )


def maxima(
    b: Builder, tiles: int, loops: list[int], out: Walk, par: Walk, words: tuple[int, int], **output: float
) -> None:
    """Maxima over the first loop of what ``par`` reads; ``words`` of results in a group and in the last one."""
    b.emit(
        isa.OpMax,
        tile_mask=tiles,
        loops=loops,
        out=out,
        par=par,
        psum=Walk(0, [0] * len(loops), loops, slot_level=1, slot_stride=ROW_UNITS),
        acc_init=1,
        lane_off=7,
        group_loop=len(loops) - 1,
        reduce_mask=1,
        out_ch=WORD_BYTES * words[0] - 1,
        out_ch_last=WORD_BYTES * words[1] - 1,
        mult=1.0,
        **output,
    )


def output_walk(y: int, p: Product, positions: Iterable[tuple[int, int, int]]) -> Walk:
    """Words of a group, positions, groups; the last group may be shorter."""
    words, last = p.columns // WORD_BYTES, p.last_columns // WORD_BYTES
    places = merge([(o, n) for _, o, n in positions])
    shortened = {"last_dim": 1 + len(places), "last_cnt": last - 1} if last != words else {}
    strides = [WORD_BYTES, *(s for s, _ in places), p.group_out]
    return Walk(y, strides, [words, *(n for _, n in places), p.groups], **shortened)


def output_stage(plan: Plan, stage: Stage) -> dict[str, float]:
    """Zero points and clamps of a stage."""
    x, y = plan.tensors[stage.inputs[0]], plan.tensors[stage.output]
    low, high = stage.clamps
    return {"in_zp": x.zero_point, "out_zp": y.zero_point, "clamp_min": low, "clamp_max": high}


def levels(address: int, nest: list[Level], where: str) -> Walk:
    """The walk of a nest, in as few levels as possible; ShapeError if the hardware has not that many."""
    merged = merge(nest, MAX_LOOP)
    if len(merged) > 8:
        raise ShapeError(f"{where}: its operands need {len(merged)} levels, a walk has 8")
    return Walk(address, [s for s, _ in merged], [n for _, n in merged])
