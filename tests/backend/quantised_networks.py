"""Random networks of quantised operations in plain tinygrad, and the devices' answers to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tinygrad import Tensor
from tinygrad.helpers import Context

from coral.quantize.expressions import qlinear_expression
from coral.quantize.expressions_pointwise import (
    qadd_expression,
    qclip_expression,
    qmul_expression,
    qrequantise_expression,
)
from coral.quantize.expressions_windows import qavg_pool_expression, qconv2d_expression, qmax_pool_expression


@dataclass
class Codes:
    """A tensor of a network being built: its shape [N, C, H, W] or [N, K], and zero point."""

    number: int
    shape: tuple[int, ...]
    zp: int


@dataclass
class QuantisedNetwork:
    """Operations on numbered tensors; number 0 is the input. ``moves`` counts steps that no chip layer computes."""

    images: np.ndarray
    steps: list[Callable[[list[Tensor], Callable[[np.ndarray], Tensor]], Tensor]] = field(default_factory=list)
    layers: int = 0
    moves: int = 0

    def answer(self, device: str, images: int | None = None) -> np.ndarray:
        """The last tensor's bytes, of the first ``images`` or all, as ``device`` computes them in one schedule."""

        def known(array: np.ndarray) -> Tensor:
            return Tensor(array, device=device).realize()

        with Context(NOOPT=1):
            tensors = [known(self.images[:images])]
            for step in self.steps:
                tensors.append(step(tensors, known))
            last = tensors.pop()
            del tensors
            return last.numpy()


class Builder:
    """Grows a network whose codes stay spread out: multipliers follow the number of terms."""

    def __init__(self, seed: int, images: int, c: int, h: int, w: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.network = QuantisedNetwork(self.rng.integers(0, 256, (images, c, h, w), dtype=np.uint8))
        self.last = Codes(0, (images, c, h, w), self.zero())
        self.count = 1

    def zero(self) -> int:
        return int(self.rng.choice([0, 128, 255, int(self.rng.integers(0, 256))], p=[0.1, 0.4, 0.1, 0.4]))

    def pick(self, *values: int) -> int:
        return int(self.rng.choice(values))

    def clamps(self, zp: int) -> tuple[int, int]:
        return [(0, 255), (zp, 255), (min(zp, 20), max(zp, 230))][int(self.rng.integers(3))]

    def add_step(self, shape: tuple[int, ...], zp: int, step: Callable, *, layers: int = 1) -> Codes:
        self.network.steps.append(step)
        self.network.layers += layers
        self.network.moves += 1 - layers
        self.last = Codes(self.count, shape, zp)
        self.count += 1
        return self.last

    def _weights(self, shape: tuple[int, ...], terms: int) -> tuple:
        """Weights, bias or None, w_zp, mult (a number or float32 [N])."""
        per_channel = self.rng.integers(3) == 0
        w_zp = 128 if per_channel else self.zero()
        w = np.clip(w_zp + self.rng.integers(-70, 71, shape), 0, 255).astype(np.uint8)
        b = self.rng.integers(-3000, 3000, shape[0]).astype(np.int32) if self.rng.integers(3) else None
        mult = (self.rng.uniform(0.5, 1.5, shape[0]) / (70 * 70 * math.sqrt(terms))).astype(np.float32)
        exact = 2.0 ** int(np.round(np.log2(mult[0])))
        return w, b, w_zp, mult if per_channel else float(self.rng.choice([mult[0], exact]))

    def conv(self, outputs: int, kernel: tuple[int, int], stride: tuple[int, int], padding, dilation=1, groups=1):
        x = self.last
        n, c, h, w = x.shape
        weights, b, w_zp, mult = self._weights((outputs, c // groups, *kernel), c // groups * math.prod(kernel))
        zp = self.zero()
        lo, hi = self.clamps(zp)
        left, right, top, bottom = padding
        rows, columns = (
            (size + pad - (k - 1) * dilation - 1) // s + 1
            for size, pad, k, s in zip((h, w), (top + bottom, left + right), kernel, stride, strict=True)
        )

        def step(tensors, known):
            bias, m = None if b is None else known(b), known(mult) if isinstance(mult, np.ndarray) else mult
            geometry = stride, padding, dilation, groups
            return qconv2d_expression(tensors[x.number], known(weights), bias, x.zp, w_zp, m, lo, hi, zp, *geometry)

        return self.add_step((n, outputs, rows, columns), zp, step)

    def linear(self, outputs: int) -> Codes:
        x = self.last
        k = math.prod(x.shape[1:])
        w, b, w_zp, mult = self._weights((outputs, k), k)
        zp = self.zero()
        lo, hi = self.clamps(zp)

        def step(tensors, known):
            bias, m = None if b is None else known(b), known(mult) if isinstance(mult, np.ndarray) else mult
            rows = tensors[x.number].reshape(tensors[x.number].shape[0], k)
            return qlinear_expression(rows, known(w), bias, x.zp, w_zp, m, lo, hi, zp)

        return self.add_step((x.shape[0], outputs), zp, step)

    def max_pool(self, kernel: tuple[int, int], stride: tuple[int, int], padding=(0, 0, 0, 0)) -> Codes:
        x = self.last
        if kernel == stride == (1, 1) and not any(padding) and not x.number:
            self.network.layers -= 1  # the input itself: nobody computes anything
        return self.add_step(
            self._pooled(kernel, stride, padding),
            x.zp,
            lambda tensors, known: qmax_pool_expression(tensors[x.number], kernel, stride, padding),
        )

    def average_pool(self, kernel: tuple[int, int], stride: tuple[int, int], padding=(0, 0, 0, 0)) -> Codes:
        x, zp = self.last, self.zero()
        lo, hi = self.clamps(zp)
        mult = float(np.float32(self.rng.uniform(0.5, 1.5) / math.prod(kernel)))
        return self.add_step(
            self._pooled(kernel, stride, padding),
            zp,
            lambda tensors, known: qavg_pool_expression(
                tensors[x.number], kernel, stride, x.zp, mult, lo, hi, zp, padding
            ),
        )

    def _pooled(self, kernel, stride, padding) -> tuple[int, ...]:
        n, c, h, w = self.last.shape
        left, right, top, bottom = padding
        sizes = zip((h, w), (top + bottom, left + right), kernel, stride, strict=True)
        return n, c, *((size + pad - k) // s + 1 for size, pad, k, s in sizes)

    def add(self, a: Codes, b: Codes) -> Codes:
        zp, weights = self.zero(), (int(self.rng.integers(50, 32768)), int(self.rng.integers(50, 32768)))
        weights = weights if self.rng.integers(3) else (weights[0], -weights[1])
        lo, hi = self.clamps(zp)
        mult = float(np.float32(0.7 / max(map(abs, weights))))
        return self.add_step(
            a.shape,
            zp,
            lambda tensors, known: qadd_expression(
                tensors[a.number], tensors[b.number], a.zp, b.zp, weights, mult, lo, hi, zp
            ),
        )

    def multiply(self, a: Codes, b: Codes) -> Codes:
        zp = self.zero()
        lo, hi = self.clamps(zp)
        return self.add_step(
            a.shape,
            zp,
            lambda tensors, known: qmul_expression(
                tensors[a.number], tensors[b.number], a.zp, b.zp, float(np.float32(0.013)), lo, hi, zp
            ),
        )

    def requantise(self) -> Codes:
        x, zp = self.last, self.zero()
        lo, hi = self.clamps(zp)
        mult = float(np.float32(self.rng.uniform(0.3, 1.5)))
        return self.add_step(
            x.shape,
            zp,
            lambda tensors, known: qrequantise_expression(tensors[x.number], x.zp, mult, lo, hi, zp),
        )

    def clip(self) -> Codes:
        x = self.last
        lo, hi = sorted((x.zp, self.pick(200, 255)))
        return self.add_step(x.shape, x.zp, lambda tensors, known: qclip_expression(tensors[x.number], lo, hi))

    def transpose(self) -> Codes:
        """Rows become columns: a copy that no layer computes."""
        x = self.last
        n, c, h, w = x.shape
        return self.add_step(
            (n, c, w, h), x.zp, lambda tensors, known: tensors[x.number].permute(0, 1, 3, 2).contiguous(), layers=0
        )


def random_network(seed: int) -> QuantisedNetwork:
    """Two to seven layers of all kinds on small images, a residual sum or product here and there."""
    rng = np.random.default_rng([seed, 1])
    n = int(rng.choice([1, 1, 2, 3, 5]))
    c, h, w = int(rng.choice([1, 2, 3, 4, 8, 13])), int(rng.integers(1, 15)), int(rng.integers(1, 15))
    b = Builder(seed, n, c, h, w)
    for _ in range(int(rng.integers(2, 6))):
        _, c, h, w = b.last.shape
        kernel = min(int(rng.choice([1, 2, 3, 3, 5])), h), min(int(rng.choice([1, 2, 3, 3, 5])), w)
        stride = (b.pick(1, 1, 2), b.pick(1, 1, 2))
        same = tuple(int(p) for k in kernel[::-1] for p in ((k - 1) // 2, k // 2))
        padding = same if rng.integers(2) else (0, 0, 0, 0)
        match int(rng.integers(10)):
            case 0 | 1 | 2:
                dilation = 2 if rng.integers(8) == 0 and 2 * max(kernel) <= min(h, w) else 1
                b.conv(int(rng.integers(1, 20)), kernel, stride, padding, dilation)
            case 3:
                b.conv(c * b.pick(1, 1, 2), kernel, stride, padding, groups=c)
            case 4:
                b.max_pool(kernel, stride, padding)
            case 5:
                b.average_pool(kernel, stride, padding if rng.integers(3) == 0 else (0, 0, 0, 0))
            case 6:
                first = b.last
                second = b.conv(c, (3, 3), (1, 1), (1, 1, 1, 1))
                (b.add if rng.integers(3) else b.multiply)(first, second)
            case 7:
                b.requantise()
            case 8:
                b.clip()
            case 9:
                first = b.conv(int(rng.integers(1, 9)), (1, 1), (1, 1), (0, 0, 0, 0))
                b.last = first
                b.transpose() if rng.integers(2) else b.max_pool((1, 1), (1, 1))
    if rng.integers(2):
        b.linear(int(rng.integers(1, 20)))
        if rng.integers(2):
            b.linear(int(rng.integers(1, 12)))
    return b.network
