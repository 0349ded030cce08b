"""Single stages: splines, means, shapes that fail elsewhere, and the limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from codegen.network.harness import Maker, check, run
from coral import numerics
from coral.chip import Chip
from coral.codegen import CodegenError, ShapeError
from coral.codegen import network as nw


@pytest.mark.parametrize(("spline", "clamp"), [("LOGISTIC", "LOGISTIC_CLAMP"), ("TANH", "TANH_CLAMP")])
def test_splines_on_all_codes(spline, clamp):
    limit = getattr(numerics, clamp)
    table = getattr(numerics, spline).scaled(256.0 if spline == "LOGISTIC" else 127.5)
    zero = 0 if spline == "LOGISTIC" else 128
    tensors = {"x": nw.Tensor("x", 8, 8, 4, 130), "y": nw.Tensor("y", 8, 8, 4, zero)}
    stage = nw.Requantise(("x",), "y", (-limit, limit), float(np.float32(0.07)), 0, table)
    p = nw.NetworkProgram(nw.Network("spline", tensors, ("x",), (stage,), ("y",)))
    check(p, np.arange(256, dtype=np.uint8).reshape(1, 8, 8, 4), seed=1)


@pytest.mark.parametrize(("y", "x", "c", "batch"), [(256, 128, 3, 1), (13, 5, 1, 1), (13, 5, 1, 20), (7, 7, 130, 1)])
def test_means(y, x, c, batch):
    m = Maker(y + x, y, x, c)
    m.pool(nw.AveragePool, (y, x), (1, 1))
    check(nw.NetworkProgram(m.network(), batch=batch), m.images(batch), seed=2)


@pytest.mark.parametrize(("y", "x", "c"), [(7, 7, 130), (3, 3, 6), (5, 1, 64), (56, 60, 66), (150, 40, 20)])
def test_means_of_maps_that_are_cut_over_all_tiles(y, x, c):
    """Sums of 16 bits from every tile, an odd number of them too, also where no tile could hold the map."""
    m = Maker(c, y, x, 4)
    m.layer(nw.Conv, c)
    a = m.pool(nw.AveragePool, (y, x), (1, 1))
    m.dense(10)
    p = nw.NetworkProgram(m.network(a, m.last), batch=2, grid=nw.Grid(4, 4))
    assert a in p.plan.summed
    check(p, m.images(2), seed=2)


@pytest.mark.parametrize("batch", [1, 20])
def test_a_perceptron(batch):
    """The input goes to all tiles as it is; results stay cut over the tiles in between."""
    m = Maker(batch, 23, 3, 1)
    m.dense(300)
    m.requantise()
    m.dense(70)
    m.dense(3)
    check(nw.NetworkProgram(m.network(), batch=batch), m.images(batch), seed=batch)


@pytest.mark.parametrize("positions", [(1, 127), (8, 16), (3, 43)])
def test_pointwise_on_odd_grids(positions):
    y, x = positions
    m = Maker(x, y, x, 20)
    m.layer(nw.Conv, 70)
    check(nw.NetworkProgram(m.network()), m.images(1), seed=3)


def test_weights_that_do_not_fit_twice_are_taken_in_chunks():
    """3 x 3 x 512: 1,152 weight rows per group are more than half of wide memory."""
    m = Maker(5, 6, 6, 4)
    m.layer(nw.Conv, 512)
    m.layer(nw.Conv, 12, (3, 3))
    p = nw.NetworkProgram(m.network())
    fifo = p.wide.fifos[m.last]
    assert fifo.fills > 1
    assert fifo.slots == 2
    assert fifo.sums == p.wide.products[m.last].count
    check(p, m.images(1))


def test_chunks_need_no_sums_for_one_position():
    m = Maker(6, 1, 1, 8192)
    m.layer(nw.Conv, 8)
    p = nw.NetworkProgram(m.network(), batch=2, grid=nw.Grid(1, 1))
    assert p.wide.fifos[m.last].fills > 1
    assert p.wide.fifos[m.last].sums == 0
    check(p, m.images(2))


def test_two_programs_are_resident_together():
    """The second one's parameters begin where the first one's end; both run again and again."""
    first, second = Maker(7, 12, 12, 4), Maker(8, 9, 9, 8)
    for m in (first, second):
        m.layer(nw.Conv, 40, (3, 3))
        m.layer(nw.Depthwise, 40, (3, 3))
        a = m.layer(nw.Conv, 40)
        m.layer(nw.Conv, 40)
        m.add(a, m.last)
    p = nw.NetworkProgram(first.network())
    q = nw.NetworkProgram(second.network(), base_rows=(p.rows_per_tile,) * 16, top=p.rows_per_tile)
    assert q.rows_per_tile <= p.floor_rows
    chip = Chip()
    for program in (p, q):
        run(chip, program.caching())
    for program, m in ((p, first), (q, second), (p, first)):
        image = m.images(1)
        (raw,) = run(chip, program.execution, program.pack(image))
        alone = Chip()
        run(alone, program.caching())
        assert raw == run(alone, program.execution, program.pack(image))[0]


def conv(**changes):
    fields = {
        "inputs": ("x",),
        "output": "y",
        "clamps": (0.0, 255.0),
        "weights": np.zeros((8, 3, 3, 4), np.uint8),
        "bias": None,
        "w_zp": 0,
        "mult": 1.0,
        "at": nw.Window((3, 3)),
    }
    return nw.Conv(**fields | changes)


def network(stage, x=(8, 8, 4), y=(6, 6, 8)):
    tensors = {"x": nw.Tensor("x", *x), "y": nw.Tensor("y", *y)}
    return nw.Network("bad", tensors, ("x",), (stage,), ("y",))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: network(conv(weights=np.zeros((8, 3, 3, 5), np.uint8))), r"weights are uint8 \(8, 3, 3, 5\), needed"),
        (lambda: network(conv(bias=np.zeros(8, np.int64))), r"bias is int64 \(8,\), needed is int32 \(8,\)"),
        (lambda: network(conv(mult=np.ones(3, np.float32))), r"3 multipliers, needed are one or 8"),
        (lambda: network(conv(w_zp=256)), r"weight zero point 256"),
        (lambda: network(conv(), y=(9, 6, 8)), r"9 windows of 3 every 1 from -0 reach 11, the input has 8"),
        (lambda: network(conv(inputs=("z",))), r"reads 'z', which nothing wrote"),
        (lambda: nw.Tensor("t", 1, 1, 9000), r"9000 channels, allowed are 1\.\.8192"),
        (lambda: nw.Window((3, 3), (1, 1), (3, 0)), r"padding must be smaller than the kernel"),
        (lambda: nw.NetworkProgram(network(conv()), batch=257), r"batch 257, allowed are 1\.\.256"),
        (
            lambda: nw.NetworkProgram(network(conv(), x=(2002, 2002, 4), y=(2000, 2000, 8))),
            r"needs \d+ bytes of narrow memory per tile at tensor 'y' .* the limit is 196608",
        ),
        (
            lambda: nw.NetworkProgram(
                network(
                    conv(weights=np.zeros((4096, 1, 1, 4096), np.uint8), at=nw.Window()), x=(2, 2, 4096), y=(2, 2, 4096)
                )
            ),
            r"65600 rows of weights do not fit",
        ),
    ],
)
def test_limits_are_named_before_anything_is_built(make, message):
    with pytest.raises((ShapeError, CodegenError), match=message):
        make()


@pytest.mark.parametrize(("c", "grid"), [(8, nw.Grid(4, 4)), (3, nw.Grid(4, 4)), (8, nw.Grid(1, 1))])
def test_tensors_needed_in_two_places_are_copied(c, grid):
    """The input as an operand and as a part, a part of two concatenations, padded maximum pools beside convolutions."""
    m = Maker(12, 9, 9, c)
    a = m.layer(nw.Conv, c, (3, 3))
    added = m.add("x", a)
    m.tensors[added] = replace(m.tensors[added], zero_point=m.tensors["x"].zero_point)
    m.stages[-1] = replace(m.stages[-1], clamps=m.clamps(added))
    outputs = [added]
    if c % 4 == 0:
        outputs += [m.concatenate([added, "x"]) for _ in range(2)]
    m.last = added
    outputs += [m.pool(nw.MaxPool, (3, 3), (1, 1), "same")]
    outputs += [m.layer(nw.Conv, 5, (3, 3), source=added)]
    check(nw.NetworkProgram(m.network(*outputs), grid=grid), m.images(1), seed=6)


@pytest.mark.parametrize(("y", "x", "c", "stride"), [(40, 38, 256, (1, 1)), (257, 257, 3, (2, 2))])
def test_inputs_too_wide_for_whole_rows(y, x, c, stride):
    """Tiles keep their own columns only; halos are exchanged."""
    m = Maker(c, y, x, c)
    m.layer(nw.Conv, 4, (3, 3), stride)
    p = nw.NetworkProgram(m.network(), grid=nw.Grid(4, 4), own_input=True)
    assert p.plan.own_input
    check(p, m.images(1))


def test_the_kind_of_input_is_chosen_by_size():
    m = Maker(2, 64, 64, 256)
    m.layer(nw.Conv, 8, (3, 3))
    assert nw.NetworkProgram(m.network()).plan.own_input
    m = Maker(2, 64, 64, 32)
    m.layer(nw.Conv, 8, (3, 3))
    assert not nw.NetworkProgram(m.network()).plan.own_input


def test_a_single_group_where_nothing_else_fits():
    """Rows above the parameters: enough for one group, but neither for two nor for the sums of 576 positions."""
    m = Maker(13, 26, 26, 140)
    m.layer(nw.Conv, 70, (3, 3), pad="valid")
    rows = 2080 - 320 - 159
    p = nw.NetworkProgram(m.network(), grid=nw.Grid(1, 1), base_rows=(rows - 159,) * 16, piece_rows=159)
    fifo = p.wide.fifos[m.last]
    assert (fifo.slots, fifo.fills, fifo.sums) == (1, 1, 0)
    assert fifo.row % 2 == fifo.header_row % 2 == 0
    check(p, m.images(1))
