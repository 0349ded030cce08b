"""The engine that computes a whole token in one call of the chip. Source: docs/transformer.md, Engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from coral import CoralError, numerics, timing
from coral.codegen.transformer import Cache, Form, Transformer, TransformerProgram, step
from coral.codegen.transformer.graph import ZERO
from coral.codegen.transformer.model import logits
from coral.driver.segments import Prepared, prepare
from coral.llm.calibrate import begin, embed, host_logits
from coral.llm.checkpoint import Checkpoint
from coral.llm.engine import EngineError, Usage, Weights, check_rewind, check_step
from coral.llm.tokenizer import BOS
from coral.package.program import Program


class ChipMismatch(CoralError):
    """A result of the chip is not what the bit model computes; the message has position and first difference."""


class Device(Protocol):
    """The part of ``coral.driver.Stick`` that is needed."""

    @property
    def clock_hz(self) -> int: ...
    def run(self, program: Any, inputs: Mapping[str, Any] | None = None) -> dict[str, bytes]: ...
    def ensure_cached(self, caching: Program) -> bool: ...


class ChipEngine:
    """A quantised decoder on a stick, one story per session.

    ``check``: every result is compared with the bit model's. Raises ShapeError if the model does not fit the form.
    """

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint,
        model: Transformer,
        device: Device,
        form: Form = Form(),  # noqa: B008
        *,
        check: bool = False,
    ) -> None:
        self.name, self.config, self.checkpoint, self.model = name, checkpoint.config, checkpoint, model
        self.device, self.check = device, check
        self.form = form
        self.program = TransformerProgram(model, Form(**{**vars(form), "report": True}))
        self.caching = self.program.caching()
        self.held: tuple[ChipSession, int] | None = None
        """Session and number of positions whose keys and values are on the chip."""
        self._usage = Usage()
        self._seconds: dict[int, float] = {}
        self._prepared: dict[int, Prepared] = {}

    def session(self, rows: int) -> ChipSession:
        """See :class:`~coral.llm.engine.Engine`."""
        if rows != 1:
            raise EngineError(f"{rows} stories at once: one program per token writes 1")
        return ChipSession(self)

    def session_bytes(self, rows: int) -> int:
        """See :class:`~coral.llm.engine.Engine`."""
        g = self.model.geometry
        return 2 * rows * len(self.model.blocks) * g.context * g.kv_dim

    def usage(self) -> Usage:
        """See :class:`~coral.llm.engine.Engine`."""
        return self._usage

    def weights(self) -> list[Weights]:
        """See :class:`~coral.llm.engine.Engine`."""
        p, found = self.program.plan, []
        for k, layout in enumerate(p.layouts):
            found += [Weights(f"{k} qkv", s.tile, s.row, p.head_rows) for s in layout.heads]
            found += [Weights(f"{k} wo w2", s.tile, s.row, p.output_rows) for s in layout.outputs]
            found += [Weights(f"{k} w1 w3", s.tile, s.row, p.ffn_rows(s.count)) for s in layout.ffn]
        if p.logit_groups:
            found += [Weights("classifier", t, p.logit_row, p.logit_rows) for t in p.logit_tiles]
        return found

    def compute(self, session: ChipSession, x: np.ndarray, position: int) -> np.ndarray:
        """A token's result, uint8; its keys and values go to the session's cache."""
        for last in (False, True):
            try:
                return self._compute(session, x, position)
            except ChipMismatch:
                raise
            except CoralError:
                # What was on the chip may be gone, and the driver must not repeat a program that relies on it.
                self.held = None
                if last or not self.program.form.keep:
                    raise
        raise AssertionError

    def _compute(self, session: ChipSession, x: np.ndarray, position: int) -> np.ndarray:
        p, cache = self.program, session.cache
        if self._call(self.caching, 0, None):
            self.held = None
        if p.form.keep and self.held != (session, position):
            self._call(p.initialise(position), -position, p.pack_caches(cache, position))
        self.held = None
        if position not in self._prepared:
            self._prepared[position] = prepare(p.execution(position), idempotent=not p.form.keep)
        outputs = self._call(self._prepared[position], position, p.pack(x, position, cache))
        token = p.unpack(position, outputs)
        if token.keys is None or token.values is None:
            raise AssertionError
        if self.check:
            self._compare(token.result, x, Cache(cache.keys.copy(), cache.values.copy()), position)
        cache.keys[:, position], cache.values[:, position] = token.keys, token.values
        self.held = (session, position + 1)
        return token.result

    def _call(self, prepared: Program | Prepared, key: int, data: bytes | None) -> Any:
        """Run a program, or load the parameters if need be (then: whether it was). ``key``: for its predicted time."""
        program = prepared.program if isinstance(prepared, Prepared) else prepared
        start = time.perf_counter()
        if data is None:
            if not self.device.ensure_cached(program):
                return False
            outputs: Any = True
        else:
            outputs = self.device.run(prepared, {"x": data})
        sent, received = timing.call_bytes(program)
        if key not in self._seconds:
            self._seconds[key] = timing.predicted_seconds(program, self.device.clock_hz)
        u, spent = self._usage, time.perf_counter() - start
        self._usage = Usage(
            u.calls + 1,
            u.to_chip_bytes + sent,
            u.from_chip_bytes + received,
            u.predicted_seconds + self._seconds[key],
            u.chip_seconds + spent,
        )
        return outputs

    def _compare(self, result: np.ndarray, x: np.ndarray, cache: Cache, position: int) -> None:
        expected = step(self.model, x, cache, position)
        if self.program.form.logits:
            expected = logits(self.model, expected)
        wrong = np.flatnonzero(result != expected)
        if len(wrong):
            first = int(wrong[0])
            raise ChipMismatch(
                f"position {position}: {len(wrong)} of {len(expected)} codes differ, first {first}: "
                f"{result[first]} instead of {expected[first]}"
            )


class ChipSession:
    """See :class:`~coral.llm.engine.Session`. Position 0 is computed in float on the host."""

    rows = 1

    def __init__(self, engine: ChipEngine) -> None:
        self.engine, self.position = engine, 1
        self.cache, first = begin(engine.model, engine.checkpoint, BOS)
        self._logits = first.astype(np.float32)[None]

    def logits(self) -> np.ndarray:
        """See :class:`~coral.llm.engine.Session`."""
        return self._logits

    def step(self, ids: np.ndarray) -> np.ndarray:
        """See :class:`~coral.llm.engine.Session`."""
        e = self.engine
        check_step(e.config, self.position, ids, 1)
        result = e.compute(self, embed(e.model, e.checkpoint, int(ids[0])), self.position)
        if e.form.logits:
            values = numerics.dequantise(result, e.model.logit_scale, ZERO)[: e.config.vocabulary]
        else:
            values = host_logits(e.model, e.checkpoint, result)
        self._logits = values.astype(np.float32)[None]
        self.position += 1
        return self._logits

    def rewind(self, position: int) -> None:
        """See :class:`~coral.llm.engine.Session`."""
        check_rewind(self, position)
        self.position = position


__all__ = ["ChipEngine", "ChipMismatch", "ChipSession"]
