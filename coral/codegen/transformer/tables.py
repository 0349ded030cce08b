"""Tables of the non-linear unit for functions that no compiler's table covers. Source: docs/transformer.md, Tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from coral.numerics import EXP_65535, LOGISTIC, RSQRT, SPLINE_ORDER, SPLINE_SEGMENTS, Spline

LARGEST = 65535
"""A 16-bit result of 1.0."""
FULL = 255
"""e^0 in the 8-bit exponentials of a softmax."""
SILU_LIMIT = 16.0
SILU_BREAKS = (-8.0, -5.0, -3.0, -1.4, 0.0, 1.6, 4.5)


def fit(f: Callable[[float], float], low: float, high: float, breaks: Sequence[float]) -> Spline:
    """Quartics through the Chebyshev points of every segment, in powers of x; seven breaks between low and high."""
    edges = [low, *breaks, high]
    rows = [_quartic(f, a, b) for a, b in itertools.pairwise(edges)]
    assert len(rows) == SPLINE_SEGMENTS
    return Spline(np.array(rows, np.float32), np.array(breaks, np.float32))


def _quartic(f: Callable[[float], float], a: float, b: float) -> list[float]:
    n = SPLINE_ORDER + 1
    nodes = [(a + b) / 2 + (b - a) / 2 * math.cos(math.pi * (k + 0.5) / n) for k in range(n)]
    divided = [f(x) for x in nodes]
    for k in range(1, n):
        for i in range(n - 1, k - 1, -1):
            divided[i] = (divided[i] - divided[i - 1]) / (nodes[i] - nodes[i - k])
    powers = [0.0] * n
    for k in range(n - 1, -1, -1):
        shifted = [0.0, *powers[:-1]]
        powers = [s - nodes[k] * p for s, p in zip(shifted, powers, strict=True)]
        powers[0] += divided[k]
    return powers


@cache
def silu(scale: float) -> Spline:
    """x * sigmoid(x) / scale on -16..16."""
    table = fit(lambda x: x / (1 + math.exp(-x)), -SILU_LIMIT, SILU_LIMIT, SILU_BREAKS)
    return table.scaled(1 / float(np.float32(scale)))


@cache
def reciprocal(largest: int) -> Spline:
    """65535 / x on 1..``largest``."""
    breaks = [float(largest) ** (k / SPLINE_SEGMENTS) for k in range(1, SPLINE_SEGMENTS)]
    return fit(lambda x: LARGEST / x, 1.0, float(largest), breaks)


LOGISTIC_256 = LOGISTIC.scaled(256)
"""256 / (1 + e^-x)."""
ROOT_LARGEST = 32767
RSQRT_32767 = RSQRT.scaled(ROOT_LARGEST)
"""32767 / sqrt(x): its square fits an int32."""
EXP_255 = EXP_65535.scaled(FULL / LARGEST)
"""255 e^x."""
RSQRT_65535 = RSQRT.scaled(LARGEST)
"""65535 / sqrt(x)."""
