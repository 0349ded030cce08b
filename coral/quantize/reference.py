"""Layers with windows in NumPy, ``[N, C, H, W]``, for calibration decisions and reports: no device takes part.

Source: docs/quantize.md, "The layer".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tinygrad.helpers import make_tuple, resolve_pool_pads

from coral import numerics

BATCH = 32
"""Images that are convolved at a time, to bound memory."""


def convolution(
    x: NDArray[np.uint8],
    w: NDArray[np.uint8],
    b: NDArray[np.int32] | None,
    in_zp: int,
    w_zp: int,
    mult: ArrayLike,
    clamps: tuple[float, float],
    out_zp: int,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> NDArray[np.uint8]:
    """Codes of :func:`~coral.quantize.expressions_windows.qconv2d_expression`, computed in another way.

    :param x: ``[N, C, H, W]``
    :param w: ``[O, C / groups, kh, kw]``
    :param mult: scalar or ``[O]``
    :param clamps: (lowest, highest) relative to ``out_zp``
    """
    weights = w.astype(np.int16) - np.int16(w_zp)
    exact = numerics.exact_dtype(weights)
    scales = np.asarray(mult, np.float32).reshape(-1, 1, 1)
    parts = []
    for start in range(0, max(len(x), 1), BATCH):
        image = x[start : start + BATCH].astype(exact) - exact(in_zp)
        sums = _sums(image, weights.astype(exact), stride, padding, dilation, groups)
        acc = numerics.accumulators(np.moveaxis(sums, 1, -1), b)
        parts.append(numerics.requantise(np.moveaxis(acc, -1, 1), scales, *clamps, out_zp))
    return np.concatenate(parts)


def _sums(x: NDArray[Any], w: NDArray[Any], stride: Any, padding: Any, dilation: Any, groups: int) -> NDArray[Any]:
    left, right, top, bottom = resolve_pool_pads(padding, 2)
    x = np.pad(x, [(0, 0), (0, 0), (top, bottom), (left, right)])
    n, channels, *sizes = x.shape
    geometry = zip(sizes, w.shape[2:], make_tuple(stride, 2), make_tuple(dilation, 2), strict=True)
    rows, columns = ((size - (k - 1) * d - 1) // s + 1 for size, k, s, d in geometry)
    (sy, sx), (dy, dx) = make_tuple(stride, 2), make_tuple(dilation, 2)
    x = x.reshape(n, groups, channels // groups, *sizes)
    grouped = w.reshape(groups, len(w) // groups, *w.shape[1:])
    total = np.zeros((n, groups, grouped.shape[1], rows, columns), x.dtype)
    for ky in range(w.shape[2]):
        for kx in range(w.shape[3]):
            tap = x[..., ky * dy :, kx * dx :][..., : (rows - 1) * sy + 1 : sy, : (columns - 1) * sx + 1 : sx]
            pixels = tap.reshape(n, groups, channels // groups, rows * columns)
            total += (grouped[..., ky, kx] @ pixels).reshape(total.shape)
    return total.reshape(n, len(w), rows, columns)
