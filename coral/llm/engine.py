"""What writes stories: engines with sessions behind one interface, and the engine of plain tinygrad.

An engine knows a model; a session holds the keys and values of some stories that grow in step. Source: docs/stories.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tinygrad.engine.jit import TinyJit
from tinygrad.helpers import CACHELEVEL, Context
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import UOp

from coral import CoralError
from coral.llm.checkpoint import Checkpoint, Config
from coral.llm.model import Llama
from coral.llm.reference import sample
from coral.llm.tokenizer import BOS
from coral.quantize.api import quantize


class EngineError(CoralError):
    """A session that is asked for what it cannot do; the message has value and limit."""


@dataclass(frozen=True)
class Usage:
    """Since the engine was made: calls of the chip, bytes over USB, seconds of them predicted for a stick at its clock,
    and seconds measured here, on whatever device it is."""

    calls: int = 0
    to_chip_bytes: int = 0
    from_chip_bytes: int = 0
    predicted_seconds: float = 0.0
    chip_seconds: float = 0.0

    def since(self, before: Usage) -> Usage:
        """The difference."""
        return Usage(*(now - then for now, then in zip(vars(self).values(), vars(before).values(), strict=True)))

    def plus(self, other: Usage) -> Usage:
        """The sum."""
        return Usage(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Weights:
    """Where on the chip some weights lie: 256-byte rows [row, row + rows) of a tile's wide memory."""

    name: str
    tile: int
    row: int
    rows: int


class Session(Protocol):
    """``rows`` stories that grow in step. ``position`` words are in, BOS included."""

    rows: int
    position: int

    def logits(self) -> np.ndarray:
        """float32 [rows, vocabulary] of the next word, from the last step."""
        ...

    def step(self, ids: np.ndarray) -> np.ndarray:
        """Takes the next word of every story, int [rows]; returns ``logits()``. If it raises, nothing has changed and
        the same step may be tried again. EngineError when the context is full."""
        ...

    def rewind(self, position: int) -> None:
        """Forgets everything from ``position`` >= 1 on; the next step is at ``position``."""
        ...


@runtime_checkable
class Narrowing(Protocol):
    """A session that may leave out words that cannot be chosen."""

    def narrow(self, temperature: float, top_p: float) -> None:
        """Words are chosen so from now on: logits of others may be -inf."""
        ...


class Engine(Protocol):
    """A model on some device."""

    name: str
    config: Config

    def session(self, rows: int) -> Session:
        """Stories that have just begun. EngineError for a number of rows that the engine does not do."""
        ...

    def session_bytes(self, rows: int) -> int:
        """Host memory of a session."""
        ...

    def usage(self) -> Usage:
        """What was sent and took time so far."""
        ...

    def weights(self) -> list[Weights]:
        """Which weights lie where now."""
        ...


def check_step(config: Config, position: int, ids: np.ndarray, rows: int) -> None:
    """:raises EngineError: a step that no engine can take"""
    if position >= config.context:
        raise EngineError(f"the context of {config.context} words is full")
    if ids.shape != (rows,) or ids.min() < 0 or ids.max() >= config.vocabulary:
        raise EngineError(f"a step takes {rows} ids of 0..{config.vocabulary - 1}, not {ids.tolist()[:8]}")


def check_rewind(session: Session, position: int) -> None:
    """:raises EngineError: a position that the session has not reached"""
    if not 1 <= position <= session.position:
        raise EngineError(f"cannot go back to position {position}, the session is at {session.position}")


ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sessions have so many rows inside; others are filled up. A number of rows is compiled once."""


class TinygradEngine:
    """A :class:`~coral.llm.model.Llama`, float or quantised, on its device."""

    def __init__(self, name: str, model: Llama) -> None:
        self.name, self.model, self.config = name, model, model.config
        self.symbol = UOp.variable("position", 1, model.config.context - 1)
        self._steps: dict[int, Any] = {}

    def session(self, rows: int) -> TinygradSession:
        """See :class:`Engine`; up to 256 rows."""
        if not 1 <= rows <= ROWS[-1]:
            raise EngineError(f"{rows} stories at once, 1 to {ROWS[-1]} are possible")
        return TinygradSession(self, rows)

    def session_bytes(self, rows: int) -> int:
        """See :class:`Engine`."""
        c = self.config
        return 8 * c.layers * c.kv_dim * c.context * filled(rows)

    def usage(self) -> Usage:
        """Nothing here: devices know more."""
        return Usage()

    def weights(self) -> list[Weights]:
        """None: plain tinygrad places no weights."""
        return []

    def compiled(self, rows: int) -> Any:
        """The step for ``rows``, made on first use by running it until it is captured."""
        if rows not in self._steps:
            step = TinyJit(lambda x, position, *caches: self.model.step(x, position, list(caches)).realize())
            caches = self.model.cache(rows)
            # tinygrad's cache of compiled kernels is a SQLite connection, which belongs to one thread
            here = threading.current_thread() is threading.main_thread()
            with Context(CACHELEVEL=CACHELEVEL.value if here else 0):
                for position in (1, 2, 3):
                    self._run(step, np.full(rows, BOS), position, caches)
            self._steps[rows] = step
        return self._steps[rows]

    def _run(self, step: Any, ids: np.ndarray, position: int, caches: list[Tensor]) -> np.ndarray:
        x = Tensor(self.model.embedding[ids], device=self.model.device).realize()
        return step(x, self.symbol.bind(position), *caches).numpy()

    def step(self, ids: np.ndarray, position: int, caches: list[Tensor]) -> np.ndarray:
        """Logits after ``ids`` at ``position``, which go into ``caches``."""
        return self._run(self.compiled(len(ids)), ids, position, caches)


def filled(rows: int) -> int:
    """The number of rows that is compiled for ``rows``."""
    return next(n for n in ROWS if n >= rows)


class TinygradSession:
    """See :class:`Session`."""

    def __init__(self, engine: TinygradEngine, rows: int) -> None:
        self.rows, self.position, self._engine = rows, 1, engine
        self._ids = np.full(filled(rows), BOS)
        self._caches = engine.model.cache(len(self._ids))
        self._logits = np.tile(engine.model.first_logits, (rows, 1))

    def logits(self) -> np.ndarray:
        """See :class:`Session`."""
        return self._logits

    def step(self, ids: np.ndarray) -> np.ndarray:
        """See :class:`Session`."""
        check_step(self._engine.config, self.position, ids, self.rows)
        self._ids[: self.rows] = ids
        self._logits = self._engine.step(self._ids, self.position, self._caches)[: self.rows]
        self.position += 1
        return self._logits

    def rewind(self, position: int) -> None:
        """See :class:`Session`. Keys and values behind ``position`` stay and are overwritten."""
        check_rewind(self, position)
        self.position = position


def quantised(model: Llama, stories: Iterable[list[int]]) -> Llama:
    """The uint8 model, calibrated on ``stories`` (ids from BOS on, at least two). QuantizeError for unusable ones."""
    batches = [(Tensor(model.embedding[ids[1:]][None], device=model.device),) for ids in stories]
    return quantize(model, batches)


def calibration_stories(ck: Checkpoint, count: int = 6, length: int = 200, temperature: float = 0.8) -> list[list[int]]:
    """What the float model itself writes, with fixed seeds."""
    return [sample(ck, min(length, ck.config.context), temperature, seed) for seed in range(1000, 1000 + count)]
