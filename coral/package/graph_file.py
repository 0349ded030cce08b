"""Writes graphs as a TFLite file. Source: docs/package.md, section Writing graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flatbuffers
import numpy as np

from coral.package.extras import NOTHING, Extras, extras_record
from coral.package.flatbuffer import Record, Span, parse_schema, write
from coral.package.graph import CUSTOM, IDENTIFIER, Graph, Operator, Tensor, labels
from coral.package.graph import SCHEMA as GRAPH_SCHEMA
from coral.package.program import PackageError

SCHEMA = GRAPH_SCHEMA | parse_schema("""
    table Operator
        opcode_index:u32 inputs:[i32] outputs:[i32] builtin_options_type:u8 builtin_options:at
        custom_options:bytes@16 custom_options_format:i8 -:[bool] intermediates:[i32]
    table Quantization
        -:[f32] -:[f32] scale:[f32] zero_point:[i64] -:Details| quantized_dimension:i32
    table Buffer
        data:bytes@16
""")


def write_model(
    graphs: Iterable[Graph], *, source: bytes = b"", description: str = "tinycoral", extras: Extras = NOTHING
) -> bytes:
    """A TFLite file of graphs; ``source`` holds what their operators' custom options refer to, ``extras`` what else
    the file is to have.

    Tensors that no operator and no end of a graph refers to are left out.

    :raises PackageError: an operator has options that cannot be written
    """
    codes: dict[tuple[str, int, bool], int] = {}
    buffers: dict[bytes, int] = {b"": 0}
    graphs = list(graphs)
    numbers_of = [_numbers(graph) for graph in graphs]
    record = {
        "version": 3,
        "subgraphs": [
            _graph_record(graph, of, codes, buffers, source) for graph, of in zip(graphs, numbers_of, strict=True)
        ],
        "description": description,
    } | extras_record(extras, buffers, numbers_of)
    numbers = {name: number for number, name in labels("BuiltinOperator").items()}
    record["operator_codes"] = [_code(numbers, *key) for key in codes]
    record["buffers"] = [{"data": data} if data else {} for data in buffers]
    return write(SCHEMA, "Model", record, identifier=IDENTIFIER)


def _code(numbers: dict[str, int], name: str, version: int, custom: bool) -> Record:
    number = CUSTOM if custom else numbers.get(name)
    if number is None:
        raise PackageError(f"{name} is no builtin operator of TFLite")
    record = {"deprecated_builtin_code": min(number, 127), "version": version, "builtin_code": number}
    return record | ({"custom_code": name} if custom else {})


def _numbers(graph: Graph) -> dict[int, int]:
    """What the tensors that are referred to are called in the file."""
    used = sorted({i for ends in _ends(graph) for i in ends if i >= 0})
    return {-1: -1} | {old: new for new, old in enumerate(used)}


def _graph_record(
    graph: Graph,
    numbers: dict[int, int],
    codes: dict[tuple[str, int, bool], int],
    buffers: dict[bytes, int],
    source: bytes,
) -> Record:
    def mapped(ends: Iterable[int]) -> list[int]:
        return [numbers[i] for i in ends]

    operators = []
    for op in graph.operators:
        code = codes.setdefault((op.name, op.version, op.custom), len(codes))
        record = {"opcode_index": code, "inputs": mapped(op.inputs), "outputs": mapped(op.outputs)}
        if op.intermediates:
            record["intermediates"] = mapped(op.intermediates)
        operators.append(record | _options(op, source))
    return {
        "tensors": [_tensor(graph.tensors[i], buffers) for i in numbers if i >= 0],
        "inputs": mapped(graph.inputs),
        "outputs": mapped(graph.outputs),
        "operators": operators,
        "name": graph.name or "main",
    }


def _ends(graph: Graph) -> Iterator[tuple[int, ...]]:
    yield from (graph.inputs, graph.outputs)
    for op in graph.operators:
        yield from (op.inputs, op.outputs, op.intermediates)


def _tensor(tensor: Tensor, buffers: dict[bytes, int]) -> Record:
    data = b"" if tensor.data is None else tensor.data.tobytes()
    record: Record = {"shape": tensor.shape, "type": tensor.type, "name": tensor.name}
    record["buffer"] = buffers.setdefault(data, len(buffers))
    if len(tensor.scales):
        record["quantization"] = {
            "scale": tensor.scales.tolist(),
            "zero_point": tensor.zero_points.tolist(),
            "quantized_dimension": tensor.quantized_dimension,
        }
    return record | ({"is_variable": True} if tensor.is_variable else {})


def _options(op: Operator, source: bytes) -> Record:
    if op.custom:
        data = op.custom_options
        if isinstance(data, Span):
            data = source[data.start : data.start + data.size]
        return {"custom_options": data, "custom_options_format": 0} if data else {}
    if not op.options_type:
        return {}
    numbers = {name: number for number, name in labels("BuiltinOptions").items()}
    return {
        "builtin_options_type": numbers[op.options_type],
        "builtin_options": option_writer(op.options_type, op.options),
    }


def option_writer(kind: str, options: dict[str, Any]) -> Callable[[flatbuffers.Builder], int]:
    """Writes an option table by the tflite package's functions. :raises PackageError: a field is of no simple type."""

    def build(builder: flatbuffers.Builder) -> int:
        import tflite

        vectors = {field: _vector(builder, value, field) for field, value in options.items() if not _plain(value)}
        getattr(tflite, f"{kind}Start")(builder)
        for field, value in options.items():
            number = vectors.get(field, value)
            if number is None:
                continue
            if isinstance(value, str):
                enum = {"padding": "Padding"}.get(field, "ActivationFunctionType")
                number = next(n for n, name in labels(enum).items() if name == value)
            camel = "".join(part.capitalize() for part in field.split("_"))
            add = getattr(tflite, f"{kind}Add{camel}", None)
            if add is None:
                raise PackageError(f"{kind}: the field {field!r} cannot be written")
            add(builder, number)
        return getattr(tflite, f"{kind}End")(builder)

    return build


def _plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _vector(builder: flatbuffers.Builder, value: Any, field: str) -> int | None:
    if not isinstance(value, tuple) or not all(isinstance(item, int | float) for item in value):
        raise PackageError(f"the option {field!r} with the value {value!r:.60} cannot be written")
    if not value:
        return None
    integers = all(isinstance(item, int) for item in value)
    return builder.CreateNumpyVector(np.array(value, np.int32 if integers else np.float32))
