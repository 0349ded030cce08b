"""How TFLite's operators become stages: the arithmetic is that of coral/evaluate, operator by operator.

Source: docs/compiler.md, section Operators; docs/evaluate.md, Formulas.
"""

from __future__ import annotations

import math

import numpy as np

from coral import numerics
from coral.codegen import network as nw
from coral.compiler.errors import Refused
from coral.compiler.lowering import NO_PADS, Shape, Step, Value, image_shape, lowers, scalar
from coral.evaluate.elementwise import RELUS, SPLINES
from coral.evaluate.operands import Operand, axis_of
from coral.evaluate.products import channel_quantisation
from coral.evaluate.reductions import repeats, resizable
from coral.evaluate.windows import Axis, axes_of

LARGEST_KERNEL = 1 << 24
"""Weights of one layer: more than any chip holds, less than hurts a host."""


def _weights(step: Step, axis: int, map_index: int = 0) -> tuple[Operand, int, float | np.ndarray, np.ndarray | None]:
    """(weights, their zero point, multiplier, bias) of a layer."""
    call = step.call
    x, w, bias, y = call.input(map_index), call.input(1), call.optional(map_index + 1 if map_index else 2), call.output
    if not w.is_constant or (bias is not None and not bias.is_constant):
        raise Refused("its weights are computed, not constant")
    scales, zeros = channel_quantisation(w, axis)
    if np.unique(zeros).size != 1:
        raise Refused(f"weights {w.tensor.name!r} have several zero points")
    if bias is not None and bias.array.dtype != np.int32:
        raise Refused(f"bias {bias.tensor.name!r} is {bias.array.dtype}, the chip adds int32")
    mult = scalar(numerics.multiplier(x.scale, scales, y.scale))
    return w, int(np.unique(zeros)[0]), mult, None if bias is None else bias.array


def _windows(step: Step, value: Value, kernel: tuple[int, int]) -> tuple[Value, nw.Window, tuple[int, int]]:
    """(map, its windows, their counts); pads that nothing wrote yet become the windows' own where that is possible."""
    call = step.call
    if value.pads != NO_PADS and call.options.get("padding") != "VALID":
        value = step.view(0)
    step.lowering.as_written(value)
    sizes = [n + sum(pads) for n, pads in zip(value.shape[:2], value.pads, strict=True)]
    rows, columns = axes_of(call, (1, *sizes, value.shape[2]), kernel)
    extents = [(a.kernel - 1) * a.dilation + 1 for a in (rows, columns)]
    if any(max(pads) >= extent for pads, extent in zip(value.pads, extents, strict=True)):
        return _windows(step, step.view(0), kernel)
    before = (rows.before + value.pads[0][0], columns.before + value.pads[1][0])
    window = nw.Window(kernel, (rows.stride, columns.stride), before, (rows.dilation, columns.dilation))
    return value, window, (rows.count, columns.count)


@lowers("CONV_2D")
def conv_2d(step: Step) -> None:
    """Per tensor or per channel, dilated too."""
    value, (w, w_zp, mult, bias) = step.padded(0), _weights(step, 0)
    if w.array.ndim != 4 or w.array.shape[3] != value.shape[2]:
        raise Refused(f"weights {w.array.shape} on {value.shape[2]} channels: a convolution in groups")
    value, window, counts = _windows(step, value, (w.array.shape[1], w.array.shape[2]))
    name = step.output((*counts, len(w.array)))
    step.add(nw.Conv((value.name,), name, step.clamps(), w.codes, bias, w_zp, mult, window))


@lowers("DEPTHWISE_CONV_2D")
def depthwise_conv_2d(step: Step) -> None:
    """Each channel has as many results as the channel multiplier says."""
    value, (w, w_zp, mult, bias) = step.padded(0), _weights(step, 3)
    c = value.shape[2]
    if w.array.ndim != 4 or w.array.shape[0] != 1 or w.array.shape[3] % c:
        raise Refused(f"depthwise weights {w.array.shape} on {c} channels")
    value, window, counts = _windows(step, value, (w.array.shape[1], w.array.shape[2]))
    name = step.output((*counts, w.array.shape[3]))
    step.add(nw.Depthwise((value.name,), name, step.clamps(), w.codes[0], bias, w_zp, mult, window))


@lowers("TRANSPOSE_CONV")
def transpose_conv(step: Step) -> None:
    """Windows lie on the output; the inputs are its shape, weights, map and bias."""
    call, value = step.call, step.map(2)
    w, w_zp, mult, bias = _weights(step, 0, 2)
    if w.array.ndim != 4 or w.array.shape[3] != value.shape[2] or len(call.output.shape) != 4:
        raise Refused(f"weights {w.array.shape} on {value.shape[2]} channels")
    rows, columns = axes_of(call, call.output.shape, w.array.shape[1:3])
    if (rows.count, columns.count) != value.shape[:2]:
        raise Refused(f"the windows of {call.output.shape} are {rows.count} x {columns.count}, not {value.shape[:2]}")
    kernel, before = (rows.kernel, columns.kernel), (rows.before, columns.before)
    window = nw.Window(kernel, (rows.stride, columns.stride), before, (rows.dilation, columns.dilation))
    step.add(nw.TransposeConv((value.name,), step.output(), step.clamps(), w.codes, bias, w_zp, mult, window))


@lowers("FULLY_CONNECTED")
def fully_connected(step: Step) -> None:
    """One row per image sees the whole map in any shape; several rows are a 1x1 convolution."""
    step.call.require(weights_format=0)
    value, (w, w_zp, mult, bias) = step.view(0), _weights(step, 0)
    n, k = w.array.shape if w.array.ndim == 2 else (0, 0)
    if not n or not k or math.prod(value.shape) % k:
        raise Refused(f"weights {w.array.shape} do not fit the input {value.shape}")
    if math.prod(value.shape) == k:
        step.add(nw.Dense((value.name,), step.output((1, 1, n)), step.clamps(), w.codes, bias, w_zp, mult))
        return
    step.lowering.as_written(value)
    if value.shape[2] != k:
        raise Refused(f"weights {w.array.shape} on rows of {value.shape[2]}")
    name = step.output((*value.shape[:2], n))
    step.add(nw.Conv((value.name,), name, step.clamps(), w.codes.reshape(n, 1, 1, k), bias, w_zp, mult))


@lowers("AVERAGE_POOL_2D", "MAX_POOL_2D")
def pool(step: Step) -> None:
    """Averages divide by the positions inside the map."""
    call, value = step.call, step.map(0)
    x, y = call.input(0), call.output
    kernel = (call.options.get("filter_height", 1), call.options.get("filter_width", 1))
    rows, columns = axes_of(call, (1, *value.shape), kernel)
    window = nw.Window(kernel, (rows.stride, columns.stride), (rows.before, columns.before))
    shape = (rows.count, columns.count, value.shape[2])
    if step.op.name == "MAX_POOL_2D":
        if not x.same_quantisation(y):
            raise Refused("input and output of a maximum must have one quantisation")
        step.add(nw.MaxPool((value.name,), step.output(shape), step.clamps(), window))
        return
    if any(axis.before or axis.after for axis in (rows, columns)):
        _average_at_borders(step, value, window, np.outer(_inside(rows), _inside(columns)))
        return
    mult = float(numerics.average_multiplier(x.scale, kernel[0] * kernel[1], y.scale, newer=True))
    step.add(nw.AveragePool((value.name,), step.output(shape), step.clamps(), mult, window))


def _inside(axis: Axis) -> list[int]:
    """How many positions of every window lie inside the map."""
    starts = [i * axis.stride - axis.before for i in range(axis.count)]
    return [min(start + axis.kernel, axis.size) - max(start, 0) for start in starts]


def _average_at_borders(step: Step, value: Value, window: nw.Window, counts: np.ndarray) -> None:
    """One average for every number of positions that windows have inside; each counts where that is its number.

    Where it is, a map of the numbers says (sums of ones): a spline makes it 1 or 0, a product selects.
    """
    x, y, lowering, c = step.call.input(0), step.call.output, step.lowering, value.shape[2]
    numbers, shape, sums = np.unique(counts).tolist(), (*counts.shape, c), step.clamps()
    if numbers[-1] > 255 or min(numbers) < 1 or math.prod(window.kernel) * c > LARGEST_KERNEL:
        raise Refused(f"an average over windows {window.kernel} that have {numbers} positions inside the map")
    ones = np.ones((*window.kernel, c), np.uint8)
    mults = [float(numerics.average_multiplier(x.scale, n, y.scale, newer=True)) for n in numbers]
    if len(mults) == 1:
        step.add(nw.Depthwise((value.name,), step.output(shape), sums, ones, None, 0, mults[0], window))
        return

    def inner(what: str, shape: Shape, zero: int) -> str:
        return lowering.fresh(f"{y.tensor.name}:{what}", shape, zero, y.scale)

    one, number = inner("ones", value.shape, 0), inner("numbers", shape, 0)
    step.add(nw.Requantise((value.name,), one, (1.0, 1.0)))
    step.add(nw.Depthwise((one,), number, (0.0, 255.0), ones, None, 0, 1.0, window))
    total, whole = "", numerics.integer_clamps(y.zero_point)
    parts, table, whole = [], np.zeros((8, 5), np.float32), numerics.integer_clamps(y.zero_point)
    table[1, 0] = 1
    for n, mult in zip(numbers, mults, strict=True):
        average, here = inner(f"average {n}", shape, y.zero_point), inner(f"where {n}", shape, 0)
        parts.append(inner(f"part {n}", shape, y.zero_point))
        edges = np.array([n - 0.5, n + 0.5, *[np.inf] * 5], np.float32)
        step.add(nw.Depthwise((value.name,), average, sums, ones, None, 0, mult, window))
        step.add(nw.Requantise((number,), here, (0.0, 255.0), spline=numerics.Spline(table, edges)))
        step.add(nw.Multiply((average, here), parts[-1], whole))
    total = parts.pop()
    while parts:
        name = inner("sum", shape, y.zero_point) if parts[1:] else step.output(shape)
        step.add(nw.Add((total, parts.pop()), name, whole, (1, 1), -2 * y.zero_point))
        total = name


@lowers("MEAN", "SUM")
def reduce(step: Step) -> None:
    """Over rows, columns or both."""
    call, value = step.call, step.map(0)
    x, y, rank = call.input(0), call.output, len(call.input(0).shape)
    axes = {axis_of(axis, rank) for axis in call.constant(1).ravel().tolist()}
    axes = {axis + 3 - rank for axis in axes if axis or step.lowering.images > 1}
    if axes - {0, 1}:
        raise Refused(f"{step.op.name} over channels or images")
    kernel = (value.shape[0] if 0 in axes else 1, value.shape[1] if 1 in axes else 1)
    mult = numerics.rescale_multiplier(x.scale, y.scale)
    if step.op.name == "MEAN":
        mult = numerics.average_multiplier(x.scale, kernel[0] * kernel[1], y.scale, newer=True)
    shape = (value.shape[0] // kernel[0], value.shape[1] // kernel[1], value.shape[2])
    window = nw.Window(kernel)
    step.add(nw.AveragePool((value.name,), step.output(shape), step.clamps(), float(mult), window))


def _constant(step: Step, x: Operand, constant: Operand) -> Value | None:
    """The other operand where ``constant`` is one value, or one per channel, that folds into the output stage."""
    if not constant.is_constant or x.is_constant:
        return None
    size, value = constant.array.size, step.map(0 if x.tensor is step.call.input(0).tensor else 1)
    if size == 1 or (constant.shape[-1:] == x.shape[-1:] == (size,)):
        return value
    raise Refused(f"constant {constant.tensor.name!r} of shape {constant.shape} is not one per channel")


def _channelwise(step: Step, value: Value, bias: np.ndarray | None, mult: float | np.ndarray) -> None:
    """``(x + bias) * mult``, one value or one per channel: a step alone, or a depthwise layer of weights 1."""
    if np.ndim(mult) == 0 and (bias is None or bias.size == 1):
        offset = 0 if bias is None else int(bias.ravel()[0])
        step.add(nw.Requantise((value.name,), step.output(value.shape), step.clamps(), float(mult), offset))
        return
    weights = np.ones((1, 1, value.shape[2]), np.uint8)
    mult = scalar(np.ravel(mult)) if np.ndim(mult) else mult
    step.add(nw.Depthwise((value.name,), step.output(value.shape), step.clamps(), weights, bias, 0, mult))


@lowers("ADD", "SUB")
def add(step: Step) -> None:
    """Two maps, or a map and a constant; SUB from a constant makes a map of it."""
    call = step.call
    a, b, y = call.input(0), call.input(1), call.output
    sign = -1 if step.op.name == "SUB" else 1
    for x, constant, factor in ((a, b, sign), (b, a, 1)):
        if value := None if sign < 0 and constant is a else _constant(step, x, constant):
            bias = numerics.constant_bias(x.scale, factor * constant.centred, constant.scale).ravel()
            _channelwise(step, value, bias, float(numerics.rescale_multiplier(x.scale, y.scale)))
            return
    if value := _constant(step, b, a):
        first, second = _constant_map(step, value, a), value
    else:
        first, second = _broadcast(step)
    w_1, w_2 = numerics.add_weights(a.scale, b.scale)
    mult = float(numerics.add_multiplier(a.scale, w_1, y.scale))
    weights = (w_1, sign * w_2)
    offset = -(weights[0] * a.zero_point + weights[1] * b.zero_point)
    name = step.output(first.shape)
    step.add(nw.Add((first.name, second.name), name, step.clamps(), weights, offset, mult))


@lowers("MUL")
def mul(step: Step) -> None:
    """Two maps, or a map and a constant."""
    call = step.call
    a, b, y = call.input(0), call.input(1), call.output
    for x, constant in ((a, b), (b, a)):
        if value := _constant(step, x, constant):
            real = numerics.dequantise(constant.codes, constant.scale, constant.zero_point)
            mult = numerics.constant_multiplier(x.scale, real, y.scale)
            _channelwise(step, value, None, scalar(mult if np.size(mult) > 1 else np.ravel(mult)[0]))
            return
    first, second = _broadcast(step)
    mult = float(numerics.multiplier(a.scale, b.scale, y.scale))
    step.add(nw.Multiply((first.name, second.name), step.output(first.shape), step.clamps(), mult))


def _constant_map(step: Step, like: Value, constant: Operand) -> Value:
    """A constant at every position of a map: its bias, without weights."""
    c, zero = like.shape[2], constant.zero_point
    name = step.lowering.fresh(f"{constant.tensor.name}:map", like.shape, zero, constant.scale)
    bias = np.broadcast_to(constant.centred.ravel(), c).astype(np.int32)
    clamps, weights = numerics.integer_clamps(zero), np.zeros((1, 1, c), np.uint8)
    step.add(nw.Depthwise((like.name,), name, clamps, weights, bias, 0, 1.0))
    return Value(name, like.shape)


def _broadcast(step: Step) -> tuple[Value, Value]:
    """Both operands in the shape of the result."""
    first, second = step.map(0), step.map(1)
    ranks = {len(step.call.input(index).shape) for index in (0, 1)}
    y, x, c = (max(sizes) for sizes in zip(first.shape, second.shape, strict=True))
    fit = all(n in (1, most) for v in (first, second) for n, most in zip(v.shape, (y, x, c), strict=True))
    if not fit or (first.shape != second.shape and len(ranks) > 1 and step.lowering.images > 1):
        raise Refused(f"{step.op.name} of maps {first.shape} and {second.shape}, which do not fit")
    return _expanded(step, first, (y, x, c)), _expanded(step, second, (y, x, c))


def _expanded(step: Step, value: Value, shape: Shape, name: str = "") -> Value:
    """A map with its only channel, row or column repeated; ``name``: a tensor that exists."""
    lowering, zero = step.lowering, step.lowering.tensors[value.name].zero_point
    scale, clamps = lowering.tensors[value.name].scale, numerics.integer_clamps(zero)
    if value.shape[2] != shape[2]:
        wide = lowering.fresh(f"{value.name}:channels", (*value.shape[:2], shape[2]), zero, scale)
        step.add(nw.Conv((value.name,), wide, clamps, np.ones((shape[2], 1, 1, 1), np.uint8), None, 0, 1.0))
        value = Value(wide, (*value.shape[:2], shape[2]))
    if value.shape == shape:
        return value
    name = name or lowering.fresh(f"{value.name}:everywhere", shape, zero, scale)
    stride = int(value.shape[0] == shape[0]), int(value.shape[1] == shape[1])
    step.add(nw.Requantise((value.name,), name, clamps, at=nw.Window(stride=stride)))
    return Value(name, shape)


@lowers(*RELUS)
def requantise(step: Step) -> None:
    """QUANTIZE and the RELU family; codes that mean the same are the same tensor."""
    call = step.call
    x, y = call.input(0), call.output
    value = step.padded(0)
    if step.op.name == "QUANTIZE" and x.same_quantisation(y):
        step.same_as(value)
        return
    value = step.map(0)
    mult = float(numerics.rescale_multiplier(x.scale, y.scale))
    clamps = step.clamps(RELUS[step.op.name])
    step.add(nw.Requantise((value.name,), step.output(value.shape), clamps, mult))


@lowers(*SPLINES)
def spline(step: Step) -> None:
    """The non-linear unit."""
    call, value = step.call, step.map(0)
    x, y, (table, limit) = call.input(0), call.output, SPLINES[step.op.name]
    table = table.scaled(numerics.inv(y.scale))
    mult = float(numerics.rescale_multiplier(x.scale, 1))
    name = step.output(value.shape)
    step.add(nw.Requantise((value.name,), name, (-limit, limit), mult, 0, table))


def _same_codes(step: Step) -> None:
    x, y = step.call.input(0), step.call.output
    if not x.same_quantisation(y) or x.tensor.type != y.tensor.type:
        raise Refused("changes the quantisation")


@lowers("RESHAPE", "SQUEEZE", "EXPAND_DIMS")
def reshape(step: Step) -> None:
    """Only another way to see the same tensor."""
    call, value = step.call, step.view(0)
    _same_codes(step)
    shape = image_shape(call.output.tensor, step.lowering.images)
    if math.prod(shape) != math.prod(value.shape):
        raise Refused(f"takes {value.shape} per image to {call.output.shape}")
    step.same_as(Value(value.name, shape))


@lowers("PAD")
def pad(step: Step) -> None:
    """Rows and columns around a map: the next layer's windows take them, or a copy is made."""
    call, value = step.call, step.map(0)
    borders, rank = call.constant(1), len(call.input(0).shape)
    if borders.shape != (rank, 2) or borders.min() < 0:
        raise Refused(f"paddings {borders.tolist()} of a tensor with {rank} dimensions")
    full = np.zeros((4, 2), np.int64)
    full[[0, *range(5 - rank, 4)]] = borders
    if full[[0, 3]].any():
        raise Refused("pads channels or images")
    _same_codes(step)
    (top, bottom), (left, right) = full[1:3].tolist()
    step.same_as(Value(value.name, value.shape, ((top, bottom), (left, right))))


@lowers("CONCATENATION")
def concatenation(step: Step) -> None:
    """Along the channels; parts of another quantisation are requantised first."""
    call = step.call
    call.require(fused_activation_function="NONE")
    y = call.output
    if axis_of(call.options.get("axis", 0), len(y.shape)) != len(y.shape) - 1:
        raise Refused(f"joins along axis {call.options.get('axis', 0)}, on the tiles channels lie side by side")
    operands = [call.input(index) for index in range(len(step.op.inputs))]
    values = [step.map(index) for index in range(len(operands))]
    if len({value.shape[:2] for value in values}) != 1:
        raise Refused(f"joins maps {[value.shape for value in values]}")
    mults = [1.0 if x.same_quantisation(y) else float(numerics.rescale_multiplier(x.scale, y.scale)) for x in operands]
    if all(x.same_quantisation(y) for x in operands):
        mults = []
    shape = (*values[0].shape[:2], sum(value.shape[2] for value in values))
    names = tuple(value.name for value in values)
    step.add(nw.Concatenate(names, step.output(shape), numerics.clamps(y.scale, y.zero_point), tuple(mults)))


@lowers("SPLIT", "SPLIT_V")
def split(step: Step) -> None:
    """Along any axis of an image."""
    call, first = step.call, step.op.name == "SPLIT"
    value = step.map(1 if first else 0)
    axis = int(call.constant(0 if first else 2).ravel()[0])
    rank = len(call.input(1 if first else 0).shape)
    at = axis_of(axis, rank) + 3 - rank if axis_of(axis, rank) else -1
    if at < 0:
        raise Refused("splits images")
    begin = [0, 0, 0]
    for index, number in enumerate(step.op.outputs):
        size = step.lowering.graph.tensors[number].shape[axis]
        y, x, c = (size if i == at else n for i, n in enumerate(value.shape))
        _slice(step, value, (begin[0], begin[1], begin[2]), (1, 1), (y, x, c), index)
        begin[at] += size


def _slice(step: Step, value: Value, begin: Shape, stride: tuple[int, int], shape: Shape, index: int = 0) -> None:
    zero = step.lowering.tensors[value.name].zero_point
    name = step.output(shape, index)
    clamps = numerics.integer_clamps(zero)
    step.add(nw.Slice((value.name,), name, clamps, begin[2], (begin[0], begin[1]), stride))


@lowers("SLICE", "STRIDED_SLICE")
def cut(step: Step) -> None:
    """Rows and columns from some on, in steps of any positive size; channels without gaps."""
    call, value = step.call, step.map(0)
    bounds = [call.constant(i).ravel().tolist() for i in range(1, len(step.op.inputs))]
    shape, rank = call.input(0).shape, len(call.input(0).shape)
    if any(len(values) != rank for values in bounds):
        raise Refused(f"bounds {bounds} of a tensor with {rank} dimensions")
    spans = []
    for i, n in enumerate(shape):
        if step.op.name == "SLICE":
            begin, size = bounds[0][i], bounds[1][i]
            spans.append(range(n)[begin : n if size < 0 else begin + size])
            continue
        call.require(ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)
        skip = [call.options.get(f"{end}_mask", 0) >> i & 1 for end in ("begin", "end")]
        ends = [None if skipped else bounds[side][i] for side, skipped in enumerate(skip)]
        spans.append(range(n)[ends[0] : ends[1] : bounds[2][i]] if bounds[2][i] else range(0))
    spans = [range(1)] * (4 - rank) + spans
    if not all(spans) or min(s.step for s in spans) < 1 or spans[0] != range(shape[0] if rank == 4 else 1):
        raise Refused(f"takes {spans} of {shape}")
    if spans[3].step != 1 and len(spans[3]) > 1:
        raise Refused(f"takes every {spans[3].step}th channel")
    begin = (spans[1].start, spans[2].start, spans[3].start)
    _slice(step, value, begin, (spans[1].step, spans[2].step), (len(spans[1]), len(spans[2]), len(spans[3])))


@lowers("SOFTMAX")
def softmax(step: Step) -> None:
    """Over the channels of every position."""
    call, value = step.call, step.map(0)
    x, y, beta = call.input(0), call.output, call.options.get("beta", 1.0)
    if not 0 < beta < math.inf:
        raise Refused(f"beta is {beta}")
    mults = numerics.softmax_multipliers(x.scale, beta, y.scale)
    step.add(nw.Softmax((value.name,), step.output(value.shape), step.clamps("NONE"), mults))


@lowers("L2_NORMALIZATION")
def l2_normalization(step: Step) -> None:
    """Over the channels of every position."""
    call, value = step.call, step.map(0)
    call.require(fused_activation_function="NONE")
    mults = numerics.l2_multipliers(call.input(0).scale, call.output.scale)
    step.add(nw.L2Normalise((value.name,), step.output(value.shape), step.clamps(), mults))


@lowers("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR")
def resize(step: Step) -> None:
    """Copies; or twofold, bilinear on half pixel centres."""
    call, value = step.call, step.map(0)
    if not call.input(0).same_quantisation(call.output):
        raise Refused("input and output of a resize must have one quantisation")
    if not resizable(call):
        raise Refused(
            f"{step.op.name} of {call.input(0).shape} to {call.output.shape} with {call.options}: the chip doubles, "
            "bilinear on half pixel centres, and repeats"
        )
    factors, zero = repeats(call) or (2, 2), step.lowering.tensors[value.name].zero_point
    shape = (factors[0] * value.shape[0], factors[1] * value.shape[1], value.shape[2])
    name, clamps = step.output(shape), numerics.integer_clamps(zero)
    if value.shape == shape:
        step.add(nw.Requantise((value.name,), name, clamps))
    elif value.shape[:2] == (1, 1):
        _expanded(step, value, shape, name)
    elif factors == (2, 2):
        step.add(nw.Resize((value.name,), name, clamps, step.op.name.endswith("NEIGHBOR")))
    else:
        phases = tuple((y, x) for y in range(factors[0]) for x in range(factors[1]))
        scale = step.lowering.tensors[name].scale
        parts = tuple(step.lowering.fresh(f"{name}:{y},{x}", value.shape, zero, scale) for y, x in phases)
        for part in parts:
            step.add(nw.Requantise((value.name,), part, clamps))
        step.add(nw.Interleave(parts, name, clamps, factors, phases))
