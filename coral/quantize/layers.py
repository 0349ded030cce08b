"""The uint8 layers that take the place of float ones. Source: docs/quantize.md, "The layer"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad import nn
from tinygrad.tensor import Tensor

from coral import numerics
from coral.quantize.expressions import QuantizeError, dequantise_expression, qlinear_expression, quantise_expression
from coral.quantize.expressions_windows import qconv2d_expression
from coral.quantize.peel import Quant, Source, codes_behind, pools_on_codes
from coral.quantize.reference import convolution
from coral.quantize.tape import note


@dataclass(frozen=True)
class ChannelQuant:
    """Symmetric int8 weights, one scale per output channel: real value = (code - 128) * scales[channel]."""

    scales: tuple[float, ...]
    zero_point: int = 128

    @classmethod
    def of(cls, weight: NDArray[Any]) -> ChannelQuant:
        """For weights ``[N, ...]``; codes go from 1 to 255. :raises coral.numerics.NumericsError: not finite."""
        largest = np.abs(weight.reshape(len(weight), -1)).max(axis=1, initial=0)
        return cls(tuple(numerics.scale_and_zero_point(0, float(top) * 255 / 127)[0] for top in largest))


@dataclass(frozen=True)
class LayerQuant:
    """All numbers of a quantised layer with weights.

    :param relu: the lowest output code is the zero point (a merged ReLU)
    :param top: no output is above this real value (a merged ReLU6)
    :raises coral.numerics.NumericsError: the scales give no float32 multiplier
    """

    x: Quant
    w: Quant | ChannelQuant
    y: Quant
    relu: bool = False
    top: float = math.inf

    def __post_init__(self) -> None:
        numerics.multiplier(self.x.scale, self.w_scale, self.y.scale)

    @property
    def w_scale(self) -> Any:
        """The weights' scale: a float, or float32 ``[N]``."""
        return np.array(self.w.scales, np.float32) if isinstance(self.w, ChannelQuant) else self.w.scale

    @property
    def mult(self) -> Any:
        """Requantisation multiplier: a float, or float32 ``[N]``."""
        mult = numerics.multiplier(self.x.scale, self.w_scale, self.y.scale)
        return mult if isinstance(self.w, ChannelQuant) else float(mult)

    @property
    def lo(self) -> int:
        """Lowest output code."""
        return self.y.zero_point if self.relu else 0

    @property
    def hi(self) -> int:
        """Highest output code."""
        return 255 if self.top == math.inf else self.y.code(self.top)


class QLayer:
    """What quantised layers share: codes of weights ``[N, ...]`` and bias ``[N]``, quantisations, and the way in.

    :param weight_codes: uint8, output channels first
    :param bias_codes: int32 ``[N]`` in steps of input scale * weight scale, or None
    :param sums: quantisation of each sum that the layer's input may be made from
    """

    def __init__(
        self,
        weight_codes: Tensor,
        bias_codes: Tensor | None,
        quant: LayerQuant,
        sums: Mapping[Source, Quant] | None = None,
    ) -> None:
        self.weight_codes, self.bias_codes, self.quant, self.sums = weight_codes, bias_codes, quant, dict(sums or {})
        mult = quant.mult
        self.model_inputs: tuple[tuple[int, ...], ...] = ()
        """Shapes of the whole model's inputs at calibration, the first axis being the batch."""
        self.multipliers = None if isinstance(mult, float) else Tensor(mult, device=weight_codes.device).realize()

    @classmethod
    def from_float(
        cls,
        weight: NDArray[np.floating[Any]],
        bias: NDArray[np.floating[Any]] | None,
        x: Quant,
        y: Quant,
        *,
        relu: bool = False,
        top: float = math.inf,
        per_channel: bool = False,
        device: str | tuple[str, ...] | None = None,
        **geometry: Any,
    ) -> Any:
        """Quantise float weights ``[N, ...]`` and bias ``[N]`` for an input in ``x`` and an output in ``y``.

        :raises coral.numerics.NumericsError: not finite, no float32 multiplier, ``K * 65025 + max|bias| >= 2^31``
        """
        if per_channel:
            w = ChannelQuant.of(weight)
            scales = np.array(w.scales, np.float32).reshape(-1, *[1] * (weight.ndim - 1))
            codes = np.clip(np.rint(weight * numerics.inv(scales)), -127, 127).astype(np.int16) + w.zero_point
        else:
            w = Quant.of_range(weight.min(), weight.max())
            codes = numerics.quantise(weight, w.scale, w.zero_point)
        quant = LayerQuant(x, w, y, relu, top)
        bias_codes = None if bias is None else numerics.quantise_bias(bias, x.scale, quant.w_scale)
        numerics.check_accumulator(math.prod(weight.shape[1:]), bias_codes)
        weights = Tensor(codes.astype(np.uint8), device=device).realize()
        biases = None if bias_codes is None else Tensor(bias_codes, device=device).realize()
        return cls(weights, biases, quant, **geometry)

    def _codes(self, x: Tensor) -> Tensor:
        """The input's codes: those it was made from, or its quantised values."""
        q = self.quant.x
        codes = codes_behind(x, q.scale, q.zero_point, self.sums)
        if codes is not None:
            return codes
        return note("quantise", quantise_expression(pools_on_codes(x), q.scale, q.zero_point), (x,), q)

    @property
    def _numbers(self) -> tuple[int, int, Any, int, int, int]:
        """What every expression takes behind x, weights and bias."""
        q = self.quant
        mult = q.mult if self.multipliers is None else self.multipliers
        return q.x.zero_point, q.w.zero_point, mult, q.lo, q.hi, q.y.zero_point

    def _real(self, codes: Tensor) -> Tensor:
        return dequantise_expression(codes, self.quant.y.scale, self.quant.y.zero_point)

    def _noted(self, result: Tensor, codes: Tensor) -> Tensor:
        return note("layer", result, (codes,), self.quant.y, self)

    def _arrays(self, x: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int32] | None]:
        bias = None if self.bias_codes is None else self.bias_codes.numpy()
        codes = numerics.quantise(x, self.quant.x.scale, self.quant.x.zero_point)
        return codes, self.weight_codes.numpy(), bias

    @property
    def _limits(self) -> tuple[float, float]:
        return numerics.integer_clamps(self.quant.y.zero_point, self.quant.lo, self.quant.hi)


class QLinear(QLayer):
    """Drop-in for ``nn.Linear`` that computes in uint8: float in, float out, ``[..., K] -> [..., N]``.

    Quantises its input, or takes the codes as they are if the input is another layer's result in the same quantisation.
    Same bytes on every tinygrad device; with ``DEV=CORAL`` the matrix product is one chip program.
    """

    def __call__(self, x: Tensor) -> Tensor:
        n, k = self.weight_codes.shape
        if x.ndim == 0 or x.shape[-1] != k:
            raise QuantizeError(f"this layer takes inputs of shape [..., {k}], not {x.shape}")
        rows = self._codes(x).reshape(math.prod(x.shape[:-1]), k)
        y = self._noted(qlinear_expression(rows, self.weight_codes, self.bias_codes, *self._numbers), rows)
        return self._real(y.reshape(*x.shape[:-1], n))

    def reference(self, x: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """What ``__call__`` gives for x ``[..., K]``, computed with :mod:`coral.numerics`: no device takes part."""
        q, (codes, w, b) = self.quant, self._arrays(x)
        rows = codes.reshape(-1, x.shape[-1])
        z_x, z_w, (low, high) = q.x.zero_point, q.w.zero_point, self._limits
        y = numerics.fully_connected(rows, w, b, z_x, z_w, q.mult, low, high, q.y.zero_point)
        return numerics.dequantise(y, q.y.scale, q.y.zero_point).reshape(*x.shape[:-1], w.shape[0])

    def __repr__(self) -> str:
        n, k = self.weight_codes.shape
        return f"QLinear(in_features={k}, out_features={n}, bias={self.bias_codes is not None}, quant={self.quant})"


class QConv2d(QLayer):
    """Drop-in for a two-dimensional ``nn.Conv2d`` that computes in uint8: float in and out, ``[N, C, H, W]``.

    :param geometry: stride, padding, dilation and groups as ``nn.Conv2d`` has them
    """

    def __init__(self, *arguments: Any, stride: Any, padding: Any, dilation: Any, groups: int, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.geometry = stride, padding, dilation, groups

    def __call__(self, x: Tensor) -> Tensor:
        channels = int(self.weight_codes.shape[1]) * self.geometry[3]
        if x.ndim != 4 or x.shape[1] != channels:
            raise QuantizeError(f"this layer takes inputs of shape [N, {channels}, H, W], not {x.shape}")
        weights, (stride, padding, dilation, groups) = (self.weight_codes, self.bias_codes), self.geometry
        z_x, z_w, mult, lo, hi, z_y = self._numbers
        codes = self._codes(x)
        y = qconv2d_expression(codes, *weights, z_x, z_w, mult, lo, hi, z_y, stride, padding, dilation, groups)
        return self._real(self._noted(y, codes))

    def reference(self, x: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """What ``__call__`` gives for x ``[N, C, H, W]``, computed in NumPy: no device takes part."""
        q, (codes, w, b) = self.quant, self._arrays(x)
        z_x, z_w, z_y = q.x.zero_point, q.w.zero_point, q.y.zero_point
        stride, padding, dilation, groups = self.geometry
        y = convolution(codes, w, b, z_x, z_w, q.mult, self._limits, z_y, stride, padding, dilation, groups)
        return numerics.dequantise(y, q.y.scale, z_y)

    def __repr__(self) -> str:
        shape, bias = tuple(self.weight_codes.shape), self.bias_codes is not None
        stride, padding, dilation, groups = self.geometry
        return (
            f"QConv2d(weight={shape}, stride={stride}, padding={padding}, dilation={dilation}, groups={groups}, "
            f"bias={bias}, quant={self.quant})"
        )


def quantised(layer: nn.Linear | nn.Conv2d, x: Quant, y: Quant, **options: Any) -> QLinear | QConv2d:
    """The uint8 form of a float layer; ``options`` as :meth:`QLayer.from_float` has them."""
    weight = layer.weight.float().numpy()
    bias = None if layer.bias is None else layer.bias.float().numpy()
    if isinstance(layer, nn.Linear):
        return QLinear.from_float(weight, bias, x, y, device=layer.weight.device, **options)
    geometry = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}
    return QConv2d.from_float(weight, bias, x, y, device=layer.weight.device, **geometry, **options)
