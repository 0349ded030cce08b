"""Networks whose image is too large for one program, as networks of bands of rows that know nothing of each other.

Source: docs/network.md, section Rows over several programs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from coral.codegen.errors import ShapeError
from coral.codegen.network.graph import (
    Add,
    AveragePool,
    Concatenate,
    Conv,
    Dense,
    L2Normalise,
    MaxPool,
    Multiply,
    Network,
    Pad,
    Requantise,
    Resize,
    Slice,
    Softmax,
    Stage,
    Tensor,
    TransposeConv,
)

Rows = tuple[int, int]
"""First row, and behind the last."""
POINTWISE: TypeAlias = Add | Multiply | Concatenate | Softmax | L2Normalise
WINDOWS: TypeAlias = Conv | MaxPool | AveragePool | Requantise
MOST_SHARED = 0.8
"""Share of an input that a band may read; with more, bands save nothing."""


@dataclass(frozen=True)
class RowBand:
    """``network`` computes rows ``rows`` of every tensor of the whole that it names; ``wanted`` of each output."""

    network: Network
    rows: dict[str, Rows]
    wanted: dict[str, Rows]


def in_rows(network: Network, count: int) -> list[RowBand]:
    """``count`` networks for one image, whose outputs' wanted rows are together those of ``network``.

    :raises ShapeError: stages that see too much of the image, of kinds that cannot be cut, or outputs of too few rows
    """
    sizes = [network.tensors[name].y for name in network.outputs]
    if min(sizes) < count:
        raise ShapeError(f"network {network.name!r}: an output of {min(sizes)} rows is not cut into {count} bands")
    bands = []
    for k in range(count):
        wanted = {n: (y * k // count, y * (k + 1) // count) for n, y in zip(network.outputs, sizes, strict=True)}
        rows = _needed(network, wanted)
        for name in network.inputs:
            start, end = rows.get(name, (0, 0))
            if not 0 < end - start <= max(MOST_SHARED * network.tensors[name].y, 1):
                raise ShapeError(
                    f"network {network.name!r}: a band of {count} reads rows {start}..{end - 1} of {name!r}"
                )
        bands.append(RowBand(_cut(network, rows, f"{network.name}.{k}"), rows, wanted))
    return bands


def _needed(network: Network, wanted: dict[str, Rows]) -> dict[str, Rows]:
    """Rows of every tensor that a band holds."""
    rows = dict(wanted)
    for s in reversed(network.stages):
        for name in s.inputs if s.output in rows else ():
            start, end = _read(network, s, network.tensors[name], rows[s.output])
            a, b = rows.get(name, (start, end))
            rows[name] = min(a, start), max(b, end)
    return rows


def _read(network: Network, s: Stage, x: Tensor, rows: Rows) -> Rows:
    """Rows of an input that a stage reads for some rows of its output."""
    first, last = rows[0], rows[1] - 1
    if isinstance(s, POINTWISE):
        start, end = rows
    elif isinstance(s, Resize):
        start, end = (first - 1) // 2, last // 2 + 2
    elif isinstance(s, Slice):
        start, end = (s.first[0] + s.step[0] * r + d for r, d in ((first, 0), (last, 1)))
    elif isinstance(s, Pad):
        start, end = first - s.before[0], last - s.before[0] + 1
    elif isinstance(s, WINDOWS) and not isinstance(s, Dense | TransposeConv):
        step, pad = s.window.stride[0], s.window.pad[0]
        start, end = first * step - pad, last * step - pad + s.window.extent[0]
    else:
        raise ShapeError(f"network {network.name!r}: {type(s).__name__} {s.output!r} is not cut into bands of rows")
    start, end = max(start, 0), min(end, x.y)
    if start >= end:
        raise ShapeError(f"network {network.name!r}: rows {rows} of {s.output!r} read nothing of {x.name!r}")
    return start, end


def _cut(network: Network, rows: dict[str, Rows], name: str) -> Network:
    """The network of a band: tensors of their rows, windows that begin where they did."""
    tensors = {n: replace(network.tensors[n], y=b - a) for n, (a, b) in rows.items()}
    stages: list[Stage] = []
    for s in network.stages:
        if s.output not in rows:
            continue
        first, start = rows[s.output][0], rows[s.inputs[0]][0]
        if isinstance(s, POINTWISE):
            inputs = list(s.inputs)
            for k, n in enumerate(inputs):
                if rows[n] != rows[s.output]:
                    inputs[k] = f"{n}:{first}..{rows[s.output][1]}"
                    tensors[inputs[k]] = replace(tensors[n], name=inputs[k], y=tensors[s.output].y)
                    cut = Slice((n,), inputs[k], (0.0, 0.0), first=(first - rows[n][0], 0))
                    stages += [] if any(other.output == inputs[k] for other in stages) else [cut]
            s = replace(s, inputs=tuple(inputs))
        elif isinstance(s, Resize):
            y, doubled = tensors[s.output], f"{s.output}:doubled"
            tensors[doubled] = replace(y, name=doubled, y=2 * tensors[s.inputs[0]].y)
            stages.append(replace(s, output=doubled))
            s = Slice((doubled,), s.output, s.clamps, first=(first - 2 * start, 0))
        elif isinstance(s, Slice):
            s = replace(s, first=(s.first[0] + s.step[0] * first - start, s.first[1]))
        elif isinstance(s, Pad):
            s = replace(s, before=(s.before[0] + start - first, s.before[1]))
        elif isinstance(s, WINDOWS):
            pad = start - (first * s.window.stride[0] - s.window.pad[0])
            s = replace(s, at=replace(s.window, pad=(pad, s.window.pad[1])))
        stages.append(s)
    inputs, outputs = (tuple(n for n in names if n in rows) for names in (network.inputs, network.outputs))
    return Network(name, tensors, inputs, tuple(stages), outputs)


__all__ = ["RowBand", "in_rows"]
