"""Operators that are other stages in disguise: places, paddings, transposed convolutions, channel multipliers."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.network.harness import Maker, check
from codegen.network.random_networks import GRIDS
from coral.codegen import ShapeError
from coral.codegen import network as nw

TWO_GRIDS = [nw.Grid(4, 4), nw.Grid(2, 1)]


def runs(m: Maker, *outputs: str, batch: int = 1, seed: int = 1, grids: list[nw.Grid] | None = None) -> None:
    for grid in grids or TWO_GRIDS:
        p = nw.NetworkProgram(m.network(*outputs), batch=batch, grid=grid)
        check(p, m.all_images(batch), seed=seed)


@pytest.mark.parametrize("sizes", [(6, 4), (4, 6), (3, 1, 5, 7), (8, 2, 8)])
@pytest.mark.parametrize("reader", ["conv", "pool", "none"])
def test_parts_of_any_number_of_channels(sizes, reader):
    m = Maker(len(sizes), 9, 7, 5)
    parts = [m.layer(nw.Conv, n, (3, 3), source="x") for n in sizes]
    m.concatenate(parts)
    outputs = [m.last] if reader == "none" else []
    if reader == "conv":
        outputs = [m.layer(nw.Conv, 9, (3, 3))]
    elif reader == "pool":
        outputs = [m.pool(nw.MaxPool, (2, 2), (2, 2))]
    runs(m, *outputs)


def test_parts_of_other_quantisations():
    m = Maker(3, 8, 9, 4)
    a, b, c = (m.layer(nw.Conv, n, source="x") for n in (8, 3, 6))
    name = m.tensor(8, 9, 17)
    m.stages.append(nw.Concatenate((a, b, c), name, m.clamps(name), (0.75, 1.0, float(np.float32(1.3)))))
    m.last = name
    runs(m, m.layer(nw.Conv, 12, (3, 3)), name)


@pytest.mark.parametrize("begin", [0, 1, 4, 7])
@pytest.mark.parametrize(("first", "step"), [((0, 0), (1, 1)), ((2, 1), (1, 1)), ((1, 0), (2, 3))])
def test_slices(begin, first, step):
    m = Maker(begin, 11, 10, 4)
    m.layer(nw.Conv, 13, (3, 3))
    t = m.tensors[m.last]
    size = [(n - f - 1) // s + 1 for n, f, s in zip((t.y, t.x), first, step, strict=True)]
    name = m.tensor(size[0], size[1], 5, t.zero_point)
    m.stages.append(nw.Slice((m.last,), name, (0.0, 0.0), begin, first, step))
    m.last = name
    runs(m, m.layer(nw.Conv, 6, (3, 3)))
    runs(m, name, m.last)


@pytest.mark.parametrize("reader", ["conv", "wide", "pool", "none"])
def test_padding(reader):
    m = Maker(5, 6, 7, 8)
    m.layer(nw.Conv, 8)
    name = m.tensor(10, 11, 8, m.tensors[m.last].zero_point)
    m.stages.append(nw.Pad((m.last,), name, (0.0, 0.0), (1, 2)))
    m.last = name
    if reader == "conv":
        m.layer(nw.Conv, 7, (5, 5), (2, 2), "valid")
    elif reader == "wide":
        m.layer(nw.Depthwise, 8, (3, 2), pad="valid")
    elif reader == "pool":
        m.pool(nw.MaxPool, (3, 3), (2, 2), "same")
    runs(m, grids=GRIDS)


@pytest.mark.parametrize(
    ("kernel", "stride", "pad"),
    [((2, 2), (2, 2), "valid"), ((3, 3), (2, 2), "same"), ((4, 4), (2, 2), "same"), ((3, 5), (1, 3), "same"),
     ((1, 1), (2, 3), "valid"), ((5, 2), (3, 1), "valid"), ((3, 3), (1, 1), "same")],
)  # fmt: skip
def test_transposed_convolutions(kernel, stride, pad):
    m = Maker(kernel[0], 7, 6, 5)
    m.layer(nw.Conv, 6)
    m.transpose_conv(9, kernel, stride, pad)
    runs(m, grids=[nw.Grid(4, 4), nw.Grid(1, 2), nw.Grid(2, 4)])
    a = m.last
    m.layer(nw.Conv, 4, (3, 3))
    runs(m, a, m.last)


def test_a_transposed_convolution_of_the_input_in_a_concatenation():
    m = Maker(2, 5, 6, 3)
    a = m.transpose_conv(8, (4, 4), (2, 2), spare=1)
    b = m.transpose_conv(4, (2, 2), (2, 2), source="x", spare=1)
    m.concatenate([a, b])
    m.layer(nw.Conv, 6, (3, 3))
    runs(m, batch=3, grids=GRIDS)


@pytest.mark.parametrize(("c", "multiplier"), [(1, 8), (3, 2), (5, 3), (8, 4), (6, 16), (2, 20), (70, 2)])
def test_depthwise_layers_with_a_multiplier(c, multiplier):
    m = Maker(c, 8, 7, c)
    m.layer(nw.Depthwise, c * multiplier, (3, 3), (2, 1))
    m.layer(nw.Conv, 5)
    runs(m, batch=2)


def test_reshapes_at_the_ends_are_views():
    m = Maker(8, 4, 6, 5)
    m.reshape(6, 10, 2)
    a = m.layer(nw.Conv, 12, (3, 3))
    b = m.reshape(1, 1, 6 * 10 * 12)
    m.last = a
    m.reshape(30, 24, 1)
    c = m.dense(20)
    runs(m, b, c)
    runs(m, a, b, c)


def test_a_reshape_in_the_middle_is_named():
    m = Maker(8, 4, 6, 5)
    m.layer(nw.Conv, 12, (3, 3))
    name = m.reshape(6, 4, 12)
    m.layer(nw.Conv, 12, (3, 3))
    with pytest.raises(ShapeError, match=rf"{name!r} is a reshape between stages on the chip, from 4 x 6 x 12"):
        nw.NetworkProgram(m.network())


@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_resizing(nearest, grid):
    """Odd sizes: tiles begin with results of even and of odd numbers."""
    m = Maker(3, 5, 7, 6)
    a = m.resize(nearest)
    m.layer(nw.Conv, 9, (3, 3))
    b = m.resize(nearest)
    runs(m, a, b, batch=2, grids=[grid])


def test_a_resized_tensor_has_other_readers():
    """Windows that reach beyond the map see zero points, resizing sees repeated edges."""
    m = Maker(4, 6, 6, 4)
    source = m.layer(nw.Conv, 8)
    outputs = [m.resize(False), m.layer(nw.Conv, 5, (3, 3), source=source)]
    m.last = source
    outputs += [m.pool(nw.MaxPool, (3, 3), (2, 2), "same")]
    b = m.layer(nw.Conv, 12, source=source)
    m.last = source
    m.resize(True)
    c = m.layer(nw.Conv, 4, (3, 3))
    m.last = b
    outputs += [m.resize(False), c]
    m.slice(4, 8, b)
    outputs += [m.resize(False)]
    runs(m, *outputs)


@pytest.mark.parametrize("size", [(1, 1, 3), (1, 9, 5), (12, 1, 64)])
def test_resizing_small_maps(size):
    m = Maker(1, *size)
    m.layer(nw.Conv, size[2])
    runs(m, m.resize(False))


def one(stage: nw.Stage, y: tuple[int, int, int], zero: int = 7) -> nw.Network:
    """A network of one stage on a 4 x 6 map of 5 channels with zero point 7."""
    tensors = {"x": nw.Tensor("x", 4, 6, 5, 7), "y": nw.Tensor("y", *y, zero)}
    return nw.Network("bad", tensors, ("x",), (stage,), ("y",))


NONE = (0.0, 0.0)


@pytest.mark.parametrize(
    ("stage", "y", "zero", "message"),
    [
        (nw.Concatenate(("x", "x"), "y", NONE), (4, 6, 9), 7, r"the inputs do not make up"),
        (nw.Concatenate(("x", "x"), "y", NONE), (4, 6, 10), 8, r"the inputs do not make up"),
        (nw.Concatenate(("x", "x"), "y", NONE, (1.0,)), (4, 6, 10), 7, r"the inputs do not make up"),
        (nw.Slice(("x",), "y", NONE, 3), (4, 6, 3), 7, r"channels 3\.\.5 of positions \(0, 0\)\.\.\[3, 5\]"),
        (nw.Slice(("x",), "y", NONE, 0, (1, 0), (2, 2)), (2, 4, 5), 7, r"positions \(1, 0\)\.\.\[3, 6\]"),
        (nw.Slice(("x",), "y", NONE, 0, (0, 0), (0, 1)), (4, 6, 5), 7, r"are not"),
        (nw.Pad(("x",), "y", NONE, (1, 0)), (4, 6, 5), 7, r"with \(1, 0\) positions in front is not"),
        (nw.Pad(("x",), "y", NONE, (0, 0)), (5, 6, 5), 0, r"with \(0, 0\) positions in front is not"),
        (nw.Reshape(("x",), "y", NONE), (4, 6, 6), 7, r"120 elements of .* do not become"),
        (nw.Resize(("x",), "y", NONE), (8, 11, 5), 7, r"is not twice"),
        (nw.Softmax(("x",), "y", NONE), (4, 6, 4), 7, r"4 channels from inputs of \[5\]"),
        (nw.Requantise(("x",), "y", NONE, at=nw.Window((2, 1))), (4, 6, 5), 7, r"a single position is taken"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(stage, y, zero, message):
    with pytest.raises(ShapeError, match=message):
        one(stage, y, zero)


def test_a_softmax_of_too_many_channels_is_named():
    tensors = {name: nw.Tensor(name, 1, 1, 8180) for name in ("x", "y")}
    network = nw.Network("bad", tensors, ("x",), (nw.Softmax(("x",), "y", (0.0, 255.0)),), ("y",))
    with pytest.raises(ShapeError, match=r"rows from \d+ on are overwritten"):
        nw.NetworkProgram(network, base_rows=(100,) * 16)
