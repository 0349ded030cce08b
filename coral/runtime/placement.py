"""Which parameters lie where in the wide memories of the 16 tiles. Source: docs/runtime.md, section Placement."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from coral.codegen.errors import ShapeError
from coral.codegen.machine import TILES
from coral.runtime.errors import PlacementError


@dataclass(frozen=True)
class Region:
    """``rows`` 256-byte rows from ``row`` on, the same on ``tiles`` tiles from ``first_tile`` on."""

    first_tile: int
    tiles: int
    row: int
    rows: int

    @property
    def end(self) -> int:
        """Row behind the last."""
        return self.row + self.rows

    def overlaps(self, other: Region) -> bool:
        """Whether some row of some tile belongs to both."""
        return (
            self.first_tile < other.first_tile + other.tiles
            and other.first_tile < self.first_tile + self.tiles
            and self.row < other.end
            and other.row < self.end
        )


@dataclass(frozen=True)
class Footprint:
    """Where parameters lie. ``floor``: lowest row that programs using them write, on every tile. ``place``: what the
    generator needs to know to make the same again."""

    regions: tuple[Region, ...]
    floor: int
    place: Any = None

    @property
    def end(self) -> int:
        """Row behind the highest."""
        return max((region.end for region in self.regions), default=0)

    @property
    def size(self) -> tuple[int, int]:
        """(tiles of the widest region, rows times tiles): what is hardest to place comes first."""
        return max((r.tiles for r in self.regions), default=0), sum(r.tiles * r.rows for r in self.regions)


@dataclass(frozen=True)
class Space:
    """What is free: everything below row ``limit`` but the regions in ``taken``."""

    taken: tuple[Region, ...]
    limit: int

    def fill(self) -> tuple[int, ...]:
        """For every tile the row behind the highest that is taken."""
        ends = [[r.end for r in self.taken if r.first_tile <= t < r.first_tile + r.tiles] for t in range(TILES)]
        return tuple(max(rows, default=0) for rows in ends)

    def find(self, tiles: int, rows: int) -> Region:
        """A free region: lowest row, then lowest tile. PlacementError if there is none."""
        for row in sorted({0} | {region.end for region in self.taken}):
            for first_tile in range(TILES - tiles + 1):
                region = Region(first_tile, tiles, row, rows)
                if region.end <= self.limit and not any(region.overlaps(other) for other in self.taken):
                    return region
        raise PlacementError(
            f"parameters of {rows} rows on {tiles} tiles; a chip has {self.limit} rows on {TILES} tiles"
        )


HOPELESS = 64
"""Sets of parameters that are known not to fit together."""
Find = Callable[[Space], Footprint]
"""Where parameters would go in a space; raises ShapeError if they do not fit."""


@dataclass(frozen=True)
class Change:
    """What making room meant: parameters that are gone, and those that lie elsewhere (and must be loaded again)."""

    footprint: Footprint
    evicted: tuple[Hashable, ...] = ()
    moved: tuple[Hashable, ...] = ()


class Placement:
    """Footprints by key, in order of use. No parameters end above ``limit_rows`` or the floor of any other."""

    def __init__(self, limit_rows: int) -> None:
        self.limit_rows = limit_rows
        self.footprints: dict[Hashable, Footprint] = {}
        self._find: dict[Hashable, Find] = {}
        self._hopeless: set[frozenset[tuple[Hashable, int]]] = set()

    def use(self, key: Hashable) -> Footprint | None:
        """The footprint of ``key``, which becomes the one used last; None if it has none."""
        footprint = self.footprints.pop(key, None)
        if footprint is not None:
            self.footprints[key] = footprint
        return footprint

    def place(self, key: Hashable, find: Find) -> Change:
        """A footprint for a new ``key``: in free space; else everything is packed anew, largest first; else what was
        not used for longest goes, until it fits. What ``find`` raises if it does not fit an empty chip.
        """
        before = dict(self.footprints)
        try:
            footprint = self._fit(find, before.values())
        except ShapeError:
            alone = self._fit(find, ())
            packed = self._pack(key, find, alone)
            if packed is not None:
                self._find[key] = find
                self.footprints = {k: packed[k] for k in (*before, key)}
                return Change(packed[key], moved=tuple(k for k in before if packed[k] != before[k]))
            footprint = self._evict_until(find, alone)
        self.footprints[key], self._find[key] = footprint, find
        return Change(footprint, evicted=tuple(k for k in before if k not in self.footprints))

    def lower(self, key: Hashable, floor: int) -> tuple[Hashable, ...]:
        """A program with the parameters of ``key`` writes from row ``floor`` on: what ends above is gone, its keys are
        returned."""
        footprint = self.footprints[key]
        if floor < footprint.floor:
            self.footprints[key] = replace(footprint, floor=floor)
        gone = tuple(k for k, other in self.footprints.items() if other.end > floor and k != key)
        for k in gone:
            self._drop(k)
        return gone

    def _drop(self, key: Hashable) -> None:
        del self.footprints[key], self._find[key]

    def _fit(self, find: Find, others: Iterable[Footprint], floor: int | None = None) -> Footprint:
        """A footprint beside others; ``floor``: what a program with these parameters is known to write from on."""
        others = list(others)
        limit = min([self.limit_rows, *(other.floor for other in others)])
        found = find(Space(tuple(region for other in others for region in other.regions), limit))
        found = replace(found, floor=min(found.floor, floor or found.floor))
        if found.end > limit:
            raise PlacementError(f"parameters end at row {found.end}; a chip has {limit} rows on {TILES} tiles")
        for who, footprint in [("they", found), *(("others", other) for other in others)]:
            if footprint.end > found.floor:
                raise PlacementError(
                    f"a program with these parameters writes from row {found.floor} on, {who} end at {footprint.end}"
                )
        return found

    def _evict_until(self, find: Find, alone: Footprint) -> Footprint:
        while self.footprints:
            self._drop(next(iter(self.footprints)))
            if self._may_fit(alone):
                with suppress(ShapeError):
                    return self._fit(find, self.footprints.values())
        return alone

    def _may_fit(self, new: Footprint) -> bool:
        """Whether there are enough rows for all; saves generators most of the attempts that are bound to fail."""
        together = [new, *self.footprints.values()]
        limit = min([self.limit_rows, *(footprint.floor for footprint in together)])
        return sum(footprint.size[1] for footprint in together) <= limit * TILES

    def _pack(self, key: Hashable, find: Find, alone: Footprint) -> dict[Hashable, Footprint] | None:
        """All footprints on an empty chip, the new one included; None if they do not fit."""
        known = frozenset((k, f.floor) for k, f in self.footprints.items()) | {(key, alone.floor)}
        if not self._may_fit(alone) or known in self._hopeless:
            return None
        sizes = {k: f.size for k, f in self.footprints.items()} | {key: alone.size}
        floors = {k: f.floor for k, f in self.footprints.items()}
        packed: dict[Hashable, Footprint] = {}
        for k in sorted(sizes, key=lambda k: sizes[k], reverse=True):
            try:
                packed[k] = self._fit(self._find.get(k, find), packed.values(), floors.get(k))
            except ShapeError:
                if len(self._hopeless) >= HOPELESS:
                    self._hopeless.clear()
                self._hopeless.add(known)
                return None
        return packed
