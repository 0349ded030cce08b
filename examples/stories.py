"""A language model writes a story, word by word, its matrix products on the Edge TPU:

MOCKCORAL=1 DEV=CORAL python examples/stories.py                   the simulated stick; DEV=CORAL alone: a real one
DEV=CPU python examples/stories.py                                 the same text, without any chip
... --prompt "Once upon a time" --temperature 0.8 --seed 3 --checkpoint stories15M
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from coral.apps.stories.engines import Model, load_model, open_engine, where
from coral.llm.engine import Engine, Usage
from coral.llm.story import Sampling, Stories
from coral.llm.tokenizer import BOS

console = Console(highlight=False)


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that all story examples have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--checkpoint", help="a llama2.c model: file, public name, address (default: stories260K.bin)")
    parser.add_argument("--sha256", default="", help="its sha256; another file is refused")
    parser.add_argument("--tokenizer", type=Path, help="its tokenizer.bin")
    parser.add_argument("--engine", default="chip" if os.environ.get("CHIP", "0") != "0" else "matmul")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def opened(options: argparse.Namespace, rows: int) -> tuple[Model, Engine]:
    """The model and the engine that the options ask for, ready for so many stories at once."""
    model = load_model(options.checkpoint, options.tokenizer, options.sha256)
    with console.status("quantising, compiling"):
        engine = open_engine(options.engine, model)
        engine.session(rows).step(np.full(rows, BOS))
    return model, engine


def figures(engine: Engine, used: Usage, words: int, steps: int, seconds: float) -> None:
    """What it cost, here and, predicted, on a stick."""
    table = Table(show_header=False, title=f"{engine.name} on {where()}")
    rows: list[tuple[str, Any]] = [
        ("words written", f"{words:,}"),
        ("words per second, measured here", f"{words / seconds:,.1f}"),
        ("milliseconds per step, measured here", f"{1e3 * seconds / steps:,.1f}"),
    ]
    if used.calls:
        host = max(seconds - used.chip_seconds, 0.0)
        rows += [
            ("chip calls per step", f"{used.calls / steps:,.0f}"),
            (
                "USB bytes per step, to the stick / from it",
                f"{used.to_chip_bytes / steps:,.0f} / {used.from_chip_bytes / steps:,.0f}",
            ),
            ("chip and USB, milliseconds per step, predicted", f"{1e3 * used.predicted_seconds / steps:,.2f}"),
            ("host, milliseconds per step, measured here", f"{1e3 * host / steps:,.2f}"),
            ("words per second of a stick, predicted", f"{words / (used.predicted_seconds + host):,.0f}"),
            ("... of chip and USB alone, predicted", f"{words / used.predicted_seconds:,.0f}"),
        ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def one_story(description: str) -> argparse.ArgumentParser:
    """The options of examples that write one."""
    parser = arguments(description)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--steps", type=int, default=256, help="words at most")
    return parser


def tell(options: argparse.Namespace, model: Model, engine: Engine) -> None:
    """Writes it, and what it cost."""
    how = Sampling(options.temperature, options.top_p, options.seed, options.steps)
    prompt = model.tokenizer.encode(options.prompt)
    stories = Stories(engine.session(1), model.tokenizer, [prompt], how, engine.config.context)
    console.print(options.prompt, end="", soft_wrap=True)
    begin, before, steps = time.perf_counter(), engine.usage(), 0
    while not stories.done:
        for _, text in stories.advance():
            console.print(text, end="", soft_wrap=True, markup=False)
        steps += 1
    seconds = time.perf_counter() - begin
    console.print()
    figures(engine, engine.usage().since(before), len(stories.rows[0].ids) - len(prompt), steps, seconds)


def main() -> None:
    """One story."""
    options = one_story("A language model writes a story.").parse_args()
    tell(options, *opened(options, 1))


if __name__ == "__main__":
    main()
