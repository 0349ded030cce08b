"""Walking graphs: names, inner tensors, errors; Google's dense models against integers read with the public schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tflite
from evaluate_graphs import run, single, tensor

from coral import CoralError, evaluate
from coral.evaluate import EvaluateError
from coral.numerics import NumericsError
from coral.package.graph import Graph, Operator, Tensor, read_model


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


def test_size_limit() -> None:
    for shape in ((2**14, 2**13), (-1, 2)):
        graph = single("RESHAPE", [FC[0], tensor("y", shape, "i1", [1], [0])], (0,))
        with pytest.raises(
            EvaluateError, match=r"operator 0, RESHAPE 'y': tensor 'y' has the shape .* supported are up to 67108864"
        ):
            run(graph, X)


def test_only_what_is_needed_runs() -> None:
    """An unknown operator beside the way to the wanted tensor does not matter; on the way it does."""
    tensors = [tensor(name, (1, 2), "i1", [1], [0]) for name in ("x", "a", "b")]
    operators = (Operator("RELU", (0,), (1,), {}), Operator("ERF", (1,), (2,), {}))
    graph = Graph("main", tuple(tensors), (0,), (2,), operators)
    assert evaluate.evaluate(graph, {"x": X}, outputs=["a"])["a"].tolist() == [[0, 0]]
    assert evaluate.evaluate(graph, {"b": X})["b"].tolist() == [[0, 0]]
    with pytest.raises(EvaluateError, match="operator 1, ERF 'b': the operator has no reference function"):
        evaluate.evaluate(graph, {"x": X})
