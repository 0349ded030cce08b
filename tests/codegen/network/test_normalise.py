"""SOFTMAX and L2 normalisation on the simulated chip, against coral.numerics."""

from __future__ import annotations

import pytest

from codegen.network.harness import Maker, check
from codegen.network.random_networks import GRIDS
from coral.codegen import network as nw

BOTH = pytest.mark.parametrize("cls", [nw.Softmax, nw.L2Normalise])


@BOTH
@pytest.mark.parametrize("c", [1, 2, 3, 4, 5, 9, 12, 21, 64, 65, 130])
def test_channels_of_every_position(cls, c):
    m = Maker(c, 5, 7, 4)
    m.layer(nw.Conv, c)
    m.normalise(cls)
    check(nw.NetworkProgram(m.network(), batch=2, grid=nw.Grid(2, 2)), m.images(2), seed=c)


@BOTH
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_grids(cls, grid):
    m = Maker(2, 9, 10, 6)
    a = m.normalise(cls)
    m.layer(nw.Conv, 5, (3, 3))
    m.normalise(cls)
    check(nw.NetworkProgram(m.network(a, m.last), batch=3, grid=grid), m.images(3), seed=2)


@BOTH
@pytest.mark.parametrize("n", [10, 64, 300, 1001])
def test_logits_of_a_dense_layer(cls, n):
    """Cut over all tiles, or one image per tile."""
    m = Maker(n, 3, 4, 8)
    m.dense(n)
    m.normalise(cls)
    for batch in (1, 3):
        p = nw.NetworkProgram(m.network(), batch=batch)
        check(p, m.images(batch), seed=n)


@pytest.mark.parametrize(("c", "y"), [(1024, 3), (1026, 1), (1027, 1), (2062, 1), (4093, 1), (4096, 1)])
def test_many_channels(c, y):
    """More pairs than lie in wide memory at a time go through two slots; 1,031 of them one by one."""
    m = Maker(c, y, 1, c)
    m.normalise(nw.Softmax)
    m.dense(3)
    check(nw.NetworkProgram(m.network(), base_rows=(900,) * 16), m.images(1), seed=c)


@BOTH
def test_many_positions_are_taken_in_chunks(cls):
    m = Maker(4, 40, 33, 20)
    m.normalise(cls)
    check(nw.NetworkProgram(m.network(), grid=nw.Grid(1, 1)), m.images(1), seed=4)


@BOTH
def test_parts_and_slices(cls):
    """What is normalised lies between other channels, and so does the result."""
    m = Maker(7, 6, 5, 24)
    m.layer(nw.Conv, 24)
    source = m.last
    m.slice(8, 7, source)
    m.normalise(cls)
    part = m.last
    other = m.layer(nw.Conv, 6, source=source)
    m.concatenate([part, other] if cls is nw.Softmax else [other, part])
    check(nw.NetworkProgram(m.network(), grid=nw.Grid(4, 4)), m.images(1), seed=7)


@pytest.mark.slow
def test_softmax_of_as_many_channels_as_a_tensor_has():
    m = Maker(9, 1, 1, 8192)
    m.normalise(nw.Softmax, 0.01)
    check(nw.NetworkProgram(m.network()), m.images(1), seed=9)
