"""The same network in a form that suits the tiles. Source: docs/network.md, section Rewriting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from coral.codegen.machine import GROUP, TILES, WORD_BYTES, ceil_div
from coral.codegen.network.graph import (
    POINT,
    Add,
    Concatenate,
    Conv,
    Dense,
    Depthwise,
    Interleave,
    L2Normalise,
    MaxPool,
    Multiply,
    Network,
    Requantise,
    Resize,
    Slice,
    Softmax,
    Stage,
    Window,
    whole_range,
)

DENSE_ROWS = 1024
"""Wide rows that dense layers may take on every tile; the last ones of a network count first, others are broadcast."""


def with_dense_layers(network: Network, *, shared: bool) -> Network:
    """Layers that see a whole map either as dense layers, which all tiles share, or as convolutions.

    ``shared``: one image at a time on all tiles. A vector that is cut over all tiles can only be read by dense layers.
    """

    def whole(s: Stage) -> bool:
        x, y = network.tensors[s.inputs[0]], network.tensors[s.output]
        map_window = s.window.kernel == (x.y, x.x) and s.window.pad == (0, 0)
        return isinstance(s, Dense) or (type(s) is Conv and (y.y, y.x) == (1, 1) and map_window)

    rows = {}
    for s in reversed(network.stages):
        if whole(s):
            x, n = network.tensors[s.inputs[0]], network.tensors[s.output].c
            mine = ceil_div(n, GROUP * TILES) * (x.y * x.x * ceil_div(x.c, WORD_BYTES) + 2)
            if sum(rows.values()) + mine <= DENSE_ROWS:
                rows[s.output] = mine

    def sharable(s: Stage) -> bool:
        return s.output in rows

    spreads: dict[str, bool] = {}
    for s in reversed(network.stages):
        readers = network.readers(s.output)
        spreads[s.output] = all(
            isinstance(r, Softmax | L2Normalise)
            or ((sharable(r) or (isinstance(r, Requantise) and r.at == POINT)) and spreads[r.output])
            for r in readers
        )
    stages = []
    for s in network.stages:
        if whole(s):
            assert isinstance(s, Conv)
            x, n = network.tensors[s.inputs[0]], len(s.weights)
            if shared and spreads[s.output] and sharable(s):
                s = Dense(s.inputs, s.output, s.clamps, s.weights.reshape(n, -1), s.bias, s.w_zp, s.mult)
            else:
                weights, window = s.weights.reshape(n, x.y, x.x, x.c), Window((x.y, x.x))
                s = Conv(s.inputs, s.output, s.clamps, weights, s.bias, s.w_zp, s.mult, window)
        stages.append(s)
    return replace(network, stages=tuple(stages))


def with_copies(network: Network) -> Network:
    """Exact copies where a tensor cannot lie in two places at once: inputs as operands or parts, parts of several
    concatenations, what padded maximum pools, resizes and other padded windows read.
    """
    tensors, stages, parts = dict(network.tensors), [], set()
    slices = {s.output for s in network.stages if isinstance(s, Slice)}
    from_host = {*network.inputs}
    for s in network.stages:
        from_host |= {s.output} if isinstance(s, Slice) and s.inputs[0] in from_host else set()
    placed = {n for s in network.stages if isinstance(s, Concatenate | Slice) for n in (*s.inputs, s.output)}

    def leaves(s: Stage, name: str) -> bool:
        x, y = network.tensors[name], network.tensors[s.output]
        sizes = zip((x.y, x.x), (y.y, y.x), s.window.stride, s.window.extent, s.window.pad, strict=True)
        return any(pad > 0 or (out - 1) * step + extent - pad > size for size, out, step, extent, pad in sizes)

    def must_copy(s: Stage, name: str) -> bool:
        if isinstance(s, Add | Multiply) or 0 in s.window.stride:
            return name in from_host
        if isinstance(s, Dense):  # an input lies whole on every tile only if nothing but dense layers reads it
            return name in from_host and not all(isinstance(r, Dense) for r in network.readers(name))
        if isinstance(s, Resize):
            others = [r for r in network.readers(name) if isinstance(r, Conv | Requantise | MaxPool)]
            beside = any(leaves(r, name) for r in others if not isinstance(r, Dense))
            return name in from_host or (not s.nearest and (beside or name in placed))
        if isinstance(s, Concatenate | Interleave):
            return name in from_host or name in parts or name in slices
        others = [r for r in network.readers(name) if isinstance(r, Conv | Requantise) and not isinstance(r, Dense)]
        beside = name in slices or any(leaves(r, name) for r in others)
        return isinstance(s, MaxPool) and leaves(s, name) and beside

    for s in network.stages:
        inputs = list(s.inputs)
        for k, name in enumerate(inputs):
            if must_copy(s, name):
                x = network.tensors[name]
                inputs[k] = f"{name}:copy{len(tensors)}"
                tensors[inputs[k]] = replace(x, name=inputs[k])
                stages.append(Requantise((name,), inputs[k], whole_range(x)))
            if isinstance(s, Concatenate | Interleave):
                parts.add(inputs[k])
        stages.append(replace(s, inputs=tuple(inputs)))
    return replace(network, tensors=tensors, stages=tuple(stages))


def with_padded_inputs(network: Network, *, always: bool) -> Network:
    """Where positions of an input are no whole words and anything but one convolution reads them, or one whose results
    lie between others: an exact copy first.

    ``always``: also in front of one convolution.
    """
    tensors, copies, padded = dict(network.tensors), [], {}
    placed = [s for s in network.stages if isinstance(s, Concatenate | Interleave | Slice)]
    parts = {name for s in placed for name in (*s.inputs, s.output)}
    parts |= {n for s in network.stages if isinstance(s, Add | Multiply) and parts & set(s.inputs) for n in s.inputs}
    for name in network.inputs:
        x, readers = tensors[name], list(network.readers(name))
        if x.c % WORD_BYTES == 0 or all(isinstance(r, Dense) for r in readers):
            continue
        if not always and len(readers) == 1 and type(readers[0]) is Conv and readers[0].output not in parts:
            continue
        padded[name] = copy = f"{name}:padded"
        tensors[copy] = replace(x, name=copy)
        identity = np.zeros((x.c, 1, 1, x.c), np.uint8)
        identity[range(x.c), 0, 0, range(x.c)] = 1
        copies.append(Conv((name,), copy, whole_range(x), identity, None, 0, 1.0))
    stages = (replace(s, inputs=tuple(padded.get(name, name) for name in s.inputs)) for s in network.stages)
    return replace(network, tensors=tensors, stages=(*copies, *stages))


def weight_rows(stages: Iterable[Stage]) -> int:
    """Wide rows that the weights of some stages take, about: blocks of depthwise layers take more."""
    total = 0
    for s in stages:
        if isinstance(s, Conv):
            n = s.weights.shape[-1] if isinstance(s, Depthwise) else len(s.weights)
            steps = s.weights.size // n if isinstance(s, Depthwise) else ceil_div(s.weights[0].size, WORD_BYTES)
            total += ceil_div(n, GROUP) * (1 + np.ndim(s.mult) + steps)
    return total


def with_cut_layers(network: Network, rows: int) -> Network:
    """Layers whose own weights exceed ``rows`` as several, each with some of the channels; then a concatenation."""
    tensors, stages = dict(network.tensors), []
    for s in network.stages:
        count = ceil_div(weight_rows([s]), rows)
        groups = ceil_div(len(s.weights), GROUP) if isinstance(s, Conv) and not isinstance(s, Depthwise) else 1
        if min(count, groups) < 2:
            stages.append(s)
            continue
        assert isinstance(s, Conv)
        n, size = len(s.weights), GROUP * max(groups // count, 1)
        parts = []
        for start in range(0, n, size):
            mine = slice(start, min(start + size, n))
            name = f"{s.output}:{start}"
            tensors[name] = replace(tensors[s.output], name=name, c=mine.stop - start)
            bias = None if s.bias is None else s.bias[mine]
            mult = np.asarray(s.mult)[mine] if np.ndim(s.mult) else s.mult
            stages.append(replace(s, output=name, weights=s.weights[mine], bias=bias, mult=mult))
            parts.append(name)
        stages.append(Concatenate(tuple(parts), s.output, s.clamps))
    return replace(network, tensors=tensors, stages=tuple(stages))
