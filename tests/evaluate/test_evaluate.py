"""The judge against integer arithmetic with exact fractions, on graphs built here and on Google's dense models."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tflite
from exact_float import exact32
from hypothesis import given, settings
from hypothesis import strategies as st

from coral import CoralError, evaluate
from coral.evaluate import EvaluateError
from coral.numerics import NumericsError
from coral.package.graph import Graph, Operator, Tensor, read_model


def tensor(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    scales: Any = (),
    zeros: Any = (),
    data: np.ndarray | None = None,
    axis: int = 0,
) -> Tensor:
    return Tensor(
        name, shape, 0, np.dtype(dtype), np.array(scales, np.float32), np.array(zeros, np.int64), axis, data, False
    )


def single(op: str, tensors: list[Tensor], inputs: tuple[int, ...], **options: Any) -> Graph:
    """One operator; tensor 0 is the model's input and the last one its output."""
    return Graph(
        "main", tuple(tensors), (0,), (len(tensors) - 1,), (Operator(op, inputs, (len(tensors) - 1,), options),)
    )


def run(graph: Graph, x: np.ndarray) -> np.ndarray:
    return evaluate.evaluate(graph, {"x": x})["y"]


def expected_code(acc: int, mult: Fraction, lo: Fraction, hi: Fraction, zero_point: int) -> int:
    return round(min(max(exact32(exact32(Fraction(acc)) * mult), lo), hi)) + zero_point


def fraction(x: float | np.floating) -> Fraction:
    return Fraction(float(np.float32(x)))


def multiplier(s_x: float, s_w: float, s_y: float) -> Fraction:
    return exact32(exact32(fraction(s_x) * fraction(s_w)) * exact32(1 / fraction(s_y)))


RANGES = {"NONE": (None, None), "RELU": (0, None), "RELU6": (0, 6), "RELU_N1_TO_1": (-1, 1)}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_fully_connected(data: st.DataObject) -> None:
    """uint8 per tensor, int8 per tensor and int8 per channel; with and without bias and activation."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dtype, per_channel = data.draw(st.sampled_from([("u1", False), ("i1", False), ("i1", True)]))
    m, k, n = (data.draw(st.integers(1, high)) for high in (2, 5, 4))
    activation = data.draw(st.sampled_from(sorted(RANGES)))
    low = -128 if dtype == "i1" else 0
    x, w = (rng.integers(low, low + 256, shape).astype(dtype) for shape in ((m, k), (n, k)))
    b = data.draw(st.sampled_from([None, rng.integers(-500, 500, n).astype(np.int32)]))
    z_x, z_w, z_y = (int(v) for v in rng.integers(low, low + 256, 3))
    s_x, s_y = (float(v) for v in rng.uniform(0.001, 0.1, 2))
    s_w = rng.uniform(0.001, 0.1, n if per_channel else 1)
    z_ws = np.zeros(n, int) if per_channel else [z_w]
    graph = single(
        "FULLY_CONNECTED",
        [
            tensor("x", (m, k), dtype, [s_x], [z_x]),
            tensor("w", (n, k), dtype, s_w, z_ws, w),
            tensor("b", (n,), "i4", data=b),
            tensor("y", (m, n), dtype, [s_y], [z_y]),
        ],
        (0, 1, -1 if b is None else 2),
        fused_activation_function=activation,
    )
    got = run(graph, x)
    assert got.dtype == np.dtype(dtype)
    real_lo, real_hi = RANGES[activation]
    inverse = exact32(1 / fraction(s_y))
    lo, hi = (exact32(Fraction(low + code - z_y) * fraction(s_y)) for code in (0, 255))
    lo = lo if real_lo is None else max(lo, Fraction(real_lo))
    hi = hi if real_hi is None else min(hi, Fraction(real_hi))
    lo, hi = exact32(lo * inverse), exact32(hi * inverse)
    for row in range(m):
        for col in range(n):
            acc = sum((int(x[row, i]) - z_x) * (int(w[col, i]) - int(np.broadcast_to(z_ws, n)[col])) for i in range(k))
            acc += 0 if b is None else int(b[col])
            mult = multiplier(s_x, float(np.broadcast_to(s_w, n)[col]), s_y)
            assert got[row, col] == expected_code(acc, mult, lo, hi, z_y)


@given(
    st.integers(-128, 127),
    st.integers(0, 255),
    st.floats(2.0**-10, 2.0**-3, width=32),
    st.floats(2.0**-10, 2.0**-3, width=32),
)
def test_quantize_between_codes(z_x: int, z_y: int, s_x: float, s_y: float) -> None:
    graph = single(
        "QUANTIZE", [tensor("x", (256,), "i1", [s_x], [z_x]), tensor("y", (16, 16), "u1", [s_y], [z_y])], (0,)
    )
    got = run(graph, np.arange(-128, 128).astype(np.int8))
    mult = exact32(fraction(s_x) * exact32(1 / fraction(s_y)))
    for code, result in zip(range(-128, 128), got.ravel().tolist(), strict=True):
        assert result == expected_code(code - z_x, mult, Fraction(-z_y), Fraction(255 - z_y), z_y)


def test_float_operators_of_the_host() -> None:
    """TFLite rounds half away from zero when it quantises, and saturates."""
    quantize = single("QUANTIZE", [tensor("x", (7,), "f4"), tensor("y", (7,), "i1", [0.5], [-3])], (0,))
    x = np.float32([0, 0.25, -0.25, 0.75, 1e30, -np.inf, 0.2])
    assert run(quantize, x).tolist() == [-3, -2, -4, -1, 127, -128, -3]
    dequantize = single("DEQUANTIZE", [tensor("x", (2,), "u1", [0.1], [10]), tensor("y", (2,), "f4")], (0,))
    assert run(dequantize, np.uint8([0, 255])).tolist() == [
        np.float32(-10) * np.float32(0.1),
        np.float32(245 * np.float32(0.1)),
    ]
    with pytest.raises(EvaluateError, match="NaN"):
        run(quantize, np.full(7, np.nan, np.float32))


@pytest.mark.parametrize("size", [256, 512, 1024])
def test_dense_models_of_the_corpus(corpus: Path, size: int) -> None:
    """Whole file against integers and float32 steps; the numbers are read with the public schema, not our reader."""
    path = corpus / "dense" / f"dense_{size}.tflite"
    buffer = path.read_bytes()
    model = tflite.Model.GetRootAsModel(buffer, 0)
    graph = model.Subgraphs(0)
    quant = [graph.Tensors(i).Quantization() for i in range(graph.TensorsLength())]
    scale = [q.ScaleAsNumpy().astype(np.float32) for q in quant]
    zero = [q.ZeroPointAsNumpy().astype(int) for q in quant]
    w = np.frombuffer(model.Buffers(graph.Tensors(1).Buffer()).DataAsNumpy().tobytes(), np.int8).reshape(size, size)
    rng = np.random.default_rng(size)
    for _ in range(20):
        x = rng.integers(0, 256, (1, size), np.uint8)
        acc = (x.astype(int) - zero[0][0]) @ (w.astype(int) - zero[1].reshape(-1, 1)).T
        mult = (scale[0] * scale[1]) * (np.float32(1) / scale[3])
        assert mult.dtype == np.float32
        steps = np.clip(np.rint(acc.astype(np.float32) * mult) + zero[4][0], 0, 255)
        (output,) = evaluate.evaluate(path, {graph.Tensors(0).Name().decode(): x}).values()
        assert np.array_equal(output, steps.astype(np.uint8))
        assert len(np.unique(output)) > 20


FC = [
    tensor("x", (1, 2), "i1", [1], [0]),
    tensor("w", (3, 2), "i1", [1], [0], np.zeros((3, 2), np.int8)),
    tensor("y", (1, 3), "i1", [1], [0]),
]
X = np.zeros((1, 2), np.int8)


def fc(index: int, replacement: Tensor, **options: Any) -> Graph:
    return single("FULLY_CONNECTED", [*FC[:index], replacement, *FC[index + 1 :]], (0, 1, -1), **options)


@pytest.mark.parametrize(
    ("graph", "x", "message"),
    [
        (single("CONV_3D", FC, (0,)), X, "operator 0, CONV_3D 'y': the operator has no reference"),
        (single("FULLY_CONNECTED", FC, (0,)), X, "FULLY_CONNECTED 'y': input 1 is missing"),
        (single("FULLY_CONNECTED", FC, (0, 2)), X, "'y' is read before"),
        (single("FULLY_CONNECTED", FC, (0, 1), weights_format=1), X, "option weights_format is 1"),
        (single("FULLY_CONNECTED", FC, (0, 1), fused_activation_function="TANH"), X, "'TANH' is not one of"),
        (fc(1, tensor("w", (3,), "i1", [1], [0], np.zeros(3, np.int8))), X, r"\(3,\) do not fit"),
        (fc(1, tensor("w", (3, 5), "i1", [1], [0], np.zeros((3, 5), np.int8))), X, r"\(3, 5\) do not fit"),
        (fc(1, tensor("w", (3, 2), "i1", [1, 2], [0, 0], FC[1].data)), X, "2 scales and 2 zero points along axis 0"),
        (fc(1, tensor("w", (3, 2), "i1", [1, 1], [0, 0], FC[1].data, 1)), X, "along axis 1"),
        (fc(1, tensor("w", (3, 2), "i1", [0], [0], FC[1].data)), X, "weight scale is 0"),
        (fc(1, tensor("w", (3, 2), "i1", [1], [200], FC[1].data)), X, "w_zp=328"),
        (fc(1, tensor("w", (3, 2), "f4", [1], [0], np.zeros((3, 2), np.float32))), X, "'w' is float32"),
        (fc(2, tensor("y", (1, 3), "i2", [1], [0])), X, "'y' is int16"),
        (fc(2, tensor("y", (1, 3), "i1", [1], [2**40])), X, "has zero point"),
        (fc(2, tensor("y", (1, 3), "i1", [np.nan], [0])), X, "output scale is nan"),
        (fc(2, tensor("y", (1, 3), "i1")), X, "has 0 scales"),
        (fc(2, tensor("y", (1, 4), "i1", [1], [0])), X, r"shape \(1, 4\), its operator computes \(1, 3\)"),
        (fc(2, FC[2]), X.astype(np.uint8), r"'x' must be int8 \(1, 2\), given is uint8"),
        (fc(2, FC[2]), X[0], r"given is int8 \(2,\)"),
        (fc(2, FC[2]), [[0, 0]], "given is list"),
        (Graph("main", tuple(FC), (0,), (2,), ()), X, "no operator computes the output 'y'"),
        (
            Graph("main", tuple(FC), (0,), (2,), (Operator("RESHAPE", (0,), (), {}),)),
            X,
            "no operator computes the output 'y'",
        ),
    ],
)
def test_errors(graph: Graph, x: Any, message: str) -> None:
    with pytest.raises(CoralError, match=message):
        run(graph, x)


def test_inputs_by_name() -> None:
    with pytest.raises(EvaluateError, match="no tensors named 'z'"):
        evaluate.evaluate(fc(2, FC[2]), {"z": X})
    with pytest.raises(EvaluateError, match=r"input 'x', int8 \(1, 2\), is needed and not given"):
        evaluate.evaluate(fc(2, FC[2]), {})
    with pytest.raises(EvaluateError, match="has 2 tensors named 'x'"):
        evaluate.evaluate(fc(1, FC[0]), {"x": X})
    with pytest.raises(EvaluateError, match="generation 'newer'"):
        evaluate.evaluate(fc(2, FC[2]), {"x": X}, generation="newer")  # type: ignore[arg-type]


def test_inner_tensors(corpus: Path) -> None:
    """A part of a model by the names of its ends, and every tensor on the way."""
    model = read_model(corpus / "dense" / "dense_256.tflite")
    names = [tensor.name for tensor in model.main.tensors]
    x = np.arange(256, dtype=np.uint8)[None]
    values = evaluate.evaluate(model, {names[0]: x}, intermediates=True)
    assert list(values) == names[2:]
    assert np.array_equal(values[names[2]], (x.astype(int) - 128).astype(np.int8))
    assert np.array_equal(values[names[4]], (values[names[3]].astype(int) + 128).astype(np.uint8))
    part = evaluate.evaluate(model, {names[2]: values[names[2]]}, outputs=[names[3]])
    assert list(part) == [names[3]]
    assert np.array_equal(part[names[3]], values[names[3]])


def test_errors_are_coral_errors() -> None:
    assert issubclass(EvaluateError, CoralError)
    assert issubclass(NumericsError, CoralError)
