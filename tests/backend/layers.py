"""Random quantised linear layers and the devices' answers to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor
from tinygrad.helpers import Context

from coral.quantize.expressions import qlinear_expression


@dataclass(frozen=True)
class Layer:
    """One layer's constants; ``lo = out_zp`` is a fused ReLU."""

    in_zp: int
    w_zp: int
    mult: float
    lo: int
    hi: int
    out_zp: int

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return qlinear_expression(x, w, b, self.in_zp, self.w_zp, self.mult, self.lo, self.hi, self.out_zp)


@dataclass(frozen=True)
class Data:
    """Operands: x uint8 [..., K], w uint8 [N, K], b int32 [N] or None."""

    x: np.ndarray
    w: np.ndarray
    b: np.ndarray | None


def random_layer(rng: np.random.Generator, k: int) -> Layer:
    """A layer whose outputs spread over the codes: a third of the multipliers make exact ties, a third are ReLUs.

    One zero point is any code, the other stays near the middle so that the sums of random codes stay near 0.
    """
    out_zp, any_zp, middle_zp = int(rng.integers(40, 216)), int(rng.integers(0, 256)), int(rng.integers(126, 130))
    in_zp, w_zp = (any_zp, middle_zp) if rng.random() < 0.5 else (middle_zp, any_zp)
    spread = 80.0 / (74.0 * np.hypot(74.0, any_zp - 127.5) * np.sqrt(k))
    exact = 2.0 ** np.round(np.log2(spread))
    mult = float(np.float32(exact if rng.random() < 0.33 else spread * rng.uniform(0.7, 1.5)))
    lo = out_zp if rng.random() < 0.33 else int(rng.integers(0, 50))
    hi = 255 if rng.random() < 0.5 else int(rng.integers(max(lo, 200), 256))
    return Layer(in_zp, w_zp, mult, lo, hi, out_zp)


def random_data(rng: np.random.Generator, rows: tuple[int, ...], n: int, k: int, *, bias: bool) -> Data:
    """Operands with biases of half the size of the sums."""
    size = int(3000 * np.sqrt(k))
    b = rng.integers(-size, size + 1, n).astype(np.int32) if bias else None
    return Data(rng.integers(0, 256, (*rows, k), dtype=np.uint8), rng.integers(0, 256, (n, k), dtype=np.uint8), b)


Computation = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def answer(device: str, computation: Computation, data: Data, *, optimise: bool = False) -> np.ndarray:
    """The bytes ``computation`` gives on ``device``; its operands are realised there first.

    Host kernels are compiled without tinygrad's loop optimisations (a tenth of the time) unless ``optimise``.
    """
    operands = [None if a is None else Tensor(a, device=device).realize() for a in (data.x, data.w, data.b)]
    with Context(NOOPT=0 if optimise else 1):
        return computation(*operands).numpy()
