"""Steps and weight rows of layers, and what a step is predicted to cost. Source: docs/network.md, section Cost."""

from __future__ import annotations

import numpy as np

from coral.codegen.machine import GROUP, WORD_BYTES, ceil_div
from coral.codegen.network.graph import Depthwise, L2Normalise, Stage

MAX_BLOCK = 16
"""Outputs of a depthwise block: 4 channels each, 64 columns."""
BLOB_ROWS = 1300
"""Wide rows that a depthwise layer's weights may take (330 KB)."""
RING_ROW_CYCLES, HIDDEN_CYCLES = 4, 0.01
"""Of a row on the ring; a cycle that another one hides, so that of equal choices the one with less work wins."""

CHUNK_ROWS = 512
CHUNK_WORDS = (4096, 1024)
"""Wide rows, and channel words of SOFTMAX and L2 normalisation, that positions taken at a time may have."""


def step_cost(columns: int) -> float:
    """Predicted cycles of a step that computes some columns: the older compiler's estimate, and a little per step, so
    that fewer steps win where it sees no difference (docs/network.md, Cost).
    """
    if columns == 0:
        return 0.0
    return 0.05 + (0.45 if columns <= 8 else 0.79 * columns / 16)


def depthwise_window(block: tuple[int, int], stage: Stage) -> tuple[int, int]:
    """Rows and columns of input that a block of outputs reads."""
    w = stage.window
    y, x = ((b - 1) * s + k for b, s, k in zip(block, w.stride, w.kernel, strict=True))
    return y, x


def depthwise_steps(block: tuple[int, int], stage: Stage) -> int:
    """Steps per block and channel word."""
    y, x = depthwise_window(block, stage)
    return y * x


def relay_columns(columns: int) -> int:
    """Columns of a relayed weight row of so many: 4 (16 bytes) or 16 (64 bytes); 0: whole rows, sent directly."""
    return 4 if columns == 4 else 16 if columns <= 16 else 0


def depthwise_rows(channels: int, block: tuple[int, int], stage: Stage, header: int = 2) -> int:
    """Wide rows that the weights take where they are stored."""
    groups, rows = ceil_div(channels, WORD_BYTES), header + depthwise_steps(block, stage)
    columns = relay_columns(WORD_BYTES * block[0] * block[1])
    return ceil_div(groups * rows * columns, GROUP) if columns else groups * rows


def delivery_cycles(channels: int, block: tuple[int, int], stage: Depthwise) -> float:
    """Predicted cycles until a depthwise layer's weights are on the tiles: a word at a time through the scalar core's
    memory, or whole rows over the ring (docs/timing.md, Timeline).
    """
    rows = (1 + (np.ndim(stage.mult) > 0) + depthwise_steps(block, stage)) * ceil_div(channels, WORD_BYTES)
    return rows * (relay_columns(WORD_BYTES * block[0] * block[1]) or RING_ROW_CYCLES)


def depthwise_cycles(channels: int, positions: int, shares: int, block: tuple[int, int], stage: Depthwise) -> float:
    """Predicted cycles of a depthwise layer: of its op, or of its weights' way if that takes longer. ``positions`` and
    one of ``shares`` of the channels are a tile's.
    """
    outputs, words = block[0] * block[1], ceil_div(channels, WORD_BYTES)
    op = positions / outputs * depthwise_steps(block, stage) * words / shares * step_cost(WORD_BYTES * outputs)
    delivery = delivery_cycles(channels, block, stage)
    return max(op, delivery) + HIDDEN_CYCLES * min(op, delivery)


def chunk_shape(stage: Stage, rows: int, columns: int, words: int) -> tuple[int, int]:
    """(columns, rows) of positions that a normalising stage takes at a time, of so many with ``words`` words each."""
    most = min(CHUNK_ROWS // ceil_div(words, GROUP // WORD_BYTES), CHUNK_WORDS[isinstance(stage, L2Normalise)] // words)
    wide = min(columns, max(most, 1))
    return wide, min(rows, max(most // wide, 1))
