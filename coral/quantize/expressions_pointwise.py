"""ADD, MUL, requantisation and clamps of uint8 codes as plain tinygrad expressions, one kernel each.

As in ``expressions``, the text is an interface: the backend rebuilds and compares it.
Source: docs/quantize.md, "Expressions".
"""

from __future__ import annotations

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor

from coral import numerics
from coral.quantize.expressions import QuantizeError, check_stage, in_buffer, output_stage


def qadd_expression(
    a: Tensor, b: Tensor, a_zp: int, b_zp: int, weights: tuple[int, int], mult: float, lo: int, hi: int, out_zp: int
) -> Tensor:
    """``output_stage(w1 * a + w2 * b - (w1 * a_zp + w2 * b_zp))``: the chip's ADD.

    :param a: uint8 codes, and ``b`` of the same shape
    :param weights: (w1, w2) of :func:`coral.numerics.add_weights`; a negative w2 subtracts
    :param mult: :func:`coral.numerics.add_multiplier`
    :return: uint8 codes of their shape in a buffer of their own
    :raises QuantizeError: dtype, shape or parameter outside what the operation is defined for
    """
    factor, (w_1, w_2) = check_stage(mult, lo, hi, out_zp, a_zp=a_zp, b_zp=b_zp), weights
    if max(abs(w_1), abs(w_2)) > numerics.MAX_ADD_WEIGHT or min(abs(w_1), abs(w_2)) < 1:
        raise QuantizeError(f"ADD weights {weights} must lie in 1..{numerics.MAX_ADD_WEIGHT}, negative to subtract")
    _check_pair(a, b)
    acc = in_buffer(a).cast(dtypes.int32) * w_1 + in_buffer(b).cast(dtypes.int32) * w_2
    return output_stage(acc - (w_1 * a_zp + w_2 * b_zp), factor, lo, hi, out_zp)


def qmul_expression(a: Tensor, b: Tensor, a_zp: int, b_zp: int, mult: float, lo: int, hi: int, out_zp: int) -> Tensor:
    """``output_stage((a - a_zp) * (b - b_zp))``: the chip's MUL.

    :param a: uint8 codes, and ``b`` of the same shape
    :param mult: :func:`coral.numerics.multiplier` of the two scales and the result's
    :return: uint8 codes of their shape in a buffer of their own
    :raises QuantizeError: dtype, shape or parameter outside what the operation is defined for
    """
    factor = check_stage(mult, lo, hi, out_zp, a_zp=a_zp, b_zp=b_zp)
    _check_pair(a, b)
    acc = (in_buffer(a).cast(dtypes.int32) - a_zp) * (in_buffer(b).cast(dtypes.int32) - b_zp)
    return output_stage(acc, factor, lo, hi, out_zp)


def qrequantise_expression(x: Tensor, in_zp: int, mult: float, lo: int, hi: int, out_zp: int) -> Tensor:
    """``output_stage(x - in_zp)``: codes in another quantisation, ``lo = out_zp`` a RELU.

    :param x: uint8 codes of any shape
    :param mult: :func:`coral.numerics.rescale_multiplier`
    :return: uint8 codes of its shape in a buffer of their own
    :raises QuantizeError: dtype or parameter outside what the operation is defined for
    """
    factor = check_stage(mult, lo, hi, out_zp, in_zp=in_zp)
    if x.dtype != dtypes.uint8:
        raise QuantizeError(f"codes must be uint8, not {x.dtype}")
    return output_stage(in_buffer(x).cast(dtypes.int32) - in_zp, factor, lo, hi, out_zp)


def qclip_expression(x: Tensor, lo: int, hi: int = 255) -> Tensor:
    """Codes cut to lo..hi in one quantisation; ``lo = zero point`` is a ReLU.

    :param x: uint8 codes of any shape
    :return: uint8 codes of its shape in a buffer of their own
    :raises QuantizeError: dtype, or not ``0 <= lo <= hi <= 255``
    """
    check_stage(1.0, lo, hi, lo)
    if x.dtype != dtypes.uint8:
        raise QuantizeError(f"codes must be uint8, not {x.dtype}")
    return in_buffer(x).clip(lo, hi).contiguous()


def _check_pair(a: Tensor, b: Tensor) -> None:
    if a.dtype != dtypes.uint8 or b.dtype != dtypes.uint8 or a.shape != b.shape:
        raise QuantizeError(f"operands must be uint8 of one shape, not {a.dtype} {a.shape} and {b.dtype} {b.shape}")
