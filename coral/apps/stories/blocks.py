"""The engine of many stories: three chip calls per layer, and the classifier's blocks where that is predicted to be
faster than all logits on the host. Source: docs/stories.md, Blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from coral import timing
from coral.codegen import network as nw
from coral.llm.bits import Bits
from coral.llm.blocks import INPUT, OUTPUT, Blocks, Codes, Floats
from coral.llm.engine import ROWS, EngineError, Usage, Weights, check_rewind, check_step
from coral.llm.shortlist import TOKENS, Shortlist
from coral.runtime import Runtime, Stats

HOST_BYTES_PER_S = 10e9
"""Weights that a host goes through for eight tokens at once; 29e9 were published for one that is faster."""
CLASSIFIER = "classifier"


class BlocksEngine:
    """A quantised decoder on a runtime, or with its bit model on the host (None): the same bytes.

    ``shortlist``: whether the chip finds the blocks of the classifier; None: where that is predicted to be faster.
    """

    def __init__(self, name: str, blocks: Blocks, runtime: Runtime | None, *, shortlist: bool | None = None) -> None:
        self.name, self.config, self.blocks, self.runtime = name, blocks.config, blocks, runtime
        self._choice = shortlist if runtime is not None else False
        self._faster: dict[int, bool] = {}
        self._bits: dict[str, Bits] = {}
        self._seconds = self._loading = 0.0

    def session(self, rows: int) -> BlocksSession:
        """See :class:`~coral.llm.engine.Engine`; up to 256 rows."""
        if not 1 <= rows <= ROWS[-1]:
            raise EngineError(f"{rows} stories at once, 1 to {ROWS[-1]} are possible")
        return BlocksSession(self, rows)

    def session_bytes(self, rows: int) -> int:
        """See :class:`~coral.llm.engine.Engine`."""
        c = self.config
        return 8 * c.layers * c.kv_dim * c.context * rows

    def run(self, name: str, x: Codes) -> Codes:
        """A part on codes [rows, inputs]."""
        network = self.blocks.parts[name].network
        found = self._network(name, network, {INPUT: x[:, None, None]})[OUTPUT]
        return found.reshape(len(x), -1)

    def shortlisted(self, rows: int) -> bool:
        """Whether the chip takes part in choosing words of so many stories."""
        if self._choice is not None:
            return self._choice
        if rows not in self._faster:
            assert self.runtime is not None
            host = -(-rows // TOKENS) * self.blocks.shortlist.matrix.nbytes / HOST_BYTES_PER_S
            self._faster[rows] = predicted_seconds(self.blocks.shortlist, rows, self.runtime.clock_hz) < host
        return self._faster[rows]

    def largest(self, x: Floats) -> Codes:
        """Codes of the largest logit of every block, [rows, blocks], of the classifier's inputs x [rows, dim]."""
        s, stats = self.blocks.shortlist, self.runtime.stats if self.runtime is not None else Stats()
        before = stats.upload_bytes
        found = self._network(f"{CLASSIFIER} {len(x)}", s.network(x), {"words": s.codes}, fresh=True)["largest"]
        self._loading += timing.call_seconds(0.0, stats.upload_bytes - before, 0)
        return found.reshape(s.blocks, len(x)).T

    def usage(self) -> Usage:
        """See :class:`~coral.llm.engine.Engine`. All of the process's calls on this device count."""
        if self.runtime is None:
            return Usage()
        chip = self.runtime.stats
        predicted = chip.predicted_seconds + self._loading
        return Usage(chip.calls, chip.to_chip_bytes, chip.output_bytes, predicted, self._seconds)

    def weights(self) -> list[Weights]:
        """See :class:`~coral.llm.engine.Engine`."""
        return placed(self.runtime, lambda key: _name(key, self.blocks)) if self.runtime is not None else []

    def _network(
        self, name: str, network: nw.Network, inputs: dict[str, Codes], *, fresh: bool = False
    ) -> dict[str, Codes]:
        if self.runtime is None:
            if fresh or name not in self._bits:
                self._bits[name] = Bits(network)
            return self._bits[name](inputs)
        start = time.perf_counter()
        try:
            return self.runtime.network((self.blocks, name), lambda: network, inputs, fresh=fresh)
        finally:
            self._seconds += time.perf_counter() - start


def placed(runtime: Runtime, name: Callable[[Any], str | None]) -> list[Weights]:
    """Where weights lie on a runtime's chip; ``name``: of a key of the runtime's, None if something else is there."""
    found = []
    for key, footprint in runtime.regions().items():
        for region in footprint.regions:
            tiles = range(region.first_tile, region.first_tile + region.tiles)
            found += [Weights(name(key) or "other", tile, region.row, region.rows) for tile in tiles]
    return found


def _name(key: Any, owner: Blocks) -> str | None:
    """The part's name in a key of the runtime's."""
    if isinstance(key, tuple):
        if key[0] is owner:
            return CLASSIFIER if key[1].startswith(CLASSIFIER) else key[1]
        return next((name for part in key if (name := _name(part, owner)) is not None), None)
    return None


def predicted_seconds(shortlist: Shortlist, rows: int, clock_hz: float) -> float:
    """Of the classifier's call for so many tokens, and of loading them."""
    program = nw.NetworkProgram(shortlist.network(np.zeros((rows, shortlist.dim), np.float32)), batch=shortlist.images)
    cycles = timing.chip_cycles(b.data for b in program.execution.bitstreams) * program.passes
    call = timing.call_seconds(cycles, *timing.call_bytes(program.execution), clock_hz)
    return call + timing.call_seconds(0.0, *timing.call_bytes(program.caching()), clock_hz)


class BlocksSession:
    """See :class:`~coral.llm.engine.Session`. Position 0 is computed in float on the host."""

    def __init__(self, engine: BlocksEngine, rows: int) -> None:
        self.rows, self.position, self._engine = rows, 1, engine
        self._cache = engine.blocks.cache(rows)
        self._x: Floats | None = None
        self._logits: Floats | None = np.tile(engine.blocks.first_logits, (rows, 1))
        self._how = 1.0, 1.0

    def narrow(self, temperature: float, top_p: float) -> None:
        """Words will be chosen so; from now on logits may be -inf for words that cannot be chosen."""
        self._how = temperature, top_p
        if self._x is not None:
            self._logits = None

    def logits(self) -> Floats:
        """See :class:`~coral.llm.engine.Session`."""
        if self._logits is None:
            assert self._x is not None
            self._logits = self._of(self._x)
        return self._logits

    def step(self, ids: np.ndarray) -> Floats:
        """See :class:`~coral.llm.engine.Session`."""
        e = self._engine
        check_step(e.config, self.position, ids, self.rows)
        x = e.blocks.step(e.run, ids, self.position, self._cache)
        self._logits = self._of(x)
        self._x, self.position = x, self.position + 1
        return self._logits

    def _of(self, x: Floats) -> Floats:
        e, (temperature, top_p) = self._engine, self._how
        if (temperature == 0 or top_p < 1) and e.shortlisted(self.rows):
            return e.blocks.shortlist.chosen(x, e.largest(x), temperature, top_p)
        return e.blocks.shortlist.logits(x)

    def rewind(self, position: int) -> None:
        """See :class:`~coral.llm.engine.Session`. Keys and values behind ``position`` stay and are overwritten."""
        check_rewind(self, position)
        self.position = position


__all__ = ["BlocksEngine", "BlocksSession", "placed"]
