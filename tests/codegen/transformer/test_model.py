"""The bit model against the formulas it stands for, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.transformer.harness import random_cache, random_model, random_token
from coral.codegen import transformer as tf
from coral.codegen.transformer import model as bits
from coral.codegen.transformer import tables
from coral.codegen.transformer.rows import matrix, sign_rows

GEOMETRY = tf.Geometry(dim=64, hidden=80, heads=8, kv_heads=4, context=300)


def test_silu_table():
    x = np.linspace(-16, 16, 20001).astype(np.float32)
    exact = x.astype(float) / (1 + np.exp(-x.astype(float)))
    assert np.abs(tables.silu(0.05)(x) * 0.05 - exact).max() < 0.002


@pytest.mark.parametrize("largest", [16, 256, 512, 4096])
def test_reciprocal_table(largest):
    x = np.linspace(1, largest, 20001).astype(np.float32)
    assert np.abs(tables.reciprocal(largest)(x) * x / 65535 - 1).max() < 5e-3
    if largest <= 512:
        assert np.abs(tables.reciprocal(largest)(x) * x / 65535 - 1).max() < 7e-4


def test_rotation_turns_pairs():
    turn = GEOMETRY.rotation(77).astype(float) - 128
    np.testing.assert_allclose(turn @ turn.T / 127**2, np.eye(8), atol=0.02)
    j = 3
    angle = 77 * 10000 ** (-2 * j / 8)
    np.testing.assert_allclose(
        turn[6:, 6:] / 127, [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]], atol=0.004
    )
    np.testing.assert_array_equal(GEOMETRY.rotation(0), 128 + 127 * np.eye(8))


def test_normalise():
    x = random_token(random_model(GEOMETRY, 1), 3)
    centred = x.astype(float) - 128
    exact = centred / np.sqrt((centred**2).mean()) * 40
    assert np.abs(bits.normalise(x, float(np.float32(40 / 65535))) - 128.0 - np.clip(exact, -128, 127)).max() <= 0.51


def test_residual_is_added_before_rounding():
    rng = np.random.default_rng(1)
    w, r = rng.integers(1, 256, (64, 80)).astype(np.uint8), rng.integers(1, 128, 64).astype(np.uint8)
    layer = tf.Residual(w, np.full(64, np.float32(1 / 4096)), r)
    x, residual = rng.integers(0, 256, 80).astype(np.uint8), rng.integers(0, 256, 64).astype(np.uint8)
    exact = ((w.astype(int) - 128) @ (x.astype(int) - 128) + r.astype(int) * (residual.astype(int) - 128)) / 4096
    np.testing.assert_array_equal(bits.add(x, layer, residual), np.clip(np.rint(exact), -128, 127) + 128)


@pytest.mark.parametrize("positions", [1, 2, 7, 64, 300])
def test_attention_is_a_weighted_mean(positions):
    """From the codes of scores on; the error is the quantisation of weights and result."""
    model = random_model(GEOMETRY, 1)
    cache, block, seen = random_cache(model, positions), model.blocks[0], {}
    q = random_token(model, 1).reshape(8, 8)
    keys, values = cache.keys[0, :positions], cache.values[0, :positions]
    got = bits.attend(GEOMETRY, block, q, keys, values, seen)
    scores = np.einsum("hd,phd->hp", q - 128.0, np.repeat(keys, 2, 1) - 128.0) * block.score
    assert np.abs(seen["scores"] - 128.0 - np.clip(scores, -128, 127)).max() <= 0.51
    e = np.exp((seen["scores"] - 128.0) * block.exp)
    share = e / e.sum(1, keepdims=True)
    exact = np.einsum("hp,phd->hd", share, np.repeat(values, 2, 1) - 128.0)
    assert np.abs(got - 128.0 - exact).max() <= 2.0
    assert (seen["weights"].max(1) == 255).all()


def test_matrix_rows():
    rng = np.random.default_rng(0)
    w, mult = rng.integers(0, 256, (70, 12)).astype(np.uint8), rng.random(70).astype(np.float32)
    bias = rng.integers(-9, 9, 70).astype(np.int32)
    rows = matrix(w, mult, bias)
    assert rows.shape == (2 * 2 + 2 * 3, 256)
    np.testing.assert_array_equal(rows[0].view("<f4"), mult[:64])
    np.testing.assert_array_equal(rows[2].view("<f4"), [*mult[64:], *[1.0] * 58])
    np.testing.assert_array_equal(rows[3].view("<i4")[:6], bias[64:])
    second = rows[4 + 3 + 1].reshape(64, 4)
    np.testing.assert_array_equal(second[:6], w[64:, 4:8])
    assert (second[6:] == 128).all()


def test_sign_rows():
    plus, minus = (sign_rows().astype(int) - 1).reshape(2, 64, 4)
    np.testing.assert_array_equal(plus[:4], np.eye(4))
    np.testing.assert_array_equal(minus[:4], -np.eye(4))
    assert not plus[4:].any()
    assert not minus[4:].any()
