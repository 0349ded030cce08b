"""``coral eval stories``: perplexity and agreement of engines on text that the float model wrote.

Source: docs/stories.md, Quality.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coral.llm.checkpoint import Checkpoint
from coral.llm.engine import Engine
from coral.llm.reference import sample
from coral.llm.tokenizer import EOS

LATE = 256
"""Positions from here on are also counted apart."""
TRIES = 3


@dataclass(frozen=True)
class Quality:
    """Of one engine, over ``predictions`` words whose predecessors were given; ``late``: positions from 256 on.

    ``agreement``: part of predictions whose likeliest word is the float model's. NaN where there are no predictions.
    """

    engine: str
    predictions: int
    perplexity: float
    agreement: float
    late_predictions: int
    late_perplexity: float


def written(ck: Checkpoint, count: int, length: int, temperature: float = 0.8) -> list[list[int]]:
    """The longest ``count`` of several times as many stories by the float model, ids from BOS on; never the ones that
    engines are calibrated on."""
    stories = [sample(ck, min(length, ck.config.context), temperature, seed) for seed in range(TRIES * count)]
    return sorted(stories, key=len, reverse=True)[:count]


def predictions(engine: Engine, stories: Sequence[list[int]], together: int) -> list[np.ndarray]:
    """For every story, logits float32 [words, vocabulary] before each of its words, ``together`` stories at a time."""
    found: list[np.ndarray] = []
    for start in range(0, len(stories), together):
        part = stories[start : start + together]
        session = engine.session(len(part))
        steps = [session.logits()]
        for at in range(1, max(map(len, part)) - 1):
            ids = [story[at] if at < len(story) else EOS for story in part]
            steps.append(session.step(np.array(ids)))
        found += [np.stack([step[row] for step in steps[: len(story) - 1]]) for row, story in enumerate(part)]
    return found


def quality(
    name: str, logits: Sequence[np.ndarray], reference: Sequence[np.ndarray], stories: Sequence[list[int]]
) -> Quality:
    """Figures of an engine from its logits, the float engine's, and the words that came."""
    surprise, same, late = [], [], []
    for mine, theirs, story in zip(logits, reference, stories, strict=True):
        x = mine.astype(np.float64)
        x = x - x.max(1, keepdims=True)
        chances = x - np.log(np.exp(x).sum(1, keepdims=True))
        surprise.append(-np.take_along_axis(chances, np.array(story[1:])[:, None], 1)[:, 0])
        same.append(mine.argmax(1) == theirs.argmax(1))
        late.append(np.arange(1, len(story)) >= LATE)
    spent, equal, behind = map(np.concatenate, (surprise, same, late))
    after = float(np.exp(spent[behind].mean())) if behind.any() else float("nan")
    return Quality(name, len(spent), float(np.exp(spent.mean())), float(equal.mean()), int(behind.sum()), after)


def evaluate(
    names: Sequence[str],
    *,
    checkpoint: str | Path | None,
    tokenizer: Path | None,
    device: Literal["usb", "sim", "cpu"] | None,
    stories: int,
    length: int,
    as_json: bool,
    sha256: str = "",
) -> list[Quality]:
    """Prints a table, or JSON. Errors as ``coral serve``."""
    from coral.apps.stories.serve import choose_device

    choose_device(device)
    from rich.console import Console
    from rich.table import Table

    from coral.apps.stories.engines import load_model, open_engine, where

    console = Console(stderr=True)
    model = load_model(checkpoint, tokenizer, sha256)
    with console.status("the float model writes"):
        texts = written(model.checkpoint, stories, length)
    found: list[Quality] = []
    reference: list[np.ndarray] = []
    for name in ["float", *(name for name in names if name != "float")]:
        with console.status(f"engine {name}"):
            engine = open_engine(name, model)
            together = 1 if name in ("chip", "bits") else min(len(texts), 16)
            logits = predictions(engine, texts, together)
            reference = reference or logits
            found.append(quality(name, logits, reference, texts))
    if as_json:
        print(json.dumps({"model": model.name, "device": where(), "engines": [asdict(q) for q in found]}))
        return found
    table = Table(title=f"{model.name}, {len(texts)} stories that the float model wrote, words given; {where()}")
    for column in (
        "engine",
        "predictions",
        "perplexity",
        "over float",
        "same first choice",
        f"from position {LATE} on",
    ):
        table.add_column(column)
    for q in found:
        table.add_row(*_cells(q, found[0]))
    Console().print(table)
    return found


def _cells(q: Quality, base: Quality) -> tuple[Any, ...]:
    late = "-"
    if q.late_predictions:
        over = q.late_perplexity / base.late_perplexity - 1
        late = f"{q.late_perplexity:.3f} ({over:+.1%}, {q.late_predictions:,} predictions)"
    over = q.perplexity / base.perplexity - 1
    return q.engine, f"{q.predictions:,}", f"{q.perplexity:.3f}", f"{over:+.1%}", f"{q.agreement:.1%}", late
