"""Operators that become several stages: completely on the chip, and equal to the judge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import coral
from compiler.random_graphs import OPTIONS, VERSIONS
from coral.apps.direct import DirectChip
from coral.chip import Chip
from coral.compiler import compile_models
from coral.evaluate.compare import difference
from coral.evaluate.graph import run_operators
from coral.package.graph import Graph, Operator, Tensor
from coral.package.graph_file import write_model

KINDS = {"u1": 3, "i1": 9, "i4": 2}
QUANTS = {"x": (0.05, 11), "y": (0.07, 130), "g": (0.004, 3), "c": (0.03, 200)}


def tensor(name: str, shape: tuple[int, ...], data: Any = None, dtype: str = "u1", like: str = "") -> Tensor:
    scale, zero = QUANTS[like or name] if dtype != "i4" else (0.0, 0)
    quant = ([scale], [zero - (128 if dtype == "i1" else 0)]) if dtype != "i4" else ([], [])
    data = None if data is None else np.array(data, dtype).reshape(shape)
    return Tensor(name, shape, KINDS[dtype], np.dtype(dtype), np.array(quant[0], np.float32),
                  np.array(quant[1], np.int64), 0, data, False)  # fmt: skip


def check(name: str, tensors: list[Tensor], order: tuple[int, ...], seed: int = 0, **options: Any) -> None:
    """One operator; the last tensor is its output, computed tensors are inputs."""
    computed = [i for i, t in enumerate(tensors[:-1]) if t.data is None]
    out = len(tensors) - 1
    op = Operator(name, order, (out,), options, (), None, OPTIONS[name])
    graph = Graph("main", tuple(tensors), tuple(computed), (out,), (op,))
    (one,) = compile_models([write_model([graph])])
    assert not one.partition.reasons
    rng = np.random.default_rng(seed)
    x = {i: rng.integers(0, 256, tensors[i].shape).astype(np.uint8).view(tensors[i].dtype) for i in computed}
    got = coral.load(one.data, device=DirectChip(Chip(seed=seed)))({tensors[i].name: v for i, v in x.items()})
    np.testing.assert_array_equal(got, run_operators(graph, [0], x)[out])


@pytest.mark.parametrize("dtype", ["u1", "i1"])
@pytest.mark.parametrize(
    ("size", "kernel", "stride"),
    [((9, 7), (3, 3), (1, 1)), ((8, 12), (3, 3), (2, 2)), ((5, 6), (2, 2), (1, 1)), ((1, 17), (4, 5), (2, 3)),
     ((3, 2), (5, 5), (1, 1)), ((1, 1), (3, 3), (1, 1))],
)  # fmt: skip
def test_averages_over_the_border(dtype: str, size: tuple[int, int], kernel: tuple, stride: tuple) -> None:
    out = tuple(-(-n // s) for n, s in zip(size, stride, strict=True))
    tensors = [tensor("x", (1, *size, 6), dtype=dtype), tensor("y", (1, *out, 6), dtype=dtype)]
    check("AVERAGE_POOL_2D", tensors, (0,), filter_height=kernel[0], filter_width=kernel[1], padding="SAME",
          stride_h=stride[0], stride_w=stride[1], fused_activation_function="RELU6")  # fmt: skip


@pytest.mark.parametrize("part", [(1, 1, 5), (6, 1, 5), (6, 7, 1), (1, 7, 1)])
@pytest.mark.parametrize("name", ["ADD", "SUB", "MUL"])
def test_broadcasting(name: str, part: tuple[int, int, int]) -> None:
    images = 1 + sum(part) % 3
    tensors = [tensor("x", (images, 6, 7, 5)), tensor("g", (images, *part)), tensor("y", (images, 6, 7, 5))]
    for seed, order in enumerate(((0, 1), (1, 0))):
        check(name, tensors, order, seed, fused_activation_function="NONE")


def test_both_operands_are_repeated() -> None:
    tensors = [tensor("x", (1, 6, 1, 5)), tensor("g", (1, 1, 7, 1)), tensor("y", (1, 6, 7, 5))]
    check("MUL", tensors, (0, 1), fused_activation_function="NONE")


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("dtype", ["u1", "i1"])
def test_a_constant_less_a_map(dtype: str, size: int) -> None:
    codes = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8).view(dtype)
    shape = (2, 6, 7, 5)
    tensors = [tensor("c", (size,), codes, dtype), tensor("x", shape, None, dtype), tensor("y", shape, None, dtype)]
    check("SUB", tensors, (0, 1), fused_activation_function="NONE")


@pytest.mark.parametrize("dtype", ["u1", "i1"])
def test_hard_swish(dtype: str) -> None:
    check("HARD_SWISH", [tensor("x", (1, 9, 6, 5), None, dtype), tensor("y", (1, 9, 6, 5), None, dtype)], (0,))


@pytest.mark.parametrize(
    ("name", "size", "factors"),
    [("NEAREST_NEIGHBOR", (5, 6), (3, 3)), ("NEAREST_NEIGHBOR", (4, 3), (1, 4)), ("NEAREST_NEIGHBOR", (1, 1), (9, 5)),
     ("BILINEAR", (1, 1), (33, 33)), ("BILINEAR", (6, 7), (1, 1))],
)  # fmt: skip
def test_resizes_that_repeat(name: str, size: tuple[int, int], factors: tuple[int, int]) -> None:
    out = tuple(n * f for n, f in zip(size, factors, strict=True))
    tensors = [tensor("x", (1, *size, 6)), tensor("size", (2,), out, "i4"), tensor("y", (1, *out, 6), like="x")]
    check(f"RESIZE_{name}", tensors, (0, 1), align_corners=name == "BILINEAR", half_pixel_centers=False)


def of_litert(graph: Graph, x: dict[int, np.ndarray]) -> np.ndarray:
    litert: Any = pytest.importorskip(
        "ai_edge_litert.interpreter", reason="ai-edge-litert: TFLite's kernels NOT compared"
    )
    resolver = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = litert.Interpreter(model_content=write_model([graph]), experimental_op_resolver_type=resolver)
    interpreter.allocate_tensors()
    for detail, i in zip(interpreter.get_input_details(), graph.inputs, strict=True):
        interpreter.set_tensor(detail["index"], x[i])
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


@pytest.mark.parametrize("dtype", ["u1", "i1"])
@pytest.mark.parametrize(
    ("name", "shapes", "y", "options", "allowed"),
    [
        ("HARD_SWISH", [(1, 8, 8, 4)], (1, 8, 8, 4), {}, set()),
        ("AVERAGE_POOL_2D", [(1, 9, 9, 8)], (1, 9, 9, 8), {"filter_height": 3, "filter_width": 3, "padding": "SAME",
         "stride_h": 1, "stride_w": 1, "fused_activation_function": "NONE"}, {-1, 1}),
        ("ADD", [(1, 9, 9, 8), (1, 1, 1, 8)], (1, 9, 9, 8), {"fused_activation_function": "NONE"}, {-1, 1}),
        ("SUB", [(1, 1, 9, 1), (1, 9, 9, 8)], (1, 9, 9, 8), {"fused_activation_function": "NONE"}, {-1, 1}),
        ("MUL", [(1, 9, 9, 8), (1, 9, 1, 8)], (1, 9, 9, 8), {"fused_activation_function": "NONE"}, {-1, 1}),
    ],
)  # fmt: skip
def test_tflite_is_near(name: str, shapes: list, y: tuple, options: dict, allowed: set[int], dtype: str) -> None:
    """These are in no program of Google's: TFLite's own kernels are what they are held against."""
    tensors = [tensor(n, shape, None, dtype) for n, shape in zip("xg", shapes, strict=False)]
    like = "x" if name == "AVERAGE_POOL_2D" else ""
    tensors.append(tensor("y", y, None, dtype, like))
    numbers, version = tuple(range(len(shapes))), VERSIONS.get(name, 2) if dtype == "i1" else 1
    op = Operator(name, numbers, (len(shapes),), options, (), None, OPTIONS[name], version)
    graph = Graph("main", tuple(tensors), numbers, (len(shapes),), (op,))
    for seed in range(5):
        rng = np.random.default_rng(seed)
        x = {i: rng.integers(0, 256, tensors[i].shape).astype(np.uint8).view(tensors[i].dtype) for i in numbers}
        found = difference(of_litert(graph, x), run_operators(graph, [0], x)[len(shapes)])
        assert set(found.amounts) <= allowed
        assert found.differing <= 0.08 * found.values
