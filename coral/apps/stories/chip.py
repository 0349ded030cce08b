"""The engine that computes a whole token in one call of the chip. Source: docs/transformer.md, Engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from coral import CoralError, numerics, timing
from coral.codegen.transformer import Cache, Form, Token, Transformer, parts, step
from coral.codegen.transformer.graph import ZERO
from coral.codegen.transformer.model import logits
from coral.driver import Call, GivenUp, Prepared, prepare
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
    def announce(self, program: Any) -> Call: ...
    def ensure_cached(self, caching: Program) -> bool: ...


@dataclass(frozen=True)
class Ahead:
    """The program of a position, whose instructions went to the chip at a time while the host still chose the word."""

    position: int
    call: Call
    since: float


class ChipEngine:
    """A quantised decoder on a stick, one story per session: a program per token, or several whose parameters are sent
    with every token if the model does not fit the chip.

    ``check``: every result is compared with the bit model's. ``ahead``: the next token's instructions are sent before
    its word is known. Raises ShapeError if not even a layer fits the form.
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
        ahead: bool = True,
    ) -> None:
        self.name, self.checkpoint, self.model, self.form = name, checkpoint, model, form
        self.config = replace(checkpoint.config, context=model.geometry.context)
        self.device, self.check = device, check
        self.parts = parts(model, replace(form, report=True))
        self.keep = self.parts[0].program.form.keep
        self.caching = [part.program.caching() for part in self.parts]
        self.held: tuple[ChipSession, int] | None = None
        """Session and number of positions whose keys and values are on the chip."""
        self.ahead = ahead and len(self.parts) == 1
        self._ahead: Ahead | None = None
        self._usage = Usage()
        self._seconds: dict[tuple[str, int, int], float] = {}
        self._prepared: dict[tuple[int, int], Prepared] = {}

    @property
    def streamed_bytes(self) -> int:
        """Parameters that are sent with every token; 0 if they stay on the chip."""
        return sum(len(caching.parameters) for caching in self.caching) if len(self.parts) > 1 else 0

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
        """See :class:`~coral.llm.engine.Engine`. Of several programs, those of the last."""
        part, found = self.parts[-1], []
        p = part.program.plan
        for k, layout in enumerate(p.layouts, part.first):
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
                if last or not self.keep:
                    raise
        raise AssertionError

    def _compute(self, session: ChipSession, x: np.ndarray, position: int) -> np.ndarray:
        cache, y, keys, values = session.cache, x, [], []
        for number in range(len(self.parts)):
            token = self._token(number, session, y, position)
            assert token.keys is not None
            assert token.values is not None
            y = token.result
            keys.append(token.keys)
            values.append(token.values)
        if self.check:
            self._compare(y, x, Cache(cache.keys.copy(), cache.values.copy()), position)
        cache.keys[:, position], cache.values[:, position] = np.concatenate(keys), np.concatenate(values)
        self.held = (session, position + 1)
        self._announce(position + 1)
        return y

    def _announce(self, position: int) -> None:
        """Sends the instructions of the next token; a stick that fails now is told when its results are needed."""
        if not self.ahead or position >= self.config.context:
            return
        try:
            call = self.device.announce(self._prepare(0, position))
        except CoralError:
            self.held = None
        else:
            self._ahead = Ahead(position, call, time.perf_counter())

    def _prepare(self, number: int, position: int) -> Prepared:
        if (number, position) not in self._prepared:
            program = self.parts[number].program.execution(position)
            self._prepared[number, position] = prepare(program, idempotent=not self.keep)
        return self._prepared[number, position]

    def _token(self, number: int, session: ChipSession, x: np.ndarray, position: int) -> Token:
        """A token in one of the programs."""
        p, cache = self.parts[number].program, self.parts[number].of(session.cache)
        key, prepared = ("run", number, position), self._prepare(number, position)
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead.position == position and self.held == (session, position) and ahead.call.error is None:
                self.held = None
                with suppress(GivenUp):
                    return p.unpack(position, self._call(key, prepared, p.pack(x, position, cache), ahead))
            self.held = None  # it runs on zeros and may leave keys of no word
        if self._call(("load", number, 0), self.caching[number], None):
            self.held = None
        if self.keep and self.held != (session, position):
            self._call(("begin", number, position), p.initialise(position), p.pack_caches(cache, position))
        self.held = None
        return p.unpack(position, self._call(key, prepared, p.pack(x, position, cache)))

    def _call(
        self, key: tuple[str, int, int], prepared: Program | Prepared, data: bytes | None, ahead: Ahead | None = None
    ) -> Any:
        """Run a program, or load the parameters if need be (then: whether it was). ``key``: for its predicted time,
        from which what travelled ``ahead`` while the host worked is taken off."""
        program = prepared.program if isinstance(prepared, Prepared) else prepared
        start, hidden = time.perf_counter(), 0.0
        if ahead is not None and data is not None:
            outputs: Any = ahead.call.give({"x": data}).result()
            instructions = sum(len(stream.data) for stream in program.bitstreams)
            hidden = min(instructions / timing.TO_CHIP_BYTES_PER_S, start - ahead.since)
        elif data is None:
            if not self.device.ensure_cached(program):
                return False
            outputs = True
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
            u.predicted_seconds + self._seconds[key] - hidden,
            u.chip_seconds + spent,
        )
        return outputs

    def _compare(self, result: np.ndarray, x: np.ndarray, cache: Cache, position: int) -> None:
        expected = step(self.model, x, cache, position)
        if self.form.logits:
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
