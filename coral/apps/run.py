"""``coral run``: a compiled model on files. Source: docs/run.md."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from coral import CoralError
from coral.apps.debug import explain
from coral.apps.files import check_outputs, given, read_labels, write_outputs
from coral.apps.model import Array, Model, Port, load
from coral.chip import ChipError

MAX_JSON_VALUES = 4096


def run(
    path: Path,
    *,
    inputs: Sequence[Path] = (),
    outputs: Sequence[Path] = (),
    device: Literal["sim", "usb"] = "sim",
    index: int = 0,
    clock: str | None = None,
    host: bool = True,
    top: int = 0,
    labels: Path | None = None,
    random: int | None = None,
    as_json: bool = False,
) -> None:
    """Runs the model once and prints what came out; FileError, ModelError and errors of driver and chip."""
    model = load(path, device=device, index=index, clock=clock, host=host)
    check_outputs(outputs, model.outputs)
    names = read_labels(labels) if labels else []
    arrays = given(model.inputs, inputs, random)
    start = time.perf_counter()
    try:
        result = model(arrays)
    except ChipError as error:
        raise explain(error, model.program) from error
    seconds = time.perf_counter() - start
    results = result if isinstance(result, dict) else {model.outputs[0].name: result}
    write_outputs(outputs, results)
    best = {port.name: ranking(port, results[port.name], top, names) for port in model.outputs} if top else {}
    if as_json:
        print(json.dumps(report(model, device, seconds, results, best), indent=1))
    else:
        show(model, device, seconds, results, best)


def ranking(port: Port, array: Array, top: int, labels: Sequence[str]) -> list[dict[str, Any]]:
    """The ``top`` highest elements of an output, best first; equal ones by their index."""
    flat = array.reshape(-1)
    if port.dtype.kind not in "iuf":
        raise CoralError(f"output {port.name!r} is {port.dtype}: it has no highest elements")
    order = np.argsort(-flat.astype(np.float64), kind="stable")[:top]
    scores = port.values(flat[order])
    return [
        {"index": int(k), "code": flat[k].item(), "score": float(score)}
        | ({"label": labels[k] if k < len(labels) else ""} if labels else {})
        for k, score in zip(order.tolist(), scores, strict=True)
    ]


def report(
    model: Model, device: str, seconds: float, results: dict[str, Array], best: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Everything as JSON."""
    outputs = []
    for port in model.outputs:
        array = results[port.name]
        entry: dict[str, Any] = {"name": port.name, "shape": list(array.shape), "dtype": array.dtype.name}
        entry |= {"scale": port.scale, "zero_point": port.zero_point}
        entry["sha256"] = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        if array.size <= MAX_JSON_VALUES:
            entry["values"] = array.tolist()
        if port.name in best:
            entry["top"] = best[port.name]
        outputs.append(entry)
    return {
        "model": model.name,
        "device": device,
        "seconds_of_this_call": seconds,
        "predicted_seconds_on_a_stick": model.predicted_seconds,
        "left_to_the_host": list(model.left),
        "outputs": outputs,
    }


def show(
    model: Model, device: str, seconds: float, results: dict[str, Array], best: dict[str, list[dict[str, Any]]]
) -> None:
    """Everything as tables."""
    console = Console()
    how = "simulated in" if device == "sim" else "took"
    console.print(
        f"{model.name}: {how} {seconds:.2f} s; predicted on a stick {model.predicted_seconds * 1e3:.2f} ms "
        f"per call at {float(model.target.clock_hz) / 1e6:.0f} MHz",
        highlight=False,
        markup=False,
    )
    if model.left:
        console.print(
            f"not run (operators of the host; pip install 'tinycoral[litert]' runs them): {', '.join(model.left)}",
            highlight=False,
            markup=False,
        )
    table = Table("output", "shape", "type", "smallest", "largest", "mean")
    for port in model.outputs:
        array = results[port.name]
        numbers = [f"{f(port.values(array)):.6g}" for f in (np.min, np.max, np.mean)]
        table.add_row(port.name, " x ".join(map(str, array.shape)), array.dtype.name, *numbers)
    console.print(table, markup=False)
    for name, entries in best.items():
        table = Table("place", "index", "score", "label", title=name)
        for place, entry in enumerate(entries, 1):
            table.add_row(str(place), str(entry["index"]), f"{entry['score']:.6g}", entry.get("label", ""))
        console.print(table)
