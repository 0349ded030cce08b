"""``coral verify``: what a compiled program computes, against the layers of the original graph. Source: docs/run.md."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from coral import CoralError
from coral.apps.debug import explained
from coral.apps.direct import DirectChip
from coral.apps.files import image_input, random_inputs
from coral.apps.model import Array, Model, OnChip, Port, Target, refuse_over_usb
from coral.chip import Chip
from coral.compiler import load_model
from coral.compiler.batch import images_of, rebatched
from coral.compiler.lowering import renamed
from coral.evaluate import evaluate
from coral.evaluate.compare import ChipPart, Difference, chip_part, difference
from coral.evaluate.graph import run_operators, tensor_number
from coral.package.graph import Graph
from coral.package.tensors import unpack_output
from coral.package.tflite_file import EdgeTpuModel, read_parts


@dataclass
class Report:
    """What :func:`verify_pair` found. ``orders_differing`` are seeds whose output bytes were not those of the usual
    order of units."""

    model: str
    device: str
    outputs: dict[str, Difference]
    inputs: int = 0
    orders: int = 0
    orders_differing: list[int] = field(default_factory=list)
    host_operators: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """No value differs."""
        return not any(output.differing for output in self.outputs.values()) and not self.orders_differing


def verify_pair(
    original: Path,
    compiled: Path,
    *,
    n: int = 3,
    seed: int = 0,
    images: Sequence[Path] = (),
    orders: int = 0,
    device: Literal["sim", "usb", "direct"] = "sim",
    advance: Any = lambda: None,
) -> Report:
    """Runs the chip part on ``n`` random inputs and on ``images``, and compares every output with the original graph in
    the chip's arithmetic. ``orders``: also so many runs on a chip whose units take turns at random, seeds 0, 1, ..
    Where programs compute bands of rows, which no tensor of the original is, the whole file is compared.

    :raises EvaluateError: the files are no pair; ProgramFault: the program goes wrong on the simulated chip
    :raises ModelError: a program that asks for its own transfers, on USB
    """
    start = time.perf_counter()
    files = read_parts(compiled)
    if device == "usb":
        for file in files:
            refuse_over_usb(file, compiled.name)
    elif not all(file.package.execution.fully_deterministic for file in files):
        device = "direct"
    graph = like(load_model(original).main, files[0])
    report = Report(compiled.name, device, {})
    inside: set[int] = set()
    target = _target(device)
    known = {tensor.name for tensor in graph.tensors}
    if any(not {layer.name for layer in f.package.execution.outputs} & known for f in files):
        _compare_whole(files, graph, report, target, n, seed, images, orders, advance)
        files = []
        inside = set(range(len(graph.operators)))
    for file in files:
        part = chip_part(graph, file)
        inside |= set(part.operators)
        _compare(OnChip(file, target), part, report, _inputs(part, n, seed, images), orders, advance)
    report.host_operators = [op.name for number, op in enumerate(graph.operators) if number not in inside]
    report.seconds = time.perf_counter() - start
    return report


def like(original: Graph, file: EdgeTpuModel) -> Graph:
    """The original graph with as many images as the compiled one, and unique names of tensors where it has none."""
    factor = images_of(file.graph) // images_of(original) if original.inputs and file.graph.inputs else 1
    names = [tensor.name for tensor in original.tensors]
    graph = rebatched(original, factor) if factor > 1 else original
    return renamed(graph) if len(set(names)) < len(names) else graph


def _compare(
    chip: OnChip, part: ChipPart, report: Report, inputs: Iterator[dict[str, Array]], orders: int, advance: Any
) -> None:
    """Adds to the report what one chip part computes."""
    program, cases = chip.program, list(inputs)
    before = report.outputs
    before |= {layer.name: Difference(0, {}) for layer in program.outputs}
    first: dict[str, bytes] = {}
    with explained(program):
        for case in cases:
            raw, expected = chip.raw(prepared(chip, part, case)), part.evaluate(case)
            first = first or raw
            for layer in program.outputs:
                found = difference(expected[layer.name], unpack_output(layer, raw[layer.name]))
                amounts = dict(Counter(before[layer.name].amounts) + Counter(found.amounts))
                before[layer.name] = Difference(before[layer.name].values + found.values, amounts)
            report.inputs += 1
            advance()
        for order in range(orders if cases else 0):
            shuffled = OnChip(chip.file, DirectChip(Chip(seed=order)))
            if shuffled.raw(prepared(shuffled, part, cases[0])) != first:
                report.orders_differing.append(order)
            report.orders += 1
            advance()


def _compare_whole(
    files: list[EdgeTpuModel],
    graph: Graph,
    report: Report,
    target: Target,
    n: int,
    seed: int,
    images: Sequence[Path],
    orders: int,
    advance: Any,
) -> None:
    """Adds to the report what the file computes, its host operators included."""

    def results(model: Model, inputs: Mapping[str, Array]) -> dict[str, Array]:
        got = model(inputs)
        return got if isinstance(got, dict) else {model.outputs[0].name: got}

    model = Model(files, target)
    cases = [random_inputs(model.inputs, seed + k) for k in range(n)]
    cases += [{port.name: image_input(image, port) for port in model.inputs} for image in images]
    first: dict[str, Array] = {}
    for case in cases:
        got = results(model, case)
        first = first or got
        values = {tensor_number(graph, port.name): case[port.name] for port in model.inputs}
        expected = run_operators(graph, range(len(graph.operators)), values)
        for port in model.outputs:
            found = difference(expected[tensor_number(graph, port.name)], got[port.name])
            before = report.outputs.get(port.name, Difference(0, {}))
            amounts = dict(Counter(before.amounts) + Counter(found.amounts))
            report.outputs[port.name] = Difference(before.values + found.values, amounts)
        report.inputs += 1
        advance()
    for order in range(orders if cases else 0):
        shuffled = results(Model(files, DirectChip(Chip(seed=order))), cases[0])
        if any((shuffled[name] != array).any() for name, array in first.items()):
            report.orders_differing.append(order)
        report.orders += 1
        advance()


def prepared(chip: OnChip, part: ChipPart, inputs: Mapping[str, Array]) -> dict[int, Array]:
    """The chip's inputs by tensor number; what the host pads or reshapes before is done."""
    values, graph = {}, chip.file.graph
    for number, layer in chip.layers:
        source = part.inputs[layer.name].name
        values[number] = array = inputs[layer.name]
        if source != layer.name:
            values[number] = evaluate(graph, {source: array}, outputs=[layer.name])[layer.name]
    return values


def verify(
    original: Path,
    compiled: Path,
    *,
    n: int = 3,
    seed: int = 0,
    images: Sequence[Path] = (),
    orders: int = 0,
    device: Literal["sim", "usb", "direct"] = "sim",
    as_json: bool = False,
) -> bool:
    """``verify_pair``, printed; whether nothing differs."""
    total = n + len(images) + orders
    if not n + len(images):
        raise CoralError("nothing to compare: --n is 0 and there is no --image")
    with _progress(total, silent=as_json) as advance:
        report = verify_pair(
            original, compiled, n=n, seed=seed, images=images, orders=orders, device=device, advance=advance
        )
    if as_json:
        outputs = {name: asdict(output) | {"differing": output.differing} for name, output in report.outputs.items()}
        print(json.dumps(asdict(report) | {"outputs": outputs, "ok": report.ok}, indent=1))
    else:
        _show(report)
    return report.ok


def _target(device: str) -> Target:
    if device == "direct":
        return DirectChip()
    from coral.devices import shared_stick

    return shared_stick("usb" if device == "usb" else "sim")


def _inputs(part: ChipPart, n: int, seed: int, images: Sequence[Path]) -> Iterator[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    for _ in range(n):
        yield part.random_inputs(rng)
    for image in images:
        if len(part.inputs) != 1:
            raise CoralError(f"{image}: an image needs a model of one input, this one has {len(part.inputs)}")
        ((name, tensor),) = part.inputs.items()
        assert tensor.dtype is not None
        yield {name: image_input(image, Port(0, name, tensor.shape, tensor.dtype, tensor.scale, tensor.zero_point))}


@contextmanager
def _progress(total: int, silent: bool) -> Iterator[Any]:
    if silent or not sys.stderr.isatty():
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("verify", total=total)
        yield lambda: progress.advance(task)


def _show(report: Report) -> None:
    console = Console()
    table = Table("output", "values compared", "differ", "off by (how many)", title=report.model)
    for name, output in report.outputs.items():
        amounts = ", ".join(f"{amount:+d} ({count})" for amount, count in sorted(output.amounts.items())[:6])
        table.add_row(name, f"{output.values:,}", f"{output.differing:,}", amounts)
    console.print(table)
    how = {"sim": "on the simulated stick", "usb": "on the stick", "direct": "on the simulated chip, without USB"}
    text = f"{report.inputs} inputs {how[report.device]}, {report.seconds:.1f} s"
    if report.orders:
        text += f"; {report.orders} random orders of units, "
        text += (
            f"{len(report.orders_differing)} with other bytes: seeds {report.orders_differing}"
            if (report.orders_differing)
            else "the same bytes"
        )
    console.print(text, highlight=False)
    if report.host_operators:
        console.print(f"not compared (operators of the host): {', '.join(report.host_operators)}", highlight=False)
    console.print("equal" if report.ok else "DIFFERENT", highlight=False)
