"""``coral run --break``: what the chip holds when an instruction begins; and deadlocks with the program around them.

Source: docs/run.md, section Looking inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from coral import CoralError, isa
from coral.apps.direct import DirectChip
from coral.apps.files import given
from coral.apps.model import Array, Model, load
from coral.chip import Chip, ChipError
from coral.chip.layout import SCALAR_NODE, TILES
from coral.chip.machine import Job, Machine
from coral.isa.text import format_instruction, format_lines
from coral.package.program import Program

AROUND = 2
"""Instructions shown before and behind the one in question."""


class BreakError(CoralError):
    """A sequence number that the program never reaches."""


class ProgramFault(CoralError):
    """A program that went wrong on the simulated chip, with its instructions around the place."""


class Stopped(Exception):
    """The instruction begins; ``machine`` is as it was, ``where`` names instruction and tile."""

    def __init__(self, machine: Machine, where: str) -> None:
        super().__init__()
        self.machine, self.where, self.text = machine, where, ""


def explain(error: ChipError, program: Program) -> ProgramFault:
    """The error with the disassembly around every instruction that its message names."""
    words = sorted({int(word) for word in re.findall(r"\bat word (\d+)", str(error))})
    parts = [str(error)]
    for number, stream in enumerate(program.bitstreams):
        placed = isa.decode(stream.data)
        lines, shown = list(format_lines(placed)), -1
        for k in (k for k, (word, _) in enumerate(placed) if word in words):
            if shown < 0:
                parts.append(f"in bitstream {number} of program {program.name!r}:")
            first = max(k - AROUND, shown + 1)
            parts += ["  ..."] if first > shown + 1 else []
            for n in range(first, min(k + AROUND + 1, len(lines))):
                parts.append(f"{'>' if placed[n].word in words else ' '} {lines[n]}")
                shown = n
    return ProgramFault("\n".join(parts))


@contextmanager
def explained(program: Program) -> Iterator[None]:
    """What goes wrong on the simulated chip inside becomes a ProgramFault, see ``explain``."""
    try:
        yield
    except ChipError as error:
        raise explain(error, program) from error


def stop_at(model: Model, arrays: Mapping[str, Array], seq: int) -> Stopped:
    """Runs a model's chip part without USB until the instruction of this sequence number begins on a unit, or the tile
    fence of this number is passed on a tile.

    :raises BreakError: it never does; ProgramFault: the program goes wrong before
    """
    known = {
        placed.instruction.seq: format_instruction(placed.instruction)
        for stream in model.program.bitstreams
        for placed in isa.decode(stream.data)
        if "seq" in placed.instruction.fields
    }
    if seq not in known:
        raise BreakError(f"no instruction of {model.name} has sequence number {seq}, it has {min(known)}..{max(known)}")

    class Watching(Machine):
        def before(self, job: Job) -> None:
            if job.position == 0 and getattr(job.plan.instruction, "seq", None) == seq:
                raise Stopped(self, job.where)

        def passed(self, place: int, fence: Any) -> None:
            if place != SCALAR_NODE and fence.where.endswith(f", seq {seq}"):
                raise Stopped(self, f"{fence.where} on tile {place}")

    target = DirectChip(Chip(replay=False))
    if model.caching is not None:
        target.ensure_cached(model.caching)
    target.chip.machine_type = Watching
    values = {port.number: port.codes(arrays[port.name]) for port in model.inputs}
    try:
        with explained(model.program):
            target.run(model.program, model.packed(values))
    except Stopped as stopped:
        stopped.text = known[seq]
        return stopped
    raise BreakError(f"the instruction of {model.name} with sequence number {seq} never reached a unit")


def look(path: Path, inputs: Sequence[Path], random: int | None, seq: int, dump: Path | None) -> None:
    """``coral run --break``: prints what the chip holds at a sequence number, and writes its memories to ``dump``."""
    model = load(path, device=DirectChip(), host=False)
    stopped = stop_at(model, given(model.inputs, inputs, random), seq)
    print(describe(stopped))
    if dump is not None:
        save(stopped, dump)


def describe(stopped: Stopped) -> str:
    """Instruction, scalar core, counters that are not zero, and what every busy unit does, as text."""
    machine = stopped.machine
    lines = [
        f"stopped before {stopped.where}:",
        f"  {stopped.text}",
        f"scalar core: word {machine.core.pc}{', halted' if machine.core.finished else ''}; {_registers(machine)}",
    ]
    texts: dict[tuple[str, ...], list[int]] = {}
    for place in range(TILES + 1):
        names: Any = isa.ScalarCounter if place == SCALAR_NODE else isa.TileCounter
        counters = [f"{names(k).name} {value}" for k, value in enumerate(machine.counters[place]) if value]
        busy = [
            f"{unit.name}: {unit.job.plan.where} at step {unit.job.position}" + _waits(machine, unit.job)
            for unit in machine.units[place].values()
            if unit.job is not None
        ]
        queued = sum(len(unit.queue) for unit in machine.units[place].values())
        first = f"{', '.join(counters) or 'all counters 0'}; {queued} instructions queued"
        texts.setdefault((first, *busy), []).append(place)
    for (first, *busy), places in texts.items():
        tiles = ", ".join(str(place) for place in places if place != SCALAR_NODE)
        who = [f"tiles {tiles}"] * bool(tiles) + ["scalar side"] * (SCALAR_NODE in places)
        lines += [f"{' and '.join(who)}: {first}", *(f"  {line}" for line in busy)]
    return "\n".join(lines)


def save(stopped: Stopped, file: Path) -> None:
    """Memories and counters as an .npz: ``narrow`` uint8 [16, 196608], ``wide`` uint8 [16, 2080, 256], ``scalar`` uint8
    [4096, 4], each with ``.._written`` (bool, which bytes anybody wrote), ``counters`` int32 [16, 19],
    ``scalar_counters`` [9]."""
    machine = stopped.machine
    machine.evaluate()
    memory, data = machine.memory, machine.values.data
    arrays: dict[str, Any] = {}
    for name, ids in (("narrow", memory.narrow.reshape(TILES, -1)), ("wide", memory.wide), ("scalar", memory.scalar)):
        arrays[name] = np.where(ids > 0, data[np.maximum(ids, 0)], 0).astype(np.uint8)
        arrays[f"{name}_written"] = ids > 0
    arrays["counters"] = np.array(machine.counters[:TILES], np.int32)
    arrays["scalar_counters"] = np.array(machine.counters[SCALAR_NODE], np.int32)
    with file.open("wb") as target:
        np.savez_compressed(target, **arrays)


def _registers(machine: Machine) -> str:
    known = [f"s{k} {value:#x}" for k, value in enumerate(machine.core.registers) if isinstance(value, int) and value]
    return ", ".join(known) or "all registers 0 or unwritten"


def _waits(machine: Machine, job: Job) -> str:
    texts = [w if isinstance(w, str) else machine.shortfall(job.place, *w) for w in job.waiting]
    return f", waits for {' and '.join(texts)}" if texts else ""
