"""What lies on the chip after any sequence of calls: every program finds its parameters, nothing is sent needlessly."""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from codegen.network.harness import Maker
from hypothesis import given, settings
from hypothesis import strategies as st

from coral.codegen import network as nw
from coral.codegen.errors import ShapeError
from coral.codegen.machine import ROW_BYTES
from coral.runtime import Runtime
from coral.runtime.linear import fc_layout, fc_shape, product
from runtime.memory_stick import LOST, MemoryStick
from runtime.test_runtime import layer

ROWS = 620
"""A small chip: about three of the larger networks fit."""
BATCHES, MANY = (1, 2, 16), (1, 2, 40)


@pytest.fixture(autouse=True, scope="module")
def generated_once() -> Iterator[None]:
    """A pair of programs is generated once for all sequences: the same network, images and places give the same."""
    made: dict = {}

    def program(net: nw.Network, **options) -> nw.NetworkProgram:
        key = hashlib.sha256(pickle.dumps(net)).digest(), *sorted(options.items())
        if key not in made:
            try:
                made[key] = original(net, **options)
            except ShapeError as error:
                made[key] = str(error)
        if isinstance(made[key], str):
            raise ShapeError(made[key])
        return made[key]

    original = nw.NetworkProgram
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nw, "NetworkProgram", program)
        yield


@functools.cache
def network(index: int) -> nw.Network:
    """Convolutions, constants of an addition, dense layers over all tiles, weights in several pieces."""
    m = Maker(index, 4, 4, (16, 512, 256, 64, 1024, 32)[index])
    if index == 3:
        source = m.last
        m.add(source, m.layer(nw.Conv, 64))
    m.layer(nw.Conv, (64, 700, 320, 256, 512, 8)[index])
    if index in (0, 5):
        m.dense(70)
    return m.network()


@functools.cache
def linear(index: int):
    return layer(np.random.default_rng(index), *((64, 64), (1000, 800), (300, 1500))[index], rows=max(MANY))


def rows_of(blob: bytes) -> set[bytes]:
    return {blob[at : at + ROW_BYTES] for at in range(0, len(blob), ROW_BYTES)}


@functools.cache
def wanted(index: int, batch: int) -> set[bytes]:
    """Rows that a call should read, if the network were alone on a chip."""
    return rows_of(nw.NetworkProgram(network(index), batch=batch).parameters)


@functools.cache
def wanted_of_linear(index: int, form: str) -> set[bytes]:
    spec, _, w, b = linear(index)
    if form == "row":
        return rows_of(fc_layout(fc_shape(spec.n, spec.k), spec.w_zp, w, b).blob)
    return rows_of(nw.NetworkProgram(product(spec, w, b), batch=2, grid=nw.Grid(1, 1)).parameters)


class Session:
    """A runtime, and what should be loaded on its stick."""

    def __init__(self) -> None:
        self.stick = MemoryStick()
        self.runtime = Runtime(self.stick, ROWS)
        self.loaded: dict = {}

    def network(self, index: int, batch: int) -> None:
        net = network(index)
        t = net.tensors[net.inputs[0]]
        self.called(lambda: self.runtime.network(index, lambda: net, {"x": np.zeros((batch, t.y, t.x, t.c), np.uint8)}))
        assert any(self.stick.read == wanted(index, size) for size in BATCHES)

    def linear(self, index: int, rows: int) -> None:
        spec, x, w, b = linear(index)
        self.called(lambda: self.runtime.linear(spec, x[:rows], w, b, key=index))
        assert self.stick.read in [wanted_of_linear(index, "row")] * (rows == 1) + [wanted_of_linear(index, "product")]

    def called(self, call) -> None:
        before = self.stick.uploads
        call()
        places = self.runtime.regions()
        used = list(places)[-1]
        assert self.stick.uploads - before == (self.loaded.get(used) != places[used].regions)
        assert LOST not in self.stick.read
        self.loaded = {k: v for k, v in self.loaded.items() if k in places and places[k].regions == v}
        self.loaded[used] = places[used].regions
        taken = Counter(
            (r.first_tile + t, r.row + i) for p in places.values() for r in p.regions for t in range(r.tiles)
            for i in range(r.rows)
        )  # fmt: skip
        assert not taken or max(taken.values()) == 1
        assert max(p.end for p in places.values()) <= min([ROWS, *(p.floor for p in places.values())])

    def fault(self) -> None:
        self.stick.lose_everything()
        self.loaded.clear()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("network"), st.integers(0, 5), st.sampled_from(BATCHES)),
        st.tuples(st.just("linear"), st.integers(0, 2), st.sampled_from(MANY)),
        st.tuples(st.just("fault")),
    ),
    min_size=8,
    max_size=16,
)


def play(steps) -> Session:
    session = Session()
    for name, *arguments in steps:
        getattr(session, name)(*arguments)
    stats = session.runtime.stats
    assert stats.uploads == session.stick.uploads
    return session


@given(STEPS)
@settings(max_examples=20)
def test_any_sequence(steps):
    play(steps)


@pytest.mark.slow
@given(STEPS)
@settings(max_examples=1000)
def test_any_sequence_often(steps):
    play(steps)


def test_what_fits_together_stays():
    """Packed anew once at most, and sent again then; no upload in the third round."""
    everything = [("network", k, 16) for k in (0, 2, 3, 5)] + [("linear", 0, 2), ("linear", 2, 2)]
    second, third = play(everything * 2), play(everything * 3)
    assert second.stick.uploads == third.stick.uploads <= 2 * len(everything)
    assert (third.runtime.stats.repacks, third.runtime.stats.evictions) in [(0, 0), (1, 0)]


def test_batches_share_weights_where_the_layout_is_the_same():
    session = play([("network", 1, n) for n in (16, 64, 200)])
    assert (session.stick.uploads, session.runtime.stats.programs) == (1, 3)
