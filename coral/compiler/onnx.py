"""ONNX models quantised with QLinear operators, or with QuantizeLinear and DequantizeLinear around float ones, become
TFLite graphs: images ``[N, H, W, C]``, codes in and out. Source: docs/compiler.md, section ONNX.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coral import numerics
from coral.compiler.errors import CompileError
from coral.compiler.onnx_graph import NONE, Builder, Code, Quant
from coral.package.graph import Graph

OPSETS = range(7, 27)
DOMAINS = {"", "ai.onnx", "com.microsoft"}


@dataclass(frozen=True)
class Constant:
    """Codes of the file with their quantisation, or float values (``scales`` is None)."""

    data: np.ndarray
    scales: np.ndarray | None = None
    zeros: np.ndarray | None = None
    axis: int = 0


@dataclass(frozen=True)
class Input:
    """A float input that nothing has quantised yet."""

    name: str
    shape: tuple[int, ...]


Pending = Callable[[Quant, str], Code]
"""A float operator: emits itself for the quantisation of its result, with a fused activation."""
Value = Code | Constant | Input | Pending


def is_onnx(source: Path | str | bytes) -> bool:
    """Whether a file is to be read as ONNX: by its name, or for bytes by what they are not."""
    if isinstance(source, bytes):
        return source[:1] == b"\x08" and source[4:8] != b"TFL3"
    return str(source).lower().endswith(".onnx")


def read_onnx(source: Path | str | bytes) -> Graph:
    """The graph of an ONNX file.

    :raises CompileError: the package onnx is missing; the file is damaged; an opset, operator or shape is not covered
    """
    if importlib.util.find_spec("onnx") is None:
        raise CompileError("ONNX files need the package onnx; install it with pip install 'tinycoral[onnx]'")
    onnx: Any = importlib.import_module("onnx")
    data = source if isinstance(source, bytes) else _load(source)
    try:
        model = onnx.load_from_string(data)
        onnx.checker.check_model(model)
    except Exception as error:  # protobuf and the checker raise many kinds
        raise CompileError(f"the file is no valid ONNX model: {str(error).splitlines()[0]:.300}") from None
    for opset in model.opset_import:
        if opset.domain not in DOMAINS or (opset.domain in ("", "ai.onnx") and opset.version not in OPSETS):
            raise CompileError(
                f"opset {opset.domain or 'ai.onnx'} {opset.version}: known are ai.onnx {OPSETS[0]} to {OPSETS[-1]} and "
                "com.microsoft; convert the model with onnx.version_converter"
            )
    return _Reader(onnx, model.graph).graph()


def _load(path: Path | str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CompileError(f"cannot read {path}: {error.strerror}") from None


class _Reader:
    """Values by ONNX name; every node is turned into operators of the builder, or waits for its quantisation."""

    def __init__(self, onnx: Any, graph: Any) -> None:
        self.onnx, self.onnx_graph, self.out = onnx, graph, Builder(graph.name or "main")
        self.values: dict[str, Value] = {i.name: Constant(onnx.numpy_helper.to_array(i)) for i in graph.initializer}
        for item in graph.input:
            if item.name not in self.values:
                self.values[item.name] = self._input(item)

    def _input(self, item: Any) -> Input:
        dims = item.type.tensor_type.shape.dim
        shape = [d.dim_value if d.HasField("dim_value") else 0 for d in dims]
        shape = [1, *shape[1:]] if shape and shape[0] == 0 else shape
        if not shape or min(shape) < 1:
            raise CompileError(f"input {item.name!r} has the dynamic shape {shape}: fix it when exporting the model")
        return Input(item.name, tuple(shape))

    def graph(self) -> Graph:
        """The whole graph. :raises CompileError: something is not covered; the message names the node."""
        for node in self.onnx_graph.node:
            self.node, self.options = node, self._attributes(node)
            handler = getattr(self, f"_{node.op_type.lower()}", None)
            if handler is None:
                raise self._error(f"{node.op_type} is not covered")
            result = handler()
            if result is not None:
                self.values[node.output[0]] = result
        outputs = [self._output(item.name) for item in self.onnx_graph.output]
        return self.out.graph(outputs)

    def _output(self, name: str) -> int:
        value = self.values.get(name)
        if not isinstance(value, Code):
            maker = next((n for n in self.onnx_graph.node if name in n.output), None)
            what = f"{maker.op_type} {maker.name!r}" if maker else "nothing"
            raise CompileError(
                f"output {name!r} is float32 (of {what}): quantise that operator too, or end the model before it"
            )
        return self.out.in_order(value).number

    def _attributes(self, node: Any) -> dict[str, Any]:
        return {a.name: self.onnx.helper.get_attribute_value(a) for a in node.attribute}

    def _failure(self) -> Callable[[str], CompileError]:
        """Errors that name the node of now, whenever they are made."""
        where = f"ONNX node {(self.node.name or self.node.output[0])!r} ({self.node.op_type})"
        return lambda message: CompileError(f"{where}: {message}")

    def _error(self, message: str) -> CompileError:
        return self._failure()(message)

    # operands

    def _value(self, index: int) -> Value:
        name = self.node.input[index] if index < len(self.node.input) else ""
        if name not in self.values:
            raise self._error(f"input {index} ({name!r}) is not there")
        return self.values[name]

    def _has(self, index: int) -> bool:
        return index < len(self.node.input) and self.node.input[index] != ""

    def _code(self, index: int) -> Code:
        value = self._value(index)
        if not isinstance(value, Code):
            kind = "float32" if not isinstance(value, Constant) else "a constant"
            raise self._error(f"input {self.node.input[index]!r} is {kind}, not codes: quantise the model")
        return value

    def _constant(self, index: int) -> Constant:
        value = self._value(index)
        if not isinstance(value, Constant):
            raise self._error(f"input {self.node.input[index]!r} is computed, needed is a constant")
        return value

    def _quant(self, scale: int, zero: int) -> Quant:
        scales = self._constant(scale).data.ravel()
        zeros = self._constant(zero).data.ravel() if self._has(zero) else np.zeros(1, np.uint8)
        if scales.size != 1 or zeros.size != 1 or zeros.dtype not in (np.uint8, np.int8):
            raise self._error(f"{scales.size} scales and zero points of {zeros.dtype}: needed are one of each, 8 bits")
        return Quant(float(scales[0]), int(zeros[0]), zeros.dtype)

    # quantisation

    def _quantizelinear(self) -> Code | Constant:
        x = self._value(0)
        quant = self._quant(1, 2)
        if isinstance(x, Constant):
            codes = np.rint(x.data / np.float32(quant.scale)) + quant.zero
            limits = np.iinfo(quant.dtype)
            codes = np.clip(codes, limits.min, limits.max).astype(quant.dtype)
            return Constant(codes, np.array([quant.scale], np.float32), np.array([quant.zero]))
        if isinstance(x, Input):
            return self.out.input(x.name, x.shape, quant)
        return self.out.requantised(x, quant) if isinstance(x, Code) else x(quant, NONE)

    def _dequantizelinear(self) -> Value:
        x = self._value(0)
        if isinstance(x, Code):
            return x
        if isinstance(x, Input):
            return self.out.input(x.name, x.shape, self._quant(1, 2))
        if not isinstance(x, Constant):
            raise self._error("its input is float32")
        scales = self._constant(1).data.astype(np.float32).ravel()
        zeros = self._constant(2).data.astype(np.int64).ravel() if self._has(2) else np.zeros(scales.size, np.int64)
        return Constant(x.data, scales, zeros, self.options.get("axis", 1) % max(x.data.ndim, 1))

    # layers

    def _conv(self) -> Pending:
        x, w = self._code(0), self._weights(1)
        bias = self._value(2) if self._has(2) else None
        geometry, b, fail = self._geometry(w), self._bias(bias, x, w), self._failure()
        return lambda quant, act: self.out.conv(x, w.data, *_per(w), b, geometry, quant, act, fail)

    def _weights(self, index: int) -> Constant:
        w = self._constant(index)
        if w.scales is None or w.data.dtype not in (np.uint8, np.int8):
            raise self._error(f"weights {self.node.input[index]!r} are {w.data.dtype}: quantise the model")
        return w

    def _bias(self, bias: Value | None, x: Code, w: Constant) -> np.ndarray | None:
        if bias is None:
            return None
        if not isinstance(bias, Constant):
            raise self._error("its bias is computed")
        if bias.data.dtype == np.int32:
            return bias.data.ravel()
        assert w.scales is not None
        return numerics.quantise_bias(bias.data.ravel(), x.quant.scale, w.scales if w.scales.size > 1 else w.scales[0])

    def _geometry(self, w: Constant) -> dict[str, Any]:
        kernel = list(self.options.get("kernel_shape", w.data.shape[2:]))
        auto = self.options.get("auto_pad", b"NOTSET").decode()
        if auto not in ("NOTSET", "VALID", "SAME_UPPER") or self.options.get("ceil_mode", 0):
            raise self._error(f"auto_pad {auto}, ceil_mode {self.options.get('ceil_mode', 0)}")
        if len(kernel) != 2:
            raise self._error(f"a kernel of {len(kernel)} dimensions, needed are 2")
        return {
            "kernel": kernel, "auto": auto, "strides": list(self.options.get("strides", [1, 1])),
            "pads": list(self.options.get("pads", [0, 0, 0, 0])), "group": self.options.get("group", 1),
            "dilations": list(self.options.get("dilations", [1, 1])),
        }  # fmt: skip

    def _qlinearconv(self) -> Code:
        x, raw = self._code(0), self._constant(3)
        w = Constant(raw.data, self._constant(4).data.astype(np.float32).ravel(), self._zeros(5))
        bias = self._constant(8).data if self._has(8) else None
        quant = self._quant(6, 7)
        return self.out.conv(x, w.data, *_per(w), bias, self._geometry(w), quant, NONE, self._error)

    def _zeros(self, index: int) -> np.ndarray:
        return self._constant(index).data.astype(np.int64).ravel()

    def _gemm(self) -> Pending:
        x, w = self._code(0), self._weights(1)
        if [self.options.get(o, v) for o, v in (("alpha", 1.0), ("beta", 1.0), ("transA", 0))] != [1.0, 1.0, 0]:
            raise self._error("alpha, beta and transA must be 1, 1 and 0")
        matrix = w.data if self.options.get("transB", 0) else w.data.T
        b, fail = self._bias(self._value(2) if self._has(2) else None, x, w), self._failure()
        return lambda quant, act: self.out.dense(x, matrix, *_per(w), b, quant, act, fail)

    def _matmul(self) -> Pending:
        x, w, fail = self._code(0), self._weights(1), self._failure()
        return lambda quant, act: self.out.dense(x, w.data.T, *_per(w), None, quant, act, fail)

    def _qlinearmatmul(self) -> Code:
        x, raw = self._code(0), self._constant(3)
        w = Constant(raw.data, self._constant(4).data.astype(np.float32).ravel(), self._zeros(5))
        return self.out.dense(x, w.data.T, *_per(w), None, self._quant(6, 7), NONE, self._error)

    def _qgemm(self) -> Code:
        x, raw = self._code(0), self._constant(3)
        w = Constant(raw.data, self._constant(4).data.astype(np.float32).ravel(), self._zeros(5))
        matrix = w.data if self.options.get("transB", 0) else w.data.T
        bias = self._constant(6).data.ravel() if self._has(6) else None
        return self.out.dense(x, matrix, *_per(w), bias, self._quant(7, 8), NONE, self._error)

    # single values

    def _activation(self, name: str, limits: tuple[float, float]) -> Value:
        x = self._value(0)
        if isinstance(x, Code):
            return lambda quant, act: self.out.unary(name, x, quant)
        if isinstance(x, Constant | Input):
            raise self._error("its input is float32: quantise the model")
        return lambda quant, act: x(quant, name if act == NONE else act)

    def _relu(self) -> Value:
        return self._activation("RELU", (0, math.inf))

    def _clip(self) -> Value:
        bounds = [self.options.get(end, self._bound(i)) for i, end in ((1, "min"), (2, "max"))]
        names = {(0.0, 6.0): "RELU6", (0.0, math.inf): "RELU", (-1.0, 1.0): "RELU_N1_TO_1"}
        if (name := names.get((bounds[0], bounds[1]))) is None:
            raise self._error(f"limits {bounds}, the chip's are {list(names)}")
        return self._activation(name, (bounds[0], bounds[1]))

    def _bound(self, index: int) -> float:
        if not self._has(index):
            return -math.inf if index == 1 else math.inf
        value = self._constant(index)
        return float(_real(value).ravel()[0])

    def _sigmoid(self) -> Pending:
        x = self._code(0)
        return lambda quant, act: self.out.unary("LOGISTIC", x, quant)

    def _tanh(self) -> Pending:
        x = self._code(0)
        return lambda quant, act: self.out.unary("TANH", x, quant)

    def _softmax(self) -> Pending:
        x = self._code(0)
        axis = self.options.get("axis", -1)
        if axis % len(x.shape) != (1 if len(x.shape) == 4 else len(x.shape) - 1):
            raise self._error(f"axis {axis}: the chip normalises channels")
        return lambda quant, act: self.out.unary("SOFTMAX", x, quant, beta=1.0)

    def _qlinearsigmoid(self) -> Code:
        return self.out.unary("LOGISTIC", self._code(0), self._quant(3, 4))

    def _binary(self, name: str) -> Pending:
        a, b = self._operand(0), self._operand(1)
        return lambda quant, act: self.out.binary(name, a, b, quant, act)

    def _operand(self, index: int) -> int | Code:
        value = self._value(index)
        if not isinstance(value, Constant):
            return self._code(index)
        if value.scales is None or value.scales.size != 1:
            raise self._error(f"constant {self.node.input[index]!r} is float32: quantise the model")
        assert value.zeros is not None
        return self.out.operand(value.data, float(value.scales[0]), int(value.zeros[0]))

    def _add(self) -> Pending:
        return self._binary("ADD")

    def _sub(self) -> Pending:
        return self._binary("SUB")

    def _mul(self) -> Pending:
        return self._binary("MUL")

    def _qlinear(self, name: str) -> Code:
        quant, sides = self._quant(6, 7), []
        for at in (0, 3):
            value = self._value(at)
            if isinstance(value, Constant):
                own = self._quant(at + 1, at + 2)
                sides.append(self.out.operand(value.data, own.scale, own.zero))
            else:
                sides.append(self._code(at))
        return self.out.binary(name, sides[0], sides[1], quant, NONE)

    def _qlinearadd(self) -> Code:
        return self._qlinear("ADD")

    def _qlinearmul(self) -> Code:
        return self._qlinear("MUL")

    # pools

    def _maxpool(self) -> Code:
        return self.out.pool("MAX_POOL_2D", self._code(0), self._geometry(NO_WEIGHTS), None, self._error)

    def _averagepool(self) -> Pending:
        x, geometry, fail = self._code(0), self._geometry(NO_WEIGHTS), self._failure()
        if any(geometry["pads"]):
            raise self._error("an average with padding divides by other counts at the border")
        return lambda quant, act: self.out.pool("AVERAGE_POOL_2D", x, geometry, quant, fail)

    def _qlinearaveragepool(self) -> Code:
        pending, quant = self._averagepool(), self._quant(3, 4)
        return pending(quant, NONE)

    def _globalaveragepool(self) -> Pending:
        x = self._code(0)
        return lambda quant, act: self.out.mean(x, quant, keep=True)

    def _reducemean(self) -> Pending:
        x = self._code(0)
        axes = self.options.get("axes") or (self._constant(1).data.tolist() if self._has(1) else [])
        if len(x.shape) != 4 or sorted(a % 4 for a in axes) != [2, 3]:
            raise self._error(f"axes {axes}, the chip averages rows and columns")
        return lambda quant, act: self.out.mean(x, quant, keep=bool(self.options.get("keepdims", 1)))

    def _qlinearglobalaveragepool(self) -> Code:
        return self.out.mean(self._code(0), self._quant(3, 4), keep=True)

    # movement

    def _identity(self) -> Value:
        return self._value(0)

    def _dropout(self) -> Value:
        return self._value(0)

    def _flatten(self) -> Code:
        x = self._code(0)
        if self.options.get("axis", 1) != 1:
            raise self._error("only axis 1")
        return self.out.flat(x)

    def _reshape(self) -> Code:
        x, shape = self._code(0), self._constant(1).data.tolist()
        if len(shape) != 2 or (shape[0] not in (0, -1, x.shape[0])):
            raise self._error(f"to {shape}: covered is flattening each image")
        return self.out.flat(x)

    def _concat(self) -> Value:
        parts = [self._code(i) for i in range(len(self.node.input))]
        if self.options.get("axis") not in ((1, -3) if len(parts[0].shape) == 4 else (1, -1)):
            raise self._error(f"axis {self.options.get('axis')}, on the chip channels lie side by side")
        return lambda quant, act: self.out.concat(parts, quant)

    def _qlinearconcat(self) -> Code:
        if self.options.get("axis") != 1:
            raise self._error(f"axis {self.options.get('axis')}, on the chip channels lie side by side")
        parts = [self._code(i) for i in range(2, len(self.node.input), 3)]
        return self.out.concat(parts, self._quant(0, 1))


NO_WEIGHTS = Constant(np.zeros((0, 0), np.uint8))


def _per(w: Constant) -> tuple[np.ndarray, np.ndarray]:
    assert w.scales is not None
    assert w.zeros is not None
    zeros = np.resize(w.zeros, w.scales.size)
    if w.scales.size > 1 and np.all(w.scales == w.scales[0]) and np.all(zeros == zeros[0]):
        return w.scales[:1], zeros[:1]
    return w.scales, zeros


def _real(value: Constant) -> np.ndarray:
    if value.scales is None or value.zeros is None:
        return value.data
    return (value.data.astype(np.int64) - value.zeros) * value.scales


__all__ = ["is_onnx", "read_onnx"]
