"""Instructions of the stages of a layer. Source: docs/transformer.md, Stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from coral import isa
from coral.codegen.machine import GROUP, ROW_UNITS, WORD_BYTES, ceil_div, mask_of, round_up
from coral.codegen.transformer import model as bits
from coral.codegen.transformer import tables
from coral.codegen.transformer.emit import Emitter, walk
from coral.codegen.transformer.graph import ONE_COLUMNS, Block, Gate
from coral.codegen.transformer.plan import Layout, Share
from coral.isa import Walk
from coral.numerics import EXP_CLAMP, LOGISTIC_CLAMP

IDENTITY_ROW, SIGN_ROW, SELECTION_ROW = 0, 1, 3
"""Rows of the constants: identity; weights 1 and -1 with zero point 1; byte c of a word to column c."""
RAW: dict[str, Any] = {"in_zp": 0, "w_zp": 0, "out_zp": 0, "clamp_min": -math.inf, "clamp_max": math.inf, "mult": 1.0}


def alike(shares: Iterable[Share]) -> list[tuple[int, int, int]]:
    """(tiles, row, count) of shares that differ in nothing but their tiles."""
    found: dict[tuple[int, int], int] = {}
    for s in shares:
        found[s.row, s.count] = found.get((s.row, s.count), 0) | 1 << s.tile
    return [(tiles, row, count) for (row, count), tiles in found.items()]


class Stages(Emitter):
    """Writes the stages for one position into a builder."""

    def norm(self, tiles: int, x: int) -> None:
        """RMSNorm without gain of the vector at ``x``."""
        b, p, words = self.b, self.plan, self.g.dim // WORD_BYTES
        rows, width = p.norm_rows, words // p.norm_rows
        transposed = p.scratch + words
        self.table(tiles, tables.RSQRT_65535)
        self.spread_words(tiles, x, [(WORD_BYTES, words)], p.scratch)
        src = walk(x // WORD_BYTES, [(1, width), (width, rows)])
        b.emit(isa.N2w, tile_mask=tiles, src=src, dst=Walk(transposed, [1], [rows]), pack_level=1, transpose=1)
        b.reset()
        self.op(
            tiles,
            [words],
            walk(x, [(WORD_BYTES, words)]),
            walk(ROW_UNITS * p.scratch, [(ROW_UNITS, words)]),
            walk(p.root, [(WORD_BYTES, 2)]),
            WORD_BYTES,
            nlu_en=1,
            nlu_range_reduce=1,
            out16=1,
            out_zp=0,
            mult=bits.mean_multiplier(self.g.dim),
            clamp_min=1.0,
            clamp_max=math.inf,
        )
        b.reset()
        self.op(
            tiles,
            [1, 4, rows],
            walk(p.root, [(2, 1), (0, 4), (0, rows)]),
            walk(ROW_UNITS * transposed, [(ROW_UNITS, 1), (1, 4), (ROW_UNITS, rows)]),
            walk(p.normal, [(16, width // 4), (WORD_BYTES, 4), (WORD_BYTES * width, rows)]),
            width,
            act16=1,
            lane_off=6,
            in_zp=0,
            mult=p.model.norm,
        )
        b.reset()

    def project(self, layout: Layout) -> None:
        """Queries, keys and values of the new position; the last go to their place in the cache."""
        p, steps = self.plan, self.g.dim // WORD_BYTES
        constants = 3 * p.form.loop
        behind = p.head_rows - constants - ceil_div(p.v_bytes, GROUP) * (2 + steps)
        groups = alike(layout.heads)
        for tiles, row, _ in groups:
            self.fc(tiles, row + constants, p.normal, steps, p.qk_outputs, p.qk)
        self.b.reset()
        slot = p.values + p.v_pitch * layout.local + p.v_bytes * self.position
        for tiles, row, _ in groups:
            self.fc(tiles, row + constants + behind, p.normal, steps, p.v_bytes, slot, bias=True)
        self.b.reset()

    def turn(self, tiles: int, layout: Layout) -> None:
        """Rotary embedding; keys go to their place in the cache."""
        p, size = self.plan, self.g.head_size
        slot = p.keys + p.k_pitch * layout.local + p.k_bytes * self.position
        for x, y, heads in ((p.qk, p.q, p.heads), (p.qk + p.heads * size, slot, p.kv_heads)):
            self.op(
                tiles,
                [self.words, heads],
                walk(x, [(WORD_BYTES, self.words), (size, heads)]),
                walk(ROW_UNITS * p.rotation, [(ROW_UNITS, self.words), (0, heads)]),
                walk(y, [(WORD_BYTES, self.words), (size, heads)]),
                size,
                mult=bits.ROTATION_MULTIPLIER,
            )
        self.b.reset()

    def rows(self, tiles: int, local: int, *, groups: tuple[int, int], quads: tuple[int, int]) -> None:
        """Keys and values of some (first, count) groups of 64 and of four positions become rows of weights."""
        p, heads = self.plan, self.plan.kv_heads
        words, first, count = self.words, *groups
        width = p.k_bytes // WORD_BYTES
        src = (p.keys + p.k_pitch * local) // WORD_BYTES + GROUP * width * first
        self.b.emit(
            isa.N2w,
            tile_mask=tiles,
            src=walk(src, [(width, GROUP), (1, words), (GROUP * width, count), (words, heads)]),
            dst=walk(p.key_row(local) + words * first, [(1, words), (words, count), (p.k_rows_per_head, heads)]),
            pack_level=1,
        )
        first, count = quads
        width, channels = p.v_bytes // WORD_BYTES, (self.g.head_size + ONE_COLUMNS) // WORD_BYTES
        src = (p.values + p.v_pitch * local) // WORD_BYTES + 4 * width * first
        one = ONE_COLUMNS // WORD_BYTES
        parts = [(0, one, 0), (one, channels - one, p.channel_row)] if p.split_values else [(0, channels, 0)]
        for skipped, taken, row in parts:
            self.b.emit(
                isa.N2w,
                tile_mask=tiles,
                src=walk(src + skipped, [(width, 4), (1, taken), (4 * width, count), (channels, heads)]),
                dst=walk(p.value_row(local) + row + first, [(1, count), (p.v_rows_per_head, heads)]),
                pack_level=2,
                transpose=1,
            )

    def score(self, tiles: int, layout: Layout, mult: float) -> None:
        """Queries times keys, for groups of 64 positions; queries that share a key head read the same rows."""
        p, size, words = self.plan, self.g.head_size, self.words
        if p.append:
            self.rows(tiles, layout.local, groups=(self.position // GROUP, 1), quads=(self.position // 4, 1))
        else:
            self.rows(tiles, layout.local, groups=(0, self.groups), quads=(0, self.quads))
        fields = self.scaled(tiles, layout, 0, mult)
        self.fence_scaled()
        loops = [words, p.group, p.kv_heads, self.groups]
        rows = ROW_UNITS * p.k_rows_per_head
        self.op(
            tiles,
            loops,
            walk(p.q, [(WORD_BYTES, words), (size, p.group), (size * p.group, p.kv_heads), (0, self.groups)]),
            walk(
                ROW_UNITS * p.key_row(layout.local),
                [(ROW_UNITS, words), (0, p.group), (rows, p.kv_heads), (ROW_UNITS * words, self.groups)],
            ),
            walk(
                p.scores,
                [
                    (WORD_BYTES, GROUP // WORD_BYTES),
                    (p.pitch, p.group),
                    (p.pitch * p.group, p.kv_heads),
                    (GROUP, self.groups),
                ],
            ),
            GROUP,
            **fields,
        )
        self.b.reset()

    def softmax(self, tiles: int, layout: Layout, mult: float) -> None:
        """Exponentials of scores less their maximum, 255 for the largest."""
        p, b, heads, quads = self.plan, self.b, self.plan.heads, self.quads
        self.spread_words(tiles, p.scores, [(WORD_BYTES, quads), (p.pitch, heads)], p.scratch)
        b.reset()
        rest = self.positions % 4
        short = {"last_dim": 1, "last_cnt": rest - 1} if rest else {}
        loop = {"loop_last_dim": 1, "loop_last_cnt": rest - 1} if rest else {}
        self.op(
            tiles,
            [4, quads, heads],
            Walk(0),
            walk(ROW_UNITS * p.scratch, [(1, 4), (ROW_UNITS, quads), (ROW_UNITS * quads, heads)], **short),
            walk(p.largest, [(WORD_BYTES, 1), (WORD_BYTES, heads)]),
            WORD_BYTES,
            reduce=3,
            kind=isa.OpMax,
            **RAW,
            **loop,
        )
        b.reset()
        self.table(tiles, tables.EXP_255)
        fields = self.scaled(tiles, layout, 1, mult)
        every = [(WORD_BYTES, quads), (p.pitch, heads)]
        self.op(
            tiles,
            [1, quads, heads],
            walk(p.largest, [(WORD_BYTES, 1), (0, quads), (WORD_BYTES, heads)]),
            walk(ROW_UNITS * IDENTITY_ROW, [(0, 1), (0, quads), (0, heads)]),
            walk(p.maxima, every),
            WORD_BYTES,
            **RAW,
        )
        self.fence_scaled()
        self.op(
            tiles,
            [2, quads, heads],
            walk(p.scores, [(p.maxima - p.scores, 2), *every]),
            walk(ROW_UNITS * SIGN_ROW, [(ROW_UNITS, 2), (0, quads), (0, heads)]),
            walk(p.exps, every),
            WORD_BYTES,
            **({"nlu_en": 1, "in_zp": 0, "w_zp": 1, "out_zp": 0, "clamp_min": EXP_CLAMP, "clamp_max": 0.0} | fields),
        )
        b.reset()

    def weigh(self, tiles: int, layout: Layout) -> None:
        """Weighted sums of values, the inverse sum of weights, their product."""
        p, b, size, heads = self.plan, self.b, self.g.head_size, self.plan.heads
        own = p.model.own_tables
        self.table(tiles, tables.reciprocal(self.g.context) if own else tables.RSQRT_32767)
        loops = [self.quads, p.group, p.kv_heads]
        reads = walk(p.exps, [(WORD_BYTES, self.quads), (p.pitch, p.group), (p.pitch * p.group, p.kv_heads)])
        nest = [(ROW_UNITS, self.quads), (0, p.group), (ROW_UNITS * p.v_rows_per_head, p.kv_heads)]
        ones, values = (walk(ROW_UNITS * (p.value_row(layout.local) + r), nest) for r in (0, p.channel_row))
        skipped = 0 if p.split_values else ONE_COLUMNS
        columns = size + skipped
        nest = [(WORD_BYTES, columns // 2), (2 * columns, heads)]
        self.op(
            tiles,
            loops,
            reads,
            values,
            walk(p.numerators, nest),
            columns,
            in_zp=0,
            out16=1,
            out_zp=bits.ZERO_16,
            clamp_min=float(-bits.ZERO_16),
            clamp_max=float(bits.ZERO_16 - 1),
            mult=bits.numerator_multiplier(self.positions),
        )
        self.op(
            tiles,
            loops,
            reads,
            ones,
            walk(p.inverses, [(WORD_BYTES, 2), (2 * ONE_COLUMNS, heads)]),
            ONE_COLUMNS,
            in_zp=0,
            out16=1,
            out_zp=0,
            nlu_en=1,
            nlu_range_reduce=int(not own),
            clamp_min=1.0,
            clamp_max=float(self.g.context),
            mult=bits.DENOMINATOR_MULTIPLIER,
        )
        b.reset()
        src = walk(p.numerators // WORD_BYTES + skipped // 2, [(1, size // 2), (columns // 2, heads)])
        b.emit(isa.N2w, tile_mask=tiles, src=src, dst=Walk(p.numerator_rows, [1], [heads]), pack_level=1)
        if not own:
            self.square(tiles)
        b.reset()
        self.op(
            tiles,
            [1, 2, heads],
            walk(p.squares, [(2, 1), (0, 2), (2 * ONE_COLUMNS, heads)]),
            walk(ROW_UNITS * p.numerator_rows, [(ROW_UNITS, 1), (2, 2), (ROW_UNITS, heads)]),
            walk(p.own_attended, [(WORD_BYTES, size // 8), (size // 2, 2), (size, heads)]),
            size // 2,
            act16=1,
            par16=1,
            in_zp=0,
            w_zp=bits.ZERO_16,
            mult=bits.attention_multiplier(self.positions),
        )
        b.reset()

    def square(self, tiles: int) -> None:
        """The inverse of a sum from its inverse root, 16 x 16 bits; by rows, as the numerators."""
        p, heads = self.plan, self.plan.heads
        src = walk(p.inverses // WORD_BYTES, [(1, ONE_COLUMNS // 2), (ONE_COLUMNS // 2, heads)])
        self.b.emit(isa.N2w, tile_mask=tiles, src=src, dst=Walk(p.scratch, [1], [heads]), pack_level=1)
        self.b.reset()
        self.op(
            tiles,
            [1, heads],
            walk(p.inverses, [(2, 1), (2 * ONE_COLUMNS, heads)]),
            walk(ROW_UNITS * p.scratch, [(ROW_UNITS, 1), (ROW_UNITS, heads)]),
            walk(p.squares, [(WORD_BYTES, 1), (2 * ONE_COLUMNS, heads)]),
            ONE_COLUMNS // 2,
            act16=1,
            par16=1,
            out16=1,
            **{**RAW, "clamp_min": 0.0, "clamp_max": float(tables.LARGEST), "mult": bits.SQUARE_MULTIPLIER},
        )

    def feed_forward(self, tiles: int, layout: Layout, block: Block) -> None:
        """SiLU(w1 x) * (w3 x) on a tile's hidden units."""
        p, b, steps = self.plan, self.b, self.g.dim // WORD_BYTES
        groups = alike(layout.ffn)
        sizes = {count: mask_of(s.tile for s in layout.ffn if s.count == count) for _, _, count in groups}
        limits: dict[str, Any] = {}
        if block.gate is None:
            self.table(tiles, tables.silu(p.model.silu))
            limits = {"nlu_en": 1, "clamp_min": -tables.SILU_LIMIT, "clamp_max": tables.SILU_LIMIT}
        for same, row, count in groups:
            self.fc(same, row, p.normal, steps, count, p.silu if block.gate is None else p.h3, **limits)
        b.reset()
        if block.gate is not None:
            self.gate(tiles, sizes, block.gate)
        for same, row, count in groups:
            self.fc(same, row + p.ffn_rows(count) // 2, p.normal, steps, count, p.h3)
        self.diagonals(sizes, p.silu)
        b.reset()
        self.diagonal_rows(sizes)
        fields = self.scaled(tiles, layout, 2, block.product)
        self.fence_scaled()
        self.times_diagonals(sizes, p.h3, p.own_product, **fields)
        b.reset()

    def gate(self, tiles: int, sizes: dict[int, int], gate: Gate) -> None:
        """h to h * LOGISTIC(h); the logistic values lie where the product of the whole stage will."""
        p = self.plan
        self.table(tiles, tables.LOGISTIC_256)
        limits: dict[str, Any] = {"clamp_min": -LOGISTIC_CLAMP, "clamp_max": LOGISTIC_CLAMP}
        for count, same in sizes.items():
            nest = [(WORD_BYTES, 1), (WORD_BYTES, count // WORD_BYTES)]
            self.op(
                same,
                [1, count // WORD_BYTES],
                walk(p.h3, nest),
                walk(ROW_UNITS * IDENTITY_ROW, [(0, n) for _, n in nest]),
                walk(p.own_product, nest[1:]),
                WORD_BYTES,
                w_zp=0,
                out_zp=0,
                nlu_en=1,
                mult=gate.step,
                **limits,
            )
        self.diagonals(sizes, p.h3)
        self.b.reset()
        self.diagonal_rows(sizes)
        self.b.reset()
        self.times_diagonals(sizes, p.own_product, p.silu, in_zp=0, mult=gate.product)
        self.b.reset()

    def diagonals(self, sizes: dict[int, int], address: int) -> None:
        """Every byte of a vector to a word of its own, in its place of the word, zeros beside it."""
        p = self.plan
        for count, same in sizes.items():
            words = count // WORD_BYTES
            self.op(
                same,
                [1, 4, words],
                walk(address, [(WORD_BYTES, 1), (0, 4), (WORD_BYTES, words)]),
                walk(ROW_UNITS * SELECTION_ROW, [(ROW_UNITS, 1), (ROW_UNITS, 4), (0, words)]),
                walk(p.diagonal, [(WORD_BYTES, 4 * words)]),
                WORD_BYTES,
                w_zp=0,
                mult=1.0,
            )

    def diagonal_rows(self, sizes: dict[int, int]) -> None:
        """``diagonals`` as rows, one for four bytes."""
        p, b = self.plan, self.b
        for count, same in sizes.items():
            src = walk(p.diagonal // WORD_BYTES, [(1, 4), (4, count // WORD_BYTES)])
            b.emit(isa.N2w, tile_mask=same, src=src, dst=Walk(p.scratch, [1], [count // WORD_BYTES]), pack_level=1)

    def times_diagonals(self, sizes: dict[int, int], x: int, y: int, **fields: Any) -> None:
        """A vector times the one in ``diagonal_rows``."""
        p = self.plan
        for count, same in sizes.items():
            words = count // WORD_BYTES
            nest = [(WORD_BYTES, 1), (WORD_BYTES, words)]
            rows = walk(ROW_UNITS * p.scratch, [(ROW_UNITS, 1), (ROW_UNITS, words)])
            self.op(same, [1, words], walk(x, nest), rows, walk(y, [(WORD_BYTES, words)]), WORD_BYTES, **fields)

    def outputs(self, layout: Layout, offset: int, x: int, inputs: int, y: int) -> None:
        """wo or w2 on a tile's outputs, residual included; ``offset``: rows of the matrix behind the share's first."""
        for tiles, row, count in alike(layout.outputs):
            self.fc(tiles, row + offset, x, (inputs + count) // WORD_BYTES, count, y)
        self.b.reset()

    def layer(self, index: int) -> None:
        """All stages of a layer but the exchange of its result."""
        for _ in self.stages(index):
            pass

    def stages(self, index: int) -> Iterator[tuple[str, ...]]:
        """Emits the stages of a layer; after each, the buffers that are now complete (names as in ``Plan.held``)."""
        p, g, block, layout = self.plan, self.g, self.plan.model.blocks[index], self.plan.layouts[index]
        heads, outs, ffn = (mask_of(s.tile for s in shares) for shares in (layout.heads, layout.outputs, layout.ffn))
        self.norm(heads, p.x)
        yield ("normal",)
        self.project(layout)
        yield "qk", "v"
        self.turn(heads, layout)
        yield "q", "k"
        self.score(heads, layout, block.score)
        yield ("scores",)
        self.softmax(heads, layout, block.exp)
        yield ("weights",)
        self.weigh(heads, layout)
        yield ("attention",)
        if p.spread:
            self.gather([(s.tile, s.count * g.head_size) for s in layout.heads], p.own_attended, [(outs, p.attended)])
        self.outputs(layout, 0, p.attended, g.dim, p.x2_share)
        yield ("x2",)
        if p.spread:
            self.gather([(s.tile, s.count) for s in layout.outputs], p.x2_share, [(ffn, p.x2)])
        self.norm(ffn, p.x2)
        yield ("normal2",)
        self.feed_forward(ffn, layout, block)
        yield "a", "h3", "m"
        if p.spread:
            self.gather([(s.tile, s.count) for s in layout.ffn], p.own_product, [(outs, p.product)])
        self.outputs(layout, p.wo_rows, p.product, g.hidden, p.x_share)
        yield ("y",)

    def hand_over(self, index: int, tiles: int) -> None:
        """A layer's result to where the next one normalises it."""
        layout, p = self.plan.layouts[index], self.plan
        self.gather([(s.tile, s.count) for s in layout.outputs], p.x_share, [(tiles, p.x)])

    def classify(self) -> None:
        """Codes of logits on all tiles, from the last layer's result, which every tile has."""
        p, size = self.plan, GROUP * self.plan.logit_groups
        head = p.model.classifier
        assert head is not None
        counts: dict[int, int] = {}
        for t in range(ceil_div(len(head.weights), size)):
            count = min(size, len(head.weights) - t * size)
            counts[count] = counts.get(count, 0) | 1 << t
        self.norm(sum(counts.values()), p.x)
        for count, tiles in counts.items():
            self.fc(tiles, p.logit_row, p.normal, self.g.dim // WORD_BYTES, round_up(count, WORD_BYTES), p.logits)
        self.b.reset()
