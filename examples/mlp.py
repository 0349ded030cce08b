"""What the examples share: an MLP in plain tinygrad, training, cached weights, and the report of a quantised run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tinygrad import Device, Tensor, TinyJit, nn
from tinygrad.helpers import Context

import coral

console = Console()


class MLP:
    """Linear layers with ReLU between them; ``sizes`` are the widths from input to output."""

    def __init__(self, *sizes: int) -> None:
        self.layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


@dataclass(frozen=True)
class Split:
    """Images [n, ...], as the model takes them, and labels int32 [n], for training and held back."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def train(model: Any, data: Split, *, steps: int, batch: int, seed: int = 0, lr: float = 5e-3) -> None:
    """Adam on random batches, on the default device's host path."""
    optimizer = nn.optim.Adam(nn.state.get_parameters(model), lr=lr)

    @TinyJit
    @Context(TRAINING=1)
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).sparse_categorical_crossentropy(y).backward()
        return loss.realize(*optimizer.schedule_step())

    run_steps(step, data, steps, batch, seed)


def run_steps(step: Callable[[Tensor, Tensor], Tensor], data: Split, steps: int, batch: int, seed: int = 0) -> None:
    """``step`` on random batches, with a progress bar."""
    rng = np.random.default_rng(seed)
    for _ in track(range(steps), description="training in float", console=console, transient=True):
        picked = rng.integers(0, len(data.train_x), batch)
        step(Tensor(data.train_x[picked]).realize(), Tensor(data.train_y[picked]).realize())


def trained(model: Any, name: str, training: Callable[[], None], *, again: bool) -> None:
    """Weights out of the user's cache; where there are none, or on ``again``, from ``training`` and into the cache."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinycoral"
    file = folder / f"{name}.safetensors"
    if file.is_file() and not again:
        nn.state.load_state_dict(model, nn.state.safe_load(file), verbose=False)
        console.print(f"weights from {file}; `train` trains again", highlight=False, soft_wrap=True)
        return
    training()
    folder.mkdir(parents=True, exist_ok=True)
    nn.state.safe_save(nn.state.get_state_dict(model), str(file))


def logits(model: Any, images: np.ndarray, *, batch: int, title: str = "", jit: bool = False) -> np.ndarray:
    """float32 [n, classes] of all images, ``batch`` at a time; with ``jit`` the last batch is filled up with zeros."""
    forward = TinyJit(lambda x: model(x).realize()) if jit else model
    starts = range(0, len(images), batch)
    parts = []
    for i in track(starts, description=title, console=console, transient=True) if title else starts:
        rows = images[i : i + batch]
        missing = batch - len(rows) if jit else 0
        filled = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])
        parts.append(forward(Tensor(filled).realize()).numpy()[: len(rows)])
    return np.concatenate(parts)


@contextmanager
def host_only() -> Iterator[None]:
    """Inside, CORAL's kernels run on the host: the same bytes must come out."""
    from coral.backend import selection_off

    with selection_off(), Context(DEBUG=0):
        yield


def confidence(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def simulated() -> bool:
    """Whether the default device is the simulated stick."""
    from coral.backend.device import SIMIface

    return Device.DEFAULT.startswith("CORAL") and isinstance(Device[Device.DEFAULT].iface, SIMIface)


def where() -> str:
    """A sentence that says on what the chip programs ran."""
    if not Device.DEFAULT.startswith("CORAL"):
        return f"ran on DEV={Device.DEFAULT}: no Edge TPU program was involved"
    return "ran on the SIMULATED stick: no hardware was involved" if simulated() else "ran on the stick"


def draw(image: np.ndarray, width: int) -> str:
    """A grey image of width * width values as text: two pixels a character, dark or light."""
    dark = image.reshape(width, width) > 0.4 * (image.max() or 1)
    return "\n".join(
        "".join(" ▀▄█"[a + 2 * b] for a, b in zip(*rows, strict=True))
        for rows in zip(dark[::2], dark[1::2], strict=True)
    )


def show(
    model: Any, data: Split, *, batch: int, picture: int = 0, examples: int = 5, jit: bool = False, sample: int = 256
) -> None:
    """Quantise with ``sample`` training images, run the held-back ones, and print accuracy, chip calls, bytes and
    predicted time; ``picture``: the width of square grey images, which are drawn.
    """
    floats = logits(model, data.test_x, batch=batch)
    with console.status("quantising"):
        quantised, report = coral.quantize(model, data.train_x[:sample], report=True)
    console.print(str(report), highlight=False, soft_wrap=True)
    on_chip = Device.DEFAULT.startswith("CORAL")
    if on_chip:
        from coral.backend import reset_stats

        reset_stats()
    begin = time.perf_counter()
    codes = logits(quantised, data.test_x, batch=batch, title=f"{len(data.test_x)} images in uint8", jit=jit)
    elapsed = time.perf_counter() - begin

    table = Table(title="held-back images", show_lines=True)
    for column in ("image", "label", "prediction", "confidence"):
        table.add_column(column, vertical="middle")
    for k in range(min(examples, len(codes))):
        guess = int(codes[k].argmax())
        sure = confidence(codes[k])[guess]
        mark = "[green]✓[/]" if guess == data.test_y[k] else "[red]✗[/]"
        image = draw(data.test_x[k], picture) if picture else f"number {k}"
        table.add_row(image, str(data.test_y[k]), f"{guess} {mark}", f"{sure:.1%}")
    console.print(table)
    accuracy = [float((scores.argmax(1) == data.test_y).mean()) for scores in (floats, codes)]
    console.print(f"accuracy on {len(data.test_y)} held-back images: float {accuracy[0]:.2%}, uint8 {accuracy[1]:.2%}")
    if on_chip:
        summary(quantised, data, codes, batch, elapsed)
    console.print(f"[bold]{where()}[/]")


def summary(model: Any, data: Split, codes: np.ndarray, batch: int, elapsed: float) -> None:
    """What the chip did, and that the host gives the same bytes."""
    from coral.backend import stats

    backend, chip = stats(), Device[Device.DEFAULT].chip.stats
    rows = [
        ("layers in chip programs", f"{backend.chip_layers:,} in {backend.chip_programs:,}"),
        ("kernels on the host", f"{backend.host_programs:,}"),
        ("chip calls / images or rows in them", f"{chip.calls:,} / {backend.chip_rows:,}"),
        ("weights uploaded", f"{chip.uploads:,} times, {chip.upload_bytes:,} bytes"),
        ("instruction bytes per call", f"{chip.instruction_bytes / max(chip.calls, 1):,.0f}"),
        ("USB bytes in all", f"{chip.usb_bytes:,}"),
        ("time per chip call, predicted", f"{chip.predicted_seconds_per_call * 1e6:,.0f} µs"),
        ("time of the run here, measured", f"{elapsed:.1f} s"),
    ]
    table = Table(show_header=False, title="what the chip did")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    with host_only():
        same = np.array_equal(logits(model, data.test_x, batch=batch), codes)
    console.print(f"the host computes {'the same bytes' if same else '[red]OTHER BYTES: please report this[/]'}")
