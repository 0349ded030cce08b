"""Neighbouring layers trade scale, channel by channel, so that one weight scale fits all channels of each.

ReLU and max pools commute with a positive factor: what a layer's output channel is divided by, its readers' weights for
that channel are multiplied with. Factors are powers of two, so the float model gives the same bits.
Source: docs/quantize.md, "Balanced channels".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad import nn

from coral.quantize.calibrate import Trace, outputs_of, record
from coral.quantize.fold import State, close
from coral.quantize.model_graph import ModelGraph

SWEEPS = 12
"""A chain of layers settles in fewer."""


def balance(graph: ModelGraph, batches: list[tuple[Any, ...]]) -> tuple[ModelGraph, set[str]]:
    """The same float model with balanced channels, and the names of the layers whose weights changed.

    Every pair of neighbours is left as it was if balancing it changes the model's output on the calibration data.
    """
    layers = {n: layer for n, layer in graph.layers.items() if type(layer) in (nn.Linear, nn.Conv2d)}
    if len(layers) < 2:
        return graph, set()
    trace = record(graph, layers, batches)
    readers = {name: found for name in layers if (found := _readers(name, layers, trace))}

    def result(chosen: Mapping[str, list[str]]) -> dict[str, State]:
        states = {name: State(layer) for name, layer in layers.items()}
        before = {name: state.weight for name, state in states.items()}
        for _ in range(SWEEPS):
            for name, found in chosen.items():
                _trade(states[name], [states[reader] for reader in found])
        return {name: state for name, state in states.items() if not np.array_equal(state.weight, before[name])}

    def holds(chosen: Mapping[str, list[str]]) -> bool:
        changed = {id(state.layer): state.result() for state in result(chosen).values()}
        outputs = outputs_of(graph.substitute(changed, keep_jits=False), batches) if changed else trace.outputs
        return all(close(a, b) for a, b in zip(outputs, trace.outputs, strict=True))

    if not holds(readers):
        kept: dict[str, list[str]] = {}
        for name, found in readers.items():
            if holds({**kept, name: found}):
                kept[name] = found
        readers = kept
    states = result(readers)
    if not states:
        return graph, set()
    return ModelGraph(graph.substitute({id(state.layer): state.result() for state in states.values()})), set(states)


def _readers(name: str, layers: Mapping[str, Any], trace: Trace) -> list[str]:
    """The layers that take ``name``'s output, if nothing but factors per channel can happen on the way; or none."""
    found, channels = [], int(layers[name].weight.shape[0])
    for reader, seen in trace.observations.items():
        sources = list(seen.sources)
        if all(leaf.key != name for source in sources if source for leaf in source.walk()):
            continue
        only = sources[0] if len(sources) == 1 else None
        if only is None or only.parts or only.bounds[1] != np.inf or seen.attribute:
            return []
        layer = layers[reader]
        width = int(layer.weight.shape[1]) * (1 if isinstance(layer, nn.Linear) else layer.groups)
        depthwise = not isinstance(layer, nn.Linear) and layer.groups == channels
        if width % channels or not (isinstance(layer, nn.Linear) or layer.groups == 1 or depthwise):
            return []
        found.append(reader)
    return [] if trace.observations[name].attribute else found


def _by_input(state: State, channels: int) -> NDArray[np.float64]:
    """A view of a reader's weights ``[N or 1, channels, ...]`` by the input channel that they belong to."""
    weight, layer = state.weight, state.layer
    if isinstance(layer, nn.Linear) or layer.groups == 1:
        return weight.reshape(len(weight), channels, -1)
    return weight.reshape(1, channels, -1)


def _trade(state: State, readers: list[State]) -> None:
    own = np.abs(state.weight.reshape(len(state.weight), -1)).max(1)
    theirs = np.max([np.abs(_by_input(reader, len(own))).max((0, 2)) for reader in readers], axis=0)
    alive = (own > 0) & (theirs > 0)
    if not alive.any():
        return
    ratio = np.where(alive, own / own.max(), 1) / np.where(alive, theirs / theirs.max(), 1)
    factors = np.where(alive, np.exp2(np.trunc(np.log2(ratio) / 2)), 1)
    state.scale(1 / factors)
    for reader in readers:
        shape = reader.weight.shape
        reader.weight = (_by_input(reader, len(own)) * factors.reshape(1, -1, 1)).reshape(shape)
