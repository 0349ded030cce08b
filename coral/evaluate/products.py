"""Operators with weights: FULLY_CONNECTED and the convolutions. Source: docs/evaluate.md, "Weights"."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import numerics
from coral.evaluate.operands import Call, EvaluateError, Operand, operator
from coral.evaluate.windows import axes_of, padded, require_size


@operator("FULLY_CONNECTED")
def fully_connected(call: Call) -> tuple[NDArray[Any], ...]:
    """uint8 weights with one scale, or int8 weights with one scale or one per output channel; int32 bias or none."""
    x, w, bias, y = call.input(0), call.input(1), call.optional(2), call.output
    call.require(weights_format=0)
    if w.array.ndim != 2 or w.array.size == 0 or x.array.size % w.array.shape[1]:
        raise EvaluateError(f"weights {w.array.shape} do not fit the input {x.array.shape}")
    w_scales, w_zeros = channel_quantisation(w)
    mult = numerics.multiplier(x.scale, w_scales, y.scale)
    low, high = numerics.clamps(y.scale, y.zero_point, call.activation)
    b = None if bias is None else bias.array
    rows = x.codes.reshape(-1, w.array.shape[1])
    codes = numerics.fully_connected(rows, w.codes, b, x.zero_point, w_zeros, mult, low, high, y.zero_point)
    return (y.from_codes(codes),)


@operator("CONV_2D")
def conv_2d(call: Call) -> tuple[NDArray[Any], ...]:
    """Weights ``[N, kh, kw, C]`` on an image with C channels; dilated too."""
    x, w = call.image(0), call.image(1)
    if x.shape[3] != w.shape[3]:
        raise EvaluateError(f"weights {w.shape} on {x.shape[3]} channels: grouped convolutions are not supported")
    rows, columns = axes_of(call, x.shape, w.shape[1:3])
    require_size(call.output, rows.count, columns.count)
    weights = centred_weights(w, axis=0)
    exact = numerics.exact_dtype(weights)
    image = padded(x.centred.astype(exact), rows, columns, 0)
    sums = np.zeros((len(image) * rows.count * columns.count, len(weights)), exact)
    for ky in range(rows.kernel):
        for kx in range(columns.kernel):
            operands = image[:, rows.tap(ky), columns.tap(kx)].reshape(len(sums), -1)
            sums += operands @ weights[:, ky, kx].T.astype(exact)
    return _with_bias(call, sums.reshape(len(image), rows.count, columns.count, -1), call.optional(2), w, axis=0)


@operator("DEPTHWISE_CONV_2D")
def depthwise_conv_2d(call: Call) -> tuple[NDArray[Any], ...]:
    """Weights ``[1, kh, kw, C * multiplier]``; the results of one input channel lie side by side."""
    x, w = call.image(0), call.image(1)
    multiplier, rest = divmod(w.shape[3], x.shape[3])
    if w.shape[0] != 1 or rest or call.options.get("depth_multiplier", multiplier) != multiplier:
        raise EvaluateError(
            f"weights {w.shape} and depth_multiplier {call.options.get('depth_multiplier')} on {x.shape[3]} channels"
        )
    rows, columns = axes_of(call, x.shape, w.shape[1:3])
    require_size(call.output, rows.count, columns.count)
    weights = centred_weights(w, axis=3)[0]
    exact = numerics.exact_dtype(np.moveaxis(weights, 2, 0))
    image = np.repeat(padded(x.centred.astype(exact), rows, columns, 0), multiplier, axis=3)
    sums = np.zeros((len(image), rows.count, columns.count, w.shape[3]), exact)
    for ky in range(rows.kernel):
        for kx in range(columns.kernel):
            sums += image[:, rows.tap(ky), columns.tap(kx)] * weights[ky, kx].astype(exact)
    return _with_bias(call, sums, call.optional(2), w, axis=3)


@operator("TRANSPOSE_CONV")
def transpose_conv(call: Call) -> tuple[NDArray[Any], ...]:
    """Inputs: output shape, weights ``[N, kh, kw, C]``, image, bias. The windows lie on the output: every input
    position adds its products with the weights to one of them.
    """
    w, x, y = call.image(1), call.image(2), call.output
    if x.shape[3] != w.shape[3] or len(y.shape) != 4:
        raise EvaluateError(f"weights {w.shape} do not fit the input {x.shape} and the output {y.shape}")
    rows, columns = axes_of(call, y.shape, w.shape[1:3])
    require_size(x, rows.count, columns.count)
    weights = centred_weights(w, axis=0).astype(float)
    image = x.centred.astype(float)
    sums = padded(np.zeros((x.shape[0], *y.shape[1:3], len(weights))), rows, columns, 0)
    for ky in range(rows.kernel):
        for kx in range(columns.kernel):
            sums[:, rows.tap(ky), columns.tap(kx)] += image @ weights[:, ky, kx].T
    sums = sums[:, rows.before : rows.before + rows.size, columns.before : columns.before + columns.size]
    return _with_bias(call, sums, call.optional(3), w, axis=0)


def _with_bias(call: Call, sums: NDArray[Any], bias: Operand | None, w: Operand, axis: int) -> tuple[NDArray[Any], ...]:
    x = call.input(2 if call.name == "TRANSPOSE_CONV" else 0)
    if bias is not None and (bias.array.dtype != np.int32 or bias.shape != sums.shape[3:]):
        raise EvaluateError(f"bias is {bias.array.dtype} {bias.shape}, expected is int32 ({sums.shape[3]},)")
    acc = numerics.accumulators(sums, None if bias is None else bias.array)
    return call.output_stage(acc, numerics.multiplier(x.scale, channel_quantisation(w, axis)[0], call.output.scale))


def centred_weights(w: Operand, axis: int) -> NDArray[np.int16]:
    """Codes of weights less their zero points, which run along ``axis`` where there are several."""
    zeros = channel_quantisation(w, axis)[1]
    if np.any((zeros < 0) | (zeros > 255)):
        raise EvaluateError(f"weights {w.tensor.name!r} have zero points {zeros.tolist()} in codes of 0..255")
    shape = [-1 if i == axis else 1 for i in range(w.array.ndim)]
    return w.codes.astype(np.int16) - zeros.astype(np.int16).reshape(shape if zeros.ndim else ())


def channel_quantisation(w: Operand, axis: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Scales and code zero points of weights: scalars, or ``[N]`` for one per output channel along ``axis``.

    :raises EvaluateError: quantised along another axis, or counts that do not fit
    """
    t = w.tensor
    if w.array.ndim <= axis:
        raise EvaluateError(f"weights {t.name!r} have the shape {w.shape}, which has no axis {axis}")
    scales, zeros, channels = t.scales, t.zero_points + w.offset, w.array.shape[axis]
    if len(scales) == 1 and len(zeros) == 1:
        return scales[0], zeros[0]
    if t.quantized_dimension != axis or len(scales) != channels or len(zeros) != channels:
        raise EvaluateError(
            f"weights {t.name!r} have {len(scales)} scales and {len(zeros)} zero points along axis "
            f"{t.quantized_dimension}: expected is one of each, or one per output channel ({channels}, axis {axis})"
        )
    return scales, zeros
