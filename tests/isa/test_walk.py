"""Walks against the hardware's own way of stepping, written down naively: one rewinding increment per step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral import isa
from coral.isa import Walk, WalkSpec

SPECS = {(s.levels, s.addr, s.inc, s.cnt): s for cls in isa.CLASSES for s in cls.walks.values()}.values()


def hardware(spec: WalkSpec, values: dict[str, int]) -> Iterator[int]:
    """Addresses as the address generator makes them, from the encoded fields alone.

    Per step: the innermost dimension whose index is below its count advances, its increment is added, and the indices
    inside it return to 0. In the final iteration of ``last_dim`` dimension 0 is shorter, and the skip is added once
    when it completes.
    """
    part = {name.removeprefix(spec.prefix + "_"): value for name, value in values.items()}
    index, address = [0] * spec.levels, part["addr"]
    counts = [part[f"cnt{k}"] for k in range(spec.levels)]
    while True:
        yield address % (1 << spec.addr)
        last = part["last_dim"]
        shortened = last and index[last] == counts[last]
        limits = [part["last_cnt"] if shortened else counts[0], *counts[1:]]
        if shortened and index[0] == limits[0]:
            address += part["last_skip"]
        k = next((k for k in range(spec.levels) if index[k] < limits[k]), None)
        if k is None:
            return
        index[:k] = [0] * k
        index[k] += 1
        address += part[f"inc{k}"]


def logical(spec: WalkSpec, walk: Walk) -> Iterator[int]:
    """Addresses as people mean them: nested loops over strides."""
    ranges = [range(n) for n in walk.counts]
    for outer_first in itertools.product(*reversed(ranges)):
        index = outer_first[::-1]
        last = walk.last_dim
        if last and index[last] == walk.counts[last] - 1 and index[0] > walk.last_cnt:
            continue
        yield (walk.addr + sum(i * s for i, s in zip(index, walk.strides, strict=True))) % (1 << spec.addr)


@st.composite
def walks(draw: st.DrawFn) -> tuple[WalkSpec, Walk]:
    """A walk of at most a few hundred steps at any of the generators, strides up to the increment's whole range."""
    spec = draw(st.sampled_from(list(SPECS)))
    n = draw(st.integers(1, spec.levels))
    big = 1 << spec.inc - 1
    strides = draw(st.lists(st.integers(-64, 64) | st.integers(-big, big - 1), min_size=n, max_size=n))
    counts = draw(st.lists(st.integers(1, 3), min_size=n, max_size=n))
    counts[0] = draw(st.integers(1, 6))
    if n > 4:
        counts[4:] = [min(c, 2) for c in counts[4:]]
    last_dim = draw(st.integers(0, n - 1))
    last_cnt = draw(st.integers(0, counts[0] - 1)) if last_dim else 0
    if last_dim:
        strides[0] = draw(st.integers(0, 100))
    addr = draw(st.integers(0, (1 << spec.addr) - 1))
    return spec, Walk(addr, tuple(strides), tuple(counts), last_dim=last_dim, last_cnt=last_cnt)


@given(walks())
@settings(max_examples=300, deadline=None)
def test_encoded_walk_visits_the_logical_addresses(case: tuple[WalkSpec, Walk]) -> None:
    spec, walk = case
    values = walk.to_fields(spec)
    want = list(logical(spec, walk))
    assert list(hardware(spec, values)) == want
    assert walk.steps == len(want)


@given(walks(), st.integers(0, 3), st.integers(-4, 4))
@settings(max_examples=200, deadline=None)
def test_fields_and_walk_are_inverses(case: tuple[WalkSpec, Walk], slot_level: int, slot_stride: int) -> None:
    spec, walk = case
    walk = Walk(walk.addr, walk.strides, walk.counts, slot_level, slot_stride, walk.last_dim, walk.last_cnt)
    values = walk.to_fields(spec)
    back = Walk.from_fields(spec, values)
    n = len(walk.strides)
    assert back.strides[:n] == tuple(walk.strides)
    assert set(back.strides[n:]) <= {0}
    assert back.counts == tuple(walk.counts) + (1,) * (spec.levels - n)
    assert back.to_fields(spec) == values
    assert back.steps == walk.steps
    assert values[f"{spec.prefix}_nz_mask"] == sum(1 << k for k, s in enumerate(walk.strides) if s)


def test_unused_dimensions_hold_the_full_rewind() -> None:
    i = isa.RingSend(src=Walk(7, (1, 10), (4, 3)))
    assert [i.src_inc0, i.src_inc1, i.src_inc2, i.src_inc3] == [1, 7, -23, -23]
    assert [i.src_cnt0, i.src_cnt1, i.src_cnt2, i.src_cnt3] == [3, 2, 0, 0]


def test_the_skip_must_fit_unless_given() -> None:
    with pytest.raises(isa.FieldError, match="src_last_skip = -1"):
        isa.RingSend(src=Walk(0, (1, 0), (2, 2), last_dim=1, last_cnt=2))
    i = isa.W2n(dst=Walk(0, (1, 0), (2, 2), last_dim=1, last_cnt=2))
    assert i.dst_last_skip == -1
    assert isa.RingSend(src=Walk(0, (1, 0), (2, 2), last_dim=1, last_cnt=2, last_skip=0)).src_last_cnt == 2
