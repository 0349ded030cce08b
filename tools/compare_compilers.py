"""Our programs beside Google's for the models of the corpus, as a table for docs/compiler.md.

python tools/compare_compilers.py ../shared/corpus [--timeline]    # that runs every program once: some minutes
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from coral.apps.direct import DirectChip
from coral.apps.model import load
from coral.apps.timeline import record
from coral.compiler import compile_models
from coral.compiler.report import ProgramReport, program_report
from coral.package.tflite_file import read_edgetpu

HEADER = (
    "| model | programs | instruction bytes | steps of the busiest tile | rows on the ring | bytes over USB per call | "
    "ms at 250 MHz | ms at 500 MHz |"
)


def usb(report: ProgramReport) -> int:
    """Bytes of a call, both ways."""
    return report.to_chip_bytes + report.from_chip_bytes


def timeline_seconds(file: Path | bytes) -> float:
    """Predicted seconds of a call of all programs, along their dependencies (docs/timing.md, Timeline)."""
    return sum(record(part, {}).predicted_seconds for part in load(file, device=DirectChip(), host=False).chips)


def mean(ratios: list[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main(corpus: Path, timeline: bool) -> None:
    print("Each cell: Google's, ours. Times are predicted.\n")
    print(HEADER + " timeline, ms at 250 MHz |" * timeline)
    print("|---" * (8 + timeline) + "|")
    ratios, others = [], []
    for google in sorted(corpus.glob("*/*_edgetpu.tflite")):
        source = google.with_name(google.name.replace("_edgetpu", ""))
        if not source.exists():
            continue
        (ours,) = compile_models([source])
        theirs = program_report(read_edgetpu(google).package.execution, 250e6)
        reports = [ours.report(clock).programs for clock in (250e6, 500e6)]
        fast = program_report(read_edgetpu(google).package.execution, 500e6)
        parts = reports[0]
        ratios.append(theirs.seconds / sum(p.seconds for p in parts))
        cells = [
            source.stem,
            f"1, {len(parts)}",
            f"{16 * theirs.instruction_words:,}, {16 * sum(p.instruction_words for p in parts):,}",
            f"{theirs.busiest_tile_steps:,}, {sum(p.busiest_tile_steps for p in parts):,}",
            f"{theirs.ring_rows:,}, {sum(p.ring_rows for p in parts):,}",
            f"{usb(theirs):,}, {sum(map(usb, parts)):,}",
            f"{theirs.seconds * 1e3:.3f}, {sum(p.seconds for p in parts) * 1e3:.3f}",
            f"{fast.seconds * 1e3:.3f}, {sum(p.seconds for p in reports[1]) * 1e3:.3f}",
        ]
        if timeline:
            both = timeline_seconds(google), timeline_seconds(ours.data)
            others.append(both[0] / both[1])
            cells.append(f"{both[0] * 1e3:.3f}, {both[1] * 1e3:.3f}")
        print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\nGeometric mean of Google's predicted time over ours at 250 MHz: {mean(ratios):.2f}.")
    if timeline:
        print(f"By the timeline: {mean(others):.2f}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--timeline" in sys.argv[2:])
