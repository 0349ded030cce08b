"""Groups of stages that are computed band by band."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from codegen.network.harness import Maker, check
from codegen.network.random_networks import draw
from coral.codegen import ShapeError
from coral.codegen import network as nw
from coral.codegen.network import cost
from coral.codegen.network.bands import Group

WHOLE_MESH = nw.Grid(4, 4)


def banded_program(monkeypatch, network: nw.Network, groups, grid=WHOLE_MESH, **fields) -> nw.NetworkProgram:
    """A program with these groups instead of those that its size asks for."""
    plan = cost.Plan(network, cost.Form(grid, 1, groups=groups, **fields))
    monkeypatch.setattr("coral.codegen.network.program.fitting", lambda *_, **__: plan)
    return nw.NetworkProgram(network, grid=grid)


def inverted(seed: int, y: int, x: int, stride: int, **fields) -> tuple[Maker, str, str]:
    """Expansion, depthwise layer, projection, a residual where sizes allow; what the expansion reads and the end."""
    m = Maker(seed, y, x, 8, **fields)
    source = m.layer(nw.Conv, 12)
    first = m.layer(nw.Conv, 40)
    m.layer(nw.Depthwise, 40, (3, 3), (stride, stride))
    last = m.layer(nw.Conv, 12)
    if stride == 1:
        last = m.add(source, last)
    m.layer(nw.Conv, 9, (3, 3), (2, 2))
    return m, first, last


@pytest.mark.parametrize("own_input", [False, True])
@pytest.mark.parametrize(("y", "x", "stride", "count"), [(21, 18, 1, 2), (33, 20, 2, 3), (26, 9, 1, 7), (40, 32, 2, 2)])
def test_inverted_bottleneck(monkeypatch, y, x, stride, count, own_input):
    m, first, last = inverted(y, y, x, stride, per_channel=stride == 2)
    p = banded_program(monkeypatch, m.network(), (Group(first, last, count),), own_input=own_input)
    check(p, m.images(1), seed=y)


def random_groups(rng: np.random.Generator, network: nw.Network, grid: nw.Grid) -> tuple[Group, ...]:
    """One group of stages that can be computed in bands, or none."""
    form = cost.Form(grid, 1, own_input=True)
    whole = cost.rewritten(network, form)
    for _ in range(20):
        first, last = sorted(rng.integers(0, len(whole.stages), 2))
        group = Group(whole.stages[first].output, whole.stages[last].output, int(rng.integers(2, 6)))
        try:
            cost.Plan(network, replace(form, groups=(group,)))
        except ShapeError:
            continue
        return (group,)
    return ()


@pytest.mark.parametrize("seed", range(12))
def test_random_groups(monkeypatch, seed):
    random_bands(monkeypatch, 50_000 + seed, 1e5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_many_random_groups(monkeypatch, seed):
    random_bands(monkeypatch, 60_000 + seed, 5e5)


def random_bands(monkeypatch, seed: int, budget: float) -> None:
    m, grid, _ = draw(seed, budget)
    groups = random_groups(np.random.default_rng(seed), m.network(), grid)
    p = banded_program(monkeypatch, m.network(), groups, grid, own_input=True)
    check(p, m.all_images(1), seed=seed)


def test_a_size_that_needs_bands():
    """Inner tensors of 4 MB, pools over windows that fill more than wide memory."""
    m = Maker(5, 200, 300, 3)
    m.layer(nw.Conv, 8, (3, 3))
    m.layer(nw.Conv, 72)
    m.layer(nw.Depthwise, 72, (3, 3), (2, 2))
    m.layer(nw.Conv, 16)
    m.pool(nw.MaxPool, (3, 3), (2, 2), "same")
    p = nw.NetworkProgram(m.network())
    assert len(p.plan.stages) > len(m.stages) + 4
    check(p, m.images(1), seed=1)
