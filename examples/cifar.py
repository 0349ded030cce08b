"""CIFAR-10 on the Edge TPU: the SpeedyConvNet of tinygrad's beautiful_cifar, its batch norms frozen and folded.

    MOCKCORAL=1 DEV=CORAL python examples/cifar.py --random     random weights and images: chip and host agree
    DEV=CORAL python examples/cifar.py train                    trains, quantises, classifies
    DEV=CPU python examples/cifar.py                            no chip at all, the same bytes

Weights are kept in the user's cache. Images come from $CIFAR_DIR or ../shared/data/cifar (the folder with
data_batch_1.bin and so on), or from tinygrad's downloader, whichever is there.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
from mlp import Split, run_steps, show, simulated, trained
from tinygrad import Tensor, TinyJit, nn
from tinygrad.helpers import Context
from tinygrad.nn.datasets import cifar

BATCHES = ("data_batch_1.bin", "test_batch.bin")
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class ConvGroup:
    """Two 3x3 convolutions, the first one pooled, each with a batch norm (of its batch) and quick GELU."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm(channels_out, track_running_stats=False, eps=1e-12, momentum=0.4)
        self.norm2 = nn.BatchNorm(channels_out, track_running_stats=False, eps=1e-12, momentum=0.4)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x).max_pool2d()).quick_gelu()
        return self.norm2(self.conv2(x)).quick_gelu()


class SpeedyConvNet:
    """float32 logits [n, 10] of normalised images [n, 3, 32, 32], as in tinygrad's examples/beautiful_cifar.py."""

    def __init__(self, widths: tuple[int, int, int] = (64, 256, 512)) -> None:
        self.whiten = nn.Conv2d(3, 24, 2, bias=False)
        self.groups = [ConvGroup(a, b) for a, b in zip((24, *widths), widths, strict=False)]
        self.linear = nn.Linear(widths[-1], 10, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.whiten(x).quick_gelu().sequential(self.groups)
        return self.linear(x.max((2, 3))) / 9


def folder() -> Path | None:
    """The folder with CIFAR-10's binary batches, or None."""
    named = os.environ.get("CIFAR_DIR")
    roots = [Path(named)] if named else [Path(__file__).resolve().parents[2] / "shared" / "data" / "cifar"]
    candidates = [root / part for root in roots for part in ("", "cifar-10-batches-bin")]
    found = next((c for c in candidates if all((c / name).is_file() for name in BATCHES)), None)
    if named and found is None:
        raise SystemExit(f"CIFAR_DIR is {named}, but there is no {' and '.join(BATCHES)} in it")
    return found


def load() -> Split:
    """Normalised images float32 [n, 3, 32, 32]: up to 50,000 to train, 10,000 held back."""
    if (here := folder()) is not None:
        files = sorted(here.glob("data_batch_*.bin")), [here / "test_batch.bin"]
        rows = [np.concatenate([np.fromfile(f, np.uint8).reshape(-1, 3073) for f in part]) for part in files]
        arrays = [(r[:, 1:].reshape(-1, 3, 32, 32), r[:, 0]) for r in rows]
    else:
        try:
            x, y, test_x, test_y = (t.numpy() for t in cifar(device="PYTHON"))
        except OSError as error:
            raise SystemExit(
                f"CIFAR-10 is not here and cannot be fetched ({error}): set CIFAR_DIR, or --random"
            ) from None
        arrays = [(x, y), (test_x, test_y)]
    (x, y), (test_x, test_y) = ((normalised(images), labels.astype(np.int32)) for images, labels in arrays)
    return Split(x, y, test_x, test_y)


def normalised(images: np.ndarray) -> np.ndarray:
    """float32 of pixels 0..255 [n, 3, 32, 32]."""
    mean, deviation = (np.float32(v).reshape(3, 1, 1) for v in (MEAN, DEVIATION))
    return (images.astype(np.float32) / np.float32(255) - mean) / deviation


def random(count: int = 320) -> Split:
    """Images of random colours in coarse squares, with labels that mean nothing."""
    rng = np.random.default_rng(0)
    x = normalised(rng.integers(0, 256, (count, 3, 8, 8)).repeat(4, 2).repeat(4, 3))
    y = rng.integers(0, 10, count).astype(np.int32)
    return Split(x[:-64], y[:-64], x[-64:], y[-64:])


def train(model: SpeedyConvNet, data: Split, steps: int, batch: int) -> None:
    """Nesterov momentum, label smoothing, a learning rate that rises for a quarter of the steps and then falls."""
    optimizer = nn.optim.SGD(nn.state.get_parameters(model), lr=0.0, momentum=0.85, nesterov=True, weight_decay=1e-4)
    done = 0

    @TinyJit
    @Context(TRAINING=1)
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).sparse_categorical_crossentropy(y, label_smoothing=0.2).backward()
        return loss.realize(*optimizer.schedule_step())

    def scheduled(x: Tensor, y: Tensor) -> Tensor:
        nonlocal done
        share, done = done / steps, done + 1
        optimizer.lr.assign(Tensor([0.5 * min(share / 0.25, (1 - share) / 0.75)])).realize()
        return step(x, y)

    run_steps(scheduled, data, steps, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["train"], help="train again, even if there are weights")
    parser.add_argument("--random", action="store_true", help="random weights and images instead of a trained network")
    parser.add_argument("--steps", type=int, default=1000, help="training steps")
    parser.add_argument("--batch", type=int, default=512, help="images of a training step")
    parser.add_argument("--images", type=int, help="how many held-back images to classify")
    chosen = parser.parse_args()
    Tensor.manual_seed(0)
    model, data = SpeedyConvNet(), random() if chosen.random else load()
    if not chosen.random:
        again = chosen.action == "train"
        trained(model, "cifar", lambda: train(model, data, chosen.steps, chosen.batch), again=again)
    count = chosen.images or (4 if simulated() else len(data.test_x))
    data = Split(data.train_x, data.train_y, data.test_x[:count], data.test_y[:count])
    show(model, data, batch=min(count, 32), jit=True, sample=64)


if __name__ == "__main__":
    main()
