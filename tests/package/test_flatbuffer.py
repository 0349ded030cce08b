"""The schema-driven reader and writer: independent of any file format."""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from typing import Any

import flatbuffers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral.package import PackageError
from coral.package.flatbuffer import Reader, Span, parse_schema, write

SCHEMA = parse_schema("""
    table Root closed
        flag:bool small:i8 number:i64 name:str blob:bytes@256 numbers:[i32] pairs:[pair]
        texts:[blob] child:Leaf leaves:[Leaf]< choice:Leaf|Other real:f32
    table Leaf closed
        value:u32 next:Leaf
    table Other closed
""")
LEAF = st.fixed_dictionaries({}, optional={"value": st.integers(0, (1 << 32) - 1)})
RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "flag": st.booleans(),
        "small": st.integers(-128, 127),
        "number": st.integers(-(1 << 63), (1 << 63) - 1),
        "name": st.text(max_size=9),
        "blob": st.binary(max_size=400),
        "numbers": st.lists(st.integers(-(1 << 31), (1 << 31) - 1)).map(tuple),
        "pairs": st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9))).map(tuple),
        "texts": st.lists(st.binary(max_size=9)).map(tuple),
        "child": st.recursive(LEAF, lambda inner: st.fixed_dictionaries({"next": inner}), max_leaves=4),
        "leaves": st.lists(LEAF).map(tuple),
        "choice": st.tuples(st.just("Leaf"), LEAF) | st.just(("Other", {})),
        "real": st.floats(width=32, allow_nan=False),
    },
)


def read(data: bytes) -> Any:
    return Reader(SCHEMA, data, "test").root("Root")


@settings(max_examples=200, deadline=None)
@given(RECORDS)
def test_round_trip(record: dict[str, Any]) -> None:
    data = write(SCHEMA, "Root", record, page=64)
    assert read(data) == record
    assert len(data) % 64 == 0
    if record.get("blob"):
        table = flatbuffers.table.Table(bytearray(data), struct.unpack_from("<I", data)[0])
        assert table.Vector(table.Offset(12)) % 256 == 0


@settings(max_examples=300, deadline=None)
@given(RECORDS, st.data())
def test_damage_is_an_error_or_a_record(record: dict[str, Any], data: st.DataObject) -> None:
    good = write(SCHEMA, "Root", record)
    bad = bytearray(good[: data.draw(st.integers(0, len(good)))])
    for _ in range(data.draw(st.integers(0, 3)) if bad else 0):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.sampled_from([0, 1, 4, 0x7F, 0x80, 0xFC, 0xFF]))
    with suppress(PackageError):
        assert isinstance(read(bytes(bad)), dict)


def table(slots: list[int], body: bytes) -> bytes:
    """Root offset, vtable and table laid out by hand: vtable at 4, table behind it."""
    vtable = struct.pack(f"<HH{len(slots)}H", 4 + 2 * len(slots), 4 + len(body), *slots)
    vtable += bytes(-len(vtable) % 4)
    return struct.pack("<I", 4 + len(vtable)) + vtable + struct.pack("<i", len(vtable)) + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Root: offset 0 is outside the 0 bytes"),
        (struct.pack("<I", 100), "Root: offset 100 is outside the 4 bytes"),
        (struct.pack("<Ii", 4, 1 << 30), "Root, vtable: offset -1073741820 is outside"),
        (struct.pack("<IHHi", 8, 3, 4, 4), "vtable at 4 has a bad length 3"),
        (struct.pack("<IHHi", 8, 600, 4, 4), "vtable at 4 has a bad length 600"),
        (struct.pack("<IHHi", 8, 4, 5, 4), "table at 8 has a bad length 5"),
        (table([0, 0, 0, 5], bytes(4)), r"Root\.name: offset 5 is outside its table of 8 bytes"),
        (table([0, 0, 4], bytes(4)), r"Root\.number: offset 4 is outside its table"),
        (table([0, 0, 0, 4], struct.pack("<I", 99)), r"Root\.name: offset \d+ is outside"),
        (table([0, 0, 0, 4], struct.pack("<II", 4, 1)), r"Root\.name: vector at \d+ has 1 elements .* beyond the end"),
        (table([0, 0, 0, 4], struct.pack("<III", 4, 1, 0xFF)), r"Root\.name: string at \d+ is not UTF-8"),
        (
            table([0, 0, 0, 0, 0, 4], struct.pack("<III", 4, 0xFFFFFFFF, 0)),
            r"Root\.numbers: vector at \d+ has 4294967295 elements of 4 bytes",
        ),
        (table([0] * 9 + [0, 4], b"\x01" + bytes(7)), r"Root\.choice: union of type 1 at offset 0"),
        (table([0] * 9 + [0, 4, 8], b"\x07" + bytes(7)), r"Root\.choice: union of type 7 at offset 8"),
        (table([0] * 13 + [4], bytes(4)), "has fields beyond slot 12, a newer form"),
    ],
)
def test_crafted_damage(data: bytes, message: str) -> None:
    with pytest.raises(PackageError, match=message):
        read(data)


def test_nesting_is_limited() -> None:
    record: dict[str, Any] = {}
    for _ in range(20):
        record = {"next": record}
    with pytest.raises(PackageError, match=r"Root\.child\.next.*nested deeper than 16"):
        read(write(SCHEMA, "Root", {"child": record}))


def test_a_small_file_cannot_unfold_without_end() -> None:
    """100,000 references to one table, and to one string: both end soon, at a limit."""
    builder = flatbuffers.Builder(0)
    text = builder.CreateString("x" * 10_000)
    builder.StartVector(4, 100_000, 4)
    for _ in range(100_000):
        builder.PrependUOffsetTRelative(text)
    texts = builder.EndVector()
    builder.StartObject(12)
    builder.PrependUOffsetTRelativeSlot(7, texts, 0)
    builder.Finish(builder.EndObject())
    start = time.perf_counter()
    with pytest.raises(PackageError, match="more than 8 times the file's length"):
        read(bytes(builder.Output()))
    assert time.perf_counter() - start < 2

    builder = flatbuffers.Builder(0)
    builder.StartObject(2)
    leaf = builder.EndObject()
    builder.StartVector(4, 300_000, 4)
    for _ in range(300_000):
        builder.PrependUOffsetTRelative(leaf)
    leaves = builder.EndVector()
    builder.StartObject(12)
    builder.PrependUOffsetTRelativeSlot(9, leaves, 0)
    builder.Finish(builder.EndObject())
    with pytest.raises(PackageError, match="more than 200000 tables"):
        read(bytes(builder.Output()))
    assert time.perf_counter() - start < 10


def test_identifier_is_checked() -> None:
    data = write(SCHEMA, "Root", {}, identifier=b"ABCD")
    Reader(SCHEMA, data, "test").root("Root", b"ABCD")
    with pytest.raises(PackageError, match="identifier is b'ABCD', expected b'EFGH'"):
        Reader(SCHEMA, data, "test").root("Root", b"EFGH")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"small": 128}, r"Root\.small: 128 does not fit type i8"),
        ({"numbers": [1 << 31]}, r"Root\.numbers: \[2147483648\] does not fit"),
        ({"child": {"value": -1}}, r"Leaf\.value: -1 does not fit type u32"),
        ({"real": 1e39}, r"Root\.real"),
        ({"name": "\udcff"}, r"Root\.name"),
    ],
)
def test_values_that_do_not_fit(record: dict[str, Any], message: str) -> None:
    with pytest.raises(PackageError, match=message):
        write(SCHEMA, "Root", record)


def test_located_fields() -> None:
    data = write(SCHEMA, "Root", {"blob": b"abc", "child": {"value": 7}})
    located = parse_schema("""
        table Root
            -:bool -:i8 -:i64 -:str blob:span -:[i32] -:[pair] -:[blob] child:at
    """)
    record = Reader(located, data, "test").root("Root")
    span = record["blob"]
    assert isinstance(span, Span)
    assert data[span.start : span.start + span.size] == b"abc"
    assert span.slot + struct.unpack_from("<I", data, span.slot)[0] + 4 == span.start
    assert Reader(SCHEMA, data, "test").table("Leaf", record["child"], "here", 0) == {"value": 7}
