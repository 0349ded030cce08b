# ruff: noqa: E501
"""Deliberately wrong programs: each is caught by name, at its place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from coral import isa
from coral.chip import (
    Chip,
    ChipError,
    ChipState,
    Deadlock,
    Hazard,
    RuleViolation,
    UnknownInstruction,
    UnwrittenRead,
)
from coral.codegen.fc import FcQuant, fully_connected
from coral.isa import DecodeError, ScalarCounter, TileCounter, Wait, Walk
from coral.package import Kind
from tests.chip.builder import (
    ALL,
    alu,
    descriptor,
    fence,
    fill,
    identity,
    input_to_tile,
    load_rows,
    move,
    output_from_tile,
    program,
    requantise,
)
from tests.chip.harness import programs, run


def execute(*instructions: isa.Instruction, data: Sequence[tuple[int, bytes]] = (), chip: Chip | None = None) -> Chip:
    chip = chip or Chip()
    chip.feed(0, program(*instructions))
    for tag, part in data:
        chip.feed(tag, part)
    assert chip.run() is ChipState.FINISHED
    return chip


def test_the_pieces_of_these_programs_work() -> None:
    data = bytes(range(64))
    chip = execute(
        *input_to_tile(3, 8), *identity(8, 1000), requantise(8, 0, 2048, 16, mult=2.0, clamp_max=99.0),
        *fence(8), *output_from_tile(3, 16, 512), data=[(1, data)],
    )  # fmt: skip
    assert chip.outputs.popleft() == bytes(min(2 * b, 99) for b in data)
    assert chip.descriptors == [(1, 64), (3, 64)]


WRONG: dict[str, tuple[list[isa.Instruction], type[ChipError], str]] = {
    "tile mask of no tile": ([fill(0, 0, 1)], RuleViolation, "tile_mask = 0x0 names no tile"),
    "fence of no tile": ([isa.TileFence(unit_mask=1)], RuleViolation, "names no tile"),
    "ring packet to nobody": (
        [isa.RingSend(tile_mask=1, src=Walk(0))], RuleViolation, "ring_send at word 1.* go to nobody"
    ),
    "infeed to nobody": ([isa.Infeed(stream=1, lane_words=15, lanes=3)], RuleViolation, "to nobody"),
    "endless loop": ([isa.Branch(offset=0)], RuleViolation, "endless loop"),
    "narrow address": ([fill(1, 49152, 1)], RuleViolation, "address 49152 is outside 0..49151"),
    "wide row": ([isa.RingRecv0(tile_mask=1, dst=Walk(2079, [1], [2]))], RuleViolation, "2080 is outside 0..2079"),
    "header rows": (
        [isa.RingRecv0(tile_mask=1, dst=Walk(0), hdr_en=1, hdr_first_row=9, hdr_last_row=8)],
        RuleViolation, "header rows 9..8",
    ),
    "zero-point rows": (
        [isa.Op(tile_mask=1, acc_init=1, par_zp_rows=1, zp_first_row=2080, zp_last_row=2080, zp_row_step=1)],
        RuleViolation, "zero-point rows 2080..2080",
    ),
    "walk lengths of an op": (
        [requantise(1, 0, 64, 4).replace(inp=Walk(0, [4], [5]))], RuleViolation, "walk inp has 5 steps, the main loops have 4"
    ),
    "output length of an op": (
        [requantise(1, 0, 64, 4).replace(out=Walk(64, [4], [3]))], RuleViolation, "4 words are produced, but the out walk has 3"
    ),
    "rows of an n2w": (
        [isa.N2w(tile_mask=1, src=Walk(0, [1], [65]), dst=Walk(0), pack_level=1)], RuleViolation, "2 rows are packed, .* 1 steps"
    ),
    "rows of a w2n": (
        [isa.W2n(tile_mask=1, src=Walk(0), dst=Walk(0, [1], [65]), unpack_level=1)], RuleViolation, "needs 2 rows, .* has 1"
    ),
    "misaligned result": (
        [requantise(1, 0, 66, 1)], RuleViolation, "no multiple of 4"
    ),
    "misaligned parameters": (
        [requantise(1, 0, 64, 1).replace(par=Walk(4 * 2079 + 1, [0], [1]))], RuleViolation, "across the end of a column"
    ),
    "mesh off the edge": (
        [isa.MeshNorth(tile_mask=1, src=Walk(0, [1], [2]))], RuleViolation, "tile 0 has no neighbour"
    ),
    "a walk of millions of steps": (
        [fill(1, 0, 1).replace(dst=Walk(0, [0] * 2, [60000, 60000]))], RuleViolation, "3600000000 steps; the budget"
    ),
    "interleaved accumulators": (
        [isa.Op(tile_mask=1, loop_cnt1=1, loop_cnt2=1, reduce_mask=4, acc_init=1, group_loop=7,
                inp=Walk(0, [0, 4, 8], [1, 2, 2]), par=Walk(0, [0, 0, 4], [1, 2, 2]), out=Walk(64, [4], [2]))],
        RuleViolation, "other groups come between",
    ),
    "unknown operand widths": (
        [requantise(1, 0, 64, 1).replace(lane_off=3)], UnknownInstruction, r"opcode 0x01 field lane_off value 3: not modelled \(seen in op at word 1, seq 0; known: 0, 7\)"
    ),
    "unknown table mode": ([isa.NluLoad(tile_mask=1, table_mode=5)], UnknownInstruction, "field table_mode value 5: not"),
    "unknown halt code": ([isa.Halt(code=9)], UnknownInstruction, r"field code value 9: not modelled \(seen in scalar core at word 1; known: 0, 1, 4"),
    "unknown stream": (
        [isa.Infeed(stream=3, dest_mask=1)], UnknownInstruction, "field stream value 3: not modelled .*infeed at word 1"
    ),
    "unknown store": ([isa.Scalar(st_op=7)], UnknownInstruction, r"field st_op value 7: not modelled \(seen in scalar at word "),
    "unknown calculation": ([isa.Scalar(alu_op=31)], UnknownInstruction, r"field alu_op value 31: not modelled \(seen in scalar at word "),
    "unknown special function": ([move(0, 1), isa.Scalar(sfu_op=5)], UnknownInstruction, r"field sfu_op value 5: not modelled \(seen in scalar at word "),
    "predicated tile instruction": (
        [fill(1, 0, 1).replace(pred_en=1)], UnknownInstruction, "field pred_en value 1: not modelled"
    ),
    "loop in a loop": (
        [isa.Loop(count=2, body=3), isa.Loop(count=2, body=1), fill(1, 0, 1)], UnknownInstruction, r"opcode 0x\w\w field count value 2: not modelled .*known: loops outside of loops"
    ),
    "resize by three": (
        [isa.OpResize(tile_mask=1, acc_init=1, par16=1, lane_off=6, rs_x_loop=2, rs_y_loop=3, rs_x_step=3, rs_y_step=2)],
        UnknownInstruction, "opcode 0x05 field rs_x_step value 3: not modelled",
    ),
    "activations never written": (
        [*identity(1, 1000), requantise(1, 0, 64, 1)], UnwrittenRead, "op at word .* on tile 0: activations at narrow byte 0"
    ),
    "parameters never written": (
        [fill(1, 0, 5), *fence(), requantise(1, 0, 64, 1)], UnwrittenRead, "parameters at 64-byte unit 8316 were never written"
    ),
    "scaling store never filled": (
        [fill(1, 0, 5), *identity(1, 1000), requantise(1, 0, 64, 1, bias_en=1)], UnwrittenRead, "scale, bias or zero point"
    ),
    "register never written": ([alu(isa.AluOp.ADD, 1, 2, 3)], UnwrittenRead, "words 1..1 use a register"),
    "predicate never written": ([isa.Branch(cond_en=1, offset=1)], UnwrittenRead, "predicate p0 was never written"),
    "tile mask register never written": (
        [isa.RingSend(tile_mask_indirect=1, tile_mask_reg=5, src=Walk(0), dest_mask=1)], UnwrittenRead, "the tile mask is in s5"
    ),
    "scalar memory never written": (
        [isa.Scalar(ld_mode=1, ld_dst=1, ld_addr=7), alu(isa.AluOp.ADD, 1, 1, 1)], UnwrittenRead, "use a register"
    ),
    "scalar memory address": (
        [move(1, 4096), isa.Scalar(ld_mode=2, ld_dst=2, ld_addr=1)], RuleViolation, "word 4096 is outside 0..4095"
    ),
    "descriptor of an unknown tag": (descriptor(9, 8), RuleViolation, "tag 9"),
    "non-linear unit without table": (
        [fill(1, 0, 5), *identity(1, 1000), requantise(1, 0, 64, 1, nlu_en=1)], UnwrittenRead, "no nlu_load filled its table"
    ),
    "jump into an instruction": ([isa.Branch(offset=2), fill(1, 0, 1)], RuleViolation, "no instruction begins at word 3"),
    "running into the end": ([isa.Branch(offset=6)], RuleViolation, "ends without a halt"),
    "leftover ring packet": (
        [isa.RingSend(tile_mask=1, src=Walk(0), dest_mask=2)], RuleViolation, "1 ring packets for consumer 0 of tile 1"
    ),
    "more ring packets than anything can hold": (
        [*identity(1, row=0), isa.RingSend(tile_mask=1, src=Walk(0, [0, 0], [300, 300]), dest_mask=6)],
        RuleViolation, "ring_send at word .* wait for consumer 0 of tile 1, the limit is 65536",
    ),
    "leftover mesh words": (
        [fill(1, 0, 1, 2), *fence(), isa.MeshSouth(tile_mask=1, src=Walk(0, [1], [2]))],
        RuleViolation, "2 words for mesh_south of tile 4",
    ),
    "leftover token": ([isa.TileFence(tile_mask=4, token=1)], RuleViolation, "1 tokens of tile 2"),
    "leftover scaling": (
        [*identity(1, 1000), isa.W2n(tile_mask=1, src=Walk(2079), dst=Walk(64, [1], [8]), to_scaling=1, unpack_level=1)],
        RuleViolation, r"the scaling of slots \[0\] on tile 0",
    ),
    "deadlock of a tile": (
        [isa.W2n(tile_mask=2, src=Walk(0), dst=Walk(0, [1], [4]), unpack_level=1, waits=[Wait(TileCounter.RING_READ_A, 3)]),
         *fence(2)],
        Deadlock,
        r"a token from tiles 1(.|\n)*wide_to_narrow of tile 1: w2n at word 1, seq 0 waits for RING_READ_A >= 3 \(is 0\)",
    ),
    "deadlock of the scalar core": (
        [isa.ScalarFence(ctr_mask=0x20, wait_mask=0x20, thr5=7)], Deadlock, r"scalar core at word 1 waits for PRODUCER_A >= 7"
    ),
    "mesh partner missing": (
        [isa.MeshSouth(tile_mask=16, dst=Walk(0, [1], [5]))], Deadlock, "waits for 5 more words from its neighbour"
    ),
    "host stream underrun": (
        [isa.Pop(stream=1, buf=Walk(0, [1], [2]))], Deadlock, "pop at word 1 waits for bytes of host stream activations"
    ),
    "output never filled": (descriptor(3, 8), RuleViolation, "an output of 8 bytes that was never filled"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_named(name: str) -> None:
    instructions, error, message = WRONG[name]
    chip = Chip(budget=100_000 if name.startswith("more ring") else 10_000)
    chip.feed(0, program(*instructions))
    with pytest.raises(error) as caught:
        chip.run()
    assert re.search(message, str(caught.value)), str(caught.value)
    assert chip.run() is ChipState.IDLE
    execute(fill(1, 0, 1), chip=chip)


def test_unknown_opcode() -> None:
    data = bytearray(program(isa.Scalar()))
    data[16:18] = (0x04 << 6).to_bytes(2, "little")
    with pytest.raises(DecodeError, match="word 1: unknown opcode 0x04"):
        Chip().feed(0, bytes(data))


@pytest.mark.parametrize("data", [b"", isa.Scalar().to_bytes(), isa.encode([isa.Start(), isa.End()])])
def test_a_bitstream_has_a_frame(data: bytes) -> None:
    with pytest.raises(RuleViolation, match="a bitstream begins with start"):
        Chip().feed(0, data)


def test_unserved_dma_waits_for_the_host() -> None:
    chip = Chip()
    chip.feed(0, program(*input_to_tile(0, 8)))
    assert chip.run() is ChipState.NEEDS_HOST
    assert chip.missing == (1, 64)
    chip.feed(1, bytes(64))
    assert chip.run() is ChipState.FINISHED


def test_a_dma_of_another_length_is_refused() -> None:
    chip = Chip()
    chip.feed(0, program(*input_to_tile(0, 8)))
    chip.feed(1, bytes(56))
    with pytest.raises(RuleViolation, match="sent 56 bytes with tag 1, the program's descriptor asks for 64"):
        chip.run()


def test_fifo_row_overwritten_before_it_is_read() -> None:
    two = isa.N2w(tile_mask=1, src=Walk(0, [1], [3]), dst=Walk(100, [0], [3], 0, 1), pack_level=0)
    with pytest.raises(Hazard, match=r"n2w at word .* on tile 0 writes a row of wide memory twice"):
        execute(*(fill(1, k, k) for k in range(3)), *fence(), two)


def test_scaling_group_loaded_over_one_in_waiting() -> None:
    load = isa.W2n(tile_mask=1, src=Walk(2079), dst=Walk(64, [1], [2], 2, 32), to_scaling=1, sig_dst=2, unpack_level=1)
    with pytest.raises(Hazard, match="overwrites slot 0 of the scaling store before the op has used it"):
        execute(*identity(1), load, load, load)


def test_small_groups_above_256_kib() -> None:
    for row, good in ((1023, True), (1024, False)):
        chip = Chip()
        chip.feed(0, load_rows(0, row, 3, lanes=0))
        chip.feed(2, bytes(3 * 64))
        if good:
            assert chip.run() is ChipState.FINISHED
        else:
            with pytest.raises(RuleViolation, match="fewer than 64 outputs at row 1024"):
                chip.run()


@pytest.mark.parametrize("row", [0, 5])
def test_misaligned_parameter_region(row: int) -> None:
    """A region that begins 128 bytes into a row: half a row lies in the top bit of the sequence number."""
    pair = fully_connected(16, 64, FcQuant(0, 128, 0, 1.0, 0.0, 255.0), parameter_row=row)
    data = pair.caching(bytes(pair.blob_bytes)).bitstreams[0].data
    placed = isa.decode(data)
    receive = next(p for p in placed if isinstance(p.instruction, isa.RingRecv0))
    field = type(receive.instruction).fields["dst_addr"]
    moved = int.from_bytes(data, "little") + (1 << 128 * receive.word + field.lo - 1)
    message = rf"ring_recv0 at word {receive.word}: seq 0x1 after 0x8000.* middle of a 256-byte row"
    chip = Chip()
    with pytest.raises(RuleViolation, match=message):
        chip.feed(0, moved.to_bytes(len(data), "little"))
    chip.feed(0, data)


def test_buffers_over_resident_weights(corpus: Path) -> None:
    pair = programs(corpus / "dense" / "dense_256_edgetpu.tflite")
    layer = pair[Kind.EXECUTION_ONLY].inputs[0]
    chip = Chip()
    run(chip, pair[Kind.PARAMETER_CACHING])
    run(chip, pair[Kind.EXECUTION_ONLY], {layer.name: bytes(256)})
    execute(*identity(1, row=5), chip=chip)
    with pytest.raises(UnwrittenRead, match=r"parameters \(overwritten by a buffer of an earlier program\)"):
        run(chip, pair[Kind.EXECUTION_ONLY], {layer.name: bytes(256)})
    run(chip, pair[Kind.PARAMETER_CACHING])
    run(chip, pair[Kind.EXECUTION_ONLY], {layer.name: bytes(256)})


def test_weights_are_gone_after_reset(corpus: Path) -> None:
    pair = programs(corpus / "dense" / "dense_256_edgetpu.tflite")
    inputs = {pair[Kind.EXECUTION_ONLY].inputs[0].name: bytes(256)}
    chip = Chip()
    run(chip, pair[Kind.PARAMETER_CACHING])
    run(chip, pair[Kind.EXECUTION_ONLY], inputs)
    chip.reset()
    with pytest.raises(UnwrittenRead):
        run(chip, pair[Kind.EXECUTION_ONLY], inputs)


def test_narrow_memory_does_not_outlive_a_program() -> None:
    chip = execute(fill(1, 0, 5))
    chip.feed(0, program(*identity(1, 1000), requantise(1, 0, 64, 1)))
    with pytest.raises(UnwrittenRead, match="activations at narrow byte 0"):
        chip.run()


def test_half_written_words_may_be_moved_but_are_known() -> None:
    chip = execute(fill(1, 0, 7), *fence(), *output_from_tile(0, 4, 0))
    assert chip.written.popleft().tolist() == [True] * 4 + [False] * 12


def test_a_missing_fence_is_found(corpus: Path) -> None:
    """Without the fence behind MUL's operand feed some order of the units gives another result."""
    pair = programs(corpus / "robotics" / "looming_64x64_3x3_edgetpu.tflite")
    program_, chunk = pair[Kind.EXECUTION_ONLY], pair[Kind.EXECUTION_ONLY].bitstreams[0].data
    fenceless = isa.encode(
        i.replace(unit_mask=0) if isinstance(i, isa.TileFence) and i.unit_mask == 0x20 else i
        for _, i in isa.decode(chunk)
    )
    image = np.random.default_rng(0).integers(0, 256, 4096, np.uint8).tobytes()
    good = run_chunk(pair, chunk, image, None)
    outcomes = [run_chunk(pair, fenceless, image, seed) for seed in range(8)]
    assert any(outcome != good for outcome in outcomes)
    assert program_.outputs[0].size_bytes == len(good)


def run_chunk(pair: dict[Kind, object], chunk: bytes, image: bytes, seed: int | None) -> bytes:
    chip = Chip(seed=seed)
    run(chip, pair[Kind.PARAMETER_CACHING])  # type: ignore[arg-type]
    chip.feed(0, chunk)
    chip.feed(1, image)
    try:
        chip.run()
    except ChipError as error:
        return str(error).encode()
    return chip.outputs.popleft()


def test_scalar_counters_gate_pops() -> None:
    """A pop waits for the credit that its record asks for."""
    pop = isa.Pop(stream=1, buf=Walk(0, [1], [2]), waits=[Wait(ScalarCounter.AVDATA_INFEED, 5)])
    with pytest.raises(Deadlock, match=r"AVDATA_INFEED >= 5 \(is 0\)"):
        execute(pop, *fence(ALL))
