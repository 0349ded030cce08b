"""Damaged programs and files for the chip: every case ends in a result or a typed error, in bounded time and memory.

``python -m tests.chip.fuzz FIRST COUNT CORPUS`` runs cases FIRST .. FIRST + COUNT - 1, each known by its number alone,
and prints what became of them as JSON. Memory is limited by the kernel, time by a profiling timer.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from coral import CoralError, isa
from coral.chip import Chip, ChipState
from coral.codegen.eltwise import Requantise, elementwise
from coral.codegen.fc import FcQuant, fully_connected, fully_connected_per_channel
from coral.package import Base, Bitstream, DmaHint, InstructionHint, Kind, Program
from coral.package.bitstreams import bitstreams_of
from coral.package.tflite_file import read_edgetpu

MEMORY_BYTES = 1 << 30
CASE_S = 2.0
STUCK_S = 20.0
"""A case that takes longer than CASE_S of processor time is reported, after STUCK_S it is stopped."""
BUDGET = 60_000
SERVED_BYTES = 1 << 22
"""What this host sends to a program that asks for more than its hints say, per case."""

Case = Callable[[random.Random], str]


class Stuck(BaseException):
    """The case was stopped by the timer."""


# bases: programs that work


def own_pair(per_channel: bool) -> list[Program]:
    quant = FcQuant(3, 128, 7, 1 / 128, -7.0, 248.0)
    make = fully_connected_per_channel if per_channel else fully_connected
    pair = make(72, 200, quant)
    extra: dict[str, Any] = {}
    if per_channel:
        extra = {"mult": np.full(72, 0.01, np.float32), "w_zp": np.full(72, 128, np.int32)}
    weights = np.random.default_rng(0).integers(0, 256, (72, 200), np.uint8)
    bias = None if per_channel else np.zeros(72, np.int32)
    return [pair.caching(pair.blob(weights, bias, **extra)), pair.execution]


def own_elementwise() -> list[Program]:
    return [elementwise(100, [Requantise(0.5, -3.0, 9.0, 4, 5), Requantise(2.0, -50.0, 50.0, 5, 100)])]


@cache
def file_programs(path: Path) -> list[Program]:
    """Caching first, as a host runs them."""
    return sorted(read_edgetpu(path).package.programs, key=lambda p: p.kind is not Kind.PARAMETER_CACHING)


def bare(path: Path) -> list[Program]:
    """A bitstream without a container."""
    (stream,) = bitstreams_of(path)
    return [Program(Kind.STAND_ALONE, (Bitstream(stream[-1]),), (InstructionHint(0),))]


SMALL = (
    "dense/dense_256",
    "robotics/bright_16x16",
    "robotics/gabor_64x64_p4",
    "sequence/split_concat",
    "dense/dense_512",
    "robotics/bright_64x64",
    "robotics/gabor_64x64_7k_4o_2s",
)
LARGE = ("robotics/looming_64x64_3x3", "sequence/keras_lstm_mnist_ptq", "vision/mobilenet_v1_0.25_128_quant_legacy")
"""Programs that take long to execute; the larger two never end within the budget."""


@cache
def bases(corpus: Path) -> list[Callable[[], list[Program]]]:
    """Makers of working programs; small ones several times, large ones once."""
    out: list[Callable[[], list[Program]]] = []
    out += [lambda c=c: own_pair(c) for c in (False, True)] * 6 + [own_elementwise] * 6
    out += [lambda p=p: file_programs(corpus / f"{p}_edgetpu.tflite") for p in SMALL] * 3
    out += [lambda p=p: bare(p) for p in sorted((corpus / "legacy_programs").glob("*.coral"))]
    out += [lambda p=p: file_programs(corpus / f"{p}_edgetpu.tflite") for p in LARGE]
    return out


# mutations


def edge(rng: random.Random, field: Any) -> int:
    """A value of a field as an unsigned number of its width: at the edges, near them, or anywhere."""
    top = (1 << field.width) - 1
    return rng.choice(
        (0, 1, top, top >> 1, rng.randrange(8) & top, rng.randint(0, top), 1 << rng.randrange(field.width))
    )


def change_field(rng: random.Random, instruction: isa.Instruction) -> bytes:
    """The instruction's bytes with one field at another value; set fields are more likely."""
    names = list(instruction.changed()) * 3 + list(instruction.fields)
    field = instruction.fields[rng.choice(names)]
    bits = int.from_bytes(instruction.to_bytes(), "little")
    mask = ((1 << field.width) - 1) << field.lo
    value = edge(rng, field)
    if rng.random() < 0.4:
        value = (bits >> field.lo) + rng.choice((-1, 1, 4, -4)) & (1 << field.width) - 1
    return (bits & ~mask | value << field.lo).to_bytes(16 * instruction.words, "little")


def mutate_program(rng: random.Random, data: bytes) -> bytes:
    """One to three changes: bits, fields, instructions gone, doubled, swapped or moved."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.randrange(6)
        if kind == 0 or len(data) < 64:
            place = rng.randrange(len(data) * 8)
            data = data[: place // 8] + bytes([data[place // 8] ^ 1 << place % 8]) + data[place // 8 + 1 :]
            continue
        try:
            parts = [bytes(p.instruction.to_bytes()) for p in isa.decode(data)]
        except CoralError:
            return data
        at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
        if kind in (1, 2):
            parts[at] = change_field(rng, isa.decode_one(parts[at]))
        elif kind == 3:
            del parts[at]
        elif kind == 4:
            parts.insert(other, parts[at])
        else:
            parts[at], parts[other] = parts[other], parts[at]
        data = b"".join(parts)
    return data


def mutate_file(rng: random.Random, data: bytes) -> bytes:
    """Cut off, bits flipped, or 32-bit words at values that parsers stumble over; mostly where the tables are."""
    if rng.random() < 0.05:
        return data[: rng.randrange(len(data))]
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        position = rng.choice((rng.randrange(len(data) - 8), rng.randrange(min(4096, len(data) - 8))))
        if rng.random() < 0.5:
            out[position] ^= 1 << rng.randrange(8)
        else:
            values = (0, 1, 4, 1 << 31, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFFFC, len(data), rng.randrange(len(data)))
            struct.pack_into("<I", out, position & ~3, rng.choice(values))
    return bytes(out)


# cases


def serve(chip: Chip, program: Program, data: bytes | None = None) -> str:
    """Feed a program what its hints say, then what it asks for, with bounds."""
    inputs = {layer.name: layer for layer in program.inputs}
    sent = 0
    for hint in program.hints:
        if isinstance(hint, InstructionHint):
            chip.feed(0, program.bitstreams[hint.chunk].data if data is None else data)
        elif isinstance(hint, DmaHint) and hint.base in (Base.INPUT, Base.PARAMETER):
            sent += hint.size
            if sent > SERVED_BYTES:
                return "asks for too much"
            if hint.base is Base.PARAMETER:
                chip.feed(2, program.parameters[hint.offset : hint.offset + hint.size])
            elif hint.name in inputs:
                chip.feed(1, bytes(hint.size))
        elif isinstance(hint, DmaHint):
            chip.run()
    while chip.run() is ChipState.NEEDS_HOST:
        assert chip.missing is not None
        tag, size = chip.missing
        sent += size
        if tag not in (1, 2) or not size or sent > SERVED_BYTES:
            return "asks for too much" if size else "wants another chunk"
        chip.feed(tag, bytes(size))
    return "complete"


def program_case(corpus: Path, rng: random.Random) -> str:
    """One program of a working model is damaged; the others run before it."""
    programs = rng.choice(bases(corpus))()
    chip = Chip(budget=BUDGET, seed=rng.choice((None, None, None, 1)))
    damaged = rng.randrange(len(programs)) if rng.random() < 0.2 else len(programs) - 1
    for program in programs[:damaged]:
        serve(chip, program)
    program = programs[damaged]
    data = mutate_program(rng, rng.choice(program.bitstreams).data)
    outcome = serve(chip, program, data)
    return serve(chip, program, data) if outcome == "complete" and chip.seed is None else outcome


def file_case(corpus: Path, rng: random.Random) -> str:
    """A damaged file, read and run as far as that goes."""
    path = corpus / f"{rng.choice(SMALL[:4])}_edgetpu.tflite"
    package = read_edgetpu(mutate_file(rng, path.read_bytes())).package
    chip = Chip(budget=BUDGET)
    outcomes = []
    for program in sorted(package.programs, key=lambda p: p.kind is not Kind.PARAMETER_CACHING):
        program.check()
        outcomes.append(serve(chip, replace(program)))
    return outcomes[-1] if outcomes else "no programs"


def case(number: int, corpus: Path) -> str:
    """Outcome of a case: a state, or the name of the error."""
    rng = random.Random(number)
    try:
        return (file_case if number % 5 == 4 else program_case)(corpus, rng)
    except CoralError as error:
        return type(error).__name__ if len(str(error)) > 10 else f"no sentence: {error!r}"


def stop(*_: object) -> None:
    raise Stuck


def run(first: int, count: int, corpus: Path) -> dict[str, Any]:
    """All cases: how many ended how, and the bad ones with their trace."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, stop)
    for maker in dict.fromkeys(bases(corpus)):
        maker()
    outcomes: Counter[str] = Counter()
    bad: dict[int, str] = {}
    slowest = (0.0, -1)
    for number in range(first, first + count):
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, STUCK_S)
        try:
            outcomes[case(number, corpus)] += 1
        except (Exception, Stuck):
            bad[number] = traceback.format_exc(limit=-4)
        signal.setitimer(signal.ITIMER_PROF, 0)
        took = time.process_time() - start
        slowest = max(slowest, (took, number))
        if took > CASE_S and number not in bad:
            bad[number] = f"took {took:.2f} s of processor time"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"outcomes": outcomes, "bad": bad, "slowest_s": slowest, "peak_bytes": peak}


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
