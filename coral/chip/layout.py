"""Sizes of the chip's memories and the names of value identifiers.

Every byte in a memory of the simulated chip is a *value identifier* (int32): an index into the array of byte values
``V``. Moving data copies identifiers; only the op unit, the host and the scalar core make new ones. 0 is "nothing was
written here", ``PARTIAL`` marks an int32 partial sum that is not complete yet. Source: docs/chip.md.
"""

from __future__ import annotations

TILES = 16
GRID = 4
NARROW_BYTES = 192 * 1024
NARROW_WORDS = NARROW_BYTES // 4
ROW_BYTES = 256
ROW_WORDS = 64
WIDE_ROWS = 2080
SCALAR_WORDS = 4096
SCALING_ENTRIES = 128
SCALING_SLOT = 32
BIAS_ENTRY = 64
TILE_COUNTERS = 19
SCALAR_COUNTERS = 9
ALL_TILES = 0xFFFF
SCALAR_NODE = 16
"""Bit of ``dest_mask`` and index of the ring queue that stand for the scalar core."""

UNIT_BYTES = {0: 64, 1: 8}
"""Bytes of a staging unit, by stream (0 parameters, 1 activations)."""
STAGING_UNITS = {0: 2 * 1024, 1: 2 * 16384}

SMALL_GROUP_LIMIT_ROWS = 1024
"""Parameter groups of 16, 32 or 48 outputs must lie below this row of wide memory (256 KiB)."""

UNWRITTEN = 0
PARTIAL = -1
WIDE0 = 256
"""Identifier of the first byte of wide memory as it was before the program."""
DYNAMIC0 = WIDE0 + TILES * WIDE_ROWS * ROW_BYTES
"""First identifier made by a program: host data, constants, results."""

LEVEL_FIXED, LEVEL_HOST, LEVEL_PENDING = 0, 1, 0x7FFF
"""Dependency levels of values that a program starts from (memory and constants; host streams), and of results whose
computation is recorded but not yet placed."""

MAX_WALK_STEPS = 1 << 20
"""Budget of one walk; the longest in a working program has about 10^5 steps."""
