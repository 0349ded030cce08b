"""What became of every operator, and the programs' predicted cost. Source: docs/compiler.md, Report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from coral import isa, timing
from coral.codegen import network as nw
from coral.codegen.network.cost import stage_cycles
from coral.compiler.partition import Partition, Segment
from coral.package.graph import Graph
from coral.package.program import Program

RENAMED = "the same codes in the same place: nothing to do"
ECHO = "renames a result of the chip on the host"


@dataclass(frozen=True)
class Decision:
    """One operator of the graph. ``place`` is "host" or "chip" with the program's number; ``cycles`` and ``share`` are
    predicted, of the operator and of all the chip's work; ``weight_bytes`` as in the model."""

    number: int
    op: str
    output: str
    place: str
    reason: str
    tiles: int = 0
    cycles: float = 0.0
    share: float = 0.0
    weight_bytes: int = 0


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
    """A compiled model; ``resident``: no call sends parameters after the first."""

    model: str
    file_bytes: int
    resident: bool
    clock_hz: float
    seconds: float
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
    decisions: dict[int, Decision] = {}
    for number, reason in partition.reasons.items():
        decisions[number] = _decision(partition.graph, partition.names, number, "host", reason)
    for index, (segment, program) in enumerate(zip(partition.segments, programs, strict=True)):
        cost = _costs(segment, program)
        for number in segment.operators:
            tiles, cycles, weights = cost.get(number, (0, 0.0, 0))
            place = f"chip {index}"
            if segment.band and number in decisions:
                place, cycles = f"{decisions[number].place}, {index}", cycles + decisions[number].cycles
            reason = ("" if number in cost else RENAMED) + (f"; {ECHO}" if number in segment.echoes else "")
            decisions[number] = _decision(
                partition.graph, partition.names, number, place, reason.removeprefix("; "),
                tiles=tiles, cycles=cycles, weight_bytes=weights,
            )  # fmt: skip
    total = sum(d.cycles for d in decisions.values()) or 1.0
    ordered = tuple(replace(d, share=d.cycles / total) for _, d in sorted(decisions.items()))
    return Report(name, len(data), resident, clock_hz, sum(p.seconds for p in found), tuple(found), ordered)


def _decision(graph: Graph, names: Sequence[str], number: int, place: str, reason: str, **figures: Any) -> Decision:
    op = graph.operators[number]
    output = next((names[i] for i in op.outputs if i >= 0), "")
    return Decision(number, op.name, output, place, reason, **figures)


def _costs(segment: Segment, program: nw.NetworkProgram) -> dict[int, tuple[int, float, int]]:
    """(tiles, predicted cycles of all passes, weight bytes) by operator; copies count for who reads them."""
    made_by, plan = dict(segment.lowering.made_by), program.plan
    for stage in reversed(plan.stages):
        for name in stage.inputs:
            made_by.setdefault(name, made_by.get(stage.output, -1))
    found: dict[int, tuple[int, float, int]] = {}
    for stage in plan.stages:
        number = made_by.get(stage.output, -1)
        tiles, cycles, weights = found.get(number, (0, 0.0, 0))
        mask = plan.spread_tiles(stage.output) if stage.output in plan.spread else plan.working(stage.output)
        cycles += stage_cycles(plan, stage) * program.passes
        weights += stage.weights.nbytes if isinstance(stage, nw.Conv) else 0
        found[number] = max(tiles, mask.bit_count()), cycles, weights
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
