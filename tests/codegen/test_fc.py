"""Shapes, places, limits and bookkeeping of FULLY_CONNECTED programs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral import isa
from coral.codegen import CodegenError, ShapeError
from coral.codegen.builder import V14, Builder
from coral.codegen.fc import RESIDENT_TOKEN, FcQuant, FcShape, fully_connected, fully_connected_per_channel
from coral.codegen.machine import FORWARD_FIFO_ROW, tiles_of
from coral.isa import TileCounter, Wait, Walk
from coral.package.program import Program

QUANT = FcQuant(3, 128, 7, 0.5, -7.0, 248.0)
EDGES = [
    (64, 196), (64, 200), (64, 228), (64, 516), (64, 600), (64, 772), (64, 900), (64, 948), (64, 1000), (64, 1020),
    (64, 1028), (64, 1100), (64, 1500), (64, 2000), (64, 3000), (100, 200), (100, 600), (100, 1000), (100, 1500),
    (752, 128), (752, 256), (733, 256), (1000, 320), (1020, 512), (1021, 512), (2000, 1024), (1264, 768), (3, 8),
    (3, 54), (78, 446), (130, 523), (1681, 913), (4011, 154), (3908, 1276), (4058, 1050), (1, 45), (1, 300), (4, 2604),
    (958, 4), (767, 115), (2045, 1330), (41, 3896), (48, 2728),
]  # fmt: skip
"""Partial pieces and packets, uneven tiles, both narrow layouts (docs/codegen.md)."""


def check_bitstream(program: Program) -> list[isa.Instruction]:
    """Frame, lengths, sequence numbers, relocations and hints; the instructions."""
    program.check()
    (bitstream,) = program.bitstreams
    placed = isa.decode(bitstream.data)
    instructions = [p.instruction for p in placed]
    assert isa.encode(instructions) == bitstream.data
    assert isinstance(instructions[0], isa.Start)
    assert isinstance(instructions[-1], isa.End)
    assert instructions[0].body_bits == 128 * (placed[-1].word - 1)
    seqs = [i.seq for i in instructions if "seq" in i.fields]
    assert seqs == [*range(seqs[0], seqs[0] + len(seqs))]
    descriptors = [i.alu_imm for i in instructions if isinstance(i, isa.Scalar) and (i.st_op, i.st_addr) == (10, 1)]
    assert descriptors == [h.size for h in program.hints if hasattr(h, "size")] + [0]
    return instructions


def check_pair(fc) -> None:
    blob = bytes(fc.blob_bytes)
    caching, execution = fc.caching(blob), fc.execution
    assert check_bitstream(caching)[1].seq == 0x8000
    instructions = check_bitstream(execution)
    assert (caching.hint_pattern(), execution.hint_pattern()) == ("IP!", "IAO!")
    assert caching.token == execution.token == RESIDENT_TOKEN
    lowest = min(
        row
        for i in instructions
        if isinstance(i, (isa.RingRecv0, isa.N2w))
        for row in (i.dst_addr,)
    )  # fmt: skip
    assert lowest == fc.floor_rows
    ops = [i for i in instructions if isinstance(i, isa.Op)]
    assert sum(len(tiles_of(op.tile_mask)) for op in ops) == fc.tiles


@pytest.mark.parametrize(("n", "k"), EDGES)
def test_edge_shapes(n, k):
    check_pair(fully_connected(n, k, QUANT))
    check_pair(fully_connected_per_channel(n, k, QUANT))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4096), st.integers(1, 4096), st.booleans(), st.data())
def test_any_place_that_is_not_refused(n, k, bias, data):
    """A layer that fits at row 0 fits at every row up to the floor and on every first tile that leaves enough."""
    for form in (fully_connected, fully_connected_per_channel):
        try:
            rows = form(n, k, QUANT, bias=bias).rows_per_tile
        except ShapeError:
            assert n > 1024
            continue
        last_row = FORWARD_FIFO_ROW - rows
        row = data.draw(st.integers(0, min(last_row, 1023) if n <= 48 else last_row))
        shift = data.draw(st.integers(0, 16 - FcShape(n, k).tiles))
        check_pair(form(n, k, QUANT, bias=bias, parameter_row=row, compute_shift=shift))
        with pytest.raises(ShapeError):
            form(n, k, QUANT, bias=bias, parameter_row=last_row + 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 0, "k": 8}, ["N is 0", "4096"]),
        ({"n": 4097, "k": 8}, ["N is 4097", "4096"]),
        ({"n": 8, "k": 4097}, ["K is 4097", "4096"]),
        ({"n": 1025, "k": 4}, ["N is 1025", "1024"]),
        ({"n": 4096, "k": 4096}, ["4100 parameter rows", "2012"]),
        ({"n": 64, "k": 64, "parameter_row": 1996}, ["2013", "2012", "515072"]),
        ({"n": 48, "k": 64, "parameter_row": 1024}, ["48", "row 1024", "pad N to 64"]),
        ({"n": 1024, "k": 64, "compute_shift": 1}, ["16 tiles from tile 1"]),
        ({"n": 64, "k": 1024, "tile_shift": 1}, ["16 input tiles from 1"]),
        ({"n": 64, "k": 128, "tile_shift": 3}, ["2 input tiles from tile 3", "mesh rows of 4"]),
        ({"n": 64, "k": 64, "parameter_row": -1}, ["row -1"]),
        ({"n": 64, "k": 64, "parameter_row": 1.5}, ["byte 384", "multiple of 256"]),
    ],
)
def test_limits_have_both_numbers(arguments, words):
    with pytest.raises(ShapeError) as error:
        fully_connected(quant=QUANT, **arguments)
    for word in words:
        assert word in str(error.value)


def test_largest_share_ends_exactly_at_the_floor():
    fc = fully_connected(64, 64, QUANT, parameter_row=FORWARD_FIFO_ROW - 17)
    assert fc.parameter_row + fc.rows_per_tile == FORWARD_FIFO_ROW
    assert fully_connected(48, 64, QUANT, parameter_row=1023).rows_per_tile == 17


@pytest.mark.parametrize(
    ("n", "k", "legal"),
    [
        (128, 128, {1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14}),
        (256, 256, {4, 8, 12}),
        (288, 768, {4}),
        (64, 1024, set()),
    ],
)
def test_tile_shift_verdicts(n, k, legal):
    """Source: the examples of docs/codegen.md, section Places."""
    found = set()
    for shift in range(1, 16):
        try:
            fully_connected(n, k, QUANT, tile_shift=shift)
            found.add(shift)
        except ShapeError:
            pass
    assert found == legal


def rotated(mask: int, shift: int) -> int:
    return (mask << shift | mask >> 16 - shift) & 0xFFFF


@pytest.mark.parametrize(("n", "k", "shift"), [(128, 128, 1), (128, 128, 14), (256, 256, 8), (288, 768, 4)])
def test_tile_shift_moves_masks_only(n, k, shift):
    base = isa.decode(fully_connected(n, k, QUANT).execution.bitstreams[0].data)
    moved = isa.decode(fully_connected(n, k, QUANT, tile_shift=shift).execution.bitstreams[0].data)
    for a, b in zip(base, moved, strict=True):
        i = a.instruction
        if isinstance(i, (isa.TileFence, isa.ScalarFence)):
            i = i.replace(tile_mask=rotated(i.tile_mask, shift))
        elif "tile_mask" in i.fields:
            i = i.replace(tile_mask=i.tile_mask if i.tile_mask == 0xFFFF else i.tile_mask << shift)
        if isinstance(i, isa.RingSend) and i.dest_mask != 1 << 16:
            i = i.replace(dest_mask=i.dest_mask << shift)
        if isinstance(i, isa.Infeed):
            i = i.replace(dest_mask=i.dest_mask << shift)
        assert i == b.instruction


def test_parameter_row_moves_addresses_only():
    base, moved = (fully_connected(1100, 300, QUANT, parameter_row=row) for row in (0, 321))
    blob = bytes(base.blob_bytes)
    for a, b in (
        (base.caching(blob), moved.caching(blob)),
        (base.execution, moved.execution),
    ):
        for x, y in zip(isa.decode(a.bitstreams[0].data), isa.decode(b.bitstreams[0].data), strict=True):
            old, new = x.instruction.values(), y.instruction.values()
            changed = {name: new[name] - old[name] for name in old if new[name] != old[name]}
            rows = {"dst_addr", "src_addr", "hdr_first_row", "hdr_last_row"}
            assert changed in ({}, dict.fromkeys(changed, 321)) or changed == {"par_addr": 4 * 321}
            assert set(changed) <= rows | {"par_addr"}


def test_compute_shift_keeps_input_tiles():
    fc = fully_connected(64, 300, QUANT, compute_shift=9)
    instructions = [p.instruction for p in isa.decode(fc.execution.bitstreams[0].data)]
    (broadcast,) = [i for i in instructions if isinstance(i, isa.RingSend) and i.dest_mask == 1 << 9]
    assert broadcast.tile_mask == 1
    assert [i.tile_mask for i in instructions if isinstance(i, isa.Op)] == [1 << 9]
    assert [i.dest_mask for i in instructions if isinstance(i, isa.Infeed)] == [0xF, 0x10]


def test_single_output_without_bias_drops_it():
    with_bias, without = fully_connected(1, 45, QUANT), fully_connected(1, 45, QUANT, bias=False)
    assert with_bias.blob_bytes - without.blob_bytes == 64
    (op,) = [p.instruction for p in isa.decode(without.execution.bitstreams[0].data) if p.instruction.mnemonic == "op"]
    assert (op.par_addr, op.waits(), op.bias_en) == (0, (), 0)
    assert not any(getattr(p.instruction, "to_scaling", 0) for p in isa.decode(without.execution.bitstreams[0].data))


def test_blob_layout():
    """Bias row, then word k of every output; a row's column c holds four weights of output c."""
    fc = fully_connected(70, 6, QUANT)
    weights = np.arange(70 * 6, dtype=np.uint32).astype(np.uint8).reshape(70, 6)
    bias = np.arange(70, dtype=np.int32) * -1000
    rows = np.frombuffer(fc.blob(weights, bias), np.uint8).reshape(2, 3, 64, 4)
    np.testing.assert_array_equal(rows[0, 0].reshape(-1).view(np.int32), bias[:64])
    np.testing.assert_array_equal(rows[1, 0].reshape(-1).view(np.int32)[:6], bias[64:])
    for o in (0, 63, 64, 69):
        group, column = divmod(o, 64)
        np.testing.assert_array_equal(rows[group, 1, column], weights[o, :4])
        np.testing.assert_array_equal(rows[group, 2, column], [*weights[o, 4:], 128, 128])


def test_blob_refuses_wrong_arrays():
    fc = fully_connected(8, 4, QUANT)
    weights, bias = np.zeros((8, 4), np.uint8), np.zeros(8, np.int32)
    with pytest.raises(ShapeError, match=r"weights has shape \(4, 8\), \(8, 4\)"):
        fc.blob(weights.T, bias)
    with pytest.raises(CodegenError, match="weights is int8, uint8"):
        fc.blob(weights.view(np.int8), bias)
    with pytest.raises(CodegenError, match="bias is float32, int32"):
        fc.blob(weights, bias.view(np.float32))
    with pytest.raises(CodegenError, match="bias is missing"):
        fc.blob(weights)
    with pytest.raises(CodegenError, match="mult is given"):
        fc.blob(weights, bias, mult=np.ones(8, np.float32))
    fc8 = fully_connected_per_channel(8, 4, QUANT)
    with pytest.raises(CodegenError, match=r"w_zp holds -1\.\.256"):
        fc8.blob(weights, mult=np.ones(8, np.float32), w_zp=np.array([0, -1, 256, *[5] * 5], np.int32))
    with pytest.raises(CodegenError, match="100 bytes long, 128"):
        fc.caching(bytes(100))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("in_zp", 256, "0..255"), ("out_zp", -1, "0..255"), ("mult", 0.1, "float32"), ("clamp_max", float("nan"), "nan")],
)
def test_quantisation_is_checked(field, value, message):
    with pytest.raises(CodegenError, match=message):
        FcQuant(**{**QUANT.__dict__, field: value})


def test_shape_of_a_small_layer():
    """One tile, one piece; N = 8 is one group of 16 outputs."""
    s = FcShape(8, 4)
    assert (s.input_bytes, s.output_bytes, s.tiles, s.groups, s.group_outputs, s.words) == (8, 8, 1, 1, 16, 1)
    s = FcShape(1100, 4096)
    assert (s.tiles, s.groups_per_tile, s.piece_bytes, s.packets) == (9, 2, 256, 16)
    assert [s.tile_outputs(t) for t in range(s.tiles)] == [128] * 8 + [76]
    assert s.tile_groups(8) == 2


def test_builder_mirrors_counters():
    b = Builder(V14)
    b.emit(isa.N2w, tile_mask=3, src=Walk(0, [1], [128]), dst=Walk(5, [0], [2]), sig_dst=0)
    b.emit(isa.RingSend, tile_mask=1, src=Walk(5, [1, 0], [1, 2]), sig_src=1, sig_ring=2, dest_mask=1 << 16)
    assert b.count(TileCounter.NARROW_TO_WIDE, 3) == 2
    assert b.count(TileCounter.RING_WRITE, 1) == 2
    assert b.count(TileCounter.RING_PRODUCER_A, 0xFFFF) == 1
    with pytest.raises(CodegenError, match=r"RING_WRITE is \[0, 2\] on the tiles 0x0003"):
        b.count(TileCounter.RING_WRITE, 3)
    b.reset()
    assert b.count(TileCounter.RING_WRITE, 3) == 0
    assert b.count(TileCounter.RING_PRODUCER_A, 3) == 1
    b.output_wait()
    assert b.count(TileCounter.RING_PRODUCER_A, 3) == 0
    fence = next(p.instruction for p in isa.decode(b.finish().data) if isinstance(p.instruction, isa.ScalarFence))
    assert (fence.wait_mask, fence.thr5) == (1 << 5, 1)
    assert Wait(TileCounter.AVDATA, 0) == Wait(0, 0)


@pytest.mark.parametrize(
    ("n", "k", "x", "transit"),
    [
        (704, 188, 768, None),
        (752, 128, 784, None),
        (1000, 320, 1032, None),
        (2045, 1330, 2048, 3380),
        (64, 200, 0, 264),
    ],
)
def test_narrow_layout(n, k, x, transit):
    """Places that Google's compiler chose for these shapes (docs/codegen.md)."""
    narrow = fully_connected(n, k, QUANT).narrow
    assert narrow.x == x
    assert transit in (None, narrow.transit)


def mesh_fences(k: int, direction: str) -> list[tuple[int, int]]:
    """(value, mask) of the fences of one mesh direction."""
    unit = {"west": 1 << 7, "north": 1 << 8}[direction]
    instructions = [p.instruction for p in isa.decode(fully_connected(64, k, QUANT).execution.bitstreams[0].data)]
    fences = [i for i in instructions if isinstance(i, isa.TileFence) and i.unit_mask == unit]
    return [(f.ctr_value, f.tile_mask) for f in fences]


def test_mesh_fences_of_uneven_pieces():
    """Values and masks that Google's compiler wrote: partial pieces, relays that forward fewer packets."""
    assert mesh_fences(256, "west") == [(1, 0xFFFF), (5, 0xFFFD), (9, 0xFFF9)]
    assert mesh_fences(200, "west")[2] == (6, 0xFFF9)
    assert mesh_fences(1000, "west")[2][1] == 0xF999
    assert mesh_fences(948, "west")[1][1] == 0xDDDD
    assert mesh_fences(1000, "north")[-1] == (31, 0xFFFF - 0x110)
