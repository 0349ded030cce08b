"""A large classifier in two steps: the chip finds the largest logit of every block of words, the host computes the
logits of the blocks that matter. What is chosen is exactly what all logits would give.

Source: docs/stories.md, Large vocabularies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral import numerics
from coral.codegen import network as nw

BLOCK, TOKENS = 64, 8
"""Words of a block; tokens whose logits the host computes together. Both are fixed, so that a logit is the same sum
whatever else is computed."""
IMAGES = 250
"""Calls take so many images of whole blocks, if there are as many."""
ZERO, LIMIT = 128, 127
FLOAT_ERROR = 2.0**-23
Floats = NDArray[np.float32]


class Shortlist:
    """A classifier float32 [vocabulary, dim], also in codes. ``largest``: absolute value of usual logits."""

    def __init__(self, matrix: Floats, largest: float) -> None:
        self.vocabulary, self.dim = matrix.shape
        blocks = -(-self.vocabulary // BLOCK)
        each = -(-blocks // IMAGES)
        self.images, self.each = -(-blocks // each), each
        self.blocks = self.images * each
        words = np.minimum(np.arange(self.blocks * BLOCK), self.vocabulary - 1)
        self.scale = float(np.float32(max(float(np.abs(matrix).max()), 1e-6) / LIMIT))
        self.step = float(np.float32(max(largest, 1e-6) / LIMIT))
        codes = numerics.quantise(matrix, self.scale, ZERO)
        missed = matrix - numerics.dequantise(codes, self.scale, ZERO).astype(np.float64)
        self.matrix = np.ascontiguousarray(matrix[words].reshape(self.blocks, BLOCK, self.dim))
        self.codes = codes[words].reshape(self.images, each, BLOCK, self.dim)
        lengths = (np.sqrt((a.astype(np.float64) ** 2).sum(1))[words] for a in (matrix, missed))
        self.length, self.missed = (a.reshape(self.blocks, BLOCK).max(1) for a in lengths)
        """Per block, largest length of a word's row, and of what its codes lack of it."""

    def tokens(self, x: Floats) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Codes and scale of every row of x [rows, dim]."""
        scales = np.maximum(np.abs(x).max(1) / np.float32(LIMIT), np.float32(1e-6)).astype(np.float32)
        return np.stack([numerics.quantise(a, s, ZERO) for a, s in zip(x, scales, strict=True)]), scales

    def network(self, x: Floats) -> nw.Network:
        """Tokens x [rows, dim] as the weights of a convolution over the words; the largest code of every block.

        Only weights and multipliers depend on x, not the instructions.
        """
        codes, scales = self.tokens(x)
        rows, limits = len(x), nw.Window((1, BLOCK), (1, BLOCK))
        mult = np.asarray(numerics.multiplier(self.scale, scales, self.step), np.float32)
        clamps = float(-ZERO), float(LIMIT)
        tensors = {
            "words": nw.Tensor("words", self.each, BLOCK, self.dim, ZERO, self.scale),
            "logits": nw.Tensor("logits", self.each, BLOCK, rows, ZERO, self.step),
            "largest": nw.Tensor("largest", self.each, 1, rows, ZERO, self.step),
        }
        stages = (
            nw.Conv(("words",), "logits", clamps, codes[:, None, None], None, ZERO, mult),
            nw.MaxPool(("logits",), "largest", clamps, limits),
        )
        return nw.Network(f"classifier_{self.vocabulary}x{self.dim}", tensors, ("words",), stages, ("largest",))

    def bounds(self, x: Floats, largest: NDArray[np.uint8]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Between what the largest logit of every block lies, [rows, blocks], by its code [rows, blocks].

        A logit is w x, its code stands for w' x'; w x - w' x' = w (x - x') + (w - w') x'. The products' lengths bound
        both terms; rounding of the code and of the host's float32 sum come on top. Codes at an end say nothing beyond.
        """
        codes, scales = self.tokens(x)
        seen = (codes.astype(np.float64) - ZERO) * scales[:, None].astype(np.float64)
        lacks, lengths, exact = (np.sqrt((a**2).sum(1))[:, None] for a in (x - seen, seen, x.astype(np.float64)))
        error = self.length * lacks + self.missed * lengths + FLOAT_ERROR * self.dim * self.length * exact
        error += (0.5 + 1e-3) * self.step
        centre = (largest.astype(np.float64) - ZERO) * self.step
        return (
            np.where(largest == 0, -np.inf, centre - error),
            np.where(largest == ZERO + LIMIT, np.inf, centre + error),
        )

    def logits(self, x: Floats, wanted: NDArray[np.bool_] | None = None) -> Floats:
        """Logits float32 [rows, vocabulary] of x [rows, dim]; -inf in blocks that are not ``wanted`` [rows, blocks] and
        were not needed for others either."""
        out = np.full((len(x), self.blocks, BLOCK), -np.inf, np.float32)
        for first in range(0, len(x), TOKENS):
            some = slice(first, min(first + TOKENS, len(x)))
            columns = np.zeros((self.dim, TOKENS), np.float32)
            columns[:, : some.stop - first] = x[some].T
            if wanted is None:
                out[some] = np.matmul(self.matrix, columns).transpose(2, 0, 1)[: some.stop - first]
            else:
                chosen = np.flatnonzero(wanted[some].any(0))
                sums = np.matmul(self.matrix[chosen], columns).transpose(2, 0, 1)[: some.stop - first]
                out[some, chosen] = sums
        return out.reshape(len(x), -1)[:, : self.vocabulary]

    def chosen(self, x: Floats, largest: NDArray[np.uint8], temperature: float, top_p: float) -> Floats:
        """Logits of at least the words among which ``story.choose`` picks, -inf for others: it picks as from all."""
        lower, upper = self.bounds(x, largest)
        best = lower.max(1, keepdims=True)
        wanted = upper >= best
        if temperature == 0:
            return self.logits(x, wanted)
        while True:
            found = self.logits(x, wanted)
            known = np.asarray(np.isfinite(self._by_block(found)).all(axis=2))
            open_rows = [r for r in range(len(x)) if not _settled(found[r], upper[r][~known[r]], temperature, top_p)]
            if not open_rows:
                return found
            for r in open_rows:
                rest = np.where(known[r], -np.inf, upper[r])
                wanted[r] = known[r]
                wanted[r, np.argsort(-rest, kind="stable")[: max(4, int(known[r].sum()))]] = True

    def _by_block(self, logits: Floats) -> Floats:
        missing = self.blocks * BLOCK - self.vocabulary
        return np.pad(logits, ((0, 0), (0, missing))).reshape(len(logits), self.blocks, BLOCK)


def _settled(found: Floats, upper: NDArray[np.float64], temperature: float, top_p: float) -> bool:
    """Whether blocks whose logits are at most ``upper`` hold none of the likeliest words that have ``top_p``."""
    if not len(upper):
        return True
    if top_p >= 1 or not np.isfinite(upper).all():
        return False
    heat = max(temperature, 1e-3)
    scaled = found.astype(np.float64) / heat
    shares = np.exp(scaled - scaled.max())
    others = np.exp(upper / heat - scaled.max())
    total, ranked = shares.sum(), np.sort(shares)[::-1]
    before = ranked.cumsum() - ranked
    few, many = (
        max(int((before < top_p * z).sum()), 1)
        for z in (total * (1 - 1e-9), (total + BLOCK * others.sum()) * (1 + 1e-9))
    )
    return few == many and bool(others.max() < ranked[many - 1])
