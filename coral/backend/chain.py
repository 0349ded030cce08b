"""Layers that one chip program computes: which values they read and write, and the network that they are.

Source: docs/backend.md, "Chip programs" and "Fusion".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from coral.backend.layers import Image, Layer, from_json

if TYPE_CHECKING:
    from coral.codegen import network as nw

MAGIC = "//coral chip program 2\n"


@dataclass(frozen=True)
class Value:
    """uint8 images; padding and absent images are ``zero_point``."""

    image: Image
    zero_point: int

    @property
    def nhwc(self) -> tuple[int, int, int, int]:
        """Images, rows, columns, channels."""
        n, c, h, w = self.image
        return n, h, w, c


@dataclass(frozen=True)
class Step:
    """``layer`` of the values numbered ``reads``; ``parameters`` are numbers of arguments."""

    layer: Layer
    reads: tuple[int, ...]
    parameters: tuple[int, ...]
    writes: int


@dataclass(frozen=True)
class Chain:
    """Steps in order of execution. ``inputs`` and ``outputs`` are pairs of a value and the argument that holds it;
    arguments are numbered in the order outputs, inputs, parameters. Every value has the same number of images.
    """

    values: tuple[Value, ...]
    steps: tuple[Step, ...]
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]

    def to_source(self) -> str:
        """The text tinygrad carries as the program's source."""
        fields = {
            "values": [[v.image, v.zero_point] for v in self.values],
            "steps": [{**asdict(s), "layer": s.layer.to_json()} for s in self.steps],
            "inputs": self.inputs,
            "outputs": self.outputs,
        }
        return MAGIC + json.dumps(fields)

    @classmethod
    def from_source(cls, source: bytes) -> Chain:
        """The inverse of :meth:`to_source`."""
        fields: dict[str, Any] = json.loads(source.decode().removeprefix(MAGIC))
        steps = (
            Step(from_json(s["layer"]), tuple(s["reads"]), tuple(s["parameters"]), s["writes"]) for s in fields["steps"]
        )
        values = (Value((n, c, h, w), zero_point) for (n, c, h, w), zero_point in fields["values"])
        pairs = ([(value, argument) for value, argument in fields[name]] for name in ("inputs", "outputs"))
        return cls(tuple(values), tuple(steps), *map(tuple, pairs))

    @property
    def images(self) -> int:
        """Images of a call; for linear layers, rows."""
        return self.values[0].image[0]

    @property
    def name(self) -> str:
        """For people: the layer, or how many they are."""
        first = self.steps[0].layer
        if len(self.steps) == 1:
            return "_".join(("coral", type(first).__name__.lower(), *map(str, first.shape), *map(str, first.sizes)))
        return f"coral_{len(self.steps)}_layers"

    def identity(self) -> bytes:
        """A name for what is computed, whatever the number of images and the contents of the parameters."""
        place = {number: k for k, number in enumerate(self.parameters)}
        layers = [
            (s.layer.to_json() | {"shape": None}, s.reads, [place[number] for number in s.parameters], s.writes)
            for s in self.steps
        ]
        values = [(v.image[1:], v.zero_point) for v in self.values]
        ends = [[value for value, _ in pairs] for pairs in (self.inputs, self.outputs)]
        return hashlib.blake2b(json.dumps([layers, values, ends]).encode(), digest_size=16).digest()

    @property
    def parameters(self) -> tuple[int, ...]:
        """Numbers of the arguments that hold weights, biases and multipliers."""
        return tuple(dict.fromkeys(number for step in self.steps for number in step.parameters))

    def only(self, number: int) -> Chain:
        """Step ``number`` alone; its values keep their numbers, arguments of inputs and outputs are the values'."""
        step = self.steps[number]
        reads = tuple((value, value) for value in dict.fromkeys(step.reads))
        return replace(self, steps=(step,), inputs=reads, outputs=((step.writes, step.writes),))

    def network(self, arrays: Mapping[int, np.ndarray]) -> nw.Network:
        """What the chip has to compute; values are tensors named by :func:`tensor`.

        :param arrays: weights, biases and multipliers by number of argument
        :raises CodegenError: no chip program computes such a network, whatever its weights; with limit and number
        """
        from coral.backend.stages import stage
        from coral.codegen import network as nw

        tensors, stages = {}, []
        for number in sorted({value for step in self.steps for value in (*step.reads, step.writes)}):
            value = self.values[number]
            tensors[tensor(number)] = nw.Tensor(tensor(number), *value.nhwc[1:], value.zero_point)
        for step in self.steps:
            layer = step.layer
            if layer.keeps_codes:
                layer = replace(layer, out_zp=self.values[step.writes].zero_point)
            reads, image = tuple(tensor(value) for value in step.reads), self.values[step.reads[0]].image
            stages.append(stage(layer, reads, tensor(step.writes), image, [arrays[k] for k in step.parameters]))
        inputs, outputs = (tuple(tensor(value) for value, _ in pairs) for pairs in (self.inputs, self.outputs))
        return nw.Network(self.name, tensors, inputs, tuple(stages), outputs)


def tensor(value: int) -> str:
    """A value's name in the network."""
    return f"t{value}"


def without_contents(chain: Chain) -> dict[int, np.ndarray]:
    """Arrays of the right shapes for :meth:`Chain.network`, to find out whether it has limits."""
    arrays = {}
    for step in chain.steps:
        operands = step.layer.operands[step.layer.activations :]
        for number, (dtype, shape) in zip(step.parameters, operands, strict=True):
            arrays[number] = np.broadcast_to(np.ones((), np.dtype(dtype.fmt or "B")), shape)
    return arrays
