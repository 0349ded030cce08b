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

    def constant(self, values: np.ndarray) -> int:
        """Number of a constant of int32."""
        self.tensors.append(constant(f"c{len(self.tensors)}", values))
        return len(self.tensors) - 1

    def graph(self) -> Graph:
        """All of it; results of operators are outputs."""
        outputs = tuple(op.outputs[0] for op in self.operators)
        return Graph("main", tuple(self.tensors), (0,), outputs, tuple(self.operators))

    def add(self, name: str, inputs: tuple[int, ...], shape: tuple[int, ...], *quant: float, **options: Any) -> int:
        """Number of the result of an operator; ``quant``: its scale and zero point."""
        self.tensors.append(constant(f"{name} {len(self.tensors)}", None, shape, *quant))
        self.operators.append(Operator(name, inputs, (len(self.tensors) - 1,), {"padding": "SAME"} | options))
        return len(self.tensors) - 1


def mixed_graph(seed: int) -> Graph:
    """Every kind of stage in one graph."""
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
    return g.graph()


def normalised_graph(seed: int) -> Graph:
    """SOFTMAX and L2 normalisation of 9 and of 65 channels."""
    g = _Graph(seed, 1, 5, 7, 9)
    wide = g.add("CONV_2D", (0, *g.weights(65, 1, 1, 9, scale=0.0005)), (1, 5, 7, 65), 0.1, 120)
    for source, c in ((0, 9), (wide, 65)):
        g.add("SOFTMAX", (source,), (1, 5, 7, c), 1 / 256, 0, beta=1.0)
        g.add("L2_NORMALIZATION", (source,), (1, 5, 7, c), 1 / 128, 128)
    return g.graph()


def transposed_graph(seed: int) -> Graph:
    """Transposed convolutions of stride 2, which write every second row and column at a time."""
    g = _Graph(seed, 1, 7, 6, 8)
    for kernel in (2, 3):
        weights, _ = g.weights(12, kernel, kernel, 8, scale=0.002)
        shape = g.constant(np.array([1, 14, 12, 12], np.int32))
        g.add("TRANSPOSE_CONV", (shape, weights, 0), (1, 14, 12, 12), 0.05, 110, stride_h=2, stride_w=2)
    return g.graph()


def dense_graph(seed: int) -> Graph:
    """Dense layers on several tiles, one behind the other: each collects the vector that the one before has left."""
    g, last, inputs = _Graph(seed, 1, 1, 1, 96), 0, 96
    for outputs in (300, 1000, 200, 600):
        last = g.add("FULLY_CONNECTED", (last, *g.weights(outputs, inputs, scale=0.0004)), (1, outputs), 0.1, 128)
        inputs = outputs
    return g.graph()


def errors(bench: Bench, seed: int, graph: Graph) -> dict[str, int]:
    """Wrong codes of every output, against the layer reference."""
    names = tuple(f"t{number}" for number in range(len(graph.tensors)))
    lowering = Lowering(graph, names, 1)
    for number in range(len(graph.operators)):
        lowering.take(number)
    program = NetworkProgram(lowering.network("mixed", tuple(names[number] for number in graph.outputs)))
    x = np.random.default_rng(seed).integers(0, 256, graph.tensors[0].shape, np.uint8)
    expected = evaluate(graph, {"x": x})
    bench.stick.run(program.caching())
    raw = bench.stick.run(program.execution, {names[0]: program.pack(x)})
    wrong = {}
    for number in graph.outputs:
        layer = program.execution.layer(names[number])
        got, name = unpack_output(layer, raw[layer.name]), graph.tensors[number].name
        wrong[f"{name} of {seed}"] = int((got.reshape(-1) != expected[name].reshape(-1)).sum())
    return wrong


@step(35, 51)
def networks(bench: Bench) -> Finding:
    """Networks of depthwise and plain convolutions, ADD, MUL, joins, both pools, LOGISTIC and a dense layer."""
    return all_right(errors(bench, 1, mixed_graph(1)) | errors(bench, 2, mixed_graph(2)))


@step(47, 48)
def normalisations(bench: Bench) -> Finding:
    """SOFTMAX and L2 normalisation over the channels of a map, in a network."""
    return all_right(errors(bench, 1, normalised_graph(1)))


@step(49)
def interleaved_results(bench: Bench) -> Finding:
    """Transposed convolutions: results in every second row and column."""
    return all_right(errors(bench, 1, transposed_graph(1)))


@step(50)
def senders_take_turns(bench: Bench) -> Finding:
    """One ring send of several tiles, each in its turn: a chain of dense layers on up to sixteen tiles."""
    return all_right(errors(bench, 1, dense_graph(1)))
