"""Wide memory: parameters from the bottom, FIFOs from the top. Source: docs/network.md, section Wide memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from coral.codegen.errors import ShapeError
from coral.codegen.machine import ALL_TILES, GROUP, ROW_BYTES, TILES, WIDE_ROWS, WORD_BYTES, ceil_div, round_up
from coral.codegen.network.graph import Add, AveragePool, Conv, L2Normalise, Multiply, Requantise, Resize, Softmax
from coral.codegen.network.plan import Plan
from coral.codegen.network.products import Level, Product, product_of
from coral.codegen.network.scratch import FIXED_ROW, scratch_rows

LEAST_FILL, ROOM_STEP = 16, 64
"""Steps between two visits of the partial sums, if room can be had; rows by which a FIFO grows to get it."""
DIFFERENCE = Add((), "", (0.0, 0.0), (1, -1))
"""Weights of a difference."""
PIECE_ROWS, LEAST_PIECE_ROWS = 300, 100
"""Weights of a layer longer than this are cut into pieces on several tiles; no cut makes pieces smaller than that."""
FIFO_ROWS, SPARE_ROWS = 256, 64
"""Rows of a tile that stay free of weights if some are streamed: at most, at least."""


@dataclass(frozen=True)
class Piece:
    """``rows`` rows of the parameters, from row ``first`` of a layer's, at ``row`` of the tiles of a mask."""

    tiles: int
    row: int
    first: int
    rows: int


@dataclass(frozen=True)
class Fifo:
    """Weights on their way: fills of ``inner`` steps, ``slots`` of them, headers and partial sums below."""

    inner: tuple[Level, ...]
    outer: tuple[Level, ...]
    slots: int
    header: int
    sums: int

    @property
    def fill(self) -> int:
        """Rows of one fill."""
        return prod(n for _, n in self.inner)

    @property
    def fills(self) -> int:
        """Fills per group."""
        return prod(n for _, n in self.outer)

    @property
    def row(self) -> int:
        """First row of the weights; FIFOs begin at even rows, others hang a stick."""
        return WIDE_ROWS - round_up(self.slots * self.fill, 2)

    @property
    def header_row(self) -> int:
        """First header row."""
        return self.row - round_up(self.slots * self.header, 2)

    @property
    def sums_row(self) -> int:
        """First row of partial sums; the lowest in use."""
        return self.header_row - self.sums


def share_name(name: str, share: int) -> str:
    """Under what name the weights for a share of a layer's outputs are kept."""
    return f"{name}#{share}" if share else name


class Wide:
    """Places of all parameters of a network and the rows it overwrites.

    ``base_rows``: first free row on every tile, None where no weights may lie. ``top``: no FIFO reaches below this row
    if that can be avoided. Layers of more than ``piece_rows`` rows are cut; None: such that all tiles get about as
    much, if there are constants, which begin above the fullest tile. ``stream``: layers that do not fit come from the
    host at every call.
    """

    def __init__(
        self,
        plan: Plan,
        base_rows: tuple[int | None, ...] = (0,) * TILES,
        top: int = 0,
        piece_rows: int | None = PIECE_ROWS,
        *,
        stream: bool = False,
    ) -> None:
        self.plan, self.piece_rows = plan, piece_rows
        self.products = {
            share_name(s.output, share): product_of(plan, s, share)
            for s in plan.stages
            if isinstance(s, Conv)
            for share in range(plan.shares(s.output))
        }
        self.parts: list[tuple[Piece, np.ndarray]] = []
        self.fill = [max(row for row in base_rows if row is not None)] * TILES
        self.constants: dict[bytes, int] = {}
        self._add_constants()
        self.spread_rows = {name: self._add_spread(p) for name, p in self.products.items() if name in plan.spread}
        lowest = self.fill if self.parts else [0] * TILES
        if not self.products:
            self._constant(identity_rows())
        places = {t: max(row, lowest[t]) for t, row in enumerate(base_rows) if row is not None}
        rows, owners = self._rows()
        streamed = self._streamed(rows, places) if stream else set()
        if streamed and plan.form.region is not None:
            raise ShapeError(
                f"network {plan.network.name!r}: no room for the weights of layers whose channels are divided"
            )
        self.streamed = {name: rows[owner].tobytes() for name, owner in owners.items() if owner in streamed}
        pieces = self._place({name: data for name, data in rows.items() if name not in streamed}, places)
        self.pieces = {name: pieces[owner] for name, owner in owners.items() if owner not in streamed}
        self.used = max(piece.row + piece.rows for piece, _ in self.parts) if self.parts else 0
        self.fifos = {name: self._fifo(name, p, top) for name, p in self.products.items() if name not in plan.spread}
        self.floor = min([FIXED_ROW - scratch_rows(plan), *(f.sums_row for f in self.fifos.values())])
        if self.floor < self.used:
            raise ShapeError(
                f"network {plan.network.name!r}: parameters end at row {self.used}, but rows from {self.floor} on are "
                f"overwritten at every call"
            )

    @property
    def blob(self) -> bytes:
        """All parameters, piece by piece."""
        return b"".join(rows.tobytes() for _, rows in self.parts)

    # constants on every tile

    def _add_constants(self) -> None:
        for stage in self.plan.stages:
            if isinstance(stage, Add):
                self._constant(add_rows(stage))
            elif isinstance(stage, Multiply):
                self._constant(selection_rows())
            elif isinstance(stage, Requantise | AveragePool | Resize):
                self._constant(identity_rows())
            elif isinstance(stage, Softmax | L2Normalise):
                c = self.plan.tensors[stage.output].c
                columns = [WORD_BYTES] * (c >= WORD_BYTES) + [c % WORD_BYTES] * (c % WORD_BYTES > 0) + [2] * (c % 2)
                for n in columns:
                    self._constant(identity_rows(n))
                if isinstance(stage, Softmax):
                    self._constant(add_rows(DIFFERENCE))

    def _constant(self, rows: np.ndarray) -> int:
        key = rows.tobytes()
        if key not in self.constants:
            row = self.constants[key] = max(self.fill)
            self.parts.append((Piece(ALL_TILES, row, 0, len(rows)), rows))
            self.fill = [row + len(rows)] * TILES
        return self.constants[key]

    def constant(self, rows: np.ndarray) -> int:
        """First row of constants that every tile holds."""
        return self.constants[rows.tobytes()]

    def _add_spread(self, product: Product) -> int:
        """A dense layer over all tiles, from the same row on each."""
        rows, groups = product.rows(), ceil_div(product.groups, TILES)
        tiles, size = ceil_div(product.groups, groups), groups * (product.header + product.steps)
        row = max(self.fill[:tiles])
        for t in range(tiles):
            mine = rows[t * size : (t + 1) * size]
            self.parts.append((Piece(1 << t, row, 0, len(mine)), mine))
            self.fill[t] = row + size
        return row

    # broadcast weights, each row on one tile

    def _rows(self) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Rows of layers, and of which of them a layer takes its rows: all bands of a layer share them."""
        rows: dict[str, np.ndarray] = {}
        first: dict[bytes, str] = {}
        owners = {}
        for name, p in self.products.items():
            if name not in self.plan.spread:
                data = p.rows()
                owners[name] = first.setdefault(data.tobytes() + bytes([p.relay]), name)
                if owners[name] == name:
                    rows[name] = data
        return rows, owners

    def _streamed(self, rows: dict[str, np.ndarray], fill: dict[int, int]) -> set[str]:
        """Layers that come from the host, so that the others fit below the largest FIFO and, as they are placed, below
        all other rows in use: the fewest rows of a choice that takes the layer that is just large enough, else the
        largest one.
        """
        sizes = {n: len(data) for n, data in rows.items()}
        left = {n: size for n, size in sizes.items() if not self.products[n].relay}
        fifo = max((2 * (p.header + p.steps) for n, p in self.products.items() if n in left), default=0)
        top, limit = FIXED_ROW - max(min(fifo, FIFO_ROWS), SPARE_ROWS), FIXED_ROW - scratch_rows(self.plan)
        excess = sum(sizes.values()) - sum(top - row for row in fill.values())
        found = set()
        while left and (needed := excess if excess > 0 else len(fill) * (self._end(sizes, fill) - limit)) > 0:
            name = min(left, key=lambda n: (left[n] < needed, abs(left[n] - needed)))
            excess -= left.pop(name)
            del sizes[name]
            found.add(name)
        return found

    def _end(self, sizes: dict[str, int], fill: dict[int, int]) -> int:
        """The row behind the last one where layers of these sizes would be placed."""
        return max((piece.row + piece.rows for piece, _ in self._places(sizes, fill)), default=0)

    def _places(self, sizes: dict[str, int], fill: dict[int, int]) -> list[tuple[Piece, str]]:
        """Pieces of layers, largest first, each on the tile that is filled least."""
        fill, cuts = dict(fill), []
        piece_rows = self.piece_rows or (even_rows([*sizes.values()]) if self.constants else PIECE_ROWS)
        for name, size in sizes.items():
            count = 1 if self.products[name].relay else ceil_div(size, piece_rows)
            edges = [size * k // count for k in range(count + 1)]
            cuts += [(b - a, name, a) for a, b in pairwise(edges)]
        found = []
        for size, name, first in sorted(cuts, key=lambda cut: -cut[0]):
            tile = min(fill, key=lambda t: (fill[t], t))
            found.append((Piece(1 << tile, fill[tile], first, size), name))
            fill[tile] += size
        return found

    def _place(self, rows: dict[str, np.ndarray], fill: dict[int, int]) -> dict[str, list[Piece]]:
        pieces: dict[str, list[Piece]] = {name: [] for name in rows}
        for piece, name in self._places({n: len(data) for n, data in rows.items()}, fill):
            pieces[name].append(piece)
            if (end := piece.row + piece.rows) > FIXED_ROW:
                total = sum(len(data) for data in rows.values())
                raise ShapeError(
                    f"network {self.plan.network.name!r}: {total} rows of weights do not fit, tile "
                    f"{piece.tiles.bit_length() - 1} would need {end} of {FIXED_ROW} rows"
                )
            self.parts.append((piece, rows[name][piece.first : piece.first + piece.rows]))
        return {name: sorted(parts, key=lambda piece: piece.first) for name, parts in pieces.items()}

    def _fifo(self, name: str, p: Product, top: int) -> Fifo:
        """The simplest schedule that fits as far up as possible: two whole groups, else chunks with partial sums, not
        too small if that can be avoided, else one group."""
        rooms = [WIDE_ROWS - row for row in range(max(self.used, top), self.used, -ROOM_STEP)] + [WIDE_ROWS - self.used]
        sums = p.count if p.count > 1 else 0
        for least in (min(LEAST_FILL, p.steps), 1):
            for room in rooms:
                if 2 * (p.steps + p.header) <= room:
                    return Fifo(p.reduce, (), 2, p.header, 0)
                inner, outer = p.chunked((room - sums) // 2 - p.header)
                chunk = Fifo(inner, outer, 2, p.header, sums)
                if least <= chunk.fill <= (room - sums) // 2 - p.header:
                    return chunk
                if least == 1 and round_up(p.steps, 2) + 2 <= room:
                    return Fifo(p.reduce, (), 1, p.header, 0)
        raise ShapeError(
            f"layer {name!r}: {p.steps} weight rows per group and {p.count} partial sums do not fit the "
            f"{WIDE_ROWS - self.used} rows above the parameters"
        )


def even_rows(layers: list[int]) -> int:
    """Rows of pieces of which all tiles get one, if they are neither tiny nor large."""
    least = min(max(ceil_div(sum(layers), TILES), LEAST_PIECE_ROWS), PIECE_ROWS)
    fitting = (p for p in range(least, PIECE_ROWS) if sum(ceil_div(n, p) for n in layers) <= TILES)
    return next(fitting, PIECE_ROWS)


def identity_rows(columns: int = WORD_BYTES) -> np.ndarray:
    """One row: column c passes on byte c of a word, those from ``columns`` on nothing. uint8 [1, 256]."""
    row = np.zeros((1, ROW_BYTES), np.uint8)
    row[0, [5 * c for c in range(columns)]] = 1
    return row


def selection_rows() -> np.ndarray:
    """Four rows: row c passes on byte c of a word in column c, and zeros elsewhere. uint8 [4, 256]."""
    rows = np.zeros((WORD_BYTES, ROW_BYTES), np.uint8)
    for c in range(WORD_BYTES):
        rows[c, 5 * c] = 1
    return rows


def add_rows(stage: Add) -> np.ndarray:
    """Four rows of 16-bit weights: low and high half of operand 1, then of operand 2; uint8 [4, 256].

    A negative second weight is stored plus its size, which ``add_zero`` takes off again.
    """
    w1, w2 = stage.weights
    zero = add_zero(stage)
    rows = np.full((4, GROUP, 2), zero, "<u2")
    for operand, w in enumerate((w1, w2)):
        for half in (0, 1):
            for k in (0, 1):
                rows[2 * operand + half, 2 * half + k, k] = w + zero
    rows[:, WORD_BYTES:] = 0
    return rows.view(np.uint8).reshape(4, ROW_BYTES)


def add_zero(stage: Add) -> int:
    """Weight zero point of an ADD or SUB."""
    return max(0, -min(stage.weights))
