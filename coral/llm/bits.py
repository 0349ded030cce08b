"""Networks of layers on single positions in the chip's arithmetic, on the host: what engine ``blocks`` computes without
a chip, and what its chip is compared with. Source: docs/stories.md, Blocks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from coral.codegen import CodegenError
from coral.codegen import network as nw
from coral.numerics import accumulators, exact_dtype, requantise

Codes = NDArray[np.uint8]


class Bits:
    """A network of 1x1 convolutions, products, requantisations and maxima over windows side by side. CodegenError for
    others."""

    def __init__(self, network: nw.Network) -> None:
        self.network = network
        self.weights: dict[str, NDArray] = {}
        for stage in network.stages:
            if isinstance(stage, nw.Conv) and stage.window.pointwise and not isinstance(stage, nw.Depthwise):
                w = stage.weights.reshape(len(stage.weights), -1).astype(np.int16) - stage.w_zp
                self.weights[stage.output] = np.ascontiguousarray(w.T.astype(exact_dtype(w)))

    def __call__(self, inputs: Mapping[str, Codes]) -> dict[str, Codes]:
        """Outputs uint8 [images, y, x, c] by name, of inputs in the same form."""
        values = dict(inputs)
        for stage in self.network.stages:
            values[stage.output] = self._stage(stage, [values[name] for name in stage.inputs])
        return {name: values[name] for name in self.network.outputs}

    def _stage(self, stage: nw.Stage, reads: list[Codes]) -> Codes:
        zeros = [self.network.tensors[name].zero_point for name in stage.inputs]
        zero, mult, spline = self.network.tensors[stage.output].zero_point, getattr(stage, "mult", 1.0), None
        if stage.output in self.weights and isinstance(stage, nw.Conv):
            weights = self.weights[stage.output]
            acc = accumulators((reads[0].astype(weights.dtype) - weights.dtype.type(zeros[0])) @ weights, stage.bias)
        elif isinstance(stage, nw.Multiply):
            a, b = (x.astype(np.int32) - z for x, z in zip(reads, zeros, strict=True))
            acc = a * b
        elif isinstance(stage, nw.Requantise):
            acc, spline = reads[0].astype(np.int32) - zeros[0] + stage.offset, stage.spline
        elif isinstance(stage, nw.MaxPool) and stage.at.kernel == stage.at.stride and stage.at.pad == (0, 0):
            (n, y, x, c), (h, w) = reads[0].shape, stage.at.kernel
            acc = reads[0].reshape(n, y // h, h, x // w, w, c).max((2, 4)).astype(np.int32) - zeros[0]
        else:
            raise CodegenError(f"stage {stage.output!r}: {type(stage).__name__} is none of those computed here")
        return requantise(acc, mult, *stage.clamps, zero, nlu=spline)
