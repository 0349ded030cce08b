"""What comes from the host and goes to it: a token, keys and values, results. Source: docs/transformer.md, Frame."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coral import isa
from coral.codegen import blocks
from coral.codegen.builder import Builder
from coral.codegen.errors import ShapeError
from coral.codegen.machine import (
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
from coral.codegen.transformer.emit import Emitter, walk
from coral.codegen.transformer.graph import ONE_COLUMNS, ZERO
from coral.codegen.transformer.model import Cache
from coral.codegen.transformer.plan import INPUT_FIFO_ROW, Plan
from coral.isa import ScalarCounter, TileCounter, Wait, Walk

Codes = NDArray[np.uint8]
MAX_COUNT = 0x7FFF
Send = tuple[int, Walk]
"""A tile and the words that it sends."""


def token_rows(plan: Plan) -> int:
    """Rows of 256 bytes in which rotation and input vector come."""
    return plan.g.head_size // WORD_BYTES + plan.output_tiles * plan.output_packets


def stream_bytes(plan: Plan, positions: int) -> int:
    """Bytes of the keys (or values) of one set of caches."""
    return plan.local_layers * positions * plan.kv_heads * plan.g.head_size


def pack_token(plan: Plan, x: Codes, position: int) -> bytes:
    """Rotation and input vector, uint8 [dim], as the program takes them."""
    g, rows = plan.g, np.zeros((token_rows(plan), ROW_BYTES), np.uint8)
    turn = g.rotation(position).reshape(g.head_size, -1, WORD_BYTES).swapaxes(0, 1)
    count = len(turn)
    rows[:count, : WORD_BYTES * g.head_size] = turn.reshape(count, -1)
    slices = rows[count:].reshape(plan.output_tiles, -1)
    for piece, first in zip(slices, range(0, g.dim, plan.outputs), strict=True):
        own = x[first : first + plan.outputs]
        piece[: len(own)] = own
    return rows.tobytes()


def pack_cache(plan: Plan, cache: Cache, positions: int) -> bytes:
    """Keys of every set of caches, then values, of the first ``positions``."""
    parts = []
    for codes in (cache.keys, cache.values):
        for first, layer in plan.kv_tiles:
            where = (slice(layer, layer + plan.local_layers), slice(positions), slice(first, first + plan.kv_heads))
            parts.append(codes[where].tobytes())
    return b"".join(parts)


def begin_input(b: Builder, size: int) -> None:
    """Start the host's transfer."""
    b.scalar_fence(ctr_mask=1 << ScalarCounter.AVDATA_POP | 1 << ScalarCounter.AVDATA_INFEED)
    b.handshake()
    b.input_address("x")
    blocks.pop_input(b, size)
    b.input_dma(size)


def receive_token(e: Emitter) -> None:
    """Rotation to its rows, the input vector to the tiles of the first layer."""
    b, p = e.b, e.plan
    tiles = p.head_mask | p.output_mask
    count = token_rows(p)
    first = p.layouts[0]
    sizes = [s.count for s in first.outputs]
    b.emit(isa.RingRecv0, tile_mask=tiles, dst=Walk(p.rotation, [1], [count]), sig_dst=0)
    blocks.infeed_input(b, 0, count * ROW_BYTES, tiles)
    turn = p.g.head_size // WORD_BYTES
    e.unpack(mask_of(s.tile for s in first.heads), sizes, p.x, earlier=turn)
    if p.spread:
        for i, share in enumerate(first.outputs):
            e.unpack(1 << share.tile, [share.count], p.x_share, i * p.output_packets, turn)
    b.reset()


def receive_cache(b: Builder, plan: Plan, positions: int, end: int, offset: int) -> None:
    """Keys and values of the first ``positions`` to their tiles, from byte ``offset`` of the input on; 128 behind them,
    up to position ``end``; ones before every value."""
    g, layers, tiles = plan.g, plan.local_layers, plan.head_mask
    words, channels = plan.k_bytes // WORD_BYTES, g.head_size // WORD_BYTES
    keys, values = (a // WORD_BYTES for a in (plan.keys, plan.values))
    k_pitch, v_pitch = plan.k_pitch // WORD_BYTES, plan.v_pitch // WORD_BYTES
    slot, width = plan.v_bytes // WORD_BYTES, (g.head_size + ONE_COLUMNS) // WORD_BYTES
    zeros = 0x01010101 * ZERO
    ones = zeros + 0x01010101
    k_end, v_end = round_up(end, GROUP), round_up(end, WORD_BYTES)
    fills = [
        (walk(keys + words * positions, [(1, words * (k_end - positions)), (k_pitch, layers)]), zeros),
        (walk(values + slot * positions, [(1, slot * (v_end - positions)), (v_pitch, layers)]), zeros),
        (walk(values, [(width, plan.kv_heads * positions), (v_pitch, layers)]), ones),
    ]
    for where, value in fills:
        b.emit(isa.MeshNorth, tile_mask=tiles, dst=where, fill_en=1, fill_value=value)
    size = stream_bytes(plan, positions)
    if size // WORD_BYTES > MAX_COUNT:
        raise ShapeError(f"{plan.model.name}: {size} bytes of keys for one tile, a stream has {MAX_COUNT * WORD_BYTES}")
    packets = ceil_div(size, ROW_BYTES)
    nests = (
        (keys, [(1, words * positions), (k_pitch, layers)]),
        (values + 1, [(1, channels), (width, plan.kv_heads * positions), (v_pitch, layers)]),
    )
    for k, (first, nest) in enumerate(nests):
        b.reset()
        fifo = Walk(INPUT_FIFO_ROW, [1, 0], [1, packets], slot_level=1, slot_stride=1)
        b.emit(
            isa.W2n,
            tile_mask=tiles,
            src=fifo,
            dst=walk(first, nest),
            sig_dst=0,
            waits=[Wait(TileCounter.RING_READ_A, 1, level=1)],
            unpack_level=len(nest),
        )
        b.emit(
            isa.RingRecv0,
            tile_mask=tiles,
            dst=fifo,
            sig_dst=1,
            waits=[Wait(TileCounter.WIDE_TO_NARROW, -ROW_WORDS, level=1, step=ROW_WORDS, side=1)],
        )
        for n, same in enumerate(plan.kv_tiles.values()):
            blocks.infeed_input(b, offset + (k * len(plan.kv_tiles) + n) * size, size, same)
    b.reset()


def send(b: Builder, name: str, index: int, parts: Sequence[Send]) -> None:
    """One output: tiles pack their words and send them one after the other."""
    b.barrier()
    b.output_address(name, index)
    same: dict[Walk, int] = {}
    for tile, words in parts:
        same[words] = same.get(words, 0) | 1 << tile
    for words, tiles in same.items():
        blocks.pack_walk(b, tiles, words)
    b.output_dma(sum(sent_bytes(words) for _, words in parts))
    for tile, words in parts:
        blocks.outfeed(b, sent_bytes(words))
        blocks.ring_send(b, 1 << tile, words.steps * WORD_BYTES)
    b.output_wait()


def sent_bytes(words: Walk) -> int:
    """Bytes of a part of an output."""
    return round_up(words.steps * WORD_BYTES, INPUT_UNIT_BYTES)


def result_parts(plan: Plan) -> list[Send]:
    """Who sends the result: codes of logits, or of the last layer's output."""
    head = plan.model.classifier
    if head is not None and plan.logit_groups:
        size, total = plan.logit_groups * GROUP, len(head.weights)
        counts = [(t, min(size, total - t * size)) for t in range(TILES) if t * size < total]
        return [(t, _linear(plan.logits, n)) for t, n in counts]
    return [(s.tile, _linear(plan.x_share, s.count)) for s in plan.layouts[-1].outputs]


def cache_parts(plan: Plan, position: int) -> tuple[list[Send], list[Send]]:
    """Who sends the keys and the values of a position."""
    layers = plan.local_layers
    keys = walk(
        (plan.keys + plan.k_bytes * position) // WORD_BYTES,
        [(1, plan.k_bytes // WORD_BYTES), (plan.k_pitch // WORD_BYTES, layers)],
    )
    words = plan.g.head_size // WORD_BYTES
    values = walk(
        (plan.values + plan.v_bytes * position) // WORD_BYTES + 1,
        [(1, words), (words + 1, plan.kv_heads), (plan.v_pitch // WORD_BYTES, layers)],
    )
    tiles = [(mask & -mask).bit_length() - 1 for mask in plan.kv_tiles.values()]
    return [(t, keys) for t in tiles], [(t, values) for t in tiles]


def held_parts(plan: Plan, layer: int, name: str, position: int) -> list[Send]:
    """Who sends the result of a stage, in the order of the shares."""
    shares, address, nest = plan.held(layer, name, position)

    def words(count: int) -> Walk:
        (_, size), *outer = nest or ((1, count),)
        inner = (1, ceil_div(size, WORD_BYTES))
        return walk(address // WORD_BYTES, [inner, *((s // WORD_BYTES, n) for s, n in outer)])

    return [(s.tile, words(s.count)) for s in shares]


def _linear(address: int, size: int) -> Walk:
    return Walk(address // WORD_BYTES, (1,), (ceil_div(size, WORD_BYTES),))


def unpack(parts: Sequence[Send], raw: bytes) -> list[Codes]:
    """The parts of an output from its bytes."""
    found, offset = [], 0
    for _, words in parts:
        found.append(np.frombuffer(raw, np.uint8, words.steps * WORD_BYTES, offset))
        offset += sent_bytes(words)
    return found
