"""Operators that a compiled model leaves to the host: in NumPy, through tinygrad where that gives the same bytes and is
faster, or by ai-edge-litert (optional extra ``litert``).

Source: docs/run.md, section Operators of the host.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal

from numpy.typing import NDArray

from coral import CoralError
from coral.evaluate.graph import known, run_operators
from coral.evaluate.operands import CODE_OFFSETS
from coral.package.graph import IDENTIFIER, Graph
from coral.package.tflite_file import EdgeTpuModel

PACKAGE = "ai_edge_litert"
Step = Callable[[Mapping[int, NDArray[Any]]], dict[int, NDArray[Any]]]
"""From values of tensors by number to values of more."""
Way = Literal["auto", "numpy", "tinygrad"]
LARGE = 2**18
"""Elements of a tensor from which compiling pays; docs/run.md has the measurements."""
CHEAP = {
    "RESHAPE", "SQUEEZE", "EXPAND_DIMS", "CONCATENATION", "SPLIT", "SPLIT_V", "PAD", "PACK", "UNPACK", "TRANSPOSE",
    "SLICE", "STRIDED_SLICE", "CAST", "REDUCE_MAX", "REDUCE_MIN", "RESIZE_NEAREST_NEIGHBOR",
}  # fmt: skip
"""Operators that NumPy does as fast as compiled code, as it does all that give no codes but ARG_MAX and resizes."""


class HostError(CoralError):
    """Operators that ai-edge-litert, or tinygrad where it is asked for, cannot run."""


def available() -> bool:
    """Whether ai-edge-litert is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


@dataclass(frozen=True)
class HostRun:
    """Operators of the host that run together. ``note``: why tinygrad does not compute what it was meant to."""

    operators: tuple[str, ...]
    by: Literal["numpy", "tinygrad", "ai-edge-litert"]
    step: Step
    note: str = ""

    def __call__(self, values: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """Values of results by tensor number."""
        return self.step(values)


def host_runs(file: EdgeTpuModel, operators: Sequence[int], way: Way = "auto") -> list[HostRun]:
    """Operators of the host: by the judge's functions or compiled ones of the same results, else by ai-edge-litert.

    :param way: "tinygrad" for all that it computes exactly, "auto" for large tensors only; "auto" falls back to "numpy"
    :raises HostError: ai-edge-litert refuses the operators; tinygrad is asked for and cannot compile
    """
    graph = file.graph
    if not known(graph, operators):
        made = [i for number in operators for i in graph.operators[number].outputs if i >= 0]
        inputs = [i for i in _read(graph, operators) if i not in made and not graph.tensors[i].is_variable]
        return [HostRun(_names(graph, operators), "ai-edge-litert", HostPart(file, operators, inputs, made))]
    large = [number for number in operators if way == "tinygrad" or _is_large(graph, number)]
    chosen, note = set[int](), ""
    if large and way != "numpy":
        try:
            from coral.apps.host_tinygrad import is_exact

            chosen = {number for number in large if is_exact(graph, number)}
        except Exception as error:  # whatever an absent compiler or an unknown machine makes tinygrad raise
            note = _cannot(way, error)
    groups = [list(group) for _, group in groupby(operators, lambda number: number in chosen)]
    return [
        _compiled(graph, group, way)
        if group[0] in chosen and (way == "tinygrad" or any(_is_dear(graph, number) for number in group))
        else _in_numpy(graph, group, note)
        for group in groups
    ]


def _in_numpy(graph: Graph, operators: list[int], note: str = "") -> HostRun:
    return HostRun(_names(graph, operators), "numpy", partial(run_operators, graph, operators), note)


def _compiled(graph: Graph, operators: list[int], way: Way) -> HostRun:
    from coral.apps.host_tinygrad import Piece

    others = [number for number in range(len(graph.operators)) if number not in operators]
    wanted = {*graph.outputs, *_read(graph, others)}
    results = [i for number in operators for i in graph.operators[number].outputs if i in wanted]
    try:
        return HostRun(_names(graph, operators), "tinygrad", Piece(graph, operators, results))
    except CoralError as error:
        return _in_numpy(graph, operators, f"not by tinygrad: {error}")
    except Exception as error:  # as above
        return _in_numpy(graph, operators, _cannot(way, error))


def _cannot(way: Way, error: Exception) -> str:
    note = f"tinygrad cannot compile the host's operators here: {type(error).__name__}: {str(error)[:300]}"
    if way == "tinygrad":
        raise HostError(f"{note}; --host numpy runs them without a compiler") from error
    return note


def _names(graph: Graph, operators: Sequence[int]) -> tuple[str, ...]:
    return tuple(graph.operators[number].name for number in operators)


def _read(graph: Graph, operators: Sequence[int]) -> list[int]:
    read = {i for number in operators for i in graph.operators[number].inputs if i >= 0}
    return sorted(i for i in read if graph.tensors[i].data is None)


def _is_dear(graph: Graph, number: int) -> bool:
    op = graph.operators[number]
    named = op.name.startswith(("ARG_", "RESIZE"))
    return op.name not in CHEAP and (named or any(graph.tensors[i].dtype in CODE_OFFSETS for i in op.outputs))


def _is_large(graph: Graph, number: int) -> bool:
    op = graph.operators[number]
    return any(i >= 0 and math.prod(graph.tensors[i].shape) >= LARGE for i in (*op.inputs, *op.outputs))


class HostPart:
    """Some operators of a file: a TFLite model of their own, with tensors by the numbers of the file."""

    def __init__(
        self, file: EdgeTpuModel, operators: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """:raises HostError: ai-edge-litert refuses the operators"""
        self.inputs, self.outputs = list(inputs), list(outputs)
        litert: Any = importlib.import_module(f"{PACKAGE}.interpreter")
        self._content = _part(file, operators, self.inputs, self.outputs)
        self._mutex = threading.Lock()
        try:
            self._interpreter = litert.Interpreter(model_content=self._content)
            self._interpreter.allocate_tensors()
        except (RuntimeError, ValueError) as error:
            names = sorted({file.graph.operators[number].name for number in operators})
            raise HostError(f"ai-edge-litert cannot run the host's operators ({', '.join(names)}): {error}") from error

    def __call__(self, values: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """Values of the outputs by tensor number, for values of the inputs."""
        with self._mutex:
            details = self._interpreter.get_input_details()
            for number, detail in zip(self.inputs, details, strict=True):
                self._interpreter.set_tensor(detail["index"], values[number])
            self._interpreter.invoke()
            results = self._interpreter.get_output_details()
            return {
                number: self._interpreter.get_tensor(detail["index"])
                for number, detail in zip(self.outputs, results, strict=True)
            }


def _part(file: EdgeTpuModel, operators: Sequence[int], inputs: list[int], outputs: list[int]) -> bytes:
    import flatbuffers

    schema: Any = importlib.import_module(f"{PACKAGE}.schema_py_generated")
    model = schema.ModelT.InitFromPackedBuf(file.model.source, 0)
    graph = model.subgraphs[file.model.graphs.index(file.graph)]
    graph.operators = [graph.operators[number] for number in operators]
    graph.inputs, graph.outputs = inputs, outputs
    model.signatureDefs, model.metadata = None, None
    builder = flatbuffers.Builder(len(file.model.source))
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())
