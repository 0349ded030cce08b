"""Our programs beside Google's for the models of the corpus, as a table for docs/compiler.md.

python tools/compare_compilers.py ../shared/corpus
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

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


def main(corpus: Path) -> None:
    print("Each cell: Google's, ours. Times are predicted.\n")
    print(HEADER)
    print("|---" * 8 + "|")
    ratios = []
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
        print("| " + " | ".join(cells) + " |", flush=True)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"\nGeometric mean of Google's predicted time over ours at 250 MHz: {mean:.2f}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
