"""Graphs from strangers: whatever they hold, the judge computes or raises a typed error."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from evaluate_graphs import single, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lstm import Model

from coral import CoralError, evaluate
from coral.evaluate import OPERATORS
from coral.package.graph import Graph, Tensor


def q(name: str, *shape: int, constant: bool = False) -> Tensor:
    data = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape) if constant else None
    return tensor(name, shape, "u1", [0.5], [3], data)


def ints(name: str, values: Any) -> Tensor:
    data = np.array(values, np.int32)
    return tensor(name, data.shape, "i4", data=data)


IMAGE, BIAS = q("x", 1, 4, 4, 2), ints("b", [1, 2])
WINDOW = {"padding": "SAME", "stride_h": 1, "stride_w": 2, "fused_activation_function": "NONE"}
POOL = WINDOW | {"filter_height": 2, "filter_width": 3}
RESIZE = {"align_corners": False, "half_pixel_centers": True}
ROW, ROW_OUT = q("x", 2, 3), q("y", 2, 3)
VALID = {
    "FULLY_CONNECTED": ([ROW, q("w", 2, 3, constant=True), BIAS, q("y", 2, 2)], (0, 1, 2), {"weights_format": 0}),
    "CONV_2D": ([IMAGE, q("w", 2, 3, 3, 2, constant=True), BIAS, q("y", 1, 4, 2, 2)], (0, 1, 2), WINDOW),
    "DEPTHWISE_CONV_2D": ([IMAGE, q("w", 1, 3, 3, 2, constant=True), BIAS, q("y", 1, 4, 2, 2)], (0, 1, 2), WINDOW),
    "TRANSPOSE_CONV": (
        [IMAGE, ints("s", [1, 4, 8, 2]), q("w", 2, 3, 3, 2, constant=True), BIAS, q("y", 1, 4, 8, 2)], (1, 2, 0, 3),
        WINDOW,
    ),
    "ADD": ([ROW, q("c", 2, 3, constant=True), ROW_OUT], (0, 1), {"fused_activation_function": "NONE"}),
    "SUB": ([ROW, q("c", 3, constant=True), ROW_OUT], (0, 1), {"fused_activation_function": "NONE"}),
    "MUL": ([ROW, q("c", 1, constant=True), ROW_OUT], (0, 1), {"fused_activation_function": "NONE"}),
    "AVERAGE_POOL_2D": ([IMAGE, q("y", 1, 4, 2, 2)], (0,), POOL),
    "MAX_POOL_2D": ([IMAGE, q("y", 1, 4, 2, 2)], (0,), POOL),
    "RESIZE_BILINEAR": ([IMAGE, q("y", 1, 8, 8, 2)], (0,), RESIZE),
    "RESIZE_NEAREST_NEIGHBOR": ([IMAGE, q("y", 1, 8, 8, 2)], (0,), RESIZE),
    "MEAN": ([ROW, ints("a", [1]), q("y", 2)], (0, 1), {"keep_dims": False}),
    "SUM": ([ROW, ints("a", [-1]), q("y", 2)], (0, 1), {"keep_dims": False}),
    "SOFTMAX": ([ROW, ROW_OUT], (0,), {"beta": 1.0}),
    "CONCATENATION": ([ROW, q("y", 2, 6)], (0, 0), {"axis": 1}),
    "SPLIT": ([ROW, ints("a", 1), ROW_OUT], (1, 0), {"num_splits": 1}),
    "SPLIT_V": ([ROW, ints("s", [3]), ints("a", 1), ROW_OUT], (0, 1, 2), {"num_splits": 1}),
    "PAD": ([ROW, ints("p", [[0, 1], [2, 0]]), q("y", 3, 5)], (0, 1), {}),
    "DEQUANTIZE": ([ROW, tensor("y", (2, 3), "f4")], (0,), {}),
} | {
    name: ([ROW, ROW_OUT], (0,), {"fused_activation_function": "NONE"})
    for name in ("QUANTIZE", "RELU", "RELU6", "RELU_N1_TO_1", "LOGISTIC", "TANH", "HARD_SWISH", "L2_NORMALIZATION",
                 "RESHAPE", "SQUEEZE", "EXPAND_DIMS")
}  # fmt: skip
GRAPHS = {name: single(name, tensors, order, **options) for name, (tensors, order, options) in VALID.items()}
GRAPHS["UNIDIRECTIONAL_SEQUENCE_LSTM"] = Model(0).graph()
OTHER_VALUES: dict[type, list[Any]] = {
    str: ["NONE", "SAME", "VALID", "TANH", "RELU6", "?"],
    int: [0, 1, 2, 3, 9, -1, 2**31 - 1, -(2**31)],
    float: [0.0, 0.5, -1.0, 1e38, float("nan"), float("inf")],
    bool: [False, True],
}
"""What an option may hold instead; the reader guarantees its type."""


def compute(graph: Graph, generation: Any = "new") -> dict[str, np.ndarray]:
    """With zeros for whatever the graph does not hold."""
    made = {i for op in graph.operators for i in op.outputs}
    values = {
        t.name: np.zeros(t.shape, t.dtype)
        for i, t in enumerate(graph.tensors)
        if i not in made
        and t.data is None
        and t.dtype is not None
        and min(t.shape, default=0) >= 0
        and math.prod(max(n, 1) for n in t.shape) < 2**20
    }
    return evaluate.evaluate(graph, values, generation=generation)


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_the_graphs_are_valid(name: str) -> None:
    graph = GRAPHS[name]
    assert compute(graph)["y"].shape == graph.tensors[graph.outputs[0]].shape


@st.composite
def damaged_tensors(draw: st.DrawFn, t: Tensor) -> Tensor:
    kind = draw(st.sampled_from(["shape", "dtype", "scales", "zeros", "data", "axis", "variable"]))
    if kind == "shape":
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, -1, 2**31 - 1]), max_size=5).map(tuple))
        if t.data is not None and (min(shape, default=1) < 0 or max(shape, default=1) > 8):
            return t
        return replace(t, shape=shape, data=None if t.data is None else np.resize(t.data, shape))
    if kind == "dtype":
        dtype = np.dtype(draw(st.sampled_from(["u1", "i1", "i2", "i4", "i8", "f4", "?"])))
        return replace(t, dtype=dtype, data=None if t.data is None else t.data.astype(dtype))
    if kind == "scales":
        scale = st.sampled_from([1.0, 0.003, 0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e-30, 1e30])
        return replace(t, scales=np.array(draw(st.lists(scale, max_size=3)), np.float32))
    if kind == "zeros":
        zero = st.sampled_from([0, 3, 255, 256, -128, -129, 2**62, -(2**63)])
        return replace(t, zero_points=np.array(draw(st.lists(zero, max_size=3)), np.int64))
    if kind == "data":
        extremes = draw(st.sampled_from([-(2**31), 2**31 - 1, -1, 77]))
        return replace(
            t,
            data=None if t.data is None else np.full_like(t.data, extremes & 127 if t.data.dtype != "i4" else extremes),
        )
    if kind == "axis":
        return replace(t, quantized_dimension=draw(st.sampled_from([-(2**31), -1, 0, 3, 9])))
    return replace(t, is_variable=not t.is_variable)


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_damaged_graphs(data: st.DataObject) -> None:
    """One to three damages to a tensor, to an option or to the operator's ends."""
    graph = GRAPHS[data.draw(st.sampled_from(sorted(GRAPHS)))]
    (op,), parts = graph.operators, list(graph.tensors)
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["tensor", "tensor", "option", "input", "output"]))
        if kind == "tensor":
            number = data.draw(st.integers(0, len(parts) - 1))
            parts[number] = data.draw(damaged_tensors(parts[number]))
        elif kind == "option" and op.options:
            option = data.draw(st.sampled_from(sorted(op.options)))
            other = data.draw(st.sampled_from(OTHER_VALUES[type(op.options[option])]))
            op = replace(op, options=op.options | {option: other})
        elif kind == "input":
            inputs = list(op.inputs)
            inputs[data.draw(st.integers(0, len(inputs) - 1))] = data.draw(st.integers(-1, len(parts) - 1))
            op = replace(op, inputs=tuple(inputs[: data.draw(st.integers(0, len(inputs)))] or inputs))
        else:
            outputs = data.draw(st.lists(st.integers(-1, len(parts) - 1), max_size=2))
            op = replace(op, outputs=tuple(outputs))
    damaged = Graph("main", tuple(parts), graph.inputs, graph.outputs, (op,))
    with contextlib.suppress(CoralError):
        values = compute(damaged, data.draw(st.sampled_from(["new", "old"])))
        for i in damaged.outputs:
            assert values[parts[i].name].shape == parts[i].shape
