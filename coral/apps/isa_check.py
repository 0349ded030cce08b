"""``coral isa check``: are all instructions of these files understood?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from coral.isa.check import Bitstream, Report, check_streams
from coral.package.bitstreams import bitstreams_of, find_files
from coral.package.program import PackageError

SHOWN_PROBLEMS = 40


def isa_check(paths: Iterable[Path], as_json: bool) -> bool:
    """Check all programs found at ``paths`` and print the result; True if nothing is wrong.

    A file that cannot be read counts as a failure; PackageError if there is no file at all.
    """
    files = find_files(paths)
    streams, digests, unreadable, programs, distinct = [], set(), [], 0, 0
    for path in files:
        try:
            found = bitstreams_of(path)
        except PackageError as error:
            unreadable.append(f"{path}: {error}")
            continue
        digest = hashlib.sha256(path.read_bytes()).digest()
        programs += len({stream.program for stream in found})
        distinct += 0 if digest in digests else len(found)
        digests.add(digest)
        streams += [Bitstream(stream.label, stream.kind, stream.data, stream.chunk) for stream in found]
    console = Console(stderr=True)
    report = check_streams(track(streams, "checking", console=console, transient=True, disable=not console.is_terminal))
    report.problems[:0] = unreadable
    counts = {
        "files": len(files),
        "distinct_files": len(digests),
        "unreadable_files": len(unreadable),
        "programs": programs,
        "bitstreams_of_distinct_files": distinct,
    }
    if as_json:
        print(json.dumps(counts | report.as_dict(), indent=1))
    else:
        print("\n".join(_lines(counts, report)))
    return report.ok


def _lines(counts: dict[str, int], report: Report) -> Iterable[str]:
    numbers: dict[str, Any] = {name: value for name, value in vars(report).items() if isinstance(value, int)}
    for name, value in (counts | numbers).items():
        yield f"{value:8d}  {name.replace('_', ' ')}"
    yield "\nbitstreams by kind: " + _counts(report.kinds)
    yield "halt codes: " + _counts(report.halt_codes)
    for kind, outcomes in report.first_sequence.items():
        yield f"first sequence number in {kind}: {_counts(outcomes)}"
    yield "\ninstructions (equal bitstreams once):"
    yield from (f"{n:8d}  {name}" for name, n in sorted(report.opcodes.items()))
    yield "\nrules (equal bitstreams once):"
    yield from (f"  {rule}: {_counts(outcomes)}" for rule, outcomes in report.rules.items())
    yield "\nall is well" if report.ok else f"\n{len(report.problems)} problems:"
    yield from (f"  {problem}" for problem in report.problems[:SHOWN_PROBLEMS])
    if len(report.problems) > SHOWN_PROBLEMS:
        yield f"  ... and {len(report.problems) - SHOWN_PROBLEMS} more (--json lists them all)"


def _counts(counter: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counter.items())
