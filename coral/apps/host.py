"""Operators that a compiled model leaves to the host: in numpy, or by ai-edge-litert (optional extra ``litert``).

Source: docs/run.md, section Operators of the host.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from coral import CoralError
from coral.evaluate.graph import known, run_operators
from coral.package.graph import IDENTIFIER
from coral.package.tflite_file import EdgeTpuModel

PACKAGE = "ai_edge_litert"
Step = Callable[[Mapping[int, NDArray[Any]]], dict[int, NDArray[Any]]]
"""From values of tensors by number to values of more."""


class HostError(CoralError):
    """Operators that ai-edge-litert cannot run."""


def available() -> bool:
    """Whether ai-edge-litert is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def host_step(file: EdgeTpuModel, operators: Sequence[int]) -> Step:
    """Operators of the host: by the judge's functions where it has them all, else by ai-edge-litert.

    :raises HostError: ai-edge-litert refuses the operators
    """
    graph = file.graph
    if known(graph, operators):
        return partial(run_operators, graph, operators)
    made = [i for number in operators for i in graph.operators[number].outputs if i >= 0]
    read = {i for number in operators for i in graph.operators[number].inputs if i >= 0}
    inputs = sorted(i for i in read - set(made) if graph.tensors[i].data is None and not graph.tensors[i].is_variable)
    return HostPart(file, operators, inputs, made)


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
