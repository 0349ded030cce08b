"""Which tile owns which positions, and what windows need of the neighbours. Source: docs/network.md, section Tiling."""

from __future__ import annotations

from dataclasses import dataclass

from coral.codegen.machine import COLUMNS, TILES, ceil_div, mask_of

SIDES = (1, 2, 4)


@dataclass(frozen=True)
class Grid:
    """An image is cut into ``rows`` x ``columns`` blocks; the mesh has room for ``slots`` images side by side."""

    rows: int = COLUMNS
    columns: int = COLUMNS

    @property
    def slots(self) -> int:
        """Images that the mesh holds at a time."""
        return TILES // (self.rows * self.columns)

    def tile(self, slot: int, row: int, column: int) -> int:
        """Tile of a block of the image in a slot."""
        across = COLUMNS // self.columns
        return COLUMNS * (slot // across * self.rows + row) + slot % across * self.columns + column

    def mask(self, row: int, column: int) -> int:
        """The tiles of that block, of all slots."""
        return mask_of(self.tile(slot, row, column) for slot in range(self.slots))

    def blocks(self) -> list[tuple[int, int]]:
        """(row, column) of all blocks."""
        return [(r, c) for r in range(self.rows) for c in range(self.columns)]


@dataclass(frozen=True)
class Region:
    """Tensors of one image whose channels are divided among the slots of a grid, as if each held another image."""

    grid: Grid
    names: frozenset[str]


@dataclass(frozen=True)
class Split:
    """``size`` positions in ``parts`` equal pieces of ``extent``; positions from ``size`` on are phantoms.

    Bands of a tensor: pieces begin at ``offset`` and are ``pitch`` apart (0: ``extent``); positions before the first
    one are phantoms, too.
    """

    size: int
    parts: int
    extent: int
    pitch: int = 0
    offset: int = 0

    @classmethod
    def of(cls, size: int, parts: int, multiple: int = 1) -> Split:
        """The smallest extent that is a multiple of ``multiple``."""
        return cls(size, parts, multiple * ceil_div(ceil_div(size, parts), multiple))

    def start(self, part: int) -> int:
        """First position of a part."""
        return part * self.step + self.offset

    @property
    def step(self) -> int:
        """Positions from a part's first to the next one's."""
        return self.pitch or self.extent

    def range(self, part: int) -> tuple[int, int]:
        """First position of a part, and behind the last."""
        return self.start(part), self.start(part) + self.extent

    def real(self, part: int) -> int:
        """Positions of a part that are no phantoms."""
        start, end = self.range(part)
        return max(min(end, self.size) - max(start, 0), 0)


@dataclass(frozen=True)
class Reach:
    """Windows of one stage along one axis of its input: those of part p begin at ``p * pitch - pad``."""

    kernel: int
    stride: int
    pad: int
    outputs: Split

    def leaves(self, size: int) -> bool:
        """Whether windows of real outputs read outside ``size`` positions."""
        return self.pad > 0 or (self.outputs.size - 1) * self.stride + self.kernel - self.pad > size

    def crosses(self, split: Split) -> bool:
        """Whether windows read what another part owns."""
        own = {p: split.range(p) for p in range(split.parts)}
        return any(s < own[p][0] or e > own[p][1] for p, (s, e) in self.ranges().items())

    def ranges(self) -> dict[int, tuple[int, int]]:
        """Part -> first position that its windows read, and behind the last; parts of phantoms alone read nothing."""
        length = (self.outputs.extent - 1) * self.stride + self.kernel
        starts = {
            p: self.outputs.start(p) * self.stride - self.pad for p in range(self.outputs.parts) if self.outputs.real(p)
        }
        return {p: (start, start + length) for p, start in starts.items()}


@dataclass(frozen=True)
class Doubling(Reach):
    """What outputs of a twofold resize read: result o lies at (2 o - 1) / 4, between two positions."""

    def leaves(self, size: int) -> bool:
        """Always: the first result lies before the first position."""
        return size > 0

    def ranges(self) -> dict[int, tuple[int, int]]:
        """As ``Reach.ranges``."""
        parts = [p for p in range(self.outputs.parts) if self.outputs.real(p)]
        ends = {p: self.outputs.range(p) for p in parts}
        return {p: (before_doubled(a), before_doubled(b - 1) + 2) for p, (a, b) in ends.items()}


def before_doubled(output: int) -> int:
    """The position at or before the place of a result of a twofold resize."""
    return (2 * output - 1) // 4


@dataclass(frozen=True)
class Halo:
    """What every part holds of one axis of a tensor: own positions, and around them what windows need.

    ``low[p]``, ``high[p]``: range that part p must hold (with what it passes on), ``before``: positions that all parts
    have room for in front of their own, ``total``: room in all.
    """

    split: Split
    low: tuple[int, ...]
    high: tuple[int, ...]
    fills: bool

    @classmethod
    def of(cls, split: Split, reaches: list[Reach]) -> Halo:
        """The halo for all windows on a tensor."""
        parts = range(split.parts)
        own = [split.range(p) for p in parts]
        outside = [r for r in reaches if r.leaves(split.size) or r.crosses(split)]
        low = [min([own[p][0], *(r.ranges()[p][0] for r in outside if p in r.ranges())]) for p in parts]
        high = [max([own[p][1], *(r.ranges()[p][1] for r in outside if p in r.ranges())]) for p in parts]
        for p in parts[1:]:
            if (needed := min(high[p - 1], split.size)) > high[p]:
                high[p] = needed
        for p in reversed(parts[:-1]):
            if (needed := max(low[p + 1], 0)) < low[p]:
                low[p] = needed
        return cls(split, tuple(low), tuple(high), bool(outside))

    @classmethod
    def of_input(cls, split: Split, reaches: list[Reach]) -> Halo:
        """What parts take of the host's data: their windows and nothing else; a single part takes all."""
        parts = range(split.parts)
        ranges = {p: [r.ranges()[p] for r in reaches if p in r.ranges()] for p in parts}
        low = [min((a for a, _ in ranges[p]), default=split.start(p)) for p in parts]
        high = [max((b for _, b in ranges[p]), default=split.start(p)) for p in parts]
        if split.parts == 1:
            low, high = [min(low[0], 0)], [max(high[0], split.size)]
        return cls(split, tuple(low), tuple(high), True)

    @property
    def before(self) -> int:
        """Room in front of a part's own positions."""
        return max(self.split.start(p) - low for p, low in enumerate(self.low))

    @property
    def total(self) -> int:
        """Room in all."""
        return self.before + max(high - self.split.start(p) for p, high in enumerate(self.high))

    def received(self, part: int, hop: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Ranges (from the next part, from the previous one) that a part takes in the ``hop``-th exchange, 1..."""
        start, extent = self.split.start(part), self.split.extent
        after = (start + hop * extent, min(start + (hop + 1) * extent, self.high[part], self.split.size))
        before = (max(start - hop * extent, self.low[part], 0), min(start - (hop - 1) * extent, self.split.size))
        return after, before

    @property
    def hops(self) -> int:
        """Exchanges until everybody has what it needs."""
        hop = 0
        while any(a < b for p in range(self.split.parts) for a, b in self.received(p, hop + 1)):
            hop += 1
        return hop

    def filled(self, part: int) -> list[tuple[int, int]]:
        """Ranges outside the tensor that windows of a part read."""
        if not self.fills:
            return []
        ranges = [(self.low[part], 0), (max(self.split.size, self.low[part]), self.high[part])]
        return [(a, b) for a, b in ranges if a < b]
