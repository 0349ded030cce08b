"""Program.check(): every contradiction is a PackageError that names the place and the number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral import CoralError
from coral.package import (
    Base,
    Bitstream,
    DmaHint,
    DType,
    InstructionHint,
    InterruptHint,
    Kind,
    Layer,
    Layout,
    PackageError,
    Program,
    Relocation,
    Slice,
)

from .package_programs import MOVE_IMMEDIATE, programs

LAYOUT = Layout((0, 1), (0, 0), (0, 8), (0, 4), (0, 0), (8, 8))
INPUT = Layer("in", 16, 1, 1, 16, 0, 1.0)
OUTPUT = Layer("out", 16, 2, 2, 4, 0, 1.0, layout=LAYOUT)
PROGRAM = Program(
    kind=Kind.EXECUTION_ONLY,
    bitstreams=(Bitstream(bytes(16) + MOVE_IMMEDIATE, (Relocation(Base.INPUT, True, 198, "in"),)),),
    hints=(
        InstructionHint(0),
        DmaHint(Base.INPUT, 0, 16, "in"),
        DmaHint(Base.PARAMETER, 0, 64),
        DmaHint(Base.OUTPUT, 0, 16, "out", out=True),
        InterruptHint(0),
    ),
    parameters=bytes(64),
    inputs=(INPUT,),
    outputs=(OUTPUT,),
    token=1,
)


def stream(data: bytes = bytes(16) + MOVE_IMMEDIATE, *relocations: Relocation) -> tuple[Bitstream, ...]:
    return (Bitstream(data, relocations),)


def hints(*changed: object) -> tuple[object, ...]:
    return (InstructionHint(0), DmaHint(Base.OUTPUT, 0, 16, "out", out=True), *changed)


def test_consistent_program_passes() -> None:
    PROGRAM.check()
    assert issubclass(PackageError, CoralError)


@settings(max_examples=60, deadline=None)
@given(programs())
def test_generated_programs_pass(program: Program) -> None:
    program.check()


CASES: list[tuple[dict[str, Any], str]] = [
    ({"bitstreams": ()}, "no bitstream"),
    ({"bitstreams": stream(b"")}, "bitstream 0 is 0 bytes long"),
    ({"bitstreams": stream(bytes(24))}, "bitstream 0 is 24 bytes long, it must be a multiple of 16"),
    ({"bitstreams": stream(bytes(262160))}, "bitstream 0 is 262160 bytes .* 16..262144"),
    ({"bitstreams": stream(MOVE_IMMEDIATE, Relocation(Base.PARAMETER, False, 198))}, "outside the bitstream of 128"),
    ({"bitstreams": stream(MOVE_IMMEDIATE, Relocation(Base.PARAMETER, False, -58))}, "outside the bitstream"),
    ({"bitstreams": stream(MOVE_IMMEDIATE, Relocation(Base.PARAMETER, False, 71))}, "bit 71 of an instruction word"),
    ({"bitstreams": stream(bytes(16), Relocation(Base.PARAMETER, False, 70))}, "opcode 0x00 .* not at a move"),
    ({"bitstreams": stream(MOVE_IMMEDIATE, Relocation(Base.INPUT, False, 70, "x"))}, "INPUT 'x' .* no input layer"),
    ({"hints": ()}, "begin with chunk 0"),
    ({"hints": PROGRAM.hints[1:]}, "begin with chunk 0"),
    ({"hints": hints(InstructionHint(0))}, r"send the chunks \[0, 0\]"),
    ({"hints": hints(InstructionHint(1))}, r"send the chunks \[0, 1\]"),
    ({"hints": hints(InterruptHint(4))}, "hint 2: interrupt 4"),
    ({"hints": hints(DmaHint(Base.INPUT, 8, 9, "in"))}, r"hint 2: INPUT 'in', bytes 8..17: outside .* 16 bytes"),
    ({"hints": hints(DmaHint(Base.INPUT, -1, 4, "in"))}, "outside the buffer"),
    ({"hints": hints(DmaHint(Base.INPUT, 4, 0, "in"))}, "outside the buffer"),
    ({"hints": hints(DmaHint(Base.INPUT, 0, 4, "out"))}, "no input layer of that name"),
    ({"hints": hints(DmaHint(Base.INPUT, 0, 4, "in", out=True))}, "wrong direction"),
    ({"hints": hints(DmaHint(Base.PARAMETER, 0, 65))}, "outside the buffer of 64 bytes"),
    ({"hints": hints(DmaHint(Base.SCRATCH, 0, 1, out=True))}, "outside the buffer of 0 bytes"),
    ({"hints": (InstructionHint(0), InterruptHint(0))}, "output 'out': .* do not deliver its 16 bytes"),
    ({"hints": hints(DmaHint(Base.OUTPUT, 0, 8, "out", out=True))}, "exactly once"),
    ({"kind": Kind.PARAMETER_CACHING}, "has 2 layers"),
    ({"inputs": (INPUT, INPUT)}, "input layers share a name"),
    ({"batch_size": 0}, "batch_size is 0"),
    ({"token": 1 << 64}, "token is"),
    ({"scratch_bytes": -1}, "scratch_bytes is -1"),
    ({"inputs": (replace(INPUT, name=""),)}, "no name"),
    ({"inputs": (replace(INPUT, size_bytes=15),)}, "size_bytes is 15, allowed are 16"),
    ({"inputs": (replace(INPUT, dtype=DType.I32),)}, "size_bytes is 16, allowed are 64"),
    ({"inputs": (replace(INPUT, z=0),)}, "z is 0"),
    ({"inputs": (replace(INPUT, scale=float("nan")),)}, "scale is nan"),
    ({"inputs": (replace(INPUT, layout=LAYOUT),)}, "an input has an output layout"),
    ({"inputs": (replace(INPUT, shape=((0, 14),)),)}, "shape .* is not that of"),
    ({"inputs": (replace(INPUT, shape=((0, 0),) * 17),)}, "shape has 17 dimensions"),
    ({"outputs": (replace(OUTPUT, layout=None),)}, "2 x 2 positions without a layout"),
    ({"outputs": (replace(OUTPUT, y=3, size_bytes=48),)}, "y_to_tile has 2 entries, the layer 3"),
    ({"outputs": (replace(OUTPUT, layout=replace(LAYOUT, x_to_tile=(0, 1))),)}, "tile 2 of 2"),
    ({"outputs": (replace(OUTPUT, layout=replace(LAYOUT, x_to_tile=(0, -1))),)}, "x_to_tile holds -1..0"),
    ({"outputs": (replace(OUTPUT, layout=replace(LAYOUT, tile_byte_offset=(0, 9))),)}, "may start at 12"),
    ({"outputs": (replace(OUTPUT, layout=replace(LAYOUT, tile_byte_offset=(-1, 8))),)}, "elements at -1"),
    ({"outputs": (replace(OUTPUT, layout=replace(LAYOUT, tile_byte_offset=(0, 7))),)}, "share elements"),
    ({"outputs": (replace(OUTPUT, layout=replace(LAYOUT, x_local_byte_offset=(0, 3))),)}, "share elements"),
    ({"outputs": (Layer("out", 1 << 28, 1 << 14, 1 << 14, 1, 0, 1.0, layout=LAYOUT),)}, "positions, the limit is"),
]


@pytest.mark.parametrize(("changes", "message"), CASES, ids=[str(index) for index in range(len(CASES))])
def test_contradictions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PackageError, match=message):
        replace(PROGRAM, **changes).check()


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (Slice(((0, 1), (0, 1)), (8, 4), 0), "must have 3 dimensions"),
        (Slice(((0, 1), (0, 2), (0, 3)), (8, 4, 1), 0), "leaves the shape"),
        (Slice(((0, 1), (0, 1), (0, 3)), (8, 4, 1), 1), "leaves the layer's 16 bytes"),
        (Slice(((0, 1), (0, 0), (0, 3)), (8, 4, 1), 0), "hold 8 elements"),
    ],
)
def test_slices_are_checked(box: Slice, message: str) -> None:
    with pytest.raises(PackageError, match=message):
        replace(PROGRAM, outputs=(replace(OUTPUT, layout=None, slices=(box,)),)).check()


def test_split_transfers_and_input_overlap_are_allowed() -> None:
    replace(
        PROGRAM,
        hints=(
            InstructionHint(0),
            DmaHint(Base.INPUT, 0, 12, "in"),
            DmaHint(Base.INPUT, 4, 12, "in"),
            DmaHint(Base.OUTPUT, 8, 8, "out", out=True),
            DmaHint(Base.OUTPUT, 0, 8, "out", out=True),
        ),
    ).check()


def test_missing_outputs_are_allowed_where_the_list_is_not_deterministic() -> None:
    replace(PROGRAM, hints=(InstructionHint(0),), fully_deterministic=False).check()


@given(st.integers(0, 127).filter(lambda bit: bit != 70))
def test_only_bit_70_is_an_immediate(bit: int) -> None:
    moved = stream(MOVE_IMMEDIATE * 2, Relocation(Base.PARAMETER, False, bit))
    with pytest.raises(PackageError, match=f"at bit {bit}:"):
        replace(PROGRAM, bitstreams=moved).check()


def test_layer_by_name() -> None:
    assert PROGRAM.layer("out") is OUTPUT
    with pytest.raises(PackageError, match=r"no layer 'nope', only \['in', 'out'\]"):
        PROGRAM.layer("nope")


def test_hint_pattern_of_scratch_programs() -> None:
    out, back = DmaHint(Base.SCRATCH, 0, 4, out=True), DmaHint(Base.SCRATCH, 0, 4)
    program = replace(PROGRAM, hints=(InstructionHint(0), out, out, back, InterruptHint(0)), scratch_bytes=4)
    assert program.hint_pattern() == "ISo2Si!"
