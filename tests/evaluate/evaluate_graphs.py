"""Graphs of one operator, and the quantisation formulas in exact rationals."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from exact_float import exact32

from coral import evaluate
from coral.package.graph import Graph, Operator, Tensor

RANGES = {"NONE": (None, None), "RELU": (0, None), "RELU6": (0, 6), "RELU_N1_TO_1": (-1, 1)}
OFFSETS = {"u1": 0, "i1": 128}


def tensor(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    scales: Any = (),
    zeros: Any = (),
    data: np.ndarray | None = None,
    axis: int = 0,
    *,
    is_variable: bool = False,
) -> Tensor:
    scales, zeros = np.array(scales, np.float32), np.array(zeros, np.int64)
    return Tensor(name, shape, 0, np.dtype(dtype), scales, zeros, axis, data, is_variable)


def single(op: str, tensors: list[Tensor], inputs: tuple[int, ...], **options: Any) -> Graph:
    """One operator; tensor 0 is the model's input and the last one its output."""
    last = len(tensors) - 1
    return Graph("main", tuple(tensors), (0,), (last,), (Operator(op, inputs, (last,), options),))


def run(graph: Graph, x: Any, **options: Any) -> np.ndarray:
    return evaluate.evaluate(graph, {"x": x}, **options)["y"]


def fraction(x: float | np.floating) -> Fraction:
    """The rational of x rounded to float32."""
    return Fraction(float(np.float32(x)))


def inverse(s: float) -> Fraction:
    return exact32(1 / fraction(s))


def multiplier(s_x: float, s_w: float, s_y: float) -> Fraction:
    return exact32(exact32(fraction(s_x) * fraction(s_w)) * inverse(s_y))


def exact_clamps(s_y: float, z_y: int, activation: str = "NONE", top: int = 255) -> tuple[Fraction, Fraction]:
    """For a zero point in unsigned codes."""
    lo, hi = (exact32(Fraction(code - z_y) * fraction(s_y)) for code in (0, top))
    low, high = RANGES[activation]
    lo = lo if low is None else max(lo, Fraction(low))
    hi = hi if high is None else min(hi, Fraction(high))
    return exact32(lo * inverse(s_y)), exact32(hi * inverse(s_y))


class Quantised:
    """A random tensor: values in a dtype, and what they are in unsigned codes."""

    def __init__(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: str, low: float = 0.001) -> None:
        first = -OFFSETS[dtype]
        self.dtype, self.offset = dtype, OFFSETS[dtype]
        self.values = rng.integers(first, first + 256, shape).astype(dtype)
        self.scale = float(np.float32(rng.uniform(low, 0.1)))
        self.zero_point = int(rng.integers(0, 256))

    @property
    def centred(self) -> Any:
        """Codes less zero point, Python integers in nested lists."""
        return (self.values.astype(int) + self.offset - self.zero_point).tolist()

    def tensor(self, name: str, *, constant: bool = False) -> Tensor:
        zero = [self.zero_point - self.offset]
        data = self.values if constant else None
        return tensor(name, self.values.shape, self.dtype, [self.scale], zero, data)

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Unsigned codes of values of this dtype."""
        return values.astype(int) + self.offset
