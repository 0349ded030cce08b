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

from coral.compiler import CompileError, compile_models
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
    targets = _targets(models, out)
    with Console(stderr=True).status("compiling"):
        compiled = compile_models(models, batch=batch)
    reports = [c.report(float(CLOCK_HZ[clock])) for c in compiled]
    if out is not None and len(models) > 1:
        _make_folder(out)
    for one, target in zip(compiled, targets, strict=True):
        one.write(target)
    if report == "json":
        files = [r.as_dict() | {"file": str(t)} for r, t in zip(reports, targets, strict=True)]
        print(json.dumps(files, indent=1))
    elif report == "text":
        for one, target in zip(reports, targets, strict=True):
            show(one, target)
    if picture is not None:
        from coral.apps.trace import trace

        for model, target in zip(models, targets, strict=True):
            ending = f"_{model.stem}" if len(models) > 1 else ""
            trace(target, None, picture.with_stem(picture.stem + ending), clock=clock, quiet=report != "text")


def _targets(models: Sequence[Path], out: Path | None) -> list[Path]:
    """Where the files go. :raises CompileError: one would replace another or a model"""
    if out is not None and len(models) > 1 and out.exists() and not out.is_dir():
        raise CompileError(f"-o {out} is a file, several models need a folder")
    found: dict[Path, Path] = {}
    for model in models:
        target = model.with_name(f"{model.stem}{SUFFIX}")
        if out is not None:
            target = out / target.name if out.is_dir() or len(models) > 1 else out
        if target in found:
            raise CompileError(f"{found[target]} and {model} would both become {target}: rename one")
        if target.exists() and any(target.samefile(m) for m in models if m.exists()):
            raise CompileError(f"the output {target} would replace a model that is compiled: give another -o")
        found[target] = model
    return list(found)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompileError(f"cannot make the folder {out}: {error.strerror}") from None


WIDTH, NAME, NARROW = 150, 32, 120
"""Columns of a report that goes to a file or a pipe; of an operator's output, whose end says most; below which a
terminal gets the most important ones."""


def show(report: Report, target: Path) -> None:
    """Prints a report."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    table = Table(title=Text(report.model), box=None, padding=(0, 1, 0, 0), header_style="bold")
    names, figures = ["", "operator", "output", "place"], ["tiles", "steps", "us", "share", "weights", "code"]
    if narrow := console.width < NARROW:
        names, figures = [n for n in names if n != "output"], figures[:4]
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in figures:
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("why, or how", ratio=1)
    for d in report.decisions:
        cells = [str(d.number), d.op, *([] if narrow else [_ending(d.output)]), d.place]
        numbers = [d.tiles, d.steps, d.seconds * 1e6, d.share * 100, d.weight_bytes, d.instruction_bytes]
        formats = ("{:,}", "{:,}", "{:,.1f}", "{:.1f}%", "{:,}", "{:,}")
        written = [form.format(n) if n else "" for form, n in zip(formats, numbers, strict=True)]
        table.add_row(*map(Text, (*cells, *written[: len(figures)], d.reason)))
    console.print(table)
    console.print(
        f"steps of the busiest tile; us on the chip predicted at {report.clock_hz / 1e6:.0f} MHz, on the host guessed; "
        "share of the chip's work; bytes of weights and instructions",
        highlight=False,
    )
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
    if report.upload_seconds:
        sent, whole = (f"{seconds * 1e3:.3f} ms" for seconds in (report.upload_seconds, report.seconds))
        stays += f", at every call of this model: {sent} of predicted {whole}"
    console.print(f"{target}: {report.file_bytes:,} bytes; {stays}", highlight=False, markup=False)


def _ending(name: str) -> str:
    """The first of a tensor's names; of a long one its end."""
    name = name.split(";")[0]
    return name if len(name) <= NAME else "…" + name[1 - NAME :]
