"""A decoder whose layers are three networks each: q|k|v, wo, and the feed-forward part in one; norms, rotary embedding,
attention and residuals are float32 on the host. Source: docs/stories.md, Blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral import numerics
from coral.codegen import network as nw
from coral.codegen.transformer.graph import LARGEST, ZERO
from coral.codegen.transformer.tables import LOGISTIC_256
from coral.llm.calibrate import SMALLEST, Ranges, dense_codes, observe
from coral.llm.checkpoint import Checkpoint
from coral.llm.model import angles, first_position
from coral.llm.reference import EPSILON
from coral.llm.shortlist import Shortlist

SILU_MINIMUM = -0.27846455
INPUT, OUTPUT = "x", "y"
Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Run = Callable[[str, Codes], Codes]
"""Computes a part, by name: codes [rows, inputs] to [rows, outputs]."""


@dataclass(frozen=True)
class Part:
    """A network from ``x`` to ``y`` on one position; ``x_scale`` of its codes, ``y_scale`` scalar or per output."""

    network: nw.Network
    x_scale: float
    y_scale: Floats | np.float32


class Blocks:
    """The parts of a checkpoint, quantised with the ranges of ``stories`` (ids from BOS on)."""

    def __init__(self, checkpoint: Checkpoint, stories: Iterable[Sequence[int]]) -> None:
        self.checkpoint, self.config = checkpoint, checkpoint.config
        ranges = observe(checkpoint, stories, always=())
        self.parts: dict[str, Part] = {}
        for k in range(self.config.layers):
            self.parts |= self._layer(k, ranges)
        self.shortlist = Shortlist(np.asarray(checkpoint.classifier, np.float32), ranges["logits", self.config.layers])
        self.cos, self.sin = angles(self.config)
        self.begin, self.first_logits = first_position(checkpoint)

    def cache(self, rows: int) -> Floats:
        """Keys and values of stories that have just begun, [2, layers, rows, kv_heads, context, head_size]."""
        c = self.config
        cache = np.zeros((2, c.layers, rows, c.kv_heads, c.context, c.head_size), np.float32)
        for k, pair in enumerate(self.begin):
            cache[0, k, :, :, 0], cache[1, k, :, :, 0] = (a[:, 0] for a in pair)
        return cache

    def step(self, run: Run, ids: NDArray[np.integer], position: int, cache: Floats) -> Floats:
        """The classifier's input [rows, dim] after the words ``ids`` at ``position`` >= 1, whose keys and values go to
        the cache. A row is what it would be alone."""
        w, c, rows = self.checkpoint, self.config, len(ids)
        x = w.embedding[ids].astype(np.float32)
        for k in range(c.layers):
            q, key, value = np.split(self._run(run, f"{k} qkv", normal(x)), [c.dim, c.dim + c.kv_dim], 1)
            q, key = (self._turned(a.reshape(rows, -1, c.head_size), position) for a in (q, key))
            cache[0, k, :, :, position], cache[1, k, :, :, position] = key, value.reshape(key.shape)
            x = x + self._run(run, f"{k} wo", attention(q, *cache[:, k, :, :, : position + 1]))
            x = x + self._run(run, f"{k} ffn", normal(x))
        return normal(x) * w.norm.astype(np.float32)

    def _run(self, run: Run, name: str, x: Floats) -> Floats:
        part = self.parts[name]
        codes = run(name, numerics.quantise(x, part.x_scale, ZERO))
        return (codes.astype(np.float32) - np.float32(ZERO)) * part.y_scale

    def _turned(self, x: Floats, position: int) -> Floats:
        """Rotary embedding of [rows, heads, head_size]."""
        a, b, cos, sin = x[..., ::2], x[..., 1::2], self.cos[position], self.sin[position]
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)

    def _layer(self, k: int, ranges: Ranges) -> dict[str, Part]:
        w = self.checkpoint

        def scale(name: str) -> float:
            return float(np.float32(max(ranges[name, k], SMALLEST) / LARGEST))

        matrices = [(w.wq, "q"), (w.wk, "k"), (w.wv, "v")]
        outputs = np.concatenate([np.full(len(m[k]), scale(name), np.float32) for m, name in matrices])
        qkv = np.concatenate([m[k] for m, _ in matrices]) * w.att_norm[k]
        s_n, s_att, s_o = scale("normal"), scale("attention"), scale("o")
        return {
            f"{k} qkv": Part(_single(f"{k} qkv", qkv, s_n, outputs), s_n, outputs),
            f"{k} wo": Part(_single(f"{k} wo", w.wo[k], s_att, s_o), s_att, np.float32(s_o)),
            f"{k} ffn": self._feed_forward(k, ranges["a", k], {n: scale(n) for n in ("normal", "h1", "h3", "m", "f")}),
        }

    def _feed_forward(self, k: int, largest: float, s: dict[str, float]) -> Part:
        """w2 (SiLU(w1 x) * (w3 x)); SiLU is the product with LOGISTIC, whose table compiled programs have, too."""
        w, c = self.checkpoint, self.config
        s_a, z_a = numerics.scale_and_zero_point(SILU_MINIMUM, largest)
        limit = numerics.LOGISTIC_CLAMP
        tensors = {
            INPUT: nw.Tensor(INPUT, 1, 1, c.dim, ZERO, s["normal"]),
            "h1": nw.Tensor("h1", 1, 1, c.hidden, ZERO, s["h1"]),
            "gate": nw.Tensor("gate", 1, 1, c.hidden, 0, 1 / 256),
            "a": nw.Tensor("a", 1, 1, c.hidden, z_a, s_a),
            "h3": nw.Tensor("h3", 1, 1, c.hidden, ZERO, s["h3"]),
            "m": nw.Tensor("m", 1, 1, c.hidden, ZERO, s["m"]),
            OUTPUT: nw.Tensor(OUTPUT, 1, 1, c.dim, ZERO, s["f"]),
        }
        gain = w.ffn_norm[k]
        silu, product = (
            float(numerics.multiplier(*scales)) for scales in ((s["h1"], 1 / 256, s_a), (s_a, s["h3"], s["m"]))
        )
        stages = (
            _conv(INPUT, "h1", w.w1[k] * gain, s["normal"], s["h1"]),
            nw.Requantise(("h1",), "gate", (-limit, limit), float(np.float32(s["h1"])), 0, LOGISTIC_256),
            nw.Multiply(("h1", "gate"), "a", numerics.integer_clamps(z_a), silu),
            _conv(INPUT, "h3", w.w3[k] * gain, s["normal"], s["h3"]),
            nw.Multiply(("a", "h3"), "m", numerics.integer_clamps(ZERO), product),
            _conv("m", OUTPUT, w.w2[k], s["m"], s["f"]),
        )
        network = nw.Network(f"ffn_{k}", tensors, (INPUT,), stages, (OUTPUT,))
        return Part(network, s["normal"], np.float32(s["f"]))


def _conv(x: str, y: str, matrix: Floats, s_x: float, s_y: float | Floats) -> nw.Conv:
    layer = dense_codes(matrix, s_x, s_y)
    return nw.Conv((x,), y, numerics.integer_clamps(ZERO), layer.weights[:, None, None], None, ZERO, layer.mult)


def _single(name: str, matrix: Floats, s_x: float, s_y: float | Floats) -> nw.Network:
    n, k = matrix.shape
    tensors = {INPUT: nw.Tensor(INPUT, 1, 1, k, ZERO, s_x), OUTPUT: nw.Tensor(OUTPUT, 1, 1, n, ZERO)}
    return nw.Network(name.replace(" ", "_"), tensors, (INPUT,), (_conv(INPUT, OUTPUT, matrix, s_x, s_y),), (OUTPUT,))


def normal(x: Floats) -> Floats:
    """RMSNorm without gain of [rows, dim]."""
    return x / np.sqrt((x * x).mean(1, keepdims=True) + np.float32(EPSILON))


def attention(q: Floats, keys: Floats, values: Floats) -> Floats:
    """[rows, dim] of q [rows, heads, size] over keys and values [rows, kv_heads, positions, size].

    A product per row and head, so that rows do not depend on each other's number.
    """
    rows, heads, size = q.shape
    grouped = q.reshape(rows, keys.shape[1], -1, size)
    scores = np.matmul(grouped, keys.swapaxes(2, 3)) * np.float32(size**-0.5)
    weights = np.exp(scores - scores.max(3, keepdims=True))
    mixed = np.matmul(weights / weights.sum(3, keepdims=True), values)
    return mixed.reshape(rows, heads * size)
