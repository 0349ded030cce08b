"""The DarwiNN package: executables inside a flatbuffer inside a flatbuffer, read into Programs and written from them.

Source: docs/package.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from coral.package.flatbuffer import Reader, Record, parse_schema, write
from coral.package.program import (
    Base,
    Bitstream,
    DmaHint,
    DType,
    FenceHint,
    Hint,
    InstructionHint,
    InterruptHint,
    Kind,
    Layer,
    Layout,
    PackageError,
    Program,
    Relocation,
    Slice,
)

IDENTIFIER = b"DWN1"
PAGE_BYTES = 4096
MIN_RUNTIME_VERSION = 12
"""What we write: the oldest version that Google's runtimes of 2020 and today accept without a warning."""

SCHEMA = parse_schema("""
    table Package closed
        min_runtime_version:i32 serialized_multi_executable:bytes@4096 signature:bytes
        keypair_version:i32 compiler_version:str virtual_chip_id:i32
        multi_chip_package:[SerializedPackage] model_identifier:str
    table SerializedPackage closed
        serialized_package:bytes
    table MultiExecutable closed
        serialized_executables:[blob]@4096
    table Executable closed
        version:i32 name:str serialized_model:bytes batch_size:i32 scratch_size_bytes:i32
        instruction_bitstreams:[InstructionBitstream]< parameters:bytes@4096 dma_hints:DmaHints
        input_layers:[Layer]< output_layers:[Layer]< chip:str estimated_cycles:i32
        used_narrow_memory_bytes_per_tile:i32 type:i16 parameter_caching_token:u64
        use_tpu_dram_for_parameters:bool estimated_cycles_64bit:i64
    table InstructionBitstream closed
        bitstream:bytes@16 field_offsets:[FieldOffset]
    table FieldOffset closed
        meta:Meta offset_bit:i32
    table Meta closed
        desc:i16 batch:i32 name:str position:i16
    table DmaHints closed
        hints:[DmaHint] fully_deterministic:bool
    table DmaHint closed
        any_hint:DmaDescriptorHint|InstructionHint|InterruptHint|FenceHint direction:i16
    table DmaDescriptorHint closed
        meta:Meta offset_in_bytes:i32 size_in_bytes:i32
    table InstructionHint closed
        instruction_chunk_index:i32
    table InterruptHint closed
        type:i16
    table FenceHint closed
    table Layer closed
        name:str size_bytes:i32 y_dim:i32 x_dim:i32 z_dim:i32 numerics:NumericsConstants
        data_type:i16 any_layer:OutputLayer|InputLayer execution_count_per_inference:i32
        cache_on_dram:bool shape:TensorShape
    table NumericsConstants closed
        zero_point:i32 dequantization_factor:f32
    table OutputLayer closed
        layout:OutputLayout data_type:i16 shape_info:OutputShapeInfo
    table InputLayer closed
    table OutputLayout closed
        y_to_tile:[i32] x_to_tile:[i32] tile_byte_offset:[i32] x_local_byte_offset:[i32]
        y_local_y:[i32] x_row_size:[i32]
    table TensorShape closed
        dimension:[pair]
    table OutputShapeInfo closed
        slice_layout:[TensorLayout] slice_offset:[i32]
    table TensorLayout closed
        shape:TensorShape stride:[i32]
""")
LEGAL_KINDS = (
    {Kind.PARAMETER_CACHING, Kind.EXECUTION_ONLY},
    {Kind.STAND_ALONE, Kind.PARAMETER_CACHING, Kind.EXECUTION_ONLY},
)
PACKAGE_FIELDS: Record = {
    "min_runtime_version": 0,
    "compiler_version": "",
    "model_identifier": "",
    "keypair_version": 0,
    "signature": b"",
    "virtual_chip_id": 0,
}
"""Fields of the package table that a Package holds under the same name, with their defaults in the file."""
PROGRAM_FIELDS: dict[str, tuple[str, Any]] = {
    "version": ("version", 0),
    "name": ("name", ""),
    "serialized_model": ("serialized_model", b""),
    "batch_size": ("batch_size", 0),
    "scratch_size_bytes": ("scratch_bytes", 0),
    "parameters": ("parameters", b""),
    "chip": ("chip", ""),
    "estimated_cycles": ("estimated_cycles_32bit", 0),
    "used_narrow_memory_bytes_per_tile": ("narrow_bytes_per_tile", 0),
    "parameter_caching_token": ("token", 0),
    "use_tpu_dram_for_parameters": ("parameters_in_dram", False),
    "estimated_cycles_64bit": ("estimated_cycles", 0),
}
"""Attribute of a Program and default in the file for every field of an executable that is copied as it is."""
LAYER_FIELDS: dict[str, tuple[str, Any]] = {
    "size_bytes": ("size_bytes", 0),
    "y_dim": ("y", 0),
    "x_dim": ("x", 0),
    "z_dim": ("z", 0),
    "execution_count_per_inference": ("executions", 1),
    "cache_on_dram": ("cache_on_dram", False),
}
EnumT = TypeVar("EnumT", bound=IntEnum)


@dataclass(frozen=True)
class Package:
    """The programs of one model, in file order, and what the compiler says about itself."""

    programs: tuple[Program, ...]
    min_runtime_version: int = MIN_RUNTIME_VERSION
    compiler_version: str = ""
    model_identifier: str = ""
    keypair_version: int = 0
    signature: bytes = b""
    virtual_chip_id: int = 0

    @property
    def execution(self) -> Program:
        """The program that computes: the only one, or the stand-alone one where there is one, or the execution-only."""
        if len(self.programs) == 1:
            return self.programs[0]
        for kind in (Kind.STAND_ALONE, Kind.EXECUTION_ONLY):
            for program in self.programs:
                if program.kind is kind:
                    return program
        raise PackageError(f"none of {[program.kind.name for program in self.programs]} computes anything")

    @property
    def caching(self) -> Program | None:
        """The program that loads the parameters which ``execution`` needs, if it needs one."""
        if self.execution.kind is not Kind.EXECUTION_ONLY:
            return None
        return next((program for program in self.programs if program.kind is Kind.PARAMETER_CACHING), None)

    def check(self) -> None:
        """Raises PackageError where a program, or their combination, contradicts itself."""
        kinds = [program.kind for program in self.programs]
        if len(kinds) != 1 and (len(set(kinds)) != len(kinds) or set(kinds) not in LEGAL_KINDS):
            raise PackageError(f"a package cannot combine the programs {[kind.name for kind in kinds]}")
        if self.virtual_chip_id == -1:
            raise PackageError("the package is compiled for several chips (virtual_chip_id -1); only one is supported")
        for program in self.programs:
            program.check()
        tokens = [program.token for program in self.programs if program.kind is not Kind.STAND_ALONE]
        if len(kinds) > 1 and len(set(tokens)) != 1:
            raise PackageError(f"caching and execution program have different tokens {tokens}")


def read_package(data: bytes) -> Package:
    """The package in ``data``, every program of it checked; PackageError names table, field and offset of damage."""
    reader = Reader(SCHEMA, data, "package")
    record = reader.root("Package", IDENTIFIER)
    if record.get("multi_chip_package"):
        raise PackageError("the package is compiled for several chips (multi_chip_package); only one is supported")
    nested = Reader(SCHEMA, _need(record, "serialized_multi_executable", "package"), "package, multi executable")
    blobs = nested.root("MultiExecutable").get("serialized_executables", ())
    programs = tuple(_program(blob, f"executable {index}") for index, blob in enumerate(blobs))
    package = Package(programs, **{name: record.get(name, default) for name, default in PACKAGE_FIELDS.items()})
    package.check()
    return package


def write_package(package: Package) -> bytes:
    """The package as a file: programs on 4096-byte pages, parameters at page 1, as Google's compiler lays them out."""
    package.check()
    blobs = [write(SCHEMA, "Executable", _program_record(program), page=PAGE_BYTES) for program in package.programs]
    multi = write(SCHEMA, "MultiExecutable", {"serialized_executables": blobs}, page=PAGE_BYTES)
    record = {name: getattr(package, name) for name in PACKAGE_FIELDS} | {"serialized_multi_executable": multi}
    return write(SCHEMA, "Package", record, identifier=IDENTIFIER, page=PAGE_BYTES)


def _need(record: Record, name: str, place: str) -> Any:
    if record.get(name) is None:
        raise PackageError(f"{place}: {name} is missing")
    return record[name]


def _enum(kind: type[EnumT], value: int, place: str) -> EnumT:
    try:
        return kind(value)
    except ValueError:
        raise PackageError(f"{place}: {value} is no {kind.__name__}, known are {[int(k) for k in kind]}") from None


def _sparse(**fields: Any) -> Record:
    """A record without the fields that have the schema's default (0, False)."""
    return {name: value for name, value in fields.items() if value not in (0, False, None)}


def _copied(table: dict[str, tuple[str, Any]], record: Record) -> dict[str, Any]:
    return {attribute: record.get(name, default) for name, (attribute, default) in table.items()}


def _copy(table: dict[str, tuple[str, Any]], source: Program | Layer) -> Record:
    """Fields of ``table`` with the attributes of ``source``; numbers at their default are left out."""
    values = ((name, getattr(source, attribute), default) for name, (attribute, default) in table.items())
    return {name: value for name, value, default in values if value != default or not isinstance(value, int)}


def _program(blob: bytes, place: str) -> Program:
    record = Reader(SCHEMA, blob, f"package, {place}").root("Executable")
    hints = _need(record, "dma_hints", place)
    return Program(
        kind=_enum(Kind, record.get("type", 0), f"{place}.type"),
        bitstreams=tuple(
            Bitstream(
                _need(chunk, "bitstream", f"{place}, bitstream {index}"),
                tuple(
                    _relocation(field, f"{place}, bitstream {index}, relocation {number}")
                    for number, field in enumerate(chunk.get("field_offsets", ()))
                ),
            )
            for index, chunk in enumerate(record.get("instruction_bitstreams", ()))
        ),
        hints=tuple(_hint(hint, f"{place}, hint {index}") for index, hint in enumerate(hints.get("hints", ()))),
        inputs=tuple(_layer(layer, f"{place}, input", output=False) for layer in record.get("input_layers", ())),
        outputs=tuple(_layer(layer, f"{place}, output", output=True) for layer in record.get("output_layers", ())),
        fully_deterministic=hints.get("fully_deterministic", False),
        **_copied(PROGRAM_FIELDS, record),
    )


def _program_record(program: Program) -> Record:
    caching = program.kind is Kind.PARAMETER_CACHING
    record = _copy(PROGRAM_FIELDS, program) | _sparse(type=int(program.kind))
    if caching and not program.serialized_model:
        del record["serialized_model"]
    return record | {
        "instruction_bitstreams": [
            {
                "bitstream": bitstream.data,
                "field_offsets": [
                    {"meta": _meta(r.base, r.name, r.batch, high=r.high)} | _sparse(offset_bit=r.bit)
                    for r in bitstream.relocations
                ]
                or None,
            }
            for bitstream in program.bitstreams
        ],
        "dma_hints": {"hints": [_hint_record(hint) for hint in program.hints]}
        | _sparse(fully_deterministic=program.fully_deterministic),
        "input_layers": None if caching else [_layer_record(layer, output=False) for layer in program.inputs],
        "output_layers": None if caching else [_layer_record(layer, output=True) for layer in program.outputs],
    }


def _meta(base: Base, name: str, batch: int, *, high: bool = False) -> Record:
    return {"name": name} | _sparse(desc=int(base), batch=batch, position=int(high))


def _relocation(record: Record, place: str) -> Relocation:
    meta = _need(record, "meta", place)
    position = meta.get("position", 0)
    if position not in (0, 1):
        raise PackageError(f"{place}: position {position} is neither 0 (low half) nor 1 (high half)")
    base = _enum(Base, meta.get("desc", 0), place)
    return Relocation(base, bool(position), record.get("offset_bit", 0), meta.get("name", ""), meta.get("batch", 0))


def _hint(record: Record, place: str) -> Hint:
    name, fields = _need(record, "any_hint", place)
    direction = record.get("direction", 0)
    if direction not in (0, 1) or (name != "DmaDescriptorHint" and direction != (name == "InterruptHint")):
        raise PackageError(f"{place}: {name} has direction {direction}")
    if name == "InstructionHint":
        return InstructionHint(fields.get("instruction_chunk_index", 0))
    if name == "InterruptHint":
        return InterruptHint(fields.get("type", 0))
    if name == "FenceHint":
        return FenceHint()
    meta = _need(fields, "meta", place)
    if meta.get("position"):
        raise PackageError(f"{place}: a DMA hint has position {meta['position']}, only relocations have one")
    return DmaHint(
        _enum(Base, meta.get("desc", 0), place),
        fields.get("offset_in_bytes", 0),
        fields.get("size_in_bytes", 0),
        meta.get("name", ""),
        bool(direction),
        meta.get("batch", 0),
    )


def _hint_record(hint: Hint) -> Record:
    match hint:
        case InstructionHint(chunk):
            return {"any_hint": ("InstructionHint", _sparse(instruction_chunk_index=chunk))}
        case InterruptHint(number):
            return {"any_hint": ("InterruptHint", _sparse(type=number)), "direction": 1}
        case FenceHint():
            return {"any_hint": ("FenceHint", {})}
        case DmaHint():
            fields = _sparse(offset_in_bytes=hint.offset, size_in_bytes=hint.size)
            meta = {"meta": _meta(hint.base, hint.name, hint.batch)}
            return {"any_hint": ("DmaDescriptorHint", meta | fields)} | _sparse(direction=int(hint.out))


def _layer(record: Record, place: str, *, output: bool) -> Layer:
    name = _need(record, "name", place)
    place = f"{place} {name!r}"
    numerics = _need(record, "numerics", place)
    variant, fields = record.get("any_layer") or ("OutputLayer" if output else "InputLayer", {})
    if (variant == "OutputLayer") != output:
        raise PackageError(f"{place}: is described as {variant}")
    layout, boxes = fields.get("layout"), fields.get("shape_info", {})
    offsets = boxes.get("slice_offset", ())
    slices = boxes.get("slice_layout", ())
    if len(offsets) != len(slices):
        raise PackageError(f"{place}: {len(slices)} slices with {len(offsets)} offsets")
    return Layer(
        name=name,
        zero_point=numerics.get("zero_point", 0),
        scale=numerics.get("dequantization_factor", 0.0),
        dtype=_enum(DType, record.get("data_type", 0), place),
        layout=layout and Layout(**{name: layout.get(name, ()) for name in Layout.__dataclass_fields__}),
        shape=record.get("shape", {}).get("dimension", ()),
        slices=tuple(
            Slice(box.get("shape", {}).get("dimension", ()), box.get("stride", ()), offset)
            for box, offset in zip(slices, offsets, strict=True)
        ),
        deprecated_dtype=_enum(DType, fields.get("data_type", 0), place),
        **_copied(LAYER_FIELDS, record),
    )


def _layer_record(layer: Layer, *, output: bool) -> Record:
    fields: Record = {}
    if output:
        fields = _sparse(data_type=int(layer.deprecated_dtype))
        if layer.layout:
            fields["layout"] = vars(layer.layout)
        if layer.slices:
            fields["shape_info"] = {
                "slice_layout": [{"shape": {"dimension": s.ranges}, "stride": s.strides} for s in layer.slices],
                "slice_offset": [s.offset_bytes for s in layer.slices],
            }
    record = _copy(LAYER_FIELDS, layer) | _sparse(data_type=int(layer.dtype))
    if layer.shape:
        record["shape"] = {"dimension": layer.shape}
    return record | {
        "name": layer.name,
        "numerics": _sparse(zero_point=layer.zero_point, dequantization_factor=layer.scale),
        "any_layer": ("OutputLayer" if output else "InputLayer", fields),
    }
