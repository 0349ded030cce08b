"""Networks that one program cannot hold, as several that follow each other.

Source: docs/network.md, section Several programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from math import inf
from typing import Any

from coral.codegen.errors import ShapeError
from coral.codegen.machine import ceil_div
from coral.codegen.network.graph import Concatenate, Interleave, Network, Slice
from coral.codegen.network.program import NetworkProgram
from coral.codegen.network.rewrite import weight_rows, with_cut_layers

CALL_SECONDS = 142e-6
IN_BYTES_PER_SECOND = 330e6
OUT_BYTES_PER_SECOND = 55e6


def split(network: Network, *, batch: int = 1, rows: int | None = None) -> list[Network]:
    """``network`` as networks that follow each other: each reads inputs of the whole or outputs of earlier ones, under
    the whole's names of tensors. One that a program can hold (with streamed weights if need be) is returned as it is.

    ``rows``: wide rows of all tiles that the weights of one should take, without streaming (a chip has about 30,000).
    ShapeError if a single layer, or 64 outputs of it, does not fit.
    """
    return [p.network for p in programs(network, batch=batch, rows=rows)]


def programs(network: Network, *, batch: int = 1, rows: int | None = None, **places: Any) -> list[NetworkProgram]:
    """As ``split``, the programs; ``places`` as for NetworkProgram."""
    return _programs(without_dead_stages(network), rows, partial(NetworkProgram, batch=batch, **places))


def _programs(network: Network, rows: int | None, make: Callable[..., NetworkProgram]) -> list[NetworkProgram]:
    needed, cut = weight_rows(network.stages), network if rows is None else with_cut_layers(network, rows)
    edges = _edges(cut, rows or needed)
    if len(edges) == 2:
        try:
            return [make(network, stream=rows is None)]
        except ShapeError:
            edges = _edges(cut, ceil_div(needed, 2), ceil_div(len(cut.stages), 2))
            if len(edges) == 2:
                raise
    parts = [part(cut, a, b, f"{network.name}.{index}") for index, (a, b) in enumerate(pairwise(edges))]
    return [program for p in parts for program in _programs(p, rows, make)]


def without_dead_stages(network: Network) -> Network:
    """Only what outputs depend on."""
    needed, stages = set(network.outputs), []
    for s in reversed(network.stages):
        if s.output in needed:
            needed |= set(s.inputs)
            stages.append(s)
    return network if len(stages) == len(network.stages) else replace(network, stages=tuple(reversed(stages)))


def part(network: Network, first: int, last: int, name: str) -> Network:
    """Stages ``first``..``last`` - 1 as a network; what later stages or the whole's outputs need are its outputs."""
    needed = {*network.outputs, *(n for s in network.stages[last:] for n in s.inputs)}
    stages = network.stages[first:last]
    written = {s.output for s in stages}
    outputs = tuple(s.output for s in stages if s.output in needed)
    inputs = tuple(dict.fromkeys(n for s in stages for n in s.inputs if n not in written))
    tensors = {n: t for n, t in network.tensors.items() if n in written or n in inputs}
    return Network(name, tensors, inputs, stages, outputs)


def _edges(network: Network, rows: int, most: int | None = None) -> list[int]:
    """Where to cut, 0 and the number of stages included: the least time for calls and transfers with at most ``rows``
    rows of weights (or a single stage), and at most ``most`` stages, in a part.
    """
    stages, count = network.stages, len(network.stages)
    weights = [weight_rows([s]) for s in stages]

    @cache
    def transfers(first: int, last: int) -> float:
        p = part(network, first, last, network.name)
        into, out = (sum(network.tensors[n].size for n in names) for names in (p.inputs, p.outputs))
        return CALL_SECONDS + into / IN_BYTES_PER_SECOND + out / OUT_BYTES_PER_SECOND

    best: list[tuple[float, int]] = [(0.0, 0)]
    for last in range(1, count + 1):
        found = (inf, last - 1)
        for first in range(last - 1, -1, -1):
            if found[0] < inf and (sum(weights[first:last]) > rows or last - first > (most or count)):
                break
            if first == 0 or not isinstance(stages[first], Concatenate | Slice | Interleave):
                found = min(found, (best[first][0] + transfers(first, last), first))
        best.append(found)
    edges = [count]
    while edges[-1]:
        edges.append(best[edges[-1]][1])
    return edges[::-1]


__all__ = ["programs", "split"]
