"""Reading codes back out of a graph: whatever is found must be what quantising the tensor would give."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from coral.quantize.expressions import dequantise_expression, quantise_expression
from coral.quantize.peel import codes_behind

SCALE = 0.1

FOUND: list[Callable[[Tensor], Tensor]] = [
    lambda d: d,
    lambda d: d.relu(),
    lambda d: d.maximum(0),
    lambda d: d.clip(0),
    lambda d: d.relu().relu(),
    lambda d: d.flatten(1).relu().reshape(3, 8),
    lambda d: d.transpose(1, 2).relu()[:, 1:3],
    lambda d: d.relu().contiguous(),
    lambda d: d.unsqueeze(0).expand(2, 2, 3, 4).flip(1),
    lambda d: d.sequential([Tensor.relu, lambda t: t.flatten(1)]),
    lambda d: d.dropout(0.5),
]
ABSENT: list[Callable[[Tensor], Tensor]] = [
    lambda d: d.relu6(),
    lambda d: d.pad(((0, 0), (0, 1), (0, 0))),
    lambda d: d + 1,
    lambda d: d + d,
    lambda d: d.maximum(0.5),
    lambda d: d.minimum(0),
    lambda d: d.leaky_relu(),
    lambda d: -d,
    lambda d: d.half().float(),
    lambda d: d.relu().realize(),
    lambda d: (d > 0).where(d, 1),
    lambda d: (d > 0).where(d.flip(0), 0),
]


@pytest.fixture(params=[0, 100])
def zero(request: pytest.FixtureRequest) -> int:
    return request.param


def codes() -> Tensor:
    return Tensor(np.random.default_rng(5).integers(0, 256, (2, 3, 4), np.uint8)).realize()


@pytest.mark.parametrize("steps", FOUND)
def test_codes_found_are_those_of_the_tensor(steps: Callable[[Tensor], Tensor], zero: int) -> None:
    t = steps(dequantise_expression(codes(), SCALE, zero))
    found = codes_behind(t, SCALE, zero)
    assert found is not None
    assert found.dtype == dtypes.uint8
    assert found.shape == t.shape
    assert np.array_equal(found.numpy(), quantise_expression(t, SCALE, zero).numpy())


def test_a_linked_relu_is_free_where_zero_is_the_lowest_code() -> None:
    source = codes()
    found = codes_behind(dequantise_expression(source, SCALE, 0).relu(), SCALE, 0)
    assert found is not None
    assert found.uop is source.uop


@pytest.mark.parametrize("steps", ABSENT)
def test_other_graphs_are_left_alone(steps: Callable[[Tensor], Tensor], zero: int) -> None:
    assert codes_behind(steps(dequantise_expression(codes(), SCALE, zero)), SCALE, zero) is None


def test_other_quantisations_are_left_alone(zero: int) -> None:
    d = dequantise_expression(codes(), SCALE, zero)
    assert codes_behind(d, SCALE, zero + 1) is None
    assert codes_behind(d, SCALE * 2, zero) is None
    assert codes_behind(Tensor([1.0, 2.0]), SCALE, zero) is None
    assert codes_behind(codes(), SCALE, zero) is None
