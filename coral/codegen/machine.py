"""Sizes and addresses of the machine that every generator shares. Source: docs/codegen.md, section Machine."""

TILES = 16
COLUMNS = 4
"""Tile t sits at mesh row t // COLUMNS, column t % COLUMNS."""
ALL_TILES = (1 << TILES) - 1
SCALAR_CORE = 1 << TILES
"""Bit of the scalar core in a ring destination mask."""

WORD_BYTES = 4
ROW_BYTES = 256
ROW_WORDS = ROW_BYTES // WORD_BYTES
ROW_UNITS = 4
"""64-byte units, in which the op addresses wide memory, per row."""
WIDE_ROWS = 2080
GROUP = 64
"""Output channels of one op pass: columns of a wide row."""

OUTPUT_FIFO_ROW = WIDE_ROWS - 2
"""Two rows from which a tile's results leave; also the compiler's place for single-packet input."""
FORWARD_FIFO_ROW = 2012
"""Two rows through which activations are passed on to other tiles; the lowest that FULLY_CONNECTED writes."""
BIAS_ENTRY = 64
"""First int32 bias in the scaling store; the float32 scales start at 0. Entries are 8 bytes, two channels."""

INPUT_UNIT_BYTES = 8
INPUT_STAGING_UNITS = 16384
PARAMETER_UNIT_BYTES = 64
PARAMETER_STAGING_UNITS = 1024
"""Units per half of the scalar core's staging buffers."""


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Smallest multiple of ``b`` that is at least ``a``."""
    return b * ceil_div(a, b)


def mask_of(tiles) -> int:
    """Bitmap of tile numbers."""
    return sum(1 << t for t in tiles)


def tiles_of(mask: int) -> list[int]:
    """Tile numbers of a bitmap."""
    return [t for t in range(TILES) if mask >> t & 1]
