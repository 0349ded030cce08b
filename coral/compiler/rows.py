"""Operators whose image is too large for one program: a program per band of rows, the host cuts and joins.

Source: docs/compiler.md, section Bands of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from coral.codegen import CodegenError, ShapeError
from coral.codegen import network as nw
from coral.compiler.lowering import Lowering, Value
from coral.package.graph import Operator, Tensor

COUNTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Numbers of bands that are tried."""
MASKS: dict[str, Any] = dict.fromkeys(
    ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"), 0
)
Band = tuple[nw.RowBand, nw.NetworkProgram]


def banded(network: nw.Network, make: Callable[[nw.Network], nw.NetworkProgram]) -> list[Band]:
    """The fewest bands of rows for all of which ``make`` finds a program. :raises CodegenError: there are none."""
    problem: CodegenError | None = None
    for count in COUNTS:
        try:
            bands = nw.in_rows(network, count)
            middle = make(bands[count // 2].network)
            return [(b, middle if k == count // 2 else make(b.network)) for k, b in enumerate(bands)]
        except CodegenError as error:
            problem = error
    raise problem or ShapeError("no bands")


class Cut:
    """A graph with more tensors and operators behind its own, by which the host cuts what bands of rows read
    (``before``, numbers of operators) and joins what they make (``behind``).

    ``bands``: for every band what its tensors are called in the graph (a copy of ``lowering``), numbers of the inputs,
    the graph's outputs by the network's names, the program.
    """

    def __init__(
        self, lowering: Lowering, names: tuple[str, ...], outputs: Mapping[str, int], bands: list[Band]
    ) -> None:
        graph = lowering.graph
        self._tensors, self._names, self._operators = list(graph.tensors), list(names), list(graph.operators)
        self.before: list[int] = []
        self.behind: list[int] = []
        whole = {
            t.name: t for t in map(lowering.tensors.__getitem__, (lowering.values[i].name for i in lowering.inputs))
        }
        sources = {name: self._seen(lowering, name, t) for name, t in whole.items()}
        parts: dict[str, list[int]] = {name: [] for name in outputs}
        made = []
        for band, _ in bands:
            ends = {name: self._rows(sources[name], band.rows[name], self.before) for name in band.network.inputs}
            results = {}
            for name, number in outputs.items():
                (start, end), wanted, t = band.rows[name], band.wanted[name], band.network.tensors[name]
                results[name] = self._tensor(number, (1, t.y, t.x, t.c), f"rows {start}..{end - 1}")
                mine = self._rows(results[name], (wanted[0] - start, wanted[1] - start), self.behind)
                parts[name].append(mine)
            made.append((ends, results))
        for name, number in outputs.items():
            t = lowering.tensors[name]
            shape = (1, t.y, t.x, t.c)
            joined = number if graph.tensors[number].shape == shape else self._tensor(number, shape, "joined")
            options = {"axis": 1, "fused_activation_function": "NONE"}
            self._operator("CONCATENATION", parts[name], joined, options, "ConcatenationOptions", self.behind)
            if joined != number:
                self._reshape(joined, number, self.behind)
        self.graph = replace(graph, tensors=tuple(self._tensors), operators=tuple(self._operators))
        self.names = tuple(self._names)
        self.bands = [
            (self._lowering(lowering, band, ends | results), tuple(ends.values()), results, program)
            for (band, program), (ends, results) in zip(bands, made, strict=True)
        ]

    def _lowering(self, lowering: Lowering, band: nw.RowBand, ends: dict[str, int]) -> Lowering:
        mine, tensors = copy(lowering), band.network.tensors
        mine.graph, mine.names = self.graph, self.names
        values = {i: Value(n, (tensors[n].y, tensors[n].x, tensors[n].c)) for n, i in ends.items()}
        mine.values = lowering.values | values
        return mine

    def _seen(self, lowering: Lowering, name: str, t: nw.Tensor) -> int:
        """An input as ``[1, rows, columns, channels]``."""
        number = next(i for i in lowering.inputs if lowering.values[i].name == name)
        shape = (1, t.y, t.x, t.c)
        if self._tensors[number].shape == shape:
            return number
        seen = self._tensor(number, shape, "map")
        self._reshape(number, seen, self.before)
        return seen

    def _rows(self, source: int, rows: nw.Rows, into: list[int]) -> int:
        """A tensor that holds some rows of another."""
        shape = self._tensors[source].shape
        if rows == (0, shape[1]):
            return source
        result = self._tensor(source, (1, rows[1] - rows[0], *shape[2:]), f"rows {rows[0]}..{rows[1] - 1}")
        ends = [[0, rows[0], 0, 0], [1, rows[1], *shape[2:]], [1, 1, 1, 1]]
        bounds = [self._constant(values) for values in ends]
        self._operator("STRIDED_SLICE", [source, *bounds], result, MASKS, "StridedSliceOptions", into)
        return result

    def _reshape(self, source: int, target: int, into: list[int]) -> None:
        shape = self._tensors[target].shape
        self._operator("RESHAPE", [source, self._constant(shape)], target, {"new_shape": shape}, "ReshapeOptions", into)

    def _operator(
        self, name: str, inputs: list[int], output: int, options: dict[str, Any], kind: str, into: list[int]
    ) -> None:
        version = 2 if self._tensors[output].dtype == np.int8 and name != "RESHAPE" else 1
        into.append(len(self._operators))
        self._operators.append(Operator(name, tuple(inputs), (output,), dict(options), (), None, kind, version))

    def _constant(self, values: Any) -> int:
        data, none = np.array(values, np.int32), (np.zeros(0, np.float32), np.zeros(0, np.int64))
        return self._append(Tensor("", data.shape, 2, data.dtype, *none, 0, data, False), f"bounds {len(self._names)}")

    def _tensor(self, like: int, shape: tuple[int, ...], what: str) -> int:
        return self._append(replace(self._tensors[like], shape=shape), f"{self._names[like]}:{what}")

    def _append(self, tensor: Tensor, name: str) -> int:
        while name in self._names:
            name += "'"
        self._tensors.append(replace(tensor, name=name))
        self._names.append(name)
        return len(self._names) - 1
