"""Walking a graph operator by operator. Source: docs/evaluate.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import CoralError
from coral.evaluate.host import HOST
from coral.evaluate.operands import MAX_ELEMENTS, OPERATORS, Call, EvaluateError, Function, Generation, Operand
from coral.evaluate.reductions import resizable
from coral.package.graph import Graph, Model, Operator, read_model

Source = Graph | Model | Path | str | bytes
PLAIN = {np.dtype(name) for name in ("f2", "f4", "f8", "i4", "i8", "u4", "u8", "?")}
"""Dtypes that are no codes."""


def evaluate(
    source: Source,
    inputs: Mapping[str, NDArray[Any]],
    *,
    generation: Generation = "new",
    outputs: Iterable[str] | None = None,
    intermediates: bool = False,
) -> dict[str, NDArray[Any]]:
    """Tensors of a model by name: what the chip computes, bit for bit.

    Only the operators between ``inputs`` and ``outputs`` run, so the chip's part of a model can be computed alone.
    Variables (states of an LSTM) that are not given start at their zero points; asked for, they are the final states.

    :param source: a TFLite file (path or bytes), not compiled, or its graph
    :param inputs: by tensor name, inner tensors too, with exactly the tensors' shapes and dtypes
    :param generation: of the compiler whose average pools and softmax are computed
    :param outputs: names of the wanted tensors, inner ones too; the model's outputs by default
    :param intermediates: also return every tensor computed on the way
    :raises EvaluateError: an input is missing, unknown or of other shape or dtype; an operator, option or dtype is not
        known; the message names operator and tensor
    """
    if generation not in ("new", "old"):
        raise EvaluateError(f"generation {generation!r} is neither 'new' nor 'old'")
    graph = graph_of(source)
    wanted = graph.outputs if outputs is None else tuple(tensor_number(graph, name) for name in outputs)
    values = _checked_inputs(graph, inputs)
    operators = operators_between(graph, values, wanted)
    values.update({i: t.data for i, t in enumerate(graph.tensors) if t.data is not None and i not in values})
    for i in graph.inputs:
        if i not in values and any(i in graph.operators[number].inputs for number in operators):
            tensor = graph.tensors[i]
            raise EvaluateError(f"the input {tensor.name!r}, {tensor.dtype} {tensor.shape}, is needed and not given")
    computed = set(wanted)
    for number in operators:
        targets, results = _run(graph, number, values, generation)
        values.update(zip(targets, results, strict=True))
        computed.update(targets)
    missing = [graph.tensors[i].name for i in wanted if i not in values]
    if missing:
        raise EvaluateError(f"no operator computes the output {missing[0]!r}")
    return {graph.tensors[i].name: values[i] for i in (sorted(computed) if intermediates else wanted)}


def operators_between(graph: Graph, given: Iterable[int], wanted: Iterable[int]) -> list[int]:
    """Numbers of the operators that compute the tensors ``wanted`` from the tensors ``given``, in the graph's order."""
    given, needed = set(given), set(wanted)
    found = []
    for number, op in reversed(tuple(enumerate(graph.operators))):
        produced = {i for i in op.outputs if i >= 0 and i not in given} | set(_states(graph, op))
        if needed & produced:
            found.append(number)
            needed |= set(op.inputs)
    return found[::-1]


def graph_of(source: Source) -> Graph:
    """The main graph of ``source``. :raises coral.package.PackageError: the file cannot be read."""
    if isinstance(source, Graph):
        return source
    return (source if isinstance(source, Model) else read_model(source)).main


def tensor_number(graph: Graph, name: str) -> int:
    """The number of the only tensor with a name. :raises EvaluateError: there is none, or there are several."""
    numbers = [i for i, tensor in enumerate(graph.tensors) if tensor.name == name]
    if len(numbers) != 1:
        raise EvaluateError(f"the graph has {len(numbers) or 'no'} tensors named {name!r}, needed is one")
    return numbers[0]


def _states(graph: Graph, op: Operator) -> list[int]:
    return [i for i in op.inputs if i >= 0 and graph.tensors[i].is_variable]


def _run(
    graph: Graph, number: int, values: dict[int, NDArray[Any]], generation: Generation, *, host: bool = False
) -> tuple[list[int], tuple[NDArray[Any], ...]]:
    """Numbers and values of an operator's outputs and, behind them, of the variables that it updates."""
    op, tensors = graph.operators[number], graph.tensors
    targets = [i for i in op.outputs if i >= 0]
    place = f"operator {number}, {op.name} {tensors[targets[0]].name if targets else ''!r}"
    for i in targets + _states(graph, op):
        if min(tensors[i].shape, default=1) < 0 or math.prod(max(n, 1) for n in tensors[i].shape) > MAX_ELEMENTS:
            shape = f"tensor {tensors[i].name!r} has the shape {tensors[i].shape}"
            raise EvaluateError(f"{place}: {shape}, supported are up to {MAX_ELEMENTS} elements")
    for i in _states(graph, op):
        values.setdefault(i, _initial_state(tensors[i]))
    operands = tuple(None if i < 0 else Operand(tensors[i], values.get(i)) for i in op.inputs)
    call = Call(op.name, operands, tuple(Operand(tensors[i]) for i in targets), op.options, generation)
    try:
        results = function_of(call, host)(call)
    except CoralError as error:
        raise EvaluateError(f"{place}: {error}") from error
    return (targets + _states(graph, op))[: len(results)], results


def function_of(call: Call, host: bool) -> Function:
    """An operator's function: the chip's formula for codes, the host's for other dtypes and where the chip has none.

    ``host``: the operator was left to the host, also what the chip's formulas refuse about resizing is computed.
    :raises EvaluateError: there is none
    """
    plain = all(y.tensor.dtype in PLAIN for y in call.outputs)
    resized = host and call.name.startswith("RESIZE") and not resizable(call)
    first, second = (HOST, OPERATORS) if plain or resized else (OPERATORS, HOST)
    function = first.get(call.name) or second.get(call.name)
    if function is None:
        raise EvaluateError("the operator has no reference function")
    return function


ANY = {"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "SPLIT", "SPLIT_V", "DEQUANTIZE"}
"""Operators whose function for codes is one for all dtypes."""


def known(graph: Graph, numbers: Iterable[int]) -> bool:
    """Whether there are functions for all these operators, on the dtypes that they have."""
    for op in (graph.operators[number] for number in numbers):
        plain = any(graph.tensors[i].dtype in PLAIN for i in op.outputs if i >= 0)
        if op.name not in HOST and (op.name not in OPERATORS or (plain and op.name not in ANY)):
            return False
    return True


def run_operators(graph: Graph, numbers: Iterable[int], values: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
    """What operators compute, in this order, by tensor number, from the values of tensors (constants are known).

    :raises EvaluateError: as :func:`evaluate`
    """
    found = {i: t.data for i, t in enumerate(graph.tensors) if t.data is not None} | dict(values)
    computed: dict[int, NDArray[Any]] = {}
    for number in numbers:
        targets, results = _run(graph, number, found, "new", host=True)
        computed |= dict(zip(targets, results, strict=True))
        found |= computed
    return computed


def _initial_state(tensor: Any) -> NDArray[Any]:
    zero = tensor.zero_points[0] if len(tensor.zero_points) else 0
    return np.full(tensor.shape, zero, tensor.dtype)


def _checked_inputs(graph: Graph, inputs: Mapping[str, NDArray[Any]]) -> dict[int, NDArray[Any]]:
    values = {}
    for name, array in inputs.items():
        tensor = graph.tensors[number := tensor_number(graph, name)]
        if not isinstance(array, np.ndarray) or array.shape != tensor.shape or array.dtype != tensor.dtype:
            given = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise EvaluateError(f"input {name!r} must be {tensor.dtype} {tensor.shape}, given is {given}")
        values[number] = array
    return values
