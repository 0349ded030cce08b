"""Batched matrix product: y[M, N] = x[M, K] W[N, K].T + bias, rows over the tiles, weights broadcast.

Source: docs/network.md, section Matrix products.
"""

from __future__ import annotations

import numpy as np

from coral.codegen.errors import CodegenError, ShapeError
from coral.codegen.fc import FcQuant
from coral.codegen.machine import GROUP, TILES, WORD_BYTES, ceil_div
from coral.codegen.network.graph import Conv, Network, Tensor
from coral.codegen.network.program import MAX_BATCH, NetworkProgram
from coral.codegen.network.tiling import Grid
from coral.package.program import Program
from coral.package.tensors import unpack_output

MAX_DIMENSION = 8192
TOP_ROW = 1940
"""Rows from here on are scratch of every resident program of ours: 496,640 bytes stay for parameters."""
FILL_WORDS = 60
"""Two fills and 16 partial sums fit above ``TOP_ROW``."""
INPUT, OUTPUT = "x", "y"


class Matmul:
    """Program pair of a product at one place; interface as ``codegen.fc.FullyConnected``, for M rows at a time.

    Parameters lie in ``tiles`` pieces of ``rows_per_tile`` wide rows on tiles ``tile_shift``.., from ``parameter_row``.
    """

    def __init__(self, m: int, n: int, k: int, quant: FcQuant, *, parameter_row: int = 0, tile_shift: int = 0) -> None:
        for letter, value, limit in (("M", m, MAX_BATCH), ("N", n, MAX_DIMENSION), ("K", k, MAX_DIMENSION)):
            if not 1 <= value <= limit:
                raise ShapeError(f"matrix product {m} x {n} x {k}: {letter} is {value}, allowed are 1..{limit}")
        if not 0 <= tile_shift < TILES or not 0 <= parameter_row < TOP_ROW:
            raise ShapeError(f"place: tile {tile_shift} of {TILES}, row {parameter_row} of {TOP_ROW}")
        self.m, self.n, self.k, self.quant = m, n, k, quant
        self.parameter_row, self.tile_shift = parameter_row, tile_shift
        total = ceil_div(n, GROUP) * (1 + product_words(k))
        self.tiles = ceil_div(total, TOP_ROW - parameter_row)
        self.rows_per_tile = ceil_div(total, self.tiles)
        if tile_shift + self.tiles > TILES:
            raise ShapeError(
                f"matrix product {m} x {n} x {k}: {total} parameter rows need {self.tiles} tiles from row "
                f"{parameter_row}, there are {TILES - tile_shift} from tile {tile_shift} on"
            )
        mine = range(tile_shift, tile_shift + self.tiles)
        self._program = NetworkProgram(
            self._network(np.full((n, k), quant.w_zp, np.uint8), None),
            batch=m,
            grid=Grid(1, 1),
            base_rows=tuple(parameter_row if t in mine else None for t in range(TILES)),
            top=TOP_ROW,
            piece_rows=self.rows_per_tile,
        )

    def _network(self, weights: np.ndarray, bias: np.ndarray | None) -> Network:
        return product_network(f"matmul_{self.m}x{self.n}x{self.k}", self.quant, weights, bias)

    @property
    def floor_rows(self) -> int:
        """Lowest wide row that the execution program writes."""
        return self._program.floor_rows

    @property
    def input_bytes(self) -> int:
        """Size of the input DMA."""
        return self.execution.inputs[0].size_bytes

    @property
    def output_bytes(self) -> int:
        """Size of the output DMA."""
        return self.execution.outputs[0].size_bytes

    @property
    def execution(self) -> Program:
        """Program that computes M rows, from layer ``x`` to layer ``y``."""
        return self._program.execution

    def blob(self, weights: np.ndarray, bias: np.ndarray | None = None) -> bytes:
        """Parameter bytes of ``weights`` uint8 [N, K] and ``bias`` int32 [N] (none: zeros).

        ShapeError or CodegenError for other shapes or dtypes.
        """
        if weights.shape != (self.n, self.k) or weights.dtype != np.uint8:
            raise ShapeError(f"weights are {weights.dtype} {weights.shape}, needed are uint8 {(self.n, self.k)}")
        return self._program.parameters_of(self._network(weights, bias))

    def caching(self, blob: bytes) -> Program:
        """Program that loads ``blob`` (from ``blob``) into the tiles."""
        return self._program.caching(blob)

    def pack(self, x: np.ndarray) -> bytes:
        """Input bytes of ``x`` uint8 [rows, K], up to M rows; the rest is zero points."""
        if x.ndim != 2 or x.shape[1] != self.k or len(x) > self.m or x.dtype != np.uint8:
            raise ShapeError(f"x is {x.dtype} {x.shape}, needed is uint8 of up to {self.m} rows of {self.k}")
        columns = product_words(self.k) * WORD_BYTES
        data = np.full((self.input_bytes // columns, columns), self.quant.in_zp, np.uint8)
        data[: len(x), : self.k] = x
        raw = data.tobytes()
        return raw + bytes(self.input_bytes - len(raw))

    def unpack(self, raw: bytes) -> np.ndarray:
        """y uint8 [M, N] from the output's bytes; CodegenError if there are more or fewer."""
        if len(raw) != self.output_bytes:
            raise CodegenError(f"output has {len(raw)} bytes, {self.output_bytes} are needed")
        return unpack_output(self.execution.outputs[0], raw).reshape(self.m, self.n)


def product_words(k: int) -> int:
    """Words of a row of ``k`` codes as programs take it: as many as needed, or a few more that can be cut into equal
    fills of the weight FIFO."""
    fills = ceil_div(ceil_div(k, WORD_BYTES), FILL_WORDS)
    return fills * ceil_div(ceil_div(k, WORD_BYTES), fills)


def product_network(name: str, quant: FcQuant, weights: np.ndarray, bias: np.ndarray | None) -> Network:
    """One row from ``x`` to ``y``: weights uint8 [N, K], bias int32 [N]; K is padded to ``product_words``."""
    (n, k), q = weights.shape, quant
    padded = np.full((n, 1, 1, product_words(k) * WORD_BYTES), q.w_zp, np.uint8)
    padded[:, 0, 0, :k] = weights
    layer = Conv((INPUT,), OUTPUT, (q.clamp_min, q.clamp_max), padded, bias, q.w_zp, q.mult)
    tensors = {
        INPUT: Tensor(INPUT, 1, 1, padded.shape[3], q.in_zp, q.in_scale),
        OUTPUT: Tensor(OUTPUT, 1, 1, n, q.out_zp, q.out_scale),
    }
    return Network(name, tensors, (INPUT,), (layer,), (OUTPUT,))


def matmul(m: int, n: int, k: int, quant: FcQuant, *, parameter_row: int = 0, tile_shift: int = 0) -> Matmul:
    """y[m, n] = requantise(x[m, k] W[n, k].T + bias) for 1..256 rows in one call. ShapeError: sizes or place."""
    return Matmul(m, n, k, quant, parameter_row=parameter_row, tile_shift=tile_shift)


__all__ = ["Matmul", "matmul"]
