"""What became of every operator, and the programs' predicted cost. Source: docs/compiler.md, Report."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from coral import isa, timing
from coral.codegen import network as nw
from coral.compiler.partition import ALONE, SEEN, Partition, Segment, operator_seconds
from coral.evaluate.operands import CODE_OFFSETS
from coral.package.graph import Graph
from coral.package.program import Program

RENAMED = "the same codes in the same place: nothing to do"
ECHO = "renames a result of the chip on the host"
WORD_BYTES = 16
"""Of an instruction word."""


@dataclass(frozen=True)
class Decision:
    """One operator of the graph. ``place`` is "host" or "chip" with the program's number; ``reason`` says why it is
    there, or how the chip computes it.

    ``tiles`` that compute it, ``steps`` of the busiest of them; ``cycles`` (250 or more million a second) and ``share``
    of all the chip's work are predicted, ``seconds`` too, or on the host guessed; ``instruction_bytes`` of its part of
    the program, ``weight_bytes`` as in the model.
    """

    number: int
    op: str
    output: str
    place: str
    reason: str
    tiles: int = 0
    steps: int = 0
    cycles: float = 0.0
    seconds: float = 0.0
    share: float = 0.0
    weight_bytes: int = 0
    instruction_bytes: int = 0


@dataclass(frozen=True)
class ProgramReport:
    """One program: sizes, work and predicted time of a call."""

    instruction_words: int
    parameter_bytes: int
    busiest_tile_steps: int
    ring_rows: int
    to_chip_bytes: int
    from_chip_bytes: int
    images: int
    passes: int
    cycles: float
    seconds: float


@dataclass(frozen=True)
class Report:
    """A compiled model; ``resident``: no call sends parameters after the first. ``seconds`` of a call of all programs
    include ``upload_seconds``, those in which programs that displace each other are sent their parameters again.
    """

    model: str
    file_bytes: int
    resident: bool
    clock_hz: float
    seconds: float
    upload_seconds: float
    programs: tuple[ProgramReport, ...]
    decisions: tuple[Decision, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def report_of(
    name: str, data: bytes, partition: Partition, programs: Sequence[nw.NetworkProgram], resident: bool, clock_hz: float
) -> Report:
    """The report on a partition and its programs, at a clock of the chip."""
    found = [program_report(p.execution, clock_hz, p.batch, p.passes, len(p.parameters)) for p in programs]
    graph, decisions = partition.graph, dict[int, Decision]()
    for number, reason in partition.reasons.items():
        seconds = operator_seconds(graph, number) if reason not in (ALONE, SEEN) else 0.0
        decisions[number] = _decision(graph, partition.names, number, "host", reason, seconds=seconds)
    for index, (segment, program) in enumerate(zip(partition.segments, programs, strict=True)):
        works = _works(segment, program)
        for number in segment.operators:
            work, place = works.get(number, Work()), f"chip {index}"
            said = [RENAMED if number not in works else work.how] + [ECHO] * (number in segment.echoes)
            if segment.band and number in decisions:
                place = f"{decisions[number].place}, {index}"
            one = _decision(graph, partition.names, number, place, "; ".join(said), **work.figures(clock_hz))
            decisions[number] = _together(decisions[number], one) if segment.band and number in decisions else one
    total = sum(d.cycles for d in decisions.values()) or 1.0
    ordered = tuple(replace(d, share=d.cycles / total) for _, d in sorted(decisions.items()))
    uploads = 0.0
    if len(programs) > 1 and not resident:
        uploads = sum(timing.predicted_seconds(p.caching(), clock_hz) for p in programs)
    seconds = sum(p.seconds for p in found) + uploads
    return Report(name, len(data), resident, clock_hz, seconds, uploads, tuple(found), ordered)


def _decision(graph: Graph, names: Sequence[str], number: int, place: str, reason: str, **figures: Any) -> Decision:
    op = graph.operators[number]
    output = next((names[i] for i in op.outputs if i >= 0), "")
    constants = [t.data for i in op.inputs if i >= 0 and (t := graph.tensors[i]).data is not None and len(t.scales)]
    weights = sum(data.nbytes for data in constants if data.dtype in CODE_OFFSETS)
    return Decision(number, op.name, output, place, reason, weight_bytes=weights, **figures)


def _together(a: Decision, b: Decision) -> Decision:
    """One operator in several bands of rows: the work of all of them, in the words of the last."""
    sums = {k: getattr(a, k) + getattr(b, k) for k in ("steps", "cycles", "seconds", "instruction_bytes")}
    return replace(b, tiles=max(a.tiles, b.tiles), **sums)


class Work:
    """What a program does for one operator: per tile steps and predicted cycles, bytes, and how."""

    def __init__(self) -> None:
        self.steps, self.cycles, self.instruction_bytes, self.how = [0] * timing.TILES, [0.0] * timing.TILES, 0, ""

    def figures(self, clock_hz: float) -> dict[str, Any]:
        """Of the busiest tile."""
        cycles = max(self.cycles)
        return {
            "tiles": sum(n > 0 for n in self.steps), "steps": max(self.steps), "cycles": cycles,
            "seconds": cycles / clock_hz, "instruction_bytes": self.instruction_bytes,
        }  # fmt: skip


def _works(segment: Segment, program: nw.NetworkProgram) -> dict[int, Work]:
    """By operator, from the program's own instructions; copies, and what is computed in bands, count for who reads
    them. All passes together."""
    own_names, plan = segment.lowering.made_by, program.plan
    made_by = dict(own_names)
    for stage in reversed(plan.stages):
        made_by.setdefault(stage.output, made_by.get(stage.output.rpartition("@")[0], -1))
        for name in stage.inputs:
            if name not in plan.network.inputs:
                made_by.setdefault(name, made_by.get(name.rpartition("@")[0], made_by[stage.output]))
    found: dict[int, Work] = {}
    begins = [*program.begins.values()]
    for stage, (begin, end) in zip(plan.stages, pairwise(begins), strict=True):
        work = found.setdefault(made_by[stage.output], Work())
        work.instruction_bytes += (end - begin) * WORD_BYTES
        own = isinstance(stage, nw.Conv) or {stage.output, stage.output.rpartition("@")[0]} & set(own_names)
        if end > begin or not work.how:
            work.how = ("" if own else "copies for it: ") + nw.describe(program, stage)
    for word, op, times in timing.ops(program.execution.bitstreams[0].data):
        work = found[made_by[plan.stages[bisect_right(begins, word) - 1].output]]
        for tile in timing.tiles_of_op(op):
            work.steps[tile] += timing.op_steps(op) * times * program.passes
            work.cycles[tile] += timing.op_cycles(op) * times * program.passes
    return found


def program_report(
    program: Program, clock_hz: float, images: int = 1, passes: int = 1, parameter_bytes: int = 0
) -> ProgramReport:
    """The figures of any program, ours or Google's."""
    streams = [b.data for b in program.bitstreams]
    to_chip, from_chip = timing.call_bytes(program)
    cycles = timing.chip_cycles(streams) * passes
    return ProgramReport(
        instruction_words=sum(map(len, streams)) // 16,
        parameter_bytes=parameter_bytes,
        busiest_tile_steps=timing.busiest_steps(streams) * passes,
        ring_rows=sum(_sent_rows(stream) for stream in streams) * passes,
        to_chip_bytes=to_chip,
        from_chip_bytes=from_chip,
        images=images,
        passes=passes,
        cycles=cycles,
        seconds=timing.call_seconds(cycles, to_chip, from_chip, clock_hz),
    )


def _sent_rows(stream: bytes) -> int:
    """Packets that tiles put on the ring: one per row that a ring sender reads."""
    return sum(
        placed.instruction.src.steps * placed.instruction.tile_mask.bit_count()
        for placed in isa.decode(stream)
        if isinstance(placed.instruction, isa.RingSend)
    )
