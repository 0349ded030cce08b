"""The uint8 layers that take the place of float ones. Source: docs/quantize.md, "The layer"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad.tensor import Tensor

from coral import numerics
from coral.quantize.expressions import QuantizeError, dequantise_expression, qlinear_expression, quantise_expression
from coral.quantize.peel import codes_behind


@dataclass(frozen=True)
class Quant:
    """Asymmetric uint8 quantisation: real value = (code - zero_point) * scale, scale a float32 value."""

    scale: float
    zero_point: int

    @classmethod
    def of_range(cls, lo: float, hi: float) -> Quant:
        """The quantisation of real values lo..hi. :raises coral.numerics.NumericsError: not finite or lo > hi."""
        return cls(*numerics.scale_and_zero_point(lo, hi))


@dataclass(frozen=True)
class LinearQuant:
    """All numbers of a quantised linear layer; ``relu`` = the lowest output code is the zero point (a fused ReLU).

    :raises coral.numerics.NumericsError: the scales give no float32 multiplier
    """

    x: Quant
    w: Quant
    y: Quant
    relu: bool = False

    def __post_init__(self) -> None:
        numerics.multiplier(self.x.scale, self.w.scale, self.y.scale)

    @property
    def mult(self) -> float:
        return float(numerics.multiplier(self.x.scale, self.w.scale, self.y.scale))

    @property
    def lo(self) -> int:
        return self.y.zero_point if self.relu else 0


class QLinear:
    """Drop-in for ``nn.Linear`` that computes in uint8: float in, float out, ``[..., K] -> [..., N]``.

    Quantises its input, or takes the codes as they are if the input is another layer's result in the same quantisation.
    Same bytes on every tinygrad device; with ``DEV=CORAL`` the matrix product is one chip program.

    :param weight_codes: uint8 ``[N, K]``
    :param bias_codes: int32 ``[N]`` in steps of input scale * weight scale, or None
    """

    def __init__(self, weight_codes: Tensor, bias_codes: Tensor | None, quant: LinearQuant) -> None:
        self.weight_codes, self.bias_codes, self.quant = weight_codes, bias_codes, quant

    @classmethod
    def from_float(
        cls,
        weight: NDArray[np.floating[Any]],
        bias: NDArray[np.floating[Any]] | None,
        x: Quant,
        y: Quant,
        *,
        relu: bool = False,
        device: str | tuple[str, ...] | None = None,
    ) -> QLinear:
        """Quantise float weights ``[N, K]`` and bias ``[N]`` for an input in ``x`` and an output in ``y``.

        :raises coral.numerics.NumericsError: not finite, no float32 multiplier, ``K * 65025 + max|bias| >= 2^31``
        """
        w = Quant.of_range(weight.min(), weight.max())
        quant = LinearQuant(x, w, y, relu)
        codes = None if bias is None else numerics.quantise_bias(bias, x.scale, w.scale)
        numerics.check_accumulator(weight.shape[1], codes)
        weight_codes = Tensor(numerics.quantise(weight, w.scale, w.zero_point), device=device)
        bias_codes = None if codes is None else Tensor(codes, device=device).realize()
        return cls(weight_codes.realize(), bias_codes, quant)

    def __call__(self, x: Tensor) -> Tensor:
        q, (n, k) = self.quant, self.weight_codes.shape
        if x.ndim == 0 or x.shape[-1] != k:
            raise QuantizeError(f"this layer takes inputs of shape [..., {k}], not {x.shape}")
        codes = codes_behind(x, q.x.scale, q.x.zero_point)
        if codes is None:
            codes = quantise_expression(x, q.x.scale, q.x.zero_point)
        rows = qlinear_expression(
            codes.reshape(math.prod(x.shape[:-1]), k), self.weight_codes, self.bias_codes,
            q.x.zero_point, q.w.zero_point, q.mult, q.lo, 255, q.y.zero_point,
        )  # fmt: skip
        return dequantise_expression(rows.reshape(*x.shape[:-1], n), q.y.scale, q.y.zero_point)

    def reference(self, x: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """What ``__call__`` gives for x ``[..., K]``, computed with :mod:`coral.numerics`: no device takes part."""
        q, n = self.quant, self.weight_codes.shape[0]
        codes = numerics.quantise(x, q.x.scale, q.x.zero_point).reshape(-1, x.shape[-1])
        low, high = numerics.integer_clamps(q.y.zero_point, q.lo)
        bias = None if self.bias_codes is None else self.bias_codes.numpy()
        rows = numerics.fully_connected(
            codes, self.weight_codes.numpy(), bias, q.x.zero_point, q.w.zero_point, q.mult, low, high, q.y.zero_point
        )
        return numerics.dequantise(rows, q.y.scale, q.y.zero_point).reshape(*x.shape[:-1], n)

    def __repr__(self) -> str:
        n, k = self.weight_codes.shape
        return f"QLinear(in_features={k}, out_features={n}, bias={self.bias_codes is not None}, quant={self.quant})"
