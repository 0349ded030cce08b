"""Operators of the host that move, compare and reduce, against TFLite's kernels."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from evaluate_graphs import tensor

from coral.evaluate import EvaluateError
from coral.evaluate.graph import known, run_operators
from coral.package.graph import Graph, Operator, Tensor
from coral.package.graph_file import write_model

KINDS = {"f4": 0, "i4": 2, "u1": 3, "i8": 4, "b1": 6, "i1": 9}
TRUTH = "?"


def t(name: str, shape: tuple[int, ...], dtype: str = "f4", data: Any = None) -> Tensor:
    data = None if data is None else np.array(data, dtype).reshape(shape)
    quant = ([0.5], [3]) if dtype in ("u1", "i1") else ([], [])
    found = tensor(name, shape, dtype, *quant, data)
    return replace(found, type=KINDS["b1" if dtype == TRUTH else dtype])


def c(values: Any, dtype: str = "i4") -> Tensor:
    return t("c", np.shape(values), dtype, values)


X, Y, ROW = (2, 3, 4), (1, 3, 1), (4,)
IMAGE = (2, 4, 6, 4)
REDUCER = {"keep_dims": False}
CASES: dict[str, tuple[str, list[Tensor], list[tuple[tuple[int, ...], str]], dict[str, Any], str]] = {}
"""Name -> operator, inputs (those with data are constants), shapes and dtypes of the results, options, their table."""


def case(op: str, inputs: list[Tensor], *results: tuple[tuple[int, ...], str], table: str = "", **options: Any) -> None:
    CASES[f"{len(CASES)} {op}"] = (op, inputs, list(results), options, table)


for op in ("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"):
    case(op, [t("a", X), t("b", Y)], (X, TRUTH))
    case(op, [t("a", X, "i4"), t("b", X, "i4")], (X, TRUTH))
for op in ("LOGICAL_AND", "LOGICAL_OR"):
    case(op, [t("a", X, TRUTH), t("b", X, TRUTH)], (X, TRUTH))
case("LOGICAL_NOT", [t("a", X, TRUTH)], (X, TRUTH))
for dtype in ("f4", "i4", "u1"):
    case("SELECT", [t("k", X, TRUTH), t("a", X, dtype), t("b", X, dtype)], (X, dtype), table="SelectOptions")
    case("SELECT", [t("k", (2,), TRUTH), t("a", X, dtype), t("b", X, dtype)], (X, dtype), table="SelectOptions")
    case("TILE", [t("a", X, dtype), c([1, 2, 3])], ((2, 6, 12), dtype), table="TileOptions")
    case(
        "PADV2",
        [t("a", X, dtype), c([[1, 0], [0, 2], [3, 1]]), t("v", (), dtype, 9)],
        ((3, 5, 8), dtype),
        table="PadV2Options",
    )
    case("DEPTH_TO_SPACE", [t("a", IMAGE, dtype)], ((2, 8, 12, 1), dtype), table="DepthToSpaceOptions", block_size=2)
    case("SPACE_TO_DEPTH", [t("a", IMAGE, dtype)], ((2, 2, 3, 16), dtype), table="SpaceToDepthOptions", block_size=2)
    case(
        "SPACE_TO_BATCH_ND",
        [t("a", IMAGE, dtype), c([2, 3]), c([[1, 1], [0, 3]])],
        ((12, 3, 3, 4), dtype),
        table="SpaceToBatchNDOptions",
    )
    case(
        "BATCH_TO_SPACE_ND",
        [t("a", (12, 3, 3, 4), dtype), c([2, 3]), c([[1, 1], [0, 3]])],
        (IMAGE, dtype),
        table="BatchToSpaceNDOptions",
    )
    case("REVERSE_V2", [t("a", X, dtype), c([1])], (X, dtype), table="ReverseV2Options")
    case("TOPK_V2", [t("a", X, dtype), c(3)], ((2, 3, 3), dtype), ((2, 3, 3), "i4"), table="TopKV2Options")
for dtype in ("f4", "i4"):
    case("SELECT_V2", [t("k", Y, TRUTH), t("a", X, dtype), t("b", ROW, dtype)], (X, dtype), table="SelectV2Options")
    case("PAD", [t("a", X, dtype), c([[1, 0], [0, 2], [3, 1]])], ((3, 5, 8), dtype), table="PadOptions")
    case("BROADCAST_TO", [t("a", Y, dtype), c([2, 3, 4])], (X, dtype), table="BroadcastToOptions")
    case("SUM", [t("a", X, dtype), c([0, -1])], ((3,), dtype), table="ReducerOptions", **REDUCER)
    case("REDUCE_PROD", [t("a", X, dtype), c([1])], ((2, 1, 4), dtype), table="ReducerOptions", keep_dims=True)
    case("MEAN", [t("a", X, dtype), c([1, 2])], ((2, 1, 1), dtype), table="ReducerOptions", keep_dims=True)
    for exclusive, reverse in ((False, False), (True, False), (False, True), (True, True)):
        case(
            "CUMSUM", [t("a", X, dtype), c(1)], (X, dtype), table="CumsumOptions", exclusive=exclusive, reverse=reverse
        )
    for mode in (0, 1):
        case(
            "MIRROR_PAD",
            [t("a", X, dtype), c([[1, 0], [0, 2], [3, 1]])],
            ((3, 5, 8), dtype),
            table="MirrorPadOptions",
            mode=mode,
        )
for op in ("REDUCE_ANY", "REDUCE_ALL"):
    case(op, [t("a", X, TRUTH), c([1])], ((2, 4), TRUTH), table="ReducerOptions", **REDUCER)
case("SOFTMAX", [t("a", X)], (X, "f4"), table="SoftmaxOptions", beta=0.5)
case("LOG_SOFTMAX", [t("a", X)], (X, "f4"), table="LogSoftmaxOptions")
for axis, shape in ((-1, (2, 3, 5)), (0, (5, 2, 3)), (1, (2, 5, 3))):
    case(
        "ONE_HOT",
        [t("a", (2, 3), "i4"), c(5), t("on", (), "f4", 2.5), t("off", (), "f4", -1)],
        (shape, "f4"),
        table="OneHotOptions",
        axis=axis,
    )
for adj_x, adj_y, a, b in ((False, False, (2, 3, 4), (2, 4, 5)), (True, True, (2, 4, 3), (1, 5, 4))):
    case(
        "BATCH_MATMUL", [t("a", a), t("b", b)], ((2, 3, 5), "f4"), table="BatchMatMulOptions", adj_x=adj_x, adj_y=adj_y
    )
VERSIONS = {"BROADCAST_TO": 2}
NEAR = {"MEAN", "SOFTMAX", "LOG_SOFTMAX", "BATCH_MATMUL", "SUM", "REDUCE_PROD"}
"""float32 sums in another order."""


def graph_of(name: str) -> Graph:
    op, inputs, results, options, table = CASES[name]
    tensors = [replace(x, name=f"x{k}") for k, x in enumerate(inputs)]
    tensors += [t(f"y{k}", shape, dtype) for k, (shape, dtype) in enumerate(results)]
    numbers = tuple(range(len(inputs)))
    outputs = tuple(range(len(inputs), len(tensors)))
    given = tuple(i for i in numbers if tensors[i].data is None)
    return Graph(
        "main",
        tuple(tensors),
        given,
        outputs,
        (Operator(op, numbers, outputs, options, (), None, table, VERSIONS.get(op, 1)),),
    )


def values(graph: Graph, seed: int) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for i in graph.inputs:
        x = graph.tensors[i]
        drawn = rng.normal(0, 2, x.shape).round(1) if x.dtype == np.float32 else rng.integers(0, 6, x.shape)
        found[i] = (drawn > 2 if x.dtype == np.bool_ else drawn).astype(x.dtype)
    return found


@pytest.mark.parametrize("name", CASES)
def test_equal_to_tflite(name: str) -> None:
    litert: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert: its kernels NOT compared")
    graph = graph_of(name)
    assert known(graph, [0])
    interpreter = litert.Interpreter(model_content=write_model([graph]))
    interpreter.allocate_tensors()
    for seed in range(4):
        given = values(graph, seed)
        for detail, i in zip(interpreter.get_input_details(), graph.inputs, strict=True):
            interpreter.set_tensor(detail["index"], given[i])
        interpreter.invoke()
        ours = run_operators(graph, [0], given)
        for detail, i in zip(interpreter.get_output_details(), graph.outputs, strict=True):
            theirs = interpreter.get_tensor(detail["index"])
            assert (ours[i].dtype, ours[i].shape) == (theirs.dtype, theirs.shape)
            if CASES[name][0] in NEAR and theirs.dtype == np.float32:
                np.testing.assert_allclose(ours[i], theirs, rtol=1e-5, atol=1e-6)
            else:
                np.testing.assert_array_equal(ours[i], theirs)


@pytest.mark.parametrize("name", CASES)
def test_other_shapes_are_refused_or_computed(name: str) -> None:
    """Random shapes and constants in place of the right ones."""
    graph, rng = graph_of(name), np.random.default_rng(len(name))
    for _ in range(40):
        tensors = list(graph.tensors)
        i = int(rng.integers(len(tensors)))
        shape = tuple(int(n) for n in rng.integers(0, 5, rng.integers(0, 5)))
        x = tensors[i]
        data = None if x.data is None else rng.integers(-3, 9, shape).astype(x.dtype)
        tensors[i] = replace(x, shape=shape, data=data)
        other = replace(graph, tensors=tuple(tensors))
        with contextlib.suppress(EvaluateError):
            found = run_operators(other, [0], values(other, 0))
            assert all(found[k].shape == tensors[k].shape for k in graph.outputs)


def test_dtypes_without_a_function_are_not_known() -> None:
    x, y = t("x", (1, 4, 4, 2)), t("y", (1, 4, 4, 2))
    for op, expected in (("L2_NORMALIZATION", False), ("ADD", True), ("MAX_POOL_2D", False), ("RESHAPE", True)):
        assert known(Graph("main", (x, y), (0,), (1,), (Operator(op, (0,), (1,), {}),)), [0]) is expected
