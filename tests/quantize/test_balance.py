"""Trading scale between neighbours: the float model keeps its bits, and one weight scale fits all channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, nn

import coral
from coral.quantize.balance import balance
from coral.quantize.model_graph import ModelGraph

F = np.float32
RNG = np.random.default_rng(41)
SPREAD = 2.0 ** np.arange(-6, 6)


def wild(layer: Any) -> Any:
    """A layer whose output channels differ by up to 2048."""
    shape = layer.weight.shape
    factors = SPREAD[: shape[0]].reshape(-1, *[1] * (len(shape) - 1))
    layer.weight = Tensor(F(RNG.normal(0, 0.3, shape) * factors)).realize()
    layer.bias = Tensor(F(RNG.normal(0, 0.3, shape[0]) * factors.ravel())).realize()
    return layer


def tame(layer: Any, channels: int) -> Any:
    """A reader that undoes the factors."""
    shape = layer.weight.shape
    factors = np.repeat(SPREAD[:channels], shape[1] // channels).reshape(1, -1, *[1] * (len(shape) - 2))
    layer.weight = Tensor(F(RNG.normal(0, 0.3, shape) / factors)).realize()
    layer.bias = Tensor(F(RNG.normal(0, 0.3, shape[0]))).realize()
    return layer


CHAINS: list[tuple[Callable[[], list[Any]], tuple[int, ...]]] = [
    (lambda: [wild(nn.Linear(6, 12)), Tensor.relu, tame(nn.Linear(12, 5), 12)], (6,)),
    (lambda: [wild(nn.Conv2d(2, 12, 3)), Tensor.relu, Tensor.max_pool2d, tame(nn.Conv2d(12, 4, 2), 12)], (2, 8, 8)),
    (lambda: [wild(nn.Conv2d(2, 12, 3)), lambda x: x.relu().flatten(1), tame(nn.Linear(12 * 9, 4), 12)], (2, 5, 5)),
]


@pytest.mark.parametrize(("make", "shape"), CHAINS)
def test_balanced_networks_have_the_same_bits_and_a_smaller_error(make: Any, shape: tuple[int, ...]) -> None:
    model, x = make(), Tensor(F(RNG.normal(0, 1, (16, *shape)))).realize()
    floats = x.sequential(model).numpy()
    graph, changed = balance(ModelGraph(model), [(x,)])
    assert changed == {"0", str(len(model) - 1)}
    assert np.array_equal(x.sequential(graph.root).numpy(), floats)
    weight = np.abs(graph.root[0].weight.numpy().reshape(12, -1)).max(1)
    assert weight.max() < 8 * weight.min()
    quantised, report = coral.quantize(model, x, report=True, per_channel=False)
    assert report.error.rms < 0.03 * report.error.signal_rms
    assert report.layers[0].reason.endswith("channels balanced")
    assert np.abs(x.sequential(quantised).numpy() - floats).max() < 0.1 * np.abs(floats).max()


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.relu6(),
        lambda x: x.quick_gelu(),
        lambda x: x.relu().flip(1),
        lambda x: x.relu().log_softmax(),
    ],
)
def test_where_a_factor_cannot_pass_nothing_changes(between: Callable[[Tensor], Tensor]) -> None:
    model = [wild(nn.Linear(6, 12)), between, tame(nn.Linear(12, 5), 12)]
    x = Tensor(F(RNG.normal(0, 1, (16, 6)))).realize()
    graph, changed = balance(ModelGraph(model), [(x,)])
    assert not changed
    assert graph.root is model


def test_a_layer_that_the_model_reads_itself_is_left_alone() -> None:
    first, second = wild(nn.Linear(6, 12)), tame(nn.Linear(12, 12), 12)
    x = Tensor(F(RNG.normal(0, 1, (16, 6)))).realize()
    model = [lambda x: second(first(x).relu()) + first(x)]
    assert not balance(ModelGraph(model), [(x,)])[1]
