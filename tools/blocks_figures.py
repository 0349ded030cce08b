"""Predicted milliseconds of a step of engine ``blocks``: python -m tools.blocks_figures DIM HIDDEN LAYERS HEADS
KV_HEADS VOCABULARY ROWS... (PYTHONPATH=.:tests). Weights are random; nothing is run. Source: docs/stories.md."""

from __future__ import annotations

import sys

import numpy as np
from story_models import random_checkpoint

from coral import timing
from coral.codegen import network as nw
from coral.llm.blocks import Blocks
from coral.llm.checkpoint import Config

CLOCKS = 250e6, 500e6


def main() -> None:
    """A line per part and number of rows."""
    dim, hidden, layers, heads, kv_heads, vocabulary, *rows = map(int, sys.argv[1:])
    ck = random_checkpoint(Config(dim, hidden, 1, heads, kv_heads, vocabulary, 256))
    blocks = Blocks(ck, [[1, *range(2, 20)]])
    for n in rows:
        total = np.zeros(len(CLOCKS))
        named = [(name, layers, part.network, n) for name, part in blocks.parts.items()]
        words = blocks.shortlist.network(np.zeros((n, dim), np.float32))
        for name, times, network, batch in [*named, ("classifier", 1, words, blocks.shortlist.images)]:
            p = nw.NetworkProgram(network, batch=batch)
            cycles = timing.chip_cycles(b.data for b in p.execution.bitstreams) * p.passes
            moved = timing.call_bytes(p.execution)
            seconds = np.array([timing.call_seconds(cycles, *moved, clock) for clock in CLOCKS])
            if times == 1:
                seconds += timing.call_seconds(0.0, *timing.call_bytes(p.caching()))
            total += times * seconds
            there, back = 1e3 * moved[0] / timing.TO_CHIP_BYTES_PER_S, 1e3 * moved[1] / timing.FROM_CHIP_BYTES_PER_S
            usb = f"{moved} bytes, {there:.2f} and {back:.2f} ms"
            print(f"{n:4} {name:12} x{times}: {usb}, {cycles:,.0f} cycles, {1e3 * seconds} ms")
        print(f"{n:4} together: {1e3 * total} ms, {n / total} tokens/s")


if __name__ == "__main__":
    main()
