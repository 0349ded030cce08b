"""Small models with random weights, and the decoder's formulas in NumPy."""

from __future__ import annotations

import numpy as np

from coral.llm.checkpoint import Checkpoint, Config, shapes


def random_checkpoint(config: Config, seed: int = 0) -> Checkpoint:
    """Weights of about unit gain."""
    rng = np.random.default_rng(seed)
    made = {}
    for key, shape in shapes(config).items():
        flat = "norm" in key
        values = rng.normal(1 if flat else 0, 0.1 if flat else shape[-1] ** -0.5, shape)
        made[key] = values.astype(np.float32)
    made["classifier"] = made["embedding"] if config.tied else rng.normal(size=shapes(config)["embedding"])
    return Checkpoint(config, **{key: np.asarray(a, np.float32) for key, a in made.items()})


def decoder(ck: Checkpoint, ids: list[int]) -> np.ndarray:
    """Logits [T, vocabulary] of a story's ids from BOS on, in float64, one head at a time."""
    c = ck.config
    size, group = c.head_size, c.heads // c.kv_heads
    x = ck.embedding[ids].astype(np.float64)
    positions = np.arange(len(ids))

    def norm(v: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-5) * gain

    def turned(v: np.ndarray) -> np.ndarray:
        angle = positions[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
        z = (v[:, 0::2] + 1j * v[:, 1::2]) * np.exp(1j * angle)
        return np.stack([z.real, z.imag], -1).reshape(v.shape)

    for i in range(c.layers):
        h = norm(x, ck.att_norm[i])
        q, k, v = (h @ w[i].T for w in (ck.wq, ck.wk, ck.wv))
        heads = []
        for head in range(c.heads):
            mine, shared = slice(head * size, head * size + size), head // group
            theirs = slice(shared * size, shared * size + size)
            scores = turned(q[:, mine]) @ turned(k[:, theirs]).T / np.sqrt(size)
            scores[np.triu_indices(len(ids), 1)] = -np.inf
            e = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(e / e.sum(-1, keepdims=True) @ v[:, theirs])
        x = x + np.concatenate(heads, -1) @ ck.wo[i].T
        h = norm(x, ck.ffn_norm[i])
        gate = h @ ck.w1[i].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ ck.w3[i].T)) @ ck.w2[i].T
    return norm(x, ck.norm) @ ck.classifier.T
