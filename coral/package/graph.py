"""The graph of a TFLite file: tensors with quantisation and constants, operators with their options.

Source: docs/package.md.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flatbuffers import flexbuffers

from coral.package.check import MAX_DIMENSIONS
from coral.package.extras import NOTHING, Extras, read_extras
from coral.package.flatbuffer import Reader, Record, Span, parse_schema
from coral.package.program import PackageError

IDENTIFIER = b"TFL3"
CUSTOM = 32
"""Builtin code of custom operators."""
MAX_CUSTOM_BYTES, MAX_CUSTOM_ENTRIES = 4096, 64
"""Of custom options that are looked into."""

SCHEMA = parse_schema("""
    table Model
        version:u32 operator_codes:[OperatorCode] subgraphs:[SubGraph] description:str
        buffers:[Buffer] -:[i32] metadata:[Metadata] signature_defs:[SignatureDef]
    table Metadata
        name:str buffer:u32
    table SignatureDef
        inputs:[TensorMap] outputs:[TensorMap] signature_key:str -:str subgraph_index:u32
    table TensorMap
        name:str tensor_index:u32
    table OperatorCode
        deprecated_builtin_code:i8 custom_code:str version:i32 builtin_code:i32
    table SubGraph
        tensors:[Tensor] inputs:[i32] outputs:[i32] operators:[Operator] name:str
    table Tensor
        shape:[i32] type:i8 buffer:u32 name:str quantization:Quantization is_variable:bool
    table Quantization
        -:[f32] -:[f32] scale:[f32] zero_point:[i64] -:Details| quantized_dimension:i32
    table Operator
        opcode_index:u32 inputs:[i32] outputs:[i32] builtin_options_type:u8 builtin_options:at
        custom_options:span custom_options_format:i8 -:[bool] intermediates:[i32] -:u64 -:u64
        builtin_options_2_type:u8
    table Buffer
        data:span offset:u64 size:u64
""")
NUMPY = {
    0: "<f4", 1: "<f2", 2: "<i4", 3: "u1", 4: "<i8", 6: "?", 7: "<i2", 8: "<c8", 9: "i1", 10: "<f8", 11: "<c16",
    12: "<u8", 15: "<u4", 16: "<u2",
}  # fmt: skip
"""numpy type per TFLite TensorType; strings, resources, variants and 4-bit types have none."""
DAMAGE = (struct.error, ValueError, TypeError, IndexError, KeyError, OverflowError, AttributeError, MemoryError)
"""What the tflite and flatbuffers libraries raise on a damaged file."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """A TFLite tensor. ``scales`` float32 [n] and ``zero_points`` int64 [n] have one entry (for the whole tensor), one
    per index of ``quantized_dimension``, or none. ``data`` is the constant with its shape and dtype, read-only, None
    for the others. ``dtype`` is None for types that numpy lacks; ``type`` is TFLite's number.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    dtype: np.dtype | None
    scales: np.ndarray
    zero_points: np.ndarray
    quantized_dimension: int
    data: np.ndarray | None
    is_variable: bool

    @property
    def scale(self) -> float:
        """The scale of a tensor quantised as a whole; PackageError when it has none or one per channel."""
        return float(self._single(self.scales))

    @property
    def zero_point(self) -> int:
        """The zero point of a tensor quantised as a whole; PackageError when it has none or one per channel."""
        return int(self._single(self.zero_points))

    def _single(self, values: np.ndarray) -> Any:
        if len(values) != 1:
            raise PackageError(f"tensor {self.name!r} has {len(values)} scales or zero points, needed is one")
        return values[0]


@dataclass(frozen=True)
class Operator:
    """A TFLite operator: builtin name such as ``CONV_2D`` (or its custom code), tensor numbers (-1: left out), options.

    ``options`` holds the fields of the builtin option table in snake case, with activations and paddings by name;
    ``options_type`` is the table's name. ``intermediates`` are tensors that only carry the quantisation of inner values
    (LSTM). ``custom_options`` lie in the file, or are bytes that a file is to get.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: dict[str, Any]
    intermediates: tuple[int, ...] = ()
    custom_options: Span | bytes | None = None
    options_type: str = ""
    version: int = 1
    custom: bool = False


@dataclass(frozen=True)
class Graph:
    """One subgraph: ``inputs`` and ``outputs`` are numbers into ``tensors``; operators in execution order."""

    name: str
    tensors: tuple[Tensor, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operators: tuple[Operator, ...]


@dataclass(frozen=True)
class Model:
    """A TFLite file: its subgraphs, the first one is the model; ``source`` are the file's bytes."""

    graphs: tuple[Graph, ...]
    version: int
    description: str
    source: bytes
    extras: Extras = NOTHING

    @property
    def main(self) -> Graph:
        """The model's own graph."""
        return self.graphs[0]


def load(source: Path | str | bytes) -> bytes:
    """The bytes of a file, or ``source`` itself when it is bytes; PackageError when the file cannot be read."""
    if isinstance(source, bytes):
        return source
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise PackageError(f"cannot read {source}: {error.strerror}") from None


def read_model(source: Path | str | bytes) -> Model:
    """The graphs of a TFLite file, compiled or not; PackageError names table, field and offset of damage."""
    data = load(source)
    reader = Reader(SCHEMA, data, "TFLite model" if isinstance(source, bytes) else Path(source).name)
    record = reader.root("Model", IDENTIFIER)
    buffers = [
        _buffer(reader, buffer, f"Model.buffers[{index}]") for index, buffer in enumerate(record.get("buffers", ()))
    ]
    names = [
        (_operator_name(reader, code), code.get("version", 1), _builtin(code) == CUSTOM)
        for code in record.get("operator_codes", ())
    ]
    graphs = tuple(_graph(reader, graph, buffers, names) for graph in record.get("subgraphs", ()))
    if not graphs:
        raise reader.error("Model.subgraphs", "the file holds no graph")
    extras = read_extras(reader, record, buffers, [len(graph.tensors) for graph in graphs])
    return Model(graphs, record.get("version", 0), record.get("description", ""), data, extras)


def _buffer(reader: Reader, record: Record, place: str) -> memoryview:
    span = record.get("data")
    start, size = (span.start, span.size) if span else (record.get("offset", 0), record.get("size", 0))
    if not span and start <= 1:  # TFLite writes 1 for "offset to be filled in"
        return memoryview(b"")
    if start + size > len(reader.data):
        raise reader.error(place, f"bytes {start}..{start + size} are beyond the file's {len(reader.data)}")
    return memoryview(reader.data)[start : start + size]


@functools.cache
def labels(enum: str) -> dict[int, str]:
    """Names of an enumeration of the TFLite schema, by number."""
    import tflite  # imports hundreds of modules, which only readers of TFLite files should wait for

    return {number: name for name, number in vars(getattr(tflite, enum)).items() if isinstance(number, int)}


def _builtin(code: Record) -> int:
    return max(code.get("builtin_code", 0), code.get("deprecated_builtin_code", 0))


def _operator_name(reader: Reader, code: Record) -> str:
    number = _builtin(code)
    if number == CUSTOM:
        return code.get("custom_code", "")
    if number not in labels("BuiltinOperator"):
        raise reader.error("Model.operator_codes", f"builtin operator {number} is unknown")
    return labels("BuiltinOperator")[number]


def _graph(reader: Reader, record: Record, buffers: list[memoryview], names: list[tuple[str, int, bool]]) -> Graph:
    graph = record.get("name", "")
    tensors = tuple(_tensor(reader, tensor, buffers) for tensor in record.get("tensors", ()))
    operators = []
    for number, operator in enumerate(record.get("operators", ())):
        place = f"graph {graph!r}, operator {number}"
        index = operator.get("opcode_index", 0)
        if index >= len(names):
            raise reader.error(place, f"opcode_index {index}, the file has {len(names)} operator codes")
        ends = [_indices(reader, operator, end, tensors, place) for end in ("inputs", "outputs", "intermediates")]
        if operator.get("builtin_options_2_type", 0):
            raise reader.error(place, "its options are of a newer kind (builtin_options_2)")
        options, kind = _options(reader, operator, place)
        (name, version, custom), own = names[index], operator.get("custom_options")
        if custom and own and own.size <= MAX_CUSTOM_BYTES:
            options = custom_options(bytes(reader.data[own.start : own.start + own.size]))
        operators.append(Operator(name, ends[0], ends[1], options, ends[2], own, kind, version, custom))
    inputs, outputs = (_indices(reader, record, end, tensors, f"graph {graph!r}") for end in ("inputs", "outputs"))
    return Graph(graph, tensors, inputs, outputs, tuple(operators))


def custom_options(data: bytes) -> dict[str, int | float | bool]:
    """The numbers and truths of a flexbuffer map, which is how custom operators keep options; {} if it is none."""
    try:
        root = flexbuffers.GetRoot(data)
        if not root.IsMap:
            return {}
        keys, values = root.AsMap.Keys, root.AsMap.Values
        found = {keys[k].AsKey: values[k] for k in range(min(len(values), MAX_CUSTOM_ENTRIES))}
        return {
            key: ref.AsBool if ref.IsBool else ref.AsInt if ref.IsInt else ref.AsFloat
            for key, ref in found.items()
            if ref.IsBool or ref.IsNumeric
        }
    except DAMAGE:
        return {}


def _indices(reader: Reader, record: Record, end: str, tensors: tuple[Tensor, ...], place: str) -> tuple[int, ...]:
    for index in record.get(end, ()):
        if not -1 <= index < len(tensors):
            raise reader.error(f"{place}.{end}", f"refers to tensor {index} of {len(tensors)}")
    return record.get(end, ())


def _tensor(reader: Reader, record: Record, buffers: list[memoryview]) -> Tensor:
    name, shape, kind = record.get("name", ""), record.get("shape", ()), record.get("type", 0)
    place = f"tensor {name!r}"
    quantization = record.get("quantization", {})
    dtype = np.dtype(NUMPY[kind]) if kind in NUMPY else None
    index, data = record.get("buffer", 0), None
    if index >= len(buffers):
        raise reader.error(place, f"buffer {index} of {len(buffers)}")
    if dtype is not None and len(buffers[index]):
        if len(shape) > MAX_DIMENSIONS or min(shape, default=1) < 0:
            raise reader.error(place, f"shape {shape} has a negative or more than {MAX_DIMENSIONS} dimensions")
        size = dtype.itemsize * math.prod(shape)
        if size != len(buffers[index]):
            raise reader.error(place, f"shape {shape} of {dtype} needs {size} bytes, it has {len(buffers[index])}")
        data = np.frombuffer(buffers[index], dtype).reshape(shape)
    return Tensor(
        name=name,
        shape=shape,
        type=kind,
        dtype=dtype,
        scales=np.array(quantization.get("scale", ()), np.float32),
        zero_points=np.array(quantization.get("zero_point", ()), np.int64),
        quantized_dimension=quantization.get("quantized_dimension", 0),
        data=data,
        is_variable=record.get("is_variable", False),
    )


def _options(reader: Reader, operator: Record, place: str) -> tuple[dict[str, Any], str]:
    """Fields of the option table, and its name."""
    number, position = operator.get("builtin_options_type", 0), operator.get("builtin_options")
    if not number or position is None:
        return {}, ""
    if number not in labels("BuiltinOptions"):
        raise reader.error(place, f"builtin options of type {number} are unknown")
    name = labels("BuiltinOptions")[number]
    kind, accessors = _accessors(name)
    table = kind()
    try:
        table.Init(reader.data, position)
        values = {f: _readable(f, accessor, getattr(table, accessor)()) for f, accessor in accessors.items()}
        return values, name
    except DAMAGE as error:
        raise reader.error(place, f"damaged {name}: {error}") from None


@functools.cache
def _accessors(name: str) -> tuple[type, dict[str, str]]:
    """Class of the tflite package for an option table, and by field its accessors of whole values."""
    import tflite

    kind = getattr(tflite, name)
    accessors = {}
    for accessor, function in inspect.getmembers(kind, inspect.isfunction):
        field = accessor.removesuffix("AsNumpy").removesuffix("Length")
        is_vector = hasattr(kind, field + "AsNumpy")
        alone = len(inspect.signature(function).parameters) == 1 and not accessor.endswith("IsNone")
        if alone and is_vector == accessor.endswith("AsNumpy"):
            accessors[re.sub(r"(?<!^)(?=[A-Z])", "_", field if is_vector else accessor).lower()] = accessor
    return kind, accessors


def _readable(field: str, accessor: str, value: Any) -> Any:
    enum = {"fused_activation_function": "ActivationFunctionType", "padding": "Padding"}.get(field)
    if enum:
        return labels(enum)[value]
    if accessor.endswith("AsNumpy"):
        return tuple(value.tolist()) if isinstance(value, np.ndarray) else ()  # 0 stands for an absent vector
    return value.decode() if isinstance(value, bytes) else value
