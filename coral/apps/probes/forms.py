"""Forms that no program of Google's in our corpus shows with values: instructions on one tile, and the judge's answer.

``coral selftest`` asks a stick, tests/chip/test_unseen.py the simulator. Source: docs/isa/README.md, docs/evaluate.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import isa, numerics
from coral.codegen.builder import ALL_UNITS
from coral.codegen.machine import ALL_TILES, WORD_BYTES
from coral.evaluate import evaluate
from coral.isa import Instruction, Walk
from coral.package.graph import Graph, Operator, Tensor

Codes = NDArray[np.uint8]
TILE = 3
MASK = 1 << TILE
ROW, IDENTITY_ROW, IDENTITY_WORD = 100, 2000, 39_000
"""First row of operands in wide memory; the 4 x 4 identity, and the words that it is made from."""
RESULT = 40_000
"""First word of results in narrow memory."""
Y_SCALE, Y_ZERO = 0.0234375, 71


@dataclass(frozen=True)
class Form:
    """``body`` finds ``x`` in narrow memory of ``MASK``'s tile from word 0 on and leaves ``expected`` at ``RESULT``."""

    x: Codes
    body: list[Instruction]
    expected: Codes


def codes(seed: int, *shape: int) -> Codes:
    """Random codes with both ends among them."""
    x = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    x.reshape(-1)[:2] = 0, 255
    return x


def judged(name: str, x: Codes, shape: tuple[int, ...], quant: Any, more: Any = (), **options: Any) -> Codes:
    """The operator by ``coral.evaluate``, flat: ``quant`` is (scale, zero point) of x and of y; ``more``: operands."""
    (s_x, z_x), (s_y, z_y) = quant
    tensors = (constant("x", None, x.shape, s_x, z_x), *more, constant("y", None, shape, s_y, z_y))
    last = len(tensors) - 1
    operator = Operator(name, tuple(range(last)), (last,), options)
    graph = Graph("main", tensors, (0,), (last,), (operator,))
    return evaluate(graph, {"x": x}, generation="old")["y"].reshape(-1)


def constant(name: str, data: Any, shape: tuple[int, ...] = (), *quantisation: float) -> Tensor:
    """A tensor of a graph; uint8 with scale and zero point, else int32."""
    scale, zero = (np.array([q], t) for q, t in zip(quantisation or (1.0, 0), (np.float32, np.int64), strict=True))
    if not quantisation:
        data = np.array(data, np.int32)
    kind = np.dtype("u1" if quantisation else "i4")
    return Tensor(name, shape or data.shape, 0, kind, scale, zero, 0, data, False)


def done() -> Instruction:
    """The tile's units finish what was issued."""
    return isa.TileFence(tile_mask=ALL_TILES, unit_mask=ALL_UNITS)


def identity() -> list[Instruction]:
    """The 4 x 4 identity in a row of wide memory, by way of four narrow words."""
    words = [(IDENTITY_WORD + k, 1 << 8 * k) for k in range(4)]
    fills = [isa.MeshNorth(tile_mask=MASK, dst=Walk(w, [1], [1]), fill_en=1, fill_value=value) for w, value in words]
    pack = isa.N2w(tile_mask=MASK, src=Walk(IDENTITY_WORD, [1], [4]), dst=Walk(IDENTITY_ROW), pack_level=1)
    return [*fills, done(), pack, done()]


def requantise(src: int, dst: int, words: int, **fields: Any) -> Instruction:
    """Words of narrow memory from byte ``src`` on through the identity and the output stage to byte ``dst``."""
    walk = {"inp": Walk(src, [4], [words]), "par": Walk(4 * IDENTITY_ROW, [0], [words])}
    results = words * (1 + fields.get("out16", 0))
    return isa.Op(
        tile_mask=MASK, loop_cnt0=words - 1, acc_init=1, group_loop=7, out_ch=3, out_ch_last=3, **walk,
        out=Walk(dst, [4], [results]), psum=Walk(0, [0], [words]),
        **({"mult": 1.0, "clamp_max": inf, "clamp_min": -inf} | fields),
    )  # fmt: skip


def operands(words: int, transpose: int = 0) -> list[Instruction]:
    """Words from 0 on to wide memory: one per row, or four per row with a lane for each."""
    src, rows = Walk(0, [1], [words]), words
    if transpose:
        src, rows = Walk(0, [1, 1, 4], [4, 1, words // 4]), words // 4
    dst = Walk(ROW, [1], [rows])
    return [isa.N2w(tile_mask=MASK, src=src, dst=dst, transpose=transpose, pack_level=2 * transpose), done()]


def table(spline: numerics.Spline) -> Instruction:
    """The non-linear unit's load of a spline."""
    fields = {f"c{s}_{k}": float(c) for s, row in enumerate(spline.coefficients) for k, c in enumerate(row)}
    fields |= {f"brk{k}": float(x) for k, x in enumerate(spline.breakpoints)}
    return isa.NluLoad(tile_mask=MASK, table_mode=3, **fields)


def max_pool(seed: int) -> Form:
    """Four positions by four channels are transposed; a lane is a position, a column a channel. RELU6 behind."""
    scale, zero = 0.05, 100
    x = codes(seed, 1, 4, 8, 8)
    low, high = numerics.clamps(scale, zero, "RELU6")
    pack = isa.N2w(
        tile_mask=MASK, src=Walk(0, [2, 1, 8], [4, 2, 8]), dst=Walk(ROW, [1], [8]), transpose=1, pack_level=2
    )
    op = isa.OpMax(
        tile_mask=MASK, loop_cnt0=1, loop_cnt1=1, loop_cnt2=3, loop_cnt3=1, reduce_mask=3, acc_init=1, lane_off=7,
        group_loop=4, out_ch=7, out_ch_last=7, par=Walk(4 * ROW, [1, 8, 2, 16], [2, 2, 4, 2]),
        psum=Walk(0, [0], [32]), out=Walk(4 * RESULT, [4], [16]), mult=1.0, acc_offset=-zero,
        out_zp=zero, clamp_min=low, clamp_max=high,
    )  # fmt: skip
    options = {"filter_height": 2, "filter_width": 2, "stride_h": 2, "stride_w": 2, "padding": "VALID"}
    quant = ((scale, zero), (scale, zero))
    expected = judged("MAX_POOL_2D", x, (1, 2, 4, 8), quant, fused_activation_function="RELU6", **options)
    return Form(x, [pack, done(), op], expected)


def tanh(seed: int) -> Form:
    """All codes; an odd table for the positive half."""
    scale, zero, y_scale = 0.0371 * (1 + seed / 8), 119, 1 / 128
    x = np.arange(256, dtype=np.uint8)
    limit = float(numerics.TANH_CLAMP)
    op = requantise(
        0, 4 * RESULT, 64, in_zp=zero, mult=float(numerics.rescale_multiplier(scale, 1)), clamp_min=-limit,
        clamp_max=limit, out_zp=128, nlu_en=1, nlu_odd=3,
    )  # fmt: skip
    body = [*identity(), table(numerics.TANH.scaled(numerics.inv(y_scale))), op]
    return Form(x, body, judged("TANH", x, x.shape, ((scale, zero), (y_scale, 128))))


def relu_n1_to_1(seed: int) -> Form:
    """All kinds of codes through both clamps."""
    x = codes(seed, 256)
    low, high = numerics.clamps(Y_SCALE, Y_ZERO, "RELU_N1_TO_1")
    mult = float(numerics.rescale_multiplier(0.0371, Y_SCALE))
    op = requantise(0, 4 * RESULT, 64, in_zp=20, mult=mult, clamp_min=low, clamp_max=high, out_zp=Y_ZERO)
    return Form(x, [*identity(), op], judged("RELU_N1_TO_1", x, x.shape, ((0.0371, 20), (Y_SCALE, Y_ZERO))))


def _reduction(name: str, seed: int) -> Form:
    """One word per row: column 0 adds the row's four bytes, and the rows."""
    scale, zero = 0.0117, 131
    x = codes(seed, 1, 64)
    mult, (low, high) = numerics.rescale_multiplier(scale, Y_SCALE), numerics.clamps(Y_SCALE, Y_ZERO)
    if name == "MEAN":
        mult, (low, high) = numerics.average_multiplier(scale, 64, Y_SCALE, newer=False), (-inf, inf)
    op = isa.OpSum(
        tile_mask=MASK, loop_cnt0=15, reduce_mask=1, acc_init=1, group_loop=7, par=Walk(4 * ROW, [4], [16]),
        psum=Walk(0, [0], [16]), out=Walk(4 * RESULT), w_zp=zero, mult=float(mult), clamp_min=low, clamp_max=high,
        out_zp=Y_ZERO,
    )  # fmt: skip
    quant = ((scale, zero), (Y_SCALE, Y_ZERO))
    return Form(x, [*operands(16), op], judged(name, x, (1, 1), quant, [constant("axes", [1])], keep_dims=True))


def sum_of_row(seed: int) -> Form:
    """SUM of 64 values."""
    return _reduction("SUM", seed)


def mean_of_row(seed: int) -> Form:
    """MEAN of 64 values, in the older form."""
    return _reduction("MEAN", seed)


def l2_normalisation(seed: int) -> Form:
    """Sum of squares through the reciprocal square root to 16 bits, then a product of 16 by 8 bits per value."""
    scale, words, zero = 0.0213, 8, (128, 3)[seed % 2]
    x = codes(seed, 1, 4 * words)
    k = numerics.f32(np.float32(65535) / numerics.inv(scale))
    square = numerics.constant_multiplier(scale, scale, 1)
    mult = numerics.constant_multiplier(scale, numerics.inv(k), 1 / 128)
    low, high = numerics.clamps(1 / 128, 128)
    root = 4 * RESULT + 512
    common: dict[str, Any] = {"tile_mask": MASK, "loop_cnt0": words - 1, "acc_init": 1, "w_zp": zero}
    body = [
        *operands(words),
        table(numerics.RSQRT.scaled(k)),
        isa.Op(
            reduce_mask=1, group_loop=7, inp=Walk(0, [4], [words]), par=Walk(4 * ROW, [4], [words]), in_zp=zero,
            psum=Walk(0, [0], [words]), out=Walk(root), mult=float(square), clamp_min=float(square),
            clamp_max=inf, nlu_en=1, nlu_range_reduce=1, out16=1, **common,
        ),
        done(),
        *operands(words, transpose=1),
        isa.Op(
            group_loop=7, inp=Walk(root, [0], [words]), act16=1, lane_off=6, par=Walk(4 * ROW, [1], [words]),
            psum=Walk(0, [0], [words]), out=Walk(4 * RESULT, [4], [words]), out_ch=3, out_ch_last=3, mult=float(mult),
            clamp_min=low, clamp_max=high, out_zp=128, **common,
        ),
    ]  # fmt: skip
    quant = ((scale, zero), (1 / 128, 128))
    return Form(x, body, judged("L2_NORMALIZATION", x, x.shape, quant, fused_activation_function="NONE"))


def nearest_resize(seed: int) -> Form:
    """One tap; like the bilinear form with a halo, addresses begin one pixel before the block."""
    rows, columns, base, start = 3, 5, 2048, (2, 3)[seed % 2]
    x = codes(seed, 1, rows, columns, 4)
    steps, row = 4 * rows * columns, 4 * columns
    op = isa.OpResize(
        tile_mask=MASK, loop_cnt2=2 * columns - 1, loop_cnt3=2 * rows - 1, acc_init=1, par16=1, lane_off=6,
        reduce_mask=3, group_loop=5, out_ch=3, out_ch_last=3, inp=Walk(base - 4 - row, [0], [steps]),
        par=Walk(0, [0], [steps]), psum=Walk(0, [0], [steps]), out=Walk(4 * RESULT, [4], [steps]), mult=1.0,
        rs_x_loop=2, rs_y_loop=3, rs_x_step=2, rs_y_step=2, rs_x_start=start, rs_y_start=start, rs_nearest=1,
        rs_x_nearest=1, rs_y_nearest=1, rs_pos_stride=4, rs_row_stride=row,
    )  # fmt: skip
    size = constant("size", [2 * rows, 2 * columns])
    options = {"align_corners": False, "half_pixel_centers": False}
    shape, quant = (1, 2 * rows, 2 * columns, 4), ((0.5, 7), (0.5, 7))
    body = [*identity(), requantise(0, base, rows * columns), done(), op]
    return Form(x, body, judged("RESIZE_NEAREST_NEIGHBOR", x, shape, quant, [size], **options))


def concatenation(seed: int) -> Form:
    """Each part is requantised into its place; the part that has the result's quantisation is copied exactly."""
    x = codes(seed, 1, 96)
    parts = [(0.03, 20), (Y_SCALE, Y_ZERO), (0.011, 250)]
    low, high = numerics.clamps(Y_SCALE, Y_ZERO)
    limits = {"clamp_min": low, "clamp_max": high, "out_zp": Y_ZERO}
    mults = [float(numerics.rescale_multiplier(scale, Y_SCALE)) for scale, _ in parts]
    ops = [
        requantise(32 * k, 4 * RESULT + 32 * k, 8, in_zp=zero, mult=mults[k], **limits)
        for k, (_, zero) in enumerate(parts)
    ]
    others = [constant(f"part{k}", x[:, 32 * k : 32 * k + 32].copy(), (1, 32), *parts[k]) for k in (1, 2)]
    quant, options = (parts[0], (Y_SCALE, Y_ZERO)), {"axis": 1, "fused_activation_function": "NONE"}
    return Form(x, [*identity(), *ops], judged("CONCATENATION", x[:, :32], (1, 96), quant, others, **options))


def _sixteen_bits(spline: numerics.Spline, mult: float, low: float, high: float, in_zp: int, **fields: int) -> Form:
    """All 256 codes through a spline to 16-bit results."""
    x = np.arange(256, dtype=np.uint8)
    stage: Any = {"mult": mult, "clamp_min": low, "clamp_max": high}
    op = requantise(0, 4 * RESULT, 64, in_zp=in_zp, nlu_en=1, out16=1, **stage, **fields)
    expected = numerics.requantise(x.astype(np.int32) - in_zp, mult, low, high, 0, bits=16, nlu=spline)
    return Form(x, [*identity(), table(spline), op], expected.view(np.uint8))


def logistic_16(seed: int) -> Form:
    """LOGISTIC to 16 bits."""
    limit = float(numerics.LOGISTIC_CLAMP)
    return _sixteen_bits(numerics.LOGISTIC.scaled(65535), float(np.float32(0.04 * 1.07**seed)), -limit, limit, 128)


def exp_16(seed: int) -> Form:
    """EXP to 16 bits, as in the softmax of newer programs."""
    return _sixteen_bits(numerics.EXP_65535, float(np.float32(0.03 * 1.1**seed)), float(numerics.EXP_CLAMP), 0.0, 255)


def rsqrt_16(seed: int) -> Form:
    """The reciprocal square root to 16 bits, with range reduction."""
    scale = float(np.float32(0.7 * 1.3**seed))
    return _sixteen_bits(numerics.RSQRT.scaled(30000), scale, scale, inf, 0, nlu_range_reduce=1)


def then_through_the_identity(form: Form, **fields: Any) -> Form:
    """After another form a copy of ``x`` through an identity row that was made before it (``fields``: of the copy)."""
    words = -(-form.x.size // WORD_BYTES)
    after = 4 * RESULT + -(-form.expected.size // WORD_BYTES) * WORD_BYTES
    body = [*identity(), *form.body, done(), requantise(0, after, words, **fields)]
    return Form(form.x, body, np.concatenate([form.expected, form.x.reshape(-1)]))


FORMS: tuple[Callable[[int], Form], ...] = (
    max_pool, tanh, relu_n1_to_1, sum_of_row, mean_of_row, l2_normalisation, nearest_resize, concatenation,
    logistic_16, exp_16, rsqrt_16,
)  # fmt: skip
