"""``coral.quantize``: a float tinygrad model in, the same model with uint8 layers out. Source: docs/quantize.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, overload

import numpy as np
from tinygrad import nn
from tinygrad.tensor import Tensor

from coral import numerics
from coral.numerics import NumericsError
from coral.quantize.balance import balance
from coral.quantize.calibrate import (
    Bounds,
    Observation,
    Ranges,
    Trace,
    batches_of,
    outputs_of,
    record,
    rectifiable,
    shared_ranges,
)
from coral.quantize.cost import counting
from coral.quantize.expressions import QuantizeError
from coral.quantize.fold import Rewrite, fold, freeze
from coral.quantize.layers import QConv2d, QLayer, QLinear, quantised
from coral.quantize.model_graph import ModelGraph
from coral.quantize.peel import Quant, Source
from coral.quantize.report import Error, LayerReport, Report

PER_CHANNEL_ABOVE, PER_CHANNEL_GAIN = 0.1, 0.7
"""One weight scale per channel is chosen where the layer's relative error is above the first with one scale for all,
and falls to the second's share of it."""

Model = TypeVar("Model")


@overload
def quantize(
    model: Model, calibration_inputs: Any, *, report: Literal[False] = False, per_channel: bool | None = None
) -> Model: ...
@overload
def quantize(
    model: Model, calibration_inputs: Any, *, report: Literal[True], per_channel: bool | None = None
) -> tuple[Model, Report]: ...
@overload
def quantize(
    model: Model, calibration_inputs: Any, *, report: bool, per_channel: bool | None = None
) -> Model | tuple[Model, Report]: ...
def quantize(
    model: Model, calibration_inputs: Any, *, report: bool = False, per_channel: bool | None = None
) -> Model | tuple[Model, Report]:
    """A copy of ``model`` whose linear layers and convolutions compute in uint8; the given model stays as it is.

    Batch norms are folded into their neighbours, or become depthwise convolutions; channels of neighbouring layers are
    balanced; sums and means between layers are computed on codes.

    :param model: a callable (an object with ``__call__``, a function, ``TinyJit``) or a list of layers for
        ``x.sequential(layers)``. Layers are found in attributes, lists, tuples, dicts, closures, bound methods,
        ``functools.partial`` and ``TinyJit``.
    :param calibration_inputs: typical inputs (a few hundred examples). A Tensor or NumPy array is one call of the
        model; a list or generator holds several calls, and a tuple in it holds the arguments of one call.
    :param report: also return a :class:`~coral.quantize.report.Report`; ``print`` it, or read ``report.layers``
    :param per_channel: one weight scale per output channel (int8) in every layer, in none, or (None) where it makes a
        bad layer better on the calibration inputs
    :return: the quantised model, or ``(quantised model, report)``. It gives the same bytes on every tinygrad device.
    :raises QuantizeError: nothing to quantise (with the reason for every layer), a model that is quantised already,
        unusable calibration inputs, values that are not finite
    """
    batches = batches_of(calibration_inputs)
    if not callable(model) and not isinstance(model, (list, tuple)):
        raise QuantizeError(f"the model ({type(model).__name__}) can neither be called nor is it a list of layers")
    graph = original = ModelGraph(model)
    refused = {name: reason for name, layer in graph.layers.items() if (reason := _refusal(name, layer))}
    graph, frozen = freeze(graph, batches)
    graph, norms = fold(graph, batches)
    graph, balanced = balance(graph, batches)
    layers = {name: layer for name, layer in graph.layers.items() if not _refusal(name, layer)}
    trace = record(graph, layers, batches, keep=report or per_channel is None)
    cut = rectifiable(graph, layers, batches, trace)
    ranges = shared_ranges(trace, cut)
    done: dict[str, QLayer] = {}
    for name, layer in layers.items():
        if reason := _unusable(trace.observations[name]):
            refused[name] = reason
            continue
        try:
            done[name] = _quantised(layer, name, trace.observations[name], ranges, cut.get(name), per_channel)
        except NumericsError as error:
            refused[name] = str(error)
    if not done:
        listed = (
            "; ".join(f"{name}: {reason}" for name, reason in refused.items()) or "it holds no layer of tinygrad.nn"
        )
        raise QuantizeError(f"no layer of {_name_of(model)} can be quantised: {listed}")
    _hand_sums(done, trace, ranges)
    for layer in done.values():
        layer.model_inputs = tuple(tuple(int(size) for size in t.shape) for t in batches[0])
    result = graph.substitute({id(layers[name]): layer for name, layer in done.items()})
    if not report:
        return result
    error, seconds = _whole_error(graph, batches, trace, done)
    lines = [
        _line(name, layer, trace.observations.get(name), done, ranges, refused, norms, frozen, balanced)
        for name, layer in original.layers.items()
    ]
    return result, Report(tuple(replace(line, seconds=seconds.get(line.name, 0.0)) for line in lines), error)


def _name_of(model: Any) -> str:
    return (
        "the list of layers" if isinstance(model, (list, tuple)) else getattr(model, "__name__", type(model).__name__)
    )


def _refusal(name: str, layer: Any) -> str:
    """Why a layer cannot be quantised whatever the data, or "". :raises QuantizeError: it is quantised already."""
    if isinstance(layer, QLayer):
        raise QuantizeError(
            f"layer {name!r} is quantised already: quantize the float model with all calibration inputs"
        )
    base = next((kind for kind in (nn.Linear, nn.Conv2d) if isinstance(layer, kind)), None)
    if base is None:
        return f"no uint8 form of {type(layer).__name__}"
    if type(layer).__call__ is not base.__call__:
        return f"{type(layer).__name__} computes something else than nn.{base.__name__}"
    if base is nn.Conv2d and layer.weight.ndim != 4:
        return f"no uint8 form of a convolution with weights of {layer.weight.ndim} dimensions"
    if isinstance(layer.weight.device, tuple):
        return f"its weight is spread over the devices {', '.join(layer.weight.device)}"
    return ""


def _unusable(seen: Observation) -> str:
    if seen.calls == 0 or seen.inputs.lo > seen.inputs.hi:
        return "not called with data by the calibration inputs"
    return f"the model reads its attribute {seen.attribute!r} itself" if seen.attribute else ""


def _quantised(
    layer: Any, name: str, seen: Observation, ranges: Ranges, cut: Bounds | None, per_channel: bool | None
) -> QLinear | QConv2d:
    """The uint8 layer; with ``per_channel`` None, its weights' quantisation is whichever the samples speak for."""
    x, y = (Quant.of_range(found.lo, found.hi) for found in (ranges.inputs[name], ranges.outputs[name]))
    options = {} if cut is None else {"relu": True, "top": cut[1]}
    plain = quantised(layer, x, y, per_channel=bool(per_channel), **options)
    if per_channel is not None:
        return plain
    error = _layer_error(plain, seen)
    if error.rms <= PER_CHANNEL_ABOVE * error.signal_rms:
        return plain
    finer = quantised(layer, x, y, per_channel=True, **options)
    return finer if _layer_error(finer, seen).rms <= PER_CHANNEL_GAIN * error.rms else plain


def _layer_error(layer: Any, seen: Observation) -> Error:
    """Of one layer, given float inputs."""
    bounds = (0.0, layer.quant.top) if layer.quant.relu else (-np.inf, np.inf)
    return Error.between([np.clip(y, *bounds) for _, y in seen.samples], [layer.reference(x) for x, _ in seen.samples])


def _hand_sums(done: Mapping[str, QLayer], trace: Trace, ranges: Ranges) -> None:
    """Gives every layer the quantisation of the sums that its inputs are made from, where the chip has them."""
    outputs = {name: layer.quant.y for name, layer in done.items()}
    for name, layer in done.items():
        for source in trace.observations[name].sources:
            parts = [part for part in source.walk() if len(part.parts) == 2] if source else []
            for total in parts:
                leaves = [leaf.key for leaf in total.walk() if not leaf.parts]
                if not all(leaf in outputs for leaf in leaves):
                    continue
                found = ranges.sums[total.bare]
                layer.sums[total.bare.rekeyed(outputs)] = Quant.of_range(found.lo, found.hi)
        layer.sums = {key: quant for key, quant in layer.sums.items() if _addable(key, quant, layer.sums)}


def _addable(total: Source, quant: Quant, sums: Mapping[Source, Quant]) -> bool:
    """Whether the scales of a sum's operands are within the chip's integer weights."""
    scales: list[float] = []
    for part in total.parts:
        while part.key == "mean" and part.parts:
            (part,) = part.parts
        operand = sums.get(part.bare) if part.parts else part.key
        if not isinstance(operand, Quant):
            return False
        scales.append(operand.scale)
    try:
        numerics.add_multiplier(scales[0], numerics.add_weights(*scales)[0], quant.scale)
    except NumericsError:
        return False
    return True


def _remark(seen: Observation, layer: QLayer, done: Mapping[str, QLayer]) -> str:
    q = layer.quant
    parts = [] if not q.relu else ["ReLU merged"] if q.top == np.inf else ["ReLU6 merged"]
    parts += ["int8 weights per channel"] if not isinstance(q.w, Quant) else []
    for source in seen.sources:
        if source is None or any(not leaf.parts and leaf.key not in done for leaf in source.walk()):
            continue
        averaged = ""
        while source.key == "mean" and source.parts:
            (source,), averaged = source.parts, ", averaged"
        names = [leaf.key for leaf in source.walk() if not leaf.parts]
        if source.parts:
            parts.append(f"adds the codes of {' and '.join(names)}{averaged}")
        elif done[source.key].quant.y == q.x:
            pooled = ", pooled" if "max" in source.steps else ""
            parts.append(f"takes the codes of {source.key}{pooled}{averaged}")
    return ", ".join(parts)


class _Reference:
    """A quantised layer computed in NumPy: the report must not take the chip's time."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return Tensor(self.layer.reference(x.numpy()), device=x.device)


def _line(
    name: str,
    layer: Any,
    seen: Observation | None,
    done: Mapping[str, QLayer],
    ranges: Ranges,
    refused: Mapping[str, str],
    norms: Mapping[str, Rewrite],
    frozen: set[str],
    balanced: set[str],
) -> LayerReport:
    """The report on one layer of the model that was given."""
    kind, calls = type(layer).__name__, seen.calls if seen else 0
    note = "statistics of the calibration inputs" if name in frozen else ""
    rewrite = norms.get(name)
    if rewrite is not None and rewrite.place == "folded":
        return LayerReport(name, kind, "folded", ", ".join(filter(None, (rewrite.reason, note))))
    if name not in done or seen is None:
        return LayerReport(name, kind, "host", ", ".join(filter(None, (refused[name], note))), calls)
    inputs, outputs = ((found.lo, found.hi) for found in (ranges.inputs[name], ranges.outputs[name]))
    even = "channels balanced" if name in balanced else ""
    remarks = (rewrite.reason if rewrite else "", note, _remark(seen, done[name], done), even)
    reason, quant = ", ".join(filter(None, remarks)), done[name].quant
    return LayerReport(name, kind, "chip", reason, calls, inputs, outputs, quant, _layer_error(done[name], seen))


def _whole_error(
    graph: ModelGraph, batches: list[tuple[Any, ...]], trace: Trace, done: Mapping[str, QLayer]
) -> tuple[Error, dict[str, float]]:
    """The error of the model's output, and predicted seconds on the host per call of the model of what stays there."""
    stays = {name: counting(layer) for name, layer in graph.layers.items() if name not in done}
    stand_ins = {name: _Reference(layer) for name, layer in done.items()} | stays
    model = graph.substitute({id(graph.layers[name]): layer for name, layer in stand_ins.items()}, keep_jits=False)
    error = Error.between(trace.outputs, outputs_of(model, batches))
    return error, {name: layer.predicted_seconds / len(batches) for name, layer in stays.items()}
