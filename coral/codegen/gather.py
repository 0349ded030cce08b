"""Collecting a tensor that lies in pieces on a block of tiles: over the mesh to one tile (style 14.1).

Source: docs/codegen.md, section Mesh gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from coral import isa
from coral.codegen import blocks
from coral.codegen.builder import MESH_COUNTERS, Builder
from coral.codegen.machine import ALL_TILES, COLUMNS, ROW_BYTES, TILES, WORD_BYTES, ceil_div, mask_of


@dataclass(frozen=True)
class Spread:
    """``size_bytes`` in pieces of ``piece_bytes``, piece i on tile ``first_tile`` + i, at byte ``address`` + offset."""

    size_bytes: int
    piece_bytes: int
    first_tile: int
    address: int

    @property
    def pieces(self) -> int:
        """Tiles that hold a piece."""
        return ceil_div(self.size_bytes, self.piece_bytes)

    @property
    def packets(self) -> int:
        """Ring packets of the whole."""
        return ceil_div(self.size_bytes, ROW_BYTES)

    def words(self, piece: int, pieces: int = 1) -> int:
        """Words of ``pieces`` consecutive pieces; the last one of all may be short."""
        size = min(self.piece_bytes * pieces, self.size_bytes - self.piece_bytes * piece)
        return ceil_div(size, WORD_BYTES)

    def word(self, piece: int) -> int:
        """Word address of a piece; the same on its own tile and in the collected tensor."""
        return (self.address + self.piece_bytes * piece) // WORD_BYTES

    def fits_mesh(self) -> bool:
        """Whether the pieces exist and every four of them lie in one mesh row."""
        rows = range(0, self.pieces, COLUMNS)
        column = self.first_tile % COLUMNS
        width = max(min(COLUMNS, self.pieces - row) for row in rows)
        return self.first_tile + self.pieces <= TILES and (width == 1 or column + width <= COLUMNS)


def mesh_gather(b: Builder, spread: Spread, relay_address: int) -> None:
    """All pieces to the first tile: every mesh row westward to its first tile, then these northward.

    ``relay_address``: 32 bytes, on every tile, through which tiles pass on what is not theirs.
    """
    relay_word = relay_address // WORD_BYTES
    rows = range(0, spread.pieces, COLUMNS)
    touched = ALL_TILES
    b.reset()
    for distance in range(1, min(COLUMNS, spread.pieces)):
        senders = [row + distance for row in rows if row + distance < spread.pieces]
        for piece in senders:
            blocks.mesh_send(
                b, isa.MeshWest, spread.first_tile + piece, spread.word(piece), spread.words(piece), count=True
            )
        for words, same in groupby(senders, spread.words):
            between = mask_of(spread.first_tile + piece - d for piece in same for d in range(1, distance))
            if between:
                blocks.mesh_relay(b, isa.MeshWest, between, relay_word, words)
        for piece in senders:
            first = spread.first_tile + piece - distance
            blocks.mesh_receive(b, isa.MeshWest, first, spread.word(piece), spread.words(piece), count=True)
        touched = b.mesh_fence(isa.MeshWest)
    b.fence(tiles=touched)
    b.drain()
    for distance in range(1, len(rows)):
        row = rows[distance]
        word, words = spread.word(row), spread.words(row, COLUMNS)
        blocks.mesh_send(b, isa.MeshNorth, spread.first_tile + row, word, words, count=False)
        if distance > 1:
            between = mask_of(spread.first_tile + r for r in rows[1:distance])
            blocks.mesh_relay(b, isa.MeshNorth, between, relay_word, words)
        blocks.mesh_receive(b, isa.MeshNorth, spread.first_tile, word, words, count=False)
        if distance > 1:
            touched = b.mesh_fence(isa.MeshNorth)
    if len(rows) > 2:
        b.fence(tiles=touched)
    b.fence(MESH_COUNTERS)
