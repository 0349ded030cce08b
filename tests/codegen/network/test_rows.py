"""Bands of rows as networks of their own are, put together, the whole network."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.network.harness import Maker, outputs, run
from codegen.network.random_networks import draw
from codegen.network.reference import run_network
from codegen.network.test_ladder import detector, heads
from coral.chip import Chip
from coral.codegen import network as nw
from coral.codegen.errors import ShapeError


def check(whole: nw.Network, count: int, images: dict[str, np.ndarray], seed: int, *, chip: bool = True) -> None:
    """Every band by the reference, or on the chip, against the whole by the reference."""
    expected = run_network(whole, images)
    seen: dict[str, int] = dict.fromkeys(whole.outputs, 0)
    for band in nw.in_rows(whole, count):
        mine = {n: images[n][slice(*band.rows[n])] for n in band.network.inputs}
        if chip:
            p = nw.NetworkProgram(band.network)
            device = Chip(seed=seed)
            run(device, p.caching())
            stacked = {n: x[None] for n, x in mine.items()}
            got = {n: v[0] for n, v in outputs(p, run(device, p.execution, p.pack(stacked))).items()}
        else:
            got = run_network(band.network, mine)
        for name in whole.outputs:
            (start, _), (a, b) = band.rows[name], band.wanted[name]
            assert seen[name] == a
            seen[name] = b
            np.testing.assert_array_equal(got[name][a - start : b - start], expected[name][a:b], err_msg=name)
    assert seen == {name: whole.tensors[name].y for name in whole.outputs}


@pytest.mark.parametrize(("y", "x", "count"), [(104, 40, 2), (121, 21, 3), (160, 33, 5)])
def test_detectors(y: int, x: int, count: int) -> None:
    m = detector(y, x)
    check(heads(m), count, {"x": m.images(1)[0]}, y)


def movements(seed: int) -> Maker:
    """Pads, slices, resizes, pools and a residual sum."""
    m = Maker(seed, 90 + seed, 13, 5)
    a = m.layer(nw.Conv, 8, (3, 3), (2, 2))
    m.pool(nw.MaxPool, (3, 3), (1, 1), "same")
    b = m.add(a, m.layer(nw.Conv, 8, (5, 1)))
    m.resize(nearest=seed % 2 == 0)
    m.layer(nw.Depthwise, 8, (3, 3))
    t = m.tensors[m.last]
    name = m.tensor(t.y + 5, t.x + 2, t.c, t.zero_point)
    m.stages.append(nw.Pad((t.name,), name, (0.0, 0.0), (3, 1)))
    m.last = name
    m.layer(nw.Conv, 4, (3, 3), pad="valid")
    t = m.tensors[m.last]
    name = m.tensor((t.y - 3) // 2, t.x - 1, t.c, t.zero_point)
    m.stages.append(nw.Slice((t.name,), name, (0.0, 0.0), first=(3, 1), step=(2, 1)))
    m.last = name
    m.pool(nw.AveragePool, (2, 2), (1, 1))
    m.multiply(b, m.requantise()) if m.tensors[b].y == m.tensors[m.last].y else m.requantise()
    return m


@pytest.mark.parametrize("seed", range(4))
def test_what_moves_rows(seed: int) -> None:
    m = movements(seed)
    read = {n for s in m.stages for n in s.inputs}
    whole = m.network(*(s.output for s in m.stages if s.output not in read))
    check(whole, 2 + seed % 3, {"x": m.images(1)[0]}, seed)


@pytest.mark.parametrize("seed", range(150))
def test_random_networks_by_the_reference(seed: int) -> None:
    """Cutting alone, without programs: cheap, so many."""
    m, _, _ = draw(seed, 3e5)
    try:
        nw.in_rows(m.network(), 2)
    except ShapeError:
        return
    check(m.network(), 2, {n: v[0] for n, v in m.all_images(1).items()}, seed, chip=False)


def test_what_cannot_be_cut() -> None:
    m = Maker(0, 12, 12, 8)
    m.pool(nw.AveragePool, (12, 12), (1, 1))
    with pytest.raises(ShapeError, match="an output of 1 rows is not cut into 2 bands"):
        nw.in_rows(m.network(), 2)
    m = Maker(0, 12, 12, 8)
    m.layer(nw.Conv, 8, (11, 1))
    with pytest.raises(ShapeError, match=r"a band of 2 reads rows 0\.\.10 of 'x'"):
        nw.in_rows(m.network(), 2)
    m = Maker(0, 12, 12, 8)
    m.transpose_conv(4, (2, 2), (2, 2))
    with pytest.raises(ShapeError, match="TransposeConv 't1' is not cut"):
        nw.in_rows(m.network(), 2)
