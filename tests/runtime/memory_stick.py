"""A stick that only keeps account of wide memory: which row holds what, what a program reads and overwrites.

It knows nothing of placements: everything comes from the instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from coral import isa
from coral.codegen.machine import ROW_BYTES, TILES, tiles_of
from coral.driver import Prepared
from coral.package.program import Kind, Program
from runtime.fake_stick import Residency

Place = tuple[int, int]
LOST = b""


@dataclass(frozen=True)
class Access:
    """Rows that a program reads before it writes them, as (tile, row), and the lowest row that it writes."""

    reads: tuple[Place, ...]
    floor: int


@functools.cache
def access(program: Program) -> Access:
    """What the instructions say."""
    reads: dict[Place, None] = {}
    written = [2080]
    for i in (p.instruction for p in isa.decode(program.bitstreams[0].data)):
        if isinstance(i, isa.RingSend) or (isinstance(i, isa.W2n) and i.to_scaling):
            reads |= dict.fromkeys((t, row) for t in tiles_of(i.tile_mask) for row in set(_rows(i, "src")))
        elif isinstance(i, isa.RingRecv0 | isa.RingRecv1):
            written += [min(_rows(i, "dst")), *([i.hdr_first_row] if i.hdr_en else [])]
        elif isinstance(i, isa.N2w):
            written.append(i.dst_addr)
        elif isinstance(i, isa.Op):
            rows = {unit // 4 for unit in _rows(i, "par")}
            reads |= dict.fromkeys((t, row) for t in tiles_of(i.tile_mask) for row in rows)
            written += [i.psum_addr // 4] if i.psum_addr else []
    floor = min(written)
    return Access(tuple(place for place in reads if place[1] < floor), floor)


def _rows(i: isa.Instruction, prefix: str) -> list[int]:
    """All that a walk visits, in its order."""
    rows = np.array([getattr(i, f"{prefix}_addr")])
    walk = i.walk(prefix)
    for stride, count in zip(walk.strides, walk.counts, strict=True):
        rows = (stride * np.arange(count)[:, None] + rows).reshape(-1)
    return rows.tolist()


class MemoryStick(Residency):
    """Results are zeros; ``read`` has the contents of all rows of parameters that the last call read."""

    def __init__(self) -> None:
        super().__init__()
        self.wide: dict[Place, bytes] = {}
        self.read: set[bytes] = set()
        self.uploads = 0

    def run(self, program: Program | Prepared, inputs: Mapping[str, object] | None = None) -> dict[str, bytes]:
        program = program.program if isinstance(program, Prepared) else program
        if program.kind is Kind.PARAMETER_CACHING:
            self._cache(program)
            return {}
        found = access(program)
        self.read = {self.wide.get(place, LOST) for place in found.reads}
        for tile in range(TILES):
            for row in range(found.floor, 2080):
                self.wide.pop((tile, row), None)
        return {y.name: bytes(y.size_bytes * y.executions) for y in program.outputs}

    def lose_everything(self) -> None:
        self.resident.clear()
        self.wide.clear()

    def close(self) -> None:
        pass

    def _cache(self, program: Program) -> None:
        data, at = program.parameters, 0
        for i in (p.instruction for p in isa.decode(program.bitstreams[0].data)):
            if isinstance(i, isa.RingRecv0):
                rows = _rows(i, "dst")
                if i.hdr_en:
                    words = i.walk("dst").counts[0]
                    heads = range(i.hdr_first_row, i.hdr_first_row + len(rows) // words)
                    rows = [r for k, head in enumerate(heads) for r in (head, *rows[k * words : (k + 1) * words])]
                for row in rows:
                    content, at = data[at : at + ROW_BYTES], at + ROW_BYTES
                    for tile in tiles_of(i.tile_mask):
                        self.wide[tile, row] = content
        assert at == len(data)
        self.resident.add(program)
        self.uploads += 1
