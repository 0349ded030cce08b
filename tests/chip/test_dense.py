"""Google's FULLY_CONNECTED programs, byte for byte, against the layer's formula written out here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coral.chip import Chip
from coral.package import Kind
from coral.package.graph import read_model
from tests.chip.harness import programs, run


def layer_reference(path: Path, x: np.ndarray) -> np.ndarray:
    """docs/numerics.md written out for one int8 per-channel layer without bias: uint8 codes in, uint8 codes out."""
    graph = read_model(path).main
    operator = next(o for o in graph.operators if o.name == "FULLY_CONNECTED")
    x_t, w_t, y_t = (
        graph.tensors[operator.inputs[0]],
        graph.tensors[operator.inputs[1]],
        graph.tensors[operator.outputs[0]],
    )
    assert w_t.data is not None
    f = np.float32
    acc = w_t.data.astype(np.int64) @ (x.astype(np.int64) - (x_t.zero_point + 128))
    mult = f(x_t.scales * w_t.scales) * (f(1) / f(y_t.scale))
    zero = y_t.zero_point + 128
    low = f(f((0 - zero) * f(y_t.scale)) * (f(1) / f(y_t.scale)))
    high = f(f((255 - zero) * f(y_t.scale)) * (f(1) / f(y_t.scale)))
    real = np.clip(acc.astype(f) * mult, low, high)
    return (np.rint(real).astype(np.int64) + zero).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("size", [256, 512, 1024])
def test_google_dense_programs_are_exact(corpus: Path, size: int) -> None:
    pair = programs(corpus / "dense" / f"dense_{size}_edgetpu.tflite")
    program = pair[Kind.EXECUTION_ONLY]
    chip = Chip()
    run(chip, pair[Kind.PARAMETER_CACHING])
    rng = np.random.default_rng(size)
    for trial in range(5):
        x = np.full(size, (0, 255)[trial], np.uint8) if trial < 2 else rng.integers(0, 256, size, np.uint8)
        (y,) = run(chip, program, {program.inputs[0].name: x.tobytes()}).values()
        assert (np.frombuffer(y, np.uint8) == layer_reference(corpus / "dense" / f"dense_{size}.tflite", x)).all()


@pytest.mark.parametrize("seed", range(6))
def test_unit_order_does_not_matter(corpus: Path, seed: int) -> None:
    pair = programs(corpus / "dense" / "dense_256_edgetpu.tflite")
    program = pair[Kind.EXECUTION_ONLY]
    x = np.random.default_rng(seed).integers(0, 256, 256, np.uint8)
    chip = Chip(seed=seed)
    run(chip, pair[Kind.PARAMETER_CACHING])
    (y,) = run(chip, program, {program.inputs[0].name: x.tobytes()}).values()
    assert (np.frombuffer(y, np.uint8) == layer_reference(corpus / "dense" / "dense_256.tflite", x)).all()
