"""Batched matrix products on the simulated chip."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.network.harness import run
from coral import numerics
from coral.chip import Chip
from coral.codegen import CodegenError, ShapeError
from coral.codegen.fc import FcQuant
from coral.codegen.network import Matmul, matmul

EDGES = [
    *((m, 10, 20) for m in (1, 2, 3, 8, 31, 32, 33, 256)),
    *((m, 64, 64) for m in (127, 128, 129)),
    *((4, 20, k) for k in (767, 768, 769)),
    (1, 1, 1),
    (17, 1000, 5),
]
LARGE = [(16, 288, 768), (128, 288, 768), (5, 3, 4097), (256, 16, 3840), (256, 288, 288), (33, 768, 288)]


def quantisation(rng: np.random.Generator, k: int) -> FcQuant:
    zero_in, w_zp, zero = (int(rng.choice([0, 128, 255, int(rng.integers(256))])) for _ in range(3))
    mult = 0.5**9 if rng.integers(3) == 0 else float(np.float32(1 / (100 * 100 * np.sqrt(k))))
    return FcQuant(zero_in, w_zp, zero, mult, float(-zero), float(255 - zero))


def check(chip: Chip, p: Matmul, rng: np.random.Generator) -> tuple:
    q = p.quant
    w = rng.integers(0, 256, (p.n, p.k), np.uint8)
    bias = rng.integers(-3000, 3000, p.n).astype(np.int32) if rng.integers(2) else None
    run(chip, p.caching(p.blob(w, bias)))
    return w, bias, q


def product(chip: Chip, p: Matmul, x: np.ndarray) -> np.ndarray:
    return p.unpack(b"".join(run(chip, p.execution, p.pack(x))))


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n", "k"), LARGE)
def test_large_products(m, n, k):
    test_products(m, n, k)


@pytest.mark.parametrize(("m", "n", "k"), EDGES)
def test_products(m, n, k):
    rng = np.random.default_rng(m * n + k)
    row, tile = int(rng.integers(0, 900)), int(rng.integers(0, 14))
    p, chip = (
        matmul(m, n, k, quantisation(rng, k), parameter_row=row, tile_shift=tile),
        Chip(seed=k if n * k < 2000 else None),
    )
    p.execution.check()
    w, bias, q = check(chip, p, rng)
    for rows in {m, (m + 1) // 2}:
        x = rng.integers(0, 256, (rows, k), np.uint8)
        expected = numerics.fully_connected(x, w, bias, q.in_zp, q.w_zp, q.mult, q.clamp_min, q.clamp_max, q.out_zp)
        np.testing.assert_array_equal(product(chip, p, x)[:rows], expected)


def test_resident_products_do_not_disturb_each_other():
    """Weights that fill a tile's rows next to each other, each product run again after all the others."""
    rng, chip, row, cases = np.random.default_rng(2), Chip(), 0, []
    for n, k in ((64, 100), (200, 300), (70, 768), (512, 64)):
        p = matmul(3, n, k, quantisation(rng, k), parameter_row=row, tile_shift=4)
        cases.append((p, *check(chip, p, rng)))
        row += p.rows_per_tile
    assert row <= min(p.floor_rows for p, *_ in cases)
    for p, w, bias, q in cases:
        x = rng.integers(0, 256, (3, p.k), np.uint8)
        expected = numerics.fully_connected(x, w, bias, q.in_zp, q.w_zp, q.mult, q.clamp_min, q.clamp_max, q.out_zp)
        np.testing.assert_array_equal(product(chip, p, x), expected)


def test_weights_over_several_tiles():
    rng = np.random.default_rng(5)
    p, chip = matmul(2, 700, 900, quantisation(rng, 900), parameter_row=500, tile_shift=9), Chip()
    assert p.tiles == 2
    w, bias, q = check(chip, p, rng)
    x = rng.integers(0, 256, (2, 900), np.uint8)
    expected = numerics.fully_connected(x, w, bias, q.in_zp, q.w_zp, q.mult, q.clamp_min, q.clamp_max, q.out_zp)
    np.testing.assert_array_equal(product(chip, p, x), expected)


def test_limits_are_named():
    q = FcQuant(0, 0, 0, 1.0, 0.0, 255.0)
    with pytest.raises(ShapeError, match=r"M is 257, allowed are 1\.\.256"):
        matmul(257, 10, 10, q)
    with pytest.raises(ShapeError, match=r"K is 0, allowed"):
        matmul(1, 10, 0, q)
    with pytest.raises(ShapeError, match=r"need 9 tiles from row 0, there are 8"):
        matmul(16, 1000, 4096, q, tile_shift=8)
    with pytest.raises(ShapeError, match=r"row 1940 of 1940"):
        matmul(1, 10, 10, q, parameter_row=1940)
    p = matmul(2, 10, 10, q)
    with pytest.raises(ShapeError, match=r"x is uint8 \(3, 10\), needed is uint8 of up to 2 rows of 10"):
        p.pack(np.zeros((3, 10), np.uint8))
    with pytest.raises(ShapeError, match=r"weights are float32"):
        p.blob(np.zeros((10, 10), np.float32))
    with pytest.raises(CodegenError, match=r"output has 3 bytes"):
        p.unpack(b"abc")
