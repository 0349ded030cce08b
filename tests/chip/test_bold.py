"""What ``Chip(bold=True)`` takes for granted, and an ordinary chip does not."""

from __future__ import annotations

import pytest

from coral import isa
from coral.chip import Chip, ChipState, UnknownInstruction
from coral.isa import Walk
from tests.chip.builder import fence, fill, identity, move, output_from_tile, program, requantise


def finish(chip: Chip, data: bytes) -> tuple[bytes, bool]:
    """Output of a program, and whether anything wrote it."""
    chip.feed(0, data)
    assert chip.run() is ChipState.FINISHED
    return (chip.outputs.popleft(), bool(chip.written.popleft().all())) if chip.outputs else (b"", False)


@pytest.mark.parametrize("bold", [False, True])
def test_narrow_memory_between_programs(bold):
    chip = Chip(bold=bold)
    finish(chip, program(fill(8, 100, 0x04030201, 2), *fence()))
    finish(chip, program(fill(8, 101, 0x08070605), *fence()))
    for _ in range(2):
        got = finish(chip, program(*output_from_tile(3, 2, 100), *fence()))
        assert got == ((bytes(range(1, 9)), True) if bold else (bytes(8), False))
    chip.reset()
    assert finish(chip, program(*output_from_tile(3, 2, 100), *fence())) == (bytes(8), False)


@pytest.mark.parametrize("bold", [False, True])
def test_packed_rows_between_programs(bold):
    chip = Chip(bold=bold)
    pack = isa.N2w(tile_mask=8, src=Walk(100, [1], [2]), dst=Walk(50), pack_level=1)
    unpack = isa.W2n(tile_mask=8, src=Walk(50), dst=Walk(200, [1], [2]), unpack_level=1)
    finish(chip, program(fill(8, 100, 0x04030201, 2), *fence(), pack, *fence()))
    got = finish(chip, program(unpack, *fence(), *output_from_tile(3, 2, 200), *fence()))
    assert got == ((bytes([1, 2, 3, 4] * 2), True) if bold else (bytes(8), False))


@pytest.mark.parametrize("bold", [False, True])
def test_mask_register_of_an_op(bold):
    op = requantise(8, 400, 800, 2).replace(tile_mask=0, tile_mask_indirect=1, tile_mask_reg=9)
    body = [fill(0xF, 100, 0x04030201, 2), *identity(0xF), move(9, 8), op, *fence()]
    chip = Chip(bold=bold)
    chip.feed(0, program(*body, *output_from_tile(3, 2, 200), *fence()))
    if not bold:
        with pytest.raises(UnknownInstruction, match="tile_mask_indirect"):
            chip.run()
        return
    assert chip.run() is ChipState.FINISHED
    assert chip.outputs.popleft() == bytes([1, 2, 3, 4] * 2)
