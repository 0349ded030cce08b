"""ONNX operators and their corners, node by node: as onnxruntime computes them, or refused with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coral
from coral.apps.direct import DirectChip
from coral.apps.files import random_inputs
from coral.compiler import CompileError, compile_models, load_model

onnx: Any = pytest.importorskip("onnx", reason="onnx: the ONNX front end is NOT tested")
ort: Any = pytest.importorskip("onnxruntime", reason="onnxruntime: quantised ONNX models are NOT compared")
H, FLOAT = onnx.helper, onnx.TensorProto.FLOAT
IMAGE = (1, 4, 4, 4)


class Net:
    """A network of nodes, each with its quantisation around it."""

    def __init__(self, *shape: Any, opset: int = 13, dtype: Any = np.uint8) -> None:
        self.shape, self.opset, self.dtype = shape or IMAGE, opset, dtype
        self.nodes, self.constants, self.rng = [], {}, np.random.default_rng(0)

    def const(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.array(values, dtype)
        return name

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(H.make_node(op, inputs, [name], **attributes))
        return name

    def q(self, x: str, scale: float = 0.05, zero: int = 128) -> str:
        return self.node("QuantizeLinear", x, self.const(scale), self.const(zero, self.dtype))

    def dq(self, x: str, scale: float = 0.05, zero: int = 128, **attributes: Any) -> str:
        return self.node("DequantizeLinear", x, self.const(scale), self.const(zero, self.dtype), **attributes)

    def qdq(self, x: str = "x", scale: float = 0.05, zero: int = 128) -> str:
        return self.dq(self.q(x, scale, zero), scale, zero)

    def fixed(self, values: Any) -> str:
        return self.dq(self.const(values, np.uint8), 0.05, 0)

    def weights(self, *shape: int, scale: Any = 0.01, axis: int = 0) -> str:
        data = self.const(self.rng.integers(-100, 100, shape), np.int8)
        zero = self.const(np.zeros(np.shape(scale)), np.int8)
        return self.node("DequantizeLinear", data, self.const(scale), zero, axis=axis)

    def conv(self, x: str, **attributes: Any) -> str:
        return self.node("Conv", x, self.weights(4, 4, 1, 1, scale=0.05), **attributes)

    def model(self, *outputs: str, rank: int = 4) -> bytes:
        ends = [[H.make_tensor_value_info(n, FLOAT, s) for n, s in side] for side in (
            [("x", self.shape)], [(name, [*"abcd"[:rank]]) for name in outputs]
        )]  # fmt: skip
        constants = [onnx.numpy_helper.from_array(v, k) for k, v in self.constants.items()]
        sets = [H.make_opsetid("", self.opset), H.make_opsetid("com.microsoft", 1)]
        graph = H.make_graph(self.nodes, "net", *ends, constants)
        return H.make_model(graph, opset_imports=sets, ir_version=9).SerializeToString()


def compare(data: bytes, most: int = 1) -> None:
    """The compiled model is within ``most`` steps of onnxruntime, at every output of the ONNX model."""
    model = coral.load(compile_models([data])[0].data, device=DirectChip())
    inputs = random_inputs(model.inputs, 0)
    got = model(inputs)
    feed = {p.name: onnx_order(p.values(inputs[p.name])) for p in model.inputs}
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # QGemm ignores the bias's own scale
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    assert [p.name for p in model.outputs] == names
    for port, theirs in zip(model.outputs, session.run(None, feed), strict=True):
        assert port.scale
        mine = onnx_order(got[port.name] if isinstance(got, dict) else got)
        codes = np.rint(theirs / np.float32(port.scale)).astype(int) + port.zero_point
        assert mine.shape == codes.shape
        assert np.abs(mine.astype(int) - codes).max() <= most


def onnx_order(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x, -1, 1) if x.ndim == 4 else x


def image(m: Net, result: str, scale: float = 0.05, zero: int = 128) -> bytes:
    return m.model(m.qdq(result, scale, zero))


def row(m: Net, result: str, scale: float = 0.05) -> bytes:
    return m.model(m.qdq(result, scale), rank=2)


def constant_nodes() -> bytes:
    m = Net()
    scale = m.node("Constant", value_float=0.05)
    zero = m.node("Constant", value=onnx.numpy_helper.from_array(np.uint8(128)))
    return image(m, m.node("Relu", m.node("DequantizeLinear", m.node("QuantizeLinear", "x", scale, zero), scale, zero)))


def per_channel() -> bytes:
    m = Net()
    return image(m, m.node("Add", m.fixed([[[1]], [[50]], [[100]], [[200]]]), m.qdq()))


def per_column() -> bytes:
    """What the chip has no program for: it is on the host, behind a layer on the chip."""
    m = Net()
    return image(m, m.node("Add", m.qdq(m.conv(m.qdq())), m.fixed([1, 50, 100, 200])))


def excitation(first: bool) -> bytes:
    m = Net()
    x = m.qdq()
    sides = [m.qdq(m.node("GlobalAveragePool", x), 0.02), x]
    return image(m, m.node("Mul", *(sides if first else sides[::-1])))


def clipped(*bounds: tuple[float, float] | None) -> bytes:
    """Activations in a row, None is RELU."""
    m = Net()
    x = m.conv(m.qdq())
    for b in bounds:
        x = m.node("Clip", x, m.const(b[0]), m.const(b[1])) if b else m.node("Relu", x)
    return image(m, x, 0.1, 20)


def clipped_pool(op: str, **attributes: Any) -> bytes:
    m = Net()
    return image(m, m.node("Relu", m.node(op, m.qdq(), **attributes)), 0.05, 20)


def clipped_concat() -> bytes:
    m = Net()
    x = m.qdq()
    return image(m, m.node("Relu", m.node("Concat", x, m.qdq(m.conv(x), 0.07), axis=1)), 0.05, 20)


def clipped_relu_of_codes() -> bytes:
    m = Net()
    return image(m, m.node("Clip", m.node("Relu", m.qdq()), m.const(-1.0), m.const(1.0)), 0.05, 20)


def flat_and_constant() -> bytes:
    m = Net()
    x = m.node("Flatten", m.qdq(m.conv(m.qdq())))
    return row(m, m.node("Add", x, m.fixed(np.arange(64).reshape(1, 64) * 3)), 0.1)


def flat_and_dense() -> bytes:
    m = Net()
    x = m.node("Flatten", m.qdq())
    return row(m, m.node("Add", x, m.qdq(m.node("MatMul", x, m.weights(64, 64)), 0.5)), 0.6)


def mean_of_rows_and_columns() -> bytes:
    m = Net()
    x = m.qdq(m.node("ReduceMean", m.qdq(), axes=[2, 3], keepdims=0), 0.02)
    return row(m, m.node("Gemm", x, m.weights(6, 4, axis=0, scale=[0.01] * 5 + [0.02]), m.const([0.5]), transB=1))


def bias_of_another_scale() -> bytes:
    m = Net(1, 10)
    bias = m.const(np.arange(6) * 100 - 300, np.int32)
    c = m.node("DequantizeLinear", bias, m.const(0.004))
    return row(m, m.node("Gemm", m.qdq(), m.weights(10, 6), c))


def input_twice() -> bytes:
    m = Net()
    return image(m, m.node("Sub", m.qdq(), m.qdq(m.conv(m.qdq()))), 0.1)


def two_outputs() -> bytes:
    m = Net()
    x = m.qdq(m.conv(m.qdq()))
    return m.model(m.qdq(m.conv(x)), x)


MODELS = [
    constant_nodes(), per_channel(), per_column(), excitation(True), excitation(False), clipped((0.0, 6.0), None),
    clipped((-1.0, 1.0), None), clipped(None, (0.0, 6.0)), clipped(None, (-1.0, 1.0)), clipped((0.0, 6.0), (-1.0, 1.0)),
    clipped_pool("GlobalAveragePool"), clipped_pool("AveragePool", kernel_shape=[2, 2]), clipped_pool("Tanh"),
    clipped_concat(), clipped_relu_of_codes(), flat_and_constant(), flat_and_dense(), mean_of_rows_and_columns(),
    bias_of_another_scale(), input_twice(), two_outputs(),
]  # fmt: skip


@pytest.mark.parametrize("data", MODELS, ids=range(len(MODELS)))
def test_as_onnxruntime(data: bytes) -> None:
    compare(data)


def one(op: str, *more: str, m: Net | None = None, **attributes: Any) -> bytes:
    m = m or Net()
    return image(m, m.node(op, m.qdq(), *more, **attributes))


def another_scale() -> bytes:
    m = Net()
    return image(m, m.node("Relu", m.dq(m.q("x"), 0.1, 100)))


def two_scales() -> bytes:
    m = Net()
    return image(m, m.node("Add", m.qdq(), m.qdq("x", 0.1)))


def not_flat() -> bytes:
    m = Net()
    return row(m, m.node("Reshape", m.qdq(), m.const([-1, 16], np.int64)))


def columns_scaled() -> bytes:
    m = Net(1, 6)
    return row(m, m.node("MatMul", m.qdq(), m.weights(6, 6, scale=[0.01] * 5 + [1])))


def short_bias() -> bytes:
    m = Net(1, 10)
    return row(m, m.node("Gemm", m.qdq(), m.weights(10, 6), m.const([1.0, 2.0])))


def more_dimensions() -> bytes:
    m = Net()
    return image(m, m.node("Add", m.qdq(), m.fixed(np.ones((1, 1, 1, 1, 4)))))


REFUSED = [
    (another_scale(), "scale and zero point 0.1.* made with 0.05"),
    (two_scales(), "'x' is quantised in two ways"),
    (not_flat(), r"to \[-1, 16\]"),
    (columns_scaled(), "along axis 0, needed is 1"),
    (short_bias(), "bias of 2 values"),
    (more_dimensions(), "as many dimensions"),
    (one("Softmax", m=Net(opset=11), axis=1), "axis 1 of .* in opset 11"),
    (one("AveragePool", kernel_shape=[3, 3], auto_pad="SAME_UPPER", count_include_pad=1), "counts at the border"),
    (one("GlobalAveragePool", m=Net(1, 4, 4)), r"an average over \(1, 4, 4\)"),
    (one("Value", domain="com.microsoft"), "Value is not covered"),
    (one("Relu", m=Net(0, 4, 4, 4)), r"dynamic shape \[0, 4, 4, 4\]"),
]


@pytest.mark.parametrize(("data", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_be_something_else_is_refused(data: bytes, sentence: str) -> None:
    with pytest.raises(CompileError, match=sentence):
        load_model(data)


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("Conv", {"strides": [0, 1]}), ("Conv", {"pads": [2**40] * 4}), ("Conv", {"strides": [1]}),
        ("AveragePool", {"kernel_shape": [0, 0]}), ("Concat", {"axis": 7}), ("Softmax", {"axis": -9}),
        ("MaxPool", {"kernel_shape": [2, 2], "pads": [1]}), ("ReduceMean", {"axes": [9]}), ("Constant", {}),
    ],
)  # fmt: skip
def test_attributes_of_wrong_kinds_name_the_node(op: str, attributes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what the checker of another version of onnx lets through."""
    monkeypatch.setattr(onnx.checker, "check_model", lambda model: None)
    m = Net()
    inputs = [m.qdq(), *([m.weights(4, 4, 1, 1)] if op == "Conv" else [])]
    data = image(m, m.node(op, *inputs, **attributes))
    with pytest.raises(CompileError, match=rf"\({op}\)|model"):
        compile_models([data])


def test_constants_that_cannot_be_read(tmp_path: Path) -> None:
    model = onnx.load_from_string(two_outputs())
    next(i for i in model.graph.initializer if i.data_type == onnx.TensorProto.INT8).data_type = 77
    path = tmp_path / "odd.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CompileError, match=r"^odd.onnx: .*"):
        load_model(path)
