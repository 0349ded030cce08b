"""Running the float model on calibration data: ranges of every layer and sum, and what each layer's input comes from.

Source: docs/quantize.md, "Calibration" and "Linked layers".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad.helpers import Context
from tinygrad.tensor import Tensor

from coral.quantize.expressions import QuantizeError
from coral.quantize.model_graph import ModelGraph
from coral.quantize.peel import Reading, Source, read

Array = NDArray[Any]
Bounds = tuple[float, float]
SAMPLED_VALUES = 2**21
"""Inputs and outputs are kept of so many calls or examples that either has about this many values."""


@dataclass
class Range:
    """Smallest and largest real value seen so far."""

    lo: float = np.inf
    hi: float = -np.inf

    def include(self, lo: float, hi: float) -> None:
        self.lo, self.hi = min(self.lo, lo), max(self.hi, hi)


@dataclass
class Observation:
    """What calibration saw of one layer, over all its calls."""

    inputs: Range = field(default_factory=Range)
    outputs: Range = field(default_factory=Range)
    calls: int = 0
    rank: int = 0
    sources: dict[Source | None, None] = field(default_factory=dict)
    """What its inputs came from, layers by name, in order of appearance; None: from something that is not a layer."""
    attribute: str | None = None
    """An attribute of the layer that the model's own code reads, so that the layer cannot be exchanged."""
    samples: list[tuple[Array, Array]] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """Observations by layer name, ranges of sums, the model's output arrays, and a fingerprint of all values the layers
    were given.
    """

    observations: dict[str, Observation]
    sums: dict[Source, Range]
    outputs: list[Array]
    fingerprint: bytes


class _Recorder:
    """Stands in for a float layer: computes the same and notes inputs and outputs."""

    def __init__(self, name: str, layer: Any, session: _Session) -> None:
        self._name, self._layer, self._session = name, layer, session

    def __call__(self, x: Tensor) -> Tensor:
        session = self._session
        session.observations[self._name].sources[session.source_of(x)] = None
        x = Tensor(x.uop).contiguous().realize()
        y = self._layer(x).contiguous().realize()
        if (bounds := session.rectified.get(self._name)) is not None:
            y = _cut(y, bounds).contiguous().realize()
        session.produced[id(y.uop)] = (self._name, y.uop)
        session.note(self._name, x.numpy(), y.numpy())
        return y

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._layer, attribute)
        self._session.observations[self._name].attribute = attribute
        return value


def _cut(t: Tensor, bounds: Bounds) -> Tensor:
    return t.maximum(bounds[0]) if bounds[1] == np.inf else t.clip(*bounds)


class _Session:
    def __init__(self, names: Iterable[str], rectified: Mapping[str, Bounds], keep: bool) -> None:
        self.observations = {name: Observation() for name in names}
        self.produced: dict[int, tuple[str, Any]] = {}
        self.sums: dict[Source, Range] = {}
        self.measured: dict[tuple[Any, Bounds], tuple[float, float]] = {}
        self.rectified, self.keep, self.digest = rectified, keep, hashlib.sha256()

    def source_of(self, x: Tensor) -> Source | None:
        """What x was made from; measures the sums on the way."""
        reading = read(x.uop, lambda node: self.produced.get(id(node), (None,))[0])
        if reading is None:
            return None
        for part in reading.walk():
            if len(part.parts) == 2:
                self.sums.setdefault(part.source(str).bare, Range()).include(*self._measure(part))
        return reading.source(str)

    def _measure(self, reading: Reading) -> tuple[float, float]:
        key = reading.node, reading.bounds
        if key not in self.measured:
            values = np.clip(Tensor(reading.node).numpy(), *reading.bounds)
            self.measured[key] = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
        return self.measured[key]

    def note(self, name: str, x: Array, y: Array) -> None:
        for role, values in (("input", x), ("output", y)):
            if not np.isfinite(values).all():
                raise QuantizeError(f"calibration gives layer {name!r} an {role} that is infinite or not a number")
        seen = self.observations[name]
        if x.size:
            seen.inputs.include(float(x.min()), float(x.max()))
            seen.outputs.include(float(y.min()), float(y.max()))
        seen.calls, seen.rank = seen.calls + 1, x.ndim
        self.digest.update(name.encode() + x.tobytes())
        room = SAMPLED_VALUES - sum(max(a.size, b.size) for a, b in seen.samples)
        if self.keep and room > 0:
            rows = max(room * len(x) // max(x.size, y.size, 1), 1) if x.ndim > 1 else None
            seen.samples.append((x[:rows], y[:rows]))


def batches_of(calibration_inputs: Any) -> list[tuple[Any, ...]]:
    """The calls that calibration makes: a tensor or array is one; a list or generator holds one or more of them.

    An item that is a tuple holds the positional arguments of one call. NumPy arrays become tensors.
    :raises QuantizeError: no call, or something that is neither a tensor nor a numeric array
    """
    if isinstance(calibration_inputs, (Tensor, np.ndarray)):
        calibration_inputs = [calibration_inputs]
    if isinstance(calibration_inputs, (str, bytes)) or not isinstance(calibration_inputs, Iterable):
        kind = type(calibration_inputs).__name__
        raise QuantizeError(f"calibration inputs must be a Tensor, a NumPy array or a list of them, not {kind}")
    calls = [item if isinstance(item, tuple) else (item,) for item in calibration_inputs]
    for call in calls:
        for argument in call:
            if not isinstance(argument, (Tensor, np.ndarray)):
                kind = type(argument).__name__
                raise QuantizeError(f"a calibration input is {kind}: it must be a Tensor or a NumPy array")
    if not calls:
        raise QuantizeError("calibration needs at least one input: the list of calibration inputs is empty")
    return [tuple(_tensor(argument) for argument in call) for call in calls]


def _tensor(argument: Tensor | Array) -> Tensor:
    if isinstance(argument, Tensor):
        return argument
    if argument.dtype.kind not in "biuf":
        raise QuantizeError(f"a calibration input has dtype {argument.dtype}: it must be numeric")
    return Tensor(argument.astype(np.float32) if argument.dtype == np.float64 else argument)


def call_model(model: Any, arguments: tuple[Any, ...]) -> list[Array]:
    """Output tensors of one call as arrays; a list or tuple of layers is applied in sequence."""
    result = model(*arguments) if callable(model) else arguments[0].sequential(list(model))
    return [t.numpy() for t in _tensors(result)]


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        result = list(result.values())
    return [t for item in result for t in _tensors(item)] if isinstance(result, (list, tuple)) else []


def record(
    graph: ModelGraph,
    layers: Mapping[str, Any],
    batches: list[tuple[Any, ...]],
    *,
    rectified: Mapping[str, Bounds] | None = None,
    keep: bool = False,
) -> Trace:
    """Run the float model (in inference mode) and observe the given layers of it.

    :param layers: the layers to observe, by name
    :param rectified: bounds to which the outputs of some layers get cut, to see whether that changes anything
    :param keep: keep inputs and outputs in ``Observation.samples``
    :raises QuantizeError: a value is not finite, the model returns no tensor
    """
    session = _Session(layers, rectified or {}, keep)
    recorders = {id(layer): _Recorder(name, layer, session) for name, layer in layers.items()}
    outputs = outputs_of(graph.substitute(recorders, keep_jits=False), batches)
    return Trace(session.observations, session.sums, outputs, session.digest.digest())


def outputs_of(model: Any, batches: list[tuple[Any, ...]]) -> list[Array]:
    """Output arrays of all calls, in inference mode. :raises QuantizeError: the model returns no tensor."""
    with Context(TRAINING=0):
        outputs = [array for batch in batches for array in call_model(model, batch)]
    if not outputs:
        raise QuantizeError("the model returned no Tensor: quantize needs its output to check the result")
    return outputs


def rectifiable(
    graph: ModelGraph, layers: Mapping[str, Any], batches: list[tuple[Any, ...]], first: Trace
) -> dict[str, Bounds]:
    """Layers whose output may be cut (at 0, at 6) because nothing but ReLU or ReLU6 ever sees it, with the bounds.

    Candidates are layers that all reading layers read so. Other uses (the model's own code, its output) come to light
    by running the float model with the candidates cut: every input of every layer and the model's output must keep each
    bit.
    """
    candidates: dict[str, Bounds] = {}
    for seen in first.observations.values():
        for leaf in (leaf for source in seen.sources if source for leaf in source.walk() if not leaf.parts):
            lo, hi = candidates.get(leaf.key, leaf.bounds)
            candidates[leaf.key] = min(lo, leaf.bounds[0]), max(hi, leaf.bounds[1])
    candidates = {name: bounds for name, bounds in candidates.items() if bounds[0] == 0}

    def unchanged(cut: dict[str, Bounds]) -> bool:
        trace = record(graph, layers, batches, rectified=cut)
        return trace.fingerprint == first.fingerprint and _equal(trace.outputs, first.outputs)

    if not candidates or unchanged(candidates):
        return candidates
    return {name: bounds for name, bounds in sorted(candidates.items()) if unchanged({name: bounds})}


def _equal(a: list[Array], b: list[Array]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Ranges:
    """Ranges of every layer's input and output and of every sum; values whose codes pass unchanged share one."""

    inputs: dict[str, Range]
    outputs: dict[str, Range]
    sums: dict[Source, Range]


def shared_ranges(trace: Trace, cut: Mapping[str, Bounds]) -> Ranges:
    """The ranges to quantise with, layers in ``cut`` (see :func:`rectifiable`) without what is cut off."""
    ranges: dict[tuple[str, Any], Range] = {("sum", key): replace(found) for key, found in trace.sums.items()}
    for name, seen in trace.observations.items():
        low, high = np.clip([seen.outputs.lo, seen.outputs.hi], *cut.get(name, (-np.inf, np.inf))).tolist()
        ranges["in", name], ranges["out", name] = replace(seen.inputs), Range(low, high)
    for name, seen in trace.observations.items():
        for source in seen.sources:
            _share(ranges, ("in", name), source, cut)
    by_kind: dict[str, dict[Any, Range]] = {"in": {}, "out": {}, "sum": {}}
    for (kind, key), found in ranges.items():
        by_kind[kind][key] = found
    return Ranges(by_kind["in"], by_kind["out"], by_kind["sum"])


def _share(
    ranges: dict[tuple[str, Any], Range], reader: tuple[str, Any], source: Source | None, cut: Mapping[str, Bounds]
) -> None:
    while source is not None and source.key == "mean" and source.parts:
        (source,) = source.parts
    if source is not None and source.parts:
        _join(ranges, reader, ("sum", source.bare))
    elif source is not None and (source.bounds[0] < 0 or source.key in cut):
        _join(ranges, reader, ("out", source.key))


def _join(ranges: dict[tuple[str, Any], Range], a: tuple[str, Any], b: tuple[str, Any]) -> None:
    kept, dropped = ranges[a], ranges[b]
    kept.include(dropped.lo, dropped.hi)
    for key, value in ranges.items():
        if value is dropped:
            ranges[key] = kept
