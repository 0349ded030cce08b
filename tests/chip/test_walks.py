"""Walks, waits and signals against loops written out from the description of the address generators."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral import isa
from coral.chip import RuleViolation, UnknownInstruction
from coral.chip.walks import Addresses, Gate, Nest
from coral.isa import TileCounter, Wait, Walk, signed16


@st.composite
def walks(draw: st.DrawFn, dims: int = 4) -> Walk:
    n = draw(st.integers(1, dims))
    counts = draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
    strides = draw(st.lists(st.integers(-9, 9), min_size=n, max_size=n))
    last_dim = draw(st.integers(0, n - 1))
    last_cnt = draw(st.integers(0, counts[0] - 1)) if last_dim else 0
    slots = draw(st.integers(0, n)), draw(st.sampled_from([0, 7]))
    return Walk(draw(st.integers(0, 1000)), strides, counts, *slots, last_dim, last_cnt)


def naive(walk: Walk, phase: int = 0) -> tuple[list[int], list[tuple[int, ...]]]:
    """Nested loops: addresses and indices of the steps that are made, outermost dimension last."""
    addresses, indices = [], []
    for outer_first in itertools.product(*(range(n) for n in reversed(walk.counts))):
        index = outer_first[::-1]
        if walk.last_dim and index[walk.last_dim] == walk.counts[walk.last_dim] - 1 and index[0] > walk.last_cnt:
            continue
        indices.append(index)
    completed = 0
    for k, index in enumerate(indices):
        if k and index[walk.slot_level :] != indices[k - 1][walk.slot_level :]:
            completed += 1
        slot = (completed if walk.slot_level else k) + phase
        address = walk.addr + sum(i * s for i, s in zip(index, walk.strides, strict=True))
        addresses.append(address + (walk.slot_stride if slot % 2 else 0))
    return addresses, indices


def block_starts(indices: list[tuple[int, ...]], level: int) -> list[int]:
    """Steps before which the dimensions below ``level`` are at their beginning."""
    if level == 0:
        return list(range(len(indices)))
    return [k for k, index in enumerate(indices) if not k or index[level:] != indices[k - 1][level:]]


@given(walks(), st.integers(0, 1))
@settings(max_examples=300, deadline=None)
def test_addresses(walk: Walk, phase: int) -> None:
    addresses, indices = naive(walk, phase)
    found = Addresses(walk, "walk")
    assert found.at(phase).tolist() == addresses
    assert found.steps == len(indices)
    for dim in range(len(walk.counts)):
        assert found.index(dim).tolist() == [index[dim] for index in indices]


@given(walks(), st.data())
@settings(max_examples=200, deadline=None)
def test_blocks(walk: Walk, data: st.DataObject) -> None:
    _, indices = naive(walk)
    level = data.draw(st.integers(0, len(walk.counts)))
    starts = block_starts(indices, level)
    blocks = Nest(walk.counts, walk.last_dim, walk.last_cnt).blocks(level)
    assert [blocks.start(k) for k in range(blocks.count + 2)] == [*starts, len(indices), len(indices)]
    for step in range(len(indices)):
        assert blocks.index(step) == sum(s <= step for s in starts) - 1
        assert blocks.completed(step) == sum(s <= step for s in starts[1:])
    assert blocks.completed(len(indices)) == len(starts)


@given(walks(), st.data())
@settings(max_examples=300, deadline=None)
def test_gates_let_exactly_the_satisfied_blocks_pass(walk: Walk, data: st.DataObject) -> None:
    """Step by step: a step that begins block i waits until counter >= base + i * step, in 16 bits."""
    _, indices = naive(walk)
    level = data.draw(st.integers(0, len(walk.counts)))
    starts = block_starts(indices, level)
    base, step = data.draw(st.integers(-20, 20)), data.draw(st.integers(0, 9))
    offset = data.draw(st.sampled_from([0, 65536, 3 * 65536]))
    counter = data.draw(st.integers(-25, 60))
    position = data.draw(st.integers(0, len(indices) - 1))
    gate = Gate(Wait(TileCounter.AVDATA, base, level, step), Nest(walk.counts, walk.last_dim, walk.last_cnt))
    limit, threshold = gate.limit(position, counter + offset)
    expected = position
    while expected < len(indices) and (expected not in starts or counter >= base + starts.index(expected) * step):
        expected += 1
    assert min(limit, len(indices)) == expected
    if expected < len(indices):
        assert threshold == base + starts.index(expected) * step


def test_signed16() -> None:
    assert [signed16(v) for v in (0, 0x7FFF, 0x8000, 0xFFFF, 0x10000, -1)] == [0, 0x7FFF, -0x8000, -1, 0, -1]


def test_a_transposing_walk_shortens_dimension_1() -> None:
    walk = Walk(0, [10, 1, 100], [2, 3, 2], last_dim=2, last_cnt=0, last_skip=2)
    assert Addresses(walk, "walk", short_dim=1).at(0).tolist() == [0, 10, 1, 11, 2, 12, 100, 110]


def test_a_longer_last_pass_only_moves_discarded_words() -> None:
    walk = Walk(0, [1, 10], [2, 2], last_dim=1, last_cnt=5, last_skip=0)
    assert Addresses(walk, "walk").at(0).tolist() == [0, 1, 10, 11]


def test_what_is_refused() -> None:
    with pytest.raises(RuleViolation, match="budget"):
        Nest((1 << 11, 1 << 10))
    with pytest.raises(UnknownInstruction, match=r"field level value 5: not modelled .*levels 0 to 3"):
        Nest((1, 2, 3)).blocks(5)
    with pytest.raises(UnknownInstruction, match="field last_dim value 4: not modelled"):
        Nest((1, 2, 3), last_dim=4)
    with pytest.raises(RuleViolation, match=r"address -1 is outside 0\.\.9"):
        Addresses(Walk(0, [-1], [2]), "walk").within(10, "rows")


def test_slots_alternate_over_instructions() -> None:
    walk = Addresses(Walk(0, [1, 0], [2, 3], 1, 100), "walk")
    assert walk.toggles == 1
    assert walk.at(0).tolist() == [0, 1, 100, 101, 0, 1]
    assert walk.at(1).tolist() == [100, 101, 0, 1, 100, 101]


def test_every_decoded_walk_of_the_corpus_is_as_long_as_its_rule(corpus: object) -> None:
    """Steps of a shortened nest: prod(N_k, k not in {0, d}) * ((N_d - 1) N_0 + c + 1)."""
    from coral.package.bitstreams import bitstreams_of

    path = next(p for p in sorted((corpus / "vision").glob("deeplab*_edgetpu.tflite")))  # type: ignore[operator]
    checked = 0
    for stream in bitstreams_of(path):
        for _, instruction in isa.decode(stream.data):
            for name in instruction.walks:
                walk = instruction.walk(name)
                if walk.last_dim and walk.last_cnt + 1 <= walk.counts[0]:
                    n, d = np.array(walk.counts), walk.last_dim
                    rest = np.prod([n[k] for k in range(len(n)) if k not in (0, d)])
                    steps = rest * ((n[d] - 1) * n[0] + walk.last_cnt + 1)
                    assert Addresses(walk, "walk").steps == steps
                    checked += 1
    assert checked > 100
