"""Where everything lies: tiling, narrow memory, blocks of layers. Source: docs/network.md, sections Tiling, Memory.

A plan is made before anything is emitted; every limit is checked here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import gcd, lcm

from coral.codegen.errors import ShapeError
from coral.codegen.machine import ALL_TILES, GROUP, TILES, WORD_BYTES, ceil_div, mask_of, round_up
from coral.codegen.network.graph import (
    Add,
    Concatenate,
    Conv,
    Dense,
    Depthwise,
    Interleave,
    L2Normalise,
    MaxPool,
    Multiply,
    Network,
    Resize,
    Slice,
    Softmax,
    Stage,
    Tensor,
)
from coral.codegen.network.lower import lowered
from coral.codegen.network.rewrite import with_copies, with_dense_layers, with_padded_inputs
from coral.codegen.network.steps import BLOB_ROWS, MAX_BLOCK, chunk_shape, depthwise_rows, depthwise_steps, step_cost
from coral.codegen.network.tiling import Doubling, Grid, Halo, Reach, Split, before_doubled

NARROW_BYTES = 192 * 1024
MAX_PACK = 8


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


class Plan:
    """Geometry of a network on a grid of tiles, ``images`` per tile one behind the other.

    ``own_input``: tiles keep their own positions of the input only, and exchange halos like those of any other tensor;
    otherwise they keep all rows that they need at full width.
    """

    def __init__(self, network: Network, grid: Grid, images: int, *, own_input: bool = False) -> None:
        self.own_input = own_input
        network = with_dense_layers(with_copies(lowered(network)), shared=grid.slots == 1 and images == 1)
        self.network, self.grid, self.images = with_padded_inputs(network, always=own_input), grid, images
        self.tensors, self.stages = self.network.tensors, self.network.stages
        self.roots = self._roots()
        self.lattices = {
            name: (s.step, phase, s.output)
            for s in self.stages
            if isinstance(s, Interleave)
            for name, phase in zip(s.inputs, s.phases, strict=True)
        }
        """Parts of interleaved tensors -> (distance of their positions in the whole, position of the first, whole)."""
        self.spread = self._spread()
        self.blocking = {s.output: self._block(s) for s in self.stages if type(s) is Depthwise}
        self.splits = {name: self._split(tensor) for name, tensor in self.tensors.items()}
        self.splits |= {s.output: self.splits[self.roots[s.output][0]] for s in self.stages if isinstance(s, Slice)}
        self.packing = self._packing()
        self.halos = {name: self._halo(name) for name in {root for root, _ in self.roots.values()}}
        self.blocks, self.narrow_bytes = self._allocate()

    # what the tensors look like

    def _roots(self) -> dict[str, tuple[str, int]]:
        """Tensor -> (tensor whose memory it shares, byte offset of its channels)."""
        roots = {name: (name, 0) for name in self.tensors}
        for stage in reversed(self.stages):
            if isinstance(stage, Concatenate):
                root, offset = roots[stage.output]
                for name in stage.inputs:
                    part = self.tensors[name]
                    if roots[name] != (name, 0) or name in self.network.inputs:
                        raise ShapeError(f"{name!r} belongs to two concatenations or is an input; it must be copied")
                    roots[name] = (root, offset)
                    offset += round_up(part.c, WORD_BYTES)
            elif isinstance(stage, Interleave):
                roots |= dict.fromkeys(stage.inputs, roots[stage.output])
        for stage in self.stages:
            if isinstance(stage, Slice):
                if roots[stage.output][0] != stage.output or stage.begin % WORD_BYTES:
                    raise ShapeError(
                        f"{stage.output!r}: channels from {stage.begin} on, in a concatenation: copy it first"
                    )
                root, offset = roots[stage.inputs[0]]
                roots[stage.output] = (root, offset + stage.begin)
        return roots

    def _spread(self) -> dict[str, int]:
        """Vectors cut over all tiles -> groups of 64 channels per tile."""
        spread: dict[str, int] = {}
        for stage in self.stages:
            if isinstance(stage, Dense):
                spread[stage.output] = ceil_div(ceil_div(self.tensors[stage.output].c, GROUP), TILES)
            elif stage.inputs[0] in spread and not isinstance(stage, Softmax | L2Normalise):
                spread[stage.output] = spread[stage.inputs[0]]
        return spread

    def _block(self, stage: Stage) -> tuple[int, int]:
        """Outputs per block of a depthwise layer: the fewest steps, if only a pointwise layer reads the result."""
        y = self.tensors[stage.output]
        readers = list(self.network.readers(y.name))
        if y.c != self.tensors[stage.inputs[0]].c:
            return (1, 1)
        if y.name in self.network.outputs or not all(type(r) is Conv and r.window.pointwise for r in readers):
            return (1, 1)
        if stage.window.dilation != (1, 1):
            return (1, 1)
        extents = ceil_div(y.y, self.grid.rows), ceil_div(y.x, self.grid.columns)
        choices = [
            (by, bx)
            for by in range(1, MAX_BLOCK + 1)
            for bx in range(1, MAX_BLOCK // by + 1)
            if extents[0] % by == 0 and extents[1] % bx == 0 and depthwise_rows(y.c, (by, bx), stage) <= BLOB_ROWS
        ]

        def cost(block: tuple[int, int]) -> float:
            outputs = block[0] * block[1]
            return depthwise_steps(block, stage) * step_cost(WORD_BYTES * outputs) / outputs

        return min(choices, key=lambda b: (cost(b), b)) if choices else (1, 1)

    def _split(self, tensor: Tensor) -> tuple[Split, Split]:
        if tensor.name in self.lattices:
            step, _, whole = self.lattices[tensor.name]
            extents = [split.extent // s for split, s in zip(self._split(self.tensors[whole]), step, strict=True)]
            return Split(tensor.y, self.grid.rows, extents[0]), Split(tensor.x, self.grid.columns, extents[1])
        root = self.roots[tensor.name][0]
        steps = [step for step, _, whole in self.lattices.values() if self.roots[whole][0] == root]
        down, across = lcm(*(y for y, _ in steps)), lcm(*(x for _, x in steps))
        rows = Split.of(tensor.y, self.grid.rows, down)
        packed = next((s for s in self.stages if s.output == tensor.name and self.is_packed(s)), None)
        multiple = self.pack_of(packed) if packed is not None else 1
        columns = Split.of(tensor.x, self.grid.columns, lcm(multiple, across))
        if tensor.name in self.network.inputs and not (self.own_input and tensor.c % WORD_BYTES == 0):
            readers = [s for s in self.network.readers(tensor.name) if not isinstance(s, Dense)]
            if readers:
                outputs = self._split(self.tensors[readers[0].output])
                (sy, sx) = readers[0].window.stride
                rows = replace(rows, extent=outputs[0].extent * sy)
                columns = replace(columns, extent=outputs[1].extent * sx)
        return rows, columns

    def is_packed(self, stage: Stage) -> bool:
        """Whether a stage reads the input's rows as bytes, because positions are no whole words."""
        return stage.inputs[0] in self.network.inputs and self.tensors[stage.inputs[0]].c % WORD_BYTES != 0

    def pack_of(self, stage: Stage) -> int:
        """Neighbouring outputs that a convolution computes at once, as columns of one group: the fewest steps."""
        x, y = self.tensors[stage.inputs[0]], self.tensors[stage.output]
        channels = round_up(y.c, WORD_BYTES)
        if self.is_packed(stage):
            step = stage.window.stride[1] * x.c
            least = WORD_BYTES // gcd(step, WORD_BYTES)
            choices = range(least, MAX_PACK + 1, least)
        else:
            extent = self.splits[y.name][1].extent
            most = GROUP // channels if stage.window.dilation[1] == 1 else 1
            choices = [b for b in range(1, max(most, 1) + 1) if extent % b == 0]

        def cost(pack: int) -> float:
            blocks = Split.of(y.x, self.grid.columns, pack).extent // pack
            full, rest = divmod(pack * channels, GROUP)
            return blocks * self.packed_words(stage, pack) * (full * step_cost(GROUP) + step_cost(rest))

        return min(choices, key=lambda pack: (cost(pack), pack))

    def packed_words(self, stage: Stage, pack: int) -> int:
        """Words of an input row that a block of ``pack`` outputs reads."""
        c, w = self.tensors[stage.inputs[0]].c, stage.window
        columns = (pack - 1) * w.stride[1] + w.extent[1]
        if not self.is_packed(stage):
            return columns * ceil_div(c, WORD_BYTES)
        return ceil_div(self.margin_bytes(stage) + columns * c, WORD_BYTES)

    def margin_bytes(self, stage: Stage) -> int:
        """Bytes of the input that a block reads in front of its first window, to begin at a whole word."""
        return -stage.window.pad[1] * self.tensors[stage.inputs[0]].c % WORD_BYTES

    def _packing(self) -> dict[str, int]:
        """Output -> neighbouring outputs per block, of the convolutions where that is more than one or necessary."""
        packing = {}
        for stage in self.stages:
            name = stage.output
            if type(stage) is Conv and not (set(stage.inputs) & set(self.blocking)) and name not in self.spread:
                pack = self.pack_of(stage)
                if self.is_packed(stage) or (pack > 1 and not self._beside_a_part(name)):
                    packing[name] = pack
        return packing

    def _beside_a_part(self, name: str) -> bool:
        """Whether a tensor's positions may be further apart than its channels need."""
        readers = [s for s in self.network.readers(name) if isinstance(s, Add | Multiply)]
        return any(self.roots[other] != (other, 0) for other in (name, *(n for s in readers for n in s.inputs)))

    def _halo(self, root: str) -> tuple[Halo, Halo]:
        """What windows need of a tensor and of the parts that share its memory."""
        axes = []
        for axis in (0, 1):
            reaches = []
            for stage in self.stages:
                if isinstance(stage, Concatenate | Slice | Dense | Interleave):
                    continue
                if any(self.roots[name][0] == root for name in stage.inputs):
                    reaches.append(self.reach(stage, axis))
            halo = Halo.of_input if root in self.network.inputs and not self.own_input else Halo.of
            axes.append(halo(self.splits[root][axis], reaches))
        return axes[0], axes[1]

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
        for index, stage in enumerate(self.stages):
            if collects(self, stage):
                name, source = gathered(stage), stage.inputs[0]
                size = gathered_bytes(self, source) * len(gathered_tiles(self, source))
                live[name], shapes[name] = (index, index), Block(0, size, size, size)
            if isinstance(stage, Softmax | L2Normalise):
                rows, columns = self.splits[stage.output]
                words = self.channels(stage.output) // WORD_BYTES
                wide, high = chunk_shape(stage, rows.extent, columns.extent, words)
                size = 2 * WORD_BYTES * wide * high * (2 * words + 1)
                live[scratchpad(stage)], shapes[scratchpad(stage)] = (
                    (index, index),
                    Block(0, size, size, size // self.images),
                )
            if isinstance(stage, Multiply):
                rows, columns = self.splits[stage.output]
                words = rows.extent * columns.extent * self.channels(stage.output) // WORD_BYTES * self.images
                size = WORD_BYTES * WORD_BYTES * words
                live[factors(stage)], shapes[factors(stage)] = (index, index), Block(0, size, size, size)
        places: dict[str, int] = {}
        for root in sorted(live, key=lambda r: live[r][0]):
            size = self._size(root, shapes[root])
            taken = sorted(
                (places[other], places[other] + self._size(other, shapes[other]))
                for other in places
                if live[other][0] <= live[root][1] and live[root][0] <= live[other][1]
            )
            address = 0
            for start, end in taken:
                if address + size <= start:
                    break
                address = max(address, end)
            places[root] = address
        peak = max(places[r] + self._size(r, shapes[r]) for r in places)
        if peak > NARROW_BYTES:
            worst = max(places, key=lambda r: places[r] + self._size(r, shapes[r]))
            raise ShapeError(
                f"network {self.network.name!r} needs {peak} bytes of narrow memory per tile at tensor {worst!r} "
                f"({self.images} images on {self.grid}), the limit is {NARROW_BYTES}"
            )
        blocks = {}
        for name, (root, offset) in self.roots.items():
            if root in places:
                shape = shapes[root]
                block = replace(shape, address=shape.address + places[root] + offset)
                if name in self.lattices:
                    (down, across), (y, x), _ = self.lattices[name]
                    first = block.address + y * block.row + x * block.position
                    block = Block(first, across * block.position, down * block.row, block.image)
                blocks[name] = block
        blocks |= {name: replace(shapes[name], address=places[name]) for name in places if name not in self.roots}
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
        position = t.c if root in self.network.inputs else round_up(t.c, WORD_BYTES)
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
        block, (rows, columns) = self.blocks[name], self.splits[name if name in self.lattices else self.roots[name][0]]
        return block.address + (y - rows.start(part[0])) * block.row + (x - columns.start(part[1])) * block.position

    def own(self, name: str) -> int:
        """Byte address of the first own position, the same on every tile."""
        return self.blocks[name].address

    def active(self, name: str) -> list[tuple[int, int]]:
        """Blocks of the grid that hold at least one real position of a tensor."""
        rows, columns = self.splits[name]
        return [(r, c) for r, c in self.grid.blocks() if rows.real(r) and columns.real(c)]

    def mask(self, parts: list[tuple[int, int]]) -> int:
        """The tiles of some blocks of the grid."""
        if len(parts) == self.grid.rows * self.grid.columns:
            return ALL_TILES
        return sum(self.grid.mask(*part) for part in parts)

    def spread_tiles(self, name: str) -> int:
        """Tiles that hold a part of a vector."""
        return mask_of(range(ceil_div(self.tensors[name].c, GROUP * self.spread[name])))

    def spread_words(self, name: str) -> dict[int, int]:
        """Words of a vector over all tiles -> the tiles that hold as many."""
        size, c, found = GROUP * self.spread[name], self.tensors[name].c, {}
        for t in range(ceil_div(c, size)):
            words = ceil_div(min(size, c - t * size), WORD_BYTES)
            found[words] = found.get(words, 0) | 1 << t
        return found

    def window_address(self, name: str, stage: Stage, part: tuple[int, int]) -> int:
        """Where the first window of a block's outputs begins in an input."""
        (rows, columns), w = self.splits[stage.output], stage.window
        if isinstance(stage, Resize):
            first = (before_doubled(split.start(p)) for split, p in zip((rows, columns), part, strict=True))
            return self.at(name, part, *first)
        y = rows.start(part[0]) * w.stride[0] - w.pad[0]
        x = columns.start(part[1]) * w.stride[1] - w.pad[1]
        return self.at(name, part, y, x) - (self.margin_bytes(stage) if self.is_packed(stage) else 0)

    def vector_input(self, name: str) -> bool:
        """Whether every tile gets a whole input, because only dense layers over all tiles read it."""
        readers = list(self.network.readers(name)) if name in self.network.inputs else []
        return bool(readers) and all(isinstance(s, Dense) and s.output in self.spread for s in readers)

    def reach(self, stage: Stage, axis: int) -> Reach:
        """The windows of a stage along an axis."""
        w = stage.window
        if isinstance(stage, Resize):
            return Doubling(1, 1, 0, self.splits[stage.output][axis])
        return Reach(w.extent[axis], w.stride[axis], w.pad[axis], self.splits[stage.output][axis])

    def needs_exchange(self, stage: Stage, name: str) -> bool:
        """Whether a stage reads positions of an inner tensor that its own tiles did not compute."""
        root = self.roots[name][0]
        if (root in self.network.inputs and not self.own_input) or root in self.spread or stage.output in self.spread:
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
            and any(self.reach(s, axis).leaves(self.splits[root][axis].size) for axis in (0, 1))
        }
        if maxima == {True, False}:
            raise ShapeError(f"{root!r} is read by padded maximum pools and by other padded windows; it must be copied")
        return 0 if maxima == {True} else self.tensors[root].zero_point

    def channels(self, name: str) -> int:
        """Bytes of a position's channels, padded to whole words."""
        return round_up(self.tensors[name].c, WORD_BYTES)


def gathered(stage: Stage) -> str:
    """Name of the place where a dense layer over all tiles finds its whole input."""
    return f"{stage.output}:gathered"


def factors(stage: Stage) -> str:
    """Name of the place where the second factor of a product is spread."""
    return f"{stage.output}:factors"


def gathered_bytes(plan: Plan, name: str) -> int:
    """Bytes that every tile sends when a tensor is collected on all tiles."""
    if name in plan.spread:
        return GROUP * plan.spread[name]
    rows, columns = plan.splits[name]
    return rows.extent * columns.extent * plan.channels(name)


def gathered_tiles(plan: Plan, name: str) -> list[int]:
    """Tiles that send, in the order of their pieces."""
    if name in plan.spread:
        return list(range(ceil_div(plan.tensors[name].c, GROUP * plan.spread[name])))
    return [plan.grid.tile(0, *part) for part in plan.active(name)]


def collects(plan: Plan, stage: Stage) -> bool:
    """Whether a stage needs all tiles' parts of its input on every tile that works."""
    if isinstance(stage, Dense):
        return stage.output in plan.spread and stage.inputs[0] not in plan.network.inputs
    return isinstance(stage, Softmax | L2Normalise) and stage.inputs[0] in plan.spread


def scratchpad(stage: Stage) -> str:
    """Name of the place for what a normalising stage makes of some positions."""
    return f"{stage.output}:scratch"
