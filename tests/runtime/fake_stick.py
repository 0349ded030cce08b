"""A stick for tests of the runtime: reads addresses out of the programs, computes with coral.numerics.

It knows nothing of placements: parameters are stored where the caching program's consumers say, and used where the
execution program's bias loads and ops say. Every byte above the programs' floor is lost at each run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from coral import isa, numerics
from coral.codegen.machine import tiles_of
from coral.driver import Prepared
from coral.package.program import Kind, Program

CLOCK_HZ = 250_000_000


@dataclass
class Done:
    """A call that has ended already."""

    outputs: dict[str, bytes]

    def result(self) -> dict[str, bytes]:
        return self.outputs


class Residency:
    """The part of a stick that keeps account of what is resident; a subclass runs programs."""

    def __init__(self) -> None:
        self.clock_hz = CLOCK_HZ
        self.resident: set[Program] = set()

    def run(self, program: Program | Prepared, inputs: Mapping[str, object] | None = None) -> dict[str, bytes]:
        raise NotImplementedError

    def start(self, program: Prepared, inputs: Mapping[str, object]) -> Done:
        return Done(self.run(program, inputs))

    def ensure_cached(self, caching: Program) -> bool:
        if caching in self.resident:
            return False
        self.run(caching)
        return True

    def evict(self, caching: Program) -> None:
        self.resident.discard(caching)


class FakeStick(Residency):
    def __init__(self) -> None:
        super().__init__()
        self.wide = np.zeros((16, 2080, 64, 4), np.uint8)
        self.log: list[str] = []
        self.fail_next = False
        self.closed = 0

    def run(self, program: Program | Prepared, inputs: Mapping[str, object] | None = None) -> dict[str, bytes]:
        program = program.program if isinstance(program, Prepared) else program
        program.check()
        if self.fail_next:
            self.fail_next = False
            self.lose_everything()
            raise OSError("pulled")
        self.log.append(program.kind.name)
        instructions = [p.instruction for p in isa.decode(program.bitstreams[0].data)]
        if program.kind is Kind.PARAMETER_CACHING:
            self._cache(instructions, program.parameters)
            self.resident.add(program)
            return {}
        (x,) = (np.frombuffer(bytes(data), np.uint8) for data in (inputs or {}).values())
        assert len(x) == program.inputs[0].size_bytes
        y = np.full(program.outputs[0].size_bytes, 0xEE, np.uint8)
        results = self._execute(instructions, x)[: len(y)]
        y[: len(results)] = results
        self.wide[:, 2012:] = 0xEE
        return {program.outputs[0].name: y.tobytes()}

    def lose_everything(self) -> None:
        self.resident.clear()
        self.wide[:] = 0xEE

    def close(self) -> None:
        self.closed += 1

    def _cache(self, instructions: list, blob: bytes) -> None:
        rows = iter(np.frombuffer(blob, np.uint8).reshape(-1, 64, 4))
        for i in instructions:
            if isinstance(i, isa.RingRecv0):
                (tile,) = tiles_of(i.tile_mask)
                words, groups = i.walk("dst").counts[:2]
                for group in range(groups):
                    self.wide[tile, i.hdr_first_row + group] = next(rows)
                    for word in range(words):
                        self.wide[tile, i.dst_addr + group * words + word] = next(rows)
        assert next(rows, None) is None

    def _execute(self, instructions: list, x: np.ndarray) -> np.ndarray:
        bias_rows, parts = {}, []
        for i in instructions:
            if isinstance(i, isa.W2n) and i.to_scaling:
                bias_rows.update(dict.fromkeys(tiles_of(i.tile_mask), i.src_addr))
            elif isinstance(i, isa.Op):
                (tile,) = tiles_of(i.tile_mask)
                words, groups = i.loop_cnt0 + 1, i.loop_cnt3 + 1
                parts += [
                    self._group(i, tile, bias_rows[tile] + g, i.par_addr // 4 + g * words, x) for g in range(groups)
                ]
                parts[-1] = parts[-1][: i.out_ch_last + 1]
        return np.concatenate(parts)

    def _group(self, op: isa.Instruction, tile: int, bias_row: int, row: int, x: np.ndarray) -> np.ndarray:
        words = op.loop_cnt0 + 1
        weights = self.wide[tile, row : row + words].transpose(1, 0, 2).reshape(64, 4 * words).astype(np.int64)
        acc = (weights - op.w_zp) @ (x[: 4 * words].astype(np.int64) - op.in_zp)
        acc += self.wide[tile, bias_row].reshape(-1).view(np.int32)
        return numerics.requantise(acc.astype(np.int32), op.mult, op.clamp_min, op.clamp_max, op.out_zp)
