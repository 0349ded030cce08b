"""Which parameters lie where in the wide memories of the 16 tiles. Source: docs/runtime.md, section Placement."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from coral import CoralError

TILES = 16


class PlacementError(CoralError):
    """Parameters that do not even fit an empty chip."""


@dataclass(frozen=True)
class Region:
    """``rows`` 256-byte rows from ``row`` on, the same on ``tiles`` tiles from ``first_tile`` on."""

    first_tile: int
    tiles: int
    row: int
    rows: int

    def overlaps(self, other: Region) -> bool:
        """Whether some row of some tile belongs to both."""
        return (
            self.first_tile < other.first_tile + other.tiles
            and other.first_tile < self.first_tile + self.tiles
            and self.row < other.row + other.rows
            and other.row < self.row + self.rows
        )


@dataclass(frozen=True)
class Change:
    """What making room meant: regions that are gone, regions that lie elsewhere now (and must be loaded again)."""

    region: Region
    evicted: tuple[Hashable, ...] = ()
    moved: tuple[Hashable, ...] = ()


class Placement:
    """Regions by key, below ``limit_rows``, the lowest row that any program writes. Keys are kept in order of use."""

    def __init__(self, limit_rows: int) -> None:
        self.limit_rows = limit_rows
        self.regions: dict[Hashable, Region] = {}

    def use(self, key: Hashable) -> Region | None:
        """The region of ``key``, which becomes the one used last; None if it has none."""
        region = self.regions.pop(key, None)
        if region is not None:
            self.regions[key] = region
        return region

    def place(self, key: Hashable, tiles: int, rows: int) -> Change:
        """A region for a new ``key``: in free space; else everything is packed anew, largest first; else what was not
        used for longest goes, until it fits. PlacementError if it does not fit an empty chip.
        """
        if not 1 <= tiles <= TILES or not 1 <= rows <= self.limit_rows:
            raise PlacementError(
                f"parameters of {rows} rows on {tiles} tiles; a chip has {self.limit_rows} rows on {TILES} tiles"
            )
        region = self._find(tiles, rows, self.regions.values())
        if region is not None:
            self.regions[key] = region
            return Change(region)
        packed = self._pack(key, tiles, rows)
        if packed is not None:
            moved = tuple(k for k, old in self.regions.items() if packed[k] != old)
            self.regions = {k: packed[k] for k in (*self.regions, key)}
            return Change(packed[key], moved=moved)
        evicted = []
        while region is None:
            oldest = next(iter(self.regions))
            del self.regions[oldest]
            evicted.append(oldest)
            region = self._find(tiles, rows, self.regions.values())
        self.regions[key] = region
        return Change(region, evicted=tuple(evicted))

    def _find(self, tiles: int, rows: int, taken: Iterable[Region]) -> Region | None:
        """Lowest free row, then lowest tile."""
        taken = list(taken)
        for row in sorted({0} | {r.row + r.rows for r in taken}):
            if row + rows > self.limit_rows:
                return None
            for first_tile in range(TILES - tiles + 1):
                region = Region(first_tile, tiles, row, rows)
                if not any(region.overlaps(other) for other in taken):
                    return region
        return None

    def _pack(self, key: Hashable, tiles: int, rows: int) -> dict[Hashable, Region] | None:
        sizes = {k: (r.tiles, r.rows) for k, r in self.regions.items()} | {key: (tiles, rows)}
        packed: dict[Hashable, Region] = {}
        for k, (wide, high) in sorted(sizes.items(), key=lambda entry: -entry[1][0] * entry[1][1]):
            region = self._find(wide, high, packed.values())
            if region is None:
                return None
            packed[k] = region
        return packed
