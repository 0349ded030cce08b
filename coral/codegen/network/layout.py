"""What the tensors of a network look like on a grid of tiles: blocks of layers, splits, halos.

Source: docs/network.md, sections Tiling, Windows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, lcm, prod

from coral.codegen.errors import ShapeError
from coral.codegen.machine import ALL_TILES, GROUP, TILES, WORD_BYTES, ceil_div, mask_of, round_up
from coral.codegen.network.bands import Group, banded
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
    Stack,
    Stage,
    Tensor,
)
from coral.codegen.network.lower import lowered
from coral.codegen.network.places import shared, summed
from coral.codegen.network.rewrite import with_copies, with_dense_layers, with_padded_inputs
from coral.codegen.network.steps import BLOB_ROWS, MAX_BLOCK, depthwise_cycles, depthwise_rows, step_cost
from coral.codegen.network.tiling import Doubling, Grid, Halo, Reach, Region, Split

MAX_PACK = 8
MAX_LOOP = 1 << 14
POOL_ROWS = 1280
"""Wide rows that the windows of a maximum pool may take."""


class TooLarge(ShapeError):
    """Narrow memory is too small for ``tensors``, what lies there at the worst time, largest first; or a single one has
    more positions than a stage can compute at a time (``alone``).
    """

    def __init__(self, message: str, tensors: list[str], *, alone: bool = False) -> None:
        super().__init__(message)
        self.tensors, self.alone = tensors, alone


@dataclass(frozen=True)
class Form:
    """How a network lies on a grid of tiles, ``images`` per tile one behind the other.

    ``own_input``: tiles keep their own positions of the input only, and exchange halos like those of any other tensor;
    otherwise they keep all rows that they need at full width. ``groups`` are computed band by band, the channels of
    ``region`` are divided among tiles.
    """

    grid: Grid
    images: int
    own_input: bool = False
    groups: tuple[Group, ...] = ()
    region: Region | None = None


def rewritten(network: Network, form: Form) -> Network:
    """The network as a plan of that form computes it, but for bands."""
    network = with_copies(with_dense_layers(lowered(network), shared=form.grid.slots == 1 and form.images == 1))
    return with_padded_inputs(network, always=form.own_input)


class Layout:
    """Splits and halos of all tensors of a network in a form, without addresses."""

    def __init__(self, network: Network, form: Form) -> None:
        self.source, self.form = network, form
        self.grid, self.images, self.own_input = form.grid, form.images, form.own_input
        self.network, self.bands = banded(rewritten(network, form), form.grid, form.groups)
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
        self.summed = summed(self)
        self.packing = self._packing()
        self._check_positions()
        self.halos = {name: self._halo(name) for name in {root for root, _ in self.roots.values()}}

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
                    offset += 0 if isinstance(stage, Stack) else round_up(part.c, WORD_BYTES)
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

    def _block(self, stage: Depthwise) -> tuple[int, int]:
        """Outputs per block of a depthwise layer: the fewest cycles, if only a pointwise layer reads the result."""
        y = self.tensors[stage.output]
        readers = list(self.network.readers(y.name))
        if y.c != self.tensors[stage.inputs[0]].c:
            return (1, 1)
        if y.name in self.network.outputs or not all(type(r) is Conv and r.window.pointwise for r in readers):
            return (1, 1)
        if stage.window.dilation != (1, 1):
            return (1, 1)
        rows, columns = self._split(y)
        if any(self._split(self.tensors[r.output]) != (rows, columns) for r in readers):
            return (1, 1)
        if any(self.grid_of(r.output) != self.grid_of(y.name) for r in readers):
            return (1, 1)
        extents = rows.extent, columns.extent
        choices = [
            (by, bx)
            for by in range(1, MAX_BLOCK + 1)
            for bx in range(1, MAX_BLOCK // by + 1)
            if extents[0] % by == 0 and extents[1] % bx == 0 and depthwise_rows(y.c, (by, bx), stage) <= BLOB_ROWS
        ]

        positions, shares = extents[0] * extents[1] * self.images, self.shares(y.name)

        def cost(block: tuple[int, int]) -> float:
            return depthwise_cycles(y.c, positions, shares, block, stage)

        return min(choices, key=lambda b: (cost(b), b)) if choices else (1, 1)

    def _split(self, tensor: Tensor) -> tuple[Split, Split]:
        if tensor.name in self.bands:
            return self.bands[tensor.name]
        if tensor.name in self.lattices:
            step, _, whole = self.lattices[tensor.name]
            extents = [split.extent // s for split, s in zip(self._split(self.tensors[whole]), step, strict=True)]
            return Split(tensor.y, self.grid.rows, extents[0]), Split(tensor.x, self.grid.columns, extents[1])
        root, grid = self.roots[tensor.name][0], self.grid_of(tensor.name)
        steps = [step for step, _, whole in self.lattices.values() if self.roots[whole][0] == root]
        down, across = lcm(*(y for y, _ in steps)), lcm(*(x for _, x in steps))
        rows = Split.of(tensor.y, grid.rows, down)
        packed = next((s for s in self.stages if s.output == tensor.name and self.is_packed(s)), None)
        multiple = self.pack_of(packed) if packed is not None else 1
        columns = Split.of(tensor.x, grid.columns, lcm(multiple, across))
        if tensor.name in self.network.inputs and not (self.own_input and tensor.c % WORD_BYTES == 0):
            readers = [s for s in self.network.readers(tensor.name) if not isinstance(s, Dense)]
            sent = any(self.roots[name][0] == tensor.name for name in self.network.outputs)
            if readers and not sent:  # what is sent again has to be somebody's own in full
                outputs = self._split(self.tensors[readers[0].output])
                (sy, sx) = readers[0].window.stride
                rows = replace(rows, extent=outputs[0].step * sy)
                columns = replace(columns, extent=outputs[1].step * sx)
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
            blocked = set(stage.inputs) & set(self.blocking)
            if type(stage) is Conv and not blocked and name not in self.spread and self.shares(name) == 1:
                pack = self.pack_of(stage)
                if self.is_packed(stage) or (pack > 1 and not self._beside_a_part(name)):
                    packing[name] = pack
        return packing

    def _check_positions(self) -> None:
        for stage in self.stages:
            if isinstance(stage, Stack):
                of_bands, whole = (
                    tuple(split.step for split in self.splits[n]) for n in (stage.inputs[0], stage.output)
                )
                if of_bands != whole or stage.output in self.lattices:
                    raise ShapeError(f"{stage.output!r} is cut for other tensors, it cannot be computed in bands")
            if isinstance(stage, Concatenate | Slice | Interleave) or stage.output in self.spread:
                continue
            rows, columns = self.splits[stage.output]
            block = prod(self.blocking.get(stage.output, (1, self.packing.get(stage.output, 1))))
            count = rows.extent * columns.extent * self.images // block if isinstance(stage, Conv) else 0
            if isinstance(stage, MaxPool):
                (y, x), (sy, sx) = stage.window.extent, stage.window.stride
                quads = ceil_div((columns.extent - 1) * sx + x, WORD_BYTES)
                groups = ceil_div(self.channels(stage.output), GROUP)
                count = ((rows.extent - 1) * sy + y) * quads * groups * MAX_LOOP // POOL_ROWS
            if count > MAX_LOOP:
                raise TooLarge(f"{stage.output!r}: too many positions for one step", [stage.output], alone=True)

    def _beside_a_part(self, name: str) -> bool:
        """Whether a tensor's positions may be further apart than its channels need."""
        readers = [s for s in self.network.readers(name) if isinstance(s, Add | Multiply)]
        operands = (name, *(n for s in readers for n in s.inputs))
        return name in self.lattices or any(self.tensors[self.roots[n][0]].c != self.tensors[n].c for n in operands)

    def _halo(self, root: str) -> tuple[Halo, Halo]:
        """What windows need of a tensor and of the parts that share its memory."""
        axes = []
        for axis in (0, 1):
            reaches = []
            for stage in self.stages:
                if isinstance(stage, Concatenate | Slice | Dense | Interleave) or stage.output in self.summed:
                    continue
                if shared(self, stage):
                    continue
                if any(self.roots[name][0] == root for name in stage.inputs):
                    reaches.append(self.reach(stage, axis))
            if any(self.roots[name][0] == root for name in self.network.outputs):
                reaches.append(Reach(1, 1, 0, self.splits[root][axis]))
            halo = Halo.of_input if root in self.network.inputs and not self.own_input else Halo.of
            axes.append(halo(self.splits[root][axis], reaches))
        return axes[0], axes[1]

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

    def vector_input(self, name: str) -> bool:
        """Whether every tile gets a whole input, because only dense layers over all tiles read it."""
        readers = list(self.network.readers(name)) if name in self.network.inputs else []
        return bool(readers) and all(isinstance(s, Dense) and s.output in self.spread for s in readers)

    def active(self, name: str) -> list[tuple[int, int]]:
        """Blocks of the grid that hold at least one real position of a tensor."""
        rows, columns = self.splits[name]
        return [(r, c) for r, c in self.grid_of(name).blocks() if rows.real(r) and columns.real(c)]

    def grid_of(self, name: str) -> Grid:
        """The grid that a tensor is cut for."""
        region = self.form.region
        return region.grid if region is not None and name in region.names else self.grid

    def shares(self, name: str) -> int:
        """Among how many tiles the channels of every position are divided."""
        region = self.form.region
        return region.grid.slots if region is not None and name in region.names else 1

    def share_tiles(self, name: str, share: int) -> int:
        """The tiles that hold a share of the channels; all of them where channels are not divided."""
        grid = self.grid_of(name)
        return mask_of(grid.tile(share, *part) for part in grid.blocks()) if self.shares(name) > 1 else ALL_TILES

    def working(self, name: str) -> int:
        """The tiles that hold at least one real position of a tensor."""
        parts, grid = self.active(name), self.grid_of(name)
        return ALL_TILES if len(parts) == grid.rows * grid.columns else sum(grid.mask(*part) for part in parts)

    def reach(self, stage: Stage, axis: int) -> Reach:
        """The windows of a stage along an axis."""
        w = stage.window
        if isinstance(stage, Resize):
            return Doubling(1, 1, 0, self.splits[stage.output][axis])
        return Reach(w.extent[axis], w.stride[axis], w.pad[axis], self.splits[stage.output][axis])

    def channels(self, name: str) -> int:
        """Bytes of a position's channels on a tile, padded to whole words."""
        return round_up(self.tensors[name].c // self.shares(name), WORD_BYTES)
