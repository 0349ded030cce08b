"""Convolutions against the layer reference. Source: docs/network.md, docs/numerics.md."""

from __future__ import annotations

import numpy as np

from coral import numerics
from coral.apps.probes import Finding, step
from coral.apps.probes.bench import Bench
from coral.apps.probes.layers import all_right
from coral.codegen.network import Conv, Network, NetworkProgram, Tensor, same
from coral.package.tensors import unpack_output

SHAPES = [(8, 3, 16, 3, 1), (16, 16, 32, 1, 1), (15, 8, 24, 3, 2), (9, 4, 8, 5, 1), (1, 64, 64, 1, 1)]
"""Rows and columns of the input, its channels, those of the output, kernel, stride."""


@step(17)
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
