"""Handwritten digits (scikit-learn's, 8x8 pixels) on the Edge TPU: train, quantise, classify.

MOCKCORAL=1 DEV=CORAL python examples/digits.py      the simulated stick (this is ``make demo``)
DEV=CORAL python examples/digits.py                  a real one
DEV=CPU python examples/digits.py                    no chip at all, the same bytes
"""

from __future__ import annotations

import numpy as np
from mlp import MLP, Split, show, train
from sklearn.datasets import load_digits
from tinygrad import Tensor


def load() -> Split:
    """1,797 images, shuffled; the last 360 are held back."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x, y = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    return Split(x[:-360], y[:-360], x[-360:], y[-360:])


def main() -> None:
    Tensor.manual_seed(0)
    data = load()
    model = MLP(64, 64, 10)
    train(model, data, steps=150, batch=128)
    show(model, data, batch=60, picture=8)


if __name__ == "__main__":
    main()
