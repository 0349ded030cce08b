"""Halo exchange over the mesh, and maximum pools. Source: docs/network.md, sections Windows, Products."""

from __future__ import annotations

from math import prod

from coral import isa
from coral.codegen.builder import MESH_UNITS, N2W_UNIT, Builder
from coral.codegen.machine import GROUP, ROW_UNITS, WORD_BYTES
from coral.codegen.network.emit import levels, maxima, output_stage, placed
from coral.codegen.network.graph import MaxPool
from coral.codegen.network.plan import Plan
from coral.codegen.network.products import Level, merge
from coral.codegen.network.scratch import FIXED_ROW, pool_shape
from coral.isa import Walk

Box = tuple[tuple[int, int], tuple[int, int]]
"""Rows and columns of the whole tensor, ends excluded."""


class Exchange:
    """The moves of one step of an exchange: per tile and direction at most what one instruction holds."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan, self.name, self.grid = plan, name, plan.grid_of(name)
        self.halves: dict[tuple[type[isa.Instruction], tuple[int, int]], list[Walk | None]] = {}
        self.fills: dict[tuple[type[isa.Instruction], Walk], int] = {}

    def move(self, mesh: type[isa.Instruction], source: tuple[int, int], target: tuple[int, int], box: Box) -> None:
        """Positions of ``box`` from one block of the grid to its neighbour."""
        self._half(mesh, source)[0] = self._walk(source, box)
        self._half(mesh, target)[1] = self._walk(target, box)

    def fill(self, mesh: type[isa.Instruction], part: tuple[int, int], box: Box) -> None:
        """Zero points to positions outside the tensor."""
        key = (mesh, self._walk(part, box))
        self.fills[key] = self.fills.get(key, 0) | self.grid.mask(*part)

    def _half(self, mesh: type[isa.Instruction], part: tuple[int, int]) -> list[Walk | None]:
        return self.halves.setdefault((mesh, part), [None, None])

    def _walk(self, part: tuple[int, int], box: Box) -> Walk:
        plan, block = self.plan, self.plan.blocks[self.name]
        (y0, y1), (x0, x1) = box
        nest: list[Level] = [
            (1, plan.channels(self.name) // WORD_BYTES),
            (block.position // WORD_BYTES, x1 - x0),
            (block.row // WORD_BYTES, y1 - y0),
            (block.image // WORD_BYTES, plan.images),
        ]
        merged = merge(nest)
        address = plan.at(self.name, part, y0, x0) // WORD_BYTES
        return Walk(address, tuple(s for s, _ in merged), tuple(n for _, n in merged))

    def emit(self, b: Builder, value: int) -> bool:
        """All moves, equal ones in one instruction; whether there were any."""
        shared: dict[tuple, int] = {}
        for (mesh, part), (source, target) in self.halves.items():
            key = (mesh, source, target)
            shared[key] = shared.get(key, 0) | self.grid.mask(*part)
        for (mesh, source, target), tiles in shared.items():
            fields: dict = {} if source is None else {"src": source}
            if target is not None:
                fields["dst"] = target
            else:
                rider = next((key for key, mask in self.fills.items() if key[0] is mesh and mask == tiles), None)
                if rider is not None:
                    del self.fills[rider]
                    fields |= {"dst": rider[1], "fill_en": 1, "fill_value": 0x01010101 * value}
            b.emit(mesh, tile_mask=tiles, **fields)
        for (mesh, target), tiles in self.fills.items():
            b.emit(mesh, tile_mask=tiles, dst=target, fill_en=1, fill_value=0x01010101 * value)
        return bool(shared or self.fills)


def exchange(b: Builder, plan: Plan, name: str, value: int) -> None:
    """Give every tile the rows and columns around its own that windows read; ``value`` outside the tensor."""
    rows, columns = plan.halos[name]
    grid = plan.grid_of(name)

    for hop in range(1, max(rows.hops, 1) + 1):
        step = Exchange(plan, name)
        for r, c in grid.blocks():
            after, before = rows.received(r, hop)
            if after[0] < after[1]:
                step.move(isa.MeshNorth, (r + 1, c), (r, c), (after, columns.split.range(c)))
            if before[0] < before[1]:
                step.move(isa.MeshSouth, (r - 1, c), (r, c), (before, columns.split.range(c)))
            for box in rows.filled(r) if hop == 1 else []:
                step.fill(isa.MeshSouth if box[0] < 0 else isa.MeshNorth, (r, c), (box, columns.split.range(c)))
        if step.emit(b, value):
            b.fence(units=MESH_UNITS)
    for hop in range(1, max(columns.hops, 1) + 1):
        step = Exchange(plan, name)
        for r, c in grid.blocks():
            top = rows.split.start(r) - rows.before
            every = (top, top + rows.total)
            after, before = columns.received(c, hop)
            if after[0] < after[1]:
                step.move(isa.MeshWest, (r, c + 1), (r, c), (every, after))
            if before[0] < before[1]:
                step.move(isa.MeshEast, (r, c - 1), (r, c), (every, before))
            for box in columns.filled(c) if hop == 1 else []:
                step.fill(isa.MeshEast if box[0] < 0 else isa.MeshWest, (r, c), (every, box))
        if step.emit(b, value):
            b.fence(units=MESH_UNITS)


def maximum(b: Builder, plan: Plan, stage: MaxPool) -> None:
    """Windows transposed into wide memory, four positions a row; then the maximum of 64 channels at a time."""
    (name,) = stage.inputs
    a, o = plan.blocks[name], plan.blocks[stage.output]
    (rows, columns), (kh, kw), (sy, sx) = plan.splits[stage.output], stage.window.kernel, stage.window.stride
    height, quads, groups = pool_shape(plan, stage)
    dy, dx = stage.window.dilation
    first = FIXED_ROW - height * quads * groups
    words = plan.channels(name) // WORD_BYTES
    width = min(words, GROUP // WORD_BYTES)
    last = words - width * (groups - 1)
    for image in range(plan.images):
        b.drain()
        for address, tiles in placed(plan, stage, name).items():
            strides = [a.position // WORD_BYTES, 1, a.position, a.row // WORD_BYTES, width]
            shortened = {"last_dim": 4, "last_cnt": last - 1, "last_skip": width - last} if last != width else {}
            b.emit(
                isa.N2w,
                tile_mask=tiles,
                src=Walk(
                    (address + image * a.image) // WORD_BYTES,
                    strides,
                    [WORD_BYTES, width, quads, height, groups],
                    **shortened,
                ),
                dst=Walk(first, [1], [height * quads * groups]),
                sig_dst=1,
                transpose=1,
                pack_level=2,
            )
        b.fence(units=N2W_UNIT)
        pitch = ROW_UNITS * quads
        inner = [kw, kh]
        outer: list[Level] = [(sx, columns.extent), (sy * pitch, rows.extent)]
        places = merge([(o.position, columns.extent), (o.row, rows.extent)])
        count = prod(n for _, n in outer)
        loops = [prod(inner), count, groups]
        short = {"last_dim": 1 + len(places), "last_cnt": last - 1} if last != width else {}
        out = Walk(
            plan.own(stage.output) + image * o.image,
            [WORD_BYTES, *(s for s, _ in places), WORD_BYTES * width],
            [width, *(n for _, n in places), groups],
            **short,
        )
        windows = [(dx, kw), (dy * pitch, kh), *outer, (pitch * height, groups)]
        par = levels(ROW_UNITS * first, windows, f"pool {stage.output!r}")
        output = {"acc_offset": -plan.tensors[stage.output].zero_point, **output_stage(plan, stage)}
        maxima(b, plan.working(stage.output), loops, out, par, (width, last), **output)
