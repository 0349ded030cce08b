"""TFLite files: the graph of a model, and the compiled package inside a ``*_edgetpu.tflite``.

Source: docs/package.md (container, custom operator, what Google's runtime checks).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from flatbuffers import flexbuffers

from coral.package.container import Package, read_package, write_package
from coral.package.flatbuffer import Record, Span, parse_schema, write
from coral.package.graph import CUSTOM, DAMAGE, IDENTIFIER, Graph, Model, read_model
from coral.package.graph import SCHEMA as GRAPH_SCHEMA
from coral.package.program import DType, Layer, PackageError

CUSTOM_CODE = "edgetpu-custom-op"
SCHEMA = GRAPH_SCHEMA | parse_schema("""
    table Operator
        opcode_index:u32 inputs:[i32] outputs:[i32] -:u8 -:at custom_options:bytes
        custom_options_format:i8
    table Buffer
""")
TENSOR_TYPES = {
    DType.U8: 3, DType.U16: 16, DType.I32: 2, DType.BF16: 18, DType.F16: 1, DType.F32: 0, DType.I8: 9, DType.I16: 7,
}  # fmt: skip
MAX_ENTRIES = 16
SIGN_OFFSETS = {DType.I8: 128, DType.I16: 32768}
"""What a layer's zero point has more than its TFLite tensor's."""


@dataclass(frozen=True)
class CustomMap:
    """What the custom operator says besides the package. ``chips`` is None where older compilers left it out."""

    version: int = 0
    preference: int = -1
    chips: tuple[int, ...] | None = (18,)


@dataclass(frozen=True)
class EdgeTpuModel:
    """A compiled file: the whole TFLite model, its one Edge TPU operator (graph and index), and the package in it."""

    model: Model
    package: Package
    custom: CustomMap
    graph: Graph
    operator: int


def read_edgetpu(source: Path | str | bytes) -> EdgeTpuModel:
    """A compiled file; PackageError when it is damaged or holds no, or more than one, Edge TPU operator."""
    found = read_parts(source)
    if len(found) != 1:
        raise PackageError(f"the file has {len(found)} operators {CUSTOM_CODE!r}, needed is one")
    return found[0]


def read_parts(source: Path | str | bytes) -> list[EdgeTpuModel]:
    """A compiled file, once for each of its Edge TPU operators in order; PackageError when it is damaged."""
    model = read_model(source)
    places = [(graph, i) for graph in model.graphs for i, op in enumerate(graph.operators) if op.name == CUSTOM_CODE]
    if not places:
        raise PackageError(f"the file has no operator {CUSTOM_CODE!r}: it is not compiled")
    return [_part(model, graph, index) for graph, index in places]


def _part(model: Model, graph: Graph, index: int) -> EdgeTpuModel:
    span = graph.operators[index].custom_options
    if not isinstance(span, Span):
        raise PackageError(f"the operator {CUSTOM_CODE!r} has no custom options")
    custom, blob = read_custom_map(model.source[span.start : span.start + span.size])
    return EdgeTpuModel(model, read_package(blob), custom, graph, index)


def replace_package(compiled: EdgeTpuModel, package: Package) -> bytes:
    """The same TFLite file with another package in its operator; every other byte of the file stays.

    A larger package goes to the file's end, where the operator then points; the old bytes are zeroed.
    """
    data = bytearray(compiled.model.source)
    span = compiled.graph.operators[compiled.operator].custom_options
    if not isinstance(span, Span):
        raise PackageError(f"the operator {CUSTOM_CODE!r} has no custom options")
    options = write_custom_map(compiled.custom, write_package(package))
    data[span.start - 4 : span.start + span.size] = bytes(span.size + 4)
    start = span.start
    if len(options) > span.size:
        start = -(-(len(data) + 4) // 16) * 16
        data += bytes(start + len(options) - len(data))
        struct.pack_into("<I", data, span.slot, start - 4 - span.slot)
    struct.pack_into("<I", data, start - 4, len(options))
    data[start : start + len(options)] = options
    return bytes(data)


def write_edgetpu(package: Package, *, custom: CustomMap | None = None, description: str = "tinycoral") -> bytes:
    """A TFLite file of one operator, whose tensors are the layers of ``package.execution``."""
    program = package.execution
    outputs = [layer for layer in program.outputs if not layer.name.endswith("_variable_output")]
    numbers = range(len(program.inputs) + len(outputs))
    operator = {
        "opcode_index": 0,
        "inputs": numbers[: len(program.inputs)],
        "outputs": numbers[len(program.inputs) :],
        "custom_options": write_custom_map(custom or CustomMap(), write_package(package)),
        "custom_options_format": 0,
    }
    graph = {
        "tensors": [_tensor_record(layer) for layer in (*program.inputs, *outputs)],
        "inputs": operator["inputs"],
        "outputs": operator["outputs"],
        "operators": [operator],
        "name": "main",
    }
    code = {"deprecated_builtin_code": CUSTOM, "custom_code": CUSTOM_CODE, "version": 1, "builtin_code": CUSTOM}
    record = {"version": 3, "operator_codes": [code], "subgraphs": [graph], "description": description, "buffers": [{}]}
    return write(SCHEMA, "Model", record, identifier=IDENTIFIER)


def read_custom_map(data: bytes) -> tuple[CustomMap, bytes]:
    """(what it says, package bytes) of the operator's flexbuffer map, by the rules of Google's runtime."""
    try:
        root = flexbuffers.GetRoot(data).AsMap
        keys, values = root.Keys, root.Values
        entries = {keys[index].AsKey: values[index] for index in range(min(len(root), MAX_ENTRIES))}
        version, preference = (entries[key].AsInt if key in entries else 0 for key in ("1", "5"))
        if "4" not in entries or not entries["4"].IsString:
            raise ValueError("entry 4 is not a string")
        chips = None
        if "6" in entries:
            vector, more = entries["6"].AsVector, entries["7"].AsVector if "7" in entries else ()
            if len(vector) != 1 or len(more) != 0 or not vector[0].IsInt:
                raise ValueError(f"{len(vector)} chip numbers and {len(more)} further packages, supported are 1 and 0")
            chips = (vector[0].AsInt,)
        return CustomMap(version, preference, chips), bytes(entries["4"].AsStringBytes)
    except DAMAGE as error:
        raise PackageError(f"custom options: damaged flexbuffer map: {error}") from None


class _Binary(bytes):
    """Bytes that flexbuffers accepts as a string, which is how the runtime wants the package."""

    def encode(self, _encoding: str) -> bytes:
        """Itself: it is encoded already."""
        return self


def write_custom_map(custom: CustomMap, package: bytes) -> bytes:
    """The flexbuffer map of the operator."""
    builder = flexbuffers.Builder()
    with builder.Map():
        entries = {"1": custom.version, "4": _Binary(package), "5": custom.preference}
        for key, value in (entries | ({} if custom.chips is None else {"6": custom.chips, "7": ()})).items():
            builder.Key(key)
            if isinstance(value, _Binary):
                builder.String(value)
            else:
                builder.Add(value)
    return bytes(builder.Finish())


def _tensor_record(layer: Layer) -> Record:
    shape = [end - start + 1 for start, end in layer.shape] or [1, layer.y, layer.x, layer.z]
    zero_point = layer.zero_point - SIGN_OFFSETS.get(layer.dtype, 0)
    return {
        "shape": shape,
        "type": TENSOR_TYPES[layer.dtype],
        "buffer": 0,
        "name": layer.name,
        "quantization": {"scale": [layer.scale], "zero_point": [zero_point]},
    }
