"""Small models with random weights, and the decoder's formulas in NumPy."""

from __future__ import annotations

import numpy as np

from coral.llm.checkpoint import Checkpoint, Config, shapes
from coral.llm.engine import Usage, Weights, check_rewind, check_step


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


class CountingSession:
    """A session whose logits depend on the words so far, and nothing else; ``faults`` are raised instead of a step."""

    def __init__(self, engine: CountingEngine, rows: int) -> None:
        self.rows, self.position, self.engine = rows, 1, engine
        self.fed: list[list[int]] = [[] for _ in range(rows)]

    def logits(self) -> np.ndarray:
        return np.stack([self.engine.table[hash(tuple(ids)) % len(self.engine.table)] for ids in self.fed])

    def step(self, ids: np.ndarray) -> np.ndarray:
        check_step(self.engine.config, self.position, ids, self.rows)
        if self.engine.faults:
            raise self.engine.faults.pop()
        for mine, word in zip(self.fed, ids.tolist(), strict=True):
            mine.append(word)
        self.position += 1
        self.engine.steps += 1
        return self.logits()

    def rewind(self, position: int) -> None:
        check_rewind(self, position)
        self.position = position
        self.fed = [ids[: position - 1] for ids in self.fed]


class CountingEngine:
    """A model that needs no arithmetic."""

    name = "counting"

    def __init__(self, vocabulary: int = 300, context: int = 64) -> None:
        self.config = Config(8, 8, 1, 2, 1, vocabulary, context)
        self.table = np.random.default_rng(0).normal(0, 3, (997, vocabulary)).astype(np.float32)
        self.faults: list[Exception] = []
        self.steps = 0

    def session(self, rows: int) -> CountingSession:
        return CountingSession(self, rows)

    def session_bytes(self, rows: int) -> int:
        return 1000 * rows

    def usage(self) -> Usage:
        return Usage(self.steps, 100 * self.steps, 10 * self.steps, 1e-3 * self.steps)

    def weights(self) -> list[Weights]:
        return [Weights("layer 0 wo", tile, 0, 20) for tile in range(3)]
