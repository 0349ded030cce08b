"""Networks with several inputs: sizes, grids, passes, and what the host hands over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from codegen.network.harness import Maker, check
from codegen.network.random_networks import GRIDS
from codegen.network.reference import run_network
from coral.codegen import CodegenError, ShapeError
from coral.codegen import network as nw
from coral.devices import shared_stick


def two_heads(seed: int, sizes: tuple[tuple[int, int, int], tuple[int, int, int]]) -> Maker:
    """A layer on each of two inputs, and a third one that both meet in where their sizes allow."""
    m = Maker(seed, *sizes[0])
    a = m.layer(nw.Conv, 12, (3, 3))
    m.input(*sizes[1])
    b = m.layer(nw.Conv, 12, (5, 3))
    if sizes[0][:2] == sizes[1][:2]:
        m.add(a, b)
    return m


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_two_images_meet(grid):
    m = two_heads(1, ((9, 14, 3), (9, 14, 8)))
    check(nw.NetworkProgram(m.network(), batch=2, grid=grid), m.all_images(2), seed=1)


@pytest.mark.parametrize("own_input", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_inputs_of_different_sizes(batch, own_input):
    m = two_heads(2, ((20, 6, 5), (7, 31, 4)))
    outputs = [s.output for s in m.stages]
    p = nw.NetworkProgram(m.network(*outputs), batch=batch, grid=nw.Grid(4, 2), own_input=own_input)
    check(p, m.all_images(batch), seed=2)


@pytest.mark.parametrize("make", ["add", "multiply"])
@pytest.mark.parametrize("size", [(1, 1, 300), (13, 5, 6), (16, 16, 64)])
def test_two_operands(make, size):
    m = Maker(3, *size)
    m.input(*size)
    getattr(m, make)(*m.inputs)
    for batch in (1, 17):
        check(nw.NetworkProgram(m.network(), batch=batch), m.all_images(batch), seed=3)


def test_an_image_beside_a_vector():
    m = Maker(4, 1, 1, 70)
    a = m.dense(30)
    m.input(12, 10, 3)
    b = m.layer(nw.Conv, 20, (3, 3))
    check(nw.NetworkProgram(m.network(a, b)), m.all_images(1), seed=4)


def test_passes_through_the_driver():
    m = two_heads(5, ((52, 40, 4), (52, 40, 8)))
    p = nw.NetworkProgram(m.network(*(s.output for s in m.stages)), batch=35, grid=nw.Grid(1, 1))
    assert p.passes > 1
    assert p.execution.hint_pattern().startswith("IA2O3A2O3")
    images, stick = m.all_images(35), shared_stick("sim", 13)
    stick.ensure_cached(p.caching())
    got = p.unpack(stick.run(p.execution, p.pack(images)))
    for i in (0, 16, 34):
        expected = run_network(p.network, {name: x[i] for name, x in images.items()})
        for name, values in got.items():
            np.testing.assert_array_equal(values[i], expected[name])


def test_bad_inputs_are_named():
    m = two_heads(6, ((9, 14, 3), (9, 14, 8)))
    network, images = m.network(), m.all_images(1)
    p = nw.NetworkProgram(network)
    with pytest.raises(ShapeError, match=r"one array for 2 inputs, needed are arrays by name"):
        p.pack(images["x"])
    with pytest.raises(ShapeError, match=r"inputs are \['x'\], needed are \['t2', 'x'\]"):
        p.pack({"x": images["x"]})
    with pytest.raises(ShapeError, match=r"input 't2' is uint8 \(1, 9, 14, 3\), needed are up to 1 images"):
        p.pack({"x": images["x"], "t2": images["x"]})
    for inputs in ((), "x", ("nothing",)):
        with pytest.raises(CodegenError, match=r"inputs .*, needed are names of tensors"):
            replace(network, inputs=inputs)
