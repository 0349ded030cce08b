"""Chip or host: predicted seconds of both, and the rule that decides. Source: docs/backend.md, "Where a layer runs"."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from tinygrad.uop import Ops
from tinygrad.uop.ops import UOp

from coral import CoralError, timing
from coral.backend.chain import Chain
from coral.backend.layers import Layer
from coral.quantize import cost

CHIP_PRODUCTS_PER_CYCLE = timing.TILES * 4 * timing.COLUMNS_PER_CYCLE / timing.CHIP_PER_ESTIMATE
"""If all tiles have work and all columns of a step are used."""
CHIP_VALUES_PER_CYCLE = timing.TILES * 4
CHIP_LAYER_CYCLES = 400
INSTRUCTION_BYTES = 6000
"""Of a call: about a hundred words for a layer more."""
FRAGMENTS = 12
"""So many chip programs with host code between them in one schedule count as a fragmented network."""
RULES = "auto", "chip", "cost"


class PlacementError(CoralError):
    """CORAL_PLACE has a value that is none of the rules."""


def rule() -> str:
    """CORAL_PLACE: "auto", "chip" or "cost". :raises PlacementError: another value."""
    chosen = os.environ.get("CORAL_PLACE") or "auto"
    if chosen not in RULES:
        raise PlacementError(f"CORAL_PLACE is {chosen!r}; it can be {', '.join(RULES)}")
    return chosen


def chip_seconds(chain: Chain) -> float:
    """Predicted seconds of one call for all the chain's images, weights being on the chip."""
    moved = [sum(math.prod(chain.values[value].image) for value, _ in pairs) for pairs in (chain.inputs, chain.outputs)]
    cycles = sum(CHIP_LAYER_CYCLES + _products(step.layer) for step in chain.steps)
    return timing.call_seconds(cycles, INSTRUCTION_BYTES + moved[0], moved[1])


def host_seconds(chain: Chain) -> float:
    """Predicted seconds of the same layers as compiled code."""
    return cost.host_seconds(sum(step.layer.operations for step in chain.steps), len(chain.steps))


def kernel_seconds(ast: UOp) -> float:
    """Predicted seconds of any scheduled kernel on the host: passes of its loops times the arithmetic in it."""
    nodes = list(ast.toposort())
    passes = math.prod(int(node.src[0].val) for node in nodes if node.op is Ops.RANGE and node.src[0].op is Ops.CONST)
    arithmetic = sum(node.dtype.name not in ("weakint", "void") for node in nodes if node.src)
    return cost.host_seconds(passes * arithmetic)


def on_chip(chains: Sequence[Chain]) -> list[bool]:
    """Which programs of one schedule go to the chip."""
    chosen = rule()
    fragmented = len(chains) >= FRAGMENTS
    return [
        chosen == "chip"
        or (chosen == "auto" and not fragmented and any(step.layer.terms for step in chain.steps))
        or chip_seconds(chain) < host_seconds(chain)
        for chain in chains
    ]


def prediction(chain: Chain) -> str:
    """Both times in words."""
    return f"predicted {chip_seconds(chain) * 1e6:,.0f} µs on the chip, {host_seconds(chain) * 1e6:,.0f} µs on the host"


def _products(layer: Layer) -> float:
    return layer.operations / 2 / CHIP_PRODUCTS_PER_CYCLE if layer.terms else layer.operations / CHIP_VALUES_PER_CYCLE
