"""A quantised decoder: what front ends build, the generator places and the bit model computes.

Every activation is uint8 with zero point 128, every weight uint8 with zero point 128 and one float32 multiplier per
output. Source: docs/transformer.md, Numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral.codegen.errors import ShapeError
from coral.codegen.machine import WORD_BYTES

ZERO = 128
LARGEST = 127
"""Largest code less zero point that stays symmetric."""
ONE_COLUMNS = 4
"""Columns of a value row that hold the constant one, for the denominator of the softmax."""
MAX_HEAD = 64
"""Channels of a head that fit the columns of a row."""


class Heads:
    """What follows from the sizes of any decoder."""

    dim: int
    heads: int
    kv_heads: int

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.dim // self.heads

    @property
    def kv_dim(self) -> int:
        """Channels of all keys (or values) of a position."""
        return self.kv_heads * self.head_size


@dataclass(frozen=True)
class Geometry(Heads):
    """Sizes of a decoder. ``theta``: base of the rotary embedding's wavelengths."""

    dim: int
    hidden: int
    heads: int
    kv_heads: int
    context: int
    theta: float = 10000.0

    def __post_init__(self) -> None:
        if min(self.dim, self.hidden, self.heads, self.kv_heads, self.context) < 1:
            raise ShapeError(f"transformer: all sizes must be positive, not {self}")
        rules = (
            (self.dim % 16 == 0, f"dim {self.dim} must be a multiple of 16"),
            (self.hidden % 4 == 0, f"hidden {self.hidden} must be a multiple of 4"),
            (self.dim % self.heads == 0, f"dim {self.dim} is no multiple of the {self.heads} heads"),
            (self.heads % self.kv_heads == 0, f"{self.heads} heads share {self.kv_heads} key/value heads unevenly"),
            (
                self.head_size % 8 == 0 and self.head_size <= MAX_HEAD,
                f"head size {self.head_size} must be a multiple of 8, at most {MAX_HEAD}",
            ),
            (self.context <= 1 << 12, f"context {self.context} exceeds 4096 positions"),
        )
        for holds, rule in rules:
            if not holds:
                raise ShapeError(f"transformer: {rule}")

    def rotation(self, position: int) -> NDArray[np.uint8]:
        """Rotary embedding of a position as a matrix of codes, uint8 [head_size, head_size] (outputs, inputs).

        Pairs (2j, 2j + 1) turn by position * theta^(-2j / head_size); entries are 127 times cosines and sines.
        """
        matrix = np.full((self.head_size, self.head_size), ZERO, np.int64)
        for j in range(0, self.head_size, 2):
            angle = position * self.theta ** (-j / self.head_size)
            c, s = round(LARGEST * np.cos(angle)), round(LARGEST * np.sin(angle))
            matrix[j : j + 2, j : j + 2] += [[c, -s], [s, c]]
        return matrix.astype(np.uint8)

    def quads(self, positions: int) -> int:
        """Words that hold a byte of every position."""
        return -(-positions // WORD_BYTES)


@dataclass(frozen=True)
class Dense:
    """A matrix of codes uint8 [outputs, inputs] and the multipliers of its outputs, float32 [outputs]."""

    weights: NDArray[np.uint8]
    mult: NDArray[np.float32]


@dataclass(frozen=True)
class Residual(Dense):
    """A matrix whose output c also gets ``residual[c]`` (uint8, 1..127) times element c of the residual vector."""

    residual: NDArray[np.uint8]


@dataclass(frozen=True)
class Gate:
    """SiLU by a LOGISTIC table and a product, where a chip takes no table of its own: real value of a step of w1's
    results, and the multiplier of their product with the logistic function in steps of 1/256."""

    step: float
    product: float


@dataclass(frozen=True)
class Block:
    """One layer. ``qk``: rows of all queries' heads, then of all keys'. ``score``: multiplier of query times key;
    ``exp``: real value of a score's step; ``product``: multiplier of SiLU(w1) times w3; ``k_scale``, ``v_scale``: of
    the cache's codes; ``gate``: only in a model without ``own_tables``."""

    qk: Dense
    v: Dense
    wo: Residual
    w1: Dense
    w3: Dense
    w2: Residual
    score: float
    exp: float
    product: float
    k_scale: float
    v_scale: float
    gate: Gate | None = None


@dataclass(frozen=True)
class Transformer:
    """A quantised decoder between embedding and final norm. ``norm``: multiplier behind a normalisation; ``silu``: step
    of SiLU(w1 x); ``own_tables``: the non-linear unit takes tables that no compiler's program has (SiLU, reciprocal);
    ``x_scale``, ``y_scale``: of the codes that go in and come out; ``classifier``: optional, its gains
    folded in, with ``logit_scale``. Raises ShapeError for arrays that do not fit the geometry."""

    name: str
    geometry: Geometry
    blocks: tuple[Block, ...]
    norm: float
    silu: float
    x_scale: float
    y_scale: float
    classifier: Dense | None = None
    logit_scale: float = 0.0
    own_tables: bool = True

    def __post_init__(self) -> None:
        g = self.geometry
        shapes = {
            "qk": (g.dim + g.kv_dim, g.dim),
            "v": (g.kv_dim, g.dim),
            "wo": (g.dim, g.dim),
            "w1": (g.hidden, g.dim),
            "w3": (g.hidden, g.dim),
            "w2": (g.dim, g.hidden),
        }
        named = [
            (f"layer {k} {name}", getattr(b, name), s) for k, b in enumerate(self.blocks) for name, s in shapes.items()
        ]
        if self.classifier is not None:
            named.append(("classifier", self.classifier, (len(self.classifier.weights), g.dim)))
        if any((b.gate is None) != self.own_tables for b in self.blocks):
            raise ShapeError(f"{self.name}: every layer has a gate where tables of our own are not used, else none")
        for name, dense, shape in named:
            extra = [dense.residual] if isinstance(dense, Residual) else []
            if dense.weights.shape != shape or any(a.shape != shape[:1] for a in (dense.mult, *extra)):
                raise ShapeError(f"{self.name}: {name} is {dense.weights.shape} {dense.mult.shape}, needed is {shape}")
            if dense.weights.dtype != np.uint8 or dense.mult.dtype != np.float32:
                raise ShapeError(f"{self.name}: {name} is {dense.weights.dtype} {dense.mult.dtype}, not uint8, float32")
