"""Rules that every instruction of Google's programs obeys, and that an encoder can get wrong without any error.

Each rule yields findings; an outcome that was never seen is a fault. Source: docs/isa/README.md, section Rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from coral.isa.core import Instruction
from coral.isa.fields import TileCounter
from coral.isa.op import Op, OpFormat, OpMax, OpSum
from coral.isa.tile import RingRecv0, RingRecv1, RingSend, TileFence
from coral.isa.walk import Walk

TILES = 16


class Finding(NamedTuple):
    """One application of a rule."""

    rule: str
    outcome: str
    ok: bool = True


def walk_findings(instruction: Instruction) -> Iterator[Finding]:
    """The mask of non-zero strides, and the skip that makes a shortened pass end where the whole one would."""
    for key, spec in instruction.walks.items():
        walk = spec.read(instruction)
        strides, counts = walk.strides, walk.counts
        rule = sum(1 << k for k, stride in enumerate(strides) if stride)
        iterated = sum(1 << k for k, stride in enumerate(strides) if stride and counts[k] > 1)
        if walk.nz_mask == rule:
            yield Finding("nz_mask", "exact")
        else:
            only = not iterated & ~(walk.nz_mask or 0)
            yield Finding("nz_mask", "every iterated dimension" if only else f"{key}: a dimension is missing", only)
        if walk.last_dim:
            short = 1 if key == "src" and getattr(instruction, "transpose", 0) else 0
            exact = (counts[short] - 1 - walk.last_cnt) * strides[short] == walk.last_skip
            yield Finding("last_skip", "exact" if exact else f"{key}: other", exact)
        elif walk.last_cnt or walk.last_skip:
            yield Finding("last_skip", f"{key}: set without a dimension", False)


def wait_findings(instruction: Instruction) -> Iterator[Finding]:
    """Records are used from index 0 without gaps, are valid, and name a counter that exists."""
    spec, used = instruction.wait_spec, len(instruction.waits())
    for k in range(spec.records if spec else 0):
        parts = [getattr(instruction, name) for name in spec.parts(k)] if spec else []
        if any(parts):
            ok = k < used and spec is not None and parts[0] < len(spec.counters)
            yield Finding("wait records", "packed, valid, known counter" if ok else f"record {k}: not so", ok)


def op_findings(instruction: Instruction) -> Iterator[Finding]:
    """A step of the main loop is a step of every operand walk; each group of results is a step of ``out`` per word."""
    if not isinstance(instruction, Op | OpMax | OpSum):
        return
    i, loops = instruction, instruction.loops
    steps = Walk(0, (0,) * len(loops), loops, last_dim=i.loop_last_dim, last_cnt=i.loop_last_cnt).steps
    for key in ("inp", "par", "psum"):
        n = i.walk(key).steps
        outcome = "main loop" if n == steps else "idle" if n == 1 else f"{key}: {n} for {steps}"
        yield Finding("op operand steps", outcome, n in (steps, 1))
    reduced = [n for k, n in enumerate(loops) if i.reduce_mask >> k & 1]
    if i.reduce_mask >> i.loop_last_dim & 1:
        groups = math.prod(loops) // math.prod(reduced)
    else:
        groups = steps // math.prod(reduced)
    words = groups * -(-(i.out_ch + 1) * (1 + i.out16) // 4)
    n = math.prod(i.walk("out").counts)
    outcome = "groups x words" if n == words else "a quarter (pack)" if 4 * n == words else f"{n} for {words}"
    yield Finding("op out steps", outcome, n == words or 4 * n == words)


class Credits:
    """Replays counters of one program whose wait thresholds follow from what was counted before."""

    def __init__(self) -> None:
        self.consumed, self.sent = [0] * TILES, 0

    def findings(self, i: Instruction) -> Iterator[Finding]:
        """The thresholds of ``i``; then counts what ``i`` will add. Instructions must come in program order."""
        tiles = [t for t in range(TILES) if getattr(i, "tile_mask", 0) >> t & 1]
        if isinstance(i, TileFence):
            if i.ctr_mask >> TileCounter.PARAMETERS & 1:
                self.consumed = [i.ctr_value if t in tiles else n for t, n in enumerate(self.consumed)]
            if i.ctr_mask >> TileCounter.RING_PRODUCER_B & 1:
                self.sent = i.ctr_value
        elif isinstance(i, OpFormat) and i.sig_par is not None:
            for t in tiles:
                self.consumed[t] += _completions(i.walk("par"), i.sig_par)
        elif isinstance(i, RingRecv0 | RingRecv1) and tiles:
            for wait in i.waits():
                if wait.ctr == TileCounter.PARAMETERS:
                    off = wait.base - self.consumed[tiles[0]] + (i.dst_slot_stride != 0)
                    outcome = "consumed - slots + 1" if not off else f"off by {off}"
                    yield Finding("PARAMETERS credit", outcome, not off)
        elif isinstance(i, RingSend) and i.to_consumer1:
            for wait in i.waits():
                if wait.ctr == TileCounter.RING_PRODUCER_B:
                    off = wait.base - self.sent
                    yield Finding("RING_PRODUCER_B order", f"off by {off}" if off else "rows sent", not off)
            if i.sig_ring is not None:
                self.sent += _completions(i.walk("src"), i.sig_ring)


def _completions(walk: Walk, level: int) -> int:
    """How often the dimensions below ``level`` complete; level 0: steps."""
    return math.prod(walk.counts[level:]) if level else walk.steps
