"""Layers as stages of a network: the chip's tensors are rows, columns, channels.

Apart from ``layers``, because code generation takes long to import and host-only work does without it.
Source: docs/backend.md, "Chip programs".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coral import numerics
from coral.backend.layers import Add, AveragePool, Clip, Conv, Image, Layer, Linear, MaxPool, Multiply, Requantise
from coral.codegen import network as nw
from coral.codegen.errors import CodegenError


def stage(
    layer: Layer, reads: tuple[str, ...], writes: str, image: Image, parameters: Sequence[np.ndarray]
) -> nw.Stage:
    """The layer as a stage; ``image`` is how its operand is seen, ``parameters`` are weights, bias, multipliers.

    :raises CodegenError: the chip has no such layer; with limit and number
    """
    low, high = numerics.integer_clamps(layer.out_zp, layer.lo, layer.hi)
    place: dict[str, Any] = {"inputs": reads, "output": writes, "clamps": (float(low), float(high))}
    match layer:
        case Linear():
            channels_last = parameters[0].reshape(layer.outputs, *image[1:]).transpose(0, 2, 3, 1)
            return nw.Dense(**place, weights=channels_last.reshape(layer.outputs, -1), **_numbers(layer, parameters))
        case Conv():
            return _convolution(layer, parameters, place)
        case MaxPool():
            return nw.MaxPool(**place, at=_window(layer))
        case AveragePool(mult=float(mult)) if any(layer.padding):
            # the chip's averages have no padding, its layers do
            ones = np.ones((*layer.kernel, image[1]), np.uint8)
            return nw.Depthwise(**place, weights=ones, bias=None, w_zp=0, mult=mult, at=_window(layer))
        case AveragePool(mult=float(mult)):
            return nw.AveragePool(**place, mult=mult, at=_window(layer))
        case Add(mult=float(mult)):
            offset = -sum(w * zp for w, zp in zip(layer.weights, layer.in_zps, strict=True))
            return nw.Add(**place, weights=layer.weights, offset=offset, mult=mult)
        case Multiply(mult=float(mult)):
            return nw.Multiply(**place, mult=mult)
        case Requantise(mult=float(mult)) | Clip(mult=float(mult)):
            return nw.Requantise(**place, mult=mult)
    raise CodegenError(f"a layer {type(layer).__name__} with multipliers per channel has no stage")


def _convolution(layer: Conv, parameters: Sequence[np.ndarray], place: dict[str, Any]) -> nw.Stage:
    weights = parameters[0]
    numbers = {**_numbers(layer, parameters), "at": _window(layer, layer.dilation)}
    if layer.groups > 1 and layer.groups == layer.outputs == layer.shape[1]:
        return nw.Depthwise(**place, weights=weights[:, 0].transpose(1, 2, 0), **numbers)
    if layer.groups > 1:
        weights = _ungrouped(weights, layer.groups, layer.w_zp)
    return nw.Conv(**place, weights=weights.transpose(0, 2, 3, 1), **numbers)


def _numbers(layer: Linear | Conv, parameters: Sequence[np.ndarray]) -> dict[str, Any]:
    _, bias, multipliers = layer.split(parameters)
    return {"bias": bias, "w_zp": layer.w_zp, "mult": layer.mult if multipliers is None else multipliers}


def _window(layer: Conv | MaxPool | AveragePool, dilation: tuple[int, int] = (1, 1)) -> nw.Window:
    return nw.Window(layer.kernel, layer.stride, (layer.padding[2], layer.padding[0]), dilation)


def _ungrouped(weights: np.ndarray, groups: int, w_zp: int) -> np.ndarray:
    """Weights [O, C / groups, kh, kw] for all C channels: those of other groups are zero points."""
    outputs, channels, *kernel = weights.shape
    full = np.full((groups, outputs // groups, groups, channels, *kernel), w_zp, np.uint8)
    for group in range(groups):
        full[group, :, group] = weights.reshape(groups, outputs // groups, channels, *kernel)[group]
    return full.reshape(outputs, groups * channels, *kernel)
