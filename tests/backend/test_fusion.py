"""Runs of layers: what becomes one program, what must not, and that the bytes are right either way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.helpers import Context

from coral.backend import reset_stats, selection_off, stats
from coral.codegen.errors import ShapeError
from coral.quantize.expressions import dequantise_expression, qlinear_expression
from coral.quantize.expressions_pointwise import qadd_expression, qclip_expression
from coral.quantize.expressions_windows import qconv2d_expression, qmax_pool_expression

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (2, 4, 6, 6), dtype=np.uint8)
WEIGHTS = [RNG.integers(100, 156, (4, 4, 3, 3), dtype=np.uint8) for _ in range(4)]
DENSE = RNG.integers(100, 156, (5, 144), dtype=np.uint8)
ZP = 120


def conv(x: Tensor, number: int = 0, *, in_zp: int = ZP) -> Tensor:
    weights = Tensor(WEIGHTS[number], device=x.device).realize()
    return qconv2d_expression(x, weights, None, in_zp, 128, 0.01, 0, 255, ZP, padding=1)


def dense(x: Tensor) -> Tensor:
    weights = Tensor(DENSE, device=x.device).realize()
    return qlinear_expression(x.reshape(2, 144), weights, None, ZP, 128, 0.003, 0, 255, 100)


def both(computation: Callable[[Tensor], Any], cpu: str, x: np.ndarray = X) -> tuple[int, int, int]:
    """Equal bytes on both devices; programs and layers on the chip, kernels on the host."""
    results = []
    for device in ("CORAL", cpu):
        reset_stats()
        with Context(NOOPT=1):
            made = computation(Tensor(x, device=device).realize())
            made = made if isinstance(made, tuple) else (made,)
            Tensor.realize(*made)
            if device == "CORAL":
                counted = stats()
            results.append([t.numpy() for t in made])
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
    return counted.chip_programs, counted.chip_layers, counted.host_programs


def test_a_chain_is_one_program(chip, cpu: str) -> None:
    assert both(lambda x: dense(conv(conv(x), 1)), cpu) == (
        1,
        3,
        0,
    )
    (network,) = chip.networks.values()
    assert len(network.outputs) == 1


def test_a_residual_block_is_one_program(chip, cpu: str) -> None:
    def block(x: Tensor) -> Tensor:
        h = conv(x)
        total = qadd_expression(h, conv(conv(h, 1), 2), ZP, ZP, (9000, 8000), 6e-5, 0, 255, ZP)
        return dense(qclip_expression(total, ZP))

    assert both(block, cpu) == (1, 6, 0)


def test_layers_that_share_an_input_are_one_program_with_two_results(chip, cpu: str) -> None:
    assert both(lambda x: (conv(x), conv(x, 1)), cpu) == (1, 2, 0)
    (network,) = chip.networks.values()
    assert (len(network.inputs), len(network.outputs)) == (1, 2)


def test_a_sum_of_two_inputs(chip, cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORAL_PLACE", "chip")
    other = Tensor(X[::-1].copy(), device="CORAL").realize()

    def total(x: Tensor) -> Tensor:
        b = other if x.device == "CORAL" else other.to(x.device).realize()
        return conv(qadd_expression(x, b, 5, 6, (9000, 8000), 3e-5, 0, 255, ZP))

    assert both(total, cpu)[:2] == (1, 2)


def test_what_the_user_keeps_is_a_result_too(chip, cpu: str) -> None:
    """Eagerly, a tensor in a variable is realised like the one that was asked for."""
    kept: dict[str, Tensor] = {}

    def keeping(x: Tensor) -> Tensor:
        kept[x.device] = conv(x)
        return conv(kept[x.device], 1)

    assert both(keeping, cpu) == (1, 2, 0)
    assert np.array_equal(kept["CORAL"].numpy(), kept[cpu].numpy())
    assert len(next(iter(chip.networks.values())).outputs) == 2


def test_a_reader_outside_sees_the_inner_result(chip, cpu: str) -> None:
    """tinygrad_backend 8.2's counter-example: dropping h gave wrong results there."""

    def read_twice(x: Tensor) -> Tensor:
        h = conv(x)
        y = conv(h, 1)
        return dequantise_expression(y, 0.1, ZP) + 1000 * dequantise_expression(h, 0.1, ZP)

    assert both(read_twice, cpu) == (1, 2, 1)


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_the_same_in_a_jit_whatever_its_batches(chip, cpu: str, batch_size: int) -> None:
    def read_twice(x: Tensor) -> Tensor:
        h = conv(x)
        y = conv(h, 1)
        return (dequantise_expression(y, 0.1, ZP) + 1000 * dequantise_expression(h, 0.1, ZP)).realize()

    with Context(JIT_BATCH_SIZE=batch_size, NOOPT=1):
        jits = {device: TinyJit(read_twice) for device in ("CORAL", cpu)}
        for number in range(4):
            x = np.roll(X, number)
            got, want = (jit(Tensor(x, device=device).realize()).numpy() for device, jit in jits.items())
            assert np.array_equal(got, want)
    assert stats().chip_programs == 4


def test_a_host_kernel_in_the_middle_parts_the_run(chip, cpu: str) -> None:
    def transposed(x: Tensor) -> Tensor:
        return conv(conv(conv(x), 1).permute(0, 1, 3, 2).contiguous(), 2)

    assert both(transposed, cpu) == (2, 3, 1)


def test_a_host_kernel_beside_the_run_does_not(chip, cpu: str) -> None:
    def beside(x: Tensor) -> tuple[Tensor, Tensor]:
        return conv(conv(x), 1), (x.cast(dtypes.float32) * 0.5).contiguous()

    assert both(beside, cpu) == (1, 2, 1)


def test_other_zero_points_part_the_run(chip, cpu: str) -> None:
    """The second layer reads the first one's codes as if 0 were another code: two programs, no error."""
    assert both(lambda x: conv(conv(x), 1, in_zp=ZP + 1), cpu) == (2, 2, 0)


def test_a_row_slice_parts_the_run(chip, cpu: str) -> None:
    assert both(lambda x: conv(conv(x)[1:], 1), cpu) == (2, 2, 1)


def test_results_as_weights_part_the_run(chip, cpu: str) -> None:
    """A matrix product of two results: the second factor is known when the first program has run."""

    def product(x: Tensor) -> Tensor:
        a = dense(conv(x))
        return qlinear_expression(a, dense(conv(x, 1)), None, 100, 100, 0.01, 0, 255, 50)

    assert both(product, cpu)[1:] == (5, 0)


def test_a_buffer_written_later_is_read_before(chip, cpu: str) -> None:
    """Two layers read x, then x is overwritten: the program must not slip behind the write."""

    def overwritten(x: Tensor) -> tuple[Tensor, Tensor]:
        h = conv(x)
        x.assign((x.cast(dtypes.int32) + 1).cast(dtypes.uint8))
        return conv(h, 1), x

    both(overwritten, cpu, X.copy())


def test_weights_written_between_two_calls_are_new_weights(chip, cpu: str) -> None:
    weights = [Tensor(w, device="CORAL").realize() for w in WEIGHTS[:2]]

    @TinyJit
    def forward(x: Tensor) -> Tensor:
        for w in weights:
            x = qconv2d_expression(x, w, None, ZP, 128, 0.01, 0, 255, ZP, padding=1)
        return x.realize()

    for number in range(6):
        if number > 3:
            weights[1].assign(Tensor(WEIGHTS[number - 2], device="CORAL")).realize()
        got = forward(Tensor(X, device="CORAL").realize()).numpy()
        with selection_off():
            x = Tensor(X, device="CORAL").realize()
            for w in weights:
                x = qconv2d_expression(x, w, None, ZP, 128, 0.01, 0, 255, ZP, padding=1)
            assert np.array_equal(got, x.numpy())
    assert len(chip.networks) == 3
    kept = [stage.weights for stage in next(iter(chip.networks.values())).stages]
    for stage_weights, original in zip(kept, WEIGHTS, strict=False):
        assert np.array_equal(stage_weights, original.transpose(0, 2, 3, 1)), "the runtime's copy follows the buffer"


def test_the_same_weights_in_another_order_are_another_network(chip) -> None:
    """Two weight buffers, three layers: which layer has which is part of the network's name."""
    first, second = (Tensor(w, device="CORAL").realize() for w in WEIGHTS[:2])
    results = []
    for order in ((first, second, first), (first, second, second), (first, second, first)):
        x = Tensor(X, device="CORAL").realize()
        for w in order:
            x = qconv2d_expression(x, w, None, ZP, 128, 0.01, 0, 255, ZP, padding=1)
        results.append(x.numpy())
    assert len(chip.networks) == 2
    assert np.array_equal(results[0], results[2])
    assert not np.array_equal(results[0], results[1])


def test_one_network_whatever_the_number_of_images(chip) -> None:
    """The weights that are on the chip serve all of them."""
    weights = [Tensor(w, device="CORAL").realize() for w in WEIGHTS[:2]]
    for images in (1, 2, 5):
        x = Tensor(np.repeat(X[:1], images, 0), device="CORAL").realize()
        for w in weights:
            x = qconv2d_expression(x, w, None, ZP, 128, 0.01, 0, 255, ZP, padding=1)
        x.realize()
    assert len(chip.networks) == 1
    assert [count for _, count in chip.network_calls] == [1, 2, 5]


def test_fusion_switched_off(chip, cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORAL_FUSE", "0")
    assert both(lambda x: dense(conv(conv(x), 1)), cpu) == (3, 3, 0)


def test_a_network_that_no_program_runs_is_run_layer_by_layer(chip, cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chip refuses the whole, then one layer of it: that one is the host's, the others are not."""
    real = chip.network

    def refusing(key: Any, build: Callable, inputs: dict) -> dict:
        network = build()
        if len(network.stages) > 1 or network.stages[0].window.kernel == (2, 2):
            raise ShapeError("too large")
        return real(key, build, inputs)

    monkeypatch.setattr(chip, "network", refusing)

    def forward(x: Tensor) -> Tensor:
        return conv(qmax_pool_expression(conv(x), 2, 2), 1)

    results = []
    for device in ("CORAL", cpu):
        with Context(NOOPT=1):
            results.append(forward(Tensor(X, device=device).realize()).numpy())
    assert np.array_equal(*results)
    counted = stats()
    assert (counted.chip_programs, counted.chip_layers, counted.host_programs, counted.host_fallbacks) == (2, 2, 1, 1)


def test_sums_that_leave_int32_are_computed_on_the_host(chip, cpu: str) -> None:
    """Modulo 2^32, as compiled code does, for every layer of the program; another bias is the chip's again."""
    bias = [np.array([2**31 - 1, 0, 3, 4], np.int32), np.arange(4, dtype=np.int32)]
    for b, on_chip in zip(bias, (0, 1), strict=True):
        reset_stats()
        results = []
        for device in ("CORAL", cpu):
            x, w, tensor_b = (Tensor(a, device=device).realize() for a in (X, WEIGHTS[0], b))
            with Context(NOOPT=1):
                results.append(conv(qconv2d_expression(x, w, tensor_b, 0, 0, 2.0**-23, 0, 255, ZP, padding=1)).numpy())
        assert np.array_equal(*results)
        counted = stats()
        assert (counted.chip_programs, counted.host_fallbacks) == (on_chip, 2 - 2 * on_chip)


def test_multipliers_out_of_range_are_computed_on_the_host(chip, cpu: str) -> None:
    for mult, on_chip in ((np.float32(2.0**-130), 0), (np.float32(0.01), 1)):
        reset_stats()
        results = []
        for device in ("CORAL", cpu):
            x, w = Tensor(X, device=device).realize(), Tensor(WEIGHTS[0], device=device).realize()
            m = Tensor(np.array([0.01, 0.02, 0.01, mult], np.float32), device=device).realize()
            with Context(NOOPT=1):
                results.append(qconv2d_expression(x, w, None, ZP, 128, m, 0, 255, ZP, padding=1).numpy())
        assert np.array_equal(*results)
        assert stats().chip_programs == on_chip
