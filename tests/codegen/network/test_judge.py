"""Stages as front ends write them, on the simulated chip, against ``coral.evaluate`` on a graph of one operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from codegen.network.harness import outputs, run
from coral import numerics
from coral.chip import Chip
from coral.codegen import network as nw
from coral.evaluate import evaluate
from coral.package.graph import Graph, Operator, Tensor

X, Y = (0.05, 117), (0.03, 90)
Quantisation = tuple[float, int]


def tensor(name: str, shape: tuple[int, ...], quant: Quantisation | None, data: np.ndarray | None = None) -> Tensor:
    scale, zero = quant or (1.0, 0)
    kind = np.dtype("i4" if quant is None else "u1")
    return Tensor(name, shape, 0, kind, np.array([scale], np.float32), np.array([zero]), 0, data, False)


def judged(
    name: str, parts: list[Tensor], x: dict[str, np.ndarray], y: Tensor, inputs: tuple[int, ...], **options: Any
) -> np.ndarray:
    operator = Operator(name, inputs, (len(parts),), options)
    first = tuple(k for k, t in enumerate(parts) if t.data is None)
    graph = Graph("main", (*parts, y), first, (len(parts),), (operator,))
    return evaluate(graph, x, generation="new")["y"]


def on_chip(stage: nw.Stage, sizes: dict[str, tuple[int, int, int]], quants: dict[str, Quantisation], images: dict):
    tensors = {n: nw.Tensor(n, y, x, c, quants[n][1], quants[n][0]) for n, (y, x, c) in sizes.items()}
    p = nw.NetworkProgram(nw.Network("one", tensors, stage.inputs, (stage,), ("y",)))
    chip = Chip(seed=3)
    run(chip, p.caching())
    return outputs(p, run(chip, p.execution, p.pack(images)))["y"]


def compare(name: str, stage: nw.Stage, size, out, quant=(X, Y), constants=(), index: int = 0, **options: Any) -> None:
    """One input, all codes in it; ``constants``: the operator's other inputs, ``index``: where its input stands."""
    x = np.random.default_rng(len(name)).permutation(np.arange(np.prod(size)) % 256).astype(np.uint8).reshape(1, *size)
    parts = [tensor("x", x.shape, quant[0]), *constants]
    order = [*range(1, len(parts))]
    order.insert(index, 0)
    y = tensor("y", (1, *out), quant[1])
    expected = judged(name, parts, {"x": x}, y, tuple(order), **options)
    got = on_chip(stage, {"x": size, "y": out}, {"x": quant[0], "y": quant[1]}, {"x": x})
    np.testing.assert_array_equal(got, expected)


def integers(name: str, data) -> Tensor:
    values = np.array(data, np.int32)
    return tensor(name, values.shape, None, values)


@pytest.mark.parametrize("name", ["RELU", "RELU6", "RELU_N1_TO_1", "QUANTIZE"])
def test_clamps(name):
    limits = numerics.clamps(*Y, "NONE" if name == "QUANTIZE" else name)
    stage = nw.Requantise(("x",), "y", limits, float(numerics.rescale_multiplier(X[0], Y[0])))
    compare(name, stage, (8, 9, 6), (8, 9, 6))


@pytest.mark.parametrize(("name", "scale", "zero"), [("LOGISTIC", 1 / 256, 0), ("TANH", 1 / 128, 128)])
def test_splines(name, scale, zero):
    limit, table = getattr(numerics, f"{name}_CLAMP"), getattr(numerics, name).scaled(numerics.inv(scale))
    stage = nw.Requantise(("x",), "y", (-limit, limit), float(np.float32(X[0])), 0, table)
    compare(name, stage, (8, 9, 6), (8, 9, 6), (X, (scale, zero)))


@pytest.mark.parametrize("channels", [3, 21, 130])
def test_softmax(channels):
    mults = numerics.softmax_multipliers(X[0], 0.7, 1 / 256)
    stage = nw.Softmax(("x",), "y", numerics.clamps(1 / 256, 0), mults)
    compare("SOFTMAX", stage, (4, 5, channels), (4, 5, channels), (X, (1 / 256, 0)), beta=0.7)


def test_l2_normalisation():
    stage = nw.L2Normalise(("x",), "y", numerics.clamps(1 / 128, 128), numerics.l2_multipliers(X[0], 1 / 128))
    compare("L2_NORMALIZATION", stage, (3, 4, 50), (3, 4, 50), (X, (1 / 128, 128)), fused_activation_function="NONE")


@pytest.mark.parametrize("nearest", [False, True])
def test_resizes(nearest):
    name, options = "RESIZE_NEAREST_NEIGHBOR" if nearest else "RESIZE_BILINEAR", {"half_pixel_centers": not nearest}
    stage = nw.Resize(("x",), "y", (0.0, 0.0), nearest)
    compare(name, stage, (7, 9, 10), (14, 18, 10), (X, X), [integers("size", [14, 18])], align_corners=False, **options)


@pytest.mark.parametrize(("padding", "size", "before"), [("SAME", (13, 12), (1, 1)), ("VALID", (16, 15), (0, 0))])
def test_transposed_convolutions(padding, size, before):
    rng = np.random.default_rng(1)
    w, bias = rng.integers(0, 256, (7, 3, 4, 6), np.uint8), rng.integers(-900, 900, 7).astype(np.int32)
    mult = float(numerics.multiplier(X[0], 0.01, Y[0]))
    window = nw.Window((3, 4), (2, 2), before)
    stage = nw.TransposeConv(("x",), "y", numerics.clamps(*Y), w, bias, 77, mult, window)
    constants = [
        integers("shape", [1, *size, 7]),
        tensor("w", w.shape, (0.01, 77), w),
        Tensor("b", (7,), 0, np.dtype("i4"), np.array([1.0], np.float32), np.array([0]), 0, bias, False),
    ]
    options = {"padding": padding, "stride_h": 2, "stride_w": 2}
    compare("TRANSPOSE_CONV", stage, (7, 6, 6), (*size, 7), (X, Y), constants, 2, **options)


def test_concatenations_of_other_quantisations():
    rng, sizes = np.random.default_rng(2), {"a": (5, 6, 3), "b": (5, 6, 8), "c": (5, 6, 6)}
    quants = {"a": (0.02, 3), "b": Y, "c": (0.07, 201), "y": Y}
    x = {n: rng.integers(0, 256, (1, *size), np.uint8) for n, size in sizes.items()}
    mults = tuple(1.0 if q == Y else float(numerics.rescale_multiplier(q[0], Y[0])) for q in list(quants.values())[:3])
    stage = nw.Concatenate(("a", "b", "c"), "y", numerics.clamps(*Y), mults)
    parts = [tensor(n, (1, *size), quants[n]) for n, size in sizes.items()]
    y = tensor("y", (1, 5, 6, 17), Y)
    expected = judged("CONCATENATION", parts, x, y, (0, 1, 2), axis=3, fused_activation_function="NONE")
    np.testing.assert_array_equal(on_chip(stage, {**sizes, "y": (5, 6, 17)}, quants, x), expected)


def test_depthwise_multipliers():
    w = np.random.default_rng(3).integers(0, 256, (1, 3, 3, 15), np.uint8)
    mult = float(numerics.multiplier(X[0], 0.01, Y[0]))
    at = nw.same((8, 7), (3, 3), (2, 2))
    stage = nw.Depthwise(("x",), "y", numerics.clamps(*Y), w[0], None, 100, mult, at)
    options = {"padding": "SAME", "stride_h": 2, "stride_w": 2, "depth_multiplier": 3}
    weights = [tensor("w", w.shape, (0.01, 100), w)]
    compare("DEPTHWISE_CONV_2D", stage, (8, 7, 5), (4, 4, 15), (X, Y), weights, **options)


def test_padding():
    stage = nw.Pad(("x",), "y", (0.0, 0.0), (2, 0))
    compare("PAD", stage, (5, 6, 7), (8, 9, 7), (X, X), [integers("p", [[0, 0], [2, 1], [0, 3], [0, 0]])])


def test_hard_swish_of_all_codes():
    """Our own definition: the quadratic between -3 and 3 in the non-linear unit."""
    table = numerics.HARD_SWISH.scaled(numerics.inv(Y[0]))
    x = np.arange(256, dtype=np.uint8).reshape(1, 8, 8, 4)
    stage = nw.Requantise(("x",), "y", (-4.0, 16.0), float(np.float32(X[0])), 0, table)
    got = on_chip(stage, {"x": (8, 8, 4), "y": (8, 8, 4)}, {"x": X, "y": Y}, {"x": x})
    real = (x.astype(np.float64) - X[1]) * X[0]
    exact = real * np.clip(real + 3, 0, 6) / 6 / Y[0] + Y[1]
    assert np.abs(got - np.clip(exact, 0, 255)).max() <= 0.5 + 1e-4
