"""Reading codes back out of a graph: whatever is found must be what quantising the tensor would give."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from tinygrad import Tensor, dtypes
from tinygrad.helpers import make_tuple
from tinygrad.uop.ops import UOp

from coral import numerics
from coral.quantize.expressions import dequantise_expression, quantise_expression
from coral.quantize.expressions_windows import qavg_pool_expression, qmax_pool_expression
from coral.quantize.peel import Quant, Source, codes_behind, pools_on_codes

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
    lambda d: d.relu6(),
    lambda d: d.clip(0, 6),
    lambda d: d.relu().max(2),
]
WINDOWS: list[Callable[[Tensor], Tensor]] = [
    lambda d: d.max_pool2d(),
    lambda d: d.max_pool2d(3, 2, padding=1),
    lambda d: d.relu().max_pool2d((2, 3), 1).flatten(1),
    lambda d: d.max((2, 3)).relu6(),
    lambda d: d.clip(0, 6).max_pool2d(2).relu(),
]
ABSENT: list[Callable[[Tensor], Tensor]] = [
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
    lambda d: d.max(1) + d.sum(1),
    lambda d: d.sum(1),
    lambda d: d.sum(1) * 0.25,
    lambda d: d.pad(((0, 0), (0, 1), (0, 0))).max(1),
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


@pytest.mark.parametrize("steps", WINDOWS)
def test_pools_of_images(steps: Callable[[Tensor], Tensor], zero: int) -> None:
    images = Tensor(np.random.default_rng(6).integers(0, 256, (2, 3, 6, 7), np.uint8)).realize()
    t = steps(dequantise_expression(images, SCALE, zero))
    found = codes_behind(t, SCALE, zero)
    assert found is not None
    assert np.array_equal(found.numpy(), quantise_expression(t, SCALE, zero).numpy())


def kernels(t: Tensor) -> list[UOp]:
    return [call.src[0] for call in t.schedule_linear().src]


def test_kernels_are_those_of_the_expressions() -> None:
    """What the backend recognises: a pool behind a layer is the very kernel of its expression."""

    def images() -> Tensor:
        return Tensor.empty(2, 3, 6, 8, dtype=dtypes.uint8)

    for kernel, stride, padding in ((2, 2, 0), (3, 2, 1), ((6, 8), 1, 0)):
        size = make_tuple(kernel, 2)
        largest = dequantise_expression(images(), SCALE, 9).max_pool2d(size, stride, padding=padding)
        found = codes_behind(largest, SCALE, 9)
        assert found is not None
        assert kernels(found) == kernels(qmax_pool_expression(images(), kernel, stride, padding))
        mean = dequantise_expression(images(), SCALE, 9).avg_pool2d(size, stride, padding=padding)
        found, mult = (
            codes_behind(mean, SCALE, 9),
            numerics.average_multiplier(SCALE, math.prod(size), SCALE, newer=True),
        )
        assert found is not None
        assert kernels(found) == kernels(qavg_pool_expression(images(), kernel, stride, 9, mult, 0, 255, 9, padding))


def test_means_are_within_half_a_step(zero: int) -> None:
    images = Tensor(np.random.default_rng(6).integers(0, 256, (2, 3, 6, 7), np.uint8)).realize()
    d = dequantise_expression(images, SCALE, zero)
    for t in (d.mean((2, 3)), d.avg_pool2d(2), d.avg_pool2d(3, 1, padding=1).relu()):
        found = codes_behind(t, SCALE, zero)
        assert found is not None
        assert np.abs((found.numpy() - float(zero)) * SCALE - t.numpy()).max() <= SCALE / 2 + 1e-5
    for t in (d.avg_pool2d(3, 1, padding=1, count_include_pad=False), d.mean((2, 3)) * 2):
        assert codes_behind(t, SCALE, zero) is None


def test_sums_need_a_quantisation_and_are_the_chips_add(zero: int) -> None:
    a, b = codes(), codes().flip(0).contiguous().realize()
    q_a, q_b, q_y = Quant.of_range(-1, 2), Quant.of_range(-3, 1), Quant.of_range(-4, 3)
    d_a, d_b = (dequantise_expression(t, q.scale, q.zero_point) for t, q in ((a, q_a), (b, q_b)))
    total = Source("sum", (Source(q_a), Source(q_b, bounds=(0, math.inf))))
    t = (d_a + d_b.relu()).relu().flatten(1)
    assert codes_behind(t, q_y.scale, q_y.zero_point) is None
    found = codes_behind(t, q_y.scale, q_y.zero_point, {total: q_y})
    weights = numerics.add_weights(q_a.scale, q_b.scale)
    mult = numerics.add_multiplier(q_a.scale, weights[0], q_y.scale)
    rectified = np.maximum(b.numpy(), q_b.zero_point)
    expected = numerics.add(
        a.numpy(), rectified, q_a.zero_point, q_b.zero_point, weights, mult, 0, 255 - q_y.zero_point, q_y.zero_point
    )
    assert found is not None
    assert np.array_equal(found.numpy(), expected.reshape(2, 12))
    assert codes_behind(t * 2, q_y.scale, q_y.zero_point, {total: q_y}) is None


def test_pools_inside_other_code_are_taken_from_codes(zero: int) -> None:
    images = Tensor(np.random.default_rng(6).integers(0, 256, (2, 3, 6, 7), np.uint8)).realize()
    t = dequantise_expression(images, SCALE, zero).max_pool2d().quick_gelu()
    changed = pools_on_codes(t)
    again = Tensor(images.numpy()).realize()
    first, _ = kernels(changed)
    assert first == kernels(qmax_pool_expression(again, 2, 2))[0]
    t = dequantise_expression(again, SCALE, zero).max_pool2d().quick_gelu()
    assert np.array_equal(pools_on_codes(t.flatten(1)).numpy(), t.flatten(1).numpy())
    assert pools_on_codes(images.float()).uop is images.float().uop


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
