"""What a compiled file's chip part computes of the original graph, and differences between two results.

Source: docs/evaluate.md, "Comparing with a compiled file".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral.evaluate.graph import Source, evaluate, graph_of, operators_between, tensor_number
from coral.evaluate.operands import EvaluateError, Generation
from coral.package.graph import Graph, Tensor
from coral.package.program import Kind, Layer
from coral.package.tflite_file import SIGN_OFFSETS, TENSOR_TYPES, EdgeTpuModel, read_edgetpu

PREPARING = {"PAD", "RESHAPE"}
"""Operators by which the host makes an input of the chip of a tensor of the model."""
STATE_SUFFIX = "_variable_output"
"""What the compiler appends to a variable's name in the layer that carries its new value."""


@dataclass(frozen=True)
class ChipPart:
    """The part of a graph that a compiled file runs on the chip.

    ``inputs`` and ``outputs`` map the package's layer names to tensors of the original graph (the new values of
    variables to the variables; what the host only pads or reshapes to the tensor before that). ``operators`` are the
    numbers of the original operators that the chip computes, ``host_operators`` those that are left to the host, before
    and behind the chip part.
    """

    graph: Graph
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    operators: tuple[int, ...]
    host_operators: tuple[int, ...]
    generation: Generation

    def evaluate(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """What the chip must return, by layer name in the tensors' shapes, for inputs by layer name in any shape of as
        many elements.

        :raises EvaluateError: as :func:`coral.evaluate.evaluate`
        """
        if set(inputs) != set(self.inputs):
            raise EvaluateError(f"the chip part's inputs are {sorted(self.inputs)}, given are {sorted(inputs)}")
        shaped = {self.inputs[name].name: _in_shape(self.inputs[name], array) for name, array in inputs.items()}
        wanted = {name: tensor.name for name, tensor in self.outputs.items()}
        values = evaluate(self.graph, shaped, generation=self.generation, outputs=wanted.values())
        return {name: values[tensor] for name, tensor in wanted.items()}

    def random_inputs(self, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Uniform values of the whole dtype for every input, by layer name."""
        limits = {name: np.iinfo(tensor.dtype) for name, tensor in self.inputs.items() if tensor.dtype is not None}
        return {
            name: rng.integers(limit.min, limit.max, self.inputs[name].shape, limit.dtype, endpoint=True)
            for name, limit in limits.items()
        }


def chip_part(original: Source, compiled: EdgeTpuModel | Path | str | bytes) -> ChipPart:
    """Finds a compiled file's chip part in the original graph, by the layers' names.

    :raises EvaluateError: the file was not compiled from this graph: a layer's tensor is missing or has another size,
        dtype, scale or zero point
    """
    graph = graph_of(original)
    file = compiled if isinstance(compiled, EdgeTpuModel) else read_edgetpu(compiled)
    program = next((p for p in file.package.programs if p.kind != Kind.PARAMETER_CACHING), None)
    if program is None:
        raise EvaluateError("the compiled file holds no program with inputs and outputs")
    inputs = {layer.name: _tensor_of(graph, layer, _origin(graph, file.graph, layer.name)) for layer in program.inputs}
    outputs = {layer.name: _tensor_of(graph, layer, layer.name.removesuffix(STATE_SUFFIX)) for layer in program.outputs}
    numbers = [[tensor_number(graph, tensor.name) for tensor in ends.values()] for ends in (inputs, outputs)]
    operators = tuple(operators_between(graph, *numbers))
    host = tuple(number for number in range(len(graph.operators)) if number not in operators)
    older = any(p.estimated_cycles for p in file.package.programs)
    return ChipPart(graph, inputs, outputs, operators, host, "old" if older else "new")


def _origin(graph: Graph, compiled: Graph, name: str) -> str:
    """The tensor of the original graph that the host pads or reshapes for an input of the chip, or its own name."""
    makers = {compiled.tensors[i].name: op for op in compiled.operators for i in op.outputs if op.name in PREPARING}
    known = {tensor.name for tensor in graph.tensors}
    while name not in known and name in makers:
        name = compiled.tensors[makers.pop(name).inputs[0]].name
    return name


def _tensor_of(graph: Graph, layer: Layer, name: str) -> Tensor:
    tensor = graph.tensors[tensor_number(graph, name)]
    zero_point = layer.zero_point - SIGN_OFFSETS.get(layer.dtype, 0)
    size = layer.y * layer.x * layer.z * layer.executions
    padded = layer.name.removesuffix(STATE_SUFFIX) != name and size >= math.prod(tensor.shape)
    here = (size if padded else math.prod(tensor.shape), tensor.type, tensor.scale, tensor.zero_point)
    there = (size, TENSOR_TYPES[layer.dtype], layer.scale, zero_point)
    if here != there:
        raise EvaluateError(
            f"layer {layer.name!r} has (elements, type, scale, zero point) {there}, the graph's tensor {here}: the "
            "file was compiled from another graph"
        )
    return tensor


def _in_shape(tensor: Tensor, array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(tensor.shape) if array.size == math.prod(tensor.shape) else array


@dataclass(frozen=True)
class Difference:
    """How two results differ: number of values, and how many are off by each amount (actual - expected, none by 0)."""

    values: int
    amounts: dict[int, int]

    @property
    def differing(self) -> int:
        """How many values differ."""
        return sum(self.amounts.values())

    @property
    def largest(self) -> int:
        """The largest absolute difference, 0 where all are equal."""
        return max(map(abs, self.amounts), default=0)


def difference(expected: NDArray[Any], actual: NDArray[Any]) -> Difference:
    """Compares integer arrays of equally many elements, in any shapes.

    :raises EvaluateError: other numbers of elements, or not integers
    """
    if expected.size != actual.size or not all(np.issubdtype(a.dtype, np.integer) for a in (expected, actual)):
        raise EvaluateError(f"cannot compare {expected.dtype} {expected.shape} with {actual.dtype} {actual.shape}")
    off = actual.astype(np.int64).ravel() - expected.astype(np.int64).ravel()
    amounts, counts = np.unique(off[off != 0], return_counts=True)
    return Difference(off.size, dict(zip(amounts.tolist(), counts.tolist(), strict=True)))
