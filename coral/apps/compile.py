"""``coral compile`` and ``coral.compile``: models to files for a stick. Source: docs/compiler.md."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coral.compiler import Compiled, CompileError, compile_models
from coral.compiler.report import Report
from coral.driver import CLOCK_HZ

SUFFIX = "_edgetpu.tflite"


def compile_model(model: Any, *more: Any, batch: int = 1) -> Any:
    """A model, or several together, for the stick: a :class:`coral.compiler.Compiled` (a list of them for several).

    :param model: a quantised TFLite file (path or bytes), or a model that :func:`coral.quantize` made
    :param more: models that are to stay on the chip together with the first
    :param batch: images per call, times those of the model
    :raises CompileError: a model cannot be compiled; the message says what to do
    :raises PackageError, ExportError: a file is damaged; a model has no TFLite form
    """
    compiled = compile_models([_source(m) for m in (model, *more)], batch=batch)
    return compiled if more else compiled[0]


def _source(model: Any) -> Path | str | bytes:
    if isinstance(model, Path | str | bytes):
        return model
    from coral.apps.export import export_tflite

    with tempfile.TemporaryDirectory() as folder:
        return export_tflite(model, Path(folder) / "model.tflite").read_bytes()


def compile_files(
    models: Sequence[Path],
    out: Path | None,
    *,
    batch: int = 1,
    clock: str = "std",
    report: Literal["text", "json", "none"] = "text",
    picture: Path | None = None,
) -> None:
    """Compiles files, writes them and prints what was decided.

    ``out`` is the file of the only model, or a folder; without it files go beside their models.

    :raises CompileError: as ``coral.compile``; an output would replace a model; ``clock`` is unknown
    """
    if clock not in CLOCK_HZ:
        raise CompileError(f"clock {clock!r} is unknown, there are {', '.join(CLOCK_HZ)}")
    targets = [_target(model, out, len(models)) for model in models]
    if len(set(targets)) < len(targets) or {t.resolve() for t in targets} & {m.resolve() for m in models}:
        raise CompileError(f"the outputs {', '.join(map(str, targets))} replace each other or a model: give -o FOLDER")
    with Console(stderr=True).status("compiling"):
        compiled = compile_models(models, batch=batch)
    reports = [c.report(float(CLOCK_HZ[clock])) for c in compiled]
    for one, target in zip(compiled, targets, strict=True):
        one.write(target)
    if report == "json":
        files = [r.as_dict() | {"file": str(t)} for r, t in zip(reports, targets, strict=True)]
        print(json.dumps(files, indent=1))
    elif report == "text":
        for one, target in zip(reports, targets, strict=True):
            show(one, target)
    if picture is not None:
        _draw(compiled, targets, picture, clock)


def _target(model: Path, out: Path | None, count: int) -> Path:
    name = f"{model.stem}{SUFFIX}"
    if out is None:
        return model.with_name(name)
    if out.is_dir() or count > 1:
        out.mkdir(parents=True, exist_ok=True)
        return out / name
    return out


def _draw(compiled: Sequence[Compiled], targets: Sequence[Path], picture: Path, clock: str) -> None:
    from coral.apps.trace import trace

    if len(compiled) > 1 or len(compiled[0].programs) != 1:
        raise CompileError("a picture shows one program: compile one model whose chip part is one")
    trace(targets[0], None, picture, clock=clock)


def show(report: Report, target: Path) -> None:
    """Prints a report."""
    console = Console()
    table = Table("", "operator", "output", "place", "tiles", "cycles", "share", "weights", "why", title=report.model)
    for d in report.decisions:
        cells = [str(d.number), d.op, d.output.split(";")[0], d.place, str(d.tiles or "")]
        cells += [f"{d.cycles:,.0f}", f"{d.share:.1%}"] if d.cycles else ["", ""]
        cells += [f"{d.weight_bytes:,}" if d.weight_bytes else "", d.reason]
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    console.print(table)
    for index, p in enumerate(report.programs):
        passes = f", {p.passes} passes" if p.passes > 1 else ""
        console.print(
            f"chip {index}: {p.instruction_words:,} words, {p.parameter_bytes:,} bytes of parameters; per call of "
            f"{p.images} image{'s' if p.images > 1 else ''}{passes}: {p.cycles:,.0f} cycles, {p.to_chip_bytes:,} bytes "
            f"to the chip, {p.from_chip_bytes:,} back, predicted {p.seconds * 1e3:.3f} ms at "
            f"{report.clock_hz / 1e6:.0f} MHz",
            highlight=False,
        )
    stays = "parameters stay on the chip" if report.resident else "parameters are sent again when programs alternate"
    console.print(f"{target}: {report.file_bytes:,} bytes; {stays}", highlight=False, markup=False)
