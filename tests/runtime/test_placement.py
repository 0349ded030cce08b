"""Parameters in the tiles' wide memories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral.runtime.placement import Footprint, Placement, PlacementError, Region, Space

LIMIT = 60
SIZES = st.tuples(st.integers(1, 16), st.integers(1, LIMIT), st.integers(LIMIT // 2, LIMIT))


def block(tiles: int, rows: int, floor: int = 100):
    """The same rows on neighbouring tiles, used by programs that write from ``floor`` on."""
    return lambda space: Footprint((space.find(tiles, rows),), floor)


def columns(rows: int, floor: int = 100):
    """Rows on the emptiest tile, and one on every tile, as networks are laid out."""

    def find(space: Space) -> Footprint:
        fill = space.fill()
        top = max(fill) + 1
        return Footprint((Region(0, 16, top - 1, 1), Region(3, 1, top, rows)), floor, fill)

    return find


def occupied(footprints) -> set[tuple[int, int]]:
    regions = [region for footprint in footprints for region in footprint.regions]
    return {(r.first_tile + t, r.row + i) for r in regions for t in range(r.tiles) for i in range(r.rows)}


def regions(placement: Placement) -> dict:
    return {key: footprint.regions[0] for key, footprint in placement.footprints.items()}


@given(st.lists(SIZES, max_size=12), st.data())
def test_footprints_are_disjoint_and_below_every_floor(sizes, data):
    placement = Placement(LIMIT)
    for key, (tiles, rows, floor) in enumerate(sizes):
        before = dict(placement.footprints)
        find = block(tiles, rows, floor) if key % 3 else columns(rows, floor)
        alone = find(Space((), LIMIT))
        if alone.end > min(LIMIT, alone.floor):
            continue
        change = placement.place(key, find)
        after = placement.footprints
        assert after[key] == change.footprint
        assert after.keys() == before.keys() - set(change.evicted) | {key}
        assert {k for k in before if k in after and before[k] != after[k]} == set(change.moved)
        assert not (change.moved and change.evicted)
        assert len(occupied(after.values())) == sum(f.size[1] for f in after.values())
        assert max(f.end for f in after.values()) <= min([LIMIT, *(f.floor for f in after.values())])
        used = data.draw(st.sampled_from(sorted(after)))
        placement.use(used)
        lowered = data.draw(st.integers(after[used].end, LIMIT))
        ends = {k: f.end for k, f in after.items()}
        gone = placement.lower(used, lowered)
        assert set(gone) == {k for k, end in ends.items() if end > lowered and k != used}


def test_lowest_row_then_lowest_tile():
    placement = Placement(100)
    assert placement.place("a", block(4, 30)).footprint.regions == (Region(0, 4, 0, 30),)
    assert placement.place("b", block(13, 10)).footprint.regions == (Region(0, 13, 30, 10),)
    assert placement.place("c", block(12, 10)).footprint.regions == (Region(4, 12, 0, 10),)
    assert placement.place("d", block(3, 5)).footprint.regions == (Region(4, 3, 10, 5),)


def test_holes_are_found():
    placement = Placement(100)
    for key in "abc":
        placement.place(key, block(16, 30))
    placement.footprints.pop("b")
    assert placement.place("d", block(16, 30)).footprint.end == 60


def test_repack_before_eviction():
    placement = Placement(100)
    placement.place("a", block(16, 40))
    placement.place("b", block(16, 20))
    placement.footprints.pop("a")
    change = placement.place("c", block(16, 80))
    assert (change.moved, change.evicted, change.footprint.end) == (("b",), (), 80)
    assert regions(placement)["b"].row == 80


def test_least_recently_used_goes_first():
    placement = Placement(100)
    for key in "abc":
        placement.place(key, block(16, 30))
    found = placement.use("a")
    assert found is not None
    assert found.end == 30
    change = placement.place("d", block(16, 40))
    assert change.evicted == ("b", "c")
    assert list(placement.footprints) == ["a", "d"]
    assert placement.use("b") is None


def test_largest_first_when_packing():
    placement = Placement(100)
    placement.place("small", block(1, 10))
    placement.place("large", block(16, 60))
    change = placement.place("new", block(15, 35))
    assert (change.moved, change.evicted) == (("small", "large"), ())
    assert regions(placement) == {
        "small": Region(15, 1, 60, 10),
        "large": Region(0, 16, 0, 60),
        "new": Region(0, 15, 60, 35),
    }


def test_a_low_floor_keeps_others_away():
    """A program that writes from row 50 on: what ends above moves below, or goes, least recently used first."""
    placement = Placement(100)
    placement.place("a", block(16, 30))
    placement.place("b", block(8, 15))
    change = placement.place("c", block(16, 20, floor=50))
    assert (change.moved, change.evicted) == ((), ("a",))
    assert placement.place("d", block(8, 60)).evicted == ("b", "c")


def test_what_a_lowered_floor_overwrites_is_gone():
    placement = Placement(100)
    for key in "abc":
        placement.place(key, block(16, 20))
    assert placement.lower("a", 40) == ("c",)
    assert placement.lower("a", 60) == ()
    assert placement.place("d", block(16, 20)).evicted == ("a",)


@pytest.mark.parametrize(("tiles", "rows"), [(17, 1), (1, LIMIT + 1)])
def test_impossible_sizes_evict_nothing(tiles, rows):
    placement = Placement(LIMIT)
    placement.place("here", block(16, LIMIT))
    with pytest.raises(PlacementError, match=f"{rows} rows on {tiles} tiles; a chip has 60 rows on 16 tiles"):
        placement.place("a", block(tiles, rows))
    assert list(placement.footprints) == ["here"]


def test_a_program_that_overwrites_its_own_parameters():
    with pytest.raises(PlacementError, match="writes from row 20 on, they end at 30"):
        Placement(LIMIT).place("a", block(16, 30, floor=20))
