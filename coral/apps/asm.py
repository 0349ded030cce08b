"""``coral asm``: the bytes of a bitstream from its text."""

from __future__ import annotations

from pathlib import Path

from coral.isa import IsaError, Start, encode
from coral.isa.text import parse


def asm(path: Path, out: Path) -> None:
    """Assemble ``path`` into ``out``; TextError with line and column, and nothing written, if it cannot be read."""
    instructions = parse(path.read_bytes())
    if not instructions:
        raise IsaError(f"{path.name} holds no instruction")
    starts = sum(isinstance(i, Start) for i in instructions)
    if starts > 1:
        raise IsaError(f"{path.name} holds {starts} bitstreams; take one at a time with: coral disasm FILE --only N")
    data = encode(instructions)
    out.write_bytes(data)
    print(f"{out}: {len(instructions)} instructions, {len(data)} bytes")
