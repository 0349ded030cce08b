"""What no program of the corpus shows: small programs of our own on one tile, against the layer-level judge.

Forms as in docs/isa; verified on the simulator only (docs/ASSUMPTIONS.md, rows 24-30).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from evaluate.evaluate_graphs import run as evaluate
from evaluate.evaluate_graphs import single, tensor

from coral import isa, numerics
from coral.chip import Chip, ChipState
from coral.isa import Walk
from tests.chip.builder import (
    INFINITY,
    fence,
    identity,
    input_to_tile,
    output_from_tile,
    program,
    requantise,
)

TILE, MASK = 3, 8
ROW, RESULT = 100, 1024
"""First row of operands in wide memory, first word of results in narrow memory."""
SEEDS = pytest.mark.parametrize("seed", [None, 1, 2])
Y_SCALE, Y_ZERO = 0.0234375, 71


def on_chip(x: np.ndarray, body: list[isa.Instruction], result_bytes: int, seed: int | None) -> np.ndarray:
    """Codes to words from 0 on, the body, ``result_bytes`` from word RESULT on (all of them written)."""
    units = -(-x.size // 8)
    outputs = output_from_tile(TILE, -(-result_bytes // 8) * 2, RESULT)
    chip = Chip(seed=seed)
    chip.feed(0, program(*input_to_tile(TILE, units), *body, *fence(MASK), *outputs))
    chip.feed(1, x.tobytes().ljust(units * 8, b"\0"))
    assert chip.run() is ChipState.FINISHED
    assert chip.written.popleft()[:result_bytes].all()
    return np.frombuffer(chip.outputs.popleft(), np.uint8)[:result_bytes]


def judged(name: str, x: np.ndarray, shape: tuple[int, ...], quant: Any, more: Any = (), **options: Any) -> np.ndarray:
    """The operator by ``coral.evaluate``: ``quant`` is (scale, zero point) of x and of y."""
    (s_x, z_x), (s_y, z_y) = quant
    tensors = [tensor("x", x.shape, "u1", [s_x], [z_x]), *more, tensor("y", shape, "u1", [s_y], [z_y])]
    return evaluate(single(name, tensors, tuple(range(1 + len(more))), **options), x, generation="old").reshape(-1)


def codes(seed: int | None, *shape: int) -> np.ndarray:
    """Random codes with both ends among them."""
    x = np.random.default_rng(seed or 0).integers(0, 256, shape, np.uint8)
    x.reshape(-1)[:2] = 0, 255
    return x


def operands(words: int, transpose: int = 0) -> list[isa.Instruction]:
    """Words from 0 on to wide memory: one per row, or four per row with a lane for each."""
    if transpose:
        src, rows = Walk(0, [1, 1, 4], [4, 1, words // 4]), words // 4
    else:
        src, rows = Walk(0, [1], [words]), words
    pack = isa.N2w(tile_mask=MASK, src=src, dst=Walk(ROW, [1], [rows]), transpose=transpose, pack_level=2 * transpose)
    return [pack, *fence(MASK)]


def table(spline: numerics.Spline) -> isa.Instruction:
    """The non-linear unit's load of a spline."""
    fields = {f"c{s}_{k}": float(c) for s, row in enumerate(spline.coefficients) for k, c in enumerate(row)}
    fields |= {f"brk{k}": float(x) for k, x in enumerate(spline.breakpoints)}
    return isa.NluLoad(tile_mask=MASK, table_mode=3, **fields)


@SEEDS
def test_max_pool(seed: int | None) -> None:
    """Four positions by four channels are transposed; a lane is a position, a column a channel."""
    scale, zero = 0.5, 100
    x = codes(seed, 1, 4, 8, 8)
    low, high = numerics.clamps(scale, zero, "RELU6")
    body = [
        isa.N2w(
            tile_mask=MASK, src=Walk(0, [2, 1, 8], [4, 2, 8]), dst=Walk(ROW, [1], [8]), transpose=1, pack_level=2
        ),
        *fence(MASK),
        isa.OpMax(
            tile_mask=MASK, loop_cnt0=1, loop_cnt1=1, loop_cnt2=3, loop_cnt3=1, reduce_mask=3, acc_init=1, lane_off=7,
            group_loop=4, out_ch=7, out_ch_last=7, par=Walk(4 * ROW, [1, 8, 2, 16], [2, 2, 4, 2]),
            psum=Walk(0, [0], [32]), out=Walk(4 * RESULT, [4], [16]), mult=1.0, acc_offset=-zero,
            out_zp=zero, clamp_min=low, clamp_max=high,
        ),
    ]  # fmt: skip
    options = {"filter_height": 2, "filter_width": 2, "stride_h": 2, "stride_w": 2, "padding": "VALID"}
    quant = ((scale, zero), (scale, zero))
    expected = judged("MAX_POOL_2D", x, (1, 2, 4, 8), quant, fused_activation_function="RELU6", **options)
    np.testing.assert_array_equal(on_chip(x, body, 64, seed), expected)


@SEEDS
def test_tanh(seed: int | None) -> None:
    """All codes; an odd table for the positive half."""
    scale, zero, y_scale = 0.0371, 119, 1 / 128
    x = np.arange(256, dtype=np.uint8)
    limit = float(numerics.TANH_CLAMP)
    op = requantise(
        MASK, 0, 4 * RESULT, 64, in_zp=zero, mult=float(numerics.rescale_multiplier(scale, 1)), clamp_min=-limit,
        clamp_max=limit, out_zp=128, nlu_en=1, nlu_odd=3,
    )  # fmt: skip
    body = [*identity(MASK, 2000), table(numerics.TANH.scaled(numerics.inv(y_scale))), op]
    expected = judged("TANH", x, x.shape, ((scale, zero), (y_scale, 128)))
    np.testing.assert_array_equal(on_chip(x, body, 256, seed), expected)


@SEEDS
def test_relu_n1_to_1(seed: int | None) -> None:
    x = codes(seed, 256)
    low, high = numerics.clamps(Y_SCALE, Y_ZERO, "RELU_N1_TO_1")
    op = requantise(
        MASK, 0, 4 * RESULT, 64, in_zp=20, mult=float(numerics.rescale_multiplier(0.0371, Y_SCALE)), clamp_min=low,
        clamp_max=high, out_zp=Y_ZERO,
    )  # fmt: skip
    expected = judged("RELU_N1_TO_1", x, x.shape, ((0.0371, 20), (Y_SCALE, Y_ZERO)))
    np.testing.assert_array_equal(on_chip(x, [*identity(MASK, 2000), op], 256, seed), expected)


@SEEDS
@pytest.mark.parametrize("name", ["SUM", "MEAN"])
def test_sum_and_mean(name: str, seed: int | None) -> None:
    """One word per row: column 0 adds the row's four bytes, and the rows."""
    scale, zero = 0.0117, 131
    x = codes(seed, 1, 64)
    if name == "SUM":
        mult, (low, high) = numerics.rescale_multiplier(scale, Y_SCALE), numerics.clamps(Y_SCALE, Y_ZERO)
    else:
        mult, (low, high) = numerics.average_multiplier(scale, 64, Y_SCALE, newer=False), (-INFINITY, INFINITY)
    op = isa.OpSum(
        tile_mask=MASK, loop_cnt0=15, reduce_mask=1, acc_init=1, group_loop=7, par=Walk(4 * ROW, [4], [16]),
        psum=Walk(0, [0], [16]), out=Walk(4 * RESULT), w_zp=zero, mult=float(mult), clamp_min=low, clamp_max=high,
        out_zp=Y_ZERO,
    )  # fmt: skip
    axes = tensor("axes", (1,), "i4", data=np.array([1], np.int32))
    expected = judged(name, x, (1, 1), ((scale, zero), (Y_SCALE, Y_ZERO)), [axes], keep_dims=True)
    np.testing.assert_array_equal(on_chip(x, [*operands(16), op], 1, seed), expected)


@SEEDS
@pytest.mark.parametrize("zero", [128, 3])
def test_l2_normalisation(zero: int, seed: int | None) -> None:
    """Sum of squares through the reciprocal square root to 16 bits, then a product of 16 by 8 bits per value."""
    scale, words = 0.0213, 8
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
            clamp_max=INFINITY, nlu_en=1, nlu_range_reduce=1, out16=1, **common,
        ),
        *fence(MASK),
        *operands(words, transpose=1),
        isa.Op(
            group_loop=7, inp=Walk(root, [0], [words]), act16=1, lane_off=6, par=Walk(4 * ROW, [1], [words]),
            psum=Walk(0, [0], [words]), out=Walk(4 * RESULT, [4], [words]), out_ch=3, out_ch_last=3, mult=float(mult),
            clamp_min=low, clamp_max=high, out_zp=128, **common,
        ),
    ]  # fmt: skip
    expected = judged("L2_NORMALIZATION", x, x.shape, ((scale, zero), (1 / 128, 128)), fused_activation_function="NONE")
    np.testing.assert_array_equal(on_chip(x, body, x.size, seed), expected)


@SEEDS
@pytest.mark.parametrize("start", [2, 3])
def test_nearest_resize(start: int, seed: int | None) -> None:
    """One tap; like the bilinear form with a halo, addresses begin one pixel before the block."""
    rows, columns = 3, 5
    x = codes(seed, 1, rows, columns, 4)
    base = 2048
    shift = requantise(MASK, 0, base, rows * columns)
    row = 4 * columns
    op = isa.OpResize(
        tile_mask=MASK, loop_cnt2=2 * columns - 1, loop_cnt3=2 * rows - 1, acc_init=1, par16=1, lane_off=6,
        reduce_mask=3, group_loop=5, out_ch=3, out_ch_last=3, inp=Walk(base - 4 - row, [0], [4 * rows * columns]),
        par=Walk(0, [0], [4 * rows * columns]), psum=Walk(0, [0], [4 * rows * columns]),
        out=Walk(4 * RESULT, [4], [4 * rows * columns]), mult=1.0,
        rs_x_loop=2, rs_y_loop=3, rs_x_step=2, rs_y_step=2, rs_x_start=start, rs_y_start=start, rs_nearest=1,
        rs_x_nearest=1, rs_y_nearest=1, rs_pos_stride=4, rs_row_stride=row,
    )  # fmt: skip
    size = tensor("size", (2,), "i4", data=np.array([2 * rows, 2 * columns], np.int32))
    expected = judged(
        "RESIZE_NEAREST_NEIGHBOR", x, (1, 2 * rows, 2 * columns, 4), ((0.5, 7), (0.5, 7)), [size],
        align_corners=False, half_pixel_centers=False,
    )  # fmt: skip
    assert (expected.reshape(2 * rows, 2 * columns, 4)[1::2, 1::2] == x[0]).all()
    body = [*identity(MASK, 2000), shift, *fence(MASK), op]
    np.testing.assert_array_equal(on_chip(x, body, x.size * 4, seed), expected)


@SEEDS
def test_concatenation_of_other_scales(seed: int | None) -> None:
    """Each part is requantised into its place; the part that has the result's quantisation is copied exactly."""
    x = codes(seed, 1, 96)
    parts = [(0.03, 20), (Y_SCALE, Y_ZERO), (0.011, 250)]
    low, high = numerics.clamps(Y_SCALE, Y_ZERO)
    ops = [
        requantise(
            MASK, 32 * k, 4 * RESULT + 32 * k, 8, in_zp=zero, out_zp=Y_ZERO, clamp_min=low, clamp_max=high,
            mult=float(numerics.rescale_multiplier(scale, Y_SCALE)),
        )
        for k, (scale, zero) in enumerate(parts)
    ]  # fmt: skip
    got = on_chip(x, [*identity(MASK, 2000), *ops], 96, seed)
    others = [
        tensor(f"part{k}", (1, 32), "u1", parts[k][:1], parts[k][1:], data=x[:, 32 * k : 32 * k + 32].copy())
        for k in (1, 2)
    ]
    expected = judged(
        "CONCATENATION", x[:, :32], (1, 96), (parts[0], (Y_SCALE, Y_ZERO)), others, axis=1,
        fused_activation_function="NONE",
    )  # fmt: skip
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(got[32:64], x[0, 32:64])
