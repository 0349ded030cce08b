"""Stages that take four channels at a time: constants in wide memory, one op. Source: docs/network.md, Products."""

from __future__ import annotations

import numpy as np

from coral import isa
from coral.codegen import blocks
from coral.codegen.builder import OP_UNIT, Builder, counter_mask
from coral.codegen.machine import ROW_UNITS, WORD_BYTES
from coral.codegen.network.emit import Placed, levels, output_stage, placed
from coral.codegen.network.graph import Add, AveragePool, Multiply, Requantise, Stage
from coral.codegen.network.places import factors
from coral.codegen.network.plan import Plan
from coral.codegen.network.products import MAX_LOOP, Level, merge
from coral.codegen.network.scratch import FIXED_ROW
from coral.codegen.network.wide import Wide, add_rows, add_zero, identity_rows, selection_rows
from coral.isa import TileCounter, Wait, Walk
from coral.numerics import Spline

NLU_MODE = 3
MAX_DEPTH = 16
"""Wide rows per slot of the FIFO through which a factor goes."""


def word_levels(plan: Plan, name: str, stage: Stage) -> list[Level]:
    """Words of a tensor at the positions that a tile owns of a stage's output, of all images."""
    block = plan.blocks[name]
    words = plan.channels(name) // WORD_BYTES
    (rows, columns), (sy, sx) = plan.splits[stage.output], (1, 1) if name == stage.output else stage.window.stride
    nest = [(WORD_BYTES, words), (sx * block.position, columns.extent), (sy * block.row, rows.extent)]
    return [*nest, (block.image, plan.images)]


def _word_op(
    b: Builder,
    plan: Plan,
    stage: Stage,
    starts: Placed,
    inner: list[Level],
    weights: tuple[int, list[Level]],
    **fields: float,
) -> None:
    """One word of results per ``inner`` loops; on a vector over all tiles, each tile's words."""
    if stage.output in plan.spread:
        (address,) = starts
        for words, tiles in plan.spread_words(stage.output).items():
            nest = [(WORD_BYTES, words)]
            _one_word_op(b, plan, stage, address, tiles, inner, (nest, nest), weights, **fields)
        return
    nests = word_levels(plan, stage.inputs[0], stage), word_levels(plan, stage.output, stage)
    for address, tiles in starts.items():
        _one_word_op(b, plan, stage, address, tiles, inner, nests, weights, **fields)


def _one_word_op(
    b: Builder,
    plan: Plan,
    stage: Stage,
    address: int,
    tiles: int,
    inner: list[Level],
    nests: tuple[list[Level], list[Level]],
    weights: tuple[int, list[Level]],
    **fields: float,
) -> None:
    where = f"stage {stage.output!r}"
    reads, writes = nests
    loops = [n for _, n in inner]
    outer = [n for _, n in merge(reads, MAX_LOOP)]
    full = [*loops, *outer]
    row, strides = weights
    blocks.word_op(
        b,
        tiles,
        full,
        inp=levels(address, [*inner, *reads], where),
        out=levels(plan.own(stage.output), writes, where),
        par=levels(ROW_UNITS * row, [*strides, *((0, n) for n in outer)], where),
        psum=Walk(0, [0] * len(full), full, slot_level=max(len(loops), 1), slot_stride=ROW_UNITS if loops else 0),
        acc_chain=int(bool(loops)),
        reduce_mask=(1 << len(loops)) - 1,
        **{**output_stage(plan, stage), **fields},
    )


def add(b: Builder, plan: Plan, wide: Wide, stage: Add) -> None:
    """ADD and SUB: 16-bit weights on the halves of a word, first operand, then second."""
    first, second = stage.inputs
    starts, others = placed(plan, stage, first), placed(plan, stage, second)
    for one, tiles in starts.items():
        for two, same in others.items():
            if tiles & same:
                _word_op(
                    b,
                    plan,
                    stage,
                    {one: tiles & same},
                    [(2, 2), (two - one, 2)],
                    (wide.constant(add_rows(stage)), [(ROW_UNITS, 4)]),
                    par16=1,
                    in_zp=0,
                    w_zp=add_zero(stage),
                    mult=stage.mult,
                    acc_offset=stage.offset,
                )


def requantise(b: Builder, plan: Plan, wide: Wide, stage: Requantise) -> None:
    """Clamps, multiplier, spline on every word."""
    starts = placed(plan, stage, stage.inputs[0])
    if stage.spline is not None:
        load_spline(b, sum(starts.values()), stage.spline)
    fields = {"nlu_en": int(stage.spline is not None), "acc_offset": stage.offset, "mult": stage.mult}
    if stage.spline is not None and stage.spline.odd:
        fields["nlu_odd"] = 3
    _word_op(b, plan, stage, starts, [], (wide.constant(identity_rows()), []), **fields)


def average(b: Builder, plan: Plan, wide: Wide, stage: AveragePool) -> None:
    """Sums over windows, four channels at a time."""
    (name,) = stage.inputs
    a, (kh, kw), (dy, dx) = plan.blocks[name], stage.window.kernel, stage.window.dilation
    _word_op(
        b,
        plan,
        stage,
        placed(plan, stage, name),
        [(dx * a.position, kw), (dy * a.row, kh)],
        (wide.constant(identity_rows()), [(0, kw), (0, kh)]),
        mult=stage.mult,
    )


def load_spline(b: Builder, tiles: int, spline: Spline) -> None:
    """Fill the table of the non-linear unit."""
    b.fence(counter_mask((TileCounter.PARTIAL_SUMS,)), units=OP_UNIT)
    b.emit(isa.NluLoad, tile_mask=tiles, **table_fields(spline))


def table_fields(spline: Spline) -> dict[str, float]:
    """Fields of an instruction that loads a table."""
    table = {f"c{s}_{power}": float(c) for s, row in enumerate(spline.coefficients) for power, c in enumerate(row)}
    table |= {f"brk{k}": float(x) for k, x in enumerate(spline.breakpoints)}
    return {"table_mode": NLU_MODE, **table}


def multiply(b: Builder, plan: Plan, wide: Wide, stage: Multiply) -> None:
    """Each word of the second factor becomes a diagonal matrix in a row of wide memory; then one step per word.

    An op spreads the word's bytes over four words (the zero point elsewhere), which fill the row.
    """
    first, second = stage.inputs
    z = plan.tensors[second].zero_point
    starts, others = placed(plan, stage, first), placed(plan, stage, second)
    temporary = plan.own(factors(stage))
    reads = word_levels(plan, second, stage)
    count = int(np.prod([n for _, n in reads]))
    depth = max(d for d in range(1, MAX_DEPTH + 1) if count % d == 0)
    where = f"product {stage.output!r}"
    fifo = FIXED_ROW - 2 * depth
    outer = [n for _, n in merge(reads, MAX_LOOP)]
    for address, tiles in others.items():
        loops = [WORD_BYTES, *outer]
        blocks.word_op(
            b,
            tiles,
            loops,
            inp=levels(address, [(0, WORD_BYTES), *reads], where),
            out=levels(temporary, [(WORD_BYTES, WORD_BYTES * count)], where),
            par=levels(
                ROW_UNITS * wide.constant(selection_rows()), [(ROW_UNITS, WORD_BYTES), *((0, n) for n in outer)], where
            ),
            in_zp=z,
            out_zp=z,
            clamp_min=float(-z),
            clamp_max=float(255 - z),
        )
    b.drain()
    everywhere = sum(starts.values())
    passes = [depth, count // depth]
    ready = b.count(TileCounter.NARROW_TO_WIDE, everywhere) + 1
    free = b.count(TileCounter.PARAMETERS, everywhere) - 1
    b.emit(
        isa.N2w,
        tile_mask=everywhere,
        src=Walk(temporary // WORD_BYTES, [1, WORD_BYTES], [WORD_BYTES, count]),
        dst=Walk(fifo, [1, 0], passes, slot_level=1, slot_stride=depth),
        sig_dst=1,
        waits=[Wait(TileCounter.PARAMETERS, free, level=1, side=1)],
        pack_level=1,
    )
    for address, tiles in starts.items():
        blocks.word_op(
            b,
            tiles,
            passes,
            inp=levels(address, word_levels(plan, first, stage), where),
            out=levels(plan.own(stage.output), word_levels(plan, stage.output, stage), where),
            par=Walk(ROW_UNITS * fifo, [ROW_UNITS, 0], passes, slot_level=1, slot_stride=ROW_UNITS * depth),
            sig_par=1,
            waits=[Wait(TileCounter.NARROW_TO_WIDE, ready, level=1)],
            w_zp=z,
            mult=stage.mult,
            **output_stage(plan, stage),
        )
