"""TFLite graphs that are built operator by operator, for the ONNX front end. Source: docs/compiler.md, section ONNX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coral.package.graph import Graph, Operator, Tensor

NONE = "NONE"
IMAGE_RANK = 4
TYPES = {"uint8": 3, "int8": 9, "int32": 2}
OPTIONS = {
    "CONV_2D": "Conv2DOptions", "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions",
    "FULLY_CONNECTED": "FullyConnectedOptions",
    "AVERAGE_POOL_2D": "Pool2DOptions", "MAX_POOL_2D": "Pool2DOptions", "ADD": "AddOptions", "SUB": "SubOptions",
    "MUL": "MulOptions", "CONCATENATION": "ConcatenationOptions", "RESHAPE": "ReshapeOptions", "PAD": "PadOptions",
    "MEAN": "ReducerOptions", "SOFTMAX": "SoftmaxOptions", "QUANTIZE": "QuantizeOptions",
    "TRANSPOSE": "TransposeOptions",
}  # fmt: skip
Failure = Callable[[str], Exception]


@dataclass(frozen=True)
class Quant:
    """Quantisation of a whole tensor."""

    scale: float
    zero: int
    dtype: np.dtype


@dataclass(frozen=True)
class Code:
    """A tensor of codes: its number, its ONNX shape, and for a flattened image the (C, H, W) that ONNX flattened; the
    tensor holds it in the order (H, W, C)."""

    number: int
    shape: tuple[int, ...]
    quant: Quant
    flat: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Fixed:
    """Constant codes in ONNX's order, with the quantisation of all of them."""

    data: np.ndarray
    scale: float
    zero: int

    @property
    def shape(self) -> tuple[int, ...]:
        """ONNX's."""
        return self.data.shape


class Builder:
    """Tensors and operators so far."""

    def __init__(self, name: str) -> None:
        self.name, self.tensors, self.operators = name, [], []
        self.inputs: list[int] = []

    def graph(self, outputs: Sequence[int], names: Sequence[str]) -> Graph:
        """The finished graph, its outputs named."""
        for number, name in zip(outputs, names, strict=True):
            if number not in self.inputs:
                self.tensors[number] = replace(self.tensors[number], name=name)
        return Graph(self.name, tuple(self.tensors), tuple(self.inputs), tuple(outputs), tuple(self.operators))

    def _tensor(self, shape: Sequence[int], quant: Quant, name: str = "") -> int:
        scales, zeros = np.array([quant.scale], np.float32), np.array([quant.zero], np.int64)
        name = name or f"tensor{len(self.tensors)}"
        kind = TYPES[quant.dtype.name]
        self.tensors.append(Tensor(name, tuple(shape), kind, quant.dtype, scales, zeros, 0, None, False))
        return len(self.tensors) - 1

    def _constant(self, data: np.ndarray, scales: Any = (), zeros: Any = (), axis: int = 0) -> int:
        data = np.ascontiguousarray(data)
        quant = np.asarray(scales, np.float32), np.asarray(zeros, np.int64)
        name = f"constant{len(self.tensors)}"
        self.tensors.append(Tensor(name, data.shape, TYPES[data.dtype.name], data.dtype, *quant, axis, data, False))
        return len(self.tensors) - 1

    def _code(self, shape: Sequence[int], quant: Quant, flat: tuple[int, int, int] | None = None) -> Code:
        """A new tensor for an ONNX shape."""
        return Code(self._tensor(channels_last(shape), quant), tuple(shape), quant, flat)

    def _operator(self, name: str, inputs: Sequence[int], y: Code, **options: Any) -> Code:
        version = 1 if y.quant.dtype == np.uint8 else 3
        kind = OPTIONS.get(name, "")
        self.operators.append(Operator(name, tuple(inputs), (y.number,), options, (), None, kind, version))
        return y

    def input(self, name: str, shape: tuple[int, ...], quant: Quant) -> Code:
        """An input of the model."""
        number = self._tensor(channels_last(shape), quant, name)
        self.inputs.append(number)
        return Code(number, shape, quant)

    def _fixed(self, c: Fixed, rank: int, flat: tuple[int, int, int] | None) -> int:
        """A constant operand in the order of the other one's tensor; one value per channel of an image as a vector."""
        data = c.data
        if rank == IMAGE_RANK and data.size > 1:
            data = data.reshape((1,) * (rank - data.ndim) + data.shape)
            data = data.ravel() if data.size == data.shape[1] else np.moveaxis(data, 1, -1)
        elif flat and data.size > 1:
            data = data.ravel()[_columns(flat)]
        return self._constant(data, [c.scale], [c.zero])

    def requantised(self, x: Code, quant: Quant) -> Code:
        """The same values in another quantisation."""
        if x.quant == quant:
            return x
        return self._operator("QUANTIZE", [x.number], self._code(x.shape, quant, x.flat))

    def unary(self, name: str, x: Code, quant: Quant, **options: Any) -> Code:
        """An operator on single values, or over channels."""
        return self._operator(name, [x.number], self._code(x.shape, quant, x.flat), **options)

    def binary(
        self, name: str, a: Code | Fixed, b: Code | Fixed, quant: Quant, activation: str, error: Failure
    ) -> Code:
        """An operator on two tensors, of which one may be a constant; ONNX's broadcasting."""
        codes = [side for side in (a, b) if isinstance(side, Code)]
        try:
            shape = np.broadcast_shapes(a.shape, b.shape)
        except ValueError:
            raise error(f"operands of {a.shape} and {b.shape}") from None
        if not codes or any(len(code.shape) != len(shape) for code in codes):
            raise error(f"operands of {a.shape} and {b.shape}: needed are as many dimensions, and one that is computed")
        flats = {code.flat for code in codes}
        flat = flats.pop() if len(flats) == 1 and all(code.shape == shape for code in codes) else None
        numbers = []
        for side in (a, b):
            if isinstance(side, Fixed):
                numbers.append(self._fixed(side, len(shape), flat))
            else:
                numbers.append((side if side.flat == flat else self.in_order(side)).number)
        return self._operator(name, numbers, self._code(shape, quant, flat), fused_activation_function=activation)

    def conv(
        self, x: Code, w: np.ndarray, scales: np.ndarray, zeros: np.ndarray, bias: np.ndarray | None,
        geometry: dict[str, Any], quant: Quant, activation: str, error: Failure,
    ) -> Code:  # fmt: skip
        """A convolution ``[O, I, kh, kw]``, depthwise where every channel is a group."""
        n, c = w.shape[0], x.shape[1]
        group = geometry["group"]
        if len(x.shape) != 4 or (group != 1 and (group != c or w.shape[1] != 1)):
            raise error(f"{group} groups on {c} channels: covered are 1 and {c}")
        x, padding, size = self._padded(x, geometry, error)
        depthwise = group != 1
        order, axis = ((1, 2, 3, 0), 3) if depthwise else ((0, 2, 3, 1), 0)
        weights = self._constant(w.transpose(order), scales, zeros, axis)
        bias = np.zeros(n, np.int32) if bias is None else bias.astype(np.int32)
        ends = [x.number, weights, self._constant(bias, np.float32(x.quant.scale) * scales, np.zeros(scales.size))]
        options = _windows(geometry, padding, activation)
        options |= {"dilation_h_factor": geometry["dilations"][0], "dilation_w_factor": geometry["dilations"][1]}
        y = self._code((x.shape[0], n, *size), quant)
        if depthwise:
            return self._operator("DEPTHWISE_CONV_2D", ends, y, **options, depth_multiplier=n // c)
        return self._operator("CONV_2D", ends, y, **options)

    def dense(
        self, x: Code, w: np.ndarray, scales: np.ndarray, zeros: np.ndarray, bias: np.ndarray | None, quant: Quant,
        activation: str, error: Failure,
    ) -> Code:  # fmt: skip
        """A layer of weights ``[O, I]``, whose columns follow the order of a flattened image."""
        if len(x.shape) != 2 or w.ndim != 2 or w.shape[1] != x.shape[1]:
            raise error(f"weights {w.T.shape} on {x.shape}")
        if x.flat:
            w = w[:, _columns(x.flat)]
        if bias is not None and bias.size not in (1, len(w)):
            raise error(f"a bias of {bias.size} values for {len(w)} results")
        bias = np.broadcast_to(np.int32(0) if bias is None else bias.astype(np.int32), len(w))
        ends = [x.number, self._constant(w, scales, zeros, 0)]
        ends.append(self._constant(bias, np.float32(x.quant.scale) * scales, np.zeros(scales.size)))
        y = self._code((x.shape[0], len(w)), quant)
        return self._operator("FULLY_CONNECTED", ends, y, fused_activation_function=activation, weights_format=0)

    def pool(self, name: str, x: Code, geometry: dict[str, Any], quant: Quant | None, error: Failure) -> Code:
        """A pool; without a quantisation the result has that of ``x``."""
        if len(x.shape) != 4 or geometry["dilations"] != [1, 1]:
            raise error(f"a pool of {x.shape} with dilations {geometry['dilations']}")
        lowest = 0 if x.quant.dtype == np.uint8 else -128
        if name == "MAX_POOL_2D" and any(geometry["pads"]) and not _same(x, geometry) and x.quant.zero != lowest:
            raise error(f"pads {geometry['pads']} of a maximum: covered are those of SAME")
        x, padding, size = self._padded(x, geometry, error)
        options = _windows(geometry, padding, NONE)
        options |= {"filter_height": geometry["kernel"][0], "filter_width": geometry["kernel"][1]}
        return self._operator(name, [x.number], self._code((*x.shape[:2], *size), quant or x.quant), **options)

    def mean(self, x: Code, quant: Quant, error: Failure, *, keep: bool) -> Code:
        """Over rows and columns."""
        if len(x.shape) != IMAGE_RANK:
            raise error(f"an average over {x.shape}, needed is [N, C, H, W]")
        y = self._code((*x.shape[:2], 1, 1) if keep else x.shape[:2], quant)
        return self._operator("MEAN", [x.number, self._constant(np.array([1, 2], np.int32))], y, keep_dims=keep)

    def flat(self, x: Code) -> Code:
        """An image as a row, in the tensor's own order."""
        if len(x.shape) == 2:
            return x
        n, c, h, w = x.shape
        y = self._code((n, c * h * w), x.quant, (c, h, w) if h * w > 1 else None)
        shape = tuple(self.tensors[y.number].shape)
        return self._operator("RESHAPE", [x.number, self._constant(np.array(shape, np.int32))], y, new_shape=shape)

    def in_order(self, x: Code) -> Code:
        """A flattened image in ONNX's order, by the host."""
        if x.flat is None:
            return x
        (c, h, w), n = x.flat, x.shape[0]
        image = self._reshaped(x, (n, h, w, c))
        turned = Code(self._tensor((n, c, h, w), x.quant), (n, c, h, w), x.quant)
        order = self._constant(np.array([0, 3, 1, 2], np.int32))
        self._operator("TRANSPOSE", [image.number, order], turned)
        return self._reshaped(turned, (n, c * h * w))

    def _reshaped(self, x: Code, shape: tuple[int, ...]) -> Code:
        y = Code(self._tensor(shape, x.quant), shape, x.quant)
        return self._operator("RESHAPE", [x.number, self._constant(np.array(shape, np.int32))], y, new_shape=shape)

    def concat(self, parts: Sequence[Code], quant: Quant) -> Code:
        """Channels side by side."""
        shape = (parts[0].shape[0], sum(p.shape[1] for p in parts), *parts[0].shape[2:])
        numbers = [self.in_order(p).number for p in parts]
        return self._operator(
            "CONCATENATION", numbers, self._code(shape, quant), axis=len(shape) - 1, fused_activation_function=NONE
        )

    def _padded(self, x: Code, geometry: dict[str, Any], error: Failure) -> tuple[Code, str, tuple[int, int]]:
        """(input, TFLite's padding, output's size); pads that are not SAME are an operator of their own."""
        if geometry["auto"] == "SAME_UPPER" or _same(x, geometry):
            h, w = (-(-n // s) for n, s in zip(x.shape[2:], geometry["strides"], strict=True))
            return x, "SAME", (h, w)
        top, left, bottom, right = geometry["pads"]
        if any(geometry["pads"]):
            n, c, h, w = x.shape
            pads = self._constant(np.array([[0, 0], [top, bottom], [left, right], [0, 0]], np.int32))
            y = self._code((n, c, h + top + bottom, w + left + right), x.quant)
            x = self._operator("PAD", [x.number, pads], y)
        extents = [(k - 1) * d + 1 for k, d in zip(geometry["kernel"], geometry["dilations"], strict=True)]
        sizes = [(n - e) // s + 1 for n, e, s in zip(x.shape[2:], extents, geometry["strides"], strict=True)]
        if min(sizes) < 1:
            raise error(f"windows of {extents} do not fit {x.shape[2:]}")
        return x, "VALID", (sizes[0], sizes[1])


def _columns(flat: tuple[int, int, int]) -> np.ndarray:
    """Where in ONNX's order (C, H, W) the values of a flattened image lie that the tensor holds as (H, W, C)."""
    return np.arange(flat[0] * flat[1] * flat[2]).reshape(flat).transpose(1, 2, 0).ravel()


def _same(x: Code, geometry: dict[str, Any]) -> bool:
    """Whether explicit pads are those of TFLite's SAME."""
    wanted: tuple[list[int], list[int]] = ([], [])
    for n, k, s, d in zip(x.shape[2:], geometry["kernel"], geometry["strides"], geometry["dilations"], strict=True):
        total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
        wanted[0].append(total // 2)
        wanted[1].append(total - total // 2)
    return geometry["pads"] == [*wanted[0], *wanted[1]] and any(geometry["pads"])


def _windows(geometry: dict[str, Any], padding: str, activation: str) -> dict[str, Any]:
    strides = geometry["strides"]
    return {"padding": padding, "stride_h": strides[0], "stride_w": strides[1], "fused_activation_function": activation}


def channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    """ONNX's ``[N, C, H, W]`` as TFLite's ``[N, H, W, C]``; other ranks as they are."""
    return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else tuple(shape)


__all__ = ["Builder", "Code", "Fixed", "Quant", "channels_last"]
