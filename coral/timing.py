"""Predicted time of a program, from its instructions and transfers alone: one model for runtime, tools and traces.

Nothing here was measured by us: what these functions return is a prediction and has to be called one wherever it is
shown. Source: docs/timing.md (the model, its constants, its errors).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from coral import isa
from coral.package.program import Base, DmaHint, InstructionHint, Program

TO_CHIP_BYTES_PER_S, FROM_CHIP_BYTES_PER_S = 330e6, 55e6
CALL_S = 142e-6
"""Fixed cost of a call."""
CLOCK_HZ = 250e6
TILES = 16

COLUMNS_PER_CYCLE, NARROW_CYCLES, NARROW_CHANNELS = 16 / 0.79, 0.45, 8
"""The compiler's own estimate: columns of a step per cycle, cycles of a step with at most so many channels."""
CHIP_PER_ESTIMATE = 1.12
"""Cycles that a stick took per cycle that the compiler had estimated."""


def op_steps(op: Any) -> int:
    """Steps of the main loops of an op, a shortened last pass taken into account."""
    counts = [getattr(op, f"loop_cnt{level}") + 1 for level in range(8)]
    steps, last = math.prod(counts), op.loop_last_dim
    if last and op.loop_last_cnt + 1 < counts[0]:
        steps -= steps // (counts[0] * counts[last]) * (counts[0] - op.loop_last_cnt - 1)
    return steps


def op_estimate(op: Any) -> float:
    """Cycles on one tile by the compiler's rule."""
    channels = op.out_ch + 1
    return op_steps(op) * (NARROW_CYCLES if channels <= NARROW_CHANNELS else channels / COLUMNS_PER_CYCLE)


def op_cycles(op: Any) -> float:
    """Cycles on one tile of a stick: by the compiler's rule; at most one per step where every weight is used once."""
    counts = [getattr(op, f"loop_cnt{level}") + 1 for level in range(8)]
    positions = math.prod(
        count for level, count in enumerate(counts) if not op.reduce_mask >> level & 1 and level != op.group_loop
    )
    by_rule = op_estimate(op) * CHIP_PER_ESTIMATE
    return min(op_steps(op), by_rule) if positions == 1 else by_rule


def estimated_cycles(streams: Iterable[bytes]) -> float:
    """What the older compiler writes as ``estimated_cycles_64bit``: the op cycles of the busiest tile."""
    return _busiest(streams, op_estimate)


def chip_cycles(streams: Iterable[bytes]) -> float:
    """Predicted cycles of a program on a stick: the ops of the busiest tile, behind which data movement hides, and
    loops of nothing but scalar bundles (softmax of the older compiler), one cycle per bundle."""
    streams = list(streams)
    return _busiest(streams, op_cycles) + sum(map(scalar_loop_cycles, streams))


def busiest_steps(streams: Iterable[bytes]) -> int:
    """Steps of the tile that has most of them."""
    return int(_busiest(streams, op_steps))


def scalar_loop_cycles(stream: bytes) -> int:
    """Bundles that the scalar core executes in loops of nothing but bundles."""
    placed = dict(isa.decode(stream))
    total = 0
    for word, loop in placed.items():
        if isinstance(loop, isa.Loop):
            body = range(word + 1, word + 1 + loop.body)
            if all(isinstance(placed.get(k), isa.Scalar) for k in body):
                total += loop.count * loop.body
    return total


def _busiest(streams: Iterable[bytes], cost: Any) -> float:
    tiles = [0.0] * TILES
    for stream in streams:
        for _, op, times in ops(stream):
            for tile in tiles_of_op(op):
                tiles[tile] += times * cost(op)
    return max(tiles)


def tiles_of_op(op: Any) -> list[int]:
    """The tiles that an op is for; all where a register says it."""
    return [tile for tile in range(TILES) if op.tile_mask_indirect or op.tile_mask >> tile & 1]


def ops(stream: bytes) -> Iterator[tuple[int, Any, int]]:
    """Every op: its instruction word and how often it runs (loops of the scalar core; branches count as not taken)."""
    until, times = 0, 1
    for word, instruction in isa.decode(stream):
        if word >= until:
            times = 1
        if isinstance(instruction, isa.Loop):
            until, times = word + 1 + instruction.body, instruction.count
        elif isinstance(instruction, isa.Op | isa.OpMax | isa.OpSum | isa.OpResize):
            yield word, instruction, times


def call_seconds(cycles: float, to_chip_bytes: int, from_chip_bytes: int, clock_hz: float = CLOCK_HZ) -> float:
    """Predicted seconds of a call over USB 3: fixed cost, transfers one after the other, and the chip's cycles."""
    transfers = to_chip_bytes / TO_CHIP_BYTES_PER_S + from_chip_bytes / FROM_CHIP_BYTES_PER_S
    return CALL_S + transfers + cycles / clock_hz


def call_bytes(program: Program) -> tuple[int, int]:
    """Payload bytes of a run: (to the chip: instructions, inputs, streamed parameters; from it: outputs)."""
    sides = [0, 0]
    for hint in program.hints:
        if isinstance(hint, InstructionHint):
            sides[0] += len(program.bitstreams[hint.chunk].data)
        elif isinstance(hint, DmaHint):
            sides[hint.out or hint.base is Base.OUTPUT] += hint.size
    return sides[0], sides[1]


def predicted_seconds(program: Program, clock_hz: float = CLOCK_HZ) -> float:
    """Predicted seconds of one run of a program over USB 3.

    :raises coral.isa.IsaError: a bitstream cannot be decoded
    """
    return call_seconds(chip_cycles(b.data for b in program.bitstreams), *call_bytes(program), clock_hz)
