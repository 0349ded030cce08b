"""Flat uint8 tensors through the output stage: RELU, QUANTIZE, scalar MUL and ADD, LOGISTIC (style 14.1).

The op multiplies every word by a 4 x 4 identity matrix; clamps, multiplier and spline do the rest.
Source: docs/codegen.md, section Elementwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coral import isa
from coral.codegen import blocks, stream
from coral.codegen.builder import OP_UNIT, V14, Builder, counter_mask
from coral.codegen.errors import CodegenError, ShapeError
from coral.codegen.gather import Spread
from coral.codegen.machine import GROUP, ROW_BYTES, ROW_UNITS, TILES, WIDE_ROWS, WORD_BYTES, ceil_div, mask_of, round_up
from coral.isa import TileCounter, Wait, Walk
from coral.numerics import Spline
from coral.package.program import Base, DmaHint, InstructionHint, InterruptHint, Kind, Layer, Program

IDENTITY_ROW = WIDE_ROWS - 1
MAX_ELEMENTS = 4096
NLU_MODE = 3


@dataclass(frozen=True)
class Requantise:
    """y = rne(spline(clamp(f32(x - in_zp + offset) * mult))) + out_zp on codes 0..255; floats are float32 values."""

    mult: float
    clamp_min: float
    clamp_max: float
    in_zp: int = 0
    out_zp: int = 0
    offset: int = 0
    spline: Spline | None = None


def elementwise(n: int, steps: Sequence[Requantise], in_scale: float = 1.0, out_scale: float = 1.0) -> Program:
    """Program of ``n`` elements from layer ``x`` to layer ``y`` through ``steps`` (none: a copy), one after the other.

    The scales are only recorded in the layers. ShapeError unless n is in 1..4096; CodegenError for a spline that is
    odd or reduces its range, because those forms are not known in this style.
    """
    if not 1 <= n <= MAX_ELEMENTS:
        raise ShapeError(f"elementwise program of {n} elements, allowed are 1..{MAX_ELEMENTS}")
    piece = GROUP * ceil_div(n, GROUP * TILES)
    one_tile = n <= piece
    identity = 0 if one_tile else round_up(n, WORD_BYTES)
    spread = Spread(n, piece, 0, 3 * ROW_BYTES if one_tile else 0)
    b = stream.begin(V14, n)
    stream.unpack_pieces(b, spread)
    stream.feed_rows(b, spread)
    for index, step in enumerate(steps):
        b.reset()
        if index == 0:
            blocks.identity_row(b, identity // WORD_BYTES, IDENTITY_ROW)
        if step.spline is not None:
            _load_spline(b, mask_of(range(spread.pieces)), step.spline)
        for tile in range(spread.pieces):
            _op(b, tile, spread, step)
        b.reset()
    b.handshake()
    shares = [(tile, min(piece, n - piece * tile)) for tile in range(spread.pieces)]
    stream.output(b, n, [(1 << tile, WORD_BYTES * spread.word(tile), size) for tile, size in shares], shares)
    padded = round_up(n, 8)
    in_zp, out_zp = (steps[0].in_zp, steps[-1].out_zp) if steps else (0, 0)
    return Program(
        Kind.STAND_ALONE,
        (b.finish(),),
        (
            InstructionHint(),
            DmaHint(Base.INPUT, 0, padded, stream.INPUT),
            DmaHint(Base.OUTPUT, 0, padded, stream.OUTPUT, out=True),
            InterruptHint(),
        ),
        inputs=(Layer(stream.INPUT, padded, 1, 1, n, in_zp, in_scale),),
        outputs=(Layer(stream.OUTPUT, padded, 1, 1, n, out_zp, out_scale),),
        name=f"elementwise_{n}",
    )


def _load_spline(b: Builder, tiles: int, spline: Spline) -> None:
    if spline.odd or spline.range_reduce:
        raise CodegenError("elementwise program: splines that are odd or reduce their range are not supported")
    b.fence(counter_mask((TileCounter.AVDATA, TileCounter.PARAMETERS, TileCounter.PARTIAL_SUMS)), units=OP_UNIT)
    table = {f"c{s}_{power}": float(c) for s, row in enumerate(spline.coefficients) for power, c in enumerate(row)}
    table |= {f"brk{k}": float(x) for k, x in enumerate(spline.breakpoints)}
    b.emit(isa.NluLoad, tile_mask=tiles, table_mode=NLU_MODE, **table)


def _op(b: Builder, tile: int, spread: Spread, step: Requantise) -> None:
    """Every word of a tile's piece, in place. Loops: positions (1), words."""
    words = spread.words(tile)
    walk = Walk(
        WORD_BYTES * spread.word(tile),
        [WORD_BYTES, WORD_BYTES * spread.words(0, spread.pieces), WORD_BYTES],
        [1, 1, words],
    )
    stride, toggles = ([1], {}) if words == 1 else ([0], {"slot_stride": ROW_UNITS})
    b.emit(
        isa.Op,
        tile_mask=1 << tile,
        loop_cnt1=words - 1,
        inp=walk,
        out=walk,
        par=Walk(ROW_UNITS * IDENTITY_ROW, stride, [words], nz_mask=0),
        psum=Walk(0, stride, [words], nz_mask=0, **toggles),
        sig_av=2,
        waits=[Wait(TileCounter.NARROW_TO_WIDE, b.count(TileCounter.NARROW_TO_WIDE, 1 << tile), level=2)],
        acc_init=1,
        in_zp=step.in_zp,
        out_zp=step.out_zp,
        group_loop=1,
        out_ch=WORD_BYTES - 1,
        out_ch_last=WORD_BYTES - 1,
        nlu_en=int(step.spline is not None),
        mult=step.mult,
        clamp_min=step.clamp_min,
        clamp_max=step.clamp_max,
        acc_offset=step.offset,
    )
