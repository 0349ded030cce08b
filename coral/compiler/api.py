"""``coral.compile``: models in, files for a stick out. Source: docs/compiler.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coral import __version__, timing
from coral.codegen import network as nw
from coral.compiler.batch import images_of, rebatched
from coral.compiler.errors import CompileError, NothingToCompileError
from coral.compiler.lowering import unique_names
from coral.compiler.onnx import is_onnx, read_onnx
from coral.compiler.partition import Partition, partition
from coral.compiler.placing import package_of, placed, token_of
from coral.compiler.report import Report, report_of
from coral.compiler.write import compiled_file
from coral.evaluate.operands import CODE_OFFSETS
from coral.package.graph import Graph, Model, Tensor, read_model
from coral.package.tflite_file import CUSTOM_CODE


@dataclass(frozen=True, repr=False)
class Compiled:
    """One compiled model: ``data`` is the file, ``partition`` says what became of every operator; ``resident``: its
    parameters and those of all models compiled with it stay on the chip together."""

    name: str
    data: bytes
    partition: Partition
    programs: tuple[nw.NetworkProgram, ...]
    resident: bool

    def __repr__(self) -> str:
        return f"<Compiled {self.name!r}: {len(self.data):,} bytes, programs: {len(self.programs)}>"

    def report(self, clock_hz: float = timing.CLOCK_HZ) -> Report:
        """Every operator's place and cost, and the programs' figures, at a clock of the chip."""
        return report_of(self.name, self.data, self.partition, self.programs, self.resident, clock_hz)

    def write(self, path: str | Path) -> Path:
        """Write the file. :raises CompileError: it cannot be written."""
        path = Path(path)
        try:
            path.write_bytes(self.data)
        except OSError as error:
            raise CompileError(f"cannot write {path}: {error.strerror}") from None
        return path


def compile_models(sources: Sequence[Path | str | bytes], *, batch: int = 1) -> list[Compiled]:
    """Compile models together: one parameter caching token, all parameters resident at once if they fit.

    :param sources: TFLite or ONNX files, as paths or bytes
    :param batch: images per call, times those of the models
    :raises CompileError: nothing of a model has a program, or it cannot be compiled at all
    :raises coral.package.PackageError: a file is damaged
    """
    if not isinstance(batch, int) or not 1 <= batch <= nw.MAX_BATCH:
        raise CompileError(f"batch {batch!r}: a program takes 1 to {nw.MAX_BATCH} images")
    models = [(name_of(source), load_model(source)) for source in sources]
    parts = [_partitioned(name, model, batch) for name, model in models]
    segments = [segment for part in parts for segment in part.segments]
    programs, resident = placed([segment.program for segment in segments])
    common = token_of(programs)
    compiled, left = [], iter(programs)
    for (name, model), part in zip(models, parts, strict=True):
        own = [next(left) for _ in part.segments]
        packages = [
            package_of(s, p, common if resident else token_of([p]), "model", f"tinycoral {__version__}")
            for s, p in zip(part.segments, own, strict=True)
        ]
        compiled.append(Compiled(name, compiled_file(model, part, packages), part, tuple(own), resident))
    return compiled


def load_model(source: Path | str | bytes) -> Model:
    """A TFLite or ONNX model. :raises PackageError, CompileError: it is damaged or of a kind that is not covered."""
    return Model((read_onnx(source),), 3, "ONNX", b"") if is_onnx(source) else read_model(source)


def name_of(source: Path | str | bytes) -> str:
    """What a model is called in reports."""
    return "model" if isinstance(source, bytes) else Path(source).stem


MAX_HOST_BYTES = 300_000_000
"""Of all tensors of a model together."""


def check_model(name: str, graph: Graph) -> None:
    """:raises CompileError: a model that no partition can help: dynamic, float, too large, or without inputs"""
    if not graph.inputs or not graph.outputs or not graph.operators or min(graph.inputs) < 0:
        raise CompileError(
            f"{name} has {len(graph.inputs)} inputs, {len(graph.operators)} operators and {len(graph.outputs)} outputs"
            ": needed is one of each at least"
        )
    for i in graph.inputs:
        tensor = graph.tensors[i]
        if not tensor.shape:
            raise CompileError(f"{name}: the input {tensor.name!r} has no dimensions, needed is a first axis of images")
        if min(tensor.shape) < 1:
            raise CompileError(
                f"{name}: the input {tensor.name!r} has the dynamic shape {tensor.shape}; fix it when converting"
            )
    size = sum(math.prod(max(n, 1) for n in t.shape) * (t.dtype.itemsize if t.dtype else 1) for t in graph.tensors)
    if size > MAX_HOST_BYTES:
        largest = max(graph.tensors, key=lambda t: math.prod(t.shape))
        raise CompileError(
            f"{name} needs {size / 1e6:,.0f} MB on the host, the limit is {MAX_HOST_BYTES / 1e6:.0f} MB; "
            f"the largest is {largest.name!r} of shape {largest.shape}"
        )
    made = _made(name, graph)
    if not any(t.dtype in CODE_OFFSETS for t in made):
        first = next((t for t in made if t.dtype == np.float32), made[0])
        raise CompileError(
            f"{name} is not quantised: tensor {first.name!r} is {first.dtype}, the chip computes uint8 or int8. "
            "Convert it with full integer quantisation (a representative dataset), or use coral.quantize"
        )


def _made(name: str, graph: Graph) -> list[Tensor]:
    """What operators compute.

    :raises CompileError: something is read, or is a result, that nothing before has computed; effects without a result
    """
    there = {*graph.inputs} | {i for i, t in enumerate(graph.tensors) if _held(t)}

    def check(numbers: Iterable[int], who: str) -> None:
        for i in numbers:
            if i not in there:
                what = f"{graph.tensors[i].name!r} (TFLite type {graph.tensors[i].type})" if i >= 0 else "no tensor"
                raise CompileError(f"{name}: {who} {what}, which no constant holds and no operator before has computed")

    for number, op in enumerate(graph.operators):
        check((i for i in op.inputs if i >= 0), f"operator {number}, {op.name}, reads")
        if not op.outputs or min(op.outputs) < 0:
            raise CompileError(
                f"{name}: operator {number}, {op.name}, lacks an output: state in resources is not covered"
            )
        there |= {*op.outputs}
    check(graph.outputs, "an output is")
    return [graph.tensors[i] for op in graph.operators for i in op.outputs]


def _held(tensor: Tensor) -> bool:
    """Whether the file holds a tensor: a constant, a variable, or nothing at all."""
    return tensor.data is not None or tensor.is_variable or 0 in tensor.shape


def _partitioned(name: str, model: Model, batch: int) -> Partition:
    check_model(name, model.main)
    graph = rebatched(model.main, batch)
    check_model(f"{name} with batch {batch}", graph)
    if any(op.name == CUSTOM_CODE for op in graph.operators):
        raise CompileError(f"{name} is compiled already: it holds the operator {CUSTOM_CODE!r}")
    found = partition(graph, unique_names(graph), images_of(graph))
    if not found.segments:
        reasons = "; ".join(f"{graph.operators[n].name}: {why}" for n, why in list(found.reasons.items())[:4])
        raise NothingToCompileError(f"{name}: no operator has a program on the chip ({reasons})")
    return found
