"""What a network computes, stage by stage, from the graph alone: integers by numpy, output stage by coral.numerics."""

from __future__ import annotations

import numpy as np

from coral import numerics
from coral.codegen import network as nw


def run_network(net: nw.Network, x: np.ndarray | dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All tensors uint8 [y, x, c] for one image, or one of every input."""
    values = dict(x) if isinstance(x, dict) else {net.inputs[0]: x}
    for stage in net.stages:
        values[stage.output] = _stage(net, stage, [values[name] for name in stage.inputs])
    return values


def _stage(net: nw.Network, stage: nw.Stage, xs: list[np.ndarray]) -> np.ndarray:
    y, zero = net.tensors[stage.output], net.tensors[stage.inputs[0]].zero_point
    if isinstance(stage, nw.Concatenate):
        tensors, mults = [net.tensors[name] for name in stage.inputs], stage.mults or (1.0,) * len(xs)
        parts = [
            a
            if t.zero_point == y.zero_point and mult == 1
            else numerics.requantise(a.astype(np.int32) - t.zero_point, mult, *stage.clamps, y.zero_point)
            for a, t, mult in zip(xs, tensors, mults, strict=True)
        ]
        return np.concatenate(parts, axis=2)
    if isinstance(stage, nw.Slice):
        (top, left), (sy, sx) = stage.first, stage.step
        return xs[0][top::sy, left::sx, stage.begin :][: y.y, : y.x, : y.c]
    if isinstance(stage, nw.Resize):
        if stage.nearest:
            return xs[0].repeat(2, axis=0).repeat(2, axis=1)
        return np.rint(_doubled(_doubled(xs[0].astype(np.float64)).swapaxes(0, 1)).swapaxes(0, 1)).astype(np.uint8)
    if isinstance(stage, nw.Softmax):
        t = net.tensors[stage.inputs[0]]
        return numerics.softmax_on_tiles(xs[0], t.scale, 1.0, y.scale, y.zero_point)
    if isinstance(stage, nw.L2Normalise):
        t = net.tensors[stage.inputs[0]]
        return numerics.l2_normalise(xs[0], t.scale, zero, y.scale, y.zero_point)
    if isinstance(stage, nw.Reshape):
        return xs[0].reshape(y.y, y.x, y.c)
    if isinstance(stage, nw.Pad):
        borders = [(b, n - b - old) for b, n, old in zip(stage.before, (y.y, y.x), xs[0].shape, strict=False)]
        return np.pad(xs[0], [*borders, (0, 0)], constant_values=zero)
    if isinstance(stage, nw.TransposeConv):
        return _transposed(stage, xs[0].astype(np.int64) - zero, y)
    mult, spline = getattr(stage, "mult", 1.0), None
    x = xs[0].astype(np.int64) - zero
    if isinstance(stage, nw.Dense):
        acc = (stage.weights.astype(np.int64) - stage.w_zp) @ x.reshape(-1)
    elif isinstance(stage, nw.Add):
        w1, w2 = stage.weights
        acc = w1 * xs[0].astype(np.int64) + w2 * xs[1].astype(np.int64) + stage.offset
    elif isinstance(stage, nw.Multiply):
        acc = x * (xs[1].astype(np.int64) - net.tensors[stage.inputs[1]].zero_point)
    elif isinstance(stage, nw.Requantise):
        acc, spline = x + stage.offset, stage.spline
    else:
        taps = _windows(x, stage.window, (y.y, y.x), -(10**6) if isinstance(stage, nw.MaxPool) else 0)
        if isinstance(stage, nw.MaxPool):
            acc = taps.max(axis=2)
        elif isinstance(stage, nw.AveragePool):
            acc = taps.sum(axis=2)
        elif isinstance(stage, nw.Depthwise):
            taps = np.repeat(taps, y.c // taps.shape[3], axis=3)
            acc = (taps * (stage.weights.astype(np.int64) - stage.w_zp).reshape(-1, y.c)).sum(axis=2)
        else:
            assert isinstance(stage, nw.Conv)
            w = stage.weights.astype(np.int64).reshape(y.c, -1) - stage.w_zp
            flat = taps.reshape(y.y * y.x, -1).astype(np.float64)
            acc = (flat @ w.T.astype(np.float64)).astype(np.int64)
    if isinstance(stage, nw.Conv) and stage.bias is not None:
        acc = acc.reshape(-1, y.c) + stage.bias
    codes = numerics.requantise(acc.astype(np.int32), mult, *stage.clamps, y.zero_point, nlu=spline)
    return codes.reshape(y.y, y.x, y.c)


def _transposed(stage: nw.TransposeConv, x: np.ndarray, y: nw.Tensor) -> np.ndarray:
    """Every input position adds its products to the window that it stands for."""
    (kh, kw), (sy, sx), (top, left) = stage.at.kernel, stage.at.stride, stage.at.pad
    acc = np.zeros((y.y + 2 * kh + sy * x.shape[0], y.x + 2 * kw + sx * x.shape[1], y.c), np.int64)
    weights = stage.weights.astype(np.int64) - stage.w_zp
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            acc[i * sy : i * sy + kh, j * sx : j * sx + kw] += np.tensordot(x[i, j], weights, (0, 3)).transpose(1, 2, 0)
    acc = acc[top : top + y.y, left : left + y.x] + (0 if stage.bias is None else stage.bias)
    return numerics.requantise(acc.astype(np.int32), stage.mult, *stage.clamps, y.zero_point)


def _doubled(x: np.ndarray) -> np.ndarray:
    """Twice as many rows: result o at (o + 0.5) / 2 - 0.5, exact in float64, edges repeated."""
    at = (np.arange(2 * len(x)) + 0.5) / 2 - 0.5
    low = np.floor(at).astype(int)
    part = (at - low).reshape(-1, *[1] * (x.ndim - 1))
    first, second = (x[np.clip(low + d, 0, len(x) - 1)] for d in (0, 1))
    return first * (1 - part) + second * part


def _windows(x: np.ndarray, w: nw.Window, size: tuple[int, int], pad: int) -> np.ndarray:
    """[y, x, taps, c], outside the map ``pad``."""
    (kh, kw), (sy, sx), (dy, dx) = w.kernel, w.stride, w.dilation
    reach = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(size, w.stride, w.kernel, w.dilation, strict=True)]
    extra = [(p, max(r - p - n, 0)) for p, r, n in zip(w.pad, reach, x.shape[:2], strict=True)]
    x = np.pad(x, [*((max(a, 0), b) for a, b in extra), (0, 0)], constant_values=pad)
    x = x[max(-w.pad[0], 0) :, max(-w.pad[1], 0) :]
    taps = [
        x[i * dy : i * dy + sy * (size[0] - 1) + 1 : sy, j * dx : j * dx + sx * (size[1] - 1) + 1 : sx]
        for i in range(kh)
        for j in range(kw)
    ]
    return np.stack(taps, axis=2)
