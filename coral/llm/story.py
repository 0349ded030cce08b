"""Words chosen from logits on the host, and stories that grow by them. Source: docs/stories.md, Sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coral import CoralError
from coral.llm.engine import Narrowing, Session
from coral.llm.tokenizer import BOS, EOS, TextStream, Tokenizer

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 200


class SamplingError(CoralError):
    """A sampling value outside its range; the message has name, value and range."""


@dataclass(frozen=True)
class Sampling:
    """How words are chosen: the likeliest at ``temperature`` 0; else from the likeliest words that together have
    ``top_p``. The same seed gives the same words, whatever else is running. ``stop``: texts that end a story.

    :raises SamplingError: a value outside its range
    """

    temperature: float = 0.8
    top_p: float = 1.0
    seed: int = 0
    words: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0, 2), ("top_p", 0, 1)):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and low <= value <= high):
                raise SamplingError(f"{name} is {value}, it must be {low} to {high}")
        if not 0 <= self.seed < 2**63:
            raise SamplingError(f"seed is {self.seed}, it must be 0 to 2^63 - 1")
        if self.words < 1:
            raise SamplingError(f"{self.words} words are wanted, it must be at least 1")
        if len(self.stop) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARACTERS for text in self.stop):
            raise SamplingError(f"stop takes up to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters")


def choose(logits: np.ndarray, chances: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """int [rows] of logits [rows, vocabulary]; ``chances`` [rows], 0 <= chance < 1, pick from the distribution."""
    if temperature == 0:
        return logits.argmax(1)
    scaled = logits.astype(np.float64) / max(temperature, 1e-3)
    shares = np.exp(scaled - scaled.max(1, keepdims=True))
    if top_p < 1:
        ranked = np.sort(shares, axis=1)[:, ::-1]
        before = ranked.cumsum(1) - ranked
        kept = np.maximum((before < top_p * shares.sum(1, keepdims=True)).sum(1, keepdims=True), 1)
        shares[shares < np.take_along_axis(ranked, kept - 1, 1)] = 0
    sums = shares.cumsum(1)
    return (sums <= chances[:, None] * sums[:, -1:]).sum(1)


@dataclass
class Row:
    """One story: ids without BOS, how many of them are the prompt's, and why it ended ("stop", "length" or "")."""

    ids: list[int]
    prompt: int
    stream: TextStream
    random: np.random.Generator
    held: str = ""
    ended: str = ""


class Stories:
    """Stories of one session, from prompts (ids without BOS; they may differ in length) by one ``Sampling``.

    :raises SamplingError: a prompt that leaves no room for a word
    """

    def __init__(
        self, session: Session, tokenizer: Tokenizer, prompts: Sequence[list[int]], how: Sampling, context: int
    ) -> None:
        self.session, self.how, self.context = session, how, context
        if isinstance(session, Narrowing):
            session.narrow(how.temperature, how.top_p)
        longest = 1 + max(map(len, prompts))
        if longest >= context:
            raise SamplingError(f"the prompt has {longest} words with the story's begin, the context is {context}")
        self.rows = []
        for number, prompt in enumerate(prompts):
            stream = TextStream(tokenizer)
            for word in prompt:
                stream.push(word)
            random = np.random.default_rng([how.seed, number])
            self.rows.append(Row(list(prompt), len(prompt), stream, random))

    @property
    def done(self) -> bool:
        """Whether every story has ended."""
        return all(row.ended for row in self.rows)

    def advance(self) -> list[tuple[int, str]]:
        """One step, and the next word of every story whose words are all in: (row, new text), for texts that grew.

        What the session raises passes through; nothing has changed then, and ``advance`` may be called again.
        """
        at = self.session.position
        if all(len(row.ids) >= at or row.ended for row in self.rows):
            filler = (row.ids[at - 1] if len(row.ids) >= at else EOS for row in self.rows)
            self.session.step(np.fromiter(filler, np.int64, len(self.rows)))
            at += 1
        open_rows = [number for number, row in enumerate(self.rows) if not row.ended and len(row.ids) < at]
        if not open_rows:
            return []
        chances = np.array([self.rows[number].random.random() for number in open_rows])
        chosen = choose(self.session.logits()[open_rows], chances, self.how.temperature, self.how.top_p)
        grown = [
            (number, self._add(self.rows[number], int(word))) for number, word in zip(open_rows, chosen, strict=True)
        ]
        return [(number, text) for number, text in grown if text]

    def _add(self, row: Row, word: int) -> str:
        """The text that a story gains by its next word; text that may become a stop is held back."""
        if word in (BOS, EOS):
            row.ended = "stop"
            return self._rest(row)
        row.ids.append(word)
        row.held += row.stream.push(word)
        found = [at for at in (row.held.find(text) for text in self.how.stop) if at >= 0]
        if found:
            row.ended, text, row.held = "stop", row.held[: min(found)], ""
            return text
        if len(row.ids) - row.prompt >= self.how.words or len(row.ids) >= self.context - 1:
            row.ended = "length"
            return self._rest(row)
        keep = max((n for text in self.how.stop for n in range(1, len(text)) if row.held.endswith(text[:n])), default=0)
        at = len(row.held) - keep
        text, row.held = row.held[:at], row.held[at:]
        return text

    def _rest(self, row: Row) -> str:
        text, row.held = row.held + row.stream.end(), ""
        return text
