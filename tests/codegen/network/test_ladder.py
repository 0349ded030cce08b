"""A ladder of image sizes: all compile, all are exact, and cost grows with the image."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.network.harness import Maker, check
from coral.codegen import network as nw
from coral.codegen.network.cost import candidates, stage_cycles

MOST = 1.3
"""Largest cost of a size over its neighbours'."""


def detector(y: int, x: int) -> Maker:
    """Three scales, a residual block, a concatenation, two heads."""
    m = Maker(y * 8192 + x, y, x, 3)
    m.layer(nw.Conv, 16, (3, 3), (2, 2))
    m.layer(nw.Depthwise, 16, (3, 3))
    a = m.layer(nw.Conv, 24, (1, 1))
    m.layer(nw.Depthwise, 24, (3, 3))
    m.add(a, m.layer(nw.Conv, 24))
    fine = m.layer(nw.Conv, 32, (3, 3), (2, 2))
    m.layer(nw.Conv, 64)
    m.layer(nw.Depthwise, 64, (3, 3))
    other = m.layer(nw.Conv, 32)
    both = m.concatenate([fine, other])
    m.layer(nw.Conv, 24, (3, 3), source=both)
    coarse = m.layer(nw.Conv, 48, (3, 3), (2, 2), source=both)
    m.layer(nw.Depthwise, 48, (3, 3), source=coarse)
    m.layer(nw.Conv, 24)
    return m


def heads(m: Maker) -> nw.Network:
    """The network with the ends of both branches as outputs."""
    read = {name for s in m.stages for name in s.inputs}
    return m.network(*(s.output for s in m.stages if s.output not in read))


def cycles(y: int, x: int) -> float:
    """Predicted cycles of the best plan."""
    plan = candidates(heads(detector(y, x)), 1)[0]
    return sum(stage_cycles(plan, stage) for stage in plan.stages)


def check_trend(sizes: list[tuple[int, int]]) -> None:
    """No size costs more than the next larger one, or the line through its neighbours, times ``MOST``."""
    costs = [cycles(y, x) for y, x in sizes]
    areas = [y * x for y, x in sizes]
    for k in range(1, len(sizes) - 1):
        trend = np.interp(areas[k], [areas[k - 1], areas[k + 1]], [costs[k - 1], costs[k + 1]])
        assert costs[k] <= MOST * trend, f"{sizes[k]}: {costs[k]:.0f} cycles, {trend:.0f} between its neighbours"


def test_cost_grows_smoothly():
    check_trend([(n, n) for n in range(96, 161, 8)])
    check_trend([(1, n) for n in range(64, 161, 32)])


@pytest.mark.slow
def test_cost_of_hundreds_of_sizes_grows_smoothly():
    check_trend(sorted((32 * k + extra, 32 * k + extra) for k in range(1, 15) for extra in (0, 8, 16)))
    check_trend([(n, n) for n in range(33, 470, 14)])
    check_trend([(1, n) for n in range(32, 4200, 160)])
    check_trend([(n, 1) for n in range(32, 4200, 160)])
    check_trend([(n, 2 * n) for n in range(30, 320, 10)])


@pytest.mark.parametrize(("y", "x"), [(32, 40), (37, 53), (1, 97), (65, 1), (96, 104)])
def test_sizes_are_exact(y, x):
    m = detector(y, x)
    check(nw.NetworkProgram(heads(m)), m.images(1), seed=y)


@pytest.mark.slow
@pytest.mark.parametrize("k", range(100))
def test_three_hundred_sizes_are_exact(k):
    rng = np.random.default_rng(k)
    sizes = [(32 * (k % 14 + 1) + 8 * (k % 3),) * 2, tuple(rng.integers(1, 260, 2)), (1, int(rng.integers(1, 3000)))]
    for y, x in sizes:
        m = detector(int(y), int(x))
        check(nw.NetworkProgram(heads(m)), m.images(1), seed=k)
