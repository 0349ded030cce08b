"""Five small networks quantised by onnxruntime's tools equal our evaluator and are near onnxruntime."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coral
from coral import CoralError
from coral.apps.direct import DirectChip
from coral.apps.verify import verify_pair
from coral.compiler import CompileError, compile_models, load_model
from coral.evaluate import evaluate

onnx: Any = pytest.importorskip("onnx", reason="onnx: the ONNX front end is NOT tested")
ort: Any = pytest.importorskip("onnxruntime", reason="onnxruntime: quantised ONNX models are NOT made and NOT compared")
H = onnx.helper


class Net:
    """Float networks, node by node."""

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        self.rng, self.nodes, self.weights, self.shape, self.last = np.random.default_rng(seed), [], [], shape, "x"

    def const(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(onnx.numpy_helper.from_array(array, name))
        return name

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(H.make_node(op, list(inputs) or [self.last], [name], name=name, **attributes))
        self.last = name
        return name

    def conv(self, n: int, c: int, k: int, *, group: int = 1, source: str = "", relu: bool = True, **more: Any) -> str:
        w = self.rng.normal(size=(n, c // group, k, k)).astype(np.float32) / np.float32(np.sqrt(k * k * c / group))
        b = self.rng.normal(size=n).astype(np.float32)
        self.add("Conv", source or self.last, self.const(w), self.const(b), group=group, kernel_shape=[k, k], **more)
        return self.add("Relu") if relu else self.last

    def dense(self, n: int, k: int) -> str:
        w = self.rng.normal(size=(k, n)).astype(np.float32) / np.float32(np.sqrt(k))
        return self.add("Gemm", self.last, self.const(w), self.const(self.rng.normal(size=n).astype(np.float32)))

    def model(self) -> Any:
        x = H.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", *self.shape[1:]])
        flat = len(self.shape) == 2 or any(node.op_type == "Flatten" for node in self.nodes)
        y = H.make_tensor_value_info(self.last, onnx.TensorProto.FLOAT, [*"abcd"[: 2 if flat else 4]])
        graph = H.make_graph(self.nodes, "net", [x], [y], self.weights)
        model = H.make_model(graph, opset_imports=[H.make_opsetid("", 17)])
        model.ir_version = 8
        return model


def classifier() -> Net:
    m = Net((1, 3, 24, 20), 1)
    m.conv(8, 3, 3, strides=[2, 2], pads=[1, 1, 1, 1])
    m.conv(8, 8, 3, group=8, pads=[1, 1, 1, 1])
    m.conv(16, 8, 1)
    m.add("MaxPool", kernel_shape=[2, 2], strides=[2, 2])
    m.add("Flatten")
    m.dense(10, 16 * 6 * 5)
    return m


def residual() -> Net:
    m = Net((1, 4, 12, 12), 2)
    a = m.conv(8, 4, 3, pads=[1, 1, 1, 1])
    b = m.conv(8, 8, 3, pads=[1, 1, 1, 1], relu=False)
    m.add("Add", a, b)
    m.add("Relu")
    m.add("GlobalAveragePool")
    m.add("Flatten")
    m.dense(5, 8)
    return m


def heads() -> Net:
    m = Net((1, 3, 16, 16), 3)
    a = m.conv(8, 3, 3, pads=[0, 0, 1, 1], strides=[2, 2])
    b = m.conv(8, 8, 1, source=a, relu=False)
    c = m.conv(4, 8, 3, source=a, pads=[1, 1, 1, 1], relu=False)
    m.add("Concat", b, c, axis=1)
    m.add("Sigmoid")
    return m


def perceptron() -> Net:
    m = Net((1, 40), 4)
    m.dense(64, 40)
    m.add("Relu")
    m.dense(6, 64)
    return m


def averages() -> Net:
    m = Net((1, 3, 16, 16), 5)
    m.conv(6, 3, 5, dilations=[2, 2], pads=[4, 4, 4, 4])
    m.add("AveragePool", kernel_shape=[2, 2], strides=[2, 2])
    m.conv(12, 6, 1, relu=False)
    return m


NETS = [classifier, residual, heads, perceptron, averages]


def quantised(net: Net, folder: Path, *, qdq: bool, per_channel: bool = True, signed: bool = False) -> Path:
    tools = pytest.importorskip("onnxruntime.quantization")
    source, target = folder / "float.onnx", folder / "quantised.onnx"
    onnx.save(net.model(), source)
    rng = np.random.default_rng(9)

    class Reader(tools.CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [{"x": rng.normal(size=net.shape).astype(np.float32)} for _ in range(8)]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    kinds = tools.QuantType
    tools.quantize_static(
        source, target, Reader(), quant_format=tools.QuantFormat.QDQ if qdq else tools.QuantFormat.QOperator,
        per_channel=per_channel, activation_type=kinds.QInt8 if signed else kinds.QUInt8, weight_type=kinds.QInt8,
    )  # fmt: skip
    return target


def cut(path: Path) -> Path:
    """Without the last DequantizeLinear, so that onnxruntime gives codes."""
    model = onnx.load(path)
    last = model.graph.node[-1]
    assert last.op_type == "DequantizeLinear"
    kind = {i.name: i.data_type for i in model.graph.initializer}[last.input[2]]
    name, rank = last.input[0], len(model.graph.output[0].type.tensor_type.shape.dim)
    del model.graph.node[-1], model.graph.output[:]
    model.graph.output.append(H.make_tensor_value_info(name, kind, [*"abcd"[:rank]]))
    target = path.with_name("codes.onnx")
    onnx.save(model, target)
    return target


@pytest.mark.parametrize(("qdq", "signed"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("net", NETS)
def test_networks(tmp_path: Path, net: Any, qdq: bool, signed: bool) -> None:
    path = quantised(net(), tmp_path, qdq=qdq, signed=signed)
    (compiled,) = compile_models([path])
    out = compiled.write(tmp_path / "out_edgetpu.tflite")
    assert verify_pair(path, out, n=1, orders=1).ok
    model, graph = coral.load(out, device=DirectChip()), load_model(path).main
    x = np.random.default_rng(3).normal(size=net().shape).astype(np.float32)
    (port,) = model.inputs
    codes = port.codes(np.moveaxis(x, 1, -1) if x.ndim == 4 else x)
    got, (expected,) = model(codes), evaluate(graph, {port.name: codes}).values()
    np.testing.assert_array_equal(got, expected)
    session = ort.InferenceSession(str(cut(path)), providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, {"x": x})
    theirs = np.moveaxis(theirs, 1, -1) if theirs.ndim == 4 else theirs
    off = np.abs(np.asarray(got).astype(int) - theirs.astype(int))
    assert off.max() <= 3, np.unique(off, return_counts=True)
    assert (off > 1).mean() < 0.02


def test_what_is_not_covered_is_named(tmp_path: Path) -> None:
    net = classifier()
    with pytest.raises(CompileError, match=r"conv0.*'x' is float32, not codes: quantise the model"):
        load_model(net.model().SerializeToString())
    model = net.model()
    model.opset_import[0].version = 99
    with pytest.raises(CompileError, match=r"opset|ONNX"):
        load_model(model.SerializeToString())
    path = quantised(classifier(), tmp_path, qdq=True)
    data = path.read_bytes()
    for size in (10, 100, len(data) // 2, len(data) - 1):
        with pytest.raises(CompileError, match="no valid ONNX"):
            load_model(data[:size])
    other = onnx.load(path)
    other.graph.input[0].type.tensor_type.shape.dim[2].ClearField("dim_value")
    with pytest.raises(CompileError, match="dynamic shape"):
        load_model(other.SerializeToString())
    rng = np.random.default_rng(5)
    for _ in range(150):
        damaged = bytearray(data)
        for at in rng.integers(0, len(data), 3):
            damaged[at] = rng.integers(256)
        with contextlib.suppress(CoralError):
            compile_models([bytes(damaged)])
    odd = Net((1, 4), 1)
    odd.add("Erf")
    with pytest.raises(CompileError, match=r"'erf0' \(Erf\): Erf is not covered"):
        load_model(odd.model().SerializeToString())
