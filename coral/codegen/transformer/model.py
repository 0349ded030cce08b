"""The bit model: what one token's program computes, stage by stage, in the chip's arithmetic.

Source: docs/transformer.md, Numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coral.codegen.transformer.graph import LARGEST, ZERO, Block, Dense, Geometry, Residual, Transformer
from coral.codegen.transformer.tables import (
    EXP_255,
    FULL,
    LOGISTIC_256,
    ROOT_LARGEST,
    RSQRT_32767,
    RSQRT_65535,
    SILU_LIMIT,
    reciprocal,
    silu,
)
from coral.codegen.transformer.tables import LARGEST as LARGEST_16
from coral.numerics import EXP_CLAMP, LOGISTIC_CLAMP, Spline, accumulators, exact_dtype, f32, requantise

ZERO_16 = 32768
LOW, HIGH = float(-ZERO), float(LARGEST)
Codes = NDArray[np.uint8]


@dataclass
class Cache:
    """Keys and values of every layer, uint8 [layers, context, kv_heads, head_size]; 128 where there is none."""

    keys: Codes
    values: Codes

    @classmethod
    def empty(cls, model: Transformer) -> Cache:
        g = model.geometry
        shape = (len(model.blocks), g.context, g.kv_heads, g.head_size)
        return cls(np.full(shape, ZERO, np.uint8), np.full(shape, ZERO, np.uint8))


def numerator_multiplier(positions: int) -> float:
    """Multiplier of the weighted sum of values: the largest possible sum fills 16 bits."""
    return float(f32((ZERO_16 - 1) / (FULL * LARGEST * 4 * -(-positions // 4))))


def attention_multiplier(positions: int) -> float:
    """Multiplier of numerator times inverse denominator, in the steps of the values."""
    return float(f32(1 / (numerator_multiplier(positions) * FULL * LARGEST_16)))


def mean_multiplier(dim: int) -> float:
    """Multiplier of a sum of squares."""
    return float(f32(1 / dim))


ROTATION_MULTIPLIER = float(f32(1 / LARGEST))
DENOMINATOR_MULTIPLIER = float(f32(1 / FULL))
SQUARE_MULTIPLIER = float(f32(LARGEST_16 / ROOT_LARGEST**2))


def _sums(x: NDArray[np.integer], w: NDArray[np.integer]) -> NDArray[np.int32]:
    """int32 sums x [.., k] times w [n, k], both less zero point."""
    exact = exact_dtype(np.asarray(w, np.int16))
    return accumulators(np.asarray(x, exact) @ np.asarray(w, exact).T)


def _centred(codes: Codes) -> NDArray[np.int64]:
    return codes.astype(np.int64) - ZERO


def _codes(acc: NDArray[np.int32], mult: ArrayLike, nlu: Spline | None = None, limit: float | None = None) -> Codes:
    low, high = (LOW, HIGH) if limit is None else (-limit, limit)
    return requantise(acc, mult, low, high, ZERO, nlu=nlu)


def normalise(x: Codes, mult: float) -> Codes:
    """RMSNorm without gain, uint8 [dim]: the scale of x cancels."""
    centred = _centred(x)
    square = accumulators((centred * centred).sum(keepdims=True))
    root = requantise(square, mean_multiplier(len(x)), 1.0, np.inf, 0, bits=16, nlu=RSQRT_65535).astype(np.int64)
    return _codes(accumulators(centred * root), mult)


def dense(x: Codes, layer: Dense, nlu: Spline | None = None, limit: float | None = None) -> Codes:
    """A matrix times a vector."""
    return _codes(_sums(_centred(x), layer.weights.astype(np.int16) - ZERO), layer.mult, nlu, limit)


def add(x: Codes, layer: Residual, residual: Codes) -> Codes:
    """A matrix times a vector, and the residual, rounded once."""
    sums = _sums(_centred(x), layer.weights.astype(np.int16) - ZERO)
    return _codes(accumulators(sums + _centred(residual) * layer.residual), layer.mult)


def rotate(vectors: Codes, rotation: Codes) -> Codes:
    """Rotary embedding of uint8 [heads, head_size]."""
    return _codes(_sums(_centred(vectors), rotation.astype(np.int16) - ZERO), ROTATION_MULTIPLIER)


def attend(
    g: Geometry, block: Block, q: Codes, keys: Codes, values: Codes, seen: dict[str, Codes], *, own_tables: bool = True
) -> Codes:
    """Attention of uint8 q [heads, head_size] over [positions, kv_heads, head_size]; uint8 [heads, head_size]."""
    positions, of_head = len(keys), np.arange(g.heads) // (g.heads // g.kv_heads)
    k, v = (_centred(codes[:, of_head].swapaxes(0, 1)) for codes in (keys, values))
    scores = _codes(accumulators((k @ _centred(q)[:, :, None])[:, :, 0]), block.score)
    below = accumulators(scores.astype(np.int64) - scores.max(1, keepdims=True))
    e = requantise(below, block.exp, EXP_CLAMP, 0.0, 0, nlu=EXP_255).astype(np.int64)
    sums, total = accumulators((e[:, None] @ v)[:, 0]), accumulators(e.sum(1, keepdims=True))
    num = requantise(sums, numerator_multiplier(positions), -ZERO_16, ZERO_16 - 1, ZERO_16, bits=16)
    table, largest = reciprocal(g.context) if own_tables else RSQRT_32767, float(g.context)
    inverse = requantise(total, DENOMINATOR_MULTIPLIER, 1.0, largest, 0, bits=16, nlu=table).astype(np.int64)
    if not own_tables:
        square = accumulators(inverse * inverse)
        inverse = requantise(square, SQUARE_MULTIPLIER, 0.0, float(LARGEST_16), 0, bits=16).astype(np.int64)
    seen |= {"scores": scores, "weights": e.astype(np.uint8)}
    return _codes(accumulators((num.astype(np.int64) - ZERO_16) * inverse), attention_multiplier(positions))


def _silu(model: Transformer, block: Block, x: Codes) -> Codes:
    """SiLU(w1 x), by a table of our own or by LOGISTIC and a product."""
    if block.gate is None:
        return dense(x, block.w1, silu(model.silu), SILU_LIMIT)
    h = _centred(dense(x, block.w1))
    low, high = -LOGISTIC_CLAMP, LOGISTIC_CLAMP
    share = requantise(accumulators(h), block.gate.step, low, high, 0, nlu=LOGISTIC_256).astype(np.int64)
    return _codes(accumulators(h * share), block.gate.product)


def layer(model: Transformer, index: int, x: Codes, cache: Cache, position: int, seen: dict[str, Codes]) -> Codes:
    """One layer, uint8 [dim] to [dim]; position's key and value are appended; ``seen`` gets every stage's result."""
    g, b, own = model.geometry, model.blocks[index], model.own_tables
    normal = normalise(x, model.norm)
    qk, v = dense(normal, b.qk), dense(normal, b.v)
    turned = rotate(qk.reshape(-1, g.head_size), g.rotation(position))
    q, k = turned[: g.heads], turned[g.heads :]
    cache.keys[index, position], cache.values[index, position] = k, v.reshape(k.shape)
    known = slice(0, position + 1)
    attention = attend(g, b, q, cache.keys[index, known], cache.values[index, known], seen, own_tables=own)
    attention = attention.reshape(-1)
    x2 = add(attention, b.wo, x)
    normal2 = normalise(x2, model.norm)
    a, h3 = _silu(model, b, normal2), dense(normal2, b.w3)
    m = _codes(accumulators(_centred(a) * _centred(h3)), b.product)
    y = add(m, b.w2, x2)
    seen |= {"normal": normal, "qk": qk, "v": v, "q": q, "k": k, "attention": attention, "x2": x2}
    seen |= {"normal2": normal2, "a": a, "h3": h3, "m": m, "y": y}
    return y


def step(
    model: Transformer, x: Codes, cache: Cache, position: int, stages: list[dict[str, Codes]] | None = None
) -> Codes:
    """One token: uint8 [dim] in, [dim] out (``y_scale``); ``stages`` gets a dictionary of results per layer."""
    for index in range(len(model.blocks)):
        seen: dict[str, Codes] = {}
        x = layer(model, index, x, cache, position, seen)
        if stages is not None:
            stages.append(seen)
    return x


def logits(model: Transformer, y: Codes) -> Codes:
    """Classifier on the chip: codes of logits, uint8 [vocabulary]. The model must have one."""
    assert model.classifier is not None
    return dense(normalise(y, model.norm), model.classifier)
