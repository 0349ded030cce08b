"""Batch norms disappear before anything is quantised: frozen, then folded into their neighbours, or made convolutions.

With ``a = gamma / sqrt(var + eps)`` and ``t = beta - a * mean`` an inference batch norm is ``a * x + t`` per channel.
Source: docs/quantize.md, "Batch norms".
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad import nn
from tinygrad.tensor import Tensor

from coral.quantize.calibrate import Trace, outputs_of, record
from coral.quantize.model_graph import ModelGraph
from coral.quantize.peel import Source

Array = NDArray[np.float64]
TOLERANCE = 1e-4
"""Largest change of the model's output on the calibration data, in parts of its largest value."""


@dataclass(frozen=True)
class Rewrite:
    """What became of a batch norm: ``place`` is "folded", "chip" (now a depthwise convolution) or "host"."""

    kind: str
    place: str
    reason: str


def freeze(graph: ModelGraph, batches: list[tuple[Any, ...]]) -> tuple[ModelGraph, set[str]]:
    """Batch norms without running statistics get those of the calibration data, all calls taken together.

    :return: the model with them, and their names
    """
    loose = {name: layer for name, layer in norms_of(graph).items() if not _has_statistics(layer)}
    if not loose:
        return graph, set()
    stand_ins = {name: _Statistics(layer) for name, layer in loose.items()}
    outputs_of(graph.substitute({id(loose[name]): s for name, s in stand_ins.items()}, keep_jits=False), batches)
    frozen = {name: s.frozen() for name, s in stand_ins.items() if s.count}
    return ModelGraph(graph.substitute({id(loose[name]): layer for name, layer in frozen.items()})), set(frozen)


def norms_of(graph: ModelGraph) -> dict[str, nn.BatchNorm]:
    """The model's batch norms (not subclasses that compute something else) by name."""
    return {
        name: layer
        for name, layer in graph.layers.items()
        if isinstance(layer, nn.BatchNorm) and type(layer).__call__ is nn.BatchNorm.__call__
    }


def _has_statistics(norm: nn.BatchNorm) -> bool:
    return norm.track_running_stats and getattr(norm, "running_mean", None) is not None


class _Statistics:
    """Stands in for a batch norm that normalises with its batch, and sums its inputs up per channel."""

    def __init__(self, norm: nn.BatchNorm) -> None:
        self.norm, self.count, self.total, self.squares = norm, 0, np.zeros(1), np.zeros(1)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous().realize()
        values = np.moveaxis(x.numpy().astype(np.float64), 1, -1)
        values = values.reshape(-1, values.shape[-1])
        self.count += len(values)
        self.total, self.squares = self.total + values.sum(0), self.squares + np.square(values).sum(0)
        return self.norm(x)

    def frozen(self) -> nn.BatchNorm:
        mean = self.total / self.count
        variance = np.maximum(self.squares / self.count - mean**2, 0)
        norm = copy.copy(self.norm)
        norm.track_running_stats = True
        device = None if norm.weight is None else norm.weight.device
        norm.running_mean, norm.running_var = (_tensor(v, device) for v in (mean, variance))
        return norm


def fold(graph: ModelGraph, batches: list[tuple[Any, ...]]) -> tuple[ModelGraph, dict[str, Rewrite]]:
    """The same float model with fewer batch norms: folded, as a depthwise 1x1 convolution, or left as they are.

    Every rewrite must leave the model's output on the calibration data as it is (to :data:`TOLERANCE`).
    """
    norms = {name: norm for name, norm in norms_of(graph).items() if _has_statistics(norm)}
    if not norms:
        return graph, {}
    layers = {n: layer for n, layer in graph.layers.items() if type(layer) in (nn.Linear, nn.Conv2d)}
    plan = _Plan(layers, norms, record(graph, {**layers, **norms}, batches))

    def holds(folds: list[str]) -> bool:
        changed, _ = plan.replacements(folds)
        outputs = outputs_of(graph.substitute(changed, keep_jits=False), batches)
        return all(close(a, b) for a, b in zip(outputs, plan.trace.outputs, strict=True))

    wanted = list(norms)
    if not holds(wanted):
        chosen: list[str] = []
        for name in wanted:
            if holds([*chosen, name]):
                chosen.append(name)
        wanted = chosen
    changed, rewrites = plan.replacements(wanted)
    return ModelGraph(graph.substitute(changed)), rewrites


def close(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two outputs of the float model are the same to :data:`TOLERANCE`."""
    largest = float(np.abs(b).max(initial=0))
    return a.shape == b.shape and bool(np.all(np.abs(a - b) <= TOLERANCE * max(largest, 1e-6) + 1e-6))


class State:
    """A float layer whose weights and bias are being rewritten, in float64."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.weight = layer, layer.weight.float().numpy().astype(np.float64)
        bias = None if layer.bias is None else layer.bias.float().numpy().astype(np.float64)
        self.bias: Array = np.zeros(len(self.weight)) if bias is None else bias

    def scale(self, a: Array) -> None:
        """Output channels times a."""
        self.weight, self.bias = self.weight * a.reshape(-1, *[1] * (self.weight.ndim - 1)), self.bias * a

    def effect_of(self, shift: Array) -> Array | None:
        """What a constant added to every input channel adds to the outputs; None where it is not a constant."""
        if isinstance(self.layer, nn.Linear):
            repeats, rest = divmod(self.weight.shape[1], len(shift))
            return None if rest else self.weight @ np.repeat(shift, repeats)
        if np.any(self.layer.padding) or self.weight.shape[1] * self.layer.groups != len(shift):
            return None
        parts = np.split(self.weight.reshape(*self.weight.shape[:2], -1).sum(2), self.layer.groups)
        return np.concatenate([w @ t for w, t in zip(parts, np.split(shift, self.layer.groups), strict=True)])

    def result(self) -> Any:
        """A float layer like the first one."""
        layer = copy.copy(self.layer)
        device = layer.weight.device
        layer.weight = _tensor(self.weight, device)
        layer.bias = _tensor(self.bias, device) if self.layer.bias is not None or self.bias.any() else None
        return layer


def _tensor(values: NDArray[Any], device: Any) -> Tensor:
    return Tensor(values.astype(np.float32), device=device).realize()


def _affine(norm: nn.BatchNorm) -> tuple[Array, Array]:
    def values(t: Tensor | None, default: float) -> Array:
        return np.full(1, default) if t is None else t.float().numpy().astype(np.float64)

    a = values(norm.weight, 1) / np.sqrt(values(norm.running_var, 1) + norm.eps)
    return a, values(norm.bias, 0) - a * values(norm.running_mean, 0)


class _Plan:
    """What could become of each batch norm, from what the float model was seen doing."""

    def __init__(self, layers: Mapping[str, Any], norms: Mapping[str, nn.BatchNorm], trace: Trace) -> None:
        self.layers, self.norms, self.trace = layers, norms, trace

    def replacements(self, folds: Iterable[str]) -> tuple[dict[int, Any], dict[str, Rewrite]]:
        """New objects by id of the old ones, with the named norms folded where they can be; and what became of all."""
        states: dict[str, State] = {}
        changed: dict[int, Any] = {}
        rewrites: dict[str, Rewrite] = {}
        for name, norm in self.norms.items():
            seen = self.trace.observations[name]
            reason = self._fold(name, states) if name in folds else "folding it changes the model's output"
            if not reason:
                changed[id(norm)] = _same
                (source,) = seen.sources
                assert source is not None
                behind = " behind ReLU" if source.bounds[0] == 0 else ""
                pool = " through max pool" if "max" in source.steps else ""
                rewrites[name] = Rewrite("BatchNorm", "folded", f"into {source.key}{behind}{pool}")
            elif seen.rank == 4 and not seen.attribute:
                changed[id(norm)] = _as_convolution(norm)
                rewrites[name] = Rewrite("BatchNorm", "chip", f"as a depthwise 1x1 convolution: {reason}")
            else:
                rewrites[name] = Rewrite("BatchNorm", "host", reason)
        changed.update({id(state.layer): state.result() for state in states.values()})
        return changed, rewrites

    def _state(self, name: str, states: dict[str, State]) -> State:
        return states.setdefault(name, State(self.layers[name]))

    def _fold(self, name: str, states: dict[str, State]) -> str:
        """Fold one norm into ``states``, or say why it cannot be."""
        seen, (a, t) = self.trace.observations[name], _affine(self.norms[name])
        sources = list(seen.sources)
        if seen.attribute or len(sources) != 1:
            return "not called, or on several inputs" if not seen.attribute else f"{seen.attribute!r} of it is read"
        (source,) = sources
        if source is None or source.parts or not self._free(source.key):
            return "it is not behind a layer"
        if len(self.layers[source.key].weight.numpy()) != len(a):
            return f"{source.key} has another number of channels"
        relu = source.bounds[0] == 0
        if source.bounds[1] != np.inf:
            return f"a ReLU6 lies between {source.key} and it"
        if (relu or "max" in source.steps) and not np.all(a > 0):
            return "a scale is not positive behind ReLU or max pool"
        if not relu:
            previous = self._state(source.key, states)
            previous.scale(a)
            previous.bias = previous.bias + t
            return ""
        effects = self._effects(name, t, states)
        if isinstance(effects, str):
            return effects
        self._state(source.key, states).scale(a)
        for reader, effect in effects.items():
            self._state(reader, states).bias = self._state(reader, states).bias + effect
        return ""

    def _effects(self, name: str, shift: Array, states: dict[str, State]) -> dict[str, Array] | str:
        """What the shift of a norm does to the bias of every layer that reads it, or why it cannot move there."""
        effects: dict[str, Array] = {}
        if not np.any(shift):
            return effects
        for reader, seen in self.trace.observations.items():
            leaves = [leaf for source in seen.sources if source for leaf in source.walk() if not leaf.parts]
            if all(leaf.key != name for leaf in leaves):
                continue
            if list(seen.sources) != [Source(name, steps=leaves[0].steps)] or not self._free(reader):
                return f"{reader} takes its shift in a way that a bias cannot hold"
            effect = self._state(reader, states).effect_of(shift)
            if effect is None:
                return f"the padding of {reader} does not know its shift"
            effects[reader] = effect
        return effects or "no layer behind it takes its shift"

    def _free(self, name: str) -> bool:
        """Whether weights and bias of a layer may be rewritten."""
        return name in self.layers and not self.trace.observations[name].attribute


def _same(x: Tensor) -> Tensor:
    return x


def _as_convolution(norm: nn.BatchNorm) -> nn.Conv2d:
    a, t = _affine(norm)
    channels = max(len(a), len(t))
    layer = nn.Conv2d(channels, channels, 1, groups=channels)
    device = None if norm.weight is None else norm.weight.device
    layer.weight = _tensor(np.broadcast_to(a, channels).reshape(-1, 1, 1, 1), device)
    layer.bias = _tensor(np.broadcast_to(t, channels), device)
    return layer
