"""The instruction streams in compiled files and bare programs, for the tools that read instructions.

Source: docs/package.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from coral.package.check import WORD_BYTES
from coral.package.graph import load
from coral.package.program import PackageError
from coral.package.tflite_file import read_parts

BARE_SUFFIX = ".coral"
COMPILED_SUFFIX = "_edgetpu.tflite"


class Stream(NamedTuple):
    """One chunk of instructions: ``kind`` is the name of a Kind, or ``RAW`` for a bare program."""

    label: str
    kind: str
    program: int
    chunk: int
    data: bytes


def bitstreams_of(path: Path | str) -> list[Stream]:
    """The streams of a ``*.coral`` or compiled TFLite file; PackageError when it is damaged or of no such kind."""
    path = Path(path)
    if path.suffix == BARE_SUFFIX:
        data = load(path)
        if not data or len(data) % WORD_BYTES:
            raise PackageError(f"{path.name} has {len(data)} bytes, no multiple of the {WORD_BYTES}-byte word")
        return [Stream(path.name, "RAW", 0, 0, data)]
    parts = read_parts(path)
    where = [f"{path.name} operator {part.operator}" if len(parts) > 1 else path.name for part in parts]
    programs = [(name, p) for name, part in zip(where, parts, strict=True) for p in part.package.programs]
    return [
        Stream(f"{name} {program.kind.name} chunk {chunk}", program.kind.name, index, chunk, bitstream.data)
        for index, (name, program) in enumerate(programs)
        for chunk, bitstream in enumerate(program.bitstreams)
    ]


def find_files(paths: Iterable[Path | str]) -> list[Path]:
    """The given files, and the programs in the given folders (recursively), sorted, each once.

    PackageError for a path that does not exist, or when nothing is found.
    """
    found: set[Path] = set()
    for path in map(Path, paths):
        if path.is_dir():
            found.update(p for p in path.rglob("*") if p.name.endswith((COMPILED_SUFFIX, BARE_SUFFIX)) and p.is_file())
        elif path.is_file():
            found.add(path)
        else:
            raise PackageError(f"{path} does not exist")
    if not found:
        raise PackageError(f"no *{COMPILED_SUFFIX} or *{BARE_SUFFIX} in {', '.join(map(str, paths)) or 'nothing'}")
    return sorted(found)
