"""``coral info``: what a compiled model, an uncompiled one or a bare program holds, for people and as JSON."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coral.package.bitstreams import BARE_SUFFIX, bitstreams_of
from coral.package.check import WORD_BYTES, element_index
from coral.package.container import Package
from coral.package.graph import Graph, Model, read_model
from coral.package.program import Layer, Program
from coral.package.strict import strict_checks
from coral.package.tflite_file import CUSTOM_CODE, EdgeTpuModel, read_parts


def info(path: Path, as_json: bool) -> None:
    """Prints what ``path`` holds; PackageError when the file is damaged. Source: docs/package.md."""
    if path.suffix == BARE_SUFFIX:
        stream = bitstreams_of(path)[0]
        report: dict[str, Any] = {"file": str(path), "type": "bare program", "bitstream": _plain(stream.data)}
        lines = [f"{path.name}: bare program, {len(stream.data)} bytes, {len(stream.data) // WORD_BYTES} words"]
        tables = []
    else:
        model = read_model(path)
        compiled = any(operator.name == CUSTOM_CODE for graph in model.graphs for operator in graph.operators)
        report = {"file": str(path), "file_bytes": len(model.source), "description": model.description}
        if compiled:
            parts = read_parts(model.source)
            report |= {"type": "compiled model"} | _compiled_report(parts)
            lines, tables = _compiled_text(path, parts)
        else:
            report |= {"type": "TFLite model", "graphs": [_graph_report(graph) for graph in model.graphs]}
            lines, tables = _model_text(path, model)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    console = Console()
    for line in lines:
        console.print(_cell(line))
    for table in tables:
        console.print(table)


def strictly(path: Path, as_json: bool) -> bool:
    """Prints what Google's runtime would check of a compiled file; whether all of it holds. PackageError: no TFLite."""
    checks = strict_checks(path)
    if as_json:
        print(json.dumps({"file": str(path), "checks": [_plain(check) for check in checks]}, indent=1))
    else:
        rows = [["yes" if check.ok else "NO", check.name, check.found] for check in checks]
        Console().print(_table(f"{path.name}: what Google's runtime checks", "|requirement|found", rows))
    return all(check.ok for check in checks)


def layout_name(layer: Layer) -> str:
    """How the elements of an output lie: ``packed``, ``z padded to N``, or in slabs that must be re-ordered."""
    if layer.slices:
        return f"{len(layer.slices)} slices"
    if layer.layout is None:
        return "packed"
    index = element_index(layer.layout).ravel()
    if np.array_equal(index, np.arange(index.size) * layer.z):
        return "packed"
    step = int(index[1]) if index.size > 1 else 0
    if np.array_equal(index, np.arange(index.size) * step):
        return f"z padded to {step}"
    return f"re-ordered, {len(layer.layout.tile_byte_offset)} slabs"


def _cell(text: str) -> Text:
    """Text as it is: no markup, and no control characters from a stranger's file."""
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text), overflow="fold")


def _table(title: str, columns: str, rows: list[list[str]]) -> Table:
    table = Table(*columns.split("|"), title=title)
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _plain(value: Any) -> Any:
    """Dataclasses, enumerations and tuples as JSON; bytes as length and SHA-256."""
    if isinstance(value, bytes):
        return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    if isinstance(value, IntEnum):
        return value.name
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {"type": type(value).__name__} | {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value


def _compiled_report(parts: Sequence[EdgeTpuModel]) -> dict[str, Any]:
    """One Edge TPU operator's entries, or those of several as ``parts``."""
    reports = [_part_report(part) for part in parts]
    graphs = {"graphs": [_graph_report(graph) for graph in parts[0].model.graphs]}
    return (reports[0] if len(parts) == 1 else {"parts": reports}) | graphs


def _part_report(edgetpu: EdgeTpuModel) -> dict[str, Any]:
    programs = []
    for program in edgetpu.package.programs:
        programs.append(_plain(program) | {"hint_pattern": program.hint_pattern()})
        for layer, described in zip(program.outputs, programs[-1]["outputs"], strict=True):
            described["layout_name"] = layout_name(layer)
    return {
        "custom_operator": _plain(edgetpu.custom) | {"index": edgetpu.operator},
        "package": _plain(edgetpu.package) | {"programs": programs},
    }


def _graph_report(graph: Graph) -> dict[str, Any]:
    return {
        "name": graph.name,
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "operators": [
            {
                "name": operator.name,
                "inputs": operator.inputs,
                "outputs": operator.outputs,
                "intermediates": operator.intermediates,
                "options": operator.options,
            }
            for operator in graph.operators
        ],
        "tensors": [
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "dtype": None if tensor.dtype is None else tensor.dtype.name,
                "scales": tensor.scales.tolist(),
                "zero_points": tensor.zero_points.tolist(),
                "quantized_dimension": tensor.quantized_dimension,
                "constant_bytes": 0 if tensor.data is None else tensor.data.nbytes,
            }
            for tensor in graph.tensors
        ],
    }


def _compiled_text(path: Path, parts: Sequence[EdgeTpuModel]) -> tuple[list[str], list[Table]]:
    package, model, operators = parts[0].package, parts[0].model, parts[0].graph.operators
    places = [part.operator for part in parts]
    host = [_summary(operators[a + 1 : b]) for a, b in pairwise((-1, *places, len(operators)))]
    between = f"; between: {' | '.join(host[1:-1])}" if len(parts) > 1 else ""
    lines = [
        f"{path.name}: compiled model, {len(model.source)} bytes",
        f"compiler {package.compiler_version!r}, needs runtime {package.min_runtime_version}, "
        f"TFLite version {model.version} ({model.description!r})",
        f"on the host before: {host[0]}; after: {host[-1]}{between}",
    ]
    many = len(parts) > 1
    tables = [_part_tables(part.package, f" of operator {part.operator}" if many else "") for part in parts]
    return lines, [table for pair in tables for table in pair]


def _part_tables(package: Package, which: str) -> list[Table]:
    columns = [_program_column(program) for program in package.programs]
    programs = _table(
        f"Programs{which}",
        "|".join(["", *(program.kind.name for program in package.programs)]),
        [[label, *(column[label] for column in columns)] for label in columns[0]],
    )
    sides = [("in", program.inputs) for program in package.programs]
    sides += [("out", program.outputs) for program in package.programs]
    layers = _table(
        f"Inputs and outputs{which}",
        "layer|y x z|type|scale|zero point|bytes|layout",
        [_layer_row(direction, layer) for direction, side in sides for layer in side],
    )
    return [programs, layers]


def _layer_row(direction: str, layer: Layer) -> list[str]:
    return [
        f"{direction}: {layer.name}",
        f"{layer.y} x {layer.x} x {layer.z}",
        layer.dtype.name,
        f"{layer.scale:.9g}",
        str(layer.zero_point),
        f"{layer.size_bytes}" + (f" x {layer.executions}" if layer.executions > 1 else ""),
        layout_name(layer),
    ]


def _program_column(program: Program) -> dict[str, str]:
    return {
        "name": program.name,
        "bitstreams, bytes": " + ".join(f"{len(bitstream.data):,}" for bitstream in program.bitstreams),
        "parameters, bytes": f"{len(program.parameters):,}",
        "token": f"{program.token:#018x}" if program.token else "none",
        "hints": program.hint_pattern() + ("" if program.fully_deterministic else " (not deterministic)"),
        "scratch, bytes": f"{program.scratch_bytes:,}",
        "narrow bytes per tile": f"{program.narrow_bytes_per_tile:,}"
        if program.narrow_bytes_per_tile
        else "not stated",
        "estimated cycles": f"{program.estimated_cycles:,}" if program.estimated_cycles else "not stated",
    }


def _summary(operators: tuple[Any, ...]) -> str:
    counts = Counter(operator.name for operator in operators)
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts.items()) or "nothing"


def _model_text(path: Path, model: Model) -> tuple[list[str], list[Table]]:
    rows = []
    for graph in model.graphs:
        shapes = [f"{'x'.join(map(str, tensor.shape))} {tensor.dtype}" for tensor in graph.tensors]
        rows += [
            [
                operator.name,
                ", ".join(shapes[index] for index in operator.inputs if index >= 0),
                ", ".join(shapes[index] for index in operator.outputs if index >= 0),
                ", ".join(f"{name}={value}" for name, value in operator.options.items()),
            ]
            for operator in graph.operators
        ]
    table = _table("Operators (not compiled for the Edge TPU)", "operator|inputs|outputs|options", rows)
    return [f"{path.name}: TFLite model, {len(model.source)} bytes, {model.description!r}"], [table]
