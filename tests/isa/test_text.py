"""Assembly text: round trips of unusual instructions, readable errors, hostile input."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral import isa
from coral.isa.text import TextError, disassemble, format_instruction, parse

from .laws import Table, text_law
from .vectors import VECTORS, words


@pytest.mark.parametrize("cls", isa.CLASSES, ids=lambda cls: cls.mnemonic)
def test_every_field_has_its_text(cls: type[isa.Instruction], table: Table) -> None:
    for name in cls.fields:
        text_law(cls, name, table)


def test_a_bitstream_is_one_line_per_instruction_with_its_word() -> None:
    data = b"".join(words(name) for name in VECTORS)
    text = disassemble(data)
    assert isa.encode(parse(text)) == isa.encode(parse(text.encode())) == data
    assert text.splitlines()[2].endswith("# 2")
    assert text.splitlines()[3].startswith("pop ")
    assert text.splitlines()[3].endswith("# 4")
    (branch,) = (line for line in text.splitlines() if line.startswith("branch"))
    assert branch.endswith(f"# {words_before('branch')} -> {words_before('branch') - 72}")


def words_before(name: str) -> int:
    names = list(VECTORS)
    return sum(isa.BY_MNEMONIC[n].words for n in names[: names.index(name)])


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("ring_send src=5[1x2] src_nz_mask=0x8", {"src_inc1": -1, "src_cnt0": 1, "src_nz_mask": 8}),
        ("ring_send src=5[1x2, 0x3; last 1 @1] src_last_skip=9", {"src_last_skip": 9, "src_last_dim": 1}),
        ("ring_send src=0[last 4 @0]", {"src_last_cnt": 3, "src_last_dim": 0}),
        ("ring_send src=0[slot 0 @2]", {"src_slot_level": 2, "src_slot_stride": 0}),
        ("ring_send sig_src_level=3", {"sig_src_en": 0, "sig_src_level": 3}),
        ("ring_send wait1_base=4 wait1_valid=1", {"wait0_valid": 0, "wait1_valid": 1, "wait1_base": 4}),
        ("ring_send wait(RING_WRITE >= -2 @0 dst) wait2_side=1", {"wait0_ctr": 16, "wait0_base": -2, "wait2_side": 1}),
        ("ring_send wait(31 >= 0 + -1*i @3 src)", {"wait0_ctr": 31, "wait0_step": -1, "wait0_level": 3}),
        ("op loops=[1, 16384]", {"loop_cnt1": 16383}),
        ("op mult=-0", {}),
        ("op acc_on=0 clamp_max=inf clamp_min=-inf", {"acc_on": 0}),
        ("op mult=f32(0x7f800001)", {}),
        ("nlu_load coefficients=[0, -0, 1e-45]", {"c0_2": 1.401298464324817e-45}),
        ("scalar st_op=3 alu_op=23|IMMEDIATE", {"alu_op": 55, "st_op": 3}),
        ("tile_fence ctr_mask=AVDATA|RING_PRODUCER_B unit_mask=OP|MESH_EAST", {"ctr_mask": 0x40001, "unit_mask": 513}),
    ],
)
def test_unusual_instructions_have_a_text_and_keep_it(text: str, fields: dict[str, int]) -> None:
    (i,) = parse(text)
    assert {name: getattr(i, name) for name in fields} == fields
    assert parse(format_instruction(i))[0].to_bytes() == i.to_bytes()
    assert format_instruction(i) == text


def test_what_people_write_need_not_be_what_is_printed() -> None:
    tidy = "w2n tile_mask=0x1 src=16[1x4; slot 4 @1] sig_dst=0 wait(RING_READ_A >= 1 + 1*i @1 src)"
    loose = "  w2n\twait(14>=1+1*i@1 src)".replace(">=", " >= ").replace("+", " + ").replace("@", " @")
    loose += " sig_dst=0x0 src=0x10[ 1x4 ;slot  4  @1 ] tile_mask=1   # a comment with src=[ in it"
    assert parse(loose) == parse(tidy)
    assert parse("\n\n  # nothing\n") == []
    assert parse("op mult=0.1")[0].mult == 0.10000000149011612


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tile_fnce", r"line 1, column 1: there is no instruction 'tile_fnce'; did you mean tile_fence"),
        ("halt\n  halt cod=4", r"line 2, column 8: halt has no field 'cod'; did you mean code"),
        ("op inq=0[1x1]", r"column 4: op has no field 'inq'; did you mean inp"),
        ("halt code=99", r"column 6: Halt\.code = 99: outside 0\.\.31"),
        ("halt code=1 code=2", r"column 13: code is given twice"),
        ("halt code=", r"column 6: expected a number, found ''"),
        ("halt code 4", r"column 6: expected field=value or wait"),
        ("halt code=4,", r"expected a number, found '4,'"),
        ("halt code=٣", r"expected a number"),
        ("op mult=1e50", r"column 4: mult = '1e50': larger than any float32"),
        ("op mult=nan", r"mult: expected a number or f32"),
        (
            "op inp=0[1y1]",
            r"column 4: expected stride x count \(4x16\), slot 64 @1 or last 3 @1 in a walk, found '1y1'",
        ),
        ("op inp=7", r"expected a walk such as"),
        ("op inp=0[1x0]", r"column 4: a walk's counts are at least 1"),
        ("op inp=262144[]", r"column 4: Op\.in_addr = 262144: outside"),
        ("op tile_mask=1 inp=0[1x1; last 0 @1]", r"column 16: Op\.in_last_cnt = -1"),
        ("op inp=0[1x1,1x1,1x1,1x1,1x1,1x1,1x1,1x1,1x1]", r"column 4: Op: walk in has 8 dimensions, 9 were given"),
        ("op loops=3", r"loops is a list such as"),
        ("op loops=[1, x]", r"expected a number, found 'x'"),
        ("op loops=[0]", r"column 4: Op\.loop_cnt0 = -1"),
        ("op wait(RING_RED_A >= 1)", r"column 4: there is no counter 'RING_RED_A'; did you mean RING_READ_A"),
        ("op wait(AVDATA > 1)", r"expected a wait such as"),
        ("op" + 7 * " wait(AVDATA >= 1)", r"7 waits were given, there are 6"),
        ("op wait(AVDATA >= 1 @0 dst)", r"no side"),
        ("halt wait(AVDATA >= 1)", r"halt has no wait records"),
        ("scalar alu_op=AD", r"alu_op has no value 'AD'; did you mean AND or ADD"),
        ("scalar alu_op=ADD|SUB", r"only named bits can be joined"),
        ("op sig_av=x", r"expected a number"),
        ("halt waits=1", r"halt has no field 'waits'"),
        ("halt code=" + "9" * 5000, r"expected a number, found '9999999999999999999999999999999999999\.\.\.'"),
    ],
)
def test_errors_name_line_column_and_a_way_out(text: str, message: str) -> None:
    with pytest.raises(TextError, match=message):
        parse(text)


def test_text_that_is_no_text() -> None:
    with pytest.raises(TextError, match="line 2: not UTF-8"):
        parse(b"halt\n\xff\xfe")


PIECES = (
    "op halt w2n src inp loops mult code alu_op wait( = [ ] ( ) | ; , @ x *i >= + - 0x 1 99999 slot last f32( AVDATA #"
)


@given(st.lists(st.sampled_from([*PIECES.split(), " ", "\n"]) | st.text(max_size=4), max_size=30).map("".join))
@settings(max_examples=600, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except isa.IsaError:
        return
    assert all(isinstance(i, isa.Instruction) for i in found)


@pytest.mark.parametrize(
    "text",
    [
        "op inp=" + "[" * 100_000,
        "op inp=0[" + " " * 100_000 + "x]",
        "op inp=0[" + "1x1;" * 30_000 + "]",
        "op wait(" + " " * 100_000 + ")",
        "op wait(AVDATA >= 1" + " +" * 50_000 + ")",
        "op " + "a" * 200_000 + "=1",
        "x" * 300_000,
        "op loops=[" + "1," * 50_000 + "]",
        "op mult=" + "1" * 200_000,
        "op " + "wait(AVDATA >= 1) " * 20_000,
        "scalar alu_op=" + "ADD|" * 50_000,
    ],
    ids=range(11),
)
def test_hostile_text_is_refused_quickly_with_a_short_message(text: str) -> None:
    start = time.perf_counter()
    with pytest.raises(TextError) as caught:
        parse(text)
    assert time.perf_counter() - start < 3
    assert len(str(caught.value)) < 300
