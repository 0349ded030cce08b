"""MNIST on the Edge TPU with an MLP: 8,000 of the 10,000 test images train it, 2,000 are held back.

    MOCKCORAL=1 DEV=CORAL python examples/mnist.py       the simulated stick
    DEV=CORAL python examples/mnist.py                   a real one

Images come from $MNIST_DIR, from ../shared/data/mnist, or from tinygrad's downloader, whichever is there.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
from mlp import MLP, Split, show, train
from tinygrad import Tensor
from tinygrad.nn.datasets import mnist

IMAGES, LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


def folder() -> Path | None:
    """The folder with the IDX files, or None."""
    named = os.environ.get("MNIST_DIR")
    candidates = [Path(named)] if named else [Path(__file__).resolve().parents[2] / "shared" / "data" / "mnist"]
    found = next((c for c in candidates if (c / IMAGES).is_file() and (c / LABELS).is_file()), None)
    if named and found is None:
        raise SystemExit(f"MNIST_DIR is {named}, but there is no {IMAGES} and {LABELS} in it")
    return found


def load() -> Split:
    """The 10,000 images in a fixed shuffle, split 8,000 / 2,000."""
    if (here := folder()) is not None:
        pixels = np.frombuffer(gzip.decompress((here / IMAGES).read_bytes()), np.uint8, offset=16).reshape(-1, 784)
        labels = np.frombuffer(gzip.decompress((here / LABELS).read_bytes()), np.uint8, offset=8)
    else:
        _, _, images, targets = mnist(device="PYTHON")
        pixels, labels = images.numpy().reshape(-1, 784), targets.numpy()
    order = np.random.default_rng(0).permutation(len(pixels))
    x, y = (pixels[order] / 255).astype(np.float32), labels[order].astype(np.int32)
    return Split(x[:8000], y[:8000], x[8000:], y[8000:])


def main() -> None:
    Tensor.manual_seed(0)
    data = load()
    model = MLP(784, 128, 64, 10)
    train(model, data, steps=600, batch=128)
    show(model, data, batch=100, picture=28)


if __name__ == "__main__":
    main()
