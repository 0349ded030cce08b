"""Operators that move values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from evaluate_graphs import Quantised, exact_clamps, fraction, inverse, run, single, tensor
from exact_float import exact32, exact_requantise
from hypothesis import given
from hypothesis import strategies as st

from coral import evaluate
from coral.evaluate import EvaluateError
from coral.package.graph import Graph, Operator


@given(st.integers(0, 2**32), st.sampled_from(["u1", "i1"]), st.integers(-3, 2), st.booleans())
def test_concatenation(seed: int, dtype: str, axis: int, same: bool) -> None:
    """Parts with the output's quantisation are moved, the others requantised."""
    rng = np.random.default_rng(seed)
    sizes = [1, 3, 2]
    shapes = [tuple(size if i == axis % 3 else 2 for i in range(3)) for size in sizes]
    parts = [Quantised(rng, shape, dtype) for shape in shapes]
    y = Quantised(rng, tuple(6 if i == axis % 3 else 2 for i in range(3)), dtype)
    if same:
        parts[0].scale, parts[0].zero_point = y.scale, y.zero_point
    tensors = [part.tensor(f"x{i}") for i, part in enumerate(parts)]
    op = Operator("CONCATENATION", (0, 1, 2), (3,), {"axis": axis, "fused_activation_function": "NONE"})
    graph = Graph("main", (*tensors, y.tensor("y")), (0, 1, 2), (3,), (op,))
    got = evaluate.evaluate(graph, {f"x{i}": part.values for i, part in enumerate(parts)})["y"]
    clamps = exact_clamps(y.scale, y.zero_point)
    expected = []
    for part in parts:
        mult = exact32(fraction(part.scale) * inverse(y.scale))
        codes = np.vectorize(lambda v, m=mult: exact_requantise(int(v), m, *clamps, y.zero_point))(part.centred)
        expected.append(codes)
    if same:
        expected[0] = parts[0].codes(parts[0].values)
    assert np.array_equal(y.codes(got), np.concatenate(expected, axis))


def test_split() -> None:
    x = np.arange(24, dtype=np.uint8).reshape(2, 6, 2)
    axis, sizes = (
        tensor("axis", (), "i4", data=np.array(1, np.int32)),
        tensor("sizes", (2,), "i4", data=np.int32([1, 5])),
    )
    source = tensor("x", x.shape, "u1", [1], [0])
    thirds = [tensor(f"y{i}", (2, 2, 2), "u1", [1], [0]) for i in range(3)]
    graph = Graph("main", (source, axis, *thirds), (0,), (2, 3, 4), (Operator("SPLIT", (1, 0), (2, 3, 4), {}),))
    values = evaluate.evaluate(graph, {"x": x})
    assert [values[f"y{i}"].tolist() for i in range(3)] == [x[:, 2 * i : 2 * i + 2].tolist() for i in range(3)]
    uneven = [tensor("y0", (2, 1, 2), "u1", [1], [0]), tensor("y1", (2, 5, 2), "u1", [1], [0])]
    graph = Graph("main", (source, sizes, axis, *uneven), (0,), (3, 4), (Operator("SPLIT_V", (0, 1, 2), (3, 4), {}),))
    values = evaluate.evaluate(graph, {"x": x})
    assert values["y0"].tolist() == x[:, :1].tolist()
    assert values["y1"].tolist() == x[:, 1:].tolist()


def test_pad_and_reshape() -> None:
    x = np.int8([[1, 2], [3, 4]])
    borders = tensor("p", (2, 2), "i4", data=np.int32([[1, 0], [0, 2]]))
    source = tensor("x", (2, 2), "i1", [1], [-7])
    got = run(single("PAD", [source, borders, tensor("y", (3, 4), "i1", [1], [-7])], (0, 1)), x)
    assert got.tolist() == [[-7, -7, -7, -7], [1, 2, -7, -7], [3, 4, -7, -7]]
    other = run(single("PAD", [source, borders, tensor("y", (3, 4), "i1", [3], [5])], (0, 1)), x)
    assert other.tolist() == [[5, 5, 5, 5], [1, 2, 5, 5], [3, 4, 5, 5]]  # TFLite moves codes
    for kind, zero, message in (("u1", 137, "of uint8"), ("i1", 300, "zero point 428 in codes")):
        with pytest.raises(EvaluateError, match=message):
            run(single("PAD", [source, borders, tensor("y", (3, 4), kind, [1], [zero])], (0, 1)), x)
    for name in ("RESHAPE", "SQUEEZE", "EXPAND_DIMS"):
        assert run(single(name, [source, tensor("y", (1, 4), "i1", [1], [-7])], (0,)), x).tolist() == [[1, 2, 3, 4]]


X = tensor("x", (2, 2), "u1", [1], [0])
Y = tensor("y", (3, 4), "u1", [1], [0])


def ints(values: Any) -> Any:
    data = np.array(values, np.int32)
    return tensor("c", data.shape, "i4", data=data)


@pytest.mark.parametrize(
    ("op", "second", "order", "options", "message"),
    [
        ("PAD", ints([[1, 0], [0, 1]]), (0, 1), {}, r"paddings .* do not take \(2, 2\) to \(3, 4\)"),
        ("PAD", ints([[2, -1], [0, 2]]), (0, 1), {}, "paddings"),
        ("PAD", ints([1]), (0, 1), {}, r"paddings \[1\]"),
        ("PAD", ints([3]), (0, 0), {}, "must be a constant of integers"),
        ("RESHAPE", ints([3]), (0, 1), {}, "its operator computes"),
        ("CONCATENATION", ints([3]), (0, 0), {"axis": 5}, "axis 5 of a tensor with 2 dimensions"),
        ("CONCATENATION", ints([3]), (0, 0), {"axis": 0}, r"do not join to \(3, 4\) along axis 0"),
        ("CONCATENATION", ints([3]), (0,), {"fused_activation_function": "RELU"}, "option fused_activation_function"),
        ("SPLIT", ints(9), (1, 0), {}, "axis 9 of a tensor"),
        ("SPLIT", ints(0), (1, 0), {}, r"outputs \[\(3, 4\)\] do not share the axis 0 of \(2, 2\)"),
        ("SPLIT", ints(0), (1,), {}, "input 1 is missing"),
    ],
)
def test_errors(op: str, second: Any, order: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluateError, match=message):
        run(single(op, [X, second, Y], order, **options), np.zeros((2, 2), np.uint8))
