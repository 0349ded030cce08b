"""Networks that are larger than the chip: streamed weights, several programs."""

from __future__ import annotations

import pytest

from codegen.network.harness import Maker, check, check_chain
from codegen.network.random_networks import draw
from coral.codegen import ShapeError
from coral.codegen import network as nw
from coral.codegen.network.rewrite import weight_rows

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


def test_weights_give_way_to_what_a_softmax_needs():
    """500 rows of scratch for 1,000 classes: more than the FIFOs, below which all weights would have room."""
    m = Maker(7, 2, 2, 512)
    for _ in range(7):
        m.layer(nw.Conv, 512)
    m.pool(nw.AveragePool, (2, 2), (1, 1))
    m.dense(1000)
    base = (1020,) * 16
    assert not nw.NetworkProgram(m.network(), base_rows=base, stream=True).wide.streamed
    m.normalise(nw.Softmax)
    p = nw.NetworkProgram(m.network(), base_rows=base, stream=True)
    assert 0 < len(p.wide.streamed) < 7
    assert p.wide.used <= p.wide.floor <= 1576
    check(p, m.images(1))
    with pytest.raises(ShapeError, match="are overwritten at every call"):
        nw.NetworkProgram(m.network(), base_rows=base)


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


def test_layers_with_a_third_of_the_room_each():
    m = mixed(4)
    rows = weight_rows(m.stages) // 2
    parts = nw.programs(m.network(), rows=rows)
    assert [len(p.network.stages) for p in parts] == [3, 1, 1]
    assert all(weight_rows(p.network.stages) <= rows for p in parts)
    check_chain(parts, m.network(), m.all_images(1), seed=4)
    assert nw.split(m.network()) == [m.network()]


@pytest.mark.parametrize("seed", range(12))
def test_random_networks_cut_everywhere(seed):
    """Tensors that are alive across a cut, parts of concatenations and slices among them."""
    m, _, batch = draw(30_000 + seed, 5e4)
    network = m.network()
    parts = nw.programs(network, batch=batch, rows=1 + weight_rows(network.stages) // 4)
    check_chain(parts, network, m.all_images(batch), seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_many_random_networks_cut_everywhere(seed):
    m, _, batch = draw(40_000 + seed, 5e5)
    network = m.network()
    parts = nw.programs(network, batch=batch, rows=1 + weight_rows(network.stages) // 4)
    check_chain(parts, network, m.all_images(batch), seed)
