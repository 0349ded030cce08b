"""Residency, chunks, padding, statistics and errors of the runtime, on a stick that computes with coral.numerics."""

from __future__ import annotations

import numpy as np
import pytest

from coral import numerics
from coral.runtime import LinearSpec, Runtime, RuntimeFault
from coral.runtime.linear import chunk_outputs
from coral.runtime.runtime import PROGRAMS
from runtime.fake_stick import CLOCK_HZ, FakeStick


@pytest.fixture
def stick() -> FakeStick:
    return FakeStick()


@pytest.fixture
def runtime(stick) -> Runtime:
    return Runtime(stick)


def layer(rng: np.random.Generator, n: int, k: int, rows: int = 1, bias: bool = True):
    """Random layer: (spec, x, w, b), its quantisation spreading the results over the codes."""
    mult = float(np.float32(120 / (3 * 74 * 74 * np.sqrt(k))))
    lo, hi = sorted(int(v) for v in rng.integers(0, 256, 2))
    zero_points = [int(v) for v in rng.integers(0, 256, 3)]
    spec = LinearSpec(n, k, *zero_points, mult, lo, hi)
    x, w = rng.integers(0, 256, (rows, k), np.uint8), rng.integers(0, 256, (n, k), np.uint8)
    return spec, x, w, rng.integers(-50000, 50000, n, np.int32) if bias else None


def reference(spec: LinearSpec, x, w, b) -> np.ndarray:
    clamps = numerics.integer_clamps(spec.out_zp, spec.lo, spec.hi)
    return numerics.fully_connected(x, w, b, spec.in_zp, spec.w_zp, spec.mult, *clamps, spec.out_zp)


@pytest.mark.parametrize(
    ("n", "k", "bias"),
    [(64, 64, True), (10, 7, True), (1, 1, False), (130, 523, True), (1100, 300, False), (63, 784, True)],
)
def test_results(runtime, stick, n, k, bias):
    spec, x, w, b = layer(np.random.default_rng(n * k), n, k, bias=bias)
    for _ in range(2):
        np.testing.assert_array_equal(runtime.linear(spec, x, w, b), reference(spec, x, w, b))
    assert stick.log == ["PARAMETER_CACHING"] + ["EXECUTION_ONLY"] * 2
    assert (runtime.stats.calls, runtime.stats.uploads) == (2, 1)


def test_no_rows_is_no_call(runtime, stick):
    spec, x, w, b = layer(np.random.default_rng(0), 8, 8)
    assert runtime.linear(spec, x[:0], w, b).shape == (0, 8)
    assert not stick.log


def test_many_layers_stay_resident(runtime, stick):
    rng = np.random.default_rng(1)
    layers = [layer(rng, int(n), int(k)) for n, k in rng.integers(1, 700, (20, 2))]
    for _ in range(3):
        for spec, x, w, b in layers:
            np.testing.assert_array_equal(runtime.linear(spec, x, w, b), reference(spec, x, w, b))
    assert runtime.stats.uploads == 20
    assert len(runtime.regions()) == 20


def test_eviction_and_return(runtime, stick):
    """Three layers of which two fit: results stay right, only what lost its place is sent again."""
    rng = np.random.default_rng(2)
    layers = [layer(rng, 1024, k) for k in (3600, 3000, 2800)]
    for _ in range(2):
        for spec, x, w, b in layers:
            np.testing.assert_array_equal(runtime.linear(spec, x, w, b), reference(spec, x, w, b))
    assert runtime.stats.evictions > 0
    assert runtime.stats.uploads == stick.log.count("PARAMETER_CACHING") == 6
    spec, x, w, b = layers[2]
    runtime.linear(spec, x, w, b)
    assert runtime.stats.uploads == 6


def test_moved_parameters_are_sent_again(runtime):
    rng = np.random.default_rng(3)
    small = [layer(rng, 64 * tiles, 4 * words) for tiles, words in ((3, 200), (7, 900), (9, 600), (6, 700))]
    large = [layer(rng, 1024, 4 * words) for words in (700, 400)]
    for spec, x, w, b in (*small, *large, *small, *large):
        np.testing.assert_array_equal(runtime.linear(spec, x, w, b), reference(spec, x, w, b))
    assert runtime.stats.repacks + runtime.stats.evictions > 0


@pytest.mark.parametrize("k", [1, 4, 5, 64, 1000, 2048, 4096])
def test_every_chunk_fits(k):
    from coral.codegen.fc import FcQuant, fully_connected

    quant = FcQuant(0, 0, 0, 1.0, 0.0, 255.0)
    assert fully_connected(chunk_outputs(k), k, quant).rows_per_tile <= 2012
    if chunk_outputs(k) < 4096:
        with pytest.raises(Exception, match="limit"):
            fully_connected(chunk_outputs(k) + 64, k, quant)


def test_contents_decide_unless_there_is_a_key(runtime):
    spec, x, w, b = layer(np.random.default_rng(6), 64, 64)
    runtime.linear(spec, x, w, b)
    runtime.linear(spec, x, w.copy(), b)
    assert runtime.stats.uploads == 1
    other = w ^ 1
    np.testing.assert_array_equal(runtime.linear(spec, x, other, b), reference(spec, x, other, b))
    assert runtime.stats.uploads == 2
    runtime.linear(spec, x, w, b, key="mine")
    runtime.linear(spec, x, w, b, key="mine")
    assert runtime.stats.uploads == 3


def test_quantisation_changes_the_program_not_the_parameters(runtime):
    spec, x, w, b = layer(np.random.default_rng(7), 64, 64)
    runtime.linear(spec, x, w, b)
    other = LinearSpec(64, 64, spec.in_zp, spec.w_zp, 3, 0.25, 1, 200)
    np.testing.assert_array_equal(runtime.linear(other, x, w, b), reference(other, x, w, b))
    assert runtime.stats.uploads == 1


def test_lost_parameters_are_sent_again(runtime, stick):
    spec, x, w, b = layer(np.random.default_rng(8), 64, 64)
    runtime.linear(spec, x, w, b)
    stick.lose_everything()
    np.testing.assert_array_equal(runtime.linear(spec, x, w, b), reference(spec, x, w, b))
    assert runtime.stats.uploads == 2


@pytest.mark.parametrize("step", [0, 1])
def test_failed_call_leaves_a_usable_runtime(runtime, stick, step):
    """A failed upload or run; the next call sends what is needed."""
    spec, x, w, b = layer(np.random.default_rng(9), 64, 64)
    if step:
        runtime.linear(spec, x, w, b)
    stick.fail_next = True
    with pytest.raises(OSError, match="pulled"):
        runtime.linear(spec, x, w, b)
    np.testing.assert_array_equal(runtime.linear(spec, x, w, b), reference(spec, x, w, b))


def test_stats_of_one_call(runtime):
    spec, x, w, b = layer(np.random.default_rng(10), 64, 62)
    runtime.linear(spec, x, w, b)
    s = runtime.stats
    assert (s.input_bytes, s.output_bytes, s.upload_bytes) == (64, 64, 17 * 256)
    assert s.to_chip_bytes == s.instruction_bytes + 64 + 17 * 256
    transfers, events = 4, 2
    loader = s.usb_bytes - (s.instruction_bytes + 64 + 64 + 17 * 256 + 8 * transfers + 16 * events)
    assert loader % 16 == 0
    assert 500 < loader < s.instruction_bytes < 4096
    expected = 142e-6 + (s.instruction_bytes + 64) / 330e6 + 64 / 55e6 + 16 / CLOCK_HZ
    assert s.predicted_seconds_per_call == pytest.approx(expected)


def test_programs_are_kept_up_to_a_limit(runtime):
    spec, x, w, b = layer(np.random.default_rng(11), 64, 8)
    for out_zp in range(256):
        for lo in (0, 1):
            runtime.linear(LinearSpec(64, 8, spec.in_zp, spec.w_zp, out_zp, 0.5, lo, 255), x, w, b, key=0)
    assert len(runtime._plans) == PROGRAMS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((1, 8), np.float32)}, "x is float32, uint8"),
        ({"x": np.zeros((1, 9), np.uint8)}, r"x has shape \(1, 9\), 1 x 8"),
        ({"x": np.zeros(8, np.uint8)}, r"x has shape \(8,\), M x 8"),
        ({"w": np.zeros((8, 16), np.uint8)}, r"w has shape \(8, 16\), 16 x 8"),
        ({"w": np.zeros((16, 8), np.int8)}, "w is int8, uint8"),
        ({"b": np.zeros(16, np.float32)}, "b is float32, int32"),
        ({"b": np.zeros(8, np.int32)}, r"b has shape \(8,\), 16"),
    ],
)
def test_wrong_arrays_send_nothing(runtime, stick, change, message):
    arrays = {"x": np.zeros((1, 8), np.uint8), "w": np.zeros((16, 8), np.uint8), "b": None} | change
    with pytest.raises(RuntimeFault, match=message):
        runtime.linear(LinearSpec(16, 8, 0, 0, 0, 1.0), **arrays)
    assert not stick.log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 0, 0, 0, 1.0), "0 outputs"),
        ((8, 4097, 0, 0, 0, 1.0), "4097 inputs, the limit is 4096"),
        ((8, 8, 256, 0, 0, 1.0), "in_zp is 256"),
        ((8, 8, 0, 0, 0, 0.1), "0.1, which is not a float32"),
        ((8, 8, 0, 0, 0, float("inf")), "inf"),
        ((8, 8, 0, 0, 0, 1.0, 9, 8), "lo is 9, above hi, which is 8"),
    ],
)
def test_wrong_specs(arguments, message):
    with pytest.raises(RuntimeFault, match=message):
        LinearSpec(*arguments)


def test_close(runtime, stick):
    with runtime:
        pass
    runtime.close()
    assert (stick.closed, runtime.closed) == (1, True)
    spec, x, w, b = layer(np.random.default_rng(12), 8, 8)
    with pytest.raises(RuntimeFault, match="closed"):
        runtime.linear(spec, x, w, b)


def test_views_are_taken_as_they_are(runtime):
    spec, x, w, b = layer(np.random.default_rng(13), 32, 40)
    big = np.zeros((2, 80), np.uint8)
    big[::2, ::2] = x
    wt = np.asfortranarray(w)
    np.testing.assert_array_equal(runtime.linear(spec, big[::2, ::2], wt, b[::1]), reference(spec, x, w, b))
