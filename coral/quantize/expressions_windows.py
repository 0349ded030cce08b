"""Convolutions and pools of uint8 images as plain tinygrad expressions, one kernel each.

Images are ``[N, C, H, W]``. As in ``expressions``, the text is an interface: the backend rebuilds and compares it.
Source: docs/quantize.md, "Expressions".
"""

from __future__ import annotations

import math
from typing import Any

from tinygrad.dtype import dtypes
from tinygrad.helpers import Context, make_tuple, resolve_pool_pads
from tinygrad.tensor import Tensor

from coral.quantize.expressions import (
    QuantizeError,
    check_channels,
    check_length,
    check_operands,
    check_stage,
    in_buffer,
    output_stage,
)

Pair = int | tuple[int, int]
Padding = int | tuple[int, ...]


def qconv2d_expression(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    in_zp: int,
    w_zp: int,
    mult: float | Tensor,
    lo: int,
    hi: int,
    out_zp: int,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """:func:`~coral.quantize.expressions.qlinear_expression` over windows: ``sum`` runs over channel, row, column.

    :param x: uint8 codes ``[N, C, H, W]``
    :param w: uint8 codes ``[O, C / groups, kh, kw]``; ``groups = C`` is a depthwise convolution
    :param b: int32 ``[O]`` or None
    :param mult: one multiplier, or a float32 buffer ``[O]`` with one per output channel
    :param stride: rows, columns; likewise ``dilation``
    :param padding: as ``nn.Conv2d`` has it: one number, (rows, columns), or (left, right, top, bottom). The padding is
        a real zero, the code ``in_zp``
    :return: uint8 codes ``[N, O, rows, columns]`` in a buffer of its own
    :raises QuantizeError: dtype, shape or parameter outside what the layer is defined for
    """
    factor = check_stage(mult, lo, hi, out_zp, in_zp=in_zp, w_zp=w_zp)
    check_operands(x, w, b)
    _check_image(x)
    if w.ndim != 4 or groups < 1 or x.shape[1] != w.shape[1] * groups or int(w.shape[0]) % groups:
        raise QuantizeError(f"weights {w.shape} in {groups} groups do not fit an image {x.shape}")
    if b is not None and b.shape != (w.shape[0],):
        raise QuantizeError(f"the bias has shape {b.shape} for {w.shape[0]} output channels")
    check_channels(factor, w.shape[0])
    check_length(math.prod(map(int, w.shape[1:])))
    _check_windows(x, (int(w.shape[2]), int(w.shape[3])), stride, padding, dilation)
    # Zero point first, padding afterwards: padding is a plain 0 then.
    centred, weights = in_buffer(x).cast(dtypes.int32) - in_zp, w.contiguous().cast(dtypes.int32) - w_zp
    strides: Any = make_tuple(stride, 2)
    steps: Any = make_tuple(dilation, 2)
    with Context(WINO=0, IMAGE=0):
        acc = centred.conv2d(weights, None if b is None else b.contiguous(), groups, strides, steps, padding)
    return output_stage(acc, factor.reshape(1, -1, 1, 1) if isinstance(factor, Tensor) else factor, lo, hi, out_zp)


def qmax_pool_expression(x: Tensor, kernel: Pair, stride: Pair, padding: Padding = 0) -> Tensor:
    """Largest code of every window; input and output have one quantisation, and padding never wins.

    :param x: uint8 codes ``[N, C, H, W]``
    :return: uint8 codes ``[N, C, rows, columns]`` in a buffer of its own
    :raises QuantizeError: dtype, shape, windows that do not fit or lie in the padding altogether
    """
    _check_image(x)
    _check_windows(x, make_tuple(kernel, 2), stride, padding)
    rows, columns = make_tuple(kernel, 2)
    if any(p >= k for p, k in zip(resolve_pool_pads(padding, 2), (columns, columns, rows, rows), strict=True)):
        raise QuantizeError(f"padding {padding} is not smaller than the window {kernel}")
    largest: Any = in_buffer(x).max_pool2d(make_tuple(kernel, 2), stride, padding=padding)
    return largest.contiguous()


def qavg_pool_expression(
    x: Tensor, kernel: Pair, stride: Pair, in_zp: int, mult: float, lo: int, hi: int, out_zp: int, padding: Padding = 0
) -> Tensor:
    """``output_stage(sum of (x - in_zp) over every window)``, one kernel; padding counts as real zeros.

    :param x: uint8 codes ``[N, C, H, W]``
    :param mult: :func:`coral.numerics.average_multiplier` for ``kh * kw`` values
    :return: uint8 codes ``[N, C, rows, columns]`` in a buffer of its own
    :raises QuantizeError: dtype, shape or parameter outside what the operation is defined for
    """
    factor = check_stage(mult, lo, hi, out_zp, in_zp=in_zp)
    _check_image(x)
    window = make_tuple(kernel, 2)
    _check_windows(x, window, stride, padding)
    check_length(math.prod(window))
    left, right, top, bottom = resolve_pool_pads(padding, 2)
    centred = (in_buffer(x).cast(dtypes.int32) - in_zp).pad(((0, 0), (0, 0), (top, bottom), (left, right)))
    return output_stage(centred._pool(window, stride).sum((-2, -1)), factor, lo, hi, out_zp)


def _check_image(x: Tensor) -> None:
    if x.dtype != dtypes.uint8 or x.ndim != 4:
        raise QuantizeError(f"an image of codes is uint8 [N, C, H, W], not {x.dtype} {x.shape}")


def _check_windows(x: Tensor, kernel: tuple[int, ...], stride: Pair, padding: Padding, dilation: Pair = 1) -> None:
    try:
        strides, steps, pads = make_tuple(stride, 2), make_tuple(dilation, 2), resolve_pool_pads(padding, 2)
    except (ValueError, AssertionError):
        raise QuantizeError(f"padding {padding!r} must be one, two or four numbers") from None
    numbers = (*kernel, *strides, *steps)
    if len(kernel) != 2 or len(numbers) != 6 or min(numbers) < 1 or min(pads) < 0 or len(pads) != 4:
        raise QuantizeError(
            f"kernel {kernel}, stride {stride} and dilation {dilation} must be pairs of at least 1, padding {padding} "
            f"must not be negative"
        )
    before_after = ((pads[2], pads[3]), (pads[0], pads[1]))
    for size, k, d, pad in zip(x.shape[2:], kernel, steps, before_after, strict=True):
        if (k - 1) * d + 1 > int(size) + sum(pad):
            raise QuantizeError(f"windows of {(k - 1) * d + 1} positions do not fit {size} with padding {pad}")
