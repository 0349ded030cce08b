"""The whole line: a tinygrad kernel becomes instructions, executed by the simulated chip of the simulated stick."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tinygrad import Tensor

from backend.layers import Layer, answer, random_data, random_layer
from coral.backend import reset_stats, stats


def _plain(layer: Layer) -> Callable:
    return layer


def _view(layer: Layer) -> Callable:
    def compute(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return layer(x.reshape(-1, x.shape[-1]), w, b)

    return compute


def _slice(layer: Layer) -> Callable:
    def compute(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return layer(x[1:-1], w[: w.shape[0] - 1], None if b is None else b[: w.shape[0] - 1])

    return compute


FORMS = {"plain": _plain, "view": _view, "slice": _slice, "batched": _plain}
CASES = [(rows, bias, form) for rows in (1, 2, 31, 32, 33) for bias in (True, False) for form in FORMS]


@pytest.mark.parametrize("seed", range(60))
def test_random_layer(coral_device, cpu: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, bias, form = CASES[seed % len(CASES)]
    n, k = int(rng.integers(1, 80)), int(rng.integers(2, 200))
    shape = {"plain": (rows,), "view": (1, rows), "slice": (rows + 2,), "batched": (2, rows)}[form]
    layer = random_layer(rng, k)
    data = random_data(rng, shape, n + (form == "slice"), k, bias=bias)
    compute = FORMS[form](layer)
    calls = coral_device.chip.stats.calls
    reset_stats()
    got = answer("CORAL", compute, data)
    counted = stats()
    assert np.array_equal(got, answer(cpu, compute, data, optimise=seed < 8))
    all_rows = 2 * rows if form == "batched" else rows
    assert (counted.chip_programs, counted.chip_rows, counted.host_programs) == (1, all_rows, 0)
    assert coral_device.chip.stats.calls == calls + 1


def test_weights_stay_on_the_chip_and_follow_their_buffer(coral_device, cpu: str) -> None:
    """Three layers in turn: one upload each; a weight written in place is uploaded again and used."""
    rng = np.random.default_rng(0)
    layers = [random_layer(rng, 32) for _ in range(3)]
    operands = [random_data(rng, (1,), 16, 32, bias=True) for _ in layers]
    tensors = [[Tensor(a, device="CORAL").realize() for a in (d.x, d.w, d.b)] for d in operands]
    want = [answer(cpu, layer, d) for layer, d in zip(layers, operands, strict=True)]
    uploads = coral_device.chip.stats.uploads
    for _ in range(2):
        for layer, t, expected in zip(layers, tensors, want, strict=True):
            assert np.array_equal(layer(*t).numpy(), expected)
    assert coral_device.chip.stats.uploads == uploads + 3
    tensors[0][1].assign(Tensor(operands[1].w, device="CORAL")).realize()
    mixed = answer(cpu, layers[0], type(operands[0])(operands[0].x, operands[1].w, operands[0].b))
    assert np.array_equal(layers[0](*tensors[0]).numpy(), mixed)
    assert coral_device.chip.stats.uploads == uploads + 4


PROGRAM = """
import numpy as np
from tinygrad import Tensor, TinyJit
from coral.quantize.expressions import dequantise_expression, qlinear_expression, quantise_expression
from coral.backend import stats
rng = np.random.default_rng(0)
w1, w2 = (Tensor(rng.integers(0, 256, shape, dtype=np.uint8)).realize() for shape in ((24, 32), (10, 24)))
@TinyJit
def forward(x):
    h = qlinear_expression(quantise_expression(x, 0.02, 128), w1, None, 128, 127, 0.001, 100, 255, 100)
    return dequantise_expression(qlinear_expression(h, w2, None, 100, 127, 0.002, 0, 255, 90), 0.1, 90).realize()
for i in range(4):
    y = forward(Tensor(rng.normal(size=(2, 32)).astype(np.float32)).realize()).numpy()
    print(y.tobytes().hex())
print(stats().chip_programs)
"""


def test_fresh_process_jit_and_all(python, cpu: str) -> None:
    """DEV=SIM+CORAL against DEV=CPU, float in, float out."""
    on_chip, on_cpu = python(PROGRAM, DEV="SIM+CORAL"), python(PROGRAM, DEV="CPU")
    assert on_chip.returncode == 0, on_chip.stderr
    assert on_cpu.returncode == 0, on_cpu.stderr
    assert on_chip.stdout.splitlines()[:4] == on_cpu.stdout.splitlines()[:4]
    assert (on_chip.stdout.split()[-1], on_cpu.stdout.split()[-1]) == ("4", "0")
