"""Instructions that are dispatched to tiles: data movers and fences."""

from __future__ import annotations

from enum import IntEnum

from coral.isa.core import Instruction
from coral.isa.families import SignalSpec, WaitSpec, WalkSpec
from coral.isa.fields import Field, Must, TileCounter


class Predicated(Instruction):
    """The first six bits of every instruction."""

    pred_en = Field(0, 1, "1: executed only if p[pred_reg] == pred_val", "flag")
    pred_reg = Field(1, 3, "predicate register", "reg")
    pred_val = Field(4, 1, "required predicate value", "flag")
    r5 = Must(5, 1)


class TileInstruction(Predicated):
    """Header of everything that goes to a tile unit."""

    tile_mask = Field(12, 16, "bit t: tile t executes it (mesh row t//4, column t%4)", "bitmap")
    addr_reg = Field(28, 5, "scalar register with the narrow source address, with addr_indirect", "s-reg", mark="I")
    tile_mask_reg = Field(33, 5, "scalar register with the tile mask, with tile_mask_indirect", "s-reg", mark="I")
    tile_mask_indirect = Field(38, 1, "1: the tile mask is s[tile_mask_reg]; tile_mask is then 0", "flag", mark="I")
    r39 = Must(39, 7)
    seq = Field(46, 16, "dispatch sequence number, +1 per tile instruction in program order", "count")


def _rows(prefix: str, lo: int, doc: str) -> WalkSpec:
    return WalkSpec(prefix, lo, 4, 16, 17, 16, 2, 2, "256 B row", doc)


class RingSend(TileInstruction):
    """Sends wide-memory rows as ring packets to the tiles and, with bit 16, the scalar core of dest_mask."""

    opcode = 0x10
    words = 4
    mnemonic = "ring_send"
    unit = "ring_producer"
    src = _rows("src", 62, "wide memory read")
    r267 = Must(267, 68)
    sig_src = SignalSpec(335, 3, "RING_WRITE", "src")
    sig_ring = SignalSpec(339, 3, "RING_PRODUCER_A or _B on all tiles and PRODUCER_A or _B on the scalar core", "src")
    wait_records = WaitSpec(343, 3, 5, 2, True, TileCounter)
    to_consumer1 = Field(466, 1, "received by ring consumer 0 (0x11) or 1 (0x12)", "flag")
    dest_mask = Field(467, 17, "bit t: tile t; bit 16: scalar core (outfeed)", "bitmap")
    r484 = Must(484, 28)


class _RingRecv(TileInstruction):
    words = 4
    dst = _rows("dst", 62, "wide memory write")
    hdr_en = Field(267, 1, "1: every group of the stream starts with header rows", "flag")
    hdr_level = Field(268, 2, "a group ends when dst dimensions 0..hdr_level complete", "level")
    hdr_first_row = Field(270, 16, "first row of the ring of header rows", "256 B row")
    hdr_rows = Field(286, 16, "header rows per group, minus one (order: scales, biases, zero points)", "rows-1")
    hdr_last_row = Field(302, 16, "last row of the ring of header rows", "256 B row")
    hdr_bias = Field(318, 1, "the header contains a bias row", "flag", mark="I")
    hdr_scale = Field(319, 1, "the header contains scale and zero-point rows", "flag", mark="I")
    r320 = Must(320, 15)
    wait_records = WaitSpec(339, 4, 5, 2, True, TileCounter)
    r503 = Must(503, 9)


class RingRecv0(_RingRecv):
    """Stores ring packets, addressed to consumer 0, as wide-memory rows."""

    opcode = 0x11
    mnemonic = "ring_recv0"
    unit = "ring_consumer0"
    sig_dst = SignalSpec(335, 3, "RING_READ_A", "dst")


class RingRecv1(_RingRecv):
    """Stores ring packets, addressed to consumer 1, as wide-memory rows."""

    opcode = 0x12
    mnemonic = "ring_recv1"
    unit = "ring_consumer1"
    sig_dst = SignalSpec(335, 3, "RING_READ_B", "dst")


class N2w(TileInstruction):
    """Packs words of narrow memory into rows of wide memory, optionally transposing 4x4 bytes or 2x2 half-words."""

    opcode = 0x13
    words = 7
    mnemonic = "n2w"
    unit = "narrow_to_wide"
    src = WalkSpec("src", 62, 6, 16, 17, 16, 3, 3, "4 B", "narrow memory read", skip_kind="int")
    dst = _rows("dst", 337, "wide memory write")
    addr_indirect = Field(542, 1, "1: the narrow source address is s[addr_reg]", "flag", mark="I")
    sig_dst = SignalSpec(543, 3, "NARROW_TO_WIDE", "dst")
    wait_records = WaitSpec(547, 6, 5, 3, True, TileCounter)
    transpose = Field(799, 1, "1: four positions become four byte lanes", "flag")
    transpose16 = Field(800, 1, "with transpose: two positions become two half-word lanes", "flag")
    pack_level = Field(801, 3, "a row is flushed when the src dimensions below complete; 0: one word per row", "level")
    r804 = Must(804, 92)


class W2n(TileInstruction):
    """Moves rows of wide memory, as a stream of words, to narrow memory or to the scaling store."""

    opcode = 0x14
    words = 7
    mnemonic = "w2n"
    unit = "wide_to_narrow"
    src = _rows("src", 62, "wide memory read")
    dst = WalkSpec("dst", 267, 6, 16, 17, 16, 3, 3, "4 B", "narrow memory or scaling store write", skip_kind="int")
    skip_en = Field(542, 1, "1: drop the first skip_cnt + 1 words of the stream", "flag")
    skip_level = Field(543, 3, "1 or 2 with skip_en, by compiler generation; no effect found", "level", mark="U")
    skip_base = Field(546, 16, "narrow address of the whole tensor; no effect found", "4 B", mark="U")
    skip_cnt = Field(562, 16, "words dropped, minus one", "words-1")
    skip_end = Field(578, 16, "skip_base + skip_cnt; no effect found", "4 B", mark="U")
    r594 = Must(594, 17)
    sig_dst = SignalSpec(611, 3, "WIDE_TO_NARROW, or WIDE_TO_SCALING with to_scaling", "dst")
    wait_records = WaitSpec(615, 6, 5, 3, True, TileCounter)
    to_scaling = Field(867, 1, "1: the destination is the scaling store, 8 bytes per step", "flag")
    r868 = Must(868, 2)
    unpack_level = Field(870, 3, "the rest of a row is dropped when the dst dimensions below complete", "level")
    r873 = Must(873, 23)


class _Mesh(TileInstruction):
    words = 6
    src = WalkSpec("src", 62, 4, 16, 17, 16, 2, 2, "4 B", "outbound half: narrow memory read")
    dst = WalkSpec("dst", 267, 4, 16, 17, 16, 2, 2, "4 B", "inbound half: narrow memory write")
    r472 = Must(472, 1)
    wait_records = WaitSpec(481, 6, 5, 2, True, TileCounter)
    fill_en = Field(727, 1, "1: the inbound half writes fill_value instead of received words", "flag")
    fill_value = Field(728, 32, "constant for fill_en")
    r760 = Must(760, 8)


class MeshSouth(_Mesh):
    """Words to the neighbour t + 4; the inbound half takes what comes from t - 4."""

    opcode = 0x15
    mnemonic = "mesh_south"
    unit = "mesh_south"
    sig_src = SignalSpec(473, 3, "MESH_SOUTH_OUT", "src")
    sig_dst = SignalSpec(477, 3, "MESH_NORTH_IN", "dst")


class MeshWest(_Mesh):
    """Words to the neighbour t - 1; the inbound half takes what comes from t + 1."""

    opcode = 0x16
    mnemonic = "mesh_west"
    unit = "mesh_west"
    sig_src = SignalSpec(473, 3, "MESH_WEST_OUT", "src")
    sig_dst = SignalSpec(477, 3, "MESH_EAST_IN", "dst")


class MeshNorth(_Mesh):
    """Words to the neighbour t - 4; the inbound half takes what comes from t + 4."""

    opcode = 0x17
    mnemonic = "mesh_north"
    unit = "mesh_north"
    sig_src = SignalSpec(473, 3, "MESH_NORTH_OUT", "src")
    sig_dst = SignalSpec(477, 3, "MESH_SOUTH_IN", "dst")


class MeshEast(_Mesh):
    """Words to the neighbour t + 1; the inbound half takes what comes from t - 1."""

    opcode = 0x18
    mnemonic = "mesh_east"
    unit = "mesh_east"
    sig_src = SignalSpec(473, 3, "MESH_EAST_OUT", "src")
    sig_dst = SignalSpec(477, 3, "MESH_WEST_IN", "dst")


class FenceUnit(IntEnum):
    """Bits of a tile fence's ``unit_mask``; 1..4 are the ring units and wide-to-narrow in an order still open."""

    OP, OPEN_1, OPEN_2, OPEN_3, OPEN_4, NARROW_TO_WIDE = range(6)
    MESH_SOUTH, MESH_WEST, MESH_NORTH, MESH_EAST = range(6, 10)


class TileFence(Predicated):
    """On every tile: wait until the units are idle, set the counters, send a token to the scalar core."""

    opcode = 0x1A
    words = 1
    mnemonic = "tile_fence"
    unit = "tile_dispatcher"
    tile_mask = Field(12, 16, "bit t: tile t", "bitmap")
    seq = Field(28, 16, "dispatch sequence number", "count")
    ctr_mask = Field(44, 19, "bit c: set tile counter c to ctr_value", "bitmap", bit_names=TileCounter)
    ctr_value = Field(63, 16, "value the counters are set to (two's complement)", "count")
    unit_mask = Field(79, 10, "units that must be idle first", "bitmap", bit_names=FenceUnit, mark="I")
    r89 = Must(89, 18)
    token = Field(107, 1, "1: send a token to the scalar core", "flag")
    r108 = Must(108, 1)
    final = Field(109, 2, "3 in the last fence of a program; no effect found", mark="U")
    r111 = Must(111, 17)
