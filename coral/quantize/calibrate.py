"""Running the float model on calibration data: ranges of every linear layer, and which layers are neighbours.

Source: docs/quantize.md, "Calibration" and "Linked layers".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad import nn
from tinygrad.helpers import Context
from tinygrad.tensor import Tensor

from coral.quantize.expressions import QuantizeError
from coral.quantize.model_graph import ModelGraph
from coral.quantize.peel import peel

Array = NDArray[Any]


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
    producers: dict[str, bool] = field(default_factory=dict)
    """Layers whose output this layer's input was made from: under a ReLU (in every case) or not."""
    attribute: str | None = None
    """An attribute of the layer that the model's own code reads, so that the layer cannot be exchanged."""
    samples: list[tuple[Array, Array]] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """Observations by layer name, the model's output arrays, and a fingerprint of all values the layers were given."""

    observations: dict[str, Observation]
    outputs: list[Array]
    fingerprint: bytes


class _Recorder:
    """Stands in for a float layer: computes the same and notes inputs and outputs."""

    def __init__(self, name: str, layer: nn.Linear, session: _Session) -> None:
        self._name, self._layer, self._session = name, layer, session

    def __call__(self, x: Tensor) -> Tensor:
        session, seen = self._session, self._session.observations[self._name]
        for stage in peel(x):
            if (producer := session.produced.get(id(stage.node))) is not None:
                seen.producers[producer[0]] = stage.relu and seen.producers.get(producer[0], True)
                break
        x = Tensor(x.uop).contiguous().realize()
        y = self._layer(x).contiguous().realize()
        if self._name in session.rectified:
            y = y.relu().contiguous().realize()
        session.produced[id(y.uop)] = (self._name, y.uop)
        session.note(self._name, x.numpy(), y.numpy())
        return y

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._layer, attribute)
        self._session.observations[self._name].attribute = attribute
        return value


class _Session:
    def __init__(self, names: Iterable[str], rectified: frozenset[str], keep: bool) -> None:
        self.observations = {name: Observation() for name in names}
        self.produced: dict[int, tuple[str, Any]] = {}
        self.rectified, self.keep, self.digest = rectified, keep, hashlib.sha256()

    def note(self, name: str, x: Array, y: Array) -> None:
        for role, values in (("input", x), ("output", y)):
            if not np.isfinite(values).all():
                raise QuantizeError(f"calibration gives layer {name!r} an {role} that is infinite or not a number")
        seen = self.observations[name]
        if x.size:
            seen.inputs.include(float(x.min()), float(x.max()))
            seen.outputs.include(float(y.min()), float(y.max()))
        seen.calls += 1
        self.digest.update(name.encode() + x.tobytes())
        if self.keep:
            seen.samples.append((x, y))


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
    linears: Mapping[str, nn.Linear],
    batches: list[tuple[Any, ...]],
    *,
    rectified: Iterable[str] = (),
    keep: bool = False,
) -> Trace:
    """Run the float model (in inference mode) and observe the given layers of it.

    :param linears: the layers to observe, by name

    :param rectified: names of layers whose output gets a ReLU, to see whether that changes anything
    :param keep: keep inputs and outputs of every call in ``Observation.samples``
    :raises QuantizeError: a value is not finite, the model returns no tensor
    """
    session = _Session(linears, frozenset(rectified), keep)
    recorders = {id(layer): _Recorder(name, layer, session) for name, layer in linears.items()}
    outputs = outputs_of(graph.substitute(recorders, keep_jits=False), batches)
    return Trace(session.observations, outputs, session.digest.digest())


def outputs_of(model: Any, batches: list[tuple[Any, ...]]) -> list[Array]:
    """Output arrays of all calls, in inference mode. :raises QuantizeError: the model returns no tensor."""
    with Context(TRAINING=0):
        outputs = [array for batch in batches for array in call_model(model, batch)]
    if not outputs:
        raise QuantizeError("the model returned no Tensor: quantize needs its output to check the result")
    return outputs


def rectifiable(
    graph: ModelGraph, linears: Mapping[str, nn.Linear], batches: list[tuple[Any, ...]], first: Trace
) -> set[str]:
    """Layers whose output may be cut at 0 because nothing but ReLU ever sees it.

    Candidates are layers that some layer reads through ReLU. Other uses (a residual sum, another layer, the model's
    output) come to light by running the float model with the candidates cut: every input of every layer and the model's
    output must keep each bit.
    """
    candidates = {name for seen in first.observations.values() for name, relu in seen.producers.items() if relu}

    def unchanged(names: set[str]) -> bool:
        cut = record(graph, linears, batches, rectified=names)
        return cut.fingerprint == first.fingerprint and _equal(cut.outputs, first.outputs)

    if not candidates or unchanged(candidates):
        return candidates
    return {name for name in sorted(candidates) if unchanged({name})}


def _equal(a: list[Array], b: list[Array]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def shared_ranges(trace: Trace, folded: set[str]) -> dict[str, tuple[Range, Range]]:
    """Input and output range of each layer; neighbours whose codes pass unchanged have one range together."""
    ranges: dict[tuple[str, str], Range] = {}
    for name, seen in trace.observations.items():
        low, high = seen.outputs.lo, seen.outputs.hi
        ranges["in", name] = Range(seen.inputs.lo, seen.inputs.hi)
        ranges["out", name] = Range(max(low, 0.0), max(high, 0.0)) if name in folded else Range(low, high)
    for name, seen in trace.observations.items():
        for producer, relu in seen.producers.items():
            if not relu or producer in folded:
                _join(ranges, ("in", name), ("out", producer))
    return {name: (ranges["in", name], ranges["out", name]) for name in trace.observations}


def _join(ranges: dict[tuple[str, str], Range], a: tuple[str, str], b: tuple[str, str]) -> None:
    kept, dropped = ranges[a], ranges[b]
    kept.include(dropped.lo, dropped.hi)
    for key, value in ranges.items():
        if value is dropped:
            ranges[key] = kept
