"""MNIST on the Edge TPU: tinygrad's beautiful_mnist, 8,000 of the 10,000 test images to train it, 2,000 held back.

    MOCKCORAL=1 DEV=CORAL python examples/mnist.py       the simulated stick
    DEV=CORAL python examples/mnist.py                   a real one
    DEV=CPU python examples/mnist.py train               no chip at all, the same bytes; trains again

The first run trains (or ``train`` does); weights are kept in the user's cache. ``--mlp`` takes three linear layers
instead. Images come from $MNIST_DIR, from ../shared/data/mnist, or from tinygrad's downloader, whichever is there.
"""

from __future__ import annotations

import argparse
import gzip
import os
from pathlib import Path

import numpy as np
from mlp import MLP, Split, show, simulated, train, trained
from tinygrad import Tensor, nn
from tinygrad.nn.datasets import mnist

IMAGES, LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


class Model:
    """The network of tinygrad's examples/beautiful_mnist.py: float32 logits [n, 10] of pixels 0..255 [n, 1, 28, 28]."""

    def __init__(self) -> None:
        self.layers = [
            nn.Conv2d(1, 32, 5), Tensor.relu,
            nn.Conv2d(32, 32, 5), Tensor.relu,
            nn.BatchNorm(32), Tensor.max_pool2d,
            nn.Conv2d(32, 64, 3), Tensor.relu,
            nn.Conv2d(64, 64, 3), Tensor.relu,
            nn.BatchNorm(64), Tensor.max_pool2d,
            lambda x: x.flatten(1), nn.Linear(576, 10),
        ]  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        return x.sequential(self.layers)


def folder() -> Path | None:
    """The folder with the IDX files, or None."""
    named = os.environ.get("MNIST_DIR")
    candidates = [Path(named)] if named else [Path(__file__).resolve().parents[2] / "shared" / "data" / "mnist"]
    found = next((c for c in candidates if (c / IMAGES).is_file() and (c / LABELS).is_file()), None)
    if named and found is None:
        raise SystemExit(f"MNIST_DIR is {named}, but there is no {IMAGES} and {LABELS} in it")
    return found


def load() -> Split:
    """The 10,000 images in a fixed shuffle, split 8,000 / 2,000, float32 0..1 [n, 784]."""
    if (here := folder()) is not None:
        pixels = np.frombuffer(gzip.decompress((here / IMAGES).read_bytes()), np.uint8, offset=16).reshape(-1, 784)
        labels = np.frombuffer(gzip.decompress((here / LABELS).read_bytes()), np.uint8, offset=8)
    else:
        _, _, images, targets = mnist(device="PYTHON")
        pixels, labels = images.numpy().reshape(-1, 784), targets.numpy()
    order = np.random.default_rng(0).permutation(len(pixels))
    x, y = (pixels[order] / 255).astype(np.float32), labels[order].astype(np.int32)
    return Split(x[:8000], y[:8000], x[8000:], y[8000:])


def as_images(data: Split) -> Split:
    """The same as pixels uint8 [n, 1, 28, 28]."""
    pixels = [np.rint(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28) for x in (data.train_x, data.test_x)]
    return Split(pixels[0], data.train_y, pixels[1], data.test_y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["train"], help="train again, even if there are weights")
    parser.add_argument("--mlp", action="store_true", help="three linear layers instead of convolutions")
    parser.add_argument("--steps", type=int, help="training steps of 128 images")
    parser.add_argument("--images", type=int, help="how many held-back images to classify")
    chosen = parser.parse_args()
    Tensor.manual_seed(0)
    data, again = load(), chosen.action == "train"
    if chosen.mlp:
        model, name, batch, rate = MLP(784, 128, 64, 10), "mnist_mlp", 100, 5e-3
    else:
        model, name, batch, rate, data = Model(), "mnist", 32, 1e-3, as_images(data)
    steps = chosen.steps or (600 if chosen.mlp else 150)
    trained(model, name, lambda: train(model, data, steps=steps, batch=128, lr=rate), again=again)
    count = chosen.images or (len(data.test_x) if chosen.mlp or not simulated() else 64)
    data = Split(data.train_x, data.train_y, data.test_x[:count], data.test_y[:count])
    show(model, data, batch=batch, picture=28, jit=not chosen.mlp)


if __name__ == "__main__":
    main()
