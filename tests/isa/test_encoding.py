"""Encoding and decoding of every field of every class against the reference shelf's field table, and the errors."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral import CoralError, isa
from coral.isa import AluOp, FieldError, Op, RingRecv0, Scalar, TileCounter, Wait, Walk, f32_bits
from coral.isa.text import format_instruction, parse
from coral.package.bitstreams import bitstreams_of, find_files

from .laws import Table, decode_law, encode_law, entries, vector_law
from .vectors import VECTORS

classes = pytest.mark.parametrize("cls", isa.CLASSES, ids=lambda cls: cls.mnemonic)


def raw_values(f: isa.Field) -> st.SearchStrategy[int | float | f32_bits]:
    if f.kind == "f32":
        return st.integers(0, f.ones).map(f32_bits)
    return st.integers(*f.range)


@st.composite
def instructions(draw: st.DrawFn) -> isa.Instruction:
    """Any instruction: a random half of its fields set to any value."""
    cls = draw(st.sampled_from(isa.CLASSES))
    names = draw(st.lists(st.sampled_from(list(cls.fields)), max_size=12, unique=True))
    return cls(**{name: draw(raw_values(cls.fields[name])) for name in names})


@classes
def test_the_description_is_the_reference_field_table(cls: type[isa.Instruction], table: Table) -> None:
    reference = table[cls.mnemonic]
    assert (cls.opcode, cls.words) == (reference[""]["opcode"], reference[""]["words"])
    named = {name for name in reference if name and name != "opcode" and not name.startswith("rsv")}
    assert named == set(cls.fields)
    for name, f in entries(cls, table).items():
        ours = cls.fields[name]
        assert (ours.lo, ours.width) == (f["lo"], f["width"]), name
        assert ours.kind == "f32" or (ours.signed, ours.default) == (f["signed"], f["default"]), name


def test_all_opcodes_of_the_reference_exist(table: Table) -> None:
    assert {cls.mnemonic for cls in isa.CLASSES} == set(table)
    assert len(isa.CLASSES) == 25


@classes
def test_every_field_encodes_and_decodes_where_the_reference_says(cls: type[isa.Instruction], table: Table) -> None:
    for name in cls.fields:
        encode_law(cls, name, table)
        decode_law(cls, name, table)


@pytest.mark.parametrize("mnemonic", VECTORS)
def test_vectors(mnemonic: str) -> None:
    vector_law(mnemonic)


def test_vectors_cover_every_opcode() -> None:
    assert set(VECTORS) == set(isa.BY_MNEMONIC)


@given(instructions())
@settings(max_examples=400, deadline=None)
def test_any_instruction_survives_every_form(i: isa.Instruction) -> None:
    data = i.to_bytes()
    assert isa.decode_one(data) == i
    assert type(i)(**i.values()).to_bytes() == data
    assert type(i)(**i.changed()).to_bytes() == data
    assert eval(repr(i), {**vars(isa), "f32_bits": f32_bits}).to_bytes() == data
    assert parse(format_instruction(i))[0].to_bytes() == data
    assert pickle.loads(pickle.dumps(i)) == copy.deepcopy(i) == i
    assert hash(isa.decode_one(data)) == hash(i)


@given(st.sampled_from(isa.CLASSES), st.data())
@settings(max_examples=200, deadline=None)
def test_any_bits_decode_to_themselves_or_name_the_unknown_bit(cls: type[isa.Instruction], data: st.DataObject) -> None:
    bits = data.draw(st.integers(0, (1 << 128 * cls.words) - 1))
    musts = sum(m.mask for m in cls.musts)
    bits = bits & ~musts | sum(m.value << m.lo for m in cls.musts)
    raw = bits.to_bytes(16 * cls.words, "little")
    assert isa.decode_one(raw).to_bytes() == raw
    broken = data.draw(st.sampled_from(cls.musts))
    bit = data.draw(st.integers(broken.lo, broken.lo + broken.width - 1))
    wrong = (bits ^ 1 << bit).to_bytes(16 * cls.words, "little")
    with pytest.raises(isa.DecodeError, match=rf"unknown bits {bit}\b.*must be {broken.value:#x}") as caught:
        cls.from_bytes(wrong)
    assert caught.value.unnamed == 1
    assert broken.reason in str(caught.value)


@classes
def test_values_out_of_range_are_refused_with_field_value_and_range(cls: type[isa.Instruction]) -> None:
    for name, f in cls.fields.items():
        if f.kind == "f32":
            for value in (0.1, 1e39, "x", None):
                with pytest.raises(FieldError, match=rf"{cls.__name__}\.{name} = "):
                    cls(**{name: value})
            continue
        low, high = f.range
        for value in (low - 1, high + 1, 10**100, 0.5, "x", None, float("nan")):
            with pytest.raises(FieldError, match=rf"{cls.__name__}\.{name} = ") as caught:
                cls(**{name: value})
            assert caught.value.field == name
        with pytest.raises(FieldError, match=rf"= {high + 1}: outside {low}\.\.{high}"):
            cls(**{name: high + 1})


def test_unknown_names_and_wrong_family_values_are_refused() -> None:
    for values, message in [
        ({"nosuch": 1}, "Op has no field 'nosuch'"),
        ({"inp": 5}, "inp = 5: a Walk is needed"),
        ({"inp": Walk(0, (1,) * 9, (2,) * 9)}, "walk in has 8 dimensions, 9 were given"),
        ({"waits": [Wait(0, 1)] * 7}, "7 waits were given, there are 6 wait records"),
        ({"waits": [3]}, r"waits\[0\] = 3: a Wait is needed"),
        ({"waits": [Wait(0, 1, side=1)]}, "no side"),
        ({"waits": 3}, "Op: "),
        ({"loops": [1] * 9}, "loops holds 8 values, 9 were given"),
        ({"loops": [0]}, r"Op\.loop_cnt0 = -1: outside 0\.\.16383"),
        ({"sig_av": 16}, r"Op\.sig_av_level = 16: outside 0\.\.15"),
        ({"inp": Walk(1 << 18)}, r"Op\.in_addr = 262144: outside"),
    ]:
        with pytest.raises(FieldError, match=message):
            Op(**values)
    with pytest.raises(FieldError, match="as many strides as counts"):
        Walk(0, (1,), ())
    with pytest.raises(FieldError, match="at least 1"):
        Walk(0, (1,), (0,))


def test_instructions_are_immutable_values() -> None:
    i = Op(seq=3)
    with pytest.raises(AttributeError, match="immutable"):
        i.seq = 4
    assert i.replace(seq=4).seq == 4
    assert i.seq == 3
    assert i != isa.OpMax(seq=3)
    assert {i, Op(seq=3)} == {i}


def test_families_read_back_and_are_replaced_as_a_whole() -> None:
    waits = [Wait(TileCounter.RING_READ_A, -64, 1, 64, 1), Wait(TileCounter.PARAMETERS, 7, 0, 0, 0)]
    i = RingRecv0(dst=Walk(5, (1, 0), (4, 9), slot_level=1, slot_stride=4), waits=waits, sig_dst=2)
    assert i.waits() == tuple(waits)
    assert i.signal("sig_dst") == i.sig_dst == 2
    assert i.walk("dst") == i.dst
    assert i.dst.strides == (1, 0, 0, 0)
    assert i.dst.counts == (4, 9, 1, 1)
    assert i.replace(waits=waits[1:]).waits() == tuple(waits[1:])
    assert i.replace(sig_dst=None).sig_dst is None
    assert i.replace(dst=Walk(5)).dst.slot_stride == 0
    assert Op(loops=[3, 2]).loops == (3, 2, 1, 1, 1, 1, 1, 1)
    assert Op(inp=Walk(9)).walk("in").addr == 9
    assert Op(loops=[3, 2], loop_cnt1=5).loops[:2] == (3, 6)


def test_a_nan_keeps_its_payload() -> None:
    for raw in (0x7FC12345, 0x7F800001, 0xFFC00000):
        i = Op(mult=f32_bits(raw))
        assert i.to_bytes() == Op(**i.values()).to_bytes() == i.replace(seq=0).to_bytes()
        assert i.mult != i.mult


def test_named_values() -> None:
    i = Scalar(alu_op=AluOp.MOV | isa.IMMEDIATE, alu_imm=5)
    assert i.alu_op & 0x1F == AluOp.MOV
    assert "alu_op=MOV|IMMEDIATE" in format_instruction(i)


def test_streams_that_are_no_streams() -> None:
    good = isa.encode([isa.Start(), isa.ScalarFence(), isa.End()])
    assert [word for word, _ in isa.decode(good)] == [0, 1, 3]
    for data, message in [
        (good[:-1], "63 bytes: a bitstream is a multiple of 16"),
        (good[:32], r"word 1: scalar_fence needs 2 words, 1 are left"),
        (bytes(16), r"word 0: unknown opcode 0x00"),
        (good + b"\xff" * 16, r"word 4: unknown opcode 0x3f|word 4: end .* unknown bits"),
    ]:
        with pytest.raises(CoralError, match=message):
            isa.decode(data)
    with pytest.raises(isa.DecodeError, match="only 0 bytes left"):
        isa.decode_one(good, 4)


def test_overlapping_or_missing_bits_make_no_class() -> None:
    with pytest.raises(TypeError, match="overlaps"):
        type("Bad", (isa.Predicated,), {"opcode": 1, "words": 1, "a": isa.Must(12, 116), "b": isa.Field(20, 3)})
    with pytest.raises(TypeError, match="not described"):
        type("Bad", (isa.Predicated,), {"opcode": 1, "words": 1, "a": isa.Must(12, 100)})
    with pytest.raises(TypeError, match="past the end"):
        type("Bad", (isa.Predicated,), {"opcode": 1, "words": 1, "a": isa.Must(12, 117)})


def test_the_corpus_decodes_quickly_and_a_sample_survives_every_form(corpus: Path) -> None:
    rng = random.Random(1)
    placed = [p for path in find_files([corpus]) for s in bitstreams_of(path) for p in isa.decode(s.data)]
    assert len(placed) == 25_325
    for _, i in rng.sample(placed, 1000):
        data = i.to_bytes()
        assert eval(repr(i), {**vars(isa), "f32_bits": f32_bits}).to_bytes() == data
        flat = {name: w.to_fields(i.walks[name]) for name in i.walks for w in [i.walk(name)]}
        assert all(getattr(i, name) == value for walk in flat.values() for name, value in walk.items())
