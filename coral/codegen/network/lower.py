"""Stages that front ends write, in terms of the few that generators know. Source: docs/network.md, section Lowering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from coral.codegen.errors import ShapeError
from coral.codegen.machine import GROUP, WORD_BYTES, ceil_div, round_up
from coral.codegen.network.graph import (
    Concatenate,
    Conv,
    Dense,
    Depthwise,
    Interleave,
    Network,
    Pad,
    Requantise,
    Reshape,
    Slice,
    Stage,
    Tensor,
    TransposeConv,
    Window,
    whole_range,
)

MAX_MULTIPLIER = GROUP // WORD_BYTES
"""Outputs per channel of a depthwise layer: a step computes those of one word's channels."""


def lowered(network: Network) -> Network:
    """The same network, outputs' names included, without Pad, Reshape, TransposeConv, cut positions, requantised or
    misaligned parts. ShapeError: a reshape in the middle of a network.
    """
    return _Lowering(_with_whole_words(_without_reshapes(network))).network


class _Lowering:
    """One pass over the stages; ``stages`` are the new ones so far."""

    def __init__(self, network: Network) -> None:
        self.old, self.tensors, self.stages = network, dict(network.tensors), []
        self.selected: dict[str, tuple[str, np.ndarray]] = {}
        self.padded: dict[str, tuple[str, tuple[int, int]]] = {}
        rules: dict[type[Stage], Callable] = {
            Pad: self.pad,
            Slice: self.slice,
            Concatenate: self.concatenate,
            TransposeConv: self.transpose_conv,
            Depthwise: self.depthwise,
        }
        for stage in network.stages:
            stage = self._on_selected(self._on_padded(stage))
            rules.get(type(stage), self.stages.append)(stage)
        self.network = replace(network, tensors=self.tensors, stages=tuple(self.stages))

    def _tensor(self, like: Tensor, suffix: str, **changes: int) -> str:
        name = f"{like.name}:{suffix}{len(self.tensors)}"
        self.tensors[name] = replace(like, name=name, **changes)
        return name

    def pad(self, stage: Pad) -> None:
        """Part of the windows that read the result, if those are convolutions; else a stage of its own."""
        x, y = self.tensors[stage.inputs[0]], self.tensors[stage.output]
        readers = list(self.old.readers(y.name))
        if y.name not in self.old.outputs and all(self._may_pad(r, x, stage.before) for r in readers):
            self.padded[y.name] = x.name, stage.before
            return
        self.stages.append(Requantise(stage.inputs, stage.output, whole_range(x), at=Window(pad=stage.before)))

    def _may_pad(self, reader: Stage, x: Tensor, before: tuple[int, int]) -> bool:
        """Whether every window of a convolution still meets ``x`` if the padding in front becomes its own."""
        out, w = self.tensors[reader.output], reader.window
        return type(reader) in (Conv, Depthwise) and all(
            p + b < k and (n - 1) * s - p - b < size
            for p, b, k, n, s, size in zip(w.pad, before, w.extent, (out.y, out.x), w.stride, (x.y, x.x), strict=True)
        )

    def slice(self, stage: Slice) -> None:
        """Positions by a copy, channels from a whole word on as places, others selected."""
        x, y, (source,) = self.tensors[stage.inputs[0]], self.tensors[stage.output], stage.inputs
        if stage.first != (0, 0) or stage.step != (1, 1) or (x.y, x.x) != (y.y, y.x):
            whole = x.c == y.c
            target = y.name if whole else self._tensor(y, "positions", c=x.c)
            cut = Window(stride=stage.step, pad=(-stage.first[0], -stage.first[1]))
            self.stages.append(Requantise((source,), target, whole_range(x), at=cut))
            if whole:
                return
            source = target
        shift = stage.begin % WORD_BYTES
        readers = list(self.old.readers(y.name))
        if source in self.old.inputs and self._may_select(y, readers):
            self.selected[y.name] = source, np.arange(y.c) + stage.begin
        elif not shift:
            self.stages.append(Slice((source,), y.name, stage.clamps, stage.begin))
        else:
            aligned = self._tensor(y, "aligned", c=y.c + shift)
            self.stages.append(Slice((source,), aligned, stage.clamps, stage.begin - shift))
            self._select(y, aligned, np.arange(y.c) + shift)

    def concatenate(self, stage: Concatenate) -> None:
        """Parts in the result's quantisation, each from a whole word on; channels are selected from that if need be."""
        y, parts = self.tensors[stage.output], []
        for name, mult in zip(stage.inputs, stage.mults or (1.0,) * len(stage.inputs), strict=True):
            x = self.tensors[name]
            if mult != 1 or x.zero_point != y.zero_point:
                name = self._tensor(replace(y, c=x.c), "requantised")
                self.stages.append(Requantise((x.name,), name, stage.clamps, mult))
            parts.append(name)
        sizes = [self.tensors[name].c for name in parts]
        if all(c % WORD_BYTES == 0 for c in sizes[:-1]) or y.c != sum(sizes):
            self.stages.append(Concatenate(tuple(parts), y.name, stage.clamps))
            return
        starts = np.cumsum([0, *(round_up(c, WORD_BYTES) for c in sizes)])
        loose = self._tensor(y, "loose", c=int(starts[-1]))
        self.stages.append(Concatenate(tuple(parts), loose, stage.clamps))
        self._select(y, loose, np.concatenate([a + np.arange(c) for a, c in zip(starts, sizes, strict=False)]))

    def _select(self, y: Tensor, source: str, channels: np.ndarray) -> None:
        """Makes ``y`` the given channels of ``source``: in the weights of its readers, or by an exact convolution."""
        if self._may_select(y, list(self.old.readers(y.name))):
            self.selected[y.name] = source, channels
            return
        weights = np.zeros((y.c, 1, 1, self.tensors[source].c), np.uint8)
        weights[np.arange(y.c), 0, 0, channels] = 1
        self.stages.append(Conv((source,), y.name, whole_range(y), weights, None, 0, 1.0))

    def _may_select(self, y: Tensor, readers: list[Stage]) -> bool:
        """Whether only weights stand between a tensor and its readers' results."""
        return y.name not in self.old.outputs and bool(readers) and all(type(r) in (Conv, Dense) for r in readers)

    def _on_selected(self, stage: Stage) -> Stage:
        """A reader of selected channels, on what they were selected from."""
        if not isinstance(stage, Conv) or stage.inputs[0] not in self.selected:
            return stage
        source, channels = self.selected[stage.inputs[0]]
        x, n = self.tensors[source], len(stage.weights)
        old = stage.weights.reshape(n, -1, self.tensors[stage.inputs[0]].c)
        weights = np.full((n, old.shape[1], x.c), stage.w_zp, np.uint8)
        weights[..., channels] = old
        shape = (n, x.size) if isinstance(stage, Dense) else (*stage.weights.shape[:3], x.c)
        return replace(stage, inputs=(source,), weights=weights.reshape(shape))

    def _on_padded(self, stage: Stage) -> Stage:
        """A reader of a padded tensor, on that tensor without padding."""
        if not isinstance(stage, Conv) or stage.inputs[0] not in self.padded:
            return stage
        source, (top, left) = self.padded[stage.inputs[0]]
        pad = stage.at.pad[0] + top, stage.at.pad[1] + left
        return replace(stage, inputs=(source,), at=replace(stage.at, pad=pad))

    def transpose_conv(self, stage: TransposeConv) -> None:
        """One convolution per phase of the stride, each with its share of the kernel; results are interleaved."""
        y, x, w = self.tensors[stage.output], self.tensors[stage.inputs[0]], stage.at
        step = w.stride
        phases = [(py, px) for py in range(min(step[0], y.y)) for px in range(min(step[1], y.x))]
        size = [ceil_div(n, s) for n, s in zip((y.y, y.x), step, strict=True)]
        parts = []
        for phase in phases:
            axes = [
                phase_taps(k, s, b, p, n, o)
                for k, s, b, p, n, o in zip(w.kernel, step, w.pad, phase, (x.y, x.x), size, strict=True)
            ]
            (rows, top), (columns, left) = axes
            weights = np.full((y.c, len(rows), len(columns), x.c), stage.w_zp, np.uint8)
            for i, ky in enumerate(rows):
                for j, kx in enumerate(columns):
                    if ky is not None and kx is not None:
                        weights[:, i, j] = stage.weights[:, ky, kx]
            name = y.name if len(phases) == 1 else self._tensor(y, "phase", y=size[0], x=size[1])
            window = Window((len(rows), len(columns)), pad=(top, left))
            self.stages.append(
                Conv(stage.inputs, name, stage.clamps, weights, stage.bias, stage.w_zp, stage.mult, window)
            )
            parts.append(name)
        if len(phases) > 1:
            self.stages.append(Interleave(tuple(parts), y.name, stage.clamps, step, tuple(phases)))

    def depthwise(self, stage: Depthwise) -> None:
        """With one channel, or with more outputs per channel than columns: an ordinary convolution."""
        c, n = self.tensors[stage.inputs[0]].c, stage.weights.shape[2]
        if n == c or (c > 1 and n <= MAX_MULTIPLIER * c):
            self.stages.append(stage)
            return
        kh, kw = stage.at.kernel
        weights = np.full((n, kh, kw, c), stage.w_zp, np.uint8)
        weights[np.arange(n), :, :, np.arange(n) // (n // c)] = stage.weights.transpose(2, 0, 1)
        self.stages.append(
            Conv(stage.inputs, stage.output, stage.clamps, weights, stage.bias, stage.w_zp, stage.mult, stage.at)
        )


def phase_taps(
    kernel: int, step: int, before: int, phase: int, inputs: int, outputs: int
) -> tuple[list[int | None], int]:
    """(kernel positions that the outputs ``phase + step * j`` see, from the first input on; padding in front).

    None: a position without weights, where there would be none at all or the last window lay behind the input.
    """
    shift, first = divmod(phase + before, step)
    taps: list[int | None] = [None, *range(first, kernel, step)][:0:-1] or [None]
    pad = len(taps) - 1 - shift
    behind = outputs - 1 - pad - (inputs - 1)
    if behind > 0:
        taps, pad = [*[None] * behind, *taps], pad + behind
    return taps, pad


def _with_whole_words(network: Network) -> Network:
    """Inputs of more than a word per position have whole words: what the host adds are zero points nobody reads."""
    tensors, renamed = dict(network.tensors), {}
    for name in network.inputs:
        x = tensors[name]
        if x.c <= WORD_BYTES or x.c % WORD_BYTES == 0 or all(isinstance(r, Dense) for r in network.readers(name)):
            continue
        if name in network.outputs:
            continue
        tensors[name] = replace(x, c=round_up(x.c, WORD_BYTES))
        renamed[name] = f"{name}:channels"
        tensors[renamed[name]] = replace(x, name=renamed[name])
    if not renamed:
        return network
    stages = (replace(s, inputs=tuple(renamed.get(n, n) for n in s.inputs)) for s in network.stages)
    slices = [Slice((n,), channels, (0.0, 0.0)) for n, channels in renamed.items()]
    return replace(network, tensors=tensors, stages=(*slices, *stages))


def _without_reshapes(network: Network) -> Network:
    """Reshapes become another view of the host's data, or disappear in front of dense layers."""
    while (stage := next((s for s in network.stages if isinstance(s, Reshape)), None)) is not None:
        network = _without_reshape(network, stage)
    return network


def _without_reshape(network: Network, stage: Reshape) -> Network:
    (source,), name = stage.inputs, stage.output
    tensors, x, y = dict(network.tensors), network.tensors[source], network.tensors[name]
    readers = list(network.readers(name))
    stages = [s for s in network.stages if s is not stage]
    alike = (x.y, x.x, x.c) == (y.y, y.x, y.c)
    alone = source in network.inputs and source not in network.outputs and list(network.readers(source)) == [stage]

    def renamed(old: str, new: str) -> list[Stage]:
        return [
            replace(
                s, inputs=tuple(new if n == old else n for n in s.inputs), output=new if s.output == old else s.output
            )
            for s in stages
        ]

    if alike or alone or all(isinstance(r, Dense) for r in readers):
        if alone:
            x = tensors[source] = replace(y, name=source)
        if name not in network.outputs:
            return replace(network, tensors=tensors, stages=tuple(renamed(name, source)))
        if readers:
            stages = [
                s if name not in s.inputs else replace(s, inputs=tuple(source if n == name else n for n in s.inputs))
                for s in stages
            ]
        tensors[name] = replace(x, name=name)
        if source in (*network.inputs, *network.outputs):
            index = max((k + 1 for k, s in enumerate(stages) if s.output == source), default=0)
            stages.insert(index, Requantise((source,), name, whole_range(x)))
            return replace(network, tensors=tensors, stages=tuple(stages))
        return replace(network, tensors=tensors, stages=tuple(renamed(source, name)))
    raise ShapeError(
        f"network {network.name!r}: {name!r} is a reshape between stages on the chip, from {x.y} x {x.x} x {x.c} to "
        f"{y.y} x {y.x} x {y.c}; cut the network there"
    )
