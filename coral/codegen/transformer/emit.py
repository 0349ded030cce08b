"""What the stages of a decoder are made of: ops, matrices, multipliers, vectors from tiles to tiles.

Source: docs/transformer.md, Stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from coral import isa
from coral.codegen import blocks
from coral.codegen.builder import Builder
from coral.codegen.machine import GROUP, ROW_BYTES, ROW_UNITS, WORD_BYTES, ceil_div, mask_of
from coral.codegen.network.words import table_fields
from coral.codegen.transformer.graph import LARGEST, ZERO
from coral.codegen.transformer.plan import Layout, Plan
from coral.isa import TileCounter, Wait, Walk
from coral.numerics import Spline

CODES = {"in_zp": ZERO, "w_zp": ZERO, "out_zp": ZERO, "clamp_min": float(-ZERO), "clamp_max": float(LARGEST)}
Nest = Sequence[tuple[int, int]]


def walk(address: int, nest: Nest, **fields: int) -> Walk:
    """A walk of (stride, count), innermost first."""
    return Walk(address, tuple(s for s, _ in nest), tuple(n for _, n in nest), **fields)


class Emitter:
    """Writes parts of stages for one position into a builder."""

    def __init__(self, b: Builder, plan: Plan, position: int) -> None:
        self.b, self.plan, self.position = b, plan, position
        self.g, self.positions = plan.g, position + 1
        self.quads = plan.g.quads(self.positions)
        self.groups = ceil_div(self.positions, GROUP)
        self.words = plan.g.head_size // WORD_BYTES

    # building blocks

    def table(self, tiles: int, spline: Spline) -> None:
        """Fill the non-linear unit; ordered among the ops."""
        self.b.emit(isa.NluLoad, tile_mask=tiles, **table_fields(spline))

    def op(
        self,
        tiles: int,
        loops: Sequence[int],
        inp: Walk,
        par: Walk,
        out: Walk,
        columns: int,
        *,
        reduce: int = 1,
        kind: type[isa.OpFormat] = isa.Op,
        **fields: Any,
    ) -> None:
        """One op; ``reduce``: the innermost loops that accumulate, as a bitmap."""
        settings: dict[str, Any] = {**CODES, "acc_chain": 1, "acc_init": 1, "group_loop": len(loops)} | fields
        self.b.emit(
            kind,
            tile_mask=tiles,
            loops=loops,
            inp=inp,
            par=par,
            out=out,
            psum=Walk(0, [0] * len(loops), loops, slot_level=reduce.bit_length(), slot_stride=ROW_UNITS),
            reduce_mask=reduce,
            out_ch=columns - 1,
            out_ch_last=columns - 1,
            **settings,
        )

    def spread_words(self, tiles: int, address: int, words: Nest, row: int) -> None:
        """Every word four times, each time to a row of its own from ``row`` on: its bytes in four equal columns."""
        count = math.prod(n for _, n in words)
        src = walk(address // WORD_BYTES, [(0, WORD_BYTES), *((s // WORD_BYTES, n) for s, n in words)])
        self.b.emit(isa.N2w, tile_mask=tiles, src=src, dst=Walk(row, [1], [count]), pack_level=1)

    def scaled(self, tiles: int, layout: Layout, which: int, mult: float) -> dict[str, Any]:
        """Fields of an op with a multiplier of its layer: in a loop, from a row that is loaded here."""
        if not self.plan.form.loop:
            return {"mult": mult}
        blocks.load_scaling(self.b, tiles, layout.constants + which, 1, scale=True, bias=False)
        return {"mult": 1.0, "scale_en": 1, "waits": [Wait(TileCounter.WIDE_TO_SCALING, 1, level=5)]}

    def fence_scaled(self) -> None:
        """Before an op whose scale may be on its way: its counter must survive the fence."""
        if self.plan.form.loop:
            self.b.drain()
        else:
            self.b.reset()

    def fc(
        self, tiles: int, row: int, x: int, steps: int, outputs: int, y: int, *, bias: bool = False, **fields: Any
    ) -> None:
        """A matrix whose rows begin at ``row`` times ``steps`` words at ``x``."""
        groups, header = ceil_div(outputs, GROUP), 1 + bias
        last = outputs - GROUP * (groups - 1)
        ready = self.b.count(TileCounter.WIDE_TO_SCALING, tiles) + 1
        blocks.load_scaling(self.b, tiles, row, groups, row_step=header, scale=True, bias=bias)
        columns = GROUP if groups > 1 else last
        short = {"last_dim": 1, "last_cnt": last // WORD_BYTES - 1} if last != columns else {}
        loops = [steps, groups]
        settings: dict[str, Any] = {**CODES, "acc_chain": 1, "acc_init": 1, "group_loop": 1, "mult": 1.0} | fields
        self.b.emit(
            isa.Op,
            tile_mask=tiles,
            loops=loops,
            inp=Walk(x, [WORD_BYTES, 0], loops),
            out=walk(y, [(WORD_BYTES, columns // WORD_BYTES), (GROUP, groups)], **short),
            par=Walk(ROW_UNITS * (row + groups * header), [ROW_UNITS, ROW_UNITS * steps], loops),
            psum=Walk(0, [0, 0], loops, slot_level=1, slot_stride=ROW_UNITS),
            sig_av=1,
            waits=[Wait(TileCounter.WIDE_TO_SCALING, ready, level=1)],
            reduce_mask=1,
            bias_en=int(bias),
            scale_en=1,
            out_ch=columns - 1,
            out_ch_last=last - 1,
            **settings,
        )

    # vectors from tiles to tiles

    def gather(self, senders: Sequence[tuple[int, int]], address: int, targets: Sequence[tuple[int, int]]) -> None:
        """(tile, bytes) pieces at ``address``, one behind the other, to (tiles, address) each."""
        b, plan = self.b, self.plan
        b.barrier()
        sizes = [size for _, size in senders]
        packets = sum(ceil_div(size, ROW_BYTES) for size in sizes)
        receivers = 0
        for tiles, target in targets:
            self.unpack(tiles, sizes, target)
            receivers |= tiles
        b.emit(isa.RingRecv0, tile_mask=receivers, dst=Walk(plan.arrivals, [1], [packets]), sig_dst=0)
        for size in dict.fromkeys(sizes):
            tiles, rows = mask_of(t for t, s in senders if s == size), ceil_div(size, ROW_BYTES)
            src = Walk(address // WORD_BYTES, [1], [size // WORD_BYTES])
            b.emit(isa.N2w, tile_mask=tiles, src=src, dst=Walk(plan.packed, [1], [rows]), sig_dst=1, pack_level=1)
        for tile, size in senders:
            order = b.count(TileCounter.RING_PRODUCER_A, 1 << tile)
            b.emit(
                isa.RingSend,
                tile_mask=1 << tile,
                src=Walk(plan.packed, [1], [ceil_div(size, ROW_BYTES)]),
                sig_ring=1,
                waits=[Wait(TileCounter.RING_PRODUCER_A, order, level=1), Wait(TileCounter.NARROW_TO_WIDE, 1, level=1)],
                dest_mask=receivers,
            )
        b.reset()

    def unpack(self, tiles: int, sizes: Sequence[int], address: int, first: int = 0, earlier: int = 0) -> None:
        """Pieces that arrive in rows, from the ``first``-th row on, to ``address``, one behind the other; ``earlier``:
        rows that the consumer stores before these."""
        row = first
        for size, run in groupby(sizes):
            count, packets = len(list(run)), ceil_div(size, ROW_BYTES)
            self.b.emit(
                isa.W2n,
                tile_mask=tiles,
                src=Walk(self.plan.arrivals + row, [1], [packets * count]),
                dst=walk(address // WORD_BYTES, [(1, size // WORD_BYTES), (size // WORD_BYTES, count)]),
                waits=[Wait(TileCounter.RING_READ_A, earlier + row + 1, level=0)],
                unpack_level=1,
            )
            row, address = row + packets * count, address + size * count
