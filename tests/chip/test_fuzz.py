"""Damaged programs and files: only typed errors or results, each case within seconds, all within 1 GiB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chip.fuzz import MEMORY_BYTES

ROOT = Path(__file__).resolve().parents[2]
SLOW_CASES = int(os.environ.get("CORAL_FUZZ", "3000"))
"""The nightly run sets CORAL_FUZZ=100000."""


def fuzz(first: int, count: int, corpus: Path) -> None:
    """Cases in a process of its own: its limits are not ours, and a crash of it is a failure."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chip.fuzz", str(first), str(count), str(corpus)],
        cwd=ROOT, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert not report["bad"], f"{len(report['bad'])} bad cases: {list(report['bad'].items())[:3]}"
    assert sum(report["outcomes"].values()) == count
    assert report["peak_bytes"] < MEMORY_BYTES
    assert len(report["outcomes"]) > 4, "the damage is too dull"
    assert report["outcomes"]["complete"] < count * 0.8


def test_damaged_programs_and_files(corpus: Path) -> None:
    fuzz(0, 150, corpus)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1000 + SLOW_CASES, 500))
def test_many_damaged_programs_and_files(first: int, corpus: Path) -> None:
    fuzz(first, 500, corpus)
