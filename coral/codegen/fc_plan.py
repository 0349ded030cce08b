"""Geometry of FULLY_CONNECTED: shapes, quantisation, parameter layout and places. Source: docs/codegen.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coral.codegen.blocks import RELAY_BYTES
from coral.codegen.builder import V14, V16, Style
from coral.codegen.errors import CodegenError, ShapeError
from coral.codegen.gather import Spread
from coral.codegen.machine import (
    COLUMNS,
    FORWARD_FIFO_ROW,
    GROUP,
    INPUT_UNIT_BYTES,
    OUTPUT_FIFO_ROW,
    ROW_BYTES,
    TILES,
    WIDE_ROWS,
    WORD_BYTES,
    ceil_div,
    round_up,
)

MAX_DIMENSION = 4096
SMALL_GROUP_ROWS = 1024
"""Parameter groups of fewer than 64 outputs are read wrong from this row (256 KiB) on."""
SEND_FIFO_ROW = OUTPUT_FIFO_ROW - 4
"""Two rows from which an input tile sends its piece in style 16.0."""


@dataclass(frozen=True)
class FcShape:
    """Geometry of an N x K layer: who receives which input bytes, who computes which outputs.

    ShapeError if a dimension is outside 1..4096 or the pair needs a schedule that is not modelled.
    """

    n: int
    k: int

    def __post_init__(self) -> None:
        for name, value in (("N", self.n), ("K", self.k)):
            if not 1 <= value <= MAX_DIMENSION:
                raise ShapeError(
                    f"fully connected {self.n} x {self.k}: {name} is {value}, the limit is {MAX_DIMENSION}"
                )
        if self.k <= WORD_BYTES and self.n > TILES * GROUP:
            raise ShapeError(
                f"fully connected {self.n} x {self.k}: with K <= {WORD_BYTES}, N is {self.n}, the limit is "
                f"{TILES * GROUP}; pad K to {WORD_BYTES + 1}"
            )

    @property
    def input_bytes(self) -> int:
        """Size of the input DMA: K padded to 8."""
        return round_up(self.k, INPUT_UNIT_BYTES)

    @property
    def output_bytes(self) -> int:
        """Size of the output DMA: N padded to 8."""
        return round_up(self.n, INPUT_UNIT_BYTES)

    @property
    def piece_bytes(self) -> int:
        """Input bytes per receiving tile."""
        return GROUP * ceil_div(self.input_bytes, GROUP * TILES)

    @property
    def packets(self) -> int:
        """Ring packets of the whole input."""
        return ceil_div(self.k, ROW_BYTES)

    @property
    def words(self) -> int:
        """Reduction steps: words of the input, weight rows per group."""
        return ceil_div(self.k, WORD_BYTES)

    @property
    def groups(self) -> int:
        """Groups of 64 outputs."""
        return ceil_div(self.n, GROUP)

    @property
    def groups_per_tile(self) -> int:
        """Groups of every compute tile but the last, which may have fewer."""
        return ceil_div(self.groups, TILES)

    @property
    def tiles(self) -> int:
        """Compute tiles."""
        return ceil_div(self.groups, self.groups_per_tile)

    @property
    def group_outputs(self) -> int:
        """Outputs per parameter group in the blob."""
        return round_up(self.n, 16) if self.n <= GROUP else GROUP

    def tile_groups(self, tile: int) -> int:
        """Groups of compute tile ``tile`` (0-based)."""
        return min(self.groups_per_tile, self.groups - self.groups_per_tile * tile)

    def tile_outputs(self, tile: int) -> int:
        """Outputs of compute tile ``tile``."""
        return min(GROUP * self.groups_per_tile, self.n - GROUP * self.groups_per_tile * tile)

    @property
    def input_tiles(self) -> int:
        """Tiles that receive a piece of the input."""
        return ceil_div(self.k, self.piece_bytes)


@dataclass(frozen=True)
class FcQuant:
    """Quantisation of a layer: codes 0..255, ``y = rne(clamp(f32(acc) * mult)) + out_zp`` in float32.

    ``mult`` and the clamps must be float32 values; the clamps are relative to ``out_zp``. In the per-channel form
    ``mult`` and ``w_zp`` are unused, they are rows of the parameters. The scales are only recorded in the layers.
    """

    in_zp: int
    w_zp: int
    out_zp: int
    mult: float
    clamp_min: float
    clamp_max: float
    in_scale: float = 1.0
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("in_zp", "w_zp", "out_zp"):
            if not 0 <= getattr(self, name) <= 255:
                raise CodegenError(f"{name} is {getattr(self, name)}, a uint8 code is 0..255")
        for name in ("mult", "clamp_min", "clamp_max"):
            value = float(getattr(self, name))
            if float(np.float32(value)) != value:
                raise CodegenError(f"{name} is {value!r}, which is not a float32 value")
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Header:
    """Rows before the weight rows of every parameter group, in this order."""

    scale: bool
    bias: bool
    zero_points: bool

    @property
    def rows(self) -> int:
        """Header rows per group."""
        return self.scale + self.bias + self.zero_points


@dataclass(frozen=True)
class Narrow:
    """Byte addresses in narrow memory, the same on every tile, and the end of what is used.

    ``transit`` is the relay buffer of the mesh gather (14.1) or the piece received from the host (16.0).
    """

    x: int
    y: int
    transit: int
    end: int


def _narrow_v14(s: FcShape) -> Narrow:
    """As the compiler places x [K], the whole y [N] and the relay buffer."""
    k, n = round_up(s.k, WORD_BYTES), round_up(s.n, WORD_BYTES)
    relay = RELAY_BYTES if s.input_tiles > 1 else 0
    margin = ROW_BYTES * s.packets + 512
    if s.k > 188 and n + RELAY_BYTES < margin:
        x, y = 0, k
    elif n < margin:
        x, y = max(margin, n + relay), 0
    else:
        return Narrow(n, 0, n + k, n + k + relay)
    y, transit = (y + relay, y) if n == WORD_BYTES else (y, y + n)
    return Narrow(x, y, transit, max(x + k, y + n, transit + relay))


def _narrow_v16(s: FcShape) -> Narrow:
    """x [K], a tile's own outputs behind it, and the received piece."""
    received = ROW_BYTES * s.packets + 512
    return Narrow(0, round_up(s.k, WORD_BYTES), received, received + s.piece_bytes)


@dataclass(frozen=True)
class FcPlan:
    """A layer at one place.

    Parameters lie from ``parameter_row`` (256-byte rows) on, on ``tiles`` tiles from ``first_tile`` on; the input
    arrives from ``first_input_tile`` on. ShapeError when a share passes the lowest row that a program writes, or when
    the tiles do not exist or cannot exchange data.
    """

    shape: FcShape
    quant: FcQuant
    header: Header
    style: Style
    parameter_row: int
    first_input_tile: int
    first_tile: int

    def __post_init__(self) -> None:
        s = self.shape
        name = f"fully connected {s.n} x {s.k}"
        if int(self.parameter_row) != self.parameter_row:
            raise ShapeError(
                f"{name}: parameters at byte {ROW_BYTES * self.parameter_row:g}; a region starts at a multiple of "
                f"{ROW_BYTES} bytes"
            )
        end = self.parameter_row + self.rows_per_tile
        if self.parameter_row < 0 or end > FORWARD_FIFO_ROW:
            raise ShapeError(
                f"{name}: {self.rows_per_tile} parameter rows per tile from row {self.parameter_row} end at {end}, "
                f"the limit is {FORWARD_FIFO_ROW} rows ({FORWARD_FIFO_ROW * ROW_BYTES} bytes)"
            )
        if s.group_outputs < GROUP and self.parameter_row >= SMALL_GROUP_ROWS:
            raise ShapeError(
                f"{name}: parameter groups of {s.group_outputs} outputs at row {self.parameter_row}, the chip reads "
                f"wrong weights from row {SMALL_GROUP_ROWS} on; pad N to {GROUP}"
            )
        if self.first_tile < 0 or self.first_tile + self.tiles > TILES:
            raise ShapeError(f"{name}: {self.tiles} tiles from tile {self.first_tile} on, there are {TILES}")
        inputs = self.inputs
        if self.first_input_tile < 0 or self.first_input_tile + inputs.pieces > TILES:
            raise ShapeError(f"{name}: {inputs.pieces} input tiles from {self.first_input_tile} on, there are {TILES}")
        if self.style is V14 and not inputs.fits_mesh():
            raise ShapeError(
                f"{name}: {inputs.pieces} input tiles from tile {self.first_input_tile} on leave their mesh rows of "
                f"{COLUMNS}"
            )

    @property
    def tiles(self) -> int:
        """Compute tiles, which hold the parameters."""
        return self.shape.tiles

    @property
    def rows_per_tile(self) -> int:
        """Parameter rows (256 bytes) on each tile."""
        return self.shape.groups_per_tile * (self.header.rows + self.shape.words)

    @property
    def receivers(self) -> list[int]:
        """Compute tiles that the input is broadcast to in style 14.1: all but the one it is gathered on."""
        return [t for t in self.compute_tiles() if t != self.first_input_tile]

    @property
    def floor_rows(self) -> int:
        """Lowest row of wide memory that the execution program writes, on any tile."""
        rows = [WIDE_ROWS - 2 * self.shape.packets, OUTPUT_FIFO_ROW]
        if self.style is V16:
            rows.append(SEND_FIFO_ROW)
        elif self.receivers:
            rows.append(FORWARD_FIFO_ROW)
        return min(rows)

    @property
    def input_bytes(self) -> int:
        """Bytes of the input: K codes, padded to 8."""
        return self.shape.input_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes of the output: N codes, padded to 8."""
        return self.shape.output_bytes

    @property
    def group_bytes(self) -> int:
        """Bytes of a parameter group in the blob."""
        return WORD_BYTES * self.shape.group_outputs * (self.header.rows + self.shape.words)

    @property
    def blob_bytes(self) -> int:
        """Size of the parameters."""
        return self.shape.groups * self.group_bytes

    @cached_property
    def narrow(self) -> Narrow:
        """Where the execution program keeps its tensors."""
        return _narrow_v14(self.shape) if self.style is V14 else _narrow_v16(self.shape)

    @property
    def inputs(self) -> Spread:
        """The input's pieces on their tiles; each lies where it belongs in the whole input."""
        s = self.shape
        return Spread(s.k, s.piece_bytes, self.first_input_tile, self.narrow.x)

    def compute_tiles(self) -> list[int]:
        """Tile numbers that hold parameters and compute."""
        return [self.first_tile + t for t in range(self.tiles)]
