"""Bitstreams: instructions one behind the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from coral.isa import op, scalar, tile
from coral.isa.core import Instruction
from coral.isa.fields import DecodeError

CLASSES: tuple[type[Instruction], ...] = (
    op.Op, op.OpMax, op.OpSum, op.OpResize, tile.RingSend, tile.RingRecv0, tile.RingRecv1, tile.N2w, tile.W2n,
    tile.MeshSouth, tile.MeshWest, tile.MeshNorth, tile.MeshEast, op.NluLoad, tile.TileFence, scalar.Scalar,
    scalar.Halt, scalar.Branch, scalar.Loop, scalar.ScalarFence, scalar.Pop, scalar.Infeed, scalar.Outfeed,
    scalar.Start, scalar.End,
)  # fmt: skip
BY_OPCODE = {cls.opcode: cls for cls in CLASSES}
BY_MNEMONIC = {cls.mnemonic: cls for cls in CLASSES}
WORD_BYTES = 16


class Placed(NamedTuple):
    """An instruction and the index of its first 16-byte word."""

    word: int
    instruction: Instruction


def _class_at(view: memoryview, word: int) -> tuple[type[Instruction], memoryview]:
    """Class and bytes of the instruction that starts at ``word``; DecodeError if there is none."""
    start = WORD_BYTES * word
    head = view[start : start + WORD_BYTES]
    if len(head) < WORD_BYTES:
        raise DecodeError(f"word {word}: only {len(head)} bytes left, an instruction word has {WORD_BYTES}")
    opcode = (head[0] >> 6) | (head[1] & 0xF) << 2
    cls = BY_OPCODE.get(opcode)
    if cls is None:
        raise DecodeError(f"word {word}: unknown opcode {opcode:#04x}")
    body = view[start : start + WORD_BYTES * cls.words]
    if len(body) < WORD_BYTES * cls.words:
        raise DecodeError(f"word {word}: {cls.mnemonic} needs {cls.words} words, {len(body) // WORD_BYTES} are left")
    return cls, body


def decode_one(data: bytes | memoryview, word: int = 0) -> Instruction:
    """The instruction whose first 16-byte word is ``word``.

    DecodeError: unknown opcode, truncated instruction, or a must-be pattern broken; the message names the word.
    """
    cls, body = _class_at(memoryview(data), word)
    return cls.from_bytes(body, word)


def split(data: bytes | memoryview) -> Iterator[tuple[int, type[Instruction], memoryview]]:
    """Word index, class and bytes of each instruction, whose bits are not looked at; DecodeError as in ``decode``."""
    if len(data) % WORD_BYTES:
        raise DecodeError(f"{len(data)} bytes: a bitstream is a multiple of {WORD_BYTES} bytes long")
    view, word = memoryview(data), 0
    while WORD_BYTES * word < len(data):
        cls, body = _class_at(view, word)
        yield word, cls, body
        word += cls.words


def iter_decode(data: bytes | memoryview) -> Iterator[Placed]:
    """Instructions of a bitstream in order; DecodeError as in ``decode_one`` or if the length is not whole words."""
    for word, cls, body in split(data):
        yield Placed(word, cls.from_bytes(body, word))


def decode(data: bytes | memoryview) -> list[Placed]:
    """All instructions of a bitstream; DecodeError names the first word that is not one."""
    return list(iter_decode(data))


def encode(instructions: Iterable[Instruction]) -> bytes:
    """The bitstream of these instructions, in order."""
    return b"".join(i.to_bytes() for i in instructions)
