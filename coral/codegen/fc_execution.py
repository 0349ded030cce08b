"""The bitstreams of FULLY_CONNECTED: parameter caching, and execution in both compiler generations.

Source: docs/codegen.md, section FULLY_CONNECTED.
"""

from __future__ import annotations

from itertools import groupby

from coral import isa
from coral.codegen import blocks, stream
from coral.codegen.blocks import Piece
from coral.codegen.builder import RESET_COUNTERS, V14, Builder
from coral.codegen.fc_plan import SEND_FIFO_ROW, FcPlan
from coral.codegen.gather import mesh_gather
from coral.codegen.machine import (
    COLUMNS,
    FORWARD_FIFO_ROW,
    GROUP,
    OUTPUT_FIFO_ROW,
    ROW_UNITS,
    WORD_BYTES,
    mask_of,
    round_up,
)
from coral.isa import TileCounter, Wait, Walk
from coral.package.program import Bitstream


def caching_bitstream(p: FcPlan) -> Bitstream:
    """Loads the parameters: header rows of a tile's groups, then their weight rows."""
    s, h = p.shape, p.header
    b = Builder(p.style, caching=True)
    b.prologue()
    b.parameter_dma(p.blob_bytes)
    blocks.pop_parameters(b, p.blob_bytes)
    for t, tile in enumerate(p.compute_tiles()):
        groups = s.tile_groups(t)
        levels = 1 + (groups > 1)
        header = {}
        if h.rows:
            header = {
                "hdr_en": 1,
                "hdr_first_row": p.parameter_row,
                "hdr_rows": h.rows - 1,
                "hdr_last_row": p.parameter_row + h.rows * groups - 1,
                "hdr_bias": int(h.bias),
                "hdr_scale": int(h.scale),
            }
        weights = Walk(p.parameter_row + h.rows * groups, [1, s.words][:levels], [s.words, groups][:levels])
        b.emit(isa.RingRecv0, tile_mask=1 << tile, dst=weights, **header)
    for t, tile in enumerate(p.compute_tiles()):
        offset = t * s.groups_per_tile * p.group_bytes
        blocks.infeed_parameters(b, offset, s.tile_groups(t) * p.group_bytes, 1 << tile, s.group_outputs // 16)
    b.epilogue()
    return b.finish()


def execution_bitstream(p: FcPlan) -> Bitstream:
    """Computes one output vector."""
    return _execution_v14(p) if p.style is V14 else _execution_v16(p)


def _channels(outputs: int, groups: int) -> dict[str, int]:
    """Channels per group of a tile, minus one, and of its last group; written in whole words."""
    last = round_up(outputs - GROUP * (groups - 1), WORD_BYTES)
    return {"out_ch": min(GROUP, round_up(outputs, WORD_BYTES)) - 1, "out_ch_last": last - 1}


def _output_walk(address: int, tensor_bytes: int, outputs: int, groups: int) -> Walk:
    """Words of a group, (positions), groups; the last group shortened. ``tensor_bytes``: distance of positions."""
    ch = _channels(outputs, groups)
    words, last = (ch["out_ch"] + 1) // WORD_BYTES, (ch["out_ch_last"] + 1) // WORD_BYTES
    shortened = {"last_dim": 2, "last_cnt": last - 1} if last != words else {}
    stride = round_up(tensor_bytes, WORD_BYTES)
    return Walk(address, [WORD_BYTES, stride, WORD_BYTES * words], [words, 1, groups], **shortened)


def _quantisation(p: FcPlan) -> dict[str, float]:
    q = p.quant
    return {"in_zp": q.in_zp, "out_zp": q.out_zp, "clamp_min": q.clamp_min, "clamp_max": q.clamp_max}


# style 14.1


def _execution_v14(p: FcPlan) -> Bitstream:
    s = p.shape
    x, y, inputs = p.narrow.x, p.narrow.y, p.inputs
    b = stream.begin(p.style, s.k)
    stream.unpack_pieces(b, inputs)
    stream.feed_rows(b, inputs)
    if inputs.pieces > 1:
        mesh_gather(b, inputs, p.narrow.transit)
    b.pause()
    b.reset()
    if p.receivers:
        receivers = mask_of(p.receivers)
        blocks.ring_receive(b, receivers, x // WORD_BYTES, s.k, FORWARD_FIFO_ROW)
        blocks.ring_send(b, 1 << p.first_input_tile, s.k, receivers, FORWARD_FIFO_ROW, ordered=False)
        blocks.pack(b, 1 << p.first_input_tile, x // WORD_BYTES, s.k, FORWARD_FIFO_ROW)
    b.reset()
    b.handshake()
    if p.header.bias:
        for groups, tiles in groupby(range(p.tiles), s.tile_groups):
            mask = mask_of(p.first_tile + t for t in tiles)
            blocks.load_scaling(b, mask, p.parameter_row, groups, scale=False, bias=True)
    tile_bytes = GROUP * s.groups_per_tile
    for t in range(p.tiles):
        _op_v14(b, p, t, y + t * tile_bytes)
    b.reset()
    b.handshake()
    shares = [(tile, s.tile_outputs(t)) for t, tile in enumerate(p.compute_tiles())]
    packs = [(1 << tile, y + t * tile_bytes, size) for t, (tile, size) in enumerate(shares)]
    stream.output(b, s.n, packs, shares)
    return b.finish()


def _op_v14(b: Builder, p: FcPlan, t: int, y: int) -> None:
    """Loops: words, (taps), (positions), groups. All dimensions are written, also those of count 1."""
    s = p.shape
    groups, outputs, words = s.tile_groups(t), s.tile_outputs(t), s.words
    weights = ROW_UNITS * (p.parameter_row + p.header.rows * groups)
    row_words = ROW_UNITS * words
    toggles = {"slot_level": 3, "slot_stride": ROW_UNITS} if groups > 1 else {}
    b.emit(
        isa.Op,
        tile_mask=1 << p.first_tile + t,
        loop_cnt0=words - 1,
        loop_cnt3=groups - 1,
        inp=Walk(p.narrow.x, [WORD_BYTES, WORD_BYTES * words, WORD_BYTES * words, 0], [words, 1, 1, groups]),
        out=_output_walk(y, s.n, outputs, groups),
        par=Walk(weights, [ROW_UNITS, 0, row_words, row_words], [words, 1, 1, groups]),
        psum=Walk(0, [int(words == 1), ROW_UNITS, 0, 0], [words, 1, 1, groups], nz_mask=0b10, **toggles),
        sig_av=2,
        sig_par=2,
        waits=[Wait(TileCounter.WIDE_TO_SCALING, 1, level=3)] if p.header.bias else [],
        acc_chain=int(words > 1),
        acc_init=1,
        w_zp=p.quant.w_zp,
        mult=p.quant.mult,
        group_loop=3,
        reduce_mask=0b101,
        bias_en=int(p.header.bias),
        **_channels(outputs, groups),
        **_quantisation(p),
    )


# style 16.0


def _execution_v16(p: FcPlan) -> Bitstream:
    """Every input tile sends its piece to all compute tiles over the ring; tiles with equal work share an op."""
    s = p.shape
    inputs, received = p.inputs, p.narrow.transit // WORD_BYTES
    b = stream.begin(p.style, s.k)
    for piece in _column_pieces(p, received):
        blocks.scatter_unpack(b, piece, s.packets, received, levels=1)
    stream.feed_rows(b, inputs)
    b.handshake()
    computing = mask_of(p.compute_tiles())
    for t in range(inputs.pieces):
        size = WORD_BYTES * inputs.words(t)
        blocks.ring_receive(b, computing, inputs.word(t), size, OUTPUT_FIFO_ROW)
        blocks.ring_send(b, 1 << p.first_input_tile + t, size, computing, SEND_FIFO_ROW)
        blocks.pack(b, 1 << p.first_input_tile + t, received, size, SEND_FIFO_ROW)
    b.handshake()
    b.reset()
    b.pause()
    b.reset()
    classes = [
        (mask_of(p.first_tile + t for t in tiles), groups, outputs)
        for (groups, outputs), tiles in groupby(range(p.tiles), lambda t: (s.tile_groups(t), s.tile_outputs(t)))
    ]
    for mask, groups, _ in classes:
        step = p.header.rows
        blocks.load_scaling(b, mask, p.parameter_row, groups, row_step=step, scale=True, bias=p.header.bias)
    for mask, groups, outputs in classes:
        _op_v16(b, p, mask, groups, outputs)
    b.reset()
    b.fence(RESET_COUNTERS, token=True)
    b.handshake()
    shares = [(tile, s.tile_outputs(t)) for t, tile in enumerate(p.compute_tiles())]
    stream.output(b, s.n, [(mask, p.narrow.y, outputs) for mask, _, outputs in classes], shares)
    return b.finish()


def _column_pieces(p: FcPlan, word: int) -> list[Piece]:
    """Pieces column by column; tiles of a column share one if it is equally long."""
    size, inputs = p.shape.piece_bytes, p.inputs
    pieces = []
    for column in range(min(COLUMNS, inputs.pieces)):
        for words, same in groupby(range(column, inputs.pieces, COLUMNS), inputs.words):
            tiles = mask_of(p.first_input_tile + t for t in same)
            pieces.append(Piece(tiles, column * size, WORD_BYTES * words, word))
    return pieces


def _op_v16(b: Builder, p: FcPlan, tiles: int, groups: int, outputs: int) -> None:
    """Loops: words, groups. Dimensions of count 1 are dropped, except the compiler's in ``in`` and ``out``."""
    words, rows = p.shape.words, p.header.rows
    multiple = groups > 1
    levels = 1 + multiple
    last_header = p.parameter_row + rows * groups - 1
    toggles = {"slot_level": 1, "slot_stride": ROW_UNITS} if multiple else {}
    weights = ROW_UNITS * (p.parameter_row + rows * groups)
    b.emit(
        isa.Op,
        tile_mask=tiles,
        loop_cnt0=words - 1,
        loop_cnt1=groups - 1,
        inp=Walk(p.narrow.x, [WORD_BYTES, WORD_BYTES * words, WORD_BYTES * words, 0], [words, 1, 1, groups]),
        out=_output_walk(p.narrow.y, outputs, outputs, groups),
        par=Walk(weights, [ROW_UNITS, ROW_UNITS * words][:levels], [words, groups][:levels]),
        psum=Walk(0, [0, 0][:levels], [words, groups][:levels], **toggles),
        sig_av=2,
        sig_par=1,
        waits=[Wait(TileCounter.WIDE_TO_SCALING, 1, level=1)],
        acc_chain=int(words > 1),
        acc_init=1,
        par_zp_rows=1,
        zp_first_row=p.parameter_row + rows - 1,
        zp_last_row=last_header,
        zp_row_step=rows if multiple else 1,
        mult=1.0,
        group_loop=1,
        reduce_mask=0b1,
        bias_en=int(p.header.bias),
        scale_en=1,
        **_channels(outputs, groups),
        **_quantisation(p),
    )
