"""Random quantised TFLite graphs of 2 to 12 operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from coral.package.graph import Graph, Operator, Tensor

NONE = np.zeros(0, np.float32), np.zeros(0, np.int64)
ACTIVATIONS = ("NONE", "RELU", "RELU6", "RELU_N1_TO_1")
OPTIONS = {
    "CONV_2D": "Conv2DOptions", "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions",
    "FULLY_CONNECTED": "FullyConnectedOptions",
    "AVERAGE_POOL_2D": "Pool2DOptions", "MAX_POOL_2D": "Pool2DOptions", "ADD": "AddOptions", "SUB": "SubOptions",
    "MUL": "MulOptions", "CONCATENATION": "ConcatenationOptions", "RESHAPE": "ReshapeOptions", "PAD": "PadOptions",
    "MEAN": "ReducerOptions", "SOFTMAX": "SoftmaxOptions", "SPLIT": "SplitOptions", "LOGISTIC": "", "TANH": "",
    "RELU": "", "RELU6": "", "QUANTIZE": "QuantizeOptions", "TRANSPOSE_CONV": "TransposeConvOptions",
    "STRIDED_SLICE": "StridedSliceOptions", "HARD_SWISH": "HardSwishOptions", "TRANSPOSE": "TransposeOptions",
    "RESIZE_BILINEAR": "ResizeBilinearOptions", "L2_NORMALIZATION": "L2NormOptions",
    "RESIZE_NEAREST_NEIGHBOR": "ResizeNearestNeighborOptions",
}  # fmt: skip


VERSIONS = {"CONV_2D": 3, "DEPTHWISE_CONV_2D": 3, "FULLY_CONNECTED": 4, "TRANSPOSE_CONV": 3, "RESIZE_BILINEAR": 3,
            "RESIZE_NEAREST_NEIGHBOR": 3, "RESHAPE": 1, "HARD_SWISH": 1}  # fmt: skip
"""Of the operators on int8, where not 2."""
KINDS = ["conv", "conv", "depthwise", "dense", "pool", "pool", "sum", "sum", "sum", "unary", "unary", "mean", "reshape",
         "pad", "concat", "split", "slice", "transpose_conv", "folded", "softmax", "odd"]  # fmt: skip
MORE_KINDS = [*KINDS, "excite", "excite", "broadcast", "from_constant", "dilated", "border", "border", "resize",
              "unary", "moved"]  # fmt: skip
FIRST_OF_MORE = 10000
"""From this seed on there are all kinds of operators; the seeds below have kept their graphs."""


class Grower:
    """Adds operators to a graph whose tensors are images ``[n, y, x, c]`` or rows ``[n, c]``."""

    def __init__(self, seed: int) -> None:
        self.kinds = KINDS if seed < FIRST_OF_MORE else MORE_KINDS
        self.rng = rng = np.random.default_rng(seed)
        self.dtype, self.kind = ("u1", 3) if rng.integers(2) else ("i1", 9)
        self.per_channel = self.dtype == "i1" and bool(rng.integers(4))
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        images = int(rng.choice([1, 1, 1, 2, 3]))
        self.inputs = []
        shape = (images, *(int(n) for n in rng.integers(1, 25, 2)), int(rng.choice([1, 2, 3, 4, 5, 8, 16, 24])))
        for _ in range(int(rng.choice([1, 1, 2]))):
            self.inputs.append(self.tensor(shape))
        self.open = list(self.inputs)

    def zero(self) -> int:
        codes = int(self.rng.choice([0, 128, 255, int(self.rng.integers(256)), int(self.rng.integers(256))]))
        return codes - (128 if self.dtype == "i1" else 0)

    def scale(self) -> float:
        return float(10 ** self.rng.uniform(-3, 0))

    def tensor(self, shape: tuple[int, ...], like: int | None = None) -> int:
        scales, zeros = np.array([self.scale()], np.float32), np.array([self.zero()], np.int64)
        if like is not None:
            scales, zeros = self.tensors[like].scales, self.tensors[like].zero_points
        name = f"t{len(self.tensors)}"
        self.tensors.append(Tensor(name, shape, self.kind, np.dtype(self.dtype), scales, zeros, 0, None, False))
        return len(self.tensors) - 1

    def constant(self, data: np.ndarray, scales: Any = NONE[0], zeros: Any = NONE[1], axis: int = 0) -> int:
        kind = {"i4": 2, "u1": 3, "i1": 9}[data.dtype.str[1:]]
        scales, zeros = np.asarray(scales, np.float32), np.asarray(zeros, np.int64)
        name = f"c{len(self.tensors)}"
        self.tensors.append(Tensor(name, data.shape, kind, data.dtype, scales, zeros, axis, data, False))
        return len(self.tensors) - 1

    def op(self, name: str, inputs: list[int], outputs: list[int], **options: Any) -> None:
        version = 1 if self.dtype == "u1" else VERSIONS.get(name, 2)
        self.operators.append(Operator(name, tuple(inputs), tuple(outputs), options, (), None, OPTIONS[name], version))
        self.open += outputs

    def source(self, rank: int | None = None) -> int:
        found = [i for i in self.open if rank is None or len(self.tensors[i].shape) == rank]
        return int(self.rng.choice(found[-3:])) if found else -1

    def weights(self, shape: tuple[int, ...], axis: int, taps: int, x: int, y: int) -> tuple[int, int]:
        """Weights and bias such that results use the codes' range."""
        rng, n = self.rng, shape[axis]
        spread = 60.0 * np.sqrt(taps) * 70
        base = 70 * float(self.tensors[y].scales[0]) / (float(self.tensors[x].scales[0]) * spread)
        if self.per_channel:
            scales = (base * 10 ** rng.uniform(-2, 2, n)).astype(np.float32)
            data, zeros = rng.integers(-127, 128, shape).astype(np.int8), np.zeros(n)
        else:
            scales = np.array([base], np.float32)
            data = rng.integers(0, 256, shape).astype(np.uint8).view(self.dtype)
            zeros = np.array([self.zero() if self.dtype == "u1" else 0])
        bias = rng.integers(-20000, 20000, n).astype(np.int32)
        return self.constant(data, scales, zeros, axis), self.constant(bias, scales, np.zeros(len(scales)))

    def windows(self, x: int) -> tuple[dict[str, Any], tuple[int, int], tuple[int, int]]:
        """(options, kernel, output size)"""
        rng = self.rng
        size = self.tensors[x].shape[1:3]
        kernel = tuple(int(min(k, n)) for k, n in zip(rng.choice([1, 1, 2, 3, 3, 5], 2), size, strict=True))
        stride = tuple(int(s) for s in rng.choice([1, 1, 1, 2, 3], 2))
        padding = "SAME" if rng.integers(2) else "VALID"
        out = [-(-n // s) if padding == "SAME" else (n - k) // s + 1
               for n, k, s in zip(size, kernel, stride, strict=True)]  # fmt: skip
        options = {"padding": padding, "stride_h": stride[0], "stride_w": stride[1],
                   "fused_activation_function": str(rng.choice(ACTIVATIONS))}  # fmt: skip
        return options, (kernel[0], kernel[1]), (out[0], out[1])

    def grow(self) -> None:
        """One more operator."""
        getattr(self, str(self.rng.choice(self.kinds)))()

    def conv(self) -> None:
        x = self.source(4)
        if x < 0:
            return
        n, c = int(self.rng.choice([1, 2, 3, 4, 7, 8, 16, 33])), self.tensors[x].shape[3]
        options, kernel, size = self.windows(x)
        dilation = {"dilation_h_factor": 1, "dilation_w_factor": 1}
        if self.rng.integers(5) == 0 and options["padding"] == "SAME":
            options |= {"stride_h": 1, "stride_w": 1}
            dilation = {"dilation_h_factor": 2, "dilation_w_factor": int(self.rng.integers(1, 4))}
            size = self.tensors[x].shape[1:3]
        y = self.tensor((self.tensors[x].shape[0], *size, n))
        w, b = self.weights((n, *kernel, c), 0, c * kernel[0] * kernel[1], x, y)
        self.op("CONV_2D", [x, w, b], [y], **options, **dilation)

    def depthwise(self) -> None:
        x = self.source(4)
        if x < 0:
            return
        c, m = self.tensors[x].shape[3], int(self.rng.choice([1, 1, 1, 2, 3]))
        options, kernel, size = self.windows(x)
        y = self.tensor((self.tensors[x].shape[0], *size, c * m))
        w, b = self.weights((1, *kernel, c * m), 3, kernel[0] * kernel[1], x, y)
        self.op("DEPTHWISE_CONV_2D", [x, w, b], [y], depth_multiplier=m, **options)

    def transpose_conv(self) -> None:
        x = self.source(4)
        if x < 0:
            return
        images, h, w_, c = self.tensors[x].shape
        n, k, s = int(self.rng.choice([1, 4, 6])), int(self.rng.choice([2, 3])), 2
        y = self.tensor((images, h * s, w_ * s, n))
        w, b = self.weights((n, k, k, c), 0, c * k * k, x, y)
        shape = self.constant(np.array(self.tensors[y].shape, np.int32))
        self.op("TRANSPOSE_CONV", [shape, w, x, b], [y], padding="SAME", stride_h=s, stride_w=s)

    def dense(self) -> None:
        x = self.source()
        shape = self.tensors[x].shape
        k, n = int(np.prod(shape[1:])), int(self.rng.choice([1, 4, 10, 70]))
        if k > 6000:
            return
        y = self.tensor((shape[0], n))
        w, b = self.weights((n, k), 0, k, x, y)
        self.op("FULLY_CONNECTED", [x, w, b], [y], weights_format=0, keep_num_dims=False,
                fused_activation_function=str(self.rng.choice(ACTIVATIONS)))  # fmt: skip

    def pool(self) -> None:
        x = self.source(4)
        if x < 0:
            return
        options, kernel, size = self.windows(x)
        name = "MAX_POOL_2D" if self.rng.integers(2) else "AVERAGE_POOL_2D"
        like = x if name == "MAX_POOL_2D" or self.rng.integers(2) else None
        y = self.tensor((self.tensors[x].shape[0], *size, self.tensors[x].shape[3]), like)
        self.op(name, [x], [y], filter_height=kernel[0], filter_width=kernel[1], **options)

    def sum(self) -> None:
        a = self.source()
        others = [i for i in self.open if self.tensors[i].shape == self.tensors[a].shape]
        b = int(self.rng.choice(others))
        name = str(self.rng.choice(["ADD", "SUB", "MUL"]))
        self.op(name, [a, b], [self.tensor(self.tensors[a].shape)],
                fused_activation_function=str(self.rng.choice(ACTIVATIONS)))  # fmt: skip

    def constant_operand(self, shape: tuple[int, ...]) -> int:
        data = self.rng.integers(0, 256, shape).astype(np.uint8).view(self.dtype)
        return self.constant(data, [self.scale()], [self.zero()])

    def unary(self) -> None:
        x = self.source()
        name = str(self.rng.choice(["LOGISTIC", "TANH", "RELU", "RELU6", "QUANTIZE", "HARD_SWISH"]))
        self.op(name, [x], [self.tensor(self.tensors[x].shape)])

    def mean(self) -> None:
        x = self.source(4)
        if x < 0:
            return
        shape, keep = self.tensors[x].shape, bool(self.rng.integers(2))
        out = (shape[0], 1, 1, shape[3]) if keep else (shape[0], shape[3])
        self.op("MEAN", [x, self.constant(np.array([1, 2], np.int32))], [self.tensor(out)], keep_dims=keep)

    def reshape(self) -> None:
        x = self.source()
        shape = self.tensors[x].shape
        rest = int(np.prod(shape[1:]))
        new = (shape[0], rest) if self.rng.integers(2) else (shape[0], 1, rest // shape[-1], shape[-1])
        target = self.constant(np.array(new, np.int32))
        self.op("RESHAPE", [x, target], [self.tensor(new, x)], new_shape=new)

    def pad(self) -> None:
        x = self.source(4)
        if x < 0:
            return
        pads = np.zeros((4, 2), np.int32)
        pads[1:3] = self.rng.integers(0, 3, (2, 2))
        shape = tuple(int(n) for n in np.array(self.tensors[x].shape) + pads.sum(1))
        self.op("PAD", [x, self.constant(pads)], [self.tensor(shape, x)])

    def concat(self) -> None:
        a = self.source(4)
        if a < 0:
            return
        shape, rank = self.tensors[a].shape, 4
        fit = [i for i in self.open if self.tensors[i].shape[:-1] == shape[:-1] and len(self.tensors[i].shape) == rank]
        parts = [a, *(int(i) for i in self.rng.choice(fit, int(self.rng.integers(1, 3))))]
        c = sum(self.tensors[i].shape[-1] for i in parts)
        y = self.tensor((*shape[:-1], c), a if self.rng.integers(2) else None)
        self.op("CONCATENATION", parts, [y], axis=int(self.rng.choice([3, -1])), fused_activation_function="NONE")

    def split(self) -> None:
        x = self.source(4)
        if x < 0 or self.tensors[x].shape[3] % 2:
            return
        shape = self.tensors[x].shape
        outputs = [self.tensor((*shape[:3], shape[3] // 2), x) for _ in range(2)]
        self.op("SPLIT", [self.constant(np.array(3, np.int32)), x], outputs, num_splits=2)

    def slice(self) -> None:
        x = self.source(4)
        if x < 0:
            return
        shape = np.array(self.tensors[x].shape)
        begin = np.array([0, *(self.rng.integers(0, n) for n in shape[1:])])
        step = np.array([1, *self.rng.integers(1, 3, 2), 1])
        size = -(-(shape - begin) // step)
        bounds = [self.constant(v.astype(np.int32)) for v in (begin, shape, step)]
        self.op("STRIDED_SLICE", [x, *bounds], [self.tensor(tuple(int(n) for n in size), x)], begin_mask=0, end_mask=0,
                ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)  # fmt: skip

    def folded(self) -> None:
        x = self.source()
        shape = self.tensors[x].shape
        c = self.constant_operand(() if self.rng.integers(2) else (shape[-1],))
        name = str(self.rng.choice(["ADD", "SUB", "MUL"]))
        self.op(
            name, [x, c] if self.rng.integers(3) else [c, x], [self.tensor(shape)], fused_activation_function="NONE"
        )

    def pair(self, name: str, operands: list[int], shape: tuple[int, ...]) -> int:
        """A sum or product in any order of its operands."""
        y = self.tensor(shape)
        self.op(name, operands[:: int(self.rng.choice([-1, 1]))], [y],
                fused_activation_function=str(self.rng.choice(ACTIVATIONS)))  # fmt: skip
        return y

    def excite(self) -> None:
        """Channels times factors of a mean."""
        x = self.source(4)
        if x < 0:
            return
        images, c = self.tensors[x].shape[0], self.tensors[x].shape[3]
        mean = self.tensor((images, 1, 1, c))
        self.op("MEAN", [x, self.constant(np.array([1, 2], np.int32))], [mean], keep_dims=True)
        gate, factors = self.tensor((images, 1, 1, c)), self.tensor((images, 1, 1, c))
        w, b = self.weights((c, 1, 1, c), 0, c, mean, gate)
        self.op("CONV_2D", [mean, w, b], [gate], padding="SAME", stride_h=1, stride_w=1, dilation_h_factor=1,
                dilation_w_factor=1, fused_activation_function="NONE")  # fmt: skip
        self.op("LOGISTIC", [gate], [factors])
        self.pair("MUL", [x, factors], self.tensors[x].shape)

    def broadcast(self) -> None:
        """A map and one of its rows, columns, positions or channels."""
        x = self.source(4)
        if x < 0:
            return
        shape = self.tensors[x].shape
        keep = self.rng.integers(0, 2, 3)
        part = (shape[0], *(n if k else 1 for n, k in zip(shape[1:], keep, strict=True)))
        bounds = [self.constant(np.array(v, np.int32)) for v in ([0] * 4, part, [1] * 4)]
        y = self.tensor(part, x)
        self.op("STRIDED_SLICE", [x, *bounds], [y], begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0,
                shrink_axis_mask=0)  # fmt: skip
        self.pair(str(self.rng.choice(["ADD", "SUB", "MUL"])), [x, y], shape)

    def from_constant(self) -> None:
        x = self.source()
        shape = self.tensors[x].shape
        c = self.constant_operand(() if self.rng.integers(2) else (shape[-1],))
        self.op("SUB", [c, x], [self.tensor(shape)], fused_activation_function=str(self.rng.choice(ACTIVATIONS)))

    def dilated(self) -> None:
        x = self.source(4)
        if x < 0:
            return
        shape = self.tensors[x].shape
        kernel = int(self.rng.choice([2, 3])), int(self.rng.choice([1, 3]))
        y = self.tensor(shape)
        w, b = self.weights((1, *kernel, shape[3]), 3, kernel[0] * kernel[1], x, y)
        self.op("DEPTHWISE_CONV_2D", [x, w, b], [y], depth_multiplier=1, padding="SAME", stride_h=1, stride_w=1,
                dilation_h_factor=int(self.rng.integers(1, 4)), dilation_w_factor=int(self.rng.integers(2, 4)),
                fused_activation_function="NONE")  # fmt: skip

    def border(self) -> None:
        """An average whose windows reach beyond the map."""
        x = self.source(4)
        if x < 0:
            return
        kernel, stride = [int(k) for k in self.rng.integers(1, 5, 2)], [int(s) for s in self.rng.integers(1, 3, 2)]
        images, h, w, c = self.tensors[x].shape
        y = self.tensor((images, -(-h // stride[0]), -(-w // stride[1]), c), x if self.rng.integers(2) else None)
        self.op("AVERAGE_POOL_2D", [x], [y], filter_height=kernel[0], filter_width=kernel[1], padding="SAME",
                stride_h=stride[0], stride_w=stride[1],
                fused_activation_function=str(self.rng.choice(ACTIVATIONS)))  # fmt: skip

    def resize(self) -> None:
        """By copies, whose number may differ between rows and columns."""
        x = self.source(4)
        if x < 0:
            return
        images, h, w, c = self.tensors[x].shape
        most = 3 if h * w < 300 else 1
        fy, fx = (int(f) for f in self.rng.integers(1, most + 1, 2))
        size = self.constant(np.array([fy * h, fx * w], np.int32))
        name = "RESIZE_BILINEAR" if h == w == 1 else "RESIZE_NEAREST_NEIGHBOR"
        self.op(name, [x, size], [self.tensor((images, fy * h, fx * w, c), x)], align_corners=False,
                half_pixel_centers=bool(self.rng.integers(2)))  # fmt: skip

    def moved(self) -> None:
        """A reshape whose result is read position by position."""
        x = self.source(4)
        if x < 0:
            return
        images, h, w, c = self.tensors[x].shape
        shape = (images, w, h, c) if h != w else (images, 1, h * w, c)
        y, z = self.tensor(shape, x), self.tensor(shape)
        self.op("RESHAPE", [x, self.constant(np.array(shape, np.int32))], [y], new_shape=shape)
        self.op("RELU", [y], [z])

    def softmax(self) -> None:
        x = self.source(2)
        if x >= 0:
            y = self.tensor(self.tensors[x].shape)
            zero = 0 if self.dtype == "u1" else -128
            t = self.tensors[y]
            self.tensors[y] = Tensor(t.name, t.shape, t.type, t.dtype, np.array([1 / 256], np.float32),
                                     np.array([zero], np.int64), 0, None, False)  # fmt: skip
            self.op("SOFTMAX", [x], [y], beta=1.0)

    def odd(self) -> None:
        """What the chip has no program for, or not everywhere."""
        x = self.source(4)
        if x < 0:
            return
        images, h, w, c = self.tensors[x].shape
        choice = int(self.rng.integers(3))
        if choice == 0:
            order = self.constant(np.array([0, 2, 1, 3], np.int32))
            self.op("TRANSPOSE", [x, order], [self.tensor((images, w, h, c), x)])
        elif choice == 1 and h * w < 300:
            size = self.constant(np.array([2 * h, 2 * w], np.int32))
            self.op("RESIZE_BILINEAR", [x, size], [self.tensor((images, 2 * h, 2 * w, c), x)], align_corners=False,
                    half_pixel_centers=True)  # fmt: skip
        else:
            y = self.tensor(self.tensors[x].shape)
            zero = 128 if self.dtype == "u1" else 0
            t = self.tensors[y]
            self.tensors[y] = Tensor(t.name, t.shape, t.type, t.dtype, np.array([1 / 128], np.float32),
                                     np.array([zero], np.int64), 0, None, False)  # fmt: skip
            self.op("L2_NORMALIZATION", [x], [y], fused_activation_function="NONE")

    def graph(self) -> Graph:
        read = {i for op in self.operators for i in op.inputs}
        outputs = [i for op in self.operators for i in op.outputs if i not in read]
        return Graph("main", tuple(self.tensors), tuple(self.inputs), tuple(outputs), tuple(self.operators))


def draw(seed: int) -> Graph:
    """A random graph."""
    grower = Grower(seed)
    wanted = int(grower.rng.integers(2, 13))
    while len(grower.operators) < wanted:
        grower.grow()
    return grower.graph()
