"""A partitioned graph as a TFLite file: custom operators of the chip, TFLite's own on the host around them.

Source: docs/compiler.md, section File.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coral.compiler.errors import CompileError
from coral.compiler.partition import Partition, Segment
from coral.compiler.placing import renamed
from coral.package.container import Package, write_package
from coral.package.extras import associated_files, with_files
from coral.package.graph import Model, Operator, Tensor
from coral.package.graph_file import write_model
from coral.package.program import Layer
from coral.package.tflite_file import CUSTOM_CODE, CustomMap, write_custom_map

INT32 = 2
PADDED = ":padded"


def compiled_file(model: Model, partition: Partition, packages: Sequence[Package]) -> bytes:
    """The file of a partition, whose segments have these packages."""
    writer = _Writer(partition)
    left = iter(packages)
    for item in partition.order:
        if isinstance(item, Segment):
            writer.segment(item, next(left))
        else:
            writer.operators.append(partition.graph.operators[item])
    graph = replace(partition.graph, tensors=tuple(writer.tensors), operators=tuple(writer.operators))
    data = write_model([graph, *model.graphs[1:]], source=model.source, extras=model.extras)
    return with_files(data, associated_files(model.source))


class _Writer:
    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.tensors = [replace(t, name=name) for t, name in zip(partition.graph.tensors, partition.names, strict=True)]
        self.operators: list[Operator] = []

    def segment(self, segment: Segment, package: Package) -> None:
        program = package.execution
        padded = {self.tensors[i].name: self._padded(i, layer) for i, layer in _matched(self, segment, program.inputs)}
        outputs = {self.tensors[i].name: i for i in segment.outputs.values()}
        names = {name: (self.tensors[i].name, None) for name, i in padded.items()}
        package = replace(package, programs=tuple(renamed(p, names) for p in package.programs))
        options = write_custom_map(CustomMap(), write_package(package))
        ends = [[table[layer.name] for layer in side] for table, side in (
            ({self.tensors[i].name: i for i in padded.values()}, package.execution.inputs), (outputs, program.outputs)
        )]  # fmt: skip
        self.operators.append(Operator(CUSTOM_CODE, tuple(ends[0]), tuple(ends[1]), {}, (), options, "", 1, True))

    def _padded(self, number: int, layer: Layer) -> int:
        """The tensor that the layer takes: itself, or with rows, columns and channels of zero points in addition."""
        tensor = self.tensors[number]
        if math.prod(tensor.shape) == layer.y * layer.x * layer.z * layer.executions:
            return number
        images = tensor.shape[0]
        y, x, c = (*(1,) * (4 - len(tensor.shape)), *tensor.shape[1:])
        rows, rest = divmod(layer.y * layer.executions, images)
        if rest or rows < y or layer.x < x or layer.z < c:
            raise CompileError(
                f"batch {images} of {tensor.name!r} is not {layer.executions} passes of {layer.y} rows: choose a "
                "multiple of the images of a pass"
            )
        if len(tensor.shape) != 4:
            shape = (images, y, x, c)
            reshaped = self._new(replace(tensor, shape=shape, name=f"{tensor.name}:rows"))
            target = self._constant(np.array(shape, np.int32), f"{tensor.name}:rows:shape")
            self._operator("RESHAPE", (number, target), reshaped, {"new_shape": shape}, "ReshapeOptions")
            number = reshaped
        pads = np.array([[0, 0], [0, rows - y], [0, layer.x - x], [0, layer.z - c]], np.int32)
        shape = (images, rows, layer.x, layer.z)
        result = self._new(replace(tensor, shape=shape, name=f"{tensor.name}{PADDED}"))
        version = 2 if tensor.dtype == np.int8 else 1
        self._operator("PAD", (number, self._constant(pads, f"{tensor.name}:pads")), result, {}, "PadOptions", version)
        return result

    def _operator(
        self, name: str, inputs: tuple[int, ...], output: int, options: dict[str, Any], kind: str, version: int = 1
    ) -> None:
        self.operators.append(Operator(name, inputs, (output,), options, (), None, kind, version))

    def _new(self, tensor: Tensor) -> int:
        names = {t.name for t in self.tensors}
        while tensor.name in names:
            tensor = replace(tensor, name=f"{tensor.name}'")
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _constant(self, data: np.ndarray, name: str) -> int:
        none = np.zeros(0, np.float32), np.zeros(0, np.int64)
        return self._new(Tensor(name, data.shape, INT32, data.dtype, *none, 0, data, False))


def _matched(writer: _Writer, segment: Segment, layers: Iterable[Layer]) -> list[tuple[int, Layer]]:
    numbers = {writer.tensors[i].name: i for i in segment.inputs}
    return [(numbers[layer.name], layer) for layer in layers]
