"""Convolutions of images in Google's form, on the simulated chip against numpy. Identity: test_identity.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from codegen.network.harness import run
from coral import numerics
from coral.chip import Chip
from coral.codegen import CodegenError, ShapeError
from coral.codegen.conv2d import ImageConv
from coral.codegen.fc import FcQuant
from coral.package.tensors import unpack_output


@pytest.mark.parametrize(
    ("h", "w", "kernel", "outputs", "above"),
    [(64, 64, 7, 8, 0), (64, 64, 3, 16, 9), (32, 64, 5, 12, 64), (48, 256, 9, 8, 0), (128, 32, 3, 8, 200)],
)
def test_any_image(h: int, w: int, kernel: int, outputs: int, above: int) -> None:
    rng = np.random.default_rng(kernel * h)
    zero_in, zero_out = (int(z) for z in rng.integers(0, 256, 2))
    mult = float(np.float32(0.5 / (70 * 70 * kernel)))
    low, high = -float(zero_out), float(255 - zero_out)
    layer = ImageConv(h, w, kernel, outputs, FcQuant(zero_in, 0, zero_out, mult, low, high), above)
    weights = rng.integers(0, 256, (outputs, kernel, kernel)).astype(np.uint8)
    zeros = rng.integers(0, 256, outputs).astype(np.int32)
    image = rng.integers(0, 256, (h, w)).astype(np.uint8)
    padded = np.pad(image.astype(np.int64) - zero_in, kernel // 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel))
    sums = np.einsum("yxij,nij->yxn", windows, weights.astype(np.int64) - zeros[:, None, None])
    chip = Chip(seed=h)
    run(chip, layer.caching(layer.blob(weights, zeros)))
    layer.execution.check()
    (raw,) = run(chip, layer.execution, image.tobytes())
    got = unpack_output(layer.execution.outputs[0], raw)
    want = numerics.requantise(sums.astype(np.int32), mult, low, high, zero_out)
    np.testing.assert_array_equal(got.reshape(h, w, outputs), want)


@pytest.mark.parametrize(
    ("h", "w", "kernel", "outputs", "reason"),
    [
        (64, 64, 4, 8, "an odd one"), (64, 64, 1, 8, "reaches past"), (64, 64, 35, 8, "reaches past"),
        (62, 64, 7, 8, "multiples"), (64, 512, 7, 8, "at most 256 columns"), (16, 16, 3, 8, "several times 256"),
        (64, 64, 7, 6, "allowed are"), (64, 64, 7, 20, "allowed are"), (64, 64, 7, 4, "must be more than"),
    ],
)  # fmt: skip
def test_other_forms_are_refused(h: int, w: int, kernel: int, outputs: int, reason: str) -> None:
    with pytest.raises(ShapeError, match=reason):
        ImageConv(h, w, kernel, outputs, FcQuant(0, 0, 0, 1.0, 0.0, math.inf))


def test_wrong_parameters_are_refused() -> None:
    layer = ImageConv(64, 64, 7, 8, FcQuant(0, 0, 0, 1.0, 0.0, 255.0))
    with pytest.raises(CodegenError, match="weights are"):
        layer.blob(np.zeros((8, 5, 5), np.uint8), np.zeros(8, np.int32))
    with pytest.raises(CodegenError, match="zero points are"):
        layer.blob(np.zeros((8, 7, 7), np.uint8), np.zeros(7, np.int32))
    with pytest.raises(CodegenError, match="3200 are needed"):
        layer.caching(b"")
