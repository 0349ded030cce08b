"""``coral.quantize``: a float tinygrad model in, the same model with uint8 layers out. Source: docs/quantize.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, overload

import numpy as np
from tinygrad import nn
from tinygrad.tensor import Tensor

from coral.numerics import NumericsError
from coral.quantize.calibrate import (
    Observation,
    Range,
    Trace,
    batches_of,
    outputs_of,
    record,
    rectifiable,
    shared_ranges,
)
from coral.quantize.expressions import QuantizeError
from coral.quantize.layers import QLinear, Quant
from coral.quantize.model_graph import ModelGraph
from coral.quantize.report import Error, LayerReport, Report

Model = TypeVar("Model")


@overload
def quantize(model: Model, calibration_inputs: Any, *, report: Literal[False] = False) -> Model: ...
@overload
def quantize(model: Model, calibration_inputs: Any, *, report: Literal[True]) -> tuple[Model, Report]: ...
@overload
def quantize(model: Model, calibration_inputs: Any, *, report: bool) -> Model | tuple[Model, Report]: ...
def quantize(model: Model, calibration_inputs: Any, *, report: bool = False) -> Model | tuple[Model, Report]:
    """A copy of ``model`` whose linear layers compute in uint8; the given model stays as it is.

    :param model: a callable (an object with ``__call__``, a function, ``TinyJit``) or a list of layers for
        ``x.sequential(layers)``. Layers are found in attributes, lists, tuples, dicts, closures, bound methods,
        ``functools.partial`` and ``TinyJit``.
    :param calibration_inputs: typical inputs (a few hundred examples). A Tensor or NumPy array is one call of the
        model; a list or generator holds several calls, and a tuple in it holds the arguments of one call.
    :param report: also return a :class:`~coral.quantize.report.Report`; ``print`` it, or read ``report.layers``
    :return: the quantised model, or ``(quantised model, report)``. It gives the same bytes on every tinygrad device.
    :raises QuantizeError: nothing to quantise (with the reason for every layer), a model that is quantised already,
        unusable calibration inputs, values that are not finite
    """
    batches = batches_of(calibration_inputs)
    if not callable(model) and not isinstance(model, (list, tuple)):
        raise QuantizeError(f"the model ({type(model).__name__}) can neither be called nor is it a list of layers")
    graph = ModelGraph(model)
    refused = {name: reason for name, layer in graph.layers.items() if (reason := _refusal(name, layer))}
    linears = {name: layer for name, layer in graph.layers.items() if name not in refused}
    trace = record(graph, linears, batches, keep=report)
    folded = rectifiable(graph, linears, batches, trace)
    ranges = shared_ranges(trace, folded)
    quantised: dict[str, QLinear] = {}
    for name, layer in linears.items():
        if reason := _unusable(trace.observations[name]):
            refused[name] = reason
            continue
        try:
            quantised[name] = _quantised(layer, *ranges[name], name in folded)
        except NumericsError as error:
            refused[name] = str(error)
    if not quantised:
        listed = (
            "; ".join(f"{name}: {reason}" for name, reason in refused.items()) or "it holds no layer of tinygrad.nn"
        )
        raise QuantizeError(f"no layer of {_name_of(model)} can be quantised: {listed}")
    result = graph.substitute({id(linears[name]): layer for name, layer in quantised.items()})
    if not report:
        return result
    return result, _report(graph, batches, trace, ranges, quantised, refused)


def _name_of(model: Any) -> str:
    return (
        "the list of layers" if isinstance(model, (list, tuple)) else getattr(model, "__name__", type(model).__name__)
    )


def _refusal(name: str, layer: Any) -> str:
    """Why a layer cannot be quantised whatever the data, or "". :raises QuantizeError: it is quantised already."""
    if isinstance(layer, QLinear):
        raise QuantizeError(
            f"layer {name!r} is quantised already: quantize the float model with all calibration inputs"
        )
    if not isinstance(layer, nn.Linear):
        return f"no uint8 form of {type(layer).__name__}"
    if type(layer).__call__ is not nn.Linear.__call__:
        return f"{type(layer).__name__} computes something else than nn.Linear"
    if isinstance(layer.weight.device, tuple):
        return f"its weight is spread over the devices {', '.join(layer.weight.device)}"
    return ""


def _unusable(seen: Observation) -> str:
    if seen.calls == 0 or seen.inputs.lo > seen.inputs.hi:
        return "not called with data by the calibration inputs"
    return f"the model reads its attribute {seen.attribute!r} itself" if seen.attribute else ""


def _quantised(layer: nn.Linear, inputs: Range, outputs: Range, relu: bool) -> QLinear:
    weight = layer.weight.float().numpy()
    bias = None if layer.bias is None else layer.bias.float().numpy()
    x, y = Quant.of_range(inputs.lo, inputs.hi), Quant.of_range(outputs.lo, outputs.hi)
    return QLinear.from_float(weight, bias, x, y, relu=relu, device=layer.weight.device)


def _remark(seen: Observation, layer: QLinear, quantised: Mapping[str, QLinear]) -> str:
    linked = [p for p in seen.producers if p in quantised and quantised[p].quant.y == layer.quant.x]
    parts = ["ReLU merged"] if layer.quant.relu else []
    return ", ".join(parts + [f"takes the codes of {name}" for name in linked])


class _Reference:
    """A quantised layer computed in NumPy: the report must not take the chip's time."""

    def __init__(self, layer: QLinear) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return Tensor(self.layer.reference(x.numpy()), device=x.device)


def _report(
    graph: ModelGraph,
    batches: list[tuple[Any, ...]],
    trace: Trace,
    ranges: Mapping[str, tuple[Range, Range]],
    quantised: Mapping[str, QLinear],
    refused: Mapping[str, str],
) -> Report:
    entries = []
    for name, layer in graph.layers.items():
        kind = type(layer).__name__
        if name in refused:
            seen = trace.observations.get(name)
            entries.append(LayerReport(name, kind, "host", refused[name], seen.calls if seen else 0))
            continue
        seen, q = trace.observations[name], quantised[name]
        inputs, outputs = ranges[name]
        floats = [np.maximum(y, 0) if q.quant.relu else y for _, y in seen.samples]
        error = Error.between(floats, [q.reference(x) for x, _ in seen.samples])
        spans = (inputs.lo, inputs.hi), (outputs.lo, outputs.hi)
        entries.append(LayerReport(name, kind, "chip", _remark(seen, q, quantised), seen.calls, *spans, q.quant, error))
    stand_ins = {id(graph.layers[name]): _Reference(layer) for name, layer in quantised.items()}
    outputs = outputs_of(graph.substitute(stand_ins, keep_jits=False), batches)
    return Report(tuple(entries), Error.between(trace.outputs, outputs))
