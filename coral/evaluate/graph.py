"""Walking a graph operator by operator. Source: docs/numerics.md, "Layer references"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral.evaluate.operands import Call, EvaluateError, Operand
from coral.evaluate.operators import OPERATORS
from coral.package.graph import Graph, Model, read_model

Source = Graph | Model | Path | str | bytes


def evaluate(source: Source, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Outputs of a model by name: what the chip computes, bit for bit, with the host's operators around it.

    :param source: a TFLite file (path or bytes), not compiled, or its graph
    :param inputs: by tensor name, with exactly the tensors' shapes and dtypes
    :raises EvaluateError: an input is missing, unknown or of other shape or dtype; an operator is not known
    """
    graph = _graph_of(source)
    values = evaluate_all(graph, inputs)
    return {graph.tensors[index].name: values[index] for index in graph.outputs}


def evaluate_all(source: Source, inputs: Mapping[str, NDArray[Any]]) -> dict[int, NDArray[Any]]:
    """As :func:`evaluate`, but the value of every tensor that has one, constants included, by tensor number."""
    graph = _graph_of(source)
    values: dict[int, NDArray[Any]] = {i: t.data for i, t in enumerate(graph.tensors) if t.data is not None}
    values.update(_checked_inputs(graph, inputs))
    for number, op in enumerate(graph.operators):
        if op.name not in OPERATORS:
            raise EvaluateError(f"operator {number} is {op.name}, which has no reference function yet")
        operands = tuple(None if i < 0 else Operand(graph.tensors[i], values.get(i)) for i in op.inputs)
        targets = [i for i in op.outputs if i >= 0]
        call = Call(op.name, operands, tuple(Operand(graph.tensors[i]) for i in targets), op.options)
        values.update(zip(targets, OPERATORS[op.name](call), strict=True))
    missing = [graph.tensors[i].name for i in graph.outputs if i not in values]
    if missing:
        raise EvaluateError(f"no operator computes the output {missing[0]!r}")
    return values


def _graph_of(source: Source) -> Graph:
    if isinstance(source, Graph):
        return source
    return (source if isinstance(source, Model) else read_model(source)).main


def _checked_inputs(graph: Graph, inputs: Mapping[str, NDArray[Any]]) -> dict[int, NDArray[Any]]:
    expected = {graph.tensors[index].name: index for index in graph.inputs}
    if set(inputs) != set(expected):
        raise EvaluateError(f"the model's inputs are {sorted(expected)}, given are {sorted(inputs)}")
    for name, array in inputs.items():
        tensor = graph.tensors[expected[name]]
        if not isinstance(array, np.ndarray) or array.shape != tensor.shape or array.dtype != tensor.dtype:
            given = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise EvaluateError(f"input {name!r} must be {tensor.dtype} {tensor.shape}, given is {given}")
    return {expected[name]: array for name, array in inputs.items()}
