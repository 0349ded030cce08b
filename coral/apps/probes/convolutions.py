"""Convolutions and whole networks against the layer reference. Source: docs/network.md, docs/numerics.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from coral import numerics
from coral.apps.probes import Finding, step
from coral.apps.probes.bench import Bench
from coral.apps.probes.forms import constant
from coral.apps.probes.layers import all_right
from coral.codegen.network import Conv, Network, NetworkProgram, Tensor, same
from coral.compiler.lowering import Lowering
from coral.evaluate import evaluate
from coral.package.graph import Graph, Operator
from coral.package.tensors import unpack_output

SHAPES = [(8, 3, 16, 3, 1), (16, 16, 32, 1, 1), (15, 8, 24, 3, 2), (9, 4, 8, 5, 1), (1, 64, 64, 1, 1)]
"""Rows and columns of the input, its channels, those of the output, kernel, stride."""


@step(35, 17)
def convolutions(bench: Bench) -> Finding:
    """Convolutions with kernels of 1, 3 and 5, strides of 1 and 2; measured and predicted microseconds per call."""
    wrong, microseconds = {}, {}
    for seed, shape in enumerate(SHAPES):
        program, image, expected = random_convolution(seed, *shape)
        name, inputs = "{0}x{0}x{1} to {2}, kernel {3}, stride {4}".format(*shape), {"x": program.pack(image[None])}
        bench.stick.run(program.caching())
        got = unpack_output(program.execution.outputs[0], bench.run(program.execution, inputs))
        wrong[name] = int((got.reshape(-1) != expected.reshape(-1)).sum())
        microseconds[name] = bench.microseconds(program.execution, inputs)
    return all_right(wrong, microseconds=microseconds)


def random_convolution(
    seed: int, size: int, c: int, n: int, kernel: int, stride: int
) -> tuple[NetworkProgram, np.ndarray, np.ndarray]:
    """Program, an input and the reference's answer: a dense layer on every window, padding being the zero point."""
    rng = np.random.default_rng(seed)
    in_zp, w_zp, out_zp = (int(v) for v in rng.integers(0, 256, 3))
    image, w = rng.integers(0, 256, (size, size, c), np.uint8), rng.integers(0, 256, (n, kernel, kernel, c), np.uint8)
    bias, mult = rng.integers(-999, 999, n).astype(np.int32), float(np.float32(0.006 / np.sqrt(kernel * kernel * c)))
    limits, out = numerics.integer_clamps(out_zp), -(-size // stride)
    window = same((size, size), (kernel, kernel), (stride, stride))
    tensors = {"x": Tensor("x", size, size, c, in_zp), "y": Tensor("y", out, out, n, out_zp)}
    stage = Conv(("x",), "y", limits, w, bias, w_zp, mult, window)
    padded = np.pad(image, [(pad, kernel) for pad in window.pad] + [(0, 0)], constant_values=in_zp)
    corners = [(y * stride, x * stride) for y in range(out) for x in range(out)]
    rows = np.stack([padded[y : y + kernel, x : x + kernel].reshape(-1) for y, x in corners])
    expected = numerics.fully_connected(rows, w.reshape(n, -1), bias, in_zp, w_zp, mult, *limits, out_zp)
    return NetworkProgram(Network("conv", tensors, ("x",), (stage,), ("y",))), image, expected


class _Graph:
    """A graph that grows operator by operator, from an input ``x`` of random codes."""

    def __init__(self, seed: int, *shape: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tensors, self.operators = [constant("x", None, shape, 0.05, 120)], []

    def weights(self, *shape: int, scale: float = 0.01) -> tuple[int, int]:
        """Numbers of random weights and of a bias for the outputs of their first axis (of one row: the last)."""
        outputs = shape[0] if shape[0] > 1 else shape[-1]
        first = len(self.tensors)
        codes = self.rng.integers(0, 256, shape, np.uint8)
        self.tensors.append(constant(f"w{first}", codes, shape, scale, int(self.rng.integers(100, 150))))
        self.tensors.append(constant(f"b{first}", self.rng.integers(-500, 500, outputs)))
        return first, first + 1

    def add(self, name: str, inputs: tuple[int, ...], shape: tuple[int, ...], *quant: float, **options: Any) -> int:
        """Number of the result of an operator; ``quant``: its scale and zero point."""
        self.tensors.append(constant(f"{name} {len(self.tensors)}", None, shape, *quant))
        self.operators.append(Operator(name, inputs, (len(self.tensors) - 1,), {"padding": "SAME"} | options))
        return len(self.tensors) - 1


def mixed_graph(seed: int) -> Graph:
    """Every kind of stage in one graph; all results of operators are outputs."""
    g, image, half = _Graph(seed, 1, 12, 12, 8), (1, 12, 12, 8), (1, 6, 6, 16)
    spread = g.add("DEPTHWISE_CONV_2D", (0, *g.weights(1, 3, 3, 8, scale=0.01)), image, 0.1, 130, depth_multiplier=1)
    added = g.add("ADD", (0, spread), image, 0.12, 110)
    product = g.add("MUL", (added, spread), image, 0.5, 100)
    both = g.add("CONCATENATION", (added, product), (1, 12, 12, 16), 0.25, 115, axis=3)
    pool = {"filter_height": 2, "filter_width": 2, "stride_h": 2, "stride_w": 2}
    largest = g.add("MAX_POOL_2D", (both,), half, 0.25, 115, **pool)
    conv = g.add(
        "CONV_2D",
        (largest, *g.weights(32, 3, 3, 16, scale=0.0003)),
        (1, 6, 6, 32),
        0.03,
        0,
        fused_activation_function="RELU6",
    )
    logistic = g.add("LOGISTIC", (conv,), (1, 6, 6, 32), 1 / 256, 0)
    whole = {"filter_height": 6, "filter_width": 6, "padding": "VALID"}
    mean = g.add("AVERAGE_POOL_2D", (logistic,), (1, 1, 1, 32), 1 / 256, 0, **whole)
    g.add("FULLY_CONNECTED", (mean, *g.weights(10, 32)), (1, 10), 0.05, 128)
    outputs = tuple(op.outputs[0] for op in g.operators)
    return Graph("main", tuple(g.tensors), (0,), outputs, tuple(g.operators))


@step(35)
def networks(bench: Bench) -> Finding:
    """Networks of depthwise and plain convolutions, ADD, MUL, joins, both pools, LOGISTIC and a dense layer."""
    wrong = {}
    for seed in (1, 2):
        graph = mixed_graph(seed)
        names = tuple(f"t{number}" for number in range(len(graph.tensors)))
        lowering = Lowering(graph, names, 1)
        for number in range(len(graph.operators)):
            lowering.take(number)
        program = NetworkProgram(lowering.network("mixed", tuple(names[number] for number in graph.outputs)))
        x = np.random.default_rng(seed).integers(0, 256, graph.tensors[0].shape, np.uint8)
        expected = evaluate(graph, {"x": x})
        bench.stick.run(program.caching())
        raw = bench.stick.run(program.execution, {names[0]: program.pack(x)})
        for number in graph.outputs:
            layer = program.execution.layer(names[number])
            got, name = unpack_output(layer, raw[layer.name]), graph.tensors[number].name
            wrong[f"{name} of {seed}"] = int((got.reshape(-1) != expected[name].reshape(-1)).sum())
    return all_right(wrong)
