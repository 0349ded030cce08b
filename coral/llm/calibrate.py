"""From a float checkpoint to a quantised decoder. Source: docs/transformer.md, Calibration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from coral import numerics
from coral.codegen.transformer.graph import LARGEST, ZERO, Block, Dense, Gate, Geometry, Residual, Transformer
from coral.codegen.transformer.model import Cache
from coral.llm.checkpoint import Checkpoint, CheckpointError
from coral.llm.reference import EPSILON, THETA, Reference

SMALLEST = 1e-6
"""Range of what is zero throughout."""
Ranges = dict[tuple[str, int], float]
"""Largest absolute value per quantity and layer."""
ALWAYS = ("k", "v")
"""Quantities whose codes must also hold position 0, where activations are far larger."""


def observe(checkpoint: Checkpoint, stories: Iterable[Sequence[int]], always: tuple[str, ...] = ALWAYS) -> Ranges:
    """Largest absolute values on token sequences, of positions from 1 on; of the quantities ``always`` also of 0.

    :raises CheckpointError: there is no story of two tokens
    """
    ranges: defaultdict[tuple[str, int], float] = defaultdict(float)
    for story in stories:
        position = 0

        def tap(name: str, layer: int, values: NDArray[np.float64]) -> None:
            if position or name in always:  # noqa: B023
                ranges[name, layer] = max(ranges[name, layer], float(np.abs(values).max()))

        model = Reference(checkpoint, tap)
        for position, token in enumerate(story):
            model.step(token, position)
    if ("x", 0) not in ranges:
        raise CheckpointError("calibration needs at least one story of two tokens")
    return dict(ranges)


def quantise(
    checkpoint: Checkpoint,
    ranges: Ranges,
    name: str = "transformer",
    *,
    classifier: bool = True,
    own_tables: bool = True,
) -> Transformer:
    """The decoder in codes. ``classifier``: its matrix, too. ``own_tables``: see :class:`Transformer`.

    Raises ShapeError for geometries that do not fit.
    """
    c, w = checkpoint.config, checkpoint
    geometry = Geometry(c.dim, c.hidden, c.heads, c.kv_heads, c.context, THETA)
    layers = range(c.layers)

    def scale(point: str, layer: int | None = None) -> float:
        found = [value for (p, k), value in ranges.items() if p == point and layer in (None, k)]
        return float(np.float32(max([*found, SMALLEST]) / LARGEST))

    s_n, s_a = scale("normal"), scale("a")
    blocks = []
    for k in layers:
        s_x, s_x2, s_y = scale("x", k), scale("x2", k), scale("x", k + 1)
        s_q, s_k, s_v, s_s = (scale(p, k) for p in ("q", "k", "v", "score"))
        s_h1, s_h3, s_m = scale("h1", k), scale("h3", k), scale("m", k)
        q, key, v = (m[k] * w.att_norm[k] for m in (w.wq, w.wk, w.wv))
        outputs = np.r_[np.full(len(q), s_q), np.full(len(key), s_k)]
        score = numerics.f32(numerics.f32(s_q * np.float32(s_k)) / np.float32(np.sqrt(c.head_size)))
        blocks.append(
            Block(
                qk=dense_codes(np.r_[q, key], s_n, outputs),
                v=dense_codes(v, s_n, s_v),
                wo=_residual(w.wo[k], s_v, s_x, s_x2),
                w1=dense_codes(w.w1[k] * w.ffn_norm[k], s_n, 1.0 if own_tables else s_h1),
                w3=dense_codes(w.w3[k] * w.ffn_norm[k], s_n, s_h3),
                w2=_residual(w.w2[k], s_m, s_x2, s_y),
                score=numerics.rescale_multiplier(float(score), s_s),
                exp=s_s,
                product=numerics.multiplier(s_a, s_h3, s_m),
                k_scale=s_k,
                v_scale=s_v,
                gate=None if own_tables else Gate(s_h1, numerics.multiplier(s_h1, 1 / 256, s_a)),
            )
        )
    mult = float(numerics.f32(numerics.inv(65535) * numerics.inv(s_n)))
    s_l = scale("logits", c.layers)
    head = dense_codes(w.classifier * w.norm, s_n, s_l) if classifier else None
    first, last, logit = scale("x", 0), scale("x", c.layers), s_l if classifier else 0.0
    return Transformer(name, geometry, tuple(blocks), mult, s_a, first, last, head, logit, own_tables)


def dense_codes(matrix: NDArray, s_in: float, s_out: float | NDArray) -> Dense:
    """A matrix in codes, per output, of zero point 128; multipliers F(F(s_in * s_w) * inv(s_out))."""
    s_w = np.maximum(np.abs(matrix).max(1) / LARGEST, SMALLEST / LARGEST).astype(np.float32)
    codes = np.clip(np.rint(matrix / s_w[:, None]), -LARGEST, LARGEST) + ZERO
    outputs = np.broadcast_to(np.asarray(s_out, np.float32), s_w.shape)
    mult = [numerics.multiplier(s_in, w, o) for w, o in zip(s_w, outputs, strict=True)]
    return Dense(codes.astype(np.uint8), np.array(mult, np.float32))


def _residual(matrix: NDArray, s_in: float, s_x: float, s_out: float) -> Residual:
    """As ``_dense``, with weight scales of which s_x is a whole multiple."""
    wished = s_in * np.maximum(np.abs(matrix).max(1) / LARGEST, SMALLEST / LARGEST)
    residual = np.clip(np.floor(s_x / wished), 1, LARGEST)
    codes = np.clip(np.rint(matrix * (s_in * residual / s_x)[:, None]), -LARGEST, LARGEST) + ZERO
    mult = [numerics.rescale_multiplier(float(s_x / n), s_out) for n in residual]
    return Residual(codes.astype(np.uint8), np.array(mult, np.float32), residual.astype(np.uint8))


def embed(model: Transformer, checkpoint: Checkpoint, token: int) -> NDArray[np.uint8]:
    """Input codes of a token, uint8 [dim]."""
    return numerics.quantise(checkpoint.embedding[token], model.x_scale, ZERO)


def begin(model: Transformer, checkpoint: Checkpoint, token: int) -> tuple[Cache, NDArray[np.float64]]:
    """Position 0, in float on the host: the cache with its keys and values, and its logits [vocabulary]."""
    reference, cache = Reference(checkpoint), Cache.empty(model)
    logits = reference.step(token, 0)
    for k, block in enumerate(model.blocks):
        cache.keys[k, 0] = numerics.quantise(reference.keys[k, 0], block.k_scale, ZERO)
        cache.values[k, 0] = numerics.quantise(reference.values[k, 0], block.v_scale, ZERO)
    return cache, logits


def host_logits(model: Transformer, checkpoint: Checkpoint, y: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Final norm and classifier in float from a program's output codes: logits [vocabulary]."""
    x = numerics.dequantise(y, model.y_scale, ZERO).astype(np.float64)
    return checkpoint.classifier @ (x / np.sqrt((x * x).mean() + EPSILON) * checkpoint.norm)
