"""Layers with weights as one form: a walk over operands, positions, groups of columns, and rows of weights.

Source: docs/network.md, section Products.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from coral.codegen.errors import ShapeError
from coral.codegen.machine import GROUP, WORD_BYTES, ceil_div, round_up
from coral.codegen.network.graph import Conv, Dense, Depthwise
from coral.codegen.network.layout import MAX_LOOP
from coral.codegen.network.places import shared
from coral.codegen.network.plan import Plan
from coral.codegen.network.steps import depthwise_window, relay_columns

Level = tuple[int, int]
Position = tuple[int, int, int]
"""Stride in the input, stride in the output, count."""


@dataclass(frozen=True)
class Product:
    """out[group columns] = sum over ``reduce`` of operand words * weight rows, at every position.

    ``weights`` uint8 [groups, steps, columns, 4], ``bias`` int32 [groups, columns], ``scale`` float32 likewise or None.
    The last group writes ``last_columns`` only. ``relay``: columns of a weight row that is sent through the scalar
    core, 0 for whole rows.
    """

    reduce: tuple[Level, ...]
    positions: tuple[Position, ...]
    group_in: int
    group_out: int
    last_columns: int
    weights: np.ndarray = field(repr=False)
    bias: np.ndarray = field(repr=False)
    scale: np.ndarray | None = field(repr=False)
    relay: int = 0

    @property
    def groups(self) -> int:
        """Passes over all positions."""
        return self.weights.shape[0]

    @property
    def steps(self) -> int:
        """Steps per position and group."""
        return self.weights.shape[1]

    @property
    def columns(self) -> int:
        """Results of a step of all but the last group."""
        return self.weights.shape[2]

    @property
    def header(self) -> int:
        """Rows in front of a group's weights."""
        return 1 if self.scale is None else 2

    @property
    def count(self) -> int:
        """Positions on a tile."""
        return int(np.prod([n for _, _, n in self.positions]))

    @property
    def cycles(self) -> int:
        """Steps in all."""
        return self.steps * self.count * self.groups

    def rows(self) -> np.ndarray:
        """uint8 [n, 256]: per group the header, then weights; narrow rows of relays lie side by side."""
        width = self.relay or GROUP
        data = np.zeros((self.groups, self.header + self.steps, width, WORD_BYTES), np.uint8)
        if self.scale is not None:
            data[:, 0, : self.columns] = (
                self.scale.astype(np.float32).view(np.uint8).reshape(self.groups, -1, WORD_BYTES)
            )
        data[:, self.header - 1, : self.columns] = self.bias.view(np.uint8).reshape(self.groups, -1, WORD_BYTES)
        data[:, self.header :, : self.columns] = self.weights
        flat = data.reshape(-1)
        padded = np.zeros(round_up(len(flat), GROUP * WORD_BYTES), np.uint8)
        padded[: len(flat)] = flat
        return padded.reshape(-1, GROUP * WORD_BYTES)

    def chunked(self, limit: int) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
        """``reduce`` in two parts, of which the inner one has the most steps up to ``limit``."""
        inner: list[Level] = []
        steps = 1
        for index, (stride, count) in enumerate(self.reduce):
            if steps * count <= limit:
                inner.append((stride, count))
                steps *= count
                continue
            part = max((d for d in range(1, count) if count % d == 0 and steps * d <= limit), default=1)
            return (*inner, (stride, part)), ((stride * part, count // part), *self.reduce[index + 1 :])
        return tuple(inner), ()


def product_of(plan: Plan, stage: Conv, share: int = 0) -> Product:
    """The product that a layer, or a share of its outputs, needs on this plan.

    ShapeError: more positions or groups than a loop counts.
    """
    if plan.shares(stage.output) > 1:
        stage = share_of(stage, share, plan.channels(stage.output))
    if isinstance(stage, Dense):
        product = _spread(plan, stage)
    elif isinstance(stage, Depthwise):
        product = _depthwise(plan, stage)
    elif stage.output in plan.packing:
        product = _packed(plan, stage)
    else:
        product = _conv(plan, stage)
    for what, n in (("positions", product.count), ("groups", product.groups)):
        if n > MAX_LOOP:
            raise ShapeError(f"layer {stage.output!r} has {n} {what} per tile, the limit is {MAX_LOOP}")
    return product


def share_of(stage: Conv, share: int, size: int) -> Conv:
    """A layer with the ``size`` outputs of a share only."""
    mine = slice(share * size, (share + 1) * size)
    weights = stage.weights[..., mine] if isinstance(stage, Depthwise) else stage.weights[mine]
    bias = None if stage.bias is None else stage.bias[mine]
    mult = stage.mult if np.ndim(stage.mult) == 0 else np.asarray(stage.mult)[mine]
    return replace(stage, weights=weights, bias=bias, mult=mult)


def _channel_arrays(stage: Conv, n: int) -> tuple[np.ndarray, np.ndarray | None]:
    bias = np.zeros(n, np.int32) if stage.bias is None else stage.bias
    scale = None if np.ndim(stage.mult) == 0 else np.asarray(stage.mult, np.float32)
    return bias, scale


def _grouped(matrix: np.ndarray, bias: np.ndarray, scale: np.ndarray | None, w_zp: int) -> dict:
    """[columns, bytes] weights and [columns] headers in groups of 64 columns, all padded."""
    n, size = matrix.shape
    groups, width = ceil_div(n, GROUP), min(GROUP, round_up(n, WORD_BYTES))
    padded = np.full((groups * width, round_up(size, WORD_BYTES)), w_zp, np.uint8)
    padded[:n, :size] = matrix
    padded[round_up(n, WORD_BYTES) :] = 0  # columns that no op computes
    weights = padded.reshape(groups, width, -1, WORD_BYTES).transpose(0, 2, 1, 3)

    def header(row: np.ndarray, fill: float) -> np.ndarray:
        out = np.full(groups * width, fill, row.dtype)
        out[:n] = row
        return out.reshape(groups, width)

    return {
        "weights": np.ascontiguousarray(weights),
        "bias": header(bias, 0),
        "scale": None if scale is None else header(scale, 1),
        "last_columns": round_up(n, WORD_BYTES) - GROUP * (groups - 1),
    }


def _image_level(plan: Plan, x: str, y: str) -> list[Position]:
    return [(plan.blocks[x].image, plan.blocks[y].image, plan.images)]


def _conv(plan: Plan, stage: Conv) -> Product:
    x, y = stage.inputs[0], stage.output
    a, o = plan.blocks[x], plan.blocks[y]
    (rows, columns), (kh, kw), (sy, sx) = plan.splits[y], stage.window.kernel, stage.window.stride
    dy, dx = stage.window.dilation
    words = plan.channels(x) // WORD_BYTES
    n, c = len(stage.weights), plan.tensors[x].c
    if shared(plan, stage):
        return _shared(plan, stage)
    padded = np.full((n, kh, kw, words * WORD_BYTES), stage.w_zp, np.uint8)
    padded[..., :c] = stage.weights
    bias, scale = _channel_arrays(stage, n)
    by, bx = a.inner
    if a.inner == (1, 1):
        reduce = [(WORD_BYTES, words), (dx * a.position, kw), (dy * a.row, kh)]
        positions = [(sx * a.position, o.position, columns.extent), (sy * a.row, o.row, rows.extent)]
    else:
        block = WORD_BYTES * by * bx
        reduce = [(block, words)]
        across = columns.extent // bx
        positions = [
            (WORD_BYTES, o.position, bx),
            (WORD_BYTES * bx, o.row, by),
            (block * words, bx * o.position, across),
            (block * words * across, by * o.row, rows.extent // by),
        ]
    return Product(
        merge(reduce),
        merge_positions([*positions, *_image_level(plan, x, y)]),
        0,
        GROUP,
        **_grouped(padded.reshape(n, -1), bias, scale, stage.w_zp),
    )


def _shared(plan: Plan, stage: Conv) -> Product:
    """A share of a pointwise layer's outputs, from all tiles' blocks of the same positions, or from a whole map."""
    x, y = stage.inputs[0], stage.output
    o, (rows, columns), (by, bx) = plan.blocks[y], plan.splits[y], plan.blocks[x].inner
    words, shares = plan.channels(x) // WORD_BYTES, plan.shares(x)
    block, across = WORD_BYTES * by * bx, columns.extent // bx
    size = WORD_BYTES * words * rows.extent * columns.extent
    pitch = columns.extent
    if shares == 1:
        pitch = plan.splits[x][1].extent * len({c for _, c in plan.active(x)})
    row = block * words * pitch // bx
    positions = [
        (WORD_BYTES if bx > 1 else block * words, o.position, bx),
        (WORD_BYTES * bx, o.row, by),
        (block * words, bx * o.position, across),
        (row, by * o.row, rows.extent // by),
    ]
    bias, scale = _channel_arrays(stage, len(stage.weights))
    matrix = stage.weights.reshape(len(stage.weights), -1)
    reduce = merge([(block, words), (size, shares)])
    return Product(reduce, merge_positions(positions), 0, GROUP, **_grouped(matrix, bias, scale, stage.w_zp))


def _packed(plan: Plan, stage: Conv) -> Product:
    """Columns are (neighbouring output, channel); an input that is no whole words is read as the bytes of its rows."""
    x, y, pack = stage.inputs[0], stage.output, plan.packing[stage.output]
    a, o, c = plan.blocks[x], plan.blocks[y], plan.tensors[x].c
    (rows, columns), (kh, kw), (sy, sx) = plan.splits[y], stage.window.kernel, stage.window.stride
    dy, dx = stage.window.dilation
    n, n4, words = len(stage.weights), plan.channels(y), plan.packed_words(stage, pack)
    if o.position != n4:
        raise ShapeError(f"layer {y!r} writes into a concatenation and reads the input of {c} channels: copy it first")
    in_bytes = plan.is_packed(stage)
    margin, channels = (plan.margin_bytes(stage), c) if in_bytes else (0, plan.channels(x))
    kernel = np.full((n, kh, kw, channels), stage.w_zp, np.uint8)
    kernel[..., :c] = stage.weights
    matrix = np.full((pack, n4, kh, words * WORD_BYTES), stage.w_zp, np.uint8)
    for q in range(pack):
        for k in range(kw):
            start = margin + (q * sx + k * dx) * channels
            matrix[q, :n, :, start : start + channels] = kernel[:, :, k]
    bias, scale = _channel_arrays(stage, n)

    def repeated(row: np.ndarray, fill: float) -> np.ndarray:
        out = np.full((pack, n4), fill, row.dtype)
        out[:, :n] = row
        return out.reshape(-1)

    per_row = channels // WORD_BYTES
    reduce = [(WORD_BYTES, words)] if in_bytes else [(WORD_BYTES, per_row), (a.position, words // per_row)]
    positions = [
        (pack * sx * a.position, pack * o.position, columns.extent // pack),
        (sy * a.row, o.row, rows.extent),
        *_image_level(plan, x, y),
    ]
    return Product(
        merge([*reduce, (dy * a.row, kh)]),
        merge_positions(positions),
        0,
        GROUP,
        **_grouped(
            matrix.reshape(pack * n4, -1), repeated(bias, 0), None if scale is None else repeated(scale, 1), stage.w_zp
        ),
    )


def _depthwise(plan: Plan, stage: Depthwise) -> Product:
    """Columns are (output of a block, channel of a word and its multiples); a group is a word of channels."""
    x, y = stage.inputs[0], stage.output
    a, o, block = plan.blocks[x], plan.blocks[y], plan.blocking[stage.output]
    (rows, columns), (kh, kw), (sy, sx) = plan.splits[y], stage.window.kernel, stage.window.stride
    dy, dx = stage.window.dilation
    by, bx = block
    wy, wx = depthwise_window(block, stage)
    groups, n, outputs = plan.channels(x) // WORD_BYTES, stage.weights.shape[2], by * bx
    wide = WORD_BYTES * (plan.tensors[y].c // plan.tensors[x].c)
    kernel = np.full((kh, kw, groups * wide), stage.w_zp, np.uint8)
    kernel[..., :n] = stage.weights
    weights = np.full((groups, wy, wx, by, bx, wide, WORD_BYTES), stage.w_zp, np.uint8)
    column = np.arange(wide)
    for qy in range(by):
        for qx in range(bx):
            part = weights[:, qy * sy : qy * sy + kh, qx * sx : qx * sx + kw, qy, qx]
            part[:, :, :, column, column * WORD_BYTES // wide] = kernel.reshape(kh, kw, groups, wide).transpose(
                2, 0, 1, 3
            )
    bias, scale = _channel_arrays(stage, n)

    def header(row: np.ndarray, fill: float) -> np.ndarray:
        out = np.full((groups, wide), fill, row.dtype)
        out.reshape(-1)[:n] = row
        return np.tile(out, (1, outputs))

    size, across = wide * outputs, columns.extent // bx
    if o.inner == (1, 1):
        out_x, out_y, group_out = o.position, o.row, wide
    else:
        out_x, out_y, group_out = size * groups, size * groups * across, size
    positions = [
        (bx * sx * a.position, out_x, across),
        (by * sy * a.row, out_y, rows.extent // by),
        *_image_level(plan, x, y),
    ]
    return Product(
        merge([(dx * a.position, wx), (dy * a.row, wy)]),
        merge_positions(positions),
        WORD_BYTES,
        group_out,
        size if outputs > 1 else plan.channels(y) - wide * (groups - 1),
        weights.reshape(groups, wy * wx, size, WORD_BYTES),
        header(bias, 0),
        None if scale is None else header(scale, 1),
        relay_columns(size),
    )


def _spread(plan: Plan, stage: Dense) -> Product:
    """A dense layer cut over all tiles, on the gathered vector; the tile's groups come from ``tile_rows``."""
    x = plan.tensors[stage.inputs[0]]
    n = len(stage.weights)
    order = gathered_order(plan, x.name)
    matrix = np.full((n, len(order)), stage.w_zp, np.uint8)
    inside = order >= 0
    matrix[:, inside] = stage.weights[:, order[inside]]
    bias, scale = _channel_arrays(stage, n)
    parts = _grouped(matrix, bias, scale, stage.w_zp)
    return Product(((WORD_BYTES, len(order) // WORD_BYTES),), ((0, 0, 1),), 0, GROUP, **parts)


def gathered_order(plan: Plan, name: str) -> np.ndarray:
    """int64 [bytes of the gathered vector]: which element of the tensor (row-major) lies there, -1 for none."""
    t = plan.tensors[name]
    index = np.arange(t.size).reshape(t.y, t.x, t.c)
    if name in plan.spread:
        size = GROUP * plan.spread[name]
        order = np.full(size * ceil_div(t.c, size), -1)
        order[: t.c] = index.reshape(-1)
        return order
    if name in plan.network.inputs:
        order = np.full(round_up(t.size, WORD_BYTES), -1)
        order[: t.size] = index.reshape(-1)
        return order
    (rows, columns), blocks = plan.splits[name], []
    for r, c in plan.active(name):
        block = np.full((rows.extent, columns.extent, plan.channels(name)), -1)
        part = index[rows.start(r) : rows.start(r) + rows.extent, columns.start(c) : columns.start(c) + columns.extent]
        block[: part.shape[0], : part.shape[1], : t.c] = part
        blocks.append(block.reshape(-1))
    return np.concatenate(blocks)


def merge(levels: list[Level], limit: int = 1 << 16) -> tuple[Level, ...]:
    """The same addresses in fewer levels of at most ``limit`` steps."""
    out: list[Level] = []
    for stride, count in levels:
        if count == 1 and out:
            continue
        if out and out[-1][1] == 1:
            out[-1] = (stride, count)
        elif out and stride == out[-1][0] * out[-1][1] and out[-1][1] * count <= limit:
            out[-1] = (out[-1][0], out[-1][1] * count)
        else:
            out.append((stride, count))
    return tuple(out)


def merge_positions(levels: list[Position]) -> tuple[Position, ...]:
    """As ``merge``, where both strides allow it."""
    out: list[Position] = []
    for a, b, count in levels:
        if count == 1 and out:
            continue
        if out and out[-1][2] == 1:
            out[-1] = (a, b, count)
        elif out and (a, b) == (out[-1][0] * out[-1][2], out[-1][1] * out[-1][2]):
            out[-1] = (out[-1][0], out[-1][1], out[-1][2] * count)
        else:
            out.append((a, b, count))
    return tuple(out)
