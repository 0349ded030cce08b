"""Networks through the whole line: tinygrad kernels, proof, fusion, programs, the simulated stick; against DEV=CPU."""

from __future__ import annotations

import numpy as np
import pytest

from backend.quantised_networks import Builder, QuantisedNetwork, random_network
from coral import devices
from coral.backend import reset_stats, stats

QUICK, ALL, BLOCK = 8, 300, 37


def check(network: QuantisedNetwork, cpu: str) -> None:
    """Same bytes, and what can be a layer did run on the chip."""
    reset_stats()
    got = network.answer("CORAL")
    counted = stats()
    assert np.array_equal(got, network.answer(cpu))
    assert counted.host_fallbacks == 0
    assert counted.chip_layers + counted.host_programs == network.layers + network.moves


@pytest.mark.parametrize("seed", range(QUICK))
def test_random_network(coral_device, cpu: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORAL_PLACE", "chip")
    check(random_network(seed), cpu)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, ALL, BLOCK))
def test_300_random_networks(coral_device, cpu: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORAL_PLACE", "chip")
    layers = programs = hosts = 0
    for seed in range(first, min(first + BLOCK, ALL)):
        check(random_network(seed), cpu)
        counted = stats()
        layers, programs, hosts = (
            layers + counted.chip_layers,
            programs + counted.chip_programs,
            hosts + counted.host_programs,
        )
    print(f"{layers} layers in {programs} programs, {hosts} kernels on the host")
    assert layers > 3 * programs / 2
    assert layers > 5 * hosts


@pytest.fixture(scope="module")
def small_network(cpu: str) -> tuple[QuantisedNetwork, np.ndarray]:
    """Convolution, pool, convolution, linear for 256 images, and the CPU's answer."""
    b = Builder(7, 256, 1, 12, 12)
    b.conv(8, (3, 3), (1, 1), (0, 0, 0, 0))
    b.max_pool((2, 2), (2, 2))
    b.conv(12, (3, 3), (1, 1), (1, 1, 1, 1))
    b.linear(10)
    return b.network, b.network.answer(cpu)


@pytest.mark.parametrize("images", [1, 2, 3, 8, 31, 32, 33, 256])
def test_batches(coral_device, small_network: tuple[QuantisedNetwork, np.ndarray], images: int) -> None:
    """One program and one call for any number of images: image i as if it were alone."""
    network, want = small_network
    calls = coral_device.chip.stats.calls
    reset_stats()
    assert np.array_equal(network.answer("CORAL", images), want[:images])
    counted = stats()
    assert (counted.chip_programs, counted.chip_layers, counted.chip_rows) == (1, 4, images)
    assert counted.host_programs == 0
    assert coral_device.chip.stats.calls == calls + 1


def test_a_transpose_in_the_middle(coral_device, cpu: str) -> None:
    """Both sides run as chip programs, the transpose on the host."""
    b = Builder(3, 2, 3, 8, 10)
    b.conv(8, (3, 3), (1, 1), (1, 1, 1, 1))
    b.max_pool((2, 2), (2, 2))
    b.transpose()
    b.conv(8, (3, 3), (1, 1), (1, 1, 1, 1))
    b.linear(5)
    reset_stats()
    got = b.network.answer("CORAL")
    counted = stats()
    assert np.array_equal(got, b.network.answer(cpu))
    assert (counted.chip_programs, counted.chip_layers, counted.host_programs) == (2, 4, 1)


@pytest.mark.slow
@pytest.mark.parametrize("positions", [127, 128, 129])
@pytest.mark.parametrize("channels", [767, 768, 769])
def test_pointwise_convolutions_around_powers_of_two(coral_device, cpu: str, positions: int, channels: int) -> None:
    b = Builder(1, 1, channels, 1, positions)
    b.conv(288, (1, 1), (1, 1), (0, 0, 0, 0))
    check(b.network, cpu)
    assert stats().chip_programs == 1


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 181, 180), (1, 13, 5)])
def test_means_over_whole_maps(coral_device, cpu: str, monkeypatch: pytest.MonkeyPatch, shape: tuple) -> None:
    """As large as sums stay one kernel: from 32,768 terms on tinygrad splits them."""
    monkeypatch.setenv("CORAL_PLACE", "chip")
    b = Builder(1, 1, *shape)
    b.average_pool(shape[1:], (1, 1))
    check(b.network, cpu)


@pytest.mark.slow
def test_a_mean_that_tinygrad_splits(coral_device, cpu: str) -> None:
    """32,768 terms are two kernels: the host's, unless the network is compiled as a whole; the same bytes anyway."""
    b = Builder(1, 1, 3, 256, 128)
    b.average_pool((256, 128), (1, 1))
    assert np.array_equal(b.network.answer("CORAL"), b.network.answer(cpu))


def test_a_closed_stick_is_opened_again(coral_device, small_network: tuple[QuantisedNetwork, np.ndarray]) -> None:
    network, answer = small_network
    first = coral_device.chip
    devices.close_all()
    assert np.array_equal(network.answer("CORAL"), answer)
    assert coral_device.chip is not first
