"""Recipes that all programs are built from: host streams, ring transfers, wide/narrow moves, mesh relays.

Every function emits a few instructions on a Builder; thresholds come from the builder's counters. Rows are 256-byte
rows of wide memory, words are 4-byte words of narrow memory. Source: docs/codegen.md, section Recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coral import isa
from coral.codegen.builder import Builder, mesh_counters
from coral.codegen.machine import (
    ALL_TILES,
    BIAS_ENTRY,
    GROUP,
    INPUT_STAGING_UNITS,
    INPUT_UNIT_BYTES,
    OUTPUT_FIFO_ROW,
    PARAMETER_STAGING_UNITS,
    PARAMETER_UNIT_BYTES,
    ROW_BYTES,
    ROW_UNITS,
    ROW_WORDS,
    SCALAR_CORE,
    WIDE_ROWS,
    WORD_BYTES,
    ceil_div,
)
from coral.isa import ScalarCounter, TileCounter, Wait, Walk, signed16

RELAY_WORDS = 4
"""Words per slot of a relay's two-slot buffer; RELAY_BYTES is the whole buffer."""
RELAY_BYTES = 2 * RELAY_WORDS * WORD_BYTES


# host streams


def _staging(first_unit: int, units: int, half: int) -> Walk:
    """Walk over a staging buffer of two halves, the last pass as long as what is left."""
    if units == 1:
        return Walk(first_unit, [1], [1], slot_level=1, slot_stride=half)
    passes = ceil_div(units, half)
    left = units - (passes - 1) * half
    shortened = {"last_dim": 1, "last_cnt": left - 1} if left != half else {}
    return Walk(first_unit, [1, 0], [half, passes], slot_level=1, slot_stride=half, **shortened)


def pop_input(b: Builder, size_bytes: int) -> None:
    """Scalar core takes ``size_bytes`` (multiple of 8) of the input stream into staging, as far as credit goes."""
    b.emit(
        isa.Pop,
        stream=1,
        buf=_staging(0, size_bytes // INPUT_UNIT_BYTES, INPUT_STAGING_UNITS),
        sig_pop=0,
        waits=[Wait(ScalarCounter.AVDATA_INFEED, 0)],
    )


def pop_parameters(b: Builder, size_bytes: int) -> None:
    """As ``pop_input`` for a caching program's parameters (multiple of 64 bytes)."""
    units = size_bytes // PARAMETER_UNIT_BYTES
    b.emit(
        isa.Pop,
        stream=0,
        buf=_staging(0, units, PARAMETER_STAGING_UNITS),
        sig_pop=0,
        waits=[Wait(ScalarCounter.PARAMETER_INFEED, 1 - min(units, 2 * PARAMETER_STAGING_UNITS))],
    )


def infeed_input(b: Builder, offset_bytes: int, size_bytes: int, tiles: int) -> None:
    """Send staged input bytes as packets to ring consumer 0 of ``tiles``."""
    first = offset_bytes // INPUT_UNIT_BYTES
    b.emit(
        isa.Infeed,
        stream=1,
        buf=_staging(first % (2 * INPUT_STAGING_UNITS), size_bytes // INPUT_UNIT_BYTES, INPUT_STAGING_UNITS),
        sig_infeed=0,
        waits=[Wait(ScalarCounter.AVDATA_POP, signed16(first + 1))],
        dest_mask=tiles,
        lane_words=15,
        lanes=3,
    )


def infeed_parameters(b: Builder, offset_bytes: int, size_bytes: int, tiles: int, lanes: int) -> None:
    """Send staged parameter bytes to ``tiles``; one packet is ``lanes`` staging units and fills one row."""
    first = offset_bytes // PARAMETER_UNIT_BYTES
    units = size_bytes // PARAMETER_UNIT_BYTES
    b.emit(
        isa.Infeed,
        stream=0,
        buf=_staging(first % (2 * PARAMETER_STAGING_UNITS), units, PARAMETER_STAGING_UNITS),
        sig_infeed=0,
        waits=[Wait(ScalarCounter.PARAMETER_POP, signed16(first + 1))],
        dest_mask=tiles,
        lane_words=15,
        lanes=lanes - 1,
    )


def load_rows(b: Builder, pieces: Sequence[tuple[int, int, int]]) -> None:
    """All of a caching program but its end: whole rows, as (tiles, first row, rows), in the order of the stream."""
    total = ROW_BYTES * sum(rows for *_, rows in pieces)
    b.prologue()
    b.parameter_dma(total)
    pop_parameters(b, total)
    for tiles, row, rows in pieces:
        b.emit(isa.RingRecv0, tile_mask=tiles, dst=Walk(row, [1], [rows]))
    offset = 0
    for tiles, _, rows in pieces:
        infeed_parameters(b, offset, rows * ROW_BYTES, tiles, ROW_UNITS)
        offset += rows * ROW_BYTES


def outfeed(b: Builder, size_bytes: int) -> None:
    """Scalar core passes the next packets, ``size_bytes`` (multiple of 8), to the host's output DMA."""
    units = size_bytes // INPUT_UNIT_BYTES
    walk = Walk(0, [1 if units == 1 else 0], [units], nz_mask=0)
    b.emit(isa.Outfeed, dst=walk, sig_outfeed=1, to_host=1)


# packets between tiles


def _packets(row: int, packets: int) -> tuple[Walk, int]:
    """Two-row FIFO taken row by row, and the level of one row: a single packet counts as the whole walk."""
    if packets == 1:
        return Walk(row, [1], [1], slot_level=1, slot_stride=1, nz_mask=0), 1
    return Walk(row, [0], [packets], slot_level=0, slot_stride=1), 0


def _linear(word: int, words: int) -> Walk:
    return Walk(word, [1], [words], nz_mask=int(words > 1))


def pack(b: Builder, tiles: int, word: int, size_bytes: int, row: int = OUTPUT_FIFO_ROW) -> None:
    """N2w: narrow bytes from ``word`` on, into the FIFO at ``row``, for the ring."""
    pack_walk(b, tiles, _linear(word, ceil_div(size_bytes, WORD_BYTES)), row)


def pack_walk(b: Builder, tiles: int, words: Walk, row: int = OUTPUT_FIFO_ROW, sent: int | None = None) -> None:
    """N2w of the words of a walk, packed without gaps, into the FIFO at ``row``, for the ring. ``sent``: rows that the
    ring has read before; None: as many as were packed.
    """
    dst, level = _packets(row, ceil_div(words.steps, ROW_WORDS))
    free = (b.count(TileCounter.NARROW_TO_WIDE, tiles) if sent is None else sent) - 1
    b.emit(
        isa.N2w,
        tile_mask=tiles,
        src=words,
        dst=dst,
        sig_dst=level,
        waits=[Wait(TileCounter.RING_WRITE, free, level=level, side=1)],
        pack_level=len(words.counts),
    )


def ring_send(
    b: Builder,
    tiles: int,
    size_bytes: int,
    dest: int = SCALAR_CORE,
    row: int = OUTPUT_FIFO_ROW,
    *,
    ordered: bool = True,
    turn: int | None = None,
) -> None:
    """Send the FIFO that ``pack`` fills. ``ordered``: in program order among the ring's senders; ``turn``: the
    threshold of that order (``Builder.turns``), where several tiles may send what they packed last.
    """
    packets, first = ceil_div(size_bytes, ROW_BYTES), b.count(TileCounter.RING_WRITE, tiles) + 1
    if turn is None:
        turn = b.count(TileCounter.RING_PRODUCER_A, tiles)
    else:
        first = b.count(TileCounter.NARROW_TO_WIDE, tiles) + 1 - packets
    order = Wait(TileCounter.RING_PRODUCER_A, turn, level=2)
    data = Wait(TileCounter.NARROW_TO_WIDE, first, level=1)
    b.emit(
        isa.RingSend,
        tile_mask=tiles,
        src=Walk(row, [1, 0], [1, packets], slot_level=1, slot_stride=1),
        sig_src=1 if ordered else 0,
        sig_ring=2 if ordered else None,
        waits=[order, data] if ordered else [data],
        dest_mask=dest,
    )


def ring_receive(b: Builder, tiles: int, word: int, size_bytes: int, row: int) -> None:
    """Take the packets of one sender and unpack them to narrow memory at ``word``."""
    packets = ceil_div(size_bytes, ROW_BYTES)
    walk, level = _packets(row, packets)
    arrived = b.count(TileCounter.RING_READ_A, tiles) + 1
    free = b.count(TileCounter.WIDE_TO_NARROW, tiles) - ROW_WORDS
    b.emit(
        isa.W2n,
        tile_mask=tiles,
        src=walk,
        dst=_linear(word, ceil_div(size_bytes, WORD_BYTES)),
        sig_dst=0,
        waits=[Wait(TileCounter.RING_READ_A, arrived, level=level)],
        unpack_level=1,
    )
    b.emit(
        isa.RingRecv0,
        tile_mask=tiles,
        dst=walk,
        sig_dst=level,
        waits=[Wait(TileCounter.WIDE_TO_NARROW, free, level=level, step=ROW_WORDS, side=1)],
    )


# input from the host


@dataclass(frozen=True)
class Piece:
    """Part of a row group's input stream that goes to some tiles: ``size_bytes`` from ``offset_bytes`` to ``word``."""

    tiles: int
    offset_bytes: int
    size_bytes: int
    word: int


def scatter_unpack(b: Builder, piece: Piece, packets: int, tensor_word: int, *, levels: int) -> None:
    """W2n of one piece of the input, from a FIFO of ``packets`` rows per slot. It waits for the whole group's packets.

    ``levels``: dimensions that the wait levels span, 2 in style 14.1, where all are kept, and 1 in 16.0, where those of
    count 1 are dropped and a skipping W2n unpacks at level 2.
    """
    row, skipped = divmod(piece.offset_bytes, ROW_BYTES)
    skip = {}
    if skipped:
        words = skipped // WORD_BYTES
        skip = {
            "skip_en": 1,
            "skip_level": b.style.skip_level,
            "skip_base": tensor_word,
            "skip_cnt": words - 1,
            "skip_end": tensor_word + words - 1,
        }
    rows = ceil_div(skipped + piece.size_bytes, ROW_BYTES)
    src = Walk(WIDE_ROWS - 2 * packets + row, [1], [rows], nz_mask=1 if levels > 1 or rows > 1 else 0)
    words = ceil_div(piece.size_bytes, WORD_BYTES)
    slot = ROW_WORDS // 4 * max(4, ceil_div(piece.size_bytes, ROW_BYTES // 4))
    b.emit(
        isa.W2n,
        tile_mask=piece.tiles,
        src=src,
        dst=Walk(piece.word, [1], [words], slot_level=1, slot_stride=slot),
        sig_dst=0,
        waits=[Wait(TileCounter.RING_READ_A, 1, level=levels), Wait(TileCounter.AVDATA, -1, level=levels, side=1)],
        unpack_level=2 if skip and levels == 1 else 1,
        **skip,
    )


def scatter_receive(b: Builder, tiles: int, packets: int, group_packets: int) -> None:
    """Consumer of one row group's ``group_packets`` packets, into the slot of ``packets`` rows."""
    shortened = {"last_dim": 1, "last_cnt": group_packets - 1, "last_skip": packets - group_packets}
    words = ROW_WORDS * packets
    b.emit(
        isa.RingRecv0,
        tile_mask=tiles,
        dst=Walk(
            WIDE_ROWS - 2 * packets,
            [1],
            [packets if group_packets > 1 else 1],
            slot_level=1,
            slot_stride=packets,
            nz_mask=int(packets > 1),
            **(shortened if group_packets > 1 else {}),
        ),
        sig_dst=1,
        waits=[Wait(TileCounter.WIDE_TO_NARROW, -words, level=1, step=words, side=1)],
    )


# parameters


def load_scaling(b: Builder, tiles: int, row: int, groups: int, *, row_step: int = 1, scale: bool, bias: bool) -> None:
    """W2n of ``groups`` groups of scale and/or bias rows, ``row_step`` rows apart, to the double-buffered store."""
    rows = scale + bias
    multiple = groups > 1
    b.emit(
        isa.W2n,
        tile_mask=tiles,
        src=Walk(row, [1, row_step][: 1 + multiple], [rows, groups][: 1 + multiple]),
        dst=Walk(
            0 if scale else BIAS_ENTRY, [1, BIAS_ENTRY, 0], [GROUP // 2, rows, groups], slot_level=2, slot_stride=32
        ),
        sig_dst=2,
        waits=[Wait(TileCounter.AVDATA, b.count(TileCounter.AVDATA, tiles) - 1, level=2, side=1)],
        to_scaling=1,
        unpack_level=1,
    )


# mesh


def identity_row(b: Builder, word: int, row: int) -> None:
    """A row whose column c passes on byte c of a word: four fills of narrow memory at ``word``, packed into ``row``."""
    for byte in range(WORD_BYTES):
        last = byte == WORD_BYTES - 1
        b.emit(
            isa.MeshNorth,
            tile_mask=ALL_TILES,
            dst=Walk(word + byte, [1], [1], nz_mask=0),
            fill_en=1,
            fill_value=1 << 8 * byte,
            sig_dst=1 if last else None,
        )
    came_in, _ = mesh_counters(isa.MeshNorth)
    b.emit(
        isa.N2w,
        tile_mask=ALL_TILES,
        src=Walk(word, [1], [WORD_BYTES]),
        dst=Walk(row, [1], [1], nz_mask=0),
        sig_dst=1,
        waits=[Wait(came_in, b.count(came_in, ALL_TILES), level=1, step=0)],
        pack_level=1,
    )


def mesh_send(b: Builder, mesh: type[isa.Instruction], tile: int, word: int, words: int, *, count: bool) -> None:
    """Outbound half: ``words`` from ``word``; ``count``: the OUT counter counts the move."""
    b.emit(mesh, tile_mask=1 << tile, src=_linear(word, words), sig_src=1 if count else None)


def mesh_receive(b: Builder, mesh: type[isa.Instruction], tile: int, word: int, words: int, *, count: bool) -> None:
    """Inbound half: ``words`` to ``word``; ``count``: the IN counter counts the move."""
    b.emit(mesh, tile_mask=1 << tile, dst=_linear(word, words), sig_dst=1 if count else None)


def mesh_relay(b: Builder, mesh: type[isa.Instruction], tiles: int, buffer_word: int, words: int) -> None:
    """Pass ``words`` on through two slots of four words; every slot is counted in and out."""
    came_in, went_out = mesh_counters(mesh)
    step = 1 if words == 1 else RELAY_WORDS
    shortened = {"last_dim": 1, "last_cnt": words % RELAY_WORDS - 1} if words > 1 and words % RELAY_WORDS else {}
    walk = Walk(
        buffer_word, [1, 0], [step, ceil_div(words, RELAY_WORDS)], slot_level=1, slot_stride=RELAY_WORDS, **shortened
    )
    b.emit(
        mesh,
        tile_mask=tiles,
        src=walk,
        dst=walk,
        sig_src=1,
        sig_dst=1,
        waits=[
            Wait(came_in, b.count(came_in, tiles) + 1, level=1),
            Wait(went_out, b.count(went_out, tiles) - 1, level=1, side=1),
        ],
    )


# ops


def word_op(b: Builder, tiles: int, loops: Sequence[int], **fields: Any) -> None:
    """An op with one word of results per step. What ``fields`` do not say: one group, plain sums, multiplier 1."""
    plain = {
        "psum": Walk(0, [0] * len(loops), loops),
        "acc_init": 1,
        "group_loop": len(loops) - 1,
        "out_ch": WORD_BYTES - 1,
        "out_ch_last": WORD_BYTES - 1,
        "mult": 1.0,
    }
    b.emit(isa.Op, tile_mask=tiles, loops=loops, **plain | fields)
