"""``coral selftest``: the steps of ``coral.apps.probes`` on one stick, with a report. See docs/selftest.md."""

from __future__ import annotations

import json
import platform
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from coral import CoralError, __version__
from coral.apps.probes import Step, all_steps
from coral.apps.probes.bench import Bench
from coral.chip.errors import ChipError
from coral.driver import TransferFailed
from coral.stick import StickError

GOOD = ("ok", "observed")
HANGS = [kind.__name__ for kind in (TransferFailed, *TransferFailed.__subclasses__())]


def selftest(
    kind: Literal["usb", "sim"],
    index: int,
    report: Path | None,
    as_json: bool,
    bold: bool,
    only: list[str],
    list_: bool,
) -> bool:
    """Runs the steps, prints and writes what they found; True if all is as assumed. Stops at the first hang.

    ``only``: names, * allowed; else all steps, the bold ones if ``bold``. ``list_``: only names them. The report's file
    is ``coral-selftest-<kind>.json`` unless given, none ``as_json``. Errors of finding the stick, or of being allowed
    to open it, pass through.
    """
    steps = [
        s for s in all_steps() if any(fnmatch(s.name, name) for name in only) or (not only and (bold or not s.bold))
    ]
    if not steps:
        raise CoralError(f"no step is called {' or '.join(only)}; `coral selftest --list` names them")
    if list_:
        for step in all_steps():
            rows = ", ".join(map(str, step.rows))
            print(f"{step.name}{' (bold)' if step.bold else ''}{f' [{rows}]' if rows else ''}: {step.about}")
        return True
    bench, results, stopped = Bench(kind, index), [], None
    with suppress(TransferFailed):  # a stick that does not answer is the first step's hang
        _ = bench.stick
    target = report or (None if as_json else Path(f"coral-selftest-{kind}.json"))
    try:
        for step in steps:
            results.append(run_step(step, bench))
            if not as_json:
                print("{status:8} {step:34} {answer}".format(**results[-1]), flush=True)
            if results[-1]["status"] == "hang":
                stopped = step.name
                break
    except KeyboardInterrupt:
        stopped = "interrupted"
    finally:
        bench.close()
        counts = Counter(result["status"] for result in results)
        passed = stopped is None and set(counts) <= {*GOOD}
        text = json.dumps(_header(bench) | {"passed": passed, "stopped_at": stopped, "steps": results}, indent=1)
        if target is not None:
            target.write_text(text + "\n")
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(text if as_json else f"{summary}{f'; stopped at {stopped}' if stopped else ''}; report: {target}")
    return passed


def run_step(step: Step, bench: Bench) -> dict[str, Any]:
    """One line of the report. A transfer that failed is a hang, even if the driver has made it good."""
    start, before = time.perf_counter(), bench.faults
    outcome: dict[str, Any] = {"step": step.name, "about": step.about, "rows": step.rows}
    try:
        found = step.run(bench)
        outcome |= asdict(found) | {"status": found.status}
    except Exception as error:
        refused = isinstance(error, ChipError | StickError) and step.bold
        status = "hang" if isinstance(error, TransferFailed) else "observed" if refused else "error"
        answer = f"{'refused by the simulated chip: ' if refused else ''}{type(error).__name__}: {error}"
        outcome |= {"status": status, "answer": answer}
        if not isinstance(error, CoralError):
            outcome["traceback"] = traceback.format_exc()
    if any(bench.faults[name] > before[name] for name in HANGS):
        outcome["status"] = "hang"
    if outcome["status"] not in GOOD:
        outcome["registers"] = {name: f"{value:#x}" for name, value in bench.registers().items()}
        outcome["faults"] = dict(bench.faults)
    return outcome | {"seconds": round(time.perf_counter() - start, 3)}


def _header(bench: Bench) -> dict[str, Any]:
    versions = {"tinycoral": __version__, "python": sys.version.split()[0], "system": platform.platform()}
    for package in ("tinygrad", "numpy", "libusb1"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"versions": versions, "kind": bench.kind, "stick": asdict(bench.found)}
