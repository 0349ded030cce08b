"""Which operators run on the chip, in which programs. Source: docs/compiler.md, section Partition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from coral import timing
from coral.codegen import CodegenError
from coral.codegen import network as nw
from coral.codegen.machine import WORD_BYTES, round_up
from coral.codegen.network.frame import images_in
from coral.codegen.network.tiling import SIDES
from coral.compiler import operators  # noqa: F401  (fills OPERATORS)
from coral.compiler.errors import Refused
from coral.compiler.lowering import Lowering
from coral.compiler.rows import Cut, banded
from coral.package.graph import Graph

ALONE, SEEN = "nothing reads its result", "only another way to see a tensor"
LARGE_IMAGE = 500_000
"""Elements of a tensor from which on a network that has no program is cut into bands of rows."""
OPERATOR_SECONDS, RESULT_SECONDS, PRODUCT_SECONDS = 5e-6, 4e-9, 1e-9
"""Guesses at a host: an operator's start, a result, a product of a layer."""
PRODUCTS = {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV"}


@dataclass
class Segment:
    """Operators that are one program: ``inputs`` are tensor numbers, ``outputs`` the graph's tensors by the network's
    names; ``echoes`` are operators that only rename a tensor and are repeated on the host for what it needs. ``band``:
    the program computes some rows, others the rest."""

    lowering: Lowering
    inputs: tuple[int, ...]
    outputs: dict[str, int]
    echoes: tuple[int, ...]
    program: nw.NetworkProgram
    band: bool = False

    @property
    def operators(self) -> list[int]:
        """Numbers of the operators inside."""
        return self.lowering.operators


@dataclass
class Partition:
    """``order``: segments and numbers of host operators, in running order; ``reasons``: why on the host."""

    graph: Graph
    names: tuple[str, ...]
    images: int
    order: list[Segment | int] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)

    @property
    def segments(self) -> list[Segment]:
        """The programs in order."""
        return [item for item in self.order if isinstance(item, Segment)]


def partition(graph: Graph, names: tuple[str, ...], images: int) -> Partition:
    """Takes as many operators to the chip as have a program there, in as few programs as their order allows."""
    found = Partition(graph, names, images)
    live = _live(graph)
    levels: dict[int, int] = {}
    chip: list[Lowering] = []
    host: dict[int, list[int]] = {}
    on_chip: set[int] = set()
    for number, op in enumerate(graph.operators):
        if number not in live:
            found.reasons[number] = ALONE
            continue
        level = max((levels.get(i, 0) + (i in on_chip) for i in op.inputs if i >= 0), default=0)
        first = max((levels.get(i, 0) for i in op.inputs if i >= 0), default=0)
        try:
            taken = _take(graph, names, images, chip, number, first)
        except Refused as error:
            found.reasons[number] = str(error)
            host.setdefault(level, []).append(number)
            levels |= dict.fromkeys(op.outputs, level)
            continue
        levels |= dict.fromkeys(op.outputs, taken)
        on_chip |= set(op.outputs)
    for level in range(max(len(chip), max(host, default=0) + 1)):
        found.order += host.get(level, [])
        if level < len(chip):
            found.order += _fitted(found, chip[level].operators, live)
    found.order = _trimmed(found, _worthwhile(found), live)
    return found


def _worthwhile(found: Partition) -> list[Segment | int]:
    """Without the segments that the host computes sooner than a call takes; the largest one stays in any case."""
    costs = {id(s): (timing.predicted_seconds(s.program.execution), host_seconds(s)) for s in found.segments}
    largest = max(found.segments, key=lambda s: costs[id(s)][1], default=None)
    order: list[Segment | int] = []
    repeated: tuple[int, ...] = ()
    for item in found.order:
        optional = isinstance(item, Segment) and item is not largest and not item.band
        if isinstance(item, Segment) and optional and costs[id(item)][0] > costs[id(item)][1]:
            chip, host = (f"{seconds * 1e6:.0f} us" for seconds in costs[id(item)])
            found.reasons |= dict.fromkeys(
                item.operators, f"a call of the chip would take {chip}, the host about {host}"
            )
            order += item.operators
            repeated = item.echoes
        elif item not in repeated:
            order.append(item)
            repeated = ()
    return order


def _trimmed(found: Partition, order: Sequence[Segment | int], live: set[int]) -> list[Segment | int]:
    """Without operators at the ends of segments that only make more bytes to send, if the host is sooner done."""
    trimmed: list[Segment | int] = []
    repeated: tuple[int, ...] = ()
    for item in order:
        if isinstance(item, Segment):
            repeated, after = item.echoes, set()
            while (less := _less_to_send(found, item, live)) is not None:
                item, number = less
                after.add(number)
            trimmed += [item, *sorted(after | {*item.echoes})] if after else [item, *item.echoes]
        elif item not in repeated:
            trimmed.append(item)
    return trimmed


def _less_to_send(found: Partition, segment: Segment, live: set[int]) -> tuple[Segment, int] | None:
    """A segment without one of its last operators, and that operator, if it pays."""
    graph, made_by = found.graph, segment.lowering.made_by

    def sent(numbers: Sequence[int]) -> float:
        shapes = [graph.tensors[i].shape for i in _needed(graph, numbers, live)]
        return sum(math.prod(s[:-1]) * round_up(s[-1], WORD_BYTES) for s in shapes) / timing.FROM_CHIP_BYTES_PER_S

    for number in reversed(segment.operators):
        stages = [s for s in segment.program.network.stages if made_by.get(s.output) == number]
        rest = [n for n in segment.operators if n != number]
        made = set(graph.operators[number].outputs)
        if not stages or any(isinstance(s, nw.Conv) for s in stages):
            continue
        if any(made & set(graph.operators[n].inputs) for n in rest):
            continue
        saved, host = sent(segment.operators) - sent(rest), host_seconds(segment, stages)
        if saved <= host:
            continue
        try:
            less = _segment(found, rest, live)
        except (CodegenError, Refused):
            continue
        if less is not None:
            times = f"{saved * 1e6:.0f} us, the host about {host * 1e6:.0f} us"
            found.reasons[number] = f"sending its result would take {times}"
            return less, number
    return None


def host_seconds(segment: Segment, stages: Sequence[nw.Stage] | None = None) -> float:
    """A rough guess at what a host's CPU needs for a segment, or some stages of it: operators, results, products."""
    network, seconds = segment.program.network, 0.0
    for stage in network.stages if stages is None else stages:
        y = network.tensors[stage.output]
        taps = stage.weights.size // y.c if isinstance(stage, nw.Conv) else 1
        seconds += OPERATOR_SECONDS + y.size * (RESULT_SECONDS + taps * PRODUCT_SECONDS) * segment.program.batch
    return seconds


def operator_seconds(graph: Graph, number: int) -> float:
    """The same guess for an operator of a graph, from the shapes of its results and its largest constant."""
    op = graph.operators[number]
    results = sum(math.prod(max(n, 1) for n in graph.tensors[i].shape) for i in op.outputs if i >= 0)
    constants = [t for i in op.inputs if i >= 0 and (t := graph.tensors[i]).data is not None and op.name in PRODUCTS]
    channels = max((1, *graph.tensors[op.outputs[0]].shape[-1:]))
    taps = max((math.prod(t.shape) // channels for t in constants), default=0)
    return OPERATOR_SECONDS + results * (RESULT_SECONDS + taps * PRODUCT_SECONDS)


def _take(graph: Graph, names: tuple[str, ...], images: int, chip: list[Lowering], number: int, first: int) -> int:
    """The level at which an operator joins; it opens one where it cannot follow. :raises Refused: it has no place."""
    problem: Refused | None = None
    for level in (first, first + 1):
        while len(chip) <= level:
            chip.append(Lowering(graph, names, images))
        try:
            chip[level].take(number)
        except Refused as error:
            problem = problem or error
            continue
        return level
    assert problem is not None
    raise problem


def _live(graph: Graph) -> set[int]:
    """Operators that the graph's outputs, or variables, need."""
    needed, live = set(graph.outputs), set()
    for number in reversed(range(len(graph.operators))):
        op = graph.operators[number]
        if needed & set(op.outputs) or any(i >= 0 and graph.tensors[i].is_variable for i in op.inputs):
            live.add(number)
            needed |= set(op.inputs)
    return live


def _fitted(found: Partition, numbers: Sequence[int], live: set[int]) -> list[Segment | int]:
    """Segments for operators in order; where no program holds them all they are cut, down to single operators."""
    try:
        segment = _segment(found, numbers, live)
    except (CodegenError, Refused) as error:
        with suppress(CodegenError, Refused):
            return _on_bands(found, numbers, live)
        work = [n for n in numbers if n in _workers(found, numbers)]
        if len(work) <= 1:
            found.reasons |= dict.fromkeys(numbers, str(error))
            return list(numbers)
        middle = list(numbers).index(work[len(work) // 2])
        parts = [part for half in (numbers[:middle], numbers[middle:]) for part in _fitted(found, half, live)]
        return _merged(found, parts, live)
    if segment is None:
        found.reasons |= dict.fromkeys(numbers, SEEN)
        return list(numbers)
    return [segment, *segment.echoes]


def _workers(found: Partition, numbers: Sequence[int]) -> set[int]:
    """Operators among them that compute something."""
    lowering = Lowering(found.graph, found.names, found.images)
    for number in numbers:
        lowering.take(number)
    return set(lowering.made_by.values())


def _merged(found: Partition, parts: list[Segment | int], live: set[int]) -> list[Segment | int]:
    """Neighbouring segments as one where that fits."""
    merged: list[Segment | int] = []
    repeated: tuple[int, ...] = ()
    for part in parts:
        if part in repeated:
            continue
        last = merged[-1] if merged else None
        if isinstance(part, Segment) and isinstance(last, Segment) and not (part.band or last.band):
            try:
                both = _segment(found, [*last.operators, *part.operators], live)
            except (CodegenError, Refused):
                both = None
            if both is not None and not both.echoes:
                merged[-1], repeated = both, part.echoes
                continue
        repeated = ()
        merged.append(part)
    return merged


def _segment(found: Partition, numbers: Sequence[int], live: set[int]) -> Segment | None:
    """A program of operators; None if they compute nothing. :raises Refused, CodegenError: there is none."""
    lowering, network, outputs, echoes = _lowered(found, numbers, live)
    if network is None:
        return None
    return Segment(lowering, tuple(lowering.inputs), outputs, echoes, _program(network, found.images))


def _lowered(
    found: Partition, numbers: Sequence[int], live: set[int]
) -> tuple[Lowering, nw.Network | None, dict[str, int], tuple[int, ...]]:
    """(lowering, network if there is anything to compute, outputs, echoes) of operators. :raises Refused: cannot be"""
    lowering = Lowering(found.graph, found.names, found.images)
    for number in numbers:
        lowering.take(number)
    if not lowering.stages:
        return lowering, None, {}, ()
    outputs, echoes = _exports(found.graph, lowering, _needed(found.graph, numbers, live))
    return lowering, lowering.network(found.graph.name or "model", tuple(outputs)), outputs, tuple(sorted(echoes))


def _on_bands(found: Partition, numbers: Sequence[int], live: set[int]) -> list[Segment | int]:
    """Segments for bands of rows, between the host's operators that cut and join; the graph grows by those.

    :raises CodegenError, Refused: the image is small, or no bands have programs
    """
    lowering, network, outputs, echoes = _lowered(found, numbers, live)
    if network is None or found.images > 1 or max(t.size for t in network.tensors.values()) < LARGE_IMAGE:
        raise Refused("no image too large for one program")
    cut = Cut(lowering, found.names, outputs, banded(network, lambda band: _program(band, 1)))
    found.graph, found.names = cut.graph, cut.names
    found.reasons |= dict.fromkeys((*cut.before, *cut.behind), "cuts or joins bands of rows of an image")
    segments = [Segment(*band[:3], (), band[3], band=True) for band in cut.bands]
    return [*cut.before, *segments, *cut.behind, *echoes]


def _program(network: nw.Network, images: int) -> nw.NetworkProgram:
    """The cheapest program whose layers hold exactly the tensors' images: a file's tensors have no room for more.

    :raises CodegenError: there is none
    """
    problem: CodegenError | None = None
    fitting: list[nw.NetworkProgram] = []
    for grid in (nw.Grid(rows, columns) for rows in SIDES for columns in SIDES):
        if images % grid.slots:
            continue
        try:
            program = nw.NetworkProgram(network, batch=images, grid=grid, stream=True)
        except CodegenError as error:
            problem = error
            continue
        if program.passes * images_in(program.plan) == images:
            fitting.append(program)
    if not fitting:
        raise problem or CodegenError(f"network {network.name!r}: no grid takes {images} images exactly")
    return min(fitting, key=lambda p: timing.predicted_seconds(p.execution) * p.passes)


def _needed(graph: Graph, numbers: Sequence[int], live: set[int]) -> list[int]:
    """Tensors that operators make and others, or the user, read."""
    inside = set(numbers)
    read = set(graph.outputs)
    for number, op in enumerate(graph.operators):
        if number in live and number not in inside:
            read |= set(op.inputs)
    return [i for number in numbers for i in graph.operators[number].outputs if i in read]


def _exports(graph: Graph, lowering: Lowering, needed: Sequence[int]) -> tuple[dict[str, int], set[int]]:
    """(the graph's tensor for each of the network's that leaves it, operators that the host repeats)."""
    makers = {i: number for number in lowering.operators for i in graph.operators[number].outputs}
    values = {}
    for i in needed:
        values[i] = lowering.values[i] = lowering.written(lowering.values[i], makers[i])
    inside = {lowering.values[i].name: i for i in lowering.inputs}
    own = {name: i for i, name in enumerate(lowering.names)}
    outputs: dict[str, int] = {}
    echoes: set[int] = set()
    for name in dict.fromkeys(value.name for value in values.values()):
        group = [i for i in needed if values[i].name == name]
        kept = inside.get(name, own.get(name, group[0]) if len(group) > 1 else group[0])
        if name not in inside:
            outputs[name] = kept
        for i in group:
            while i != kept and i not in lowering.inputs:
                echoes.add(makers[i])
                i = graph.operators[makers[i]].inputs[0]
    return outputs, echoes
