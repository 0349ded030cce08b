"""Small programs around one question, and changes to programs that exist. Source: docs/codegen.md, section Builder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from coral import isa
from coral.codegen import stream
from coral.codegen.builder import V14, Builder
from coral.isa import StoreOp, Walk
from coral.package.program import Base, DmaHint, InstructionHint, InterruptHint, Kind, Layer, Program

INPUT, OUTPUT = stream.INPUT, stream.OUTPUT
RESULT_WORD = 40_000
"""Narrow word where tile programs leave what the host shall see."""


def begin() -> Builder:
    """A program without input, up to where its work starts."""
    b = Builder(V14)
    b.prologue()
    return b


def scalar_program(name: str, words: int, body: Callable[[Builder], None]) -> Program:
    """``body`` pushes ``words`` words to the host; registers s16 and above are its own."""
    b = begin()
    b.output_address(OUTPUT)
    b.output_dma(4 * words)
    body(b)
    b.epilogue()
    return _whole(b, name, 4 * words, 0)


def push(b: Builder, register: int) -> None:
    """A word to the host's output DMA."""
    b.emit(isa.Scalar, st_op=StoreOp.PUSH, st_src=register)


def nops(b: Builder, count: int) -> None:
    """Bundles that do nothing: results of loads and special functions take a while."""
    for _ in range(count):
        b.emit(isa.Scalar)


def add(b: Builder, instructions: Iterable[isa.Instruction]) -> None:
    """Instructions that were written without a builder: they get its sequence numbers."""
    for i in instructions:
        b.emit(type(i), **{name: value for name, value in i.values().items() if name != "seq"})


def linear(address: int, steps: int) -> Walk:
    """One after the other."""
    return Walk(address, [1], [steps], nz_mask=int(steps > 1))


def fill(b: Builder, tiles: int, word: int, words: int, value: int, **fields: Any) -> None:
    """Narrow words of a mask of tiles := ``value``, by a mesh unit."""
    b.emit(isa.MeshNorth, tile_mask=tiles, dst=linear(word, words), fill_en=1, fill_value=value, **fields)


def to_row(b: Builder, tiles: int, word: int, words: int, row: int) -> None:
    """Narrow words into one wide row, without waiting for anything."""
    b.emit(isa.N2w, tile_mask=tiles, src=linear(word, words), dst=linear(row, 1), pack_level=1)


def from_row(b: Builder, tiles: int, row: int, word: int) -> None:
    """The first two words of a wide row into narrow memory, without waiting for anything."""
    b.emit(isa.W2n, tile_mask=tiles, src=linear(row, 1), dst=linear(word, 2), unpack_level=1)


def ring(b: Builder, sender: int, src: Walk, receiver: int, dst: Walk, consumer: int = 0) -> None:
    """Rows of one tile to another."""
    b.emit((isa.RingRecv0, isa.RingRecv1)[consumer], tile_mask=receiver, dst=dst)
    b.emit(isa.RingSend, tile_mask=sender, src=src, dest_mask=receiver, to_consumer1=consumer)


def tile_program(b: Builder, name: str, tile: int, words: int, input_bytes: int = 0) -> Program:
    """Ends a program: ``words`` (an even number) from ``RESULT_WORD`` of a tile on go to the host."""
    b.reset()
    b.handshake()
    stream.output(b, 4 * words, [(1 << tile, 4 * RESULT_WORD, 4 * words)], [(tile, 4 * words)])
    return _whole(b, name, 4 * words, input_bytes)


def _whole(b: Builder, name: str, output_bytes: int, input_bytes: int) -> Program:
    inputs = (Layer(INPUT, input_bytes, 1, 1, input_bytes, 0, 1.0),) if input_bytes else ()
    fed = (DmaHint(Base.INPUT, 0, input_bytes, INPUT),) if input_bytes else ()
    hints = (InstructionHint(), *fed, DmaHint(Base.OUTPUT, 0, output_bytes, OUTPUT, out=True), InterruptHint())
    outputs = (Layer(OUTPUT, output_bytes, 1, 1, output_bytes, 0, 1.0),)
    return Program(Kind.STAND_ALONE, (b.finish(),), hints, inputs=inputs, outputs=outputs, name=name)


def changed(program: Program, change: Callable[[isa.Instruction], dict[str, Any]]) -> Program:
    """The program with other values in the fields that ``change`` names for an instruction; lengths stay."""
    bitstreams = []
    for bitstream in program.bitstreams:
        instructions = [i.replace(**new) if (new := change(i)) else i for _, i in isa.decode(bitstream.data)]
        bitstreams.append(replace(bitstream, data=isa.encode(instructions)))
    return replace(program, bitstreams=tuple(bitstreams))
