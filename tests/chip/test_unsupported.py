"""Models made of nothing but one unsupported thing say so: opcode, field, value, place."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import coral
from coral import isa
from coral.chip import Chip, UnknownInstruction
from coral.isa import TileCounter, Wait, Walk
from coral.package import Base, Bitstream, DmaHint, InstructionHint, InterruptHint, Kind, Layer, Program
from coral.package.container import Package
from coral.package.tflite_file import read_edgetpu, write_edgetpu
from tests.chip.builder import move, program, requantise

OP = requantise(1, 0, 64, 4)
TWO = Walk(0, [1], [2])

UNSUPPORTED: list[tuple[isa.Instruction, str, int]] = [
    (OP.replace(lane_off=3), "lane_off", 3),
    (OP.replace(acc_on=0), "acc_on", 0),
    (OP.replace(nlu_odd=1), "nlu_odd", 1),
    (OP.replace(sig_psum_en=1), "sig_psum_en", 1),
    (OP.replace(pred_en=1), "pred_en", 1),
    (OP.replace(tile_mask_indirect=1), "tile_mask_indirect", 1),
    (isa.NluLoad(tile_mask=1, table_mode=5), "table_mode", 5),
    (isa.OpResize(tile_mask=1, acc_init=1, par16=1, lane_off=6, rs_x_loop=2, rs_y_loop=3, rs_x_step=3, rs_y_step=2),
     "rs_x_step", 3),
    (isa.OpResize(tile_mask=1, act16=1), "act16", 1),
    (isa.N2w(tile_mask=1, src=TWO, dst=Walk(0), pack_level=1, transpose16=1), "transpose", 0),
    (isa.N2w(tile_mask=1, src=TWO, dst=Walk(0), pack_level=7), "level", 7),
    (isa.W2n(tile_mask=1, src=Walk(0), dst=TWO, unpack_level=1, to_scaling=1, skip_en=1), "skip_en", 1),
    (isa.RingSend(tile_mask=1, src=Walk(0), dest_mask=2, pred_en=1), "pred_en", 1),
    (isa.RingSend(tile_mask=1, src=Walk(0), dest_mask=2, waits=[Wait(TileCounter.AVDATA, 1)]).replace(wait0_ctr=31),
     "wait.ctr", 31),
    (isa.N2w(tile_mask=1, src=TWO, dst=Walk(0), pack_level=1).replace(src_last_dim=7), "last_dim", 7),
    (isa.Infeed(stream=3, dest_mask=1, lane_words=15), "stream", 3),
    (isa.Infeed(stream=1, dest_mask=1, lane_words=15, hdr_on=0), "hdr_on", 0),
    (isa.Scalar(st_op=7), "st_op", 7),
    (isa.Scalar(st_op=isa.StoreOp.DESCRIPTOR, st_addr=4, st_src=0), "st_addr", 4),
    (isa.Scalar(alu_op=31), "alu_op", 31),
    (isa.Scalar(sfu_op=5), "sfu_op", 5),
    (isa.Halt(code=9), "code", 9),
    (isa.Loop(count=0, body=1), "count", 0),
    (isa.TileFence(tile_mask=1, pred_en=1), "pred_en", 1),
    (isa.TileFence(tile_mask=1, final=1), "final", 1),
]  # fmt: skip


def case_id(case: object) -> str:
    return case.mnemonic if isinstance(case, isa.Instruction) else str(case)


@pytest.mark.parametrize(("instruction", "field", "value"), UNSUPPORTED, ids=case_id)
def test_opcode_field_value_and_place(instruction: isa.Instruction, field: str, value: int) -> None:
    chip = Chip()
    chip.feed(0, program(move(0, 1), instruction))
    with pytest.raises(UnknownInstruction) as caught:
        chip.run()
    head = rf"opcode {instruction.opcode:#04x} field {re.escape(field)} value {value}: not modelled \(seen in "
    assert re.match(head + r".+ at word 2\b.*\)$", str(caught.value)), str(caught.value)


def model(data: bytes) -> bytes:
    """A compiled file whose only program is ``data``."""
    hints = (
        InstructionHint(),
        DmaHint(Base.INPUT, 0, 8, "x"),
        DmaHint(Base.OUTPUT, 0, 8, "y", out=True),
        InterruptHint(),
    )
    layers = (Layer("x", 8, 1, 1, 8, 0, 1.0), Layer("y", 8, 1, 1, 8, 0, 1.0))
    return write_edgetpu(
        Package((Program(Kind.STAND_ALONE, (Bitstream(data),), hints, inputs=layers[:1], outputs=layers[1:]),))
    )


def test_a_model_of_one_unsupported_field(tmp_path: Path) -> None:
    path = tmp_path / "odd_edgetpu.tflite"
    path.write_bytes(model(program(move(0, 1), OP.replace(lane_off=3))))
    with pytest.raises(coral.CoralError, match=r"opcode 0x01 field lane_off value 3: not modelled \(seen in op at wo"):
        coral.load(path)(np.zeros((1, 8), np.uint8))


def test_a_model_of_one_unknown_opcode(tmp_path: Path) -> None:
    data = bytearray(program(isa.Scalar()))
    data[16:18] = (0x04 << 6).to_bytes(2, "little")
    path = tmp_path / "odd_edgetpu.tflite"
    path.write_bytes(model(bytes(data)))
    assert read_edgetpu(path).package.programs
    with pytest.raises(coral.CoralError, match="word 1: unknown opcode 0x04"):
        coral.load(path)(np.zeros((1, 8), np.uint8))
