"""Runs programs of compiled files on a chip, the way the hints tell a host to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from coral.chip import Chip, ChipState
from coral.package import Base, DmaHint, InstructionHint, Kind, Program
from coral.package.tflite_file import read_edgetpu


def programs(path: Path) -> dict[Kind, Program]:
    """The programs of a compiled file, by kind."""
    return {p.kind: p for p in read_edgetpu(path).package.programs}


def random_inputs(program: Program, seed: int) -> dict[str, bytes]:
    """Random bytes for every input layer."""
    rng = np.random.default_rng(seed)
    return {layer.name: rng.integers(0, 256, layer.size_bytes, np.uint8).tobytes() for layer in program.inputs}


def run(chip: Chip, program: Program, inputs: Mapping[str, bytes] = {}) -> dict[str, bytes]:
    """One call; every hint is served in order, the chip runs whenever an output or the end is due."""
    outputs: dict[str, bytes] = {}
    for hint in program.hints:
        if isinstance(hint, InstructionHint):
            chip.feed(0, program.bitstreams[hint.chunk].data)
        elif isinstance(hint, DmaHint) and hint.base is Base.INPUT:
            chip.feed(1, inputs[hint.name][hint.offset : hint.offset + hint.size])
        elif isinstance(hint, DmaHint) and hint.base is Base.PARAMETER:
            chip.feed(2, program.parameters[hint.offset : hint.offset + hint.size])
        elif isinstance(hint, DmaHint):
            chip.run()
            outputs[hint.name] = chip.outputs.popleft()
            assert chip.written.popleft()[: hint.size - 7].all(), "unwritten bytes in an output"
            assert len(outputs[hint.name]) == hint.size
    assert chip.run() in (ChipState.FINISHED, ChipState.IDLE)
    assert not chip.outputs
    assert chip.interrupts.popleft() == 0
    return outputs
