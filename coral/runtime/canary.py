"""The program by which the driver sees whether a stick computes rightly again. Source: docs/driver.md."""

from __future__ import annotations

import functools

import numpy as np

from coral.codegen.fc import INPUT, OUTPUT, FcQuant, fully_connected
from coral.driver import Canary

N = 64
LARGEST_INPUT, LARGEST_BIAS = 200, 50


@functools.cache
def canary() -> Canary:
    """A layer of 64 x 64 that puts its inputs into another order and adds a bias: the answer is known without any
    arithmetic of the chip."""
    order = [(37 * n + 11) % N for n in range(N)]
    x = bytes((91 * n + 17) % LARGEST_INPUT for n in range(N))
    weights, bias = np.zeros((N, N), np.uint8), np.arange(N, dtype=np.int32) % LARGEST_BIAS
    weights[np.arange(N), order] = 1
    layer = fully_connected(N, N, FcQuant(0, 0, 0, 1.0, 0.0, 255.0))
    y = bytes(x[source] + n % LARGEST_BIAS for n, source in enumerate(order))
    return Canary(layer.execution, {INPUT: x}, {OUTPUT: y}, layer.caching(layer.blob(weights, bias)))
