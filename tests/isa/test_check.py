"""``check_streams``: the figures of Google's programs, and each kind of damage found and named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coral import isa
from coral.isa import Op, RingRecv0, RingSend, TileCounter, TileFence, Wait, Walk
from coral.isa.check import Bitstream, Report, check_streams
from coral.package.bitstreams import bitstreams_of, find_files

OPCODES = (
    "0x01 1680, 0x02 25, 0x03 7, 0x05 6, 0x10 2108, 0x11 2366, 0x12 216, 0x13 1748, 0x14 2015, 0x15 930, 0x16 1356, "
    "0x17 2019, 0x18 1127, 0x19 22, 0x1a 1928, 0x20 4717, 0x21 59, 0x22 17, 0x23 10, 0x24 984, 0x25 113, 0x26 996, "
    "0x27 514, 0x3e 59, 0x3f 59"
)
"""Instances per opcode, as the reference shelf's own checker counts them."""


def program(*body: isa.Instruction, end: tuple[isa.Instruction, ...] = (isa.Halt(code=4), isa.End())) -> bytes:
    words = sum(i.words for i in (*body, *end)) - 1
    return isa.encode([isa.Start(body_bits=128 * words), *body, *end])


def check(*streams: bytes, chunks: bool = False) -> Report:
    return check_streams(Bitstream(f"s{k}", "RAW", s, k if chunks else 0) for k, s in enumerate(streams))


def test_figures_of_the_corpus(corpus: Path) -> None:
    files = find_files([corpus])
    streams = [Bitstream(s.label, s.kind, s.data, s.chunk) for path in files for s in bitstreams_of(path)]
    report = check_streams(streams)
    assert len(files) == 43
    assert (report.bitstreams, report.instructions) == (62, 25_325)
    assert (report.distinct_bitstreams, report.distinct_instructions) == (59, 25_081)
    assert report.ok, report.problems
    assert report.round_trip_failures == report.unnamed_bits == report.sequence_errors == report.length_errors == 0
    assert {name[:4]: n for name, n in report.opcodes.items()} == {
        opcode: int(n) for opcode, n in (item.split() for item in OPCODES.split(", "))
    }
    assert report.kinds == {"EXECUTION_ONLY": 19, "PARAMETER_CACHING": 18, "RAW": 22}
    assert report.first_sequence == {
        "EXECUTION_ONLY": {"0x0": 19},
        "PARAMETER_CACHING": {"0x0": 2, "0x8000": 16},
        "RAW": {"0x0": 20, "0x8000": 2},
    }
    assert report.halt_codes == {"4": 58, "1": 1}
    assert report.rules == {
        "last_skip": {"exact": 2_495},
        "nz_mask": {"exact": 26_373, "every iterated dimension": 5_202},
        "wait records": {"packed, valid, known counter": 20_023},
        "PARAMETERS credit": {"consumed - slots + 1": 405},
        "RING_PRODUCER_B order": {"rows sent": 368},
        "op operand steps": {"main loop": 5_104, "idle": 32},
        "op out steps": {"groups x words": 1_699, "a quarter (pack)": 13},
    }


def test_a_sound_program_and_equal_ones() -> None:
    data = program(TileFence(seq=0), Op(seq=1))
    report = check(data, data)
    assert report.ok, report.problems
    assert (report.bitstreams, report.distinct_bitstreams, report.instructions) == (2, 1, 10)
    assert report.opcodes["0x01 op"] == 1
    assert report.as_dict()["ok"] is True


@pytest.mark.parametrize(
    ("data", "counter", "message"),
    [
        (program(TileFence(seq=0), Op(seq=2)), "sequence_errors", r"word 2: sequence number 0x2, expected 0x1"),
        (program(TileFence(seq=5)), "sequence_errors", r"word 1: sequence number 0x5, expected 0x0"),
        (program(TileFence(seq=0x8001)), "sequence_errors", r"number 0x8001, expected 0x8000"),
        (program(end=(isa.End(),)), "frame_errors", r"0 halt instructions, one is needed"),
        (program(end=(isa.Halt(),)), "frame_errors", r"0 end instructions|does not begin with start and end"),
        (program(isa.Start()), "frame_errors", r"2 start instructions"),
        (program()[16:], "frame_errors", r"0 start instructions"),
        (b"", "frame_errors", r"0 start"),
        (
            isa.encode([isa.Start(body_bits=1), isa.Halt(), isa.End()]),
            "length_errors",
            r"start says 1 bits for 1 words",
        ),
        (program(*[isa.Scalar()] * 16_384), "length_errors", r"16387 words, at most 16384"),
        (program()[:-5], "decode_errors", r"43 bytes: a bitstream is a multiple of 16"),
        (program() + bytes(16), "decode_errors", r"word 3: unknown opcode 0x00"),
        (program(Op())[:64], "decode_errors", r"word 1: op needs 17 words, 3 are left"),
    ],
)
def test_each_damage_is_counted_and_named(data: bytes, counter: str, message: str) -> None:
    report = check(data)
    assert not report.ok
    assert getattr(report, counter)
    assert any(re.search(message, problem) for problem in report.problems), report.problems


def test_bits_without_a_name_are_counted_and_the_rest_is_still_checked() -> None:
    data = bytearray(program(TileFence(seq=0), TileFence(seq=5)))
    data[16 + 12] |= 0x81  # bits 96 and 103 of the first fence
    report = check(bytes(data))
    assert report.unnamed_bits == 2
    assert report.sequence_errors == 1
    assert any("tile_fence (opcode 0x1a) with unknown bits 96, 103" in p for p in report.problems)


def test_sequence_numbers_run_on_over_chunks_and_wrap() -> None:
    first, second = program(TileFence(seq=0), TileFence(seq=1)), program(TileFence(seq=2))
    assert check(first, second, chunks=True).ok
    assert check(first, second).sequence_errors == 1
    wrapped = program(*[TileFence(seq=(0x8000 + k) & 0xFFFF) for k in range(1000)])
    assert check(wrapped).ok


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([RingSend(src=Walk(0, (1,), (2,), nz_mask=0))], "nz_mask: src: a dimension is missing"),
        ([RingSend(src=Walk(0, (1, 0), (3, 2), last_dim=1, last_cnt=1, last_skip=0))], "last_skip: src: other"),
        ([RingSend(src_last_cnt=1)], "last_skip: src: set without a dimension"),
        ([RingSend(wait1_valid=1)], "wait records: record 1: not so"),
        ([RingSend(wait0_base=3)], "wait records: record 0: not so"),
        ([RingSend(waits=[Wait(19, 0)])], "wait records: record 0: not so"),
        ([Op(loops=[5])], "op out steps: 1 for 5"),
        ([Op(loops=[4], inp=Walk(0, (4,), (3,)), out=Walk(0, (4,), (4,)))], "inp: 3 for 4"),
        ([Op(loops=[4, 2], reduce_mask=2, out_ch=7, out=Walk(0, (4,), (6,)))], "op out steps: 6 for 8"),
        ([RingRecv0(waits=[Wait(TileCounter.PARAMETERS, 1)], tile_mask=1)], "PARAMETERS credit: off by 1"),
        (
            [RingSend(to_consumer1=1, waits=[Wait(TileCounter.RING_PRODUCER_B, 3)])],
            "RING_PRODUCER_B order: off by 3",
        ),
    ],
)
def test_each_rule_finds_its_violation(body: list[isa.Instruction], message: str) -> None:
    report = check(program(*body))
    assert report.rule_violations
    assert any(re.search(message, problem) for problem in report.problems), report.problems


def test_credits_follow_counts_and_fences() -> None:
    walks = {"inp": Walk(0, (4,), (6,)), "psum": Walk(0, (0,), (6,)), "out": Walk(0, (4,), (6,))}
    take = RingRecv0(tile_mask=2, waits=[Wait(TileCounter.PARAMETERS, 2)], seq=1)
    double = take.replace(dst=Walk(0, slot_stride=1), waits=[Wait(TileCounter.PARAMETERS, 1)], seq=2)
    fence = TileFence(tile_mask=2, ctr_mask=1 << TileCounter.PARAMETERS, ctr_value=9, seq=3)
    after = take.replace(waits=[Wait(TileCounter.PARAMETERS, 9)], seq=4)
    op = Op(tile_mask=3, loops=[6], par=Walk(0, (1, 4), (3, 2)), sig_par=1, seq=0, **walks)
    report = check(program(op, take, double, fence, after))
    assert report.ok, report.problems
    assert report.rules["PARAMETERS credit"] == {"consumed - slots + 1": 3}
