"""``coral.export_tflite(qmodel, path)``: a quantised model as a TFLite file that other stacks run.

The model is called once on an input without values; what its layers do is written down operator by operator, images as
``[N, H, W, C]``. Source: docs/quantize.md, "Export".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad.dtype import dtypes
from tinygrad.helpers import Context, make_tuple, resolve_pool_pads
from tinygrad.tensor import Tensor
from tinygrad.uop import Ops
from tinygrad.uop.ops import UOp

from coral import CoralError, numerics
from coral.package.flatbuffer import parse_schema, write
from coral.quantize.expressions_windows import qavg_pool_expression, qmax_pool_expression
from coral.quantize.layers import ChannelQuant, QConv2d, QLayer, QLinear
from coral.quantize.model_graph import ModelGraph
from coral.quantize.peel import Quant, dequantised, read
from coral.quantize.tape import Step, taping

ADD, AVERAGE_POOL, CONV, DEPTHWISE, FULLY_CONNECTED, MAX_POOL, RELU, RESHAPE, PAD = 0, 1, 3, 4, 9, 17, 19, 22, 34
INT8_VERSIONS = {CONV: 3, DEPTHWISE: 3, FULLY_CONNECTED: 4, RESHAPE: 1}
"""Lowest operator versions that take int8, where that is not 2; uint8 is version 1 everywhere."""
NO_ACTIVATION, RELU_ACTIVATION, RELU6_ACTIVATION = 0, 1, 3
SAME, VALID = 0, 1
INT32, UINT8, INT8 = 2, 3, 9
SCHEMA = parse_schema("""
    table Model
        version:u32 operator_codes:[OperatorCode] subgraphs:[SubGraph] description:str buffers:[Buffer]
    table OperatorCode
        deprecated_builtin_code:i8 custom_code:str version:i32 builtin_code:i32
    table SubGraph
        tensors:[Tensor] inputs:[i32] outputs:[i32] operators:[Operator] name:str
    table Tensor
        shape:[i32] type:i8 buffer:u32 name:str quantization:Quantization
    table Quantization
        -:[f32] -:[f32] scale:[f32] zero_point:[i64] -:None|None quantized_dimension:i32
    table Operator
        opcode_index:u32 inputs:[i32] outputs:[i32]
        options:Conv|Depthwise|-|-|Pool|-|-|FullyConnected|-|-|Add|-|-|-|-|-|Reshape|-|-|-|-|Pad
    table Buffer
        data:bytes@16
    table Conv
        padding:i8 stride_w:i32 stride_h:i32 activation:i8 dilation_w:i32 dilation_h:i32
    table Depthwise
        padding:i8 stride_w:i32 stride_h:i32 depth_multiplier:i32 activation:i8 dilation_w:i32 dilation_h:i32
    table Pool
        padding:i8 stride_w:i32 stride_h:i32 filter_width:i32 filter_height:i32 activation:i8
    table FullyConnected
        activation:i8 weights_format:i8
    table Add
        activation:i8
    table Reshape
        new_shape:[i32]
    table Pad
""")


class ExportError(CoralError):
    """A model or a part of it that TFLite has no uint8 or int8 form of; the message names it."""


def export_tflite(qmodel: Any, path: str | Path, *, batch: int = 1) -> Path:
    """Write a model that :func:`coral.quantize` made as a TFLite file.

    Input and output are codes, uint8, or int8 (code - 128) if the weights have one scale per channel, with their
    quantisations in the file; an image input is ``[batch, H, W, C]``.

    :param batch: images the file computes at once
    :return: ``path``
    :raises ExportError: a part of the model is float, mixes weights per tensor and per channel, or has no TFLite form,
        the file cannot be written
    """
    layers = [layer for layer in ModelGraph(qmodel).layers.values() if isinstance(layer, QLayer)]
    if not layers or len(layers[0].model_inputs) != 1:
        raise ExportError("export takes a model of one input that coral.quantize made")
    x = Tensor.empty(batch, *layers[0].model_inputs[0][1:], dtype=dtypes.float32)
    with Context(TRAINING=0), taping() as steps:
        y = qmodel(x) if callable(qmodel) else x.sequential(list(qmodel))
    if not isinstance(y, Tensor):
        raise ExportError(f"the model returns {type(y).__name__}: export takes a model that returns one Tensor")
    reading = read(y.uop, dequantised)
    if reading is None or reading.base is None or reading.bounds != (-math.inf, math.inf):
        raise ExportError("the model's output is computed in float behind its last quantised layer")
    kinds = {
        isinstance(layer.quant.w, ChannelQuant) for step in steps for layer in [step.detail] if step.kind == "layer"
    }
    if len(kinds) > 1:
        raise ExportError("some layers have weights per channel: quantize with per_channel=True or per_channel=False")
    writer = _Writer(x.uop, {step.result: step for step in steps}, signed=kinds == {True})
    path, data = Path(path), writer.file(writer.emit(reading.base[0]))
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror}") from None
    return path


def _bare(node: UOp) -> UOp:
    """The node under copies and movements that only reshape."""
    while node.op in (Ops.CONTIGUOUS, Ops.RESHAPE):
        node = node.src[0]
    return node


class _Writer:
    """Collects tensors, buffers and operators; nodes of codes become tensors, images with channels last."""

    def __init__(self, x: UOp, steps: dict[UOp, Step], *, signed: bool) -> None:
        self.x, self.steps, self.signed = x, steps, signed
        self.buffers: list[dict[str, Any]] = [{}]
        self.tensors: list[dict[str, Any]] = []
        self.operators: list[dict[str, Any]] = []
        self.codes: list[int] = []
        self.inputs: list[int] = []
        self.done: dict[UOp, int] = {}
        self.quants: dict[int, Quant] = {}

    def file(self, output: int) -> bytes:
        graph = {"tensors": self.tensors, "inputs": self.inputs, "outputs": [output], "operators": self.operators}
        codes = [
            {"deprecated_builtin_code": c, "version": INT8_VERSIONS.get(c, 2) if self.signed else 1, "builtin_code": c}
            for c in self.codes
        ]
        model = {"version": 3, "operator_codes": codes, "subgraphs": [graph], "description": "tinycoral"}
        return write(SCHEMA, "Model", {**model, "buffers": self.buffers}, identifier=b"TFL3")

    def emit(self, node: UOp) -> int:
        """The tensor of a node of codes."""
        if node not in self.done:
            step = self.steps.get(node)
            if step is not None:
                makers: dict[str, Callable[[Step], int]] = {
                    "quantise": self._input, "layer": self._layer, "sum": self._sum, "clip": self._clip,
                    "max": self._pool, "mean": self._pool,
                }  # fmt: skip
                self.done[node] = makers[step.kind](step)
            elif node.op is Ops.CONTIGUOUS:
                self.done[node] = self.emit(node.src[0])
            elif node.op is Ops.RESHAPE:
                self.done[node] = self._reshape(node)
            else:
                raise ExportError(f"{node.op.name.lower()} between layers has no TFLite form here")
        return self.done[node]

    def _add(self, shape: tuple[int, ...], quant: Quant, name: str) -> int:
        if len(shape) == 4:
            shape = shape[0], shape[2], shape[3], shape[1]
        offset = 128 if self.signed else 0
        numbers = {"scale": [quant.scale], "zero_point": [quant.zero_point - offset]}
        kind = INT8 if self.signed else UINT8
        self.tensors.append({"shape": shape, "type": kind, "buffer": 0, "name": name, "quantization": numbers})
        self.quants[len(self.tensors) - 1] = quant
        return len(self.tensors) - 1

    def _constant(
        self, array: np.ndarray, kind: int, name: str, scales: Any = (), zeros: Any = (), axis: int = 0
    ) -> int:
        self.buffers.append({"data": array.tobytes()})
        numbers = {"scale": list(scales), "zero_point": list(zeros), "quantized_dimension": axis}
        entry = {"shape": array.shape, "type": kind, "buffer": len(self.buffers) - 1, "name": name}
        self.tensors.append({**entry, "quantization": numbers} if len(numbers["scale"]) else entry)
        return len(self.tensors) - 1

    def _operator(self, code: int, inputs: list[int], output: int, options: tuple[str, dict[str, Any]] | None) -> int:
        if code not in self.codes:
            self.codes.append(code)
        entry = {"opcode_index": self.codes.index(code), "inputs": inputs, "outputs": [output]}
        self.operators.append({**entry, "options": options} if options else entry)
        return output

    def _input(self, step: Step) -> int:
        if _bare(step.inputs[0]) is not _bare(self.x) or self.inputs:
            raise ExportError("float code computes the input of a quantised layer: it has no TFLite form here")
        self.inputs.append(self._add(tuple(map(int, step.result.shape)), step.quant, "input"))
        return self.inputs[0]

    def _reshape(self, node: UOp) -> int:
        source, shape = self.emit(node.src[0]), tuple(map(int, node.shape))
        before = tuple(map(int, node.src[0].shape))
        if before == shape:
            return source
        if len(before) == 4 and len(shape) == 2 and shape[0] == before[0]:
            output = self._add(shape, self.quants[source], f"flat{len(self.tensors)}")
        elif len(shape) == len(before) == 2 or math.prod(before[2:]) == 1 == math.prod(shape[2:]):
            output = self._add(shape, self.quants[source], f"reshaped{len(self.tensors)}")
        else:
            raise ExportError(f"a reshape of {before} to {shape} between layers has no TFLite form here")
        target = self._constant(np.array(self.tensors[output]["shape"], np.int32), INT32, f"shape{output}")
        return self._operator(
            RESHAPE, [source, target], output, ("Reshape", {"new_shape": self.tensors[output]["shape"]})
        )

    def _image_order(self, node: UOp, k: int) -> np.ndarray:
        """Order of a linear layer's k columns for an input that was flattened with channels last."""
        while node.op in (Ops.CONTIGUOUS, Ops.RESHAPE) and node not in self.steps:
            node = node.src[0]
        shape = tuple(map(int, node.shape))
        if len(shape) == 4 and math.prod(shape[1:]) == k:
            return np.arange(k).reshape(shape[1:]).transpose(1, 2, 0).ravel()
        return np.arange(k)

    def _layer(self, step: Step) -> int:
        layer: Any = step.detail
        weights = layer.weight_codes.numpy()
        q, source, index = layer.quant, self.emit(step.inputs[0]), len(self.operators)
        shape = tuple(map(int, step.result.shape))
        activation = _activation((q.lo, q.hi), q.y, q.top)
        if isinstance(layer, QLinear):
            weights, axis, code = weights[:, self._image_order(step.inputs[0], weights.shape[1])], 0, FULLY_CONNECTED
            options: tuple[str, dict[str, Any]] = "FullyConnected", {"activation": activation, "weights_format": 0}
        else:
            source, weights, axis, code, options = self._convolution(layer, step, source, weights, activation)
        offset = 128 if self.signed else 0
        kind = INT8 if self.signed else UINT8
        scales = np.atleast_1d(q.w_scale).astype(np.float32)
        zeros = [q.w.zero_point - offset] * len(scales)
        stored = (weights ^ np.uint8(offset)).astype(np.uint8)
        w = self._constant(stored, kind, f"weights{index}", scales.tolist(), zeros, axis)
        bias = np.zeros(shape[1] if len(shape) == 4 else shape[-1], np.int32)
        bias = bias if layer.bias_codes is None else layer.bias_codes.numpy()
        steps = np.float32(q.x.scale) * scales
        b = self._constant(bias, INT32, f"bias{index}", steps.tolist(), [0] * len(scales))
        return self._operator(code, [source, w, b], self._add(shape, q.y, f"layer{index}"), options)

    def _convolution(self, layer: QConv2d, step: Step, source: int, weights: np.ndarray, activation: int) -> Any:
        stride, padding, dilation, groups = layer.geometry
        (sy, sx), (dy, dx) = make_tuple(stride, 2), make_tuple(dilation, 2)
        channels = int(step.inputs[0].shape[1])
        source, mode = self._padded(step.inputs[0], source, padding, weights.shape[2:], (sy, sx), (dy, dx))
        common = {"padding": mode, "stride_w": sx, "stride_h": sy, "activation": activation}
        common |= {"dilation_w": dx, "dilation_h": dy}
        if groups == 1:
            return source, np.ascontiguousarray(weights.transpose(0, 2, 3, 1)), 0, CONV, ("Conv", common)
        if groups != channels:
            raise ExportError(f"a convolution in {groups} groups on {channels} channels has no TFLite form")
        options = "Depthwise", {**common, "depth_multiplier": len(weights) // channels}
        return source, np.ascontiguousarray(weights.transpose(1, 2, 3, 0)), 3, DEPTHWISE, options

    def _padded(self, node: UOp, source: int, padding: Any, kernel: Any, stride: Any, dilation: Any) -> tuple[int, int]:
        """The input of an operator on windows and its padding mode; other paddings get an operator of their own."""
        left, right, top, bottom = resolve_pool_pads(padding, 2)
        if not any((left, right, top, bottom)):
            return source, VALID
        same = []
        for size, k, s, d in zip(map(int, node.shape[2:]), kernel, stride, dilation, strict=True):
            total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            same.append((total // 2, total - total // 2))
        if same == [(top, bottom), (left, right)]:
            return source, SAME
        n, c, h, w = map(int, node.shape)
        quant = self.quants[source]
        output = self._add((n, c, h + top + bottom, w + left + right), quant, f"padded{len(self.tensors)}")
        pads = np.array([[0, 0], [top, bottom], [left, right], [0, 0]], np.int32)
        return self._operator(PAD, [source, self._constant(pads, INT32, f"pads{output}")], output, ("Pad", {})), VALID

    def _sum(self, step: Step) -> int:
        sources = [self.emit(node) for node in step.inputs]
        output = self._add(tuple(map(int, step.result.shape)), step.quant, f"sum{len(self.operators)}")
        return self._operator(ADD, sources, output, ("Add", {"activation": _activation(step.detail, step.quant)}))

    def _clip(self, step: Step) -> int:
        if step.detail != (step.quant.zero_point, 255):
            raise ExportError(f"a clamp to the codes {step.detail} between layers has no TFLite form here")
        source = self.emit(step.inputs[0])
        output = self._add(tuple(map(int, step.result.shape)), step.quant, f"relu{len(self.operators)}")
        return self._operator(RELU, [source], output, None)

    def _pool(self, step: Step) -> int:
        inner = step.inputs[0]
        kernel, stride, padding = _geometry(step)
        source, activation = self.emit(inner), NO_ACTIVATION
        if step.kind == "mean":
            activation = _activation(step.detail, step.quant)
        # A padded average counts the padding, which TFLite's SAME does not: kernel 0 never looks like SAME.
        window = kernel if step.kind == "max" else (0, 0)
        source, mode = self._padded(inner, source, padding, window, stride, (1, 1))
        n, c, *_ = map(int, step.result.shape)
        sizes = [
            (int(size) + 2 * padding - k) // s + 1 for size, k, s in zip(inner.shape[2:], kernel, stride, strict=True)
        ]
        output = self._add((n, c, *sizes), step.quant, f"pool{len(self.operators)}")
        options = {"padding": mode, "stride_w": stride[1], "stride_h": stride[0], "activation": activation}
        options |= {"filter_width": kernel[1], "filter_height": kernel[0]}
        self._operator(MAX_POOL if step.kind == "max" else AVERAGE_POOL, [source], output, ("Pool", options))
        if step.result.ndim == 4:
            return output
        flat = self._add((n, c), step.quant, f"flat{len(self.tensors)}")
        target = self._constant(np.array([n, c], np.int32), INT32, f"shape{flat}")
        return self._operator(RESHAPE, [output, target], flat, ("Reshape", {"new_shape": [n, c]}))


def _activation(limits: tuple[int, int], quant: Quant, top: float = math.inf) -> int:
    lo, hi = limits
    if hi < 255 and (hi != quant.code(6.0) or top not in (6.0, math.inf)):
        raise ExportError(f"a clamp to the codes {limits} has no TFLite form")
    if hi < 255 or top == 6.0:
        return RELU6_ACTIVATION
    return RELU_ACTIVATION if lo == quant.zero_point else NO_ACTIVATION


def _kernel_of(result: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> UOp:
    """The scheduled kernel of a pool on an image of codes."""
    calls = result(Tensor.empty(*shape, dtype=dtypes.uint8)).schedule_linear().src
    return calls[-1].src[0]


def _geometry(step: Step) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Kernel, stride and padding of a pool, found by building pools until one is the same kernel."""
    inner, shape = step.inputs[0], tuple(map(int, step.inputs[0].shape))
    if len(shape) != 4:
        raise ExportError(f"a maximum or mean over {shape} between layers has no TFLite form here")
    wanted = _kernel_of(lambda t: Tensor(step.result.substitute({inner: t.uop})), shape)
    for kernel, stride, padding in _pools(shape[2:], tuple(map(int, step.result.shape[2:])) or (1, 1)):

        def build(t: Tensor, kernel: Any = kernel, stride: Any = stride, padding: int = padding) -> Tensor:
            if step.kind == "max":
                return qmax_pool_expression(t, kernel, stride, padding)
            q, n = step.quant, kernel[0] * kernel[1]
            mult = float(numerics.average_multiplier(q.scale, n, q.scale, newer=True))
            lo, hi = step.detail
            return qavg_pool_expression(t, kernel, stride, q.zero_point, mult, lo, hi, q.zero_point, padding)

        if _kernel_of(build, shape) is wanted:
            return kernel, stride, padding
    raise ExportError(f"a maximum or mean of {shape} to {tuple(step.result.shape)} between layers is not a pool")


def _pools(size: tuple[int, ...], out: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], tuple[int, int], int]]:
    """Pools that turn images of ``size`` into ``out``, usual ones first."""
    if out == (1, 1):
        yield (size[0], size[1]), (1, 1), 0
    for padding, stride, ky, kx in itertools.product(range(4), range(1, 5), range(1, 12), range(1, 12)):
        fits = all((n + 2 * padding - k) // stride + 1 == o for n, k, o in zip(size, (ky, kx), out, strict=True))
        if fits and padding < min(ky, kx) and ky <= size[0] + 2 * padding and kx <= size[1] + 2 * padding:
            yield (ky, kx), (stride, stride), padding
