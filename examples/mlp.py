"""What digits.py and mnist.py share: an MLP in plain tinygrad, its training, and the report of a quantised run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

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
    """Images float32 [n, pixels] in 0..1 and labels int32 [n], for training and held back."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def train(model: MLP, data: Split, *, steps: int, batch: int, seed: int = 0) -> None:
    """Adam on random batches, on the default device's host path."""
    optimizer = nn.optim.Adam(nn.state.get_parameters(model), lr=5e-3)
    rng = np.random.default_rng(seed)

    @TinyJit
    @Context(TRAINING=1)
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).sparse_categorical_crossentropy(y).backward()
        return loss.realize(*optimizer.schedule_step())

    for _ in track(range(steps), description="training in float", console=console, transient=True):
        picked = rng.integers(0, len(data.train_x), batch)
        step(Tensor(data.train_x[picked]).realize(), Tensor(data.train_y[picked]).realize())


def logits(model: MLP, images: np.ndarray, *, batch: int, title: str = "") -> np.ndarray:
    """float32 [n, classes] of all images, ``batch`` rows at a time."""
    starts = range(0, len(images), batch)
    steps = track(starts, description=title, console=console, transient=True) if title else starts
    return np.concatenate([model(Tensor(images[i : i + batch])).numpy() for i in steps])


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


def where() -> str:
    """A sentence that says on what the chip programs ran."""
    if not Device.DEFAULT.startswith("CORAL"):
        return f"ran on DEV={Device.DEFAULT}: no Edge TPU program was involved"
    from coral.backend.device import SIMIface

    simulated = isinstance(Device[Device.DEFAULT].iface, SIMIface)
    return "ran on the SIMULATED stick: no hardware was involved" if simulated else "ran on the stick"


def draw(image: np.ndarray, width: int) -> str:
    """A grey image, float 0..1 [width * width], as text: two pixels a character, dark or light."""
    dark = image.reshape(width, width) > 0.4
    return "\n".join(
        "".join(" ▀▄█"[a + 2 * b] for a, b in zip(*rows, strict=True))
        for rows in zip(dark[::2], dark[1::2], strict=True)
    )


def show(model: MLP, data: Split, *, batch: int, picture: int, examples: int = 5) -> None:
    """Quantise, run the held-back images, and print digits, accuracy, chip calls, bytes and predicted time."""
    floats = logits(model, data.test_x, batch=batch)
    quantised, report = coral.quantize(model, data.train_x[:256], report=True)
    console.print(str(report), highlight=False, soft_wrap=True)
    on_chip = Device.DEFAULT.startswith("CORAL")
    if on_chip:
        from coral.backend import reset_stats

        reset_stats()
    begin = time.perf_counter()
    codes = logits(quantised, data.test_x, batch=batch, title=f"{len(data.test_x)} images in uint8")
    elapsed = time.perf_counter() - begin

    table = Table(title="held-back digits", show_lines=True)
    for column in ("image", "label", "prediction", "confidence"):
        table.add_column(column, vertical="middle")
    for k in range(examples):
        guess = int(codes[k].argmax())
        sure = confidence(codes[k])[guess]
        mark = "[green]✓[/]" if guess == data.test_y[k] else "[red]✗[/]"
        table.add_row(draw(data.test_x[k], picture), str(data.test_y[k]), f"{guess} {mark}", f"{sure:.1%}")
    console.print(table)
    accuracy = [float((scores.argmax(1) == data.test_y).mean()) for scores in (floats, codes)]
    console.print(f"accuracy on {len(data.test_y)} held-back images: float {accuracy[0]:.2%}, uint8 {accuracy[1]:.2%}")
    if on_chip:
        summary(quantised, data, codes, batch, elapsed)
    console.print(f"[bold]{where()}[/]")


def summary(model: MLP, data: Split, codes: np.ndarray, batch: int, elapsed: float) -> None:
    """What the chip did, and that the host gives the same bytes."""
    from coral.backend import stats

    backend, chip = stats(), Device[Device.DEFAULT].chip.stats
    rows = [
        ("kernels run as chip programs / on the host", f"{backend.chip_programs:,} / {backend.host_programs:,}"),
        ("chip calls (one row each)", f"{chip.calls:,}"),
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
