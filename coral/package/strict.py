"""What Google's runtime checks of a compiled file before it runs it, one by one. Source: docs/package.md, Strict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flatbuffers import flexbuffers

from coral.package.container import SCHEMA as PACKAGE_SCHEMA
from coral.package.container import Package, read_package
from coral.package.flatbuffer import Reader, Span
from coral.package.graph import DAMAGE, Graph, Tensor, read_model
from coral.package.program import Base, DmaHint, DType, InterruptHint, Kind, Layer, PackageError, Program
from coral.package.tflite_file import CUSTOM_CODE, TENSOR_TYPES

RUNTIME_VERSIONS = range(10, 15)
"""``min_runtime_version`` that a current runtime takes without a word."""
PAGE = 4096
STATE_SUFFIX = "_variable_output"


@dataclass(frozen=True)
class Check:
    """One requirement: what it is, whether it holds, and what was found (for a failure, where)."""

    name: str
    ok: bool
    found: str


def strict_checks(source: Path | str | bytes) -> list[Check]:
    """Every requirement on every Edge TPU operator of a file. PackageError if the TFLite file itself is damaged."""
    model = read_model(source)
    places = [(g, i) for g in model.graphs for i, op in enumerate(g.operators) if op.name == CUSTOM_CODE]
    checks = [Check("the file has an Edge TPU operator", bool(places), f"{len(places)} of them")]
    for graph, index in places:
        label = f"operator {index}: " if len(places) > 1 else ""
        checks += [Check(label + c.name, c.ok, c.found) for c in _operator(model.source, graph, index)]
    return checks


def _operator(source: bytes, graph: Graph, index: int) -> list[Check]:
    span = graph.operators[index].custom_options
    data = source[span.start : span.start + span.size] if isinstance(span, Span) else b""
    checks, blob = _map(data)
    if blob is None:
        return checks
    try:
        package, header = read_package(blob), Reader(PACKAGE_SCHEMA, blob, "package").root("Package")
    except PackageError as error:
        return [*checks, Check("package and executables pass the verifier", False, str(error))]
    checks.append(Check("package and executables pass the verifier", True, f"{len(package.programs)} executables"))
    version = header.get("min_runtime_version", 0)
    checks += [
        Check("the package has the identifier DWN1", blob[4:8] == b"DWN1", repr(blob[4:8])),
        Check("the runtime's version suffices", version in RUNTIME_VERSIONS, f"needs {version}, allowed 10 to 14"),
        Check("one chip", package.virtual_chip_id != -1, f"virtual_chip_id {package.virtual_chip_id}"),
    ]
    checks += _all("every program", package.programs, _program)
    return [*checks, *_pair(package), *_tensors(graph, index, package.execution)]


def _map(data: bytes) -> tuple[list[Check], bytes | None]:
    """The flexbuffer map, and the package in it."""
    try:
        root = flexbuffers.GetRoot(data).AsMap
        entries = {root.Keys[i].AsKey: root.Values[i] for i in range(min(len(root), 16))}
        blob = bytes(entries["4"].AsStringBytes) if "4" in entries and entries["4"].IsString else None
        chips, more, good = 1, 0, True
        if "6" in entries:
            vector = entries["6"].AsVector
            chips, more = len(vector), len(entries["7"].AsVector) if "7" in entries else 0
            good = entries["6"].IsVector and all(vector[i].IsInt for i in range(chips))
    except DAMAGE as error:
        return [Check("the options are a flexbuffer map", False, f"damaged: {error}")], None
    return [
        Check("the options are a flexbuffer map", True, f"keys {sorted(entries)}"),
        Check("the package is entry 4, a string", blob is not None, "present" if blob else "absent"),
        Check("entry 6 is an untyped vector of integers", good, f"{chips} chip numbers"),
        Check(
            "exactly one package", chips == 1 + more and chips == 1, f"{chips} chip numbers, {more} further packages"
        ),
    ], blob


def _all(what: str, items: tuple[Program, ...], function: Callable[[Program], dict[str, str]]) -> list[Check]:
    """One check per requirement over all programs; the first failure is told."""
    found: dict[str, str] = {}
    for item in items:
        for name, problem in function(item).items():
            found[name] = found.get(name) or (f"{item.kind.name}: {problem}" if problem else "")
    return [
        Check(f"{what}: {name}", not problem, problem or f"{len(items)} checked") for name, problem in found.items()
    ]


def _program(program: Program) -> dict[str, str]:
    """Requirements by name, with the problem or nothing."""
    names = {Base.INPUT: {x.name for x in program.inputs}, Base.OUTPUT: {x.name for x in program.outputs}}
    relocations = [(r.base, r.name) for b in program.bitstreams for r in b.relocations]
    transfers = [h for h in program.hints if isinstance(h, DmaHint)]
    named = [*relocations, *((h.base, h.name) for h in transfers)]
    unknown = [name for base, name in named if name not in names.get(base, {name})]
    outside = [h.name for h in transfers if _outside(program, h)]
    interrupts = [h.number for h in program.hints if isinstance(h, InterruptHint) and h.number]
    return {
        "batch size at least 1": "" if program.batch_size >= 1 else f"batch size {program.batch_size}",
        "bitstreams, none empty": "" if program.bitstreams and all(b.data for b in program.bitstreams) else "empty",
        "the list of transfers is complete": _deterministic(program),
        "only interrupt 0": f"interrupts {interrupts}" if interrupts else "",
        "relocations and transfers name layers": f"unknown {unknown[:3]}" if unknown else "",
        "transfers lie inside their buffers": f"outside: {outside[:3]}" if outside else "",
        "layers are described": next(filter(None, map(_layer, program.outputs)), ""),
        "caching programs have a token": _token(program),
    }


def _deterministic(program: Program) -> str:
    """The LSTM of the corpus is not: its file does not run over USB under Google's runtime either."""
    return "" if program.fully_deterministic else "not deterministic: cannot run over USB"


def _outside(program: Program, hint: DmaHint) -> bool:
    """Outputs must lie inside; inputs may overrun within their last page."""
    layers = {layer.name: layer for layer in program.layers()}
    if hint.base not in (Base.INPUT, Base.OUTPUT) or hint.name not in layers:
        return False
    layer = layers[hint.name]
    limit = layer.size_bytes * layer.executions
    if hint.base is Base.INPUT:
        limit = -(-layer.y * layer.x * layer.z * layer.dtype.itemsize * layer.executions // PAGE) * PAGE
    return hint.offset < 0 or hint.offset + hint.size > limit


def _layer(layer: Layer) -> str:
    if layer.y * layer.x > 1 and layer.layout is None and not layer.slices:
        return f"output {layer.name!r} of {layer.y} x {layer.x} positions has no layout"
    return ""


def _token(program: Program) -> str:
    return "no token" if program.kind is Kind.PARAMETER_CACHING and not program.token else ""


def _pair(package: Package) -> list[Check]:
    kinds = sorted(p.kind for p in package.programs)
    legal = len(kinds) == 1 or kinds in ([1, 2], [0, 1, 2])
    tokens = {p.token for p in package.programs if p.kind is not Kind.STAND_ALONE}
    names = ", ".join(p.kind.name for p in package.programs)
    return [
        Check("a legal combination of programs", legal, names),
        Check("caching and execution share a token", len(tokens) <= 1, ", ".join(f"{t:#x}" for t in sorted(tokens))),
    ]


def _tensors(graph: Graph, index: int, program: Program) -> list[Check]:
    """Tensors of the TFLite operator against layers, by position."""
    op = graph.operators[index]
    checks = []
    real = tuple(layer for layer in program.outputs if not layer.name.endswith(STATE_SUFFIX))
    for side, numbers, layers in (("input", op.inputs, program.inputs), ("output", op.outputs, real)):
        count = f"{len(numbers)} tensors, {len(layers)} layers"
        checks.append(Check(f"as many {side}s as layers", len(numbers) == len(layers), count))
        wrong = [
            problem
            for number, layer in zip(numbers, layers, strict=False)
            if (problem := _mismatch(graph.tensors[number], layer))
        ]
        checks.append(Check(f"{side}s match their layers", not wrong, wrong[0] if wrong else f"{len(layers)} checked"))
    return checks


def _mismatch(tensor: Tensor, layer: Layer) -> str:
    types = {TENSOR_TYPES[layer.dtype]} | ({1} if layer.dtype is DType.I16 else set())
    if tensor.type not in types:
        return f"{tensor.name!r} has TFLite type {tensor.type}, layer {layer.name!r} is {layer.dtype.name}"
    elements = layer.y * layer.x * layer.z * layer.executions
    batches = {1, *tensor.shape[:1]}
    if math.prod(tensor.shape) not in {elements * n for n in batches}:
        return f"{tensor.name!r} has {math.prod(tensor.shape)} elements, layer {layer.name!r} {elements}"
    return ""
