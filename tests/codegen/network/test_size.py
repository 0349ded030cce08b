"""Networks that are larger than the chip: streamed weights, several programs."""

from __future__ import annotations

import pytest

from codegen.network.harness import Maker, check
from coral.codegen import ShapeError
from coral.codegen import network as nw

ONE_TILE = (1500, *(None,) * 15)
MEGABYTE = 1 << 20


def mixed(seed: int, **fields) -> Maker:
    """Convolutions with several groups, a depthwise layer, a dense one."""
    m = Maker(seed, 12, 10, 16, **fields)
    m.layer(nw.Conv, 100, (3, 3))
    m.layer(nw.Depthwise, 100, (3, 3))
    m.layer(nw.Conv, 72)
    m.layer(nw.Conv, 40, (3, 3), (2, 2))
    m.dense(30)
    return m


@pytest.mark.parametrize("seed", range(3))
def test_weights_without_a_place_are_streamed(seed):
    m = mixed(seed, per_channel=seed == 1)
    grid = nw.Grid(1, 2) if seed == 2 else None
    p = nw.NetworkProgram(m.network(), batch=1 + seed, grid=grid, base_rows=ONE_TILE, stream=True)
    assert 0 < len(p.wide.streamed) < len(p.wide.products)
    assert p.execution.hint_pattern().count("P") == 1
    check(p, m.images(1 + seed), seed=seed)
    with pytest.raises(ShapeError, match="weights do not fit"):
        nw.NetworkProgram(m.network(), grid=grid, base_rows=ONE_TILE)


def test_streamed_weights_in_several_passes():
    m = Maker(7, 40, 36, 4)
    m.layer(nw.Conv, 64, (3, 3))
    m.layer(nw.Conv, 40, (3, 3), (2, 2))
    p = nw.NetworkProgram(m.network(), batch=35, grid=nw.Grid(1, 1), base_rows=(1700, *ONE_TILE[1:]), stream=True)
    assert p.execution.hint_pattern() == "IAPOAPOAPO!"
    check(p, m.images(35))


def large(layers: int, width: int) -> Maker:
    """Pointwise layers on one position; 1 layer of 3072 has 9 MiB of weights."""
    m = Maker(layers, 1, 1, width)
    for _ in range(layers):
        m.layer(nw.Conv, width)
    return m


NINE_MEGABYTES = [(1, 3072), (9, 1024), (36, 512)]


@pytest.mark.parametrize(("layers", "width"), NINE_MEGABYTES)
def test_nine_megabytes_of_weights(layers, width):
    """Only what the chip cannot hold comes with every call."""
    p = nw.NetworkProgram(large(layers, width).network(), stream=True)
    p.execution.check()
    assert len(p.parameters) + len(p.execution.parameters) < 10.2 * MEGABYTE
    assert len(p.execution.parameters) < 3 * MEGABYTE


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "width"), NINE_MEGABYTES)
def test_nine_megabytes_of_weights_on_the_chip(layers, width):
    m = large(layers, width)
    check(nw.NetworkProgram(m.network(), stream=True), m.images(1), seed=layers)
