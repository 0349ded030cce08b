"""Regions of the tiles' wide memories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral.runtime.placement import Placement, PlacementError, Region

LIMIT = 60
SIZES = st.tuples(st.integers(1, 16), st.integers(1, LIMIT))


def occupied(regions) -> set[tuple[int, int]]:
    return {(r.first_tile + t, r.row + i) for r in regions for t in range(r.tiles) for i in range(r.rows)}


@given(st.lists(SIZES, max_size=12), st.data())
def test_regions_are_disjoint_and_inside(sizes, data):
    placement = Placement(LIMIT)
    for key, (tiles, rows) in enumerate(sizes):
        before = dict(placement.regions)
        change = placement.place(key, tiles, rows)
        after = placement.regions
        assert (change.region.tiles, change.region.rows) == (tiles, rows)
        assert after.keys() == before.keys() - set(change.evicted) | {key}
        assert {k for k in before if k in after and before[k] != after[k]} == set(change.moved)
        assert not (change.moved and change.evicted)
        assert len(occupied(after.values())) == sum(r.tiles * r.rows for r in after.values())
        for r in after.values():
            assert r.first_tile + r.tiles <= 16
            assert r.row + r.rows <= LIMIT
        if after:
            placement.use(data.draw(st.sampled_from(sorted(after))))


def test_lowest_row_then_lowest_tile():
    placement = Placement(100)
    assert placement.place("a", 4, 30).region == Region(0, 4, 0, 30)
    assert placement.place("b", 13, 10).region == Region(0, 13, 30, 10)
    assert placement.place("c", 12, 10).region == Region(4, 12, 0, 10)
    assert placement.place("d", 3, 5).region == Region(4, 3, 10, 5)


def test_holes_are_found():
    placement = Placement(100)
    for key in "abc":
        placement.place(key, 16, 30)
    placement.regions.pop("b")
    assert placement.place("d", 16, 30).region.row == 30


def test_repack_before_eviction():
    placement = Placement(100)
    placement.place("a", 16, 40)
    placement.place("b", 16, 20)
    placement.regions.pop("a")
    change = placement.place("c", 16, 80)
    assert (change.moved, change.evicted, change.region.row) == (("b",), (), 0)
    assert placement.regions["b"].row == 80


def test_least_recently_used_goes_first():
    placement = Placement(100)
    for key in "abc":
        placement.place(key, 16, 30)
    assert placement.use("a") == Region(0, 16, 0, 30)
    change = placement.place("d", 16, 40)
    assert change.evicted == ("b", "c")
    assert list(placement.regions) == ["a", "d"]
    assert placement.use("b") is None


def test_largest_first_when_packing():
    placement = Placement(100)
    placement.place("small", 1, 10)
    placement.place("large", 16, 60)
    change = placement.place("new", 15, 35)
    assert (change.moved, change.evicted) == (("small", "large"), ())
    assert placement.regions == {"small": Region(15, 1, 60, 10), "large": Region(0, 16, 0, 60), "new": change.region}


@pytest.mark.parametrize(("tiles", "rows"), [(17, 1), (0, 1), (1, LIMIT + 1), (1, 0)])
def test_impossible_sizes(tiles, rows):
    with pytest.raises(PlacementError, match=f"{rows} rows on {tiles} tiles; a chip has 60 rows on 16 tiles"):
        Placement(LIMIT).place("a", tiles, rows)
