"""Where everything lies: tiling, narrow memory, blocks of layers. Source: docs/network.md, sections Tiling, Memory.

A plan is made before anything is emitted; every limit is checked here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from coral.codegen.errors import ShapeError
from coral.codegen.machine import GROUP, WORD_BYTES, ceil_div, round_up
from coral.codegen.network.graph import (
    Add,
    Concatenate,
    Dense,
    Interleave,
    MaxPool,
    Multiply,
    Network,
    Resize,
    Slice,
    Stage,
)
from coral.codegen.network.layout import Form, Layout, TooLarge
from coral.codegen.network.places import gathered, shared, temporaries
from coral.codegen.network.tiling import before_doubled

NARROW_BYTES = 192 * 1024


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


def first_fit(sizes: dict[str, int], live: dict[str, tuple[int, int]], order: list[str]) -> dict[str, int]:
    """Addresses such that what lives at the same time lies apart, in that order each as low as possible."""
    places: dict[str, int] = {}
    for name in order:
        taken = sorted((places[n], places[n] + sizes[n]) for n in places if _overlap(live[n], live[name]))
        address = 0
        for start, end in taken:
            if address + sizes[name] <= start:
                break
            address = max(address, end)
        places[name] = address
    return places


def _end(places: dict[str, int], sizes: dict[str, int]) -> int:
    return max(address + sizes[name] for name, address in places.items())


@dataclass(frozen=True)
class Block:
    """Bytes of a tensor on every tile: address of the first own position, strides of positions, rows and images.

    ``inner`` = (rows, columns) != (1, 1): blocks of positions, [block][channel word][position in block][4 channels].
    """

    address: int
    position: int
    row: int
    image: int
    inner: tuple[int, int] = (1, 1)


class Plan(Layout):
    """Geometry of a network in a form. ShapeError, with the numbers, if there is no room."""

    def __init__(self, network: Network, form: Form) -> None:
        super().__init__(network, form)
        self.blocks, self.narrow_bytes = self._allocate()

    # narrow memory

    def _allocate(self) -> tuple[dict[str, Block], int]:
        """First fit by time over the intervals from a tensor's first writer to its last reader."""
        live: dict[str, tuple[int, int]] = dict.fromkeys(self.network.inputs, (-1, -1))
        for index, stage in enumerate(self.stages):
            for name in (*stage.inputs, stage.output):
                root = self.roots[name][0]
                first, last = live.get(root, (index, index))
                live[root] = (first, max(last, index))
        for name in self.network.outputs:
            root = self.roots[name][0]
            live[root] = (live[root][0], len(self.stages))
        shapes = {root: self._shape(root) for root in live}
        self._unify(shapes)
        for name, (index, size) in temporaries(self).items():
            block = Block(0, size, size, ceil_div(size, self.images))
            live[name], shapes[name] = (index, index), block
        sizes = {root: self._size(root, shapes[root]) for root in live}
        places = first_fit(sizes, live, sorted(live, key=lambda r: live[r][0]))
        if _end(places, sizes) > NARROW_BYTES:
            largest_first = first_fit(sizes, live, sorted(live, key=lambda r: (-sizes[r], live[r][0])))
            places = min(places, largest_first, key=lambda p: _end(p, sizes))
        peak = _end(places, sizes)
        if peak > NARROW_BYTES:
            worst = max(places, key=lambda r: places[r] + sizes[r])
            raise TooLarge(
                f"network {self.network.name!r} needs {peak} bytes of narrow memory per tile at tensor {worst!r} "
                f"({self.images} images on {self.grid}), the limit is {NARROW_BYTES}",
                sorted((r for r in places if _overlap(live[r], live[worst])), key=lambda r: -sizes[r]),
            )
        blocks = {}
        for name, (root, offset) in self.roots.items():
            if root in places:
                shape, own, whole = shapes[root], self.splits[name], self.splits[root]
                if name not in self.lattices:
                    offset += (own[0].start(0) - whole[0].start(0)) * shape.row
                    offset += (own[1].start(0) - whole[1].start(0)) * shape.position
                block = replace(shape, address=shape.address + places[root] + offset)
                if name in self.lattices:
                    (down, across), (y, x), _ = self.lattices[name]
                    first = block.address + y * block.row + x * block.position
                    block = Block(first, across * block.position, down * block.row, block.image)
                blocks[name] = block
        blocks |= {name: replace(shapes[name], address=places[name]) for name in places if name not in self.roots}
        self.rooms = {name: (places[name], sizes[name]) for name in places}
        return blocks, peak

    def _shape(self, root: str) -> Block:
        """Strides of a tensor's block, and its first own position's offset from the block's first byte."""
        t = self.tensors[root]
        if root in self.spread:
            size = GROUP * self.spread[root]
            return Block(0, size, size, size)
        rows, columns = self.halos[root]
        if self.vector_input(root):
            size = round_up(t.size, WORD_BYTES)
            return Block(0, size, size, size)
        if root in self.network.inputs and not self.own_input:
            return self._band(root)
        inner = self.blocking.get(root, (1, 1))
        position = t.c if root in self.network.inputs else self.channels(root)
        row = position * columns.total
        first = rows.before * row + columns.before * position
        return Block(first, position, row, row * rows.total, inner)

    def _band(self, root: str) -> Block:
        """An input: rows at full width, shifted so that every tile finds its own columns at the same address."""
        t = self.tensors[root]
        rows, columns = self.halos[root]
        slack = self.slack_bytes(root)
        row = self.host_size(root)[1] * t.c + slack
        shift = (self.grid.columns - 1) * columns.split.extent * t.c
        return Block(slack + shift + rows.before * row, t.c, row, row * rows.total)

    def host_size(self, name: str) -> tuple[int, int]:
        """Rows and columns of an input as the host sends it: a row is whole words; what is too much are zero points."""
        t = self.tensors[name]
        if self.vector_input(name):
            return t.y, t.x
        if self.own_input:
            rows, columns = self.splits[t.name]
            return rows.extent * rows.parts, columns.extent * columns.parts
        return t.y, round_up(t.x, WORD_BYTES // gcd(t.c, WORD_BYTES))

    def slack_bytes(self, name: str) -> int:
        """Bytes behind every row of an input that stand for the columns on both sides of the image."""
        t, columns = self.tensors[name], self.halos[name][1]
        if not columns.fills:
            return 0
        outside = max(0, -min(columns.low), max(columns.high) - t.x)
        return round_up(outside * t.c, WORD_BYTES)

    def _size(self, root: str, shape: Block) -> int:
        size = self.images * shape.image
        if root in self.network.inputs and self.own_input:
            size += 2 * shape.row
        elif root in self.network.inputs and not self.vector_input(root):
            t = self.tensors[root]
            shift = (self.grid.columns - 1) * self.halos[root][1].split.extent * t.c
            size += shift + 2 * self.slack_bytes(root) + WORD_BYTES
        if any(isinstance(s, MaxPool) and self.roots[s.inputs[0]][0] == root for s in self.stages):
            size += 3 * shape.position
        return round_up(size, 16)

    def _unify(self, shapes: dict[str, Block]) -> None:
        """Operands of one ADD or MUL get equal strides."""
        pairs = [s for s in self.stages if isinstance(s, Add | Multiply) and s.output not in self.spread]
        for _, stage in product(pairs, pairs):
            names = [self.roots[name][0] for name in stage.inputs]
            if set(self.network.inputs) & set(names) and not self.own_input:
                raise ShapeError(f"{stage.output!r}: an input is an operand; copy it first")
            position = max(shapes[name].position for name in names)
            row = max(max(shapes[name].row, position * self.halos[name][1].total) for name in names)
            image = max(max(shapes[name].image, row * self.halos[name][0].total) for name in names)
            for name in names:
                rows, columns = self.halos[name]
                first = rows.before * row + columns.before * position
                shapes[name] = Block(first, position, row, image)

    # addresses

    def at(self, name: str, part: tuple[int, int], y: int, x: int) -> int:
        """Byte address, on the tiles of block ``part``, of a position of the whole tensor."""
        block, (rows, columns) = self.blocks[name], self.splits[name]
        return block.address + (y - rows.start(part[0])) * block.row + (x - columns.start(part[1])) * block.position

    def own(self, name: str) -> int:
        """Byte address of the first own position, the same on every tile."""
        return self.blocks[name].address

    def window_address(self, name: str, stage: Stage, part: tuple[int, int]) -> int:
        """Where the first window of a block's outputs begins in an input."""
        (rows, columns), w = self.splits[stage.output], stage.window
        if shared(self, stage):
            first = self.own(gathered(stage))
            if self.shares(name) > 1:
                return first
            (_, across), parts = self.splits[name], len({c for _, c in self.active(name)})
            pitch = across.extent * parts
            return first + (rows.start(part[0]) * pitch + columns.start(part[1])) * self.channels(name)
        if isinstance(stage, Resize):
            first = (before_doubled(split.start(p)) for split, p in zip((rows, columns), part, strict=True))
            return self.at(name, part, *first)
        y = rows.start(part[0]) * w.stride[0] - w.pad[0]
        x = columns.start(part[1]) * w.stride[1] - w.pad[1]
        return self.at(name, part, y, x) - (self.margin_bytes(stage) if self.is_packed(stage) else 0)

    def needs_exchange(self, stage: Stage, name: str) -> bool:
        """Whether a stage reads positions of an inner tensor that its own tiles did not compute."""
        root = self.roots[name][0]
        if (root in self.network.inputs and not self.own_input) or root in self.spread or stage.output in self.spread:
            return False
        if stage.output in self.summed or shared(self, stage):
            return False
        return any(
            (r := self.reach(stage, axis)).leaves(self.splits[root][axis].size) or r.crosses(self.splits[root][axis])
            for axis in (0, 1)
        )

    def border_value(self, root: str) -> int:
        """What windows find outside a tensor."""
        readers = [s for s in self.stages if any(self.roots[name][0] == root for name in s.inputs)]
        maxima = {
            isinstance(s, MaxPool)
            for s in readers
            if not isinstance(s, Concatenate | Slice | Dense | Interleave)
            and not shared(self, s)
            and any(self.reach(s, axis).leaves(self.splits[root][axis].size) for axis in (0, 1))
        }
        if maxima == {True, False}:
            raise ShapeError(f"{root!r} is read by padded maximum pools and by other padded windows; it must be copied")
        return 0 if maxima == {True} else self.tensors[root].zero_point
