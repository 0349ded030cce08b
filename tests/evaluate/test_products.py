"""FULLY_CONNECTED and convolutions against loops over Python integers and exact rationals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from evaluate_graphs import RANGES, Quantised, exact_clamps, multiplier, run, single, tensor
from exact_float import exact_requantise
from hypothesis import given, settings
from hypothesis import strategies as st

from coral.evaluate import EvaluateError


class Layer:
    """Random operands of one layer with weights: image or rows, weights along ``axis``, bias, output quantisation."""

    def __init__(self, data: st.DataObject, x: tuple[int, ...], w: tuple[int, ...], axis: int) -> None:
        self.rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        dtype, self.per_channel = data.draw(st.sampled_from([("u1", False), ("i1", False), ("i1", True)]))
        self.activation = data.draw(st.sampled_from(sorted(RANGES)))
        self.x, self.w = Quantised(self.rng, x, dtype), Quantised(self.rng, w, dtype)
        self.y = Quantised(self.rng, (), dtype, low=0.05)
        self.axis, self.channels = axis, w[axis]
        count = self.channels if self.per_channel else 1
        self.w_scales = np.float32(self.rng.uniform(0.001, 0.1, count))
        self.w_zeros = self.rng.integers(0, 256, count) if data.draw(st.booleans()) else np.full(count, 128)
        self.bias = data.draw(st.sampled_from([None, self.rng.integers(-5000, 5000, self.channels).astype(np.int32)]))

    def tensors(self, y: tuple[int, ...]) -> list[Any]:
        w = self.w
        return [
            self.x.tensor("x"),
            tensor("w", w.values.shape, w.dtype, self.w_scales, self.w_zeros - w.offset, w.values, self.axis),
            tensor("b", (self.channels,), "i4", data=self.bias),
            tensor("y", y, self.y.dtype, [self.y.scale], [self.y.zero_point - self.y.offset]),
        ]

    def weight(self, channel: int, *position: int) -> int:
        """Centred weight of an output channel, the other axes' indices in order."""
        index = [*position[: self.axis], channel, *position[self.axis :]]
        zero = self.w_zeros[channel if self.per_channel else 0]
        return int(self.w.values[tuple(index)]) + self.w.offset - int(zero)

    def code(self, acc: int, channel: int) -> int:
        acc += 0 if self.bias is None else int(self.bias[channel])
        mult = multiplier(self.x.scale, float(self.w_scales[channel if self.per_channel else 0]), self.y.scale)
        lo, hi = exact_clamps(self.y.scale, self.y.zero_point, self.activation)
        return exact_requantise(acc, mult, lo, hi, self.y.zero_point)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_fully_connected(data: st.DataObject) -> None:
    m, k, n = (data.draw(st.integers(1, high)) for high in (2, 5, 4))
    layer = Layer(data, (m, k), (n, k), axis=0)
    inputs = (0, 1, -1 if layer.bias is None else 2)
    graph = single(
        "FULLY_CONNECTED", layer.tensors((m, n)), inputs, fused_activation_function=layer.activation, weights_format=0
    )
    got, x = run(graph, layer.x.values), layer.x.centred
    assert got.dtype == layer.y.dtype
    for row in range(m):
        for col in range(n):
            acc = sum(x[row][i] * layer.weight(col, i) for i in range(k))
            assert int(got[row, col]) + layer.y.offset == layer.code(acc, col)


def windows(size: int, kernel: int, stride: int, dilation: int, padding: str) -> list[list[int]]:
    """For each output position the input positions of its taps (may lie outside), from TFLite's definition."""
    extent = (kernel - 1) * dilation + 1
    if padding == "VALID":
        starts = list(range(0, size - extent + 1, stride))
    else:
        count = (size + stride - 1) // stride
        missing = max(0, (count - 1) * stride + extent - size)
        starts = [o * stride - missing // 2 for o in range(count)]
    return [[start + t * dilation for t in range(kernel)] for start in starts]


geometry = st.tuples(
    st.integers(1, 7), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.sampled_from(["SAME", "VALID"])
).filter(lambda g: g[4] == "SAME" or (g[1] - 1) * g[3] + 1 <= g[0])


@settings(max_examples=100, deadline=None)
@given(st.data(), geometry, geometry, st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_convolutions(
    data: st.DataObject, rows: Any, columns: Any, batch: int, cin: int, factor: int, depthwise: bool
) -> None:
    """Both kinds: strides, dilations, paddings, multipliers, zero points, per tensor and per channel."""
    columns = (*columns[:4], rows[4])
    if columns[4] == "VALID" and (columns[1] - 1) * columns[3] + 1 > columns[0]:
        columns = (5, 2, columns[2], 1, "VALID")
    ys, xs = windows(*rows), windows(*columns)
    cout = cin * factor if depthwise else factor
    shape = (1, rows[1], columns[1], cout) if depthwise else (cout, rows[1], columns[1], cin)
    layer = Layer(data, (batch, rows[0], columns[0], cin), shape, axis=3 if depthwise else 0)
    options = {
        "padding": rows[4], "stride_h": rows[2], "stride_w": columns[2], "dilation_h_factor": rows[3],
        "dilation_w_factor": columns[3], "fused_activation_function": layer.activation,
    }  # fmt: skip
    if depthwise:
        options["depth_multiplier"] = factor
    tensors = layer.tensors((batch, len(ys), len(xs), cout))
    name = "DEPTHWISE_CONV_2D" if depthwise else "CONV_2D"
    got = run(single(name, tensors, (0, 1, -1 if layer.bias is None else 2), **options), layer.x.values)
    x = layer.x.centred

    def pixel(n: int, row: int, column: int, channel: int) -> int:
        inside = 0 <= row < rows[0] and 0 <= column < columns[0]
        return x[n][row][column][channel] if inside else 0

    for n, oy, ox, c in np.ndindex(got.shape):
        acc = 0
        for ky, row in enumerate(ys[oy]):
            for kx, column in enumerate(xs[ox]):
                if depthwise:
                    acc += pixel(n, row, column, c // factor) * layer.weight(c, 0, ky, kx)
                else:
                    acc += sum(pixel(n, row, column, i) * layer.weight(c, ky, kx, i) for i in range(cin))
        assert int(got[n, oy, ox, c]) + layer.y.offset == layer.code(acc, c)


@settings(max_examples=60, deadline=None)
@given(st.data(), geometry, geometry, st.integers(1, 3), st.integers(1, 3))
def test_transpose_conv(data: st.DataObject, rows: Any, columns: Any, cin: int, cout: int) -> None:
    """The transpose of the convolution on an image of the output's size."""
    rows, columns = (*rows[:3], 1, "SAME"), (*columns[:3], 1, "SAME")
    ys, xs = windows(*rows), windows(*columns)
    layer = Layer(data, (1, len(ys), len(xs), cin), (cout, rows[1], columns[1], cin), axis=0)
    x, w, b, y = layer.tensors((1, rows[0], columns[0], cout))
    size = tensor("size", (4,), "i4", data=np.int32([1, rows[0], columns[0], cout]))
    options = {"padding": "SAME", "stride_h": rows[2], "stride_w": columns[2]}
    graph = single(
        "TRANSPOSE_CONV", [x, size, w, b, y], (1, 2, 0) + ((3,) if layer.bias is not None else ()),
        fused_activation_function=layer.activation, **options,
    )  # fmt: skip
    sums = np.zeros((rows[0], columns[0], cout), object)
    for iy, ix, ky, kx in np.ndindex(len(ys), len(xs), rows[1], columns[1]):
        row, column = ys[iy][ky], xs[ix][kx]
        if 0 <= row < rows[0] and 0 <= column < columns[0]:
            for c in range(cout):
                pixel = layer.x.centred[0][iy][ix]
                sums[row, column, c] += sum(pixel[i] * layer.weight(c, ky, kx, i) for i in range(cin))
    got = run(graph, layer.x.values)
    for row, column, c in np.ndindex(*sums.shape):
        assert int(got[0, row, column, c]) + layer.y.offset == layer.code(sums[row, column, c], c)


def test_sums_beyond_float32() -> None:
    """1,200 products of 255 * 127 leave float32's integers: the sum must stay exact."""
    w = np.full((1, 20, 20, 3), 127, np.int8)
    w[0, 0, 0, 0] = 126
    tensors = [
        tensor("x", (1, 20, 20, 3), "u1", [1.0], [0]),
        tensor("w", w.shape, "i1", [1.0], [0], w),
        tensor("b", (1,), "i4", data=np.int32([-(1200 * 255 * 127 - 255 - 100)])),
        tensor("y", (1, 1, 1, 1), "u1", [1.0], [0]),
    ]
    graph = single("CONV_2D", tensors, (0, 1, 2), padding="VALID", stride_h=1, stride_w=1)
    assert run(graph, np.full((1, 20, 20, 3), 255, np.uint8)).item() == 100


IMAGE = tensor("x", (1, 4, 4, 2), "u1", [1], [0])
X = np.zeros((1, 4, 4, 2), np.uint8)


def weights(*shape: int, **options: Any) -> Any:
    return tensor("w", shape, "u1", [1], [0], np.zeros(shape, np.uint8), **options)


@pytest.mark.parametrize(
    ("op", "w", "y", "options", "message"),
    [
        ("CONV_2D", weights(3, 1, 1, 4), (1, 4, 4, 3), {}, "CONV_2D 'y': .*grouped convolutions are not supported"),
        ("CONV_2D", weights(3, 1, 1), (1, 4, 4, 3), {}, r"input 1 has shape \(3, 1, 1\), expected is \[N, H, W, C\]"),
        ("CONV_2D", weights(3, 0, 1, 2), (1, 4, 4, 3), {}, r"input 1 has shape \(3, 0, 1, 2\)"),
        ("CONV_2D", weights(3, 1, 1, 2), (1, 4, 5, 3), {}, r"'y' has shape \(1, 4, 5, 3\), its .* are 4 x 4"),
        ("CONV_2D", weights(3, 1, 1, 2), (1, 4, 4, 5), {}, r"shape \(1, 4, 4, 5\), its operator computes"),
        ("CONV_2D", weights(3, 5, 1, 2), (1, 4, 4, 3), {"padding": "VALID"}, "windows of 5 positions do not fit 4"),
        ("CONV_2D", weights(3, 1, 1, 2), (1, 4, 4, 3), {"padding": "EXPLICIT"}, "option padding is 'EXPLICIT'"),
        ("CONV_2D", weights(3, 1, 1, 2), (1, 4, 4, 3), {"stride_h": 0}, "stride 0 and dilation 1 must be at least 1"),
        ("CONV_2D", weights(3, 3, 3, 2), (1, 4, 4, 3), {"dilation_h_factor": 2**30}, "more than 67108864 elements"),
        ("CONV_2D", weights(3, 1, 1, 2), (1, 4, 4, 3), {"fused_activation_function": "SIGN_BIT"}, "'SIGN_BIT' is not"),
        ("DEPTHWISE_CONV_2D", weights(1, 1, 1, 3), (1, 4, 4, 3), {}, "on 2 channels"),
        ("DEPTHWISE_CONV_2D", weights(2, 1, 1, 2), (1, 4, 4, 2), {}, "on 2 channels"),
        ("DEPTHWISE_CONV_2D", weights(1, 1, 1, 4), (1, 4, 4, 4), {"depth_multiplier": 1}, "depth_multiplier 1 on"),
    ],
)
def test_errors(op: str, w: Any, y: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    graph = single(op, [IMAGE, w, tensor("y", y, "u1", [1], [0])], (0, 1), **({"padding": "SAME"} | options))
    with pytest.raises(EvaluateError, match=message):
        run(graph, X)


def test_bias_and_weight_quantisation() -> None:
    y = tensor("y", (1, 4, 4, 3), "u1", [1], [0])
    bias = tensor("b", (2,), "i4", data=np.zeros(2, np.int32))
    with pytest.raises(EvaluateError, match=r"bias is int32 \(2,\), expected is int32 \(3,\)"):
        run(single("CONV_2D", [IMAGE, weights(3, 1, 1, 2), bias, y], (0, 1, 2), padding="SAME"), X)
    w = tensor("w", (1, 1, 1, 2), "u1", [1, 1], [0, 0], np.zeros((1, 1, 1, 2), np.uint8), axis=0)
    with pytest.raises(EvaluateError, match=r"along axis 0: expected .* axis 3"):
        run(
            single("DEPTHWISE_CONV_2D", [IMAGE, w, tensor("y", IMAGE.shape, "u1", [1], [0])], (0, 1), padding="SAME"), X
        )
    w = tensor("w", (3, 1, 1, 2), "u1", [1], [300], np.zeros((3, 1, 1, 2), np.uint8))
    with pytest.raises(EvaluateError, match="'w' have zero points 300"):
        run(single("CONV_2D", [IMAGE, w, y], (0, 1), padding="SAME"), X)
