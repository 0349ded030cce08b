"""Flatbuffers from strangers: a reader that checks every offset before it follows it, and a writer, both driven by a
schema in text. The ``flatbuffers`` library builds; its reading side trusts the file, so reading is done here.

A schema has, for every table, a line ``table NAME`` and then its fields, ``name:type`` in slot order. Types: ``bool i8
u8 i16 i32 u32 i64 u64 f32``, ``str``, ``bytes`` ([ubyte]), ``span`` ([ubyte], only located), ``[scalar]``, ``[pair]``
(struct of two i32), ``[blob]`` (strings of any bytes), ``Table``, ``[Table]``, ``at`` (a table, checked and located
only; written by a function of the builder that returns its offset), ``A|B`` (union, two slots).
A field called ``-`` is skipped. ``bytes`` and ``[blob]`` may ask for an alignment: ``bytes@4096``. A field of
tables marked ``<`` has its tables behind its aligned siblings. A ``table NAME closed`` refuses slots that the schema
lacks, because a rewritten file would lose them.

Values are dicts that hold the fields present in the file. A union is a pair (table name, dict).
Source: docs/package.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
from flatbuffers import number_types

from coral.package.program import PackageError

Record = dict[str, Any]
SCALARS = {
    "bool": ("<?", number_types.BoolFlags),
    "i8": ("<b", number_types.Int8Flags),
    "u8": ("<B", number_types.Uint8Flags),
    "i16": ("<h", number_types.Int16Flags),
    "i32": ("<i", number_types.Int32Flags),
    "u32": ("<I", number_types.Uint32Flags),
    "i64": ("<q", number_types.Int64Flags),
    "u64": ("<Q", number_types.Uint64Flags),
    "f32": ("<f", number_types.Float32Flags),
}
WIDTHS = {name: struct.calcsize(fmt) for name, (fmt, _) in SCALARS.items()}
MAX_TABLES = 200_000
MAX_DEPTH = 16


@dataclass(frozen=True)
class Span:
    """A byte vector left in place: ``slot`` holds the offset that leads to it, its bytes are [start, start + size)."""

    slot: int
    start: int
    size: int


@dataclass(frozen=True)
class Field:
    """One slot (two for a union) of a table."""

    name: str
    type: str
    slot: int
    align: int = 4
    behind: bool = False


@dataclass
class Table:
    """Fields of a table in slot order."""

    name: str
    closed: bool
    fields: list[Field] = field(default_factory=list)
    slots: int = 0


def parse_schema(text: str) -> dict[str, Table]:
    """Tables by name, from a schema in the notation of this module's docstring."""
    tables: dict[str, Table] = {}
    table = Table("", closed=False)
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("table "):
            _, name, *closed = line.split()
            table = tables[name] = Table(name, closed == ["closed"])
            continue
        for entry in line.split():
            name, kind = entry.split(":")
            kind, _, align = kind.removesuffix("<").partition("@")
            if name != "-":
                table.fields.append(Field(name, kind, table.slots, int(align or 4), entry.endswith("<")))
            table.slots += 2 if "|" in kind else 1
    return tables


class Reader:
    """Reads tables of one buffer; every PackageError names the buffer, the table, the field and the offset.

    Tables and vectors may be shared by many parents, so a small hostile file could unfold without end: the number of
    tables and the sum of bytes read are limited.
    """

    def __init__(self, schema: dict[str, Table], data: bytes, what: str) -> None:
        self.schema, self.data, self.what = schema, data, what
        self._tables_left, self._bytes_left = MAX_TABLES, 8 * len(data) + 4096

    def root(self, name: str, identifier: bytes = b"") -> Record:
        """The root table, after a check of the file ``identifier`` at byte 4."""
        if identifier and self.data[4:8] != identifier:
            raise self.error(name, f"identifier is {self.data[4:8]!r}, expected {identifier!r}: another kind of file")
        return self.table(name, self._follow(0, name), name, 0)

    def error(self, place: str, message: str) -> PackageError:
        """The error to raise for ``place`` of this buffer."""
        return PackageError(f"{self.what}: {place}: {message}")

    def _unpack(self, fmt: str, position: int, place: str) -> Any:
        if not 0 <= position <= len(self.data) - struct.calcsize(fmt):
            raise self.error(place, f"offset {position} is outside the {len(self.data)} bytes")
        return struct.unpack_from(fmt, self.data, position)[0]

    def _follow(self, position: int, place: str) -> int:
        return position + self._unpack("<I", position, place)

    def table(self, name: str, position: int, place: str, depth: int) -> Record:
        """The table ``name`` at byte ``position``; ``place`` names it in errors."""
        if depth > MAX_DEPTH:
            raise self.error(place, f"tables are nested deeper than {MAX_DEPTH}")
        slots, table_bytes = self._slots(position, place)
        table = self.schema[name]
        if table.closed and any(slots[table.slots :]):
            raise self.error(place, f"has fields beyond slot {table.slots - 1}, a newer form of this file")
        record: Record = {}
        for entry in table.fields:
            offset = slots[entry.slot] if entry.slot < len(slots) else 0
            if not offset:
                continue
            where = f"{place}.{entry.name}"
            if offset < 4 or offset + WIDTHS.get("u8" if "|" in entry.type else entry.type, 4) > table_bytes:
                raise self.error(where, f"offset {offset} is outside its table of {table_bytes} bytes")
            if "|" not in entry.type:
                record[entry.name] = self._value(entry.type, position + offset, where, depth)
            elif number := self.data[position + offset]:
                names = entry.type.split("|")
                member = slots[entry.slot + 1] if entry.slot + 1 < len(slots) else 0
                if not 4 <= member <= table_bytes - 4 or number > len(names):
                    raise self.error(where, f"union of type {number} at offset {member}, known are {names}")
                name, target = names[number - 1], self._follow(position + member, where)
                record[entry.name] = name, self.table(name, target, f"{where}.{name}", depth + 1)
        return record

    def _slots(self, position: int, place: str) -> tuple[tuple[int, ...], int]:
        """(offset of each slot, length in bytes) of the table at ``position``, whose ends are checked."""
        self._tables_left -= 1
        if self._tables_left < 0:
            raise self.error(place, f"more than {MAX_TABLES} tables")
        vtable = position - self._unpack("<i", position, place)
        vtable_bytes = self._unpack("<H", vtable, f"{place}, vtable")
        table_bytes = self._unpack("<H", vtable + 2, f"{place}, vtable")
        if vtable_bytes < 4 or vtable_bytes % 2 or vtable + vtable_bytes > len(self.data):
            raise self.error(place, f"vtable at {vtable} has a bad length {vtable_bytes}")
        if table_bytes < 4 or position + table_bytes > len(self.data):
            raise self.error(place, f"table at {position} has a bad length {table_bytes}")
        self._charge(vtable_bytes, place)
        return struct.unpack_from(f"<{vtable_bytes // 2 - 2}H", self.data, vtable + 4), table_bytes

    def _value(self, kind: str, position: int, place: str, depth: int) -> Any:
        if kind in SCALARS:
            return self._unpack(SCALARS[kind][0], position, place)
        target = self._follow(position, place)
        if kind == "str":
            try:
                return self._bytes(target, place).decode()
            except UnicodeDecodeError:
                raise self.error(place, f"string at {target} is not UTF-8") from None
        if kind == "bytes":
            return self._bytes(target, place)
        if kind == "span":
            start, size = self._vector(target, 1, place)
            return Span(position, start, size)
        if kind == "at":
            self._slots(target, place)
            return target
        if not kind.startswith("["):
            return self.table(kind, target, place, depth + 1)
        kind = kind[1:-1]
        if kind in SCALARS:
            fmt = SCALARS[kind][0]
            start, count = self._vector(target, WIDTHS[kind], place)
            return struct.unpack_from(f"<{count}{fmt[1]}", self.data, start)
        if kind == "pair":
            start, count = self._vector(target, 8, place)
            return tuple(struct.iter_unpack("<ii", self.data[start : start + 8 * count]))
        start, count = self._vector(target, 4, place)
        read: Callable[[int, str], Any] = (
            self._bytes if kind == "blob" else lambda at, where: self.table(kind, at, where, depth + 1)
        )
        items = []
        for index in range(count):
            where = f"{place}[{index}]"
            items.append(read(self._follow(start + 4 * index, where), where))
        return tuple(items)

    def _vector(self, position: int, width: int, place: str) -> tuple[int, int]:
        """(start, number of elements) of the vector at ``position``, checked to lie inside the buffer."""
        count = self._unpack("<I", position, place)
        if count * width > len(self.data) - position - 4:
            raise self.error(place, f"vector at {position} has {count} elements of {width} bytes, beyond the end")
        self._charge(count * width, place)
        return position + 4, count

    def _charge(self, size: int, place: str) -> None:
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise self.error(place, "the tables unfold to more than 8 times the file's length")

    def _bytes(self, position: int, place: str) -> bytes:
        start, count = self._vector(position, 1, place)
        return self.data[start : start + count]


def write(schema: dict[str, Table], name: str, record: Record, *, identifier: bytes = b"", page: int = 16) -> bytes:
    """The buffer whose root is table ``name`` with the fields of ``record``; its length is a multiple of ``page``.

    PackageError names the table and the field of a value that its type cannot hold.
    """
    builder = flatbuffers.Builder(1024)
    builder.ForceDefaults(True)  # what a record holds is written, equal to the schema's default or not
    root = _table(schema, builder, name, record)
    builder.minalign = max(builder.minalign, page)
    builder.Finish(root, file_identifier=identifier or None)
    return bytes(builder.Output())


def _table(schema: dict[str, Table], builder: flatbuffers.Builder, name: str, record: Record) -> int:
    table = schema[name]
    values: list[tuple[int, str, Any]] = []
    # the builder fills the buffer from its end, so what is created last lies first; within these orders the file is
    # the same as from flatc's C++ code, which Google's compiler uses
    behind = {
        entry.name: [_table(schema, builder, entry.type[1:-1], item) for item in record.get(entry.name) or ()]
        for entry in table.fields
        if entry.behind
    }
    for entry in sorted(table.fields, key=lambda entry: -entry.align):
        value = record.get(entry.name)
        if value is None:
            continue
        try:
            if "|" in entry.type:
                values.append((entry.slot, "u8", entry.type.split("|").index(value[0]) + 1))
                values.append((entry.slot + 1, "", _table(schema, builder, *value)))
            elif entry.type in SCALARS:
                struct.pack(SCALARS[entry.type][0], value)
                values.append((entry.slot, entry.type, value))
            elif entry.behind:
                values.append((entry.slot, "", _offsets(builder, behind[entry.name])))
            else:
                values.append((entry.slot, "", _reference(schema, builder, entry, value)))
        except (struct.error, OverflowError, UnicodeEncodeError) as error:
            raise PackageError(f"{name}.{entry.name}: {value!r:.80} does not fit type {entry.type}: {error}") from None
    builder.StartObject(table.slots)
    for slot, kind, value in sorted(values, key=lambda item: (-WIDTHS.get(item[1], 4), -item[0])):
        if kind:
            builder.PrependSlot(SCALARS[kind][1], slot, value, 0)
        else:
            builder.PrependUOffsetTRelativeSlot(slot, value, 0)
    return builder.EndObject()


def _reference(schema: dict[str, Table], builder: flatbuffers.Builder, entry: Field, value: Any) -> int:
    kind = entry.type
    if kind == "at":
        return value(builder)
    if kind == "str":
        return builder.CreateString(value) if value else builder.CreateSharedString("")
    if kind == "bytes":
        return _raw(builder, value, len(value), entry.align)
    if not kind.startswith("["):
        return _table(schema, builder, kind, value)
    kind = kind[1:-1]
    if kind in SCALARS:
        return _raw(builder, struct.pack(f"<{len(value)}{SCALARS[kind][0][1]}", *value), len(value), WIDTHS[kind])
    if kind == "pair":
        return _raw(builder, b"".join(struct.pack("<ii", *pair) for pair in value), len(value), 4)
    if kind == "blob":
        items = [_raw(builder, blob + b"\0", len(blob), entry.align) for blob in value]
    else:
        items = [_table(schema, builder, kind, item) for item in value]
    return _offsets(builder, items)


def _offsets(builder: flatbuffers.Builder, items: list[int]) -> int:
    builder.StartVector(4, len(items), 4)
    for item in reversed(items):
        builder.PrependUOffsetTRelative(item)
    return builder.EndVector()


def _raw(builder: flatbuffers.Builder, data: bytes, count: int, align: int) -> int:
    """A vector of ``count`` elements, already serialised, whose first byte is aligned to ``align``."""
    builder.StartVector(1, len(data), align)
    builder.head -= len(data)
    builder.Bytes[builder.head : builder.head + len(data)] = data
    builder.vectorNumElems = count
    return builder.EndVector()
