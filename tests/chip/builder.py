"""Small programs for the tests, written instruction by instruction."""

from __future__ import annotations

from typing import Any

from coral import isa
from coral.isa import ScalarCounter, TileCounter, Wait, Walk

ALL = 0xFFFF
INFINITY = float("inf")


def program(*instructions: isa.Instruction, code: int = 4) -> bytes:
    """A bitstream: start, the instructions, halt and end."""
    body = [*instructions, isa.Halt(code=code), *[isa.Scalar()] * 4]
    return isa.encode([isa.Start(body_bits=128 * sum(i.words for i in body)), *body, isa.End()])


def move(register: int, value: int) -> isa.Scalar:
    """s[register] = value."""
    return isa.Scalar(alu_op=isa.AluOp.MOV | isa.IMMEDIATE, alu_dst=register, alu_imm=value & 0xFFFFFFFF)


def alu(op: int, dst: int, src: int, b: int, immediate: bool = True) -> isa.Scalar:
    """s[dst] = s[src] op b."""
    return isa.Scalar(alu_op=op | (isa.IMMEDIATE if immediate else 0), alu_dst=dst, alu_src=src, alu_imm=b)


def descriptor(tag: int, length: int, address: int = 0) -> list[isa.Scalar]:
    """Issue a host DMA; uses s28 to s31."""
    values = (address & 0xFFFFFFFF, address >> 32, length, tag)
    out = [move(28 + k, value) for k, value in enumerate(values)]
    out += [isa.Scalar(st_op=isa.StoreOp.DESCRIPTOR, st_addr=k, st_src=28 + k) for k in range(4)]
    return [*out, isa.Scalar(st_op=isa.StoreOp.ISSUE)]


def fence(tiles: int = ALL, units: int = 0x3FF) -> list[isa.Instruction]:
    """Wait until the tiles' units are done."""
    return [
        isa.TileFence(tile_mask=tiles, unit_mask=units, token=1),
        isa.ScalarFence(token_wait=1, token_tiles=tiles),
    ]


def fill(tile_mask: int, word: int, value: int, count: int = 1) -> isa.Instruction:
    """Write a constant to narrow memory."""
    return isa.MeshNorth(tile_mask=tile_mask, dst=Walk(word, [1], [count]), fill_en=1, fill_value=value)


def identity(tile_mask: int, word: int = 0, row: int = 2079) -> list[isa.Instruction]:
    """The 4 x 4 identity in a row of wide memory, by way of four narrow words."""
    fills = [fill(tile_mask, word + k, 1 << 8 * k) for k in range(4)]
    pack = isa.N2w(tile_mask=tile_mask, src=Walk(word, [1], [4]), dst=Walk(row), pack_level=1)
    return [*fills, *fence(tile_mask), pack, *fence(tile_mask)]


def requantise(tile_mask: int, src: int, dst: int, words: int, row: int = 2079, **fields: Any) -> isa.Op:
    """An op that multiplies words of narrow memory (byte addresses src, dst) with the identity row."""
    values: dict[str, Any] = {"mult": 1.0, "clamp_max": INFINITY, "clamp_min": -INFINITY} | fields
    return isa.Op(
        tile_mask=tile_mask, loop_cnt0=words - 1, acc_init=1, group_loop=7, out_ch=3, out_ch_last=3,
        inp=Walk(src, [4], [words]), out=Walk(dst, [4], [words]), par=Walk(4 * row, [0], [words]),
        psum=Walk(0, [0], [words]), **values,
    )  # fmt: skip


def input_to_tile(tile: int, units: int, word: int = 0, row: int = 2076) -> list[isa.Instruction]:
    """``units`` * 8 bytes of tag 1 to narrow memory, a row of 256 bytes at a time."""
    rows = -(-units * 8 // 256)
    return [
        isa.Pop(stream=1, buf=Walk(0, [1], [units]), sig_pop=0),
        *descriptor(1, units * 8),
        isa.W2n(
            tile_mask=1 << tile, src=Walk(row, [0], [rows], 0, 1), dst=Walk(word, [1], [units * 2]), unpack_level=1,
            sig_dst=0, waits=[Wait(TileCounter.RING_READ_A, 1)],
        ),
        isa.RingRecv0(
            tile_mask=1 << tile, dst=Walk(row, [0], [rows], 0, 1), sig_dst=0,
            waits=[Wait(TileCounter.WIDE_TO_NARROW, -64, 0, 64, 1)],
        ),
        isa.Infeed(
            stream=1, buf=Walk(0, [1], [units]), dest_mask=1 << tile, lane_words=15, lanes=3,
            waits=[Wait(ScalarCounter.AVDATA_POP, 1)],
        ),
        *fence(1 << tile),
    ]  # fmt: skip


def output_from_tile(tile: int, words: int, word: int, row: int = 2072) -> list[isa.Instruction]:
    """``words`` (even, at most 64) of narrow memory to the host."""
    return [
        isa.N2w(tile_mask=1 << tile, src=Walk(word, [1], [words]), dst=Walk(row), pack_level=1),
        *fence(1 << tile),
        *descriptor(3, words * 4),
        isa.Outfeed(dst=Walk(0, [0], [words // 2]), to_host=1),
        isa.RingSend(tile_mask=1 << tile, src=Walk(row), dest_mask=1 << 16),
        *fence(1 << tile),
    ]


def interrupt() -> list[isa.Scalar]:
    return descriptor(4, 0)


def load_rows(tile: int, row: int, rows: int, lanes: int = 3) -> bytes:
    """A parameter program: ``rows`` packets of tag 2 to stay in wide memory from ``row`` on."""
    units = rows * (lanes + 1)
    return program(
        *descriptor(2, units * 64),
        isa.Pop(stream=0, buf=Walk(0, [1], [units]), sig_pop=0),
        isa.RingRecv0(tile_mask=1 << tile, dst=Walk(row, [1], [rows])),
        isa.Infeed(
            stream=0, buf=Walk(0, [1], [units]), dest_mask=1 << tile, lane_words=15, lanes=lanes,
            waits=[Wait(ScalarCounter.PARAMETER_POP, 1)],
        ),
        *fence(1 << tile),
    )  # fmt: skip
