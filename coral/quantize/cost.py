"""What a layer costs on the host, predicted. Source: docs/quantize.md, Report."""

from __future__ import annotations

import copy
import math
from typing import Any

from tinygrad import nn
from tinygrad.nn.state import get_parameters
from tinygrad.tensor import Tensor

OPERATIONS_PER_S, KERNEL_S = 3e9, 20e-6
"""Compiled loops on one core, multiplications and additions counted each, and what a kernel costs besides."""
ELEMENTWISE = 8
"""Operations per value of layers without a matrix: norms, activations."""


def host_seconds(operations: float, kernels: int = 1) -> float:
    """Predicted seconds of so many multiplications and additions as compiled code."""
    return KERNEL_S * kernels + operations / OPERATIONS_PER_S


def operations_of(layer: Any, x: Tensor, y: Tensor) -> int:
    """Multiplications and additions of one call of a layer of ``tinygrad.nn``, from its weights and the shapes."""
    values, results = (math.prod(int(size) for size in t.shape) for t in (x, y))
    total = ELEMENTWISE * max(values, results)
    for weight in get_parameters(layer):
        shape = [int(size) for size in weight.shape]
        if isinstance(layer, nn.Embedding):
            total += 2 * results * shape[0]
        elif len(shape) >= 2:
            total += 2 * (values if isinstance(layer, nn.ConvTranspose2d) else results) * math.prod(shape[1:])
    return total


def counting(layer: Any) -> Any:
    """A stand-in of the same class that computes the same; ``predicted_seconds`` adds up its calls on the host."""

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        result = layer(*arguments, **options)
        results = result if isinstance(result, tuple) else [result]
        tensors = [t for t in (*arguments, *results) if isinstance(t, Tensor)]
        self.predicted_seconds += host_seconds(operations_of(layer, tensors[0], tensors[-1]))
        return result

    stand_in = copy.copy(layer)
    stand_in.__class__ = type(type(layer).__name__, (type(layer),), {"__call__": call})
    stand_in.predicted_seconds = 0.0
    return stand_in


__all__ = ["counting", "host_seconds", "operations_of"]
