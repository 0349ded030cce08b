"""The decoder of a llama2.c checkpoint in plain tinygrad: RMSNorm, rotary embedding, grouped heads, SiLU, float32.

Every matrix product is an ``nn.Linear``, so that ``coral.quantize`` makes the uint8 model out of it. The first position
is the same in every story (BOS) and has activations far outside all others, so no layer ever sees it: its keys, values
and logits are constants, computed once from the float weights. Source: docs/stories.md, Model.
"""

from __future__ import annotations

import math

import numpy as np
from tinygrad import nn
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import UOp

from coral.llm.checkpoint import Checkpoint, Config
from coral.llm.reference import EPSILON, THETA, Reference
from coral.llm.tokenizer import BOS


class Joined:
    """Several products of one input as one layer. Rows of the parts are scaled by powers of two to about the same
    range, which the float result does not show, so that one output scale serves all of them."""

    def __init__(self, matrices: list[np.ndarray], factors: list[float], device: str) -> None:
        self.linear = linear(np.concatenate([m * f for m, f in zip(matrices, factors, strict=True)]), device)
        self.sizes, self.factors = [len(m) for m in matrices], factors

    def __call__(self, x: Tensor) -> list[Tensor]:
        parts = self.linear(x).split(self.sizes, dim=-1)
        return [part * (1 / factor) for part, factor in zip(parts, self.factors, strict=True)]


class Block:
    """One layer; ``begin`` are keys and values [kv_heads, 1, head_size] of the first position."""

    def __init__(self, ck: Checkpoint, layer: int, factors: tuple[list[float], list[float]], device: str) -> None:
        self.config = ck.config
        self.att_norm, self.ffn_norm = (Tensor(a[layer], device=device) for a in (ck.att_norm, ck.ffn_norm))
        self.qkv = Joined([ck.wq[layer], ck.wk[layer], ck.wv[layer]], factors[0], device)
        self.wo = linear(ck.wo[layer], device)
        self.w13 = Joined([ck.w1[layer], ck.w3[layer]], factors[1], device)
        self.w2 = linear(ck.w2[layer], device)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, heads, head_size], k and v [B, T, kv_heads, head_size] of x [B, T, dim]."""
        c, (b, t) = self.config, x.shape[:2]
        q, k, v = self.qkv(normalised(x, self.att_norm))
        q = rotated(q.reshape(b, t, c.heads, c.head_size), cos, sin)
        k = rotated(k.reshape(b, t, c.kv_heads, c.head_size), cos, sin)
        return q, k, v.reshape(b, t, c.kv_heads, c.head_size)

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """What the layer makes of x [B, T, dim] and the attention's result in the same shape."""
        x = (x + self.wo(attended)).contiguous()
        gate, up = self.w13(normalised(x, self.ffn_norm))
        return (x + self.w2(gate.silu() * up)).contiguous()


class Llama:
    """The float model of a checkpoint on a device; ``coral.quantize`` takes it as it is."""

    def __init__(self, ck: Checkpoint, device: str) -> None:
        """:param device: of all tensors"""
        self.config, self.device = ck.config, device
        self.embedding = ck.embedding
        self.norm = Tensor(ck.norm, device=device)
        cos, sin = angles(ck.config)
        self.cos, self.sin = Tensor(cos, device=device), Tensor(sin, device=device)
        self.blocks = [Block(ck, layer, spread(ck, layer), device) for layer in range(ck.config.layers)]
        self.classifier = linear(ck.classifier, device)
        self.begin, self.first_logits = first_position(ck)
        self.begin_cache = [tuple(Tensor(a, device=device) for a in pair) for pair in self.begin]

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of embedded words x [B, T, dim] at positions 1..T, all known at once."""
        b, t = int(x.shape[0]), int(x.shape[1])
        mask = Tensor(np.triu(np.full((t, t + 1), -np.inf, np.float32), 2), device=self.device)
        for block, (k0, v0) in zip(self.blocks, self.begin_cache, strict=True):
            q, k, v = block.queries(x, self.cos[1 : t + 1], self.sin[1 : t + 1])
            keys, values = (
                a.unsqueeze(0).expand(b, *a.shape).cat(new.transpose(1, 2), dim=2) for a, new in ((k0, k), (v0, v))
            )
            x = block.rest(x, attention(q, keys, values, mask))
        return self.classifier(normalised(x, self.norm))

    def step(self, x: Tensor, position: UOp | int, caches: list[Tensor]) -> Tensor:
        """Logits [B, vocabulary] after embedded words x [B, dim] at ``position`` >= 1, whose keys and values are
        written into ``caches`` (one per layer, [2, B, kv_heads, context, head_size])."""
        x = x.unsqueeze(1)
        for block, cache in zip(self.blocks, caches, strict=True):
            cos, sin = (a[position : position + 1] for a in (self.cos, self.sin))
            q, k, v = block.queries(x, cos, sin)
            cache[:, :, :, position : position + 1, :].assign(Tensor.stack(k, v).transpose(2, 3)).realize()
            past = cache[:, :, :, 0 : position + 1, :]
            x = block.rest(x, attention(q, past[0], past[1]))
        return self.classifier(normalised(x, self.norm)).squeeze(1)

    def cache(self, rows: int) -> list[Tensor]:
        """Keys and values of ``rows`` stories that have just begun."""
        c = self.config
        empty = np.zeros((2, rows, c.kv_heads, c.context, c.head_size), np.float32)
        caches = []
        for k0, v0 in self.begin:
            empty[0, :, :, :1], empty[1, :, :, :1] = k0, v0
            caches.append(Tensor(empty.copy(), device=self.device).realize())
        return caches


def linear(matrix: np.ndarray, device: str) -> nn.Linear:
    """A layer without bias of a matrix [outputs, inputs]."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = Tensor(np.ascontiguousarray(matrix), device=device)
    return layer


def spread(ck: Checkpoint, layer: int) -> tuple[list[float], list[float]]:
    """Powers of two for the parts of q|k|v and w1|w3: the spread of a part's outputs is about its weights' norm, the
    layer's gain included."""

    def factors(gain: np.ndarray, *matrices: np.ndarray) -> list[float]:
        sizes = [float(np.sqrt(np.mean(np.sum((m * gain) ** 2, axis=1)))) or 1.0 for m in matrices]
        return [2.0 ** round(math.log2(max(sizes) / size)) for size in sizes]

    att, ffn = ck.att_norm[layer], ck.ffn_norm[layer]
    return factors(att, ck.wq[layer], ck.wk[layer], ck.wv[layer]), factors(ffn, ck.w1[layer], ck.w3[layer])


def normalised(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm over the last axis."""
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * gain


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, heads, head_size]: neighbouring channels turn by the angles [T, head_size / 2]."""
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    cos, sin = (t.reshape(1, t.shape[0], 1, t.shape[1]) for t in (cos, sin))
    return Tensor.stack(a * cos - b * sin, a * sin + b * cos, dim=-1).reshape(*x.shape)


def attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """[B, T, heads * head_size] of q [B, T, heads, head_size] and keys, values [B, kv_heads, P, head_size]."""
    b, t, heads, size = q.shape
    kv_heads = keys.shape[1]
    q = q.reshape(b, t, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
    scores = q.matmul(keys.unsqueeze(2).transpose(-1, -2)) * (1 / math.sqrt(size))
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return weights.matmul(values.unsqueeze(2)).permute(0, 3, 1, 2, 4).reshape(b, t, heads * size)


def angles(c: Config) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [context, head_size / 2] of the rotary embedding."""
    turn = np.outer(np.arange(c.context), THETA ** (-np.arange(0, c.head_size, 2) / c.head_size))
    return np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)


def first_position(ck: Checkpoint) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """Keys and values [kv_heads, 1, head_size] of BOS per layer, and logits [vocabulary] of the first word."""
    reference = Reference(ck)
    logits = reference.step(BOS, 0).astype(np.float32)
    keys, values = (a[:, 0, :, None].astype(np.float32) for a in (reference.keys, reference.values))
    return list(zip(keys, values, strict=True)), logits
