"""``coral trace``: one call as a Chrome/Perfetto trace, all times predicted. Source: docs/run.md, section Traces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from coral import CoralError, timing
from coral.apps.debug import explained
from coral.apps.direct import DirectChip
from coral.apps.files import given
from coral.apps.model import load
from coral.apps.timeline import Timeline, record
from coral.chip.layout import SCALAR_NODE
from coral.driver import CLOCK_HZ

NOTE = "all times are predicted (docs/timing.md), nothing was measured"
USB = SCALAR_NODE + 1
"""Process number of the transfers."""


def trace(
    path: Path,
    out: Path | None,
    picture: Path | None,
    *,
    inputs: Sequence[Path] = (),
    random: int | None = None,
    clock: str = "std",
    quiet: bool = False,
) -> None:
    """Runs the chip part of a model once, without USB, and writes a trace (JSON) and a picture (PNG). Of several
    programs each gets its own, numbered; the inputs of later ones are zero points where they are not the model's.
    ``quiet``: prints nothing.

    :raises CoralError: neither is asked for, or the clock is unknown; FileError, ModelError, ProgramFault
    """
    if out is None and picture is None:
        raise CoralError("nothing to write: give -o FILE.json for a trace, --picture FILE.png, or both")
    if clock not in CLOCK_HZ:
        raise CoralError(f"clock {clock!r} is unknown, there are {', '.join(CLOCK_HZ)}")
    model = load(path, device=DirectChip(), host=False)
    arrays = given(model.inputs, inputs, 0 if random is None else random)
    values = {port.number: port.codes(arrays[port.name]) for port in model.inputs}
    for number, part in enumerate(model.chips):
        ending = f"_{number}" if len(model.chips) > 1 else ""
        name = f"{path.name}{ending and f', program {number}'}"
        with explained(part.program), Console(stderr=True).status(f"running {name} with every job timed"):
            timeline = record(part, values, float(CLOCK_HZ[clock]))
        if out is not None:
            out.with_stem(out.stem + ending).write_text(json.dumps(chrome_trace(timeline, name)))
        if picture is not None:
            from coral.apps.picture import draw

            draw(timeline, name, picture.with_stem(picture.stem + ending))
        Console(quiet=quiet).print(
            f"{name}: predicted {timeline.predicted_seconds * 1e3:.3f} ms per call at "
            f"{timeline.clock_hz / 1e6:.0f} MHz, of which {timing.CALL_S * 1e3:.3f} ms fixed; "
            f"{len(timeline.slices):,} jobs",
            highlight=False,
            markup=False,
        )


def chrome_trace(timeline: Timeline, name: str) -> dict[str, Any]:
    """The trace as the JSON of Chrome and Perfetto: a process per tile, one for the scalar side and one for USB, a
    thread per unit; jobs as slices, what they waited for as slices inside them. Microseconds."""
    events = sorted(_events(timeline), key=lambda event: (event["pid"], event["tid"], event["ts"], -event["dur"]))
    pids = sorted({event["pid"] for event in events})
    threads = {(event["pid"], event["tid"]): event.pop("unit") for event in events}
    labels, order = {SCALAR_NODE: "scalar side", USB: "USB"}, {USB: -2, SCALAR_NODE: -1}
    metadata = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": labels.get(pid, f"tile {pid}")}}
        for pid in pids
    ]
    metadata += [
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": order.get(pid, pid)}}
        for pid in pids
    ]
    metadata += [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": unit}}
        for (pid, tid), unit in sorted(threads.items())
    ]
    return {
        "traceEvents": metadata + events,
        "displayTimeUnit": "ns",
        "otherData": {"model": name, "note": NOTE, "clock_hz": timeline.clock_hz},
    }


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    scale = 1e6 / timeline.clock_hz
    tids: dict[str, int] = {}

    def event(pid: int, unit: str, name: str, kind: str, start: float, end: float, **more: Any) -> dict[str, Any]:
        tid = tids.setdefault(unit, len(tids) + 1)
        times = {"ts": round(start * scale, 4), "dur": round((end - start) * scale, 4)}
        return {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "unit": unit, **times, "args": more}

    for s in timeline.slices:
        mnemonic = s.where.split(" at ")[0]
        waiting = sum(end - start for start, end, _ in s.waits)
        yield event(
            s.place, s.unit, mnemonic, "job", s.begin, s.end,
            instruction=s.where, predicted_busy_cycles=round(s.busy, 1), predicted_waiting_cycles=round(waiting, 1),
        )  # fmt: skip
        for start, end, reason in s.waits:
            yield event(s.place, s.unit, f"waits: {reason}", "wait", start, end)
    for unit, name, start, end in timeline.transfers:
        yield event(USB, unit, name, "dma", start, end)
