"""A network's inputs from the host and its outputs to it. Source: docs/network.md, sections Input, Output."""

from __future__ import annotations

from dataclasses import dataclass

from coral import isa
from coral.codegen import blocks
from coral.codegen.builder import ALL_SCALAR_UNITS, INPUT_CREDIT, MESH_UNITS, N2W_UNIT, Builder
from coral.codegen.errors import ShapeError
from coral.codegen.machine import (
    ALL_TILES,
    GROUP,
    INPUT_UNIT_BYTES,
    ROW_BYTES,
    ROW_WORDS,
    TILES,
    WORD_BYTES,
    ceil_div,
    mask_of,
    round_up,
)
from coral.codegen.network.places import collects, gathered_tiles
from coral.codegen.network.plan import Plan
from coral.codegen.network.products import merge
from coral.codegen.network.scratch import FIXED_ROW
from coral.isa import ScalarCounter, TileCounter, Wait, Walk
from coral.package.program import Layer, Layout

MAX_OUTFEED = INPUT_UNIT_BYTES << 15
"""Bytes that one outfeed passes on."""


def input_layer(plan: Plan, name: str, batch: int) -> Layer:
    """An input as the host sends it: images one behind the other, padded to whole slots."""
    t = plan.tensors[name]
    rows, columns = plan.host_size(name)
    size = round_up(rows * columns * t.c * images_in(plan), INPUT_UNIT_BYTES)
    return Layer(t.name, size, batch * rows, columns, t.c, t.zero_point, t.scale)


def images_in(plan: Plan) -> int:
    """Images of a call, padding included."""
    return plan.grid.slots * plan.images


@dataclass(frozen=True)
class Band:
    """Bytes ``offset``.. of the host's input that go to the same rows of the tiles of one mask."""

    tiles: int
    offset: int
    size: int
    targets: tuple[tuple[int, Walk], ...]

    @property
    def units(self) -> tuple[int, int]:
        """First staging unit and number of units."""
        first = self.offset // INPUT_UNIT_BYTES
        return first, ceil_div(self.offset + self.size, INPUT_UNIT_BYTES) - first


def bands(plan: Plan, name: str) -> list[Band]:
    """What every row of tiles takes of an input."""
    t, block = plan.tensors[name], plan.blocks[name]
    if plan.vector_input(name):
        size = round_up(t.size, WORD_BYTES)
        target = Walk(plan.own(name) // WORD_BYTES, (1,), (size // WORD_BYTES,))
        return [Band(ALL_TILES, 0, size, ((ALL_TILES, target),))]
    height, width = plan.host_size(name)
    row_bytes, found = width * t.c, []
    rows, whole = plan.halos[name][0], plan.grid.rows == 1
    for slot in range(plan.grid.slots):
        for first in range(0, plan.images, plan.images if whole else 1):
            count = plan.images if whole else 1
            for r in range(plan.grid.rows):
                y0, y1 = max(rows.low[r], 0), min(rows.high[r], t.y)
                if plan.own_input:
                    y0, y1 = rows.split.range(r)
                if y0 >= y1:
                    continue
                offset = ((slot * plan.images + first) * height + y0) * row_bytes
                targets = []
                for c in range(plan.grid.columns):
                    rest = [(block.row // WORD_BYTES, y1 - y0), (block.image // WORD_BYTES, count)]
                    x = plan.splits[name][1].start(c) if plan.own_input else 0
                    address = plan.at(name, (r, c), y0, x) + first * block.image
                    levels = merge([*_row_levels(plan, name, c), *rest])
                    walk = Walk(address // WORD_BYTES, tuple(s for s, _ in levels), tuple(n for _, n in levels))
                    targets.append((1 << plan.grid.tile(slot, r, c), walk))
                tiles = sum(mask for mask, _ in targets)
                found.append(Band(tiles, offset, count * (y1 - y0) * row_bytes, tuple(targets)))
    return found


def _row_levels(plan: Plan, name: str, column: int) -> list[tuple[int, int]]:
    """Where the words of one row of an input from the host go on the tiles of a column.

    With ``own_input`` only a part of the row is wanted. The others are written to the same place or to the next row's:
    strides of 0 or one row for the bits of a part's number, such that the wanted part is what is written there last.
    """
    words = plan.host_size(name)[1] * plan.tensors[name].c // WORD_BYTES
    if not plan.own_input:
        return [(1, words)]
    row, parts = plan.blocks[name].row // WORD_BYTES, plan.grid.columns
    bits = range(parts.bit_length() - 1)
    return [(1, words // parts), *((0 if column >> bit & 1 else row, 2) for bit in bits)]


def receive_inputs(b: Builder, plan: Plan, sizes: dict[str, int]) -> None:
    """Start the host's transfers, one after the other, and bring every tile what its windows need of the inputs.

    ``sizes``: bytes of every input as the host sends it.
    """
    for index, (name, size) in enumerate(sizes.items()):
        if index:
            b.separate()
            b.scalar_fence(idle=ALL_SCALAR_UNITS)
        _receive(b, plan, name, size)


def _receive(b: Builder, plan: Plan, name: str, total_bytes: int) -> None:
    parts = bands(plan, name)
    # Units that several bands send count as sent again: with less credit they stay in the staging buffer, and the
    # signed comparison of the counts does not wrap.
    fed = sum(part.units[1] for part in parts)
    credit = INPUT_CREDIT - max(0, fed - total_bytes // INPUT_UNIT_BYTES)
    if credit < INPUT_CREDIT // 8:
        raise ShapeError(
            f"input {name!r} has {total_bytes} bytes, of which tiles need {fed * INPUT_UNIT_BYTES}, more than "
            f"{(INPUT_CREDIT - INPUT_CREDIT // 8) * INPUT_UNIT_BYTES} of them again"
        )
    b.scalar_fence(ctr_mask=1 << ScalarCounter.AVDATA_POP | 1 << ScalarCounter.AVDATA_INFEED)
    b.handshake()
    b.fence(units=N2W_UNIT)
    b.input_address(name, plan.network.inputs.index(name), credit)
    blocks.pop_input(b, total_bytes)
    b.input_dma(total_bytes)
    if not plan.vector_input(name) and not plan.own_input:
        _border(b, plan, name)
    _unpack(b, parts)
    for band in parts:
        first, units = band.units
        blocks.infeed_input(b, first * INPUT_UNIT_BYTES, units * INPUT_UNIT_BYTES, band.tiles)


def _unpack(b: Builder, parts: list[Band]) -> None:
    """Consumers and unpackers of all bands; tiles with equal fields share an instruction."""
    waiting = list(parts)
    while waiting:
        turn, rest, busy = [], [], 0
        for band in waiting:
            (rest if band.tiles & busy else turn).append(band)
            busy |= band.tiles
        waiting = rest
        unpackers: dict[tuple, int] = {}
        consumers: dict[tuple, int] = {}
        for band in turn:
            skip = band.offset % INPUT_UNIT_BYTES // WORD_BYTES
            packets = ceil_div(band.size + skip * WORD_BYTES, ROW_BYTES)
            arrived = b.count(TileCounter.RING_READ_A, band.tiles) + 1
            free = isa.signed16(b.count(TileCounter.WIDE_TO_NARROW, band.tiles) - ROW_WORDS - skip)
            for mask, walk in band.targets:
                key = (walk, skip, packets, arrived)
                unpackers[key] = unpackers.get(key, 0) | mask
            key = (packets, free)
            consumers[key] = consumers.get(key, 0) | band.tiles
        for (walk, skip, packets, arrived), mask in unpackers.items():
            dropped = {}
            if skip:
                first = walk.addr
                dropped = {"skip_en": 1, "skip_level": b.style.skip_level, "skip_base": first, "skip_cnt": skip - 1}
                dropped["skip_end"] = first + skip - 1
            b.emit(
                isa.W2n,
                tile_mask=mask,
                src=Walk(FIXED_ROW, [1, 0], [1, packets], slot_level=1, slot_stride=1),
                dst=walk,
                sig_dst=0,
                waits=[Wait(TileCounter.RING_READ_A, arrived, level=1)],
                unpack_level=len(walk.counts),
                **dropped,
            )
        for (packets, free), mask in consumers.items():
            b.emit(
                isa.RingRecv0,
                tile_mask=mask,
                dst=Walk(FIXED_ROW, [1, 0], [1, packets], slot_level=1, slot_stride=1),
                sig_dst=1,
                waits=[Wait(TileCounter.WIDE_TO_NARROW, free, level=1, step=ROW_WORDS, side=1)],
            )


def _border(b: Builder, plan: Plan, name: str) -> None:
    """Zero points wherever a window may read, before what there is of the image is written over them."""
    if any(halo.filled(part) for halo in plan.halos[name] for part in range(halo.split.parts)):
        address, size = plan.rooms[name]
        walk = Walk(address // WORD_BYTES, (1,), (size // WORD_BYTES,))
        value = 0x01010101 * plan.border_value(name)
        b.emit(isa.MeshNorth, tile_mask=ALL_TILES, dst=walk, fill_en=1, fill_value=value)
        b.fence(units=MESH_UNITS)


@dataclass(frozen=True)
class Share:
    """What one tile sends of an output: ``size`` bytes, along ``words`` of narrow memory."""

    tile: int
    size: int
    words: Walk


def shares(plan: Plan, name: str, batch: int) -> list[Share]:
    """All tiles' shares of an output, in the order of their tiles: real positions of real images only."""
    t, block, first = plan.tensors[name], plan.blocks[name], plan.own(name) // WORD_BYTES
    if name in plan.spread:
        size = GROUP * plan.spread[name]
        pieces = [(k, min(size, round_up(t.c - k * size, WORD_BYTES))) for k in range(ceil_div(t.c, size))]
        return [Share(k, n, Walk(first, (1,), (n // WORD_BYTES,))) for k, n in pieces]
    rows, columns = plan.splits[name]
    found, words = [], plan.channels(name) // WORD_BYTES
    for slot in range(min(plan.grid.slots, ceil_div(batch, plan.images))):
        for r, c in plan.active(name):
            nest = merge(
                [
                    (1, words),
                    (block.position // WORD_BYTES, columns.real(c)),
                    (block.row // WORD_BYTES, rows.real(r)),
                    (block.image // WORD_BYTES, plan.images),
                ]
            )
            walk = Walk(first, tuple(s for s, _ in nest), tuple(n for _, n in nest))
            found.append(Share(plan.grid.tile(slot, r, c), walk.steps * WORD_BYTES, walk))
    return sorted(found, key=lambda share: share.tile)


def output_layer(plan: Plan, name: str, batch: int) -> Layer:
    """An output in the order in which the tiles send it; images stand one below the other."""
    t, parts = plan.tensors[name], shares(plan, name, batch)
    offsets, total = [0] * TILES, 0
    for share in parts:
        offsets[share.tile] = total
        total += round_up(share.size, INPUT_UNIT_BYTES)
    if name in plan.spread:
        return Layer(name, total, 1, 1, t.c, t.zero_point, t.scale)
    (rows, columns), grid, channels = plan.splits[name], plan.grid, plan.channels(name)
    y_to_tile, y_local = [], []
    for image in range(batch):
        slot, depth = divmod(image, plan.images)
        for y in range(t.y):
            r = y // rows.extent
            y_to_tile.append(grid.tile(slot, r, 0))
            y_local.append(depth * rows.real(r) + y % rows.extent)
    at = [(x // columns.extent, x % columns.extent) for x in range(t.x)]
    layout = Layout(
        tuple(y_to_tile),
        tuple(c for c, _ in at),
        tuple(offsets),
        tuple(x * channels for _, x in at),
        tuple(y_local),
        tuple(columns.real(c) * channels for c, _ in at),
    )
    return Layer(name, total, batch * t.y, t.x, t.c, t.zero_point, t.scale, layout=layout)


def send_output(b: Builder, plan: Plan, name: str, batch: int, index: int) -> None:
    """Output ``index`` to the host: tiles pack their shares and send them one after the other."""
    parts = shares(plan, name, batch)
    b.output_address(name, len(plan.network.inputs) + index)
    same: dict[Walk, list[int]] = {}
    for share in parts:
        same.setdefault(share.words, []).append(share.tile)
    for words, tiles in same.items():
        mask = mask_of(tiles)
        blocks.pack_walk(b, mask, words, sent=b.count(TileCounter.RING_WRITE, mask))
    b.output_dma(sum(round_up(share.size, INPUT_UNIT_BYTES) for share in parts))
    sent: dict[tuple[int, int, int], int] = {}
    for share, turn in zip(parts, b.turns([share.tile for share in parts]), strict=True):
        key = turn, share.size, b.count(TileCounter.NARROW_TO_WIDE, 1 << share.tile)
        sent[key] = sent.get(key, 0) | 1 << share.tile
    for (turn, size, _), tiles in sent.items():
        blocks.ring_send(b, tiles, size, turn=turn)
    size = 0
    for share in parts:
        if size % ROW_BYTES or size + share.size > MAX_OUTFEED:
            blocks.outfeed(b, size)
            size = 0
        size += round_up(share.size, INPUT_UNIT_BYTES)
    blocks.outfeed(b, size)
    b.output_wait()


def senders(plan: Plan, batch: int) -> list[list[int]]:
    """Tiles that send one after the other, for every time that happens."""
    outputs = [[share.tile for share in shares(plan, name, batch)] for name in plan.network.outputs]
    return outputs + [gathered_tiles(plan, stage) for stage in plan.stages if collects(plan, stage)]
