"""Layers that must reach the chip: one chip program, no host program, the CPU's bytes."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit
from tinygrad.helpers import Context

from backend.layers import Data, Layer, answer, random_data, random_layer
from coral.backend import stats


def test_outputs_of_the_random_layers_spread() -> None:
    """The comparison above would prove nothing on saturated outputs."""
    rng = np.random.default_rng(1)
    layers = [random_layer(rng, 100) for _ in range(60)]
    kinds = [np.unique(_numpy_layer(layer, random_data(rng, (8,), 40, 100, bias=True))).size for layer in layers]
    assert np.median(kinds) > 60


def _numpy_layer(layer: Layer, data: Data) -> np.ndarray:
    acc = (data.x.astype(np.int64) - layer.in_zp) @ (data.w.astype(np.int64) - layer.w_zp).T + data.b
    scaled = acc.astype(np.float32) * np.float32(layer.mult)
    return np.clip(np.rint(scaled) + layer.out_zp, layer.lo, layer.hi).astype(np.uint8)


@pytest.mark.parametrize("seed", range(4))
def test_against_numpy(chip, seed: int) -> None:
    """Independent of tinygrad: int64 sums, one float32 product, rint."""
    rng = np.random.default_rng(seed)
    data = random_data(rng, (5,), 20, 64, bias=True)
    layer = random_layer(rng, 64)
    assert np.array_equal(answer("CORAL", layer, data), _numpy_layer(layer, data))


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 5, 3), (4, 1, 7), (3, 9, 2), (3, 4, 1), (1, 1, 1)])
def test_small_axes(chip, cpu: str, shape: tuple[int, int, int]) -> None:
    rows, n, k = shape
    data = random_data(np.random.default_rng(0), (rows,), n, k, bias=True)
    layer = Layer(0, 0, 1.0 / 128, 0, 255, 0)
    assert np.array_equal(answer("CORAL", layer, data), answer(cpu, layer, data))
    assert stats().chip_programs == 1


def test_one_buffer_as_input_and_weight(chip, cpu: str) -> None:
    layer = Layer(3, 130, 0.01, 0, 255, 7)
    data = random_data(np.random.default_rng(0), (6,), 6, 20, bias=False)

    def compute(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return layer(x, x, b)

    assert np.array_equal(answer("CORAL", compute, data), answer(cpu, compute, data))
    assert (stats().chip_programs, stats().host_programs) == (1, 0)


def test_quantise_layer_dequantise(chip, cpu: str) -> None:
    """A float network around the layer: its own kernels on the host, the layer alone on the chip."""
    from coral.quantize.expressions import dequantise_expression, quantise_expression

    layer = Layer(100, 130, 0.002, 0, 255, 90)
    rng = np.random.default_rng(0)
    w, b = rng.integers(0, 256, (9, 33), dtype=np.uint8), rng.integers(-999, 999, 9).astype(np.int32)
    x = rng.normal(size=(4, 33)).astype(np.float32)

    def run(device: str) -> np.ndarray:
        tensors = [Tensor(a, device=device).realize() for a in (x, w, b)]
        return dequantise_expression(layer(quantise_expression(tensors[0], 0.02, 100), *tensors[1:]), 0.1, 90).numpy()

    assert np.array_equal(run("CORAL"), run(cpu))
    assert (stats().chip_programs, stats().host_programs) == (1, 2)


def test_several_layers_in_one_schedule(chip, cpu: str) -> None:
    layers = [random_layer(np.random.default_rng(i), 40) for i in range(3)]
    data = random_data(np.random.default_rng(9), (3,), 40, 40, bias=True)

    def compute(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        for layer in layers:
            x = layer(x, w, b)
        return x

    assert np.array_equal(answer("CORAL", compute, data), answer(cpu, compute, data))
    assert (stats().chip_programs, stats().host_programs) == (3, 0)
    assert [spec.mult for spec, *_ in chip.calls] == [layer.mult for layer in layers]


def test_tinyjit(chip) -> None:
    layer = Layer(3, 130, 0.01, 0, 255, 7)
    rng = np.random.default_rng(0)
    data = random_data(rng, (2,), 5, 16, bias=True)
    w, b = Tensor(data.w, device="CORAL").realize(), Tensor(data.b, device="CORAL").realize()
    forward = TinyJit(lambda x: layer(x, w, b).realize())
    for call in range(5):
        x = rng.integers(0, 256, (2, 16), dtype=np.uint8)
        got = forward(Tensor(x, device="CORAL").realize()).numpy()
        assert np.array_equal(got, _numpy_layer(layer, Data(x, data.w, data.b)))
        assert stats().chip_programs == call + 1


def test_beam_does_not_hide_a_layer(chip) -> None:
    data = random_data(np.random.default_rng(0), (2,), 5, 24, bias=True)
    layer = Layer(4, 131, 0.01, 0, 255, 7)
    with Context(BEAM=1):
        got = answer("CORAL", layer, data)
    assert np.array_equal(got, _numpy_layer(layer, data))
    assert (stats().chip_programs, stats().host_programs) == (1, 0)


def test_second_device_and_copies(chip, coral_device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOCKCORAL", "1")
    from tinygrad import Device

    Device["CORAL:1"].iface.runtime = chip
    data = random_data(np.random.default_rng(0), (2,), 5, 16, bias=True)
    layer = Layer(5, 130, 0.01, 0, 255, 7)
    x = Tensor(data.x, device="CORAL").realize().to("CORAL:1")
    got = layer(x, *(Tensor(a, device="CORAL:1").realize() for a in (data.w, data.b)))
    assert got.device == "CORAL:1"
    assert np.array_equal(got.to("CORAL").numpy(), _numpy_layer(layer, data))
    assert stats().chip_programs == 1


def test_weights_written_in_place_are_new_weights(chip) -> None:
    """The address stays, the contents change: the key must follow the contents, and come back with them."""
    layer = Layer(3, 130, 0.01, 0, 255, 7)
    data = random_data(np.random.default_rng(0), (2,), 5, 16, bias=True)
    x, w, b = (Tensor(a, device="CORAL").realize() for a in (data.x, data.w, data.b))
    for weights in (data.w, data.w ^ 1, data.w):
        w.assign(Tensor(weights, device="CORAL")).realize()
        assert np.array_equal(layer(x, w, b).numpy(), _numpy_layer(layer, Data(data.x, weights, data.b)))
    first, changed, back = (key for *_, key in chip.calls)
    assert first == back
    assert first != changed
    assert first[0] == changed[0]
    assert [part[:2] for part in first[1]] == [part[:2] for part in changed[1]]


def test_accumulator_that_leaves_int32_is_computed_on_the_host(chip, cpu: str) -> None:
    layer = Layer(0, 0, 2.0**-24, 0, 255, 0)
    data = Data(np.full((2, 8), 255, np.uint8), np.full((3, 8), 255, np.uint8), np.array([2**31 - 1, 5, -5], np.int32))
    assert np.array_equal(answer("CORAL", layer, data), answer(cpu, layer, data))
    assert (stats().chip_programs, stats().host_programs, stats().host_fallbacks) == (0, 1, 1)


def test_more_outputs_than_one_program_has(chip) -> None:
    """N is the runtime's affair: it splits a layer over programs."""
    data = random_data(np.random.default_rng(0), (1,), 4100, 5, bias=True)
    layer = Layer(100, 127, 0.01, 0, 255, 128)
    assert np.array_equal(answer("CORAL", layer, data), _numpy_layer(layer, data))
    assert (stats().chip_programs, chip.calls[0][0].n) == (1, 4100)


def test_more_inputs_than_a_program_has_stay_on_the_host(
    chip, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CORAL_DEBUG", "1")
    layer = Layer(100, 127, 2.0**-15, 0, 255, 128)
    for k, place in ((8192, "chip"), (8193, "host")):
        data = random_data(np.random.default_rng(0), (1,), 2, k, bias=True)
        assert np.array_equal(answer("CORAL", layer, data), _numpy_layer(layer, data))
        debug = capfd.readouterr().err
        assert debug.startswith(f"coral: {place} ")
    assert "8193" in debug
    assert "8192" in debug
    assert (stats().chip_programs, stats().host_programs) == (1, 1)
