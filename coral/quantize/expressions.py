"""The quantised operations as plain tinygrad expressions: the definition of what a layer computes on every device.

The backend proves that a kernel is such a layer by building the same expression and comparing the graphs, so the text
of these functions is an interface: a change of operation order changes what is recognised. Convolutions and pools are
in ``expressions_windows``, operations on single values in ``expressions_pointwise``.
Source: docs/quantize.md, "The layer" and "Expressions".
"""

from __future__ import annotations

from typing import Any

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor
from tinygrad.uop import Ops

from coral import CoralError, numerics


class QuantizeError(CoralError):
    """A model, layer or calibration input that cannot be quantised; the message names it and the limit."""


def _check_code(name: str, value: int) -> None:
    if not 0 <= value <= 255:
        raise QuantizeError(f"{name} is {value}: it must lie in 0..255")


def check_stage(mult: float | Tensor, lo: int, hi: int, out_zp: int, **zero_points: int) -> float | Tensor:
    """The multiplier as the output stage takes it: rounded to float32, or the buffer with one per channel.

    :raises QuantizeError: a zero point or clamp outside 0..255, ``lo > hi``, a multiplier that is not positive and
        finite in float32, a tensor of multipliers that is not float32 ``[N]``
    """
    for name, value in (*zero_points.items(), ("out_zp", out_zp), ("lo", lo), ("hi", hi)):
        _check_code(name, value)
    if lo > hi:
        raise QuantizeError(f"the clamp lo={lo}, hi={hi} is empty: lo must not exceed hi")
    if isinstance(mult, Tensor):
        if mult.dtype != dtypes.float32 or mult.ndim != 1:
            raise QuantizeError(f"multipliers per channel must be float32 [N], not {mult.dtype} {mult.shape}")
        return mult.contiguous()
    if not 0 < (factor := float(numerics.f32(mult))) < float("inf"):
        raise QuantizeError(f"the multiplier is {mult}: it must be positive and finite in float32")
    return factor


def check_operands(x: Tensor, w: Tensor, b: Tensor | None) -> None:
    """:raises QuantizeError: x and w are not uint8, or b is neither int32 nor None."""
    if x.dtype != dtypes.uint8 or w.dtype != dtypes.uint8 or (b is not None and b.dtype != dtypes.int32):
        raise QuantizeError(
            f"x, w and b must be uint8, uint8 and int32, not {x.dtype}, {w.dtype} and {None if b is None else b.dtype}"
        )


def check_length(k: int) -> None:
    """:raises QuantizeError: sums of k products of code differences do not always fit int32."""
    if k > numerics.MAX_K:
        raise QuantizeError(f"K is {k}: sums of more than {numerics.MAX_K} products of codes can overflow int32")


def in_buffer(x: Tensor) -> Tensor:
    """x as a kernel's own input: contiguous, but without a copy where x only reshapes something contiguous."""
    base = x.uop
    while base.op is Ops.RESHAPE:
        base = base.src[0]
    return x if base.op is Ops.CONTIGUOUS else x.contiguous()


def output_stage(acc: Tensor, mult: float | Tensor, lo: int, hi: int, out_zp: int) -> Tensor:
    """``uint8(round_half_even(clamp(f32(acc) * mult)) + out_zp)``: how every quantised operation ends.

    The clamp stands between multiplication and rounding so that no device can contract them to a fused multiply-add.

    :param acc: int32 sums
    :param mult: from :func:`check_stage`, a tensor in a shape that broadcasts to acc
    :return: uint8 codes in a buffer of their own
    """
    clamped = (acc.cast(dtypes.float32) * mult).clip(lo - out_zp, hi - out_zp)
    return (clamped.round() + out_zp).cast(dtypes.uint8).contiguous()


def qlinear_expression(
    x: Tensor, w: Tensor, b: Tensor | None, in_zp: int, w_zp: int, mult: float | Tensor, lo: int, hi: int, out_zp: int
) -> Tensor:
    """``uint8(clamp(round_half_even(f32(sum((x - in_zp) * (w - w_zp)) + b) * mult)) + out_zp)``, one kernel.

    :param x: uint8 codes ``[..., K]``
    :param w: uint8 codes ``[N, K]``
    :param b: int32 ``[N]`` in units of ``input scale * weight scale``, or None
    :param mult: requantisation multiplier, rounded to float32 here; or a float32 buffer ``[N]``, one per channel
    :param lo: lowest and ``hi`` highest output code, ``0 <= lo <= hi <= 255``; ``lo = out_zp`` is a fused ReLU
    :return: uint8 codes ``[..., N]`` in a buffer of its own
    :raises QuantizeError: dtype, shape or parameter outside what the layer is defined for
    """
    factor = check_stage(mult, lo, hi, out_zp, in_zp=in_zp, w_zp=w_zp)
    check_operands(x, w, b)
    if w.ndim != 2 or x.ndim < 2 or x.shape[-1] != w.shape[1] or (b is not None and b.shape != (w.shape[0],)):
        raise QuantizeError(
            f"shapes must be x [..., K], w [N, K], b [N], not {x.shape}, {w.shape} and {None if b is None else b.shape}"
        )
    check_channels(factor, w.shape[0])
    check_length(int(x.shape[-1]))
    # Contiguous operands and result: nothing of the producer or the consumer gets fused into the kernel.
    acc = (in_buffer(x).cast(dtypes.int32) - in_zp).matmul((w.contiguous().cast(dtypes.int32) - w_zp).T)
    if b is not None:
        acc = acc + b.contiguous()
    return output_stage(acc, factor, lo, hi, out_zp)


def check_channels(mult: float | Tensor, channels: Any) -> None:
    """:raises QuantizeError: multipliers per channel are not as many as the output channels."""
    if isinstance(mult, Tensor) and mult.shape != (channels,):
        raise QuantizeError(f"{mult.shape[0]} multipliers for {channels} output channels")


def quantise_expression(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Codes of real values: ``uint8(round_half_even(clamp(x * f32(1 / scale))) + zero_point)`` in its own buffer.

    :param x: any float or integer dtype, any shape
    :param scale: float32 value
    :raises QuantizeError: ``zero_point`` outside 0..255
    """
    _check_code("zero_point", zero_point)
    scaled = x.cast(dtypes.float32) * float(numerics.inv(scale))
    clamped = scaled.clip(-zero_point, 255 - zero_point)
    return (clamped.round() + zero_point).cast(dtypes.uint8).contiguous()


def dequantise_expression(codes: Tensor, scale: float, zero_point: int) -> Tensor:
    """Real values of uint8 codes: ``f32(codes - zero_point) * scale``, float32, not realised."""
    step = float(numerics.f32(scale))
    # No value is below the bound. It keeps devices from contracting this product with an addition that follows it.
    return ((codes.cast(dtypes.float32) - zero_point) * step).maximum(float(numerics.f32(-zero_point * step)))
