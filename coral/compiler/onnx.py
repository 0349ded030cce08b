"""ONNX models quantised with QLinear operators, or with QuantizeLinear and DequantizeLinear around float ones, become
TFLite graphs: images ``[N, H, W, C]``, codes in and out. Source: docs/compiler.md, section ONNX.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np

from coral import numerics
from coral.compiler.errors import CompileError
from coral.compiler.onnx_graph import NONE, Builder, Code, Fixed, Quant
from coral.package.graph import DAMAGE, Graph, load

OPSETS = range(7, 27)
SOFTMAX_PER_AXIS = 13
"""Opset from which on SOFTMAX normalises one axis; before, it took all axes from the given one on together."""
MAX_STEP = 1 << 16
"""Of strides, dilations and pads: far beyond any image."""
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


LIMITS = {
    NONE: (-math.inf, math.inf), "RELU": (0.0, math.inf), "RELU6": (0.0, 6.0), "RELU_N1_TO_1": (-1.0, 1.0)
}  # fmt: skip
"""Of the activations."""
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

    :raises PackageError: the file cannot be read
    :raises CompileError: the package onnx is missing; the file is damaged; an opset, operator or shape is not covered
    """
    if importlib.util.find_spec("onnx") is None:
        raise CompileError("ONNX files need the package onnx; install it with pip install 'tinycoral[onnx]'")
    onnx: Any = importlib.import_module("onnx")
    data, name = (source, "") if isinstance(source, bytes) else (load(source), f"{Path(source).name}: ")
    try:
        return _read(onnx, data)
    except CompileError as error:
        raise CompileError(f"{name}{error}") from None


def _read(onnx: Any, data: bytes) -> Graph:
    try:
        model = onnx.load_from_string(data)
        onnx.checker.check_model(model)
    except Exception as error:  # protobuf and the checker raise many kinds
        what = next(iter(str(error).splitlines()), type(error).__name__)
        raise CompileError(f"the file is no valid ONNX model: {what:.300}") from None
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=OPSETS[-1])
    for used in model.opset_import:
        if used.domain not in DOMAINS or (used.domain in ("", "ai.onnx") and used.version not in OPSETS):
            raise CompileError(
                f"opset {used.domain or 'ai.onnx'} {used.version}: known are ai.onnx {OPSETS[0]} to {OPSETS[-1]} and "
                "com.microsoft; convert the model with onnx.version_converter"
            )
    return _Reader(onnx, model.graph, opset).graph()


class _Reader:
    """Values by ONNX name; every node is turned into operators of the builder, or waits for its quantisation."""

    def __init__(self, onnx: Any, graph: Any, opset: int) -> None:
        self.onnx, self.onnx_graph, self.opset, self.out = onnx, graph, opset, Builder(graph.name or "main")
        self.values: dict[str, Value] = {i.name: Constant(self._array(i)) for i in graph.initializer}
        self.entered: dict[str, Code] = {}
        for item in graph.input:
            if item.name not in self.values:
                self.values[item.name] = self._input(item)

    def _array(self, tensor: Any) -> np.ndarray:
        try:
            return self.onnx.numpy_helper.to_array(tensor)
        except Exception as error:  # numpy and the file's own types raise many kinds
            raise CompileError(f"constant {tensor.name!r} cannot be read: {error}") from None

    def _input(self, item: Any) -> Input:
        dims = item.type.tensor_type.shape.dim
        shape = [d.dim_value if d.HasField("dim_value") else 0 for d in dims]
        shape = [1, *shape[1:]] if shape and not dims[0].HasField("dim_value") else shape
        if not shape or min(shape) < 1:
            raise CompileError(f"input {item.name!r} has the dynamic shape {shape}: fix it when exporting the model")
        return Input(item.name, tuple(shape))

    def graph(self) -> Graph:
        """The whole graph. :raises CompileError: something is not covered; the message names the node."""
        for node in self.onnx_graph.node:
            self.node, self.options = node, self._attributes(node)
            if self.options.get("channels_last") or self.options.get("block_size"):
                raise self._error("channels_last and block_size are not covered")
            handler = getattr(self, f"_op_{node.op_type.lower()}", None)
            if handler is None:
                raise self._error(f"{node.op_type} is not covered")
            try:
                result = handler()
            except (*DAMAGE, ArithmeticError, AssertionError) as error:  # attributes and constants of wrong kinds
                raise self._error(f"has parts that do not fit each other ({type(error).__name__}: {error})") from None
            if result is not None:
                self.values[node.output[0]] = result
        outputs = [self._output(item.name) for item in self.onnx_graph.output]
        self.out.inputs = [self.entered[i.name].number for i in self.onnx_graph.input if i.name in self.entered]
        return self.out.graph(outputs, [item.name for item in self.onnx_graph.output])

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

    def _coded(self, index: int) -> Code:
        """An operand whose scale and zero point are the next two inputs; they must be those it was made with."""
        value, given = self._value(index), self._quant(index + 1, index + 2)
        return self._entered(value, given) if isinstance(value, Input) else self._as_made(self._code(index), given)

    def _as_made(self, x: Code, given: Quant) -> Code:
        if (given.scale, given.zero) != (x.quant.scale, x.quant.zero):
            found = f"{given.scale} and {given.zero}, made with {x.quant.scale} and {x.quant.zero}"
            raise self._error(f"reads {self.node.input[0]!r} with scale and zero point {found}: requantise it")
        return x

    def _entered(self, x: Input, quant: Quant) -> Code:
        """The codes of an input."""
        if x.name not in self.entered:
            self.entered[x.name] = self.out.input(x.name, x.shape, quant)
        if self.entered[x.name].quant != quant:
            raise self._error(
                f"the input {x.name!r} is quantised in two ways: {self.entered[x.name].quant} and {quant}"
            )
        return self.entered[x.name]

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

    def _op_quantizelinear(self) -> Code | Constant:
        x = self._value(0)
        quant = self._quant(1, 2)
        if isinstance(x, Constant):
            codes = np.rint(x.data / np.float32(quant.scale)) + quant.zero
            limits = np.iinfo(quant.dtype)
            codes = np.clip(codes, limits.min, limits.max).astype(quant.dtype)
            return Constant(codes, np.array([quant.scale], np.float32), np.array([quant.zero]))
        if isinstance(x, Input):
            return self._entered(x, quant)
        return self.out.requantised(x, quant) if isinstance(x, Code) else x(quant, NONE)

    def _op_dequantizelinear(self) -> Value:
        x = self._value(0)
        if isinstance(x, Code):
            return self._as_made(x, self._quant(1, 2))
        if isinstance(x, Input):
            return self._entered(x, self._quant(1, 2))
        if not isinstance(x, Constant):
            raise self._error("its input is float32")
        scales = self._constant(1).data.astype(np.float32).ravel()
        zeros = self._constant(2).data.astype(np.int64).ravel() if self._has(2) else np.zeros(scales.size, np.int64)
        return Constant(x.data, scales, zeros, self.options.get("axis", 1) % max(x.data.ndim, 1))

    # layers

    def _op_conv(self) -> Pending:
        x, w = self._code(0), self._weights(1, 0)
        bias = self._value(2) if self._has(2) else None
        geometry, b, fail = self._geometry(w), self._bias(bias, x, w), self._failure()
        return lambda quant, act: self.out.conv(x, w.data, *_per(w), b, geometry, quant, act, fail)

    def _weights(self, index: int, axis: int) -> Constant:
        """Weights whose results run along an axis."""
        w = self._constant(index)
        if w.scales is None or w.data.dtype not in (np.uint8, np.int8):
            raise self._error(f"weights {self.node.input[index]!r} are {w.data.dtype}: quantise the model")
        if w.scales.size > 1 and w.axis != axis:
            raise self._error(f"weights {self.node.input[index]!r} are quantised along axis {w.axis}, needed is {axis}")
        return w

    def _bias(self, bias: Value | None, x: Code, w: Constant) -> np.ndarray | None:
        if bias is None:
            return None
        if not isinstance(bias, Constant):
            raise self._error("its bias is computed")
        assert w.scales is not None
        own = np.float32(x.quant.scale) * w.scales
        if bias.data.dtype == np.int32 and (bias.scales is None or _close(bias.scales, own)):
            return bias.data.ravel()
        scales = w.scales if w.scales.size > 1 else w.scales[0]
        return numerics.quantise_bias(_real(bias).ravel(), x.quant.scale, scales)

    def _geometry(self, w: Constant) -> dict[str, Any]:
        kernel = list(self.options.get("kernel_shape", w.data.shape[2:]))
        auto = self.options.get("auto_pad", b"NOTSET").decode()
        if auto not in ("NOTSET", "VALID", "SAME_UPPER") or self.options.get("ceil_mode", 0):
            raise self._error(f"auto_pad {auto}, ceil_mode {self.options.get('ceil_mode', 0)}")
        sizes = {"kernel": kernel} | {n: list(self.options.get(n, [1, 1])) for n in ("strides", "dilations")}
        pads = list(self.options.get("pads", [0, 0, 0, 0]))
        fits = all(len(n) == 2 and min(n) >= 1 for n in sizes.values()) and len(pads) == 4
        if not fits or min(pads) < 0 or max(*pads, *sizes["strides"], *sizes["dilations"]) > MAX_STEP:
            raise self._error(
                f"{sizes} and pads {pads}: needed are two numbers of 1 to {MAX_STEP} each, four from 0 on"
            )
        return sizes | {"auto": auto, "pads": pads, "group": self.options.get("group", 1)}

    def _op_qlinearconv(self) -> Code:
        x, raw = self._coded(0), self._constant(3)
        w = Constant(raw.data, self._constant(4).data.astype(np.float32).ravel(), self._zeros(5))
        bias = self._constant(8).data if self._has(8) else None
        quant = self._quant(6, 7)
        return self.out.conv(x, w.data, *_per(w), bias, self._geometry(w), quant, NONE, self._error)

    def _zeros(self, index: int) -> np.ndarray:
        return self._constant(index).data.astype(np.int64).ravel()

    def _op_gemm(self) -> Pending:
        x, w = self._code(0), self._weights(1, 0 if self.options.get("transB", 0) else 1)
        if [self.options.get(o, v) for o, v in (("alpha", 1.0), ("beta", 1.0), ("transA", 0))] != [1.0, 1.0, 0]:
            raise self._error("alpha, beta and transA must be 1, 1 and 0")
        matrix = w.data if self.options.get("transB", 0) else w.data.T
        b, fail = self._bias(self._value(2) if self._has(2) else None, x, w), self._failure()
        return lambda quant, act: self.out.dense(x, matrix, *_per(w), b, quant, act, fail)

    def _op_matmul(self) -> Pending:
        x, w, fail = self._code(0), self._weights(1, 1), self._failure()
        return lambda quant, act: self.out.dense(x, w.data.T, *_per(w), None, quant, act, fail)

    def _op_qlinearmatmul(self) -> Code:
        x, raw = self._coded(0), self._constant(3)
        w = Constant(raw.data, self._constant(4).data.astype(np.float32).ravel(), self._zeros(5))
        return self.out.dense(x, w.data.T, *_per(w), None, self._quant(6, 7), NONE, self._error)

    def _op_qgemm(self) -> Code:
        x, raw = self._coded(0), self._constant(3)
        w = Constant(raw.data, self._constant(4).data.astype(np.float32).ravel(), self._zeros(5))
        matrix = w.data if self.options.get("transB", 0) else w.data.T
        bias = self._constant(6).data.ravel() if self._has(6) else None
        return self.out.dense(x, matrix, *_per(w), bias, self._quant(7, 8), NONE, self._error)

    # single values

    def _plain(self, emit: Callable[[Quant], Code]) -> Pending:
        """An operator that has no fused activation: one that follows is an operator of its own."""
        return lambda quant, act: emit(quant) if act == NONE else self.out.unary(act, emit(quant), quant)

    def _activation(self, name: str) -> Value:
        x = self._value(0)
        if isinstance(x, Code):
            return self._plain(lambda quant: self.out.unary(name, x, quant))
        if isinstance(x, Constant | Input):
            raise self._error("its input is float32: quantise the model")

        def emit(quant: Quant, act: str) -> Code:
            both = np.clip(LIMITS[name], *LIMITS[act]).tolist()
            fused = next((n for n, limits in LIMITS.items() if list(limits) == both), None)
            return x(quant, fused) if fused else self.out.unary(act, x(quant, name), quant)

        return emit

    def _op_relu(self) -> Value:
        return self._activation("RELU")

    def _op_clip(self) -> Value:
        bounds = [self.options.get(end, self._bound(i)) for i, end in ((1, "min"), (2, "max"))]
        name = next((n for n, limits in LIMITS.items() if list(limits) == bounds), NONE)
        if name == NONE:
            raise self._error(f"limits {bounds}, the chip's are {list(LIMITS.values())[1:]}")
        return self._activation(name)

    def _bound(self, index: int) -> float:
        if not self._has(index):
            return -math.inf if index == 1 else math.inf
        value = self._constant(index)
        return float(_real(value).ravel()[0])

    def _unary(self, name: str) -> Pending:
        x = self._code(0)
        return self._plain(lambda quant: self.out.unary(name, x, quant))

    _op_sigmoid, _op_tanh = partialmethod(_unary, "LOGISTIC"), partialmethod(_unary, "TANH")

    def _op_softmax(self) -> Pending:
        x = self._code(0)
        axis = self.options.get("axis", -1 if self.opset >= SOFTMAX_PER_AXIS else 1) % len(x.shape)
        together = self.opset < SOFTMAX_PER_AXIS and math.prod(x.shape[axis + 1 :]) > 1
        if axis != (1 if len(x.shape) == 4 else len(x.shape) - 1) or together:
            raise self._error(f"axis {axis} of {x.shape} in opset {self.opset}: the chip normalises channels")
        return self._plain(lambda quant: self.out.unary("SOFTMAX", x, quant, beta=1.0))

    def _op_qlinearsigmoid(self) -> Code:
        return self.out.unary("LOGISTIC", self._coded(0), self._quant(3, 4))

    def _binary(self, name: str) -> Pending:
        a, b, fail = self._operand(0), self._operand(1), self._failure()
        return lambda quant, act: self.out.binary(name, a, b, quant, act, fail)

    def _operand(self, index: int) -> Code | Fixed:
        value = self._value(index)
        if not isinstance(value, Constant):
            return self._code(index)
        if value.scales is None or value.scales.size != 1:
            raise self._error(f"constant {self.node.input[index]!r} is float32: quantise the model")
        assert value.zeros is not None
        return Fixed(value.data, float(value.scales[0]), int(value.zeros[0]))

    _op_add = partialmethod(_binary, "ADD")
    _op_sub = partialmethod(_binary, "SUB")
    _op_mul = partialmethod(_binary, "MUL")

    def _qlinear(self, name: str) -> Code:
        quant, sides = self._quant(6, 7), []
        for at in (0, 3):
            value = self._value(at)
            if isinstance(value, Constant):
                own = self._quant(at + 1, at + 2)
                sides.append(Fixed(value.data, own.scale, own.zero))
            else:
                sides.append(self._coded(at))
        return self.out.binary(name, sides[0], sides[1], quant, NONE, self._error)

    _op_qlinearadd = partialmethod(_qlinear, "ADD")
    _op_qlinearmul = partialmethod(_qlinear, "MUL")

    # pools

    def _op_maxpool(self) -> Code:
        return self.out.pool("MAX_POOL_2D", self._code(0), self._geometry(NO_WEIGHTS), None, self._error)

    def _op_averagepool(self) -> Pending:
        return self._average(self._code(0))

    def _average(self, x: Code) -> Pending:
        geometry, fail = self._geometry(NO_WEIGHTS), self._failure()
        counted = self.options.get("count_include_pad", 0) and geometry["auto"] == "SAME_UPPER"
        if any(geometry["pads"]) or counted:
            raise self._error("an average with padding divides by other counts at the border")
        return self._plain(lambda quant: self.out.pool("AVERAGE_POOL_2D", x, geometry, quant, fail))

    def _op_qlinearaveragepool(self) -> Code:
        return self._average(self._coded(0))(self._quant(3, 4), NONE)

    def _op_globalaveragepool(self) -> Pending:
        x, fail = self._code(0), self._failure()
        return self._plain(lambda quant: self.out.mean(x, quant, fail, keep=True))

    def _op_reducemean(self) -> Pending:
        x = self._code(0)
        axes = self.options.get("axes") or (self._constant(1).data.tolist() if self._has(1) else [])
        if len(x.shape) != 4 or sorted(a % 4 for a in axes) != [2, 3]:
            raise self._error(f"axes {axes}, the chip averages rows and columns")
        keep, fail = bool(self.options.get("keepdims", 1)), self._failure()
        return self._plain(lambda quant: self.out.mean(x, quant, fail, keep=keep))

    def _op_qlinearglobalaveragepool(self) -> Code:
        return self.out.mean(self._coded(0), self._quant(3, 4), self._error, keep=True)

    # movement

    def _op_constant(self) -> Constant:
        (kind, value), *_ = self.options.items()
        if kind == "value":
            return Constant(self._array(value))
        dtypes: dict[str, Any] = {"value_float": np.float32, "value_int": np.int64}
        if (dtype := dtypes.get(kind.removesuffix("s"))) is None:
            raise self._error(f"a constant given as {kind}")
        return Constant(np.array(value, dtype))

    def _op_identity(self) -> Value:
        return self._value(0)

    _op_dropout = _op_identity

    def _op_flatten(self) -> Code:
        x = self._code(0)
        if self.options.get("axis", 1) != 1:
            raise self._error("only axis 1")
        return self.out.flat(x)

    def _op_reshape(self) -> Code:
        x, shape = self._code(0), self._constant(1).data.tolist()
        if len(shape) != 2 or shape[0] not in (0, -1, x.shape[0]) or shape[1] not in (-1, math.prod(x.shape[1:])):
            raise self._error(f"to {shape}: covered is flattening each image")
        return self.out.flat(x)

    def _op_concat(self) -> Value:
        parts = [self._code(i) for i in range(len(self.node.input))]
        if self.options.get("axis") not in ((1, -3) if len(parts[0].shape) == 4 else (1, -1)):
            raise self._error(f"axis {self.options.get('axis')}, on the chip channels lie side by side")
        return self._plain(lambda quant: self.out.concat(parts, quant))

    def _op_qlinearconcat(self) -> Code:
        if self.options.get("axis") != 1:
            raise self._error(f"axis {self.options.get('axis')}, on the chip channels lie side by side")
        parts = [self._coded(i) for i in range(2, len(self.node.input), 3)]
        return self.out.concat(parts, self._quant(0, 1))


NO_WEIGHTS = Constant(np.zeros((0, 0), np.uint8))


def _per(w: Constant) -> tuple[np.ndarray, np.ndarray]:
    assert w.scales is not None
    assert w.zeros is not None
    zeros = np.resize(w.zeros, w.scales.size)
    if w.scales.size > 1 and np.all(w.scales == w.scales[0]) and np.all(zeros == zeros[0]):
        return w.scales[:1], zeros[:1]
    return w.scales, zeros


def _close(scales: np.ndarray, wanted: np.ndarray) -> bool:
    return scales.size in (1, wanted.size) and np.allclose(scales, wanted, rtol=1e-4, atol=0)


def _real(value: Constant) -> np.ndarray:
    if value.scales is None or value.zeros is None:
        return value.data
    return (value.data.astype(np.int64) - value.zeros) * value.scales
