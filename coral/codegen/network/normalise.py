"""SOFTMAX and L2 normalisation over the channels of every position. Source: docs/network.md, section Normalising.

Positions are taken in chunks. A chunk is first copied densely, [position][channel word], to narrow memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from coral import isa, numerics
from coral.codegen.builder import Builder
from coral.codegen.machine import GROUP, ROW_UNITS, ROW_WORDS, WORD_BYTES, ceil_div
from coral.codegen.network.emit import Placed, levels, maxima, output_stage, placed
from coral.codegen.network.graph import L2Normalise, Softmax
from coral.codegen.network.places import gathered, scratchpad
from coral.codegen.network.plan import Plan
from coral.codegen.network.products import Level, merge
from coral.codegen.network.scratch import FIXED_ROW, normalising_rows, quads, sums_at_a_time
from coral.codegen.network.steps import chunk_shape
from coral.codegen.network.vectors import gather
from coral.codegen.network.wide import DIFFERENCE, Wide, add_rows, add_zero, identity_rows
from coral.codegen.network.words import load_spline
from coral.isa import TileCounter, Wait, Walk


@dataclass(frozen=True)
class Chunk:
    """``count`` positions, of ``words`` channel words each, and where a tile keeps what is made of them.

    ``offset``: of the first position's input and result; ``reads``, ``writes``: walks over positions from there.
    """

    offset: tuple[int, int]
    reads: list[Level]
    writes: list[Level]
    count: int
    words: int
    copy: int
    row: int

    @property
    def values(self) -> int:
        """16-bit values of every channel, behind the copy and the maxima."""
        return self.copy + 2 * WORD_BYTES * self.count * self.words

    @property
    def single(self) -> int:
        """A word per position."""
        return self.values + 2 * WORD_BYTES * self.count * self.words

    @property
    def packed(self) -> int:
        """Another one, or 16 bits per position."""
        return self.single + WORD_BYTES * self.count

    @property
    def rows(self) -> int:
        """Wide rows of a position's channels."""
        return ceil_div(self.words, GROUP // WORD_BYTES)


def chunks(plan: Plan, stage: Softmax | L2Normalise) -> Iterator[Chunk]:
    """All positions that a tile computes, part by part."""
    (name,), y = stage.inputs, stage.output
    o, words = plan.blocks[y], plan.channels(y) // WORD_BYTES
    a = plan.blocks[gathered(stage) if name in plan.spread else name]
    (rows, columns), copy = plan.splits[y], plan.own(scratchpad(stage))
    wide, high = chunk_shape(stage, rows.extent, columns.extent, words)
    first = FIXED_ROW - normalising_rows(plan, stage)
    for image in range(plan.images):
        for top in range(0, rows.extent, high):
            for left in range(0, columns.extent, wide):
                across, down = min(wide, columns.extent - left), min(high, rows.extent - top)
                offsets = [s.image * image + s.row * top + s.position * left for s in (a, o)]
                nests = [[(s.position, across), (s.row, down)] for s in (a, o)]
                yield Chunk((offsets[0], offsets[1]), nests[0], nests[1], across * down, words, copy, first)


def normalise(b: Builder, plan: Plan, wide: Wide, stage: Softmax | L2Normalise) -> None:
    """Chunk after chunk; a vector that is cut over all tiles is collected first."""
    if stage.inputs[0] in plan.spread:
        gather(b, plan, stage)
        starts = {plan.own(gathered(stage)): plan.working(stage.output)}
    else:
        starts = placed(plan, stage, stage.inputs[0])
    for chunk in chunks(plan, stage):
        emitter = Emitter(b, plan, wide, stage, chunk, sum(starts.values()))
        emitter.copy(starts)
        if isinstance(stage, Softmax):
            emitter.softmax(stage)
        else:
            emitter.l2(stage)
        b.drain()


class Emitter:
    """The instructions for one chunk."""

    def __init__(
        self, b: Builder, plan: Plan, wide: Wide, stage: Softmax | L2Normalise, chunk: Chunk, tiles: int
    ) -> None:
        self.b, self.plan, self.wide, self.stage, self.chunk, self.tiles = b, plan, wide, stage, chunk, tiles
        self.where = f"{type(stage).__name__} {stage.output!r}"
        self.zero = plan.tensors[stage.inputs[0]].zero_point if isinstance(stage, L2Normalise) else 0

    def op(
        self, reduce: int, inp: list[Level], out: list[Level], par: list[Level], *, start: int, target: int, **fields
    ) -> None:
        """One column group: ``reduce`` of the loops of ``par`` are summed, ``par`` begins at the chunk's first row."""
        row = fields.pop("row", self.chunk.row)
        kind = fields.pop("kind", isa.Op)
        tiles = fields.pop("tiles", self.tiles)
        columns, loops = fields.pop("columns", WORD_BYTES), [n for _, n in par]
        if kind is isa.Op:
            fields["inp"] = levels(start, inp, self.where)
        self.b.emit(
            kind,
            tile_mask=tiles,
            loops=loops,
            out=levels(target, out, self.where),
            par=levels(ROW_UNITS * row, par, self.where),
            psum=Walk(0, [0] * len(loops), loops, slot_level=max(reduce, 1), slot_stride=ROW_UNITS if reduce else 0),
            acc_chain=int(reduce > 0),
            acc_init=1,
            group_loop=len(loops) - 1,
            reduce_mask=(1 << reduce) - 1,
            out_ch=columns - 1,
            **{"out_ch_last": columns - 1, "mult": 1.0, "clamp_min": 0.0, "clamp_max": 255.0, **fields},
        )

    def to_rows(self, address: int, nest: list[Level], rows: int, flush: int, **fields: int) -> None:
        """Words of narrow memory to the chunk's wide rows; both units have finished before and after."""
        self.b.drain()
        self.b.emit(
            isa.N2w,
            tile_mask=self.tiles,
            src=Walk(address // WORD_BYTES, [s for s, _ in nest], [n for _, n in nest]),
            dst=Walk(self.chunk.row, [1], [rows]),
            sig_dst=1,
            pack_level=flush,
            **fields,
        )
        self.b.drain()

    def copy(self, starts: Placed) -> None:
        """The chunk's channels, those that fill up the last word as zero points."""
        chunk, rest = self.chunk, self.plan.tensors[self.stage.output].c % WORD_BYTES
        limits = {"in_zp": self.zero, "out_zp": self.zero, "clamp_min": float(-self.zero)}
        limits["clamp_max"] = float(255 - self.zero)
        last = chunk.words - 1
        parts = [(0, chunk.words, WORD_BYTES)] if not rest else [(0, last, WORD_BYTES), (last, 1, rest)]
        for first, words, columns in parts:
            nest = [(0, chunk.count * words)]
            for address, tiles in starts.items() if words else []:
                self.op(
                    0,
                    [(WORD_BYTES, words), *chunk.reads],
                    [(WORD_BYTES, words), (WORD_BYTES * chunk.words, chunk.count)],
                    nest,
                    start=address + chunk.offset[0] + WORD_BYTES * first,
                    target=chunk.copy + WORD_BYTES * first,
                    row=self.wide.constant(identity_rows(columns)),
                    tiles=tiles,
                    **limits,
                )

    def maxima(self, target: int, count: int, steps: list[Level]) -> None:
        """The maximum of four lanes, and of ``steps`` rows, of ``count`` words; 16 words a row."""
        groups = ceil_div(4 * count, ROW_WORDS)
        last = count - GROUP // WORD_BYTES * (groups - 1)
        words = min(count, GROUP // WORD_BYTES)
        short = {"last_dim": 1, "last_cnt": last - 1} if last != words else {}
        loops = [4 * steps[0][1], groups]
        out = Walk(target, [WORD_BYTES, GROUP], [words, groups], **short)
        rows = levels(ROW_UNITS * self.chunk.row, [(1, 4), *steps, (ROW_UNITS, groups)], self.where)
        maxima(self.b, self.tiles, loops, out, rows, (words, last), clamp_min=0.0, clamp_max=255.0)

    def softmax(self, stage: Softmax) -> None:
        """Maximum, EXP of the differences to 16 bits, the sum's reciprocal square root, its square, products."""
        b, c, channels = self.b, self.chunk, self.plan.tensors[stage.output].c
        exp, total, square, product = stage.mults
        count, largest, per_row = c.count * c.words, c.copy + WORD_BYTES * c.count * c.words, ROW_WORDS // WORD_BYTES
        *quad, (step, steps) = quads(c.words)
        groups = ceil_div(c.count, per_row)
        self.to_rows(c.copy, [*quad, (c.words, c.count), (step, steps)], groups * steps, 1 + len(quad), transpose=1)
        self.maxima(c.single, c.count, [(ROW_UNITS * groups, steps)])
        self.to_rows(c.single, [(0, WORD_BYTES * c.words), (1, c.count)], ceil_div(count, per_row), 2)
        self.maxima(largest, count, [(0, 1)])
        load_spline(b, self.tiles, numerics.EXP_65535)
        self.op(
            1,
            [(2, 2), (largest - c.copy, 2), (WORD_BYTES, count)],
            [(WORD_BYTES, 2 * count)],
            [(ROW_UNITS, 4), (0, count)],
            start=c.copy,
            target=c.values,
            row=self.wide.constant(add_rows(DIFFERENCE)),
            par16=1,
            w_zp=add_zero(DIFFERENCE),
            nlu_en=1,
            out16=1,
            mult=exp,
            clamp_min=numerics.EXP_CLAMP,
            clamp_max=0.0,
        )
        if channels % 2:
            word = c.values + WORD_BYTES * (channels // 2)
            nest = [(2 * WORD_BYTES * c.words, c.count)]
            mask = self.wide.constant(identity_rows(2))
            self.op(0, nest, nest, [(0, c.count)], start=word, target=word, row=mask)
        sums, pairs = ceil_div(channels, 2), ceil_div(c.count, GROUP)
        nest = [(2 * c.words, c.count), (1, sums)]
        depth = sums_at_a_time(sums, pairs)
        if depth == sums:
            self.to_rows(c.values, nest, sums * pairs, 1)
            load_spline(b, self.tiles, numerics.RSQRT.scaled(numerics.RSQRT_SCALE))
        else:
            load_spline(b, self.tiles, numerics.RSQRT.scaled(numerics.RSQRT_SCALE))
            self._feed(c.values, nest, depth, sums // depth)
        self._root_of_sums(total, sums, pairs, depth)
        self.to_rows(c.packed, [(1, ceil_div(c.count, 2))], ceil_div(c.count, 2), 0)
        self.op(
            0,
            [(2, c.count)],
            [(WORD_BYTES, c.count)],
            [(2, c.count)],
            start=c.packed,
            target=c.single,
            columns=1,
            act16=1,
            par16=1,
            out16=1,
            mult=square,
            clamp_max=float(2**15),
        )
        nest = [(0, 2), (1, 2 * c.words), (2 * c.words, c.count)]
        self.to_rows(c.values, nest, c.count * c.rows, 2, transpose=1, transpose16=1)
        self.products(product, par16=1)

    def _feed(self, address: int, nest: list[Level], depth: int, passes: int) -> None:
        """Words of narrow memory to two slots of ``depth`` rows each, as far as the op that follows has read them."""
        self.b.drain()
        free = self.b.count(TileCounter.PARAMETERS, self.tiles) - 1
        self.b.emit(
            isa.N2w,
            tile_mask=self.tiles,
            src=Walk(address // WORD_BYTES, [s for s, _ in nest], [n for _, n in nest]),
            dst=Walk(self.chunk.row, [1, 0], [depth, passes], slot_level=1, slot_stride=depth),
            sig_dst=1,
            waits=[Wait(TileCounter.PARAMETERS, free, level=1, side=1)],
            pack_level=1,
        )

    def _root_of_sums(self, mult: float, steps: int, groups: int, depth: int) -> None:
        """16-bit reciprocal square roots of sums of ``steps`` rows of pairs, 64 positions a row; ``depth`` rows are
        there at a time.
        """
        c, loops = self.chunk, [steps, groups]
        rows = Walk(ROW_UNITS * c.row, [ROW_UNITS * groups, ROW_UNITS], loops)
        fed: dict = {}
        if depth < steps:
            loops = [depth, steps // depth, groups]
            rows = Walk(ROW_UNITS * c.row, [ROW_UNITS, 0, 0], loops, slot_level=1, slot_stride=ROW_UNITS * depth)
            ready = self.b.count(TileCounter.NARROW_TO_WIDE, self.tiles) + 1 - steps // depth
            fed = {"sig_par": 1, "waits": [Wait(TileCounter.NARROW_TO_WIDE, ready, level=1)]}
        reduce = len(loops) - 1
        columns = min(c.count, GROUP)
        last = c.count - GROUP * (groups - 1)
        words, last_words = ceil_div(columns, 2), ceil_div(last, 2)
        short = {"last_dim": 1, "last_cnt": last_words - 1} if last_words != words else {}
        self.b.emit(
            isa.OpSum,
            tile_mask=self.tiles,
            loops=loops,
            out=Walk(c.packed, [WORD_BYTES, 2 * GROUP], [words, groups], **short),
            par=rows,
            psum=Walk(0, [0] * len(loops), loops, slot_level=reduce, slot_stride=ROW_UNITS),
            **fed,
            acc_chain=1,
            acc_init=1,
            par16=1,
            group_loop=reduce,
            reduce_mask=(1 << reduce) - 1,
            out_ch=columns - 1,
            out_ch_last=last - 1,
            nlu_en=1,
            nlu_range_reduce=1,
            out16=1,
            mult=mult,
            clamp_min=-inf,
            clamp_max=inf,
        )

    def products(self, mult: float, **fields: int) -> None:
        """Every position's 16-bit number times its channels, which lie in wide rows of 64."""
        c, rows = self.chunk, self.chunk.rows
        words, last = min(c.words, GROUP // WORD_BYTES), c.words - GROUP // WORD_BYTES * (rows - 1)
        places = merge(c.writes)
        short = {"last_dim": 1 + len(places), "last_cnt": last - 1} if last != words else {}
        loops = [c.count, rows]
        clamps = output_stage(self.plan, self.stage) | {"in_zp": 0}
        self.b.emit(
            isa.Op,
            tile_mask=self.tiles,
            loops=loops,
            inp=Walk(c.single, [WORD_BYTES, 0], loops),
            out=Walk(
                self.plan.own(self.stage.output) + c.offset[1],
                [WORD_BYTES, *(s for s, _ in places), GROUP],
                [words, *(n for _, n in places), rows],
                **short,
            ),
            par=Walk(ROW_UNITS * c.row, [ROW_UNITS * rows, ROW_UNITS], loops),
            psum=Walk(0, [0, 0], loops),
            acc_init=1,
            act16=1,
            group_loop=1,
            out_ch=WORD_BYTES * words - 1,
            out_ch_last=WORD_BYTES * last - 1,
            mult=mult,
            **clamps,
            **fields,
        )

    def l2(self, stage: L2Normalise) -> None:
        """The reciprocal square root of the sum of squares, times every channel."""
        b, c = self.b, self.chunk
        square, scale, product = stage.mults
        count = c.count * c.words
        self.to_rows(c.copy, [(1, count)], count, 0)
        load_spline(b, self.tiles, numerics.RSQRT.scaled(scale))
        self.op(
            1,
            [(WORD_BYTES, count)],
            [(WORD_BYTES, c.count)],
            [(ROW_UNITS, c.words), (ROW_UNITS * c.words, c.count)],
            start=c.copy,
            target=c.single,
            columns=1,
            in_zp=self.zero,
            w_zp=self.zero,
            nlu_en=1,
            nlu_range_reduce=1,
            out16=1,
            mult=square,
            clamp_min=square,
            clamp_max=inf,
        )
        nest = [(0, WORD_BYTES), (1, c.words), (c.words, c.count)]
        self.to_rows(c.copy, nest, c.count * c.rows, 2, transpose=1)
        self.products(product, lane_off=6, w_zp=self.zero)
