"""``coral disasm``: the instructions of a file as text."""

from __future__ import annotations

from pathlib import Path

from coral.isa import IsaError, iter_decode
from coral.isa.text import format_lines
from coral.package.bitstreams import bitstreams_of


def disasm(path: Path, only: int | None = None) -> None:
    """Print every bitstream of ``path``, or the one of number ``only``, each under a comment that names it.

    PackageError or IsaError (with the word) where the file cannot be read.
    """
    streams = bitstreams_of(path)
    if only is not None and only >= len(streams):
        raise IsaError(f"{path.name} has {len(streams)} bitstreams (0..{len(streams) - 1}), there is no {only}")
    for number, stream in enumerate(streams):
        if only is None or number == only:
            print(f"# bitstream {number}: {stream.label}, {len(stream.data)} bytes")
            for line in format_lines(iter_decode(stream.data)):
                print(line)
