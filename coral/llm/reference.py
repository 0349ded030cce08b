"""The decoder in float64 numpy, one token at a time: what calibration observes and results are compared with.

Source: docs/transformer.md, Calibration.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from coral.llm.checkpoint import Checkpoint

EPSILON = 1e-5
THETA = 10000.0
Tap = Callable[[str, int, NDArray[np.float64]], None]
"""Called with the name of a quantity, its layer and its values."""


def _normal(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / np.sqrt((x * x).mean() + EPSILON)


def _turn(x: NDArray[np.float64], position: int) -> NDArray[np.float64]:
    """Rotary embedding of [heads, head_size]: pairs (2j, 2j + 1)."""
    size = x.shape[1]
    turned = (x[:, ::2] + 1j * x[:, 1::2]) * np.exp(1j * position * THETA ** (-np.arange(0, size, 2) / size))
    return np.stack([turned.real, turned.imag], 2).reshape(x.shape)


class Reference:
    """A checkpoint with the keys and values, float64 [layers, context, kv_heads, head_size], of one sequence."""

    def __init__(self, checkpoint: Checkpoint, tap: Tap | None = None) -> None:
        self.checkpoint, self.tap = checkpoint, tap or (lambda name, layer, values: None)
        c = checkpoint.config
        self.keys = np.zeros((c.layers, c.context, c.kv_heads, c.head_size))
        self.values = np.zeros_like(self.keys)

    def step(self, token: int, position: int) -> NDArray[np.float64]:
        """Logits [vocabulary] after ``token`` at ``position`` (those before it were given in earlier calls)."""
        w, c = self.checkpoint, self.checkpoint.config
        x = w.embedding[token].astype(np.float64)
        for k in range(c.layers):
            self.tap("x", k, x)
            n = _normal(x)
            self.tap("normal", k, n)
            n = n * w.att_norm[k]
            q, key, v = (m[k] @ n for m in (w.wq, w.wk, w.wv))
            self.tap("q", k, q)
            self.tap("k", k, key)
            self.tap("v", k, v)
            attended = self._attend(k, q, key, v, position)
            self.tap("attention", k, attended)
            o = w.wo[k] @ attended
            self.tap("o", k, o)
            x = x + o
            self.tap("x2", k, x)
            n = _normal(x)
            self.tap("normal", k, n)
            n = n * w.ffn_norm[k]
            h1, h3 = w.w1[k] @ n, w.w3[k] @ n
            a = h1 / (1 + np.exp(-h1))
            self.tap("h1", k, h1)
            self.tap("a", k, a)
            self.tap("h3", k, h3)
            self.tap("m", k, a * h3)
            f = w.w2[k] @ (a * h3)
            self.tap("f", k, f)
            x = x + f
        self.tap("x", c.layers, x)
        n = _normal(x)
        self.tap("normal", c.layers, n)
        logits = w.classifier @ (n * w.norm)
        self.tap("logits", c.layers, logits)
        return logits

    def _attend(self, k: int, q: NDArray, key: NDArray, v: NDArray, position: int) -> NDArray[np.float64]:
        c = self.checkpoint.config
        heads = _turn(q.reshape(c.heads, -1), position)
        self.keys[k, position] = _turn(key.reshape(c.kv_heads, -1), position)
        self.values[k, position] = v.reshape(c.kv_heads, -1)
        kv = np.arange(c.heads) // (c.heads // c.kv_heads)
        scores = np.einsum("hd,phd->hp", heads, self.keys[k, : position + 1, kv].swapaxes(0, 1)) / np.sqrt(c.head_size)
        self.tap("score", k, scores)
        e = np.exp(scores - scores.max(1, keepdims=True))
        share = e / e.sum(1, keepdims=True)
        return np.einsum("hp,phd->hd", share, self.values[k, : position + 1, kv].swapaxes(0, 1)).reshape(-1)


def sample(checkpoint: Checkpoint, length: int, temperature: float, seed: int, first: int = 1) -> list[int]:
    """A story of up to ``length`` tokens, BOS (``first``) included; it ends before a second one."""
    rng, model, tokens = np.random.default_rng(seed), Reference(checkpoint), [first]
    while len(tokens) < length:
        logits = model.step(tokens[-1], len(tokens) - 1) / temperature
        share = np.exp(logits - logits.max())
        token = int(rng.choice(len(share), p=share / share.sum()))
        if token == first:
            break
        tokens.append(token)
    return tokens
