"""What ``coral.quantize(..., report=True)`` tells about each layer and about the whole. Source: docs/quantize.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral.quantize.layers import LayerQuant


@dataclass(frozen=True)
class Error:
    """Difference between float and quantised values: largest and root mean square, and the float values' own RMS."""

    largest: float
    rms: float
    signal_rms: float

    @classmethod
    def between(cls, floats: list[NDArray[Any]], quantised: list[NDArray[Any]]) -> Error:
        """The error over all arrays (same shapes in both lists); zero for empty ones."""
        signal = np.concatenate([np.ravel(a).astype(np.float64) for a in floats])
        difference = np.concatenate([np.ravel(a).astype(np.float64) for a in quantised]) - signal
        if not signal.size:
            return cls(0.0, 0.0, 0.0)
        rms, signal_rms = (float(np.sqrt(np.mean(np.square(a)))) for a in (difference, signal))
        return cls(float(np.abs(difference).max()), rms, signal_rms)

    def __str__(self) -> str:
        relative = f"{self.rms / self.signal_rms:.2%}" if self.signal_rms else "-"
        return f"rms {self.rms:.3g} ({relative}), max {self.largest:.3g}"


@dataclass(frozen=True)
class LayerReport:
    """One layer of ``tinygrad.nn`` in the model.

    :param place: "chip" for a layer that is uint8 now (one chip program with ``DEV=CORAL``), "host" for one left
        float, "folded" for a batch norm that became part of other layers
    :param reason: why it stays on the host or where it went; for a chip layer, what was merged into it or shared
    :param error: of this layer alone, given float inputs; None on the host
    :param seconds: predicted, of a layer that stays on the host, per call of the model (docs/quantize.md)
    """

    name: str
    kind: str
    place: str
    reason: str
    calls: int = 0
    input_range: tuple[float, float] | None = None
    output_range: tuple[float, float] | None = None
    quant: LayerQuant | None = None
    error: Error | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """All layers in the order in which the model holds them, and the error of the model's output."""

    layers: tuple[LayerReport, ...]
    error: Error

    def __str__(self) -> str:
        rows = [("layer", "kind", "place", "input range", "output range", "error of the layer", "host time", "reason")]
        for layer in self.layers:
            inputs, outputs = (
                f"{r[0]:.4g} .. {r[1]:.4g}" if r else "-" for r in (layer.input_range, layer.output_range)
            )
            cost = f"{layer.seconds * 1e6:,.0f} µs" if layer.seconds else "-"
            error = str(layer.error or "-")
            rows.append((layer.name, layer.kind, layer.place, inputs, outputs, error, cost, layer.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"model output: {self.error}"])
