"""Operators of a TFLite graph as stages of one network. Source: docs/compiler.md, section Lowering."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coral import CoralError, numerics
from coral.codegen import network as nw
from coral.compiler.errors import Refused
from coral.evaluate.operands import CODE_OFFSETS, Call, Operand
from coral.package.graph import Graph, Operator, Tensor

Shape = tuple[int, int, int]
Pads = tuple[tuple[int, int], tuple[int, int]]
NO_PADS: Pads = ((0, 0), (0, 0))


@dataclass(frozen=True)
class Value:
    """A tensor of the graph inside a network: the network's tensor ``name`` read as ``shape`` (rows, columns, channels
    of an image), with ``pads`` positions of zero points around it that nothing has written yet."""

    name: str
    shape: Shape
    pads: Pads = NO_PADS


class Lowering:
    """A network that grows by operators of a graph, and what its tensors are called there.

    ``values``: by tensor number; ``inputs``: numbers of the tensors that come from outside, in order of first use;
    ``operators``: numbers of what was taken; ``made_by``: operator number of every stage, by the stage's output.
    """

    def __init__(self, graph: Graph, names: tuple[str, ...], images: int) -> None:
        self.graph, self.names, self.images = graph, names, images
        self.tensors: dict[str, nw.Tensor] = {}
        self.stages: list[nw.Stage] = []
        self.values: dict[int, Value] = {}
        self.inputs: list[int] = []
        self.operators: list[int] = []
        self.made_by: dict[str, int] = {}

    def take(self, number: int) -> None:
        """Append an operator. :raises Refused: it cannot follow; nothing has changed then."""
        op = self.graph.operators[number]
        before = dict(self.tensors), list(self.stages), dict(self.values), list(self.inputs), dict(self.made_by)
        try:
            if op.name not in OPERATORS:
                raise Refused(f"{op.name} has no program on the chip")
            OPERATORS[op.name](Step(self, number, op))
            if len(self.stages) > len(before[1]):
                self._checked(self.stages[len(before[1]) :])
        except CoralError as error:
            self.tensors, self.stages, self.values, self.inputs, self.made_by = before
            raise Refused(str(error)) from error
        self.operators.append(number)

    def _checked(self, stages: list[nw.Stage]) -> None:
        written = {stage.output for stage in stages}
        read = dict.fromkeys(name for stage in stages for name in stage.inputs if name not in written)
        nw.Network("operator", self.tensors, tuple(read), tuple(stages), (stages[-1].output,))

    def source(self, number: int) -> Value:
        """The value of a tensor; an input of the network if nothing here made it. :raises Refused: not codes."""
        if number not in self.values:
            tensor = self.graph.tensors[number]
            shape = image_shape(tensor, self.images)
            name = self.names[number]
            self.tensors[name] = nw.Tensor(name, *shape, *quantisation(tensor))
            self.values[number] = Value(name, shape)
            self.inputs.append(number)
        return self.values[number]

    def written(self, value: Value, number: int) -> Value:
        """A value whose pads are written."""
        if value.pads == NO_PADS:
            return value
        self.as_written(value)
        x = self.tensors[value.name]
        shape = (x.y + sum(value.pads[0]), x.x + sum(value.pads[1]), x.c)
        name = self.fresh(f"{value.name}:with pads", shape, x.zero_point, x.scale)
        before = value.pads[0][0], value.pads[1][0]
        self.add(nw.Pad((value.name,), name, numerics.integer_clamps(x.zero_point), before), number)
        return Value(name, shape)

    def as_written(self, value: Value) -> None:
        """:raises Refused: a value is seen in another shape than it lies on the tiles."""
        tensor = self.tensors[value.name]
        if value.shape != (tensor.y, tensor.x, tensor.c):
            raise Refused(
                f"reads {value.name!r} reshaped from {(tensor.y, tensor.x, tensor.c)} to {value.shape}, which moves "
                "values between tiles"
            )

    def fresh(self, name: str, shape: Shape, zero_point: int, scale: float) -> str:
        """A new tensor of the network that the graph does not have."""
        while name in self.tensors or name in self.names:
            name += "'"
        self.tensors[name] = nw.Tensor(name, *shape, zero_point, scale)
        return name

    def add(self, stage: nw.Stage, number: int) -> None:
        """Append a stage of operator ``number``."""
        self.stages.append(stage)
        self.made_by[stage.output] = number

    def network(self, name: str, outputs: tuple[str, ...]) -> nw.Network:
        """The network so far."""
        inputs = tuple(self.values[number].name for number in self.inputs)
        return nw.Network(name, dict(self.tensors), inputs, tuple(self.stages), outputs)


@dataclass(frozen=True)
class Step:
    """One operator while it is lowered."""

    lowering: Lowering
    number: int
    op: Operator

    @property
    def call(self) -> Call:
        """The operator as the judge sees it, constants included."""
        tensors = self.lowering.graph.tensors
        operands = tuple(None if i < 0 else Operand(tensors[i], tensors[i].data) for i in self.op.inputs)
        return Call(self.op.name, operands, tuple(Operand(tensors[i]) for i in self.op.outputs), self.op.options)

    def padded(self, index: int) -> Value:
        """Input ``index`` as a map, perhaps with pads. :raises Refused: it is constant, or not of codes."""
        if index >= len(self.op.inputs) or self.op.inputs[index] < 0:
            raise Refused(f"input {index} is missing")
        tensor = self.lowering.graph.tensors[self.op.inputs[index]]
        if tensor.data is not None:
            raise Refused(f"input {tensor.name!r} is a constant, which a network has no place for")
        return self.lowering.source(self.op.inputs[index])

    def view(self, index: int) -> Value:
        """Input ``index``, its pads written, in any shape."""
        return self.lowering.written(self.padded(index), self.number)

    def map(self, index: int) -> Value:
        """Input ``index`` with rows, columns and channels as they lie on the tiles. :raises Refused: reshaped ones."""
        value = self.view(index)
        self.lowering.as_written(value)
        return value

    def output(self, shape: Shape | None = None, index: int = 0) -> str:
        """The name of the tensor of output ``index``, which lies on the tiles as ``shape`` (the graph's by default)."""
        number, lowering = self.op.outputs[index], self.lowering
        tensor, name = lowering.graph.tensors[number], lowering.names[number]
        seen = image_shape(tensor, lowering.images)
        shape = shape or seen
        if math.prod(shape) != math.prod(seen):
            raise Refused(f"computes {shape} per image, its output {tensor.name!r} has {tensor.shape}")
        lowering.tensors[name] = nw.Tensor(name, *shape, *quantisation(tensor))
        lowering.values[number] = Value(name, seen)
        return name

    def same_as(self, value: Value, index: int = 0) -> None:
        """Output ``index`` is the same codes as a value."""
        self.lowering.values[self.op.outputs[index]] = value

    def add(self, stage: nw.Stage) -> None:
        """Append a stage."""
        self.lowering.add(stage, self.number)

    def clamps(self, activation: str | None = None) -> tuple[float, float]:
        """Limits of the output with the fused activation."""
        y = self.call.output
        return numerics.clamps(y.scale, y.zero_point, self.call.activation if activation is None else activation)


Function = Callable[[Step], None]
OPERATORS: dict[str, Function] = {}
"""How the operators become stages, by TFLite's builtin names."""


def lowers(*names: str) -> Callable[[Function], Function]:
    """Registers the lowering of the builtin operators ``names``."""

    def register(function: Function) -> Function:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def image_shape(tensor: Tensor, images: int) -> Shape:
    """Rows, columns and channels of one image of a tensor ``[images, ..]``. :raises Refused: it is no such tensor."""
    shape = tensor.shape
    if not 1 <= len(shape) <= 4 or shape[0] != images or min(shape) < 1:
        raise Refused(f"tensor {tensor.name!r} has shape {shape}: needed is [{images}, rows, columns, channels]")
    y, x, c = (*(1,) * (4 - len(shape)), *shape[1:])
    return y, x, c


def quantisation(tensor: Tensor) -> tuple[int, float]:
    """Zero point in codes and scale. :raises Refused: a tensor that is not of uint8 or int8 codes."""
    if tensor.dtype not in CODE_OFFSETS:
        raise Refused(f"tensor {tensor.name!r} is {tensor.dtype}, the chip computes uint8 or int8 codes")
    operand = Operand(tensor)
    return operand.zero_point, operand.scale


def scalar(mult: Any) -> float | np.ndarray:
    """A multiplier as the stages want it."""
    return float(mult) if np.ndim(mult) == 0 else np.asarray(mult, np.float32)


def unique_names(graph: Graph) -> tuple[str, ...]:
    """A name for every tensor: the graph's where it is the only one, else with the tensor's number."""
    counts: dict[str, int] = {}
    for tensor in graph.tensors:
        counts[tensor.name] = counts.get(tensor.name, 0) + 1
    return tuple(
        t.name if t.name and counts[t.name] == 1 else f"{t.name or 'tensor'}#{i}" for i, t in enumerate(graph.tensors)
    )


def renamed(graph: Graph) -> Graph:
    """The graph with unique tensor names."""
    names = unique_names(graph)
    return replace(graph, tensors=tuple(replace(t, name=n) for t, n in zip(graph.tensors, names, strict=True)))
