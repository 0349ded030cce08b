"""A vector from the host to tiles, and vectors from tiles to the host: the frame of programs on flat tensors.

Source: docs/codegen.md, section Flat tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

from coral.codegen import blocks
from coral.codegen.blocks import Piece
from coral.codegen.builder import N2W_UNIT, Builder, Style
from coral.codegen.gather import Spread
from coral.codegen.machine import COLUMNS, INPUT_UNIT_BYTES, ROW_BYTES, WORD_BYTES, ceil_div, mask_of, round_up
from coral.isa import ScalarCounter

INPUT, OUTPUT = "x", "y"
"""Names of the two layers."""


def opened(style: Style) -> Builder:
    """A program of which everybody is ready."""
    b = Builder(style)
    b.prologue()
    b.scalar_fence(ctr_mask=1 << ScalarCounter.AVDATA_POP | 1 << ScalarCounter.AVDATA_INFEED)
    b.handshake()
    return b


def receive(b: Builder, size_bytes: int) -> None:
    """Host DMA of the input of ``size_bytes``, padded to 8."""
    padded = round_up(size_bytes, INPUT_UNIT_BYTES)
    b.input_address(INPUT)
    blocks.pop_input(b, padded)
    b.input_dma(padded)


def begin(style: Style, size_bytes: int) -> Builder:
    """A program up to the host DMA of its input of ``size_bytes``, padded to 8."""
    b = opened(style)
    b.fence(units=N2W_UNIT)
    receive(b, size_bytes)
    return b


def unpack_pieces(b: Builder, spread: Spread) -> None:
    """Every tile takes its piece out of its row group's packets, to where it belongs in the tensor (style 14.1)."""
    for piece in range(spread.pieces):
        offset = piece % COLUMNS * spread.piece_bytes
        size = min(spread.piece_bytes, spread.size_bytes - piece * spread.piece_bytes)
        part = Piece(1 << spread.first_tile + piece, offset, size, spread.word(piece))
        blocks.scatter_unpack(b, part, spread.packets, spread.word(0), levels=2)


def feed_rows(b: Builder, spread: Spread) -> None:
    """The packets of each group of up to four tiles, for consumers that were told before where pieces go."""
    padded = round_up(spread.size_bytes, INPUT_UNIT_BYTES)
    for first in range(0, spread.pieces, COLUMNS):
        group = range(first, min(first + COLUMNS, spread.pieces))
        tiles = mask_of(spread.first_tile + piece for piece in group)
        offset = first * spread.piece_bytes
        size = min(COLUMNS * spread.piece_bytes, padded - offset)
        blocks.scatter_receive(b, tiles, spread.packets, ceil_div(size, ROW_BYTES))
        blocks.infeed_input(b, offset, size, tiles)
    b.drain()
    b.reset()


def output(
    b: Builder, size_bytes: int, packs: Iterable[tuple[int, int, int]], shares: Iterable[tuple[int, int]]
) -> None:
    """Results to the host and the end of the program; ``size_bytes`` in all, padded to 8.

    ``packs``: (tile mask, byte address, bytes) of the moves to the output FIFOs; ``shares``: (tile, bytes) as sent.
    """
    b.output_address(OUTPUT)
    for tiles, address, size in packs:
        blocks.pack(b, tiles, address // WORD_BYTES, size)
    b.output_dma(round_up(size_bytes, INPUT_UNIT_BYTES))
    for tile, size in shares:
        blocks.outfeed(b, round_up(size, INPUT_UNIT_BYTES))
        blocks.ring_send(b, 1 << tile, size)
    b.output_wait()
    b.epilogue()
