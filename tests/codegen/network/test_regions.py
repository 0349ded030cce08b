"""Late layers whose channels are divided among tiles, on the simulated chip in random unit order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from codegen.network.harness import Maker, check
from coral.codegen import ShapeError
from coral.codegen import network as nw
from coral.codegen.network import program
from coral.codegen.network.layout import Form
from coral.codegen.network.plan import Plan
from coral.codegen.network.regions import predicted, regions, with_region


class Strong(Maker):
    """Multipliers that use all codes, layer after layer."""

    def mult(self, n: int, taps: int):
        return (
            np.float32(30) * super().mult(n, taps)
            if self.per_channel
            else float(np.float32(30 * super().mult(n, taps)))
        )


def body(seed: int, kinds: str, size: tuple[int, int], n: int, **fields) -> Strong:
    """A dense layer, then pointwise (p), depthwise (d, s: stride 2), residual (a) and requantising (r) ones, a mean."""
    m = Strong(seed, *size, 12, **fields)
    m.layer(nw.Conv, n, (3, 3))
    for kind in kinds:
        n = m.tensors[m.last].c
        match kind:
            case "p":
                m.layer(nw.Conv, int(m.rng.choice([n, 64, 128, 192])))
            case "d":
                m.layer(nw.Depthwise, n, (3, 3))
            case "s":
                m.layer(nw.Depthwise, n, (3, 3), (2, 2))
            case "r":
                m.requantise()
            case "a":
                source = m.last
                m.add(source, m.layer(nw.Conv, n, source=source))
    t = m.tensors[m.last]
    m.pool(nw.AveragePool, (t.y, t.x), (1, 1))
    return m


def forced(monkeypatch, m: Maker, choice: int) -> nw.NetworkProgram | None:
    """The network's program with one of the regions that may be tried, whatever it costs; None if there are none."""
    found: list[nw.Grid] = []

    def some(plan: Plan) -> Plan | None:
        tried = list(regions(plan))
        if not tried:
            return None
        region = tried[choice % len(tried)]
        found.append(region.grid)
        return Plan(plan.source, replace(plan.form, region=region))

    monkeypatch.setattr(program, "with_region", some)
    p = nw.NetworkProgram(m.network(), grid=nw.Grid(4, 4))
    return p if p.plan.form.region is not None else None


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("choice", range(3))
@pytest.mark.parametrize("kinds", ["pp", "pdp", "pspdp", "papadap", "prdpd"])
def test_every_grid(monkeypatch, kinds, choice, per_channel):
    m = body(len(kinds) + choice, kinds, (10, 14), 64, per_channel=per_channel)
    p = forced(monkeypatch, m, choice)
    assert p is not None
    check(p, m.images(1), seed=choice)


@pytest.mark.parametrize("seed", range(12))
def test_random_regions(monkeypatch, seed):
    random_region(monkeypatch, 70_000 + seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_many_random_regions(monkeypatch, seed):
    random_region(monkeypatch, 80_000 + seed)


def random_region(monkeypatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = "p" + "".join(rng.choice(list("pddsar"), int(rng.integers(1, 6))))
    size = (int(rng.integers(5, 18)), int(rng.integers(5, 18)))
    m = body(seed, kinds, size, int(rng.choice([64, 96, 128])), per_channel=bool(rng.integers(2)))
    try:
        p = forced(monkeypatch, m, int(rng.integers(12)))
    except ShapeError:  # too large for this region
        return
    if p is not None:
        check(p, m.images(1), seed=seed)


def test_a_region_is_taken_where_it_is_predicted_to_be_faster():
    """Phantoms of 10 x 10 and 5 x 5 positions on 4 x 4 tiles cost more than collecting; 16 x 16 and 8 x 8 have none."""
    for size, wins in (((10, 10), True), ((16, 16), False)):
        m = Strong(1, *size, 12)
        m.layer(nw.Conv, 256, (3, 3))
        for _ in range(4):
            m.layer(nw.Conv, 256)
            m.layer(nw.Depthwise, 256, (3, 3))
        for stride in ((2, 2), (1, 1)):
            m.layer(nw.Depthwise, m.tensors[m.last].c, (3, 3), stride)
            m.layer(nw.Conv, 512)
        m.pool(nw.AveragePool, (size[0] // 2, size[1] // 2), (1, 1))
        plain = Plan(m.network(), Form(nw.Grid(), 1))
        divided = with_region(plain)
        assert (divided is not None) == wins
        assert divided is None or predicted(divided) < predicted(plain)


def test_a_region_ends_before_what_cannot_be_divided():
    """Results, other averages, channels that are no whole words per tile."""
    m = body(3, "pdp", (10, 10), 64)
    (average,) = [s.output for s in m.stages if isinstance(s, nw.AveragePool)]
    kept = m.stages[-2].output
    plan = Plan(m.network(average, kept), Form(nw.Grid(), 1))
    assert all(kept not in region.names for region in regions(plan))
    m = body(3, "p", (10, 10), 72)
    plan = Plan(m.network(), Form(nw.Grid(), 1))
    for region in regions(plan):
        assert all(plan.tensors[name].c % (4 * region.grid.slots) == 0 for name in region.names)
