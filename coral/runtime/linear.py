"""Linear layers as programs: FULLY_CONNECTED for single rows, matrix products for several. Source: docs/runtime.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from coral.codegen import network as nw
from coral.codegen.fc import FcQuant, FcShape, FullyConnected, fully_connected
from coral.codegen.machine import FORWARD_FIFO_ROW, GROUP, TILES, WORD_BYTES
from coral.codegen.network.matmul import product_network, product_words
from coral.package.program import Program
from coral.runtime.errors import RuntimeFault
from coral.runtime.placement import Footprint, Region, Space
from coral.runtime.resident import CallPlan, call_plan

MAX_DIMENSION = 4096


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer on codes: y[N] = clip(rne(f32(acc) * mult) + out_zp, lo, hi), acc over (x - in_zp)(w - w_zp) + b.

    Codes are 0..255, ``mult`` is a float32 value. RuntimeFault otherwise.
    """

    n: int
    k: int
    in_zp: int
    w_zp: int
    out_zp: int
    mult: float
    lo: int = 0
    hi: int = 255

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise RuntimeFault(f"linear layer of {self.n} outputs and {self.k} inputs, both must be at least 1")
        if self.k > MAX_DIMENSION:
            raise RuntimeFault(f"linear layer with {self.k} inputs, the limit is {MAX_DIMENSION}")
        for name in ("in_zp", "w_zp", "out_zp", "lo", "hi"):
            value = getattr(self, name)
            if not 0 <= value <= 255:
                raise RuntimeFault(f"linear layer: {name} is {value}, a code is 0..255")
        if self.lo > self.hi:
            raise RuntimeFault(f"linear layer: lo is {self.lo}, above hi, which is {self.hi}")
        if float(np.float32(self.mult)) != self.mult or not math.isfinite(self.mult):
            raise RuntimeFault(f"linear layer: mult is {self.mult!r}, which is not a float32 value")

    def quant(self) -> FcQuant:
        """The op's constants."""
        low, high = float(self.lo - self.out_zp), float(self.hi - self.out_zp)
        return FcQuant(self.in_zp, self.w_zp, self.out_zp, self.mult, low, high)


@dataclass(frozen=True)
class FcLayout:
    """Parameters ``blob`` of a FULLY_CONNECTED layer: the same rows on neighbouring tiles."""

    shape: FcShape
    blob: bytes

    def find(self, space: Space) -> Footprint:
        """The lowest free region."""
        region = space.find(self.shape.tiles, rows_per_tile(self.shape))
        return Footprint((region,), FORWARD_FIFO_ROW, region)

    def caching(self, footprint: Footprint) -> Program:
        """The program that loads the parameters, which do not depend on the quantisation."""
        return fc_at(self.shape, FcQuant(0, 0, 0, 1.0, 0.0, 255.0), footprint.place).caching(self.blob)


def fc_shape(outputs: int, k: int) -> FcShape:
    """Smaller parameter groups than 64 outputs are read wrong by the chip in upper memory."""
    return FcShape(max(outputs, GROUP), k)


def fc_at(shape: FcShape, quant: FcQuant, region: Region) -> FullyConnected:
    """The program pair of a layer whose parameters are in a region."""
    return fully_connected(shape.n, shape.k, quant, parameter_row=region.row, compute_shift=region.first_tile)


def fc_layout(shape: FcShape, w_zp: int, w: np.ndarray, b: np.ndarray | None) -> FcLayout:
    """Weights uint8 [n, K], bias int32 [n]; filled up to the shape's with outputs that nobody reads."""
    weights = np.full((shape.n, shape.k), w_zp, np.uint8)
    weights[: len(w)] = w
    bias = np.zeros(shape.n, np.int32)
    if b is not None:
        bias[: len(b)] = b
    anywhere = fc_at(shape, FcQuant(0, w_zp, 0, 1.0, 0.0, 255.0), Region(0, shape.tiles, 0, 1))
    return FcLayout(shape, anywhere.blob(weights, bias))


def fc_call(shape: FcShape, quant: FcQuant, region: Region, clock_hz: int) -> CallPlan:
    """One row; a step takes one cycle, and the busiest tile has all steps of its groups."""
    return call_plan(fc_at(shape, quant, region).execution, shape.groups_per_tile * shape.words, clock_hz)


def rows_per_tile(shape: FcShape) -> int:
    """Parameter rows on each tile: bias and weight rows of its groups."""
    return shape.groups_per_tile * (1 + shape.words)


def chunk_outputs(k: int) -> int:
    """Most outputs of one FULLY_CONNECTED program with ``k`` inputs: what the tiles hold, a multiple of 64."""
    if k <= WORD_BYTES:
        return TILES * GROUP
    groups = FORWARD_FIFO_ROW // (1 + -(-k // WORD_BYTES))
    return min(MAX_DIMENSION, TILES * GROUP * groups)


def product(spec: LinearSpec, w: np.ndarray, b: np.ndarray | None) -> nw.Network:
    """The layer with weights uint8 [n, K] and bias int32 [n], n up to 8192, as a network from ``x`` to
    ``y``."""
    return product_network(f"linear_{len(w)}x{spec.k}", spec.quant(), w, b)


def product_rows(spec: LinearSpec, x: np.ndarray) -> np.ndarray:
    """Rows uint8 [M, K] as the input [M, 1, 1, K padded to words] of ``product``."""
    padded = np.full((len(x), 1, 1, product_words(spec.k) * WORD_BYTES), spec.in_zp, np.uint8)
    padded[:, 0, 0, : spec.k] = x
    return padded
