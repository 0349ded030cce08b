"""A decoder's parameters as rows of wide memory. Source: docs/transformer.md, Memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from coral.codegen.machine import ALL_TILES, GROUP, ROW_BYTES, TILES, WORD_BYTES, ceil_div
from coral.codegen.network.wide import identity_rows, selection_rows
from coral.codegen.transformer.graph import ONE_COLUMNS, ZERO, Block, Dense, Residual
from coral.codegen.transformer.plan import Layout, Plan, Share

Rows = NDArray[np.uint8]
"""Rows of wide memory, uint8 [n, 256]."""
Part = tuple[int, int, Rows]
"""Tiles, first row, rows."""


def matrix(weights: NDArray[np.uint8], mult: NDArray[np.float32], bias: NDArray[np.int32] | None = None) -> Rows:
    """Headers (multipliers, with ``bias`` also those) of all groups of 64 outputs, then a row per group and word."""
    n, k = weights.shape
    groups, steps = ceil_div(n, GROUP), k // WORD_BYTES
    padded = np.full((groups * GROUP, k), ZERO, np.uint8)
    padded[:n] = weights
    body = padded.reshape(groups, GROUP, steps, WORD_BYTES).swapaxes(1, 2).reshape(-1, ROW_BYTES)
    headers = np.ones((groups * GROUP,), "<f4")
    headers[:n] = mult
    parts = [headers.reshape(groups, 1, GROUP).view(np.uint8)]
    if bias is not None:
        addends = np.zeros((groups * GROUP,), "<i4")
        addends[:n] = bias
        parts.append(addends.reshape(groups, 1, GROUP).view(np.uint8))
    return np.concatenate([np.concatenate(parts, 1).reshape(-1, ROW_BYTES), body])


def sign_rows() -> Rows:
    """Weights 1 and -1 on the diagonal of four columns, with zero point 1."""
    rows = np.ones((2, ROW_BYTES), np.uint8)
    diagonal = [5 * c for c in range(WORD_BYTES)]
    rows[0, diagonal], rows[1, diagonal] = 2, 0
    return rows


def constants() -> Rows:
    """What every tile holds."""
    return np.concatenate([identity_rows(), sign_rows(), selection_rows()])


def _heads(plan: Plan, block: Block, share: Share) -> Rows:
    g, size = plan.g, plan.g.head_size
    first = share.first // (g.heads // g.kv_heads)
    kv = slice(first * size, (first + plan.kv_heads) * size)
    q = slice(share.first * size, (share.first + share.count) * size)
    k = slice(g.dim + kv.start, g.dim + kv.stop)
    qk = block.qk
    parts = [matrix(np.concatenate([qk.weights[q], qk.weights[k]]), np.concatenate([qk.mult[q], qk.mult[k]]))]
    per_head = (plan.kv_heads, ONE_COLUMNS + size)
    weights = np.full((*per_head, g.dim), ZERO, np.uint8)
    mult, bias = np.ones(per_head, np.float32), np.zeros(per_head, np.int32)
    weights[:, ONE_COLUMNS:] = block.v.weights[kv].reshape(plan.kv_heads, size, g.dim)
    mult[:, ONE_COLUMNS:] = block.v.mult[kv].reshape(plan.kv_heads, size)
    bias[:, :ONE_COLUMNS] = 1
    parts.append(matrix(weights.reshape(-1, g.dim), mult.reshape(-1), bias.reshape(-1)))
    if plan.form.loop:
        numbers = np.array([block.score, block.exp, block.product], "<f4")
        parts.insert(0, np.repeat(numbers, GROUP).view(np.uint8).reshape(-1, ROW_BYTES))
    return np.concatenate(parts)


def _outputs(plan: Plan, block: Block, share: Share) -> Rows:
    """wo and w2, each with the residual as more inputs; heads give their even channels before the odd ones."""
    g, own = plan.g, slice(share.first, share.first + share.count)

    def rows(layer: Residual, order: NDArray[np.int64] | slice) -> Rows:
        residual = np.full((share.count, share.count), ZERO, np.uint8)
        np.fill_diagonal(residual, layer.residual[own] + ZERO)
        return matrix(np.concatenate([layer.weights[own][:, order], residual], 1), layer.mult[own])

    channels = np.arange(g.dim).reshape(g.heads, g.head_size // 2, 2).swapaxes(1, 2).reshape(-1)
    wo = rows(block.wo, channels)
    return np.concatenate([np.pad(wo, ((0, plan.wo_rows - len(wo)), (0, 0))), rows(block.w2, slice(None))])


def _ffn(plan: Plan, block: Block, share: Share) -> Rows:
    own = slice(share.first, share.first + share.count)
    return np.concatenate([matrix(layer.weights[own], layer.mult[own]) for layer in (block.w1, block.w3)])


def _layer(plan: Plan, block: Block, layout: Layout) -> Iterator[Part]:
    makers = ((_heads, layout.heads), (_outputs, layout.outputs), (_ffn, layout.ffn))
    for make, shares in makers:
        for share in shares:
            yield 1 << share.tile, share.row, make(plan, block, share)


def _classifier(plan: Plan, head: Dense) -> Iterator[Part]:
    size = plan.logit_groups * GROUP
    for t in range(TILES):
        own = slice(t * size, (t + 1) * size)
        if len(head.weights[own]):
            yield 1 << t, plan.logit_row, matrix(head.weights[own], head.mult[own])


def parameters(plan: Plan) -> list[Part]:
    """Everything that the caching program loads."""
    parts: list[Part] = [(ALL_TILES, 0, constants())]
    for block, layout in zip(plan.model.blocks, plan.layouts, strict=True):
        parts += _layer(plan, block, layout)
    if plan.logit_groups and plan.model.classifier is not None:
        parts += _classifier(plan, plan.model.classifier)
    return parts
