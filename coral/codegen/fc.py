"""FULLY_CONNECTED: y[N] = W[N, K] x[K] + bias, weights resident on the tiles, as Google's compiler writes it.

``fully_connected`` is the older form (uint8, one scale per tensor; compiler 14.1), ``fully_connected_per_channel`` the
newer one (int8 with a scale per output; 16.0). Source: docs/codegen.md, section FULLY_CONNECTED.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coral.codegen.builder import V14, V16
from coral.codegen.errors import CodegenError, ShapeError
from coral.codegen.fc_execution import caching_bitstream, execution_bitstream
from coral.codegen.fc_plan import FcPlan, FcQuant, FcShape, Header
from coral.codegen.machine import WORD_BYTES
from coral.codegen.stream import INPUT, OUTPUT
from coral.package.program import Base, Bitstream, DmaHint, InstructionHint, InterruptHint, Kind, Layer, Program

__all__ = [
    "INPUT",
    "OUTPUT",
    "RESIDENT_TOKEN",
    "FcQuant",
    "FcShape",
    "FullyConnected",
    "fully_connected",
    "fully_connected_per_channel",
]

RESIDENT_TOKEN = 0x74696E79636F7261
"""Parameter caching token shared by all our resident programs: they may stay on the chip together."""


@dataclass(frozen=True)
class FullyConnected(FcPlan):
    """Program pair of a layer at one place: ``blob`` packs parameters, ``caching`` loads them, ``execution`` runs."""

    def blob(
        self,
        weights: np.ndarray,
        bias: np.ndarray | None = None,
        *,
        mult: np.ndarray | None = None,
        w_zp: np.ndarray | None = None,
    ) -> bytes:
        """Parameter bytes of ``weights`` uint8 [N, K] and ``bias`` int32 [N].

        The per-channel form also takes ``mult`` float32 [N] and ``w_zp`` int32 [N]; weights are then the stored codes,
        int8 values XOR 0x80. CodegenError if an array is missing or superfluous, ShapeError or CodegenError if its
        shape or dtype is wrong.
        """
        s = self.shape
        rows = [
            ("mult", mult, np.float32, self.header.scale),
            ("bias", bias, np.int32, self.header.bias),
            ("w_zp", w_zp, np.int32, self.header.zero_points),
        ]
        _check_array("weights", weights, np.uint8, (s.n, s.k))
        padded = np.full((s.groups * s.group_outputs, s.words * WORD_BYTES), self.quant.w_zp, np.uint8)
        padded[: s.n, : s.k] = weights
        parts = []
        for name, array, dtype, wanted in rows:
            if (array is not None) != wanted:
                raise CodegenError(f"{name} is {'missing' if wanted else 'given, but this form has none'}")
            if array is not None:
                _check_array(name, array, dtype, (s.n,))
                row = np.zeros(s.groups * s.group_outputs, dtype)
                row[: s.n] = array
                parts.append(row.view(np.uint8).reshape(s.groups, 1, s.group_outputs, WORD_BYTES))
        if w_zp is not None:
            if w_zp.min() < 0 or w_zp.max() > 255:
                raise CodegenError(f"w_zp holds {w_zp.min()}..{w_zp.max()}, a zero point of a uint8 code is 0..255")
            padded[: s.n, s.k :] = w_zp[:, None]
        columns = padded.reshape(s.groups, s.group_outputs, s.words, WORD_BYTES).transpose(0, 2, 1, 3)
        return np.concatenate([*parts, columns], axis=1).tobytes()

    def caching(self, blob: bytes) -> Program:
        """Program that loads ``blob`` (from ``blob``) into the tiles."""
        if len(blob) != self.blob_bytes:
            raise CodegenError(f"parameters are {len(blob)} bytes long, {self.blob_bytes} are needed")
        hints = (InstructionHint(), DmaHint(Base.PARAMETER, 0, len(blob)), InterruptHint())
        return Program(
            Kind.PARAMETER_CACHING,
            (self._caching_bitstream,),
            hints,
            parameters=blob,
            token=RESIDENT_TOKEN,
            name=f"fc_{self.shape.n}x{self.shape.k}_parameters",
        )

    @cached_property
    def execution(self) -> Program:
        """Program that computes one output from input layer ``x`` (K) to output layer ``y`` (N)."""
        s, q = self.shape, self.quant
        return Program(
            Kind.EXECUTION_ONLY,
            (execution_bitstream(self),),
            (
                InstructionHint(),
                DmaHint(Base.INPUT, 0, s.input_bytes, INPUT),
                DmaHint(Base.OUTPUT, 0, s.output_bytes, OUTPUT, out=True),
                InterruptHint(),
            ),
            inputs=(Layer(INPUT, s.input_bytes, 1, 1, s.k, q.in_zp, q.in_scale),),
            outputs=(Layer(OUTPUT, s.output_bytes, 1, 1, s.n, q.out_zp, q.out_scale),),
            token=RESIDENT_TOKEN,
            name=f"fc_{s.n}x{s.k}",
            narrow_bytes_per_tile=self.narrow.end,
        )

    @cached_property
    def _caching_bitstream(self) -> Bitstream:
        return caching_bitstream(self)


def _check_array(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ShapeError(f"{name} has shape {array.shape}, {shape} is needed")
    if array.dtype != dtype:
        raise CodegenError(f"{name} is {array.dtype}, {np.dtype(dtype)} is needed")


def fully_connected(
    n: int,
    k: int,
    quant: FcQuant,
    *,
    parameter_row: int = 0,
    tile_shift: int = 0,
    compute_shift: int = 0,
    bias: bool = True,
) -> FullyConnected:
    """uint8 layer with one scale per tensor (style 14.1), parameters from ``parameter_row`` on.

    ``tile_shift`` moves everything to higher tiles, ``compute_shift`` only the parameters and the computation. Without
    ``bias`` the parameters have no bias row. ShapeError: see FcShape and FullyConnected.
    """
    header = Header(scale=False, bias=bias, zero_points=False)
    return FullyConnected(FcShape(n, k), quant, header, V14, parameter_row, tile_shift, tile_shift + compute_shift)


def fully_connected_per_channel(
    n: int,
    k: int,
    quant: FcQuant,
    *,
    parameter_row: int = 0,
    tile_shift: int = 0,
    compute_shift: int = 0,
    bias: bool = False,
) -> FullyConnected:
    """int8 layer with a scale and zero point per output (style 16.0); arguments as ``fully_connected``."""
    header = Header(scale=True, bias=bias, zero_points=True)
    return FullyConnected(FcShape(n, k), quant, header, V16, parameter_row, tile_shift, tile_shift + compute_shift)
