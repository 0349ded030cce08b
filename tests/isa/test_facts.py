"""What the reference pages say about Google's programs, counted on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coral import isa
from coral.package.bitstreams import bitstreams_of, find_files


@pytest.fixture(scope="module")
def programs(corpus: Path) -> list[list[isa.Instruction]]:
    return [[i for _, i in isa.decode(s.data)] for path in find_files([corpus]) for s in bitstreams_of(path)]


def every(programs: list[list[isa.Instruction]], *classes: type[isa.Instruction]) -> Iterator[isa.Instruction]:
    return (i for program in programs for i in program if isinstance(i, classes))


def test_constants_and_their_conditions(programs: list[list[isa.Instruction]]) -> None:
    assert {i.mnemonic for i in every(programs, isa.Instruction) if i.pred_en} == {"scalar"}
    assert all(i.acc_on and i.sig_psum is None for i in every(programs, isa.OpFormat))
    assert {i.table_mode for i in every(programs, isa.NluLoad)} == {3}
    assert {i.pkt_words for i in every(programs, isa.Outfeed)} == {63}
    assert {i.rel for i in every(programs, isa.Branch)} == {1}
    assert {i.hdr_on for i in every(programs, isa.Infeed)} == {1}
    assert {i.body_bits for i in every(programs, isa.End)} == {128}
    assert all((i.smem_308 == 3) == (i.stream == isa.Source.SCALAR_MEMORY) for i in every(programs, isa.Infeed))
    assert all(i.skip_end == i.skip_base + i.skip_cnt for i in every(programs, isa.W2n))
    assert all(i.count for i in every(programs, isa.Loop))
    headers = {
        (i.hdr_rows + 1, i.hdr_bias, i.hdr_scale) for i in every(programs, isa.RingRecv0, isa.RingRecv1) if i.hdr_en
    }
    assert headers == {(1, 1, 0), (2, 0, 1), (3, 1, 1)}


def test_final_marks_the_last_fence_of_a_program(programs: list[list[isa.Instruction]]) -> None:
    for program in programs:
        last = program[-2 - next(k for k, i in enumerate(program[-2::-1]) if isinstance(i, isa.TileFence))]
        whole = all(i.code == 4 for i in program if isinstance(i, isa.Halt))
        assert [i for i in program if isinstance(i, isa.TileFence) and i.final] == [last] * whole


def test_operand_widths_that_occur(programs: list[list[isa.Instruction]]) -> None:
    found = {(i.act16, i.par16, i.lane_off) for i in every(programs, isa.Op)}
    assert found == {(0, 0, 0), (0, 0, 7), (0, 1, 0), (0, 1, 6), (1, 0, 0), (1, 0, 6), (1, 1, 0)}
    assert sum((i.act16, i.par16, i.lane_off) == (1, 0, 0) for i in every(programs, isa.Op)) == 4


def test_multi_row_fifos_at_odd_rows_exist(programs: list[list[isa.Instruction]]) -> None:
    recv = every(programs, isa.RingRecv0, isa.RingRecv1)
    assert sum(i.dst_slot_stride > 1 and i.dst_addr % 2 for i in recv) == 54


def test_the_transposing_skip_is_not_decided(programs: list[list[isa.Instruction]]) -> None:
    walks = [i.src for i in every(programs, isa.N2w) if i.transpose and i.src.last_dim]
    assert len(walks) == 5
    for walk in walks:
        skips = {(walk.counts[k] - 1 - walk.last_cnt) * walk.strides[k] for k in (0, 1)}
        assert skips == {walk.last_skip}
