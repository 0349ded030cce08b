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
from coral.apps.debug import explained
from coral.apps.files import attached_labels, check_outputs, given, read_labels, write_outputs
from coral.apps.host import Way
from coral.apps.model import Array, Port, load
from coral.evaluate.detection import DETECTION
from coral.package.graph import Graph

MAX_JSON_VALUES = 4096


def run(
    path: Path,
    *,
    inputs: Sequence[Path] = (),
    outputs: Sequence[Path] = (),
    device: Literal["sim", "usb"] = "sim",
    index: int = 0,
    clock: str | None = None,
    host: bool | Way = True,
    top: int = 0,
    labels: Path | None = None,
    random: int | None = None,
    as_json: bool = False,
) -> None:
    """Runs the model once and prints what came out; FileError, ModelError and errors of driver and chip."""
    model = load(path, device=device, index=index, clock=clock, host=host)
    check_outputs(outputs, model.outputs)
    names = read_labels(labels) if labels else attached_labels(path)
    arrays = given(model.inputs, inputs, random)
    start = time.perf_counter()
    with explained(model.program), Console(stderr=True).status(f"running {model.name}"):
        result = model(arrays)
    seconds = time.perf_counter() - start
    results = result if isinstance(result, dict) else {model.outputs[0].name: result}
    write_outputs(outputs, results)
    found = {
        "model": model.name,
        "device": device,
        "clock_hz": float(model.target.clock_hz),
        "seconds_of_this_call": seconds,
        "predicted_seconds_on_a_stick": model.predicted_seconds,
        "left_to_the_host": list(model.left),
        "host": [{"operators": list(part.operators), "by": part.by, "note": part.note} for part in model.host],
        "outputs": [described(port, results[port.name], top, names) for port in model.outputs],
    }
    if (objects := detected(model.graph, results, names)) is not None:
        found["detections"] = objects
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        show(found)


def detected(graph: Graph, results: dict[str, Array], labels: Sequence[str]) -> list[dict[str, Any]] | None:
    """What a detector found, best first: class, score and box (ymin, xmin, ymax, xmax, of the image's sides); None if
    the model is none."""
    op = next((op for op in graph.operators if op.name == DETECTION), None)
    names = [graph.tensors[i].name for i in op.outputs] if op is not None else []
    if len(names) != 4 or not results.keys() >= set(names):
        return None
    boxes, classes, scores, (number, *_) = (results[name].reshape(-1) for name in names)
    return [
        {"class": int(label), "label": _named(int(label), labels), "score": float(score), "box": box.tolist()}
        for label, score, box in zip(classes, scores, boxes.reshape(-1, 4), strict=True)
    ][: int(number)]


def _named(index: int, labels: Sequence[str]) -> str:
    return labels[index] if index < len(labels) else ""


def described(port: Port, array: Array, top: int, labels: Sequence[str]) -> dict[str, Any]:
    """An output in JSON's types; ``smallest``, ``largest`` and ``mean`` are real values."""
    real = port.values(array)
    entry: dict[str, Any] = {
        "name": port.name,
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "scale": port.scale,
        "zero_point": port.zero_point,
        "sha256": hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest(),
        **{name: float(f(real)) for name, f in (("smallest", np.min), ("largest", np.max), ("mean", np.mean))},
    }
    if array.size <= MAX_JSON_VALUES:
        entry["values"] = array.tolist()
    if top:
        entry["top"] = ranking(port, array, top, labels)
    return entry


def ranking(port: Port, array: Array, top: int, labels: Sequence[str]) -> list[dict[str, Any]]:
    """The ``top`` highest elements of an output, best first; equal ones by their index."""
    flat = array.reshape(-1)
    if port.dtype.kind not in "iuf":
        raise CoralError(f"output {port.name!r} is {port.dtype}: it has no highest elements")
    order = np.argsort(-flat.astype(np.float64), kind="stable")[:top]
    scores = port.values(flat[order])
    return [
        {"index": int(k), "code": flat[k].item(), "score": float(score)}
        | ({"label": _named(k, labels)} if labels else {})
        for k, score in zip(order.tolist(), scores, strict=True)
    ]


def show(found: dict[str, Any]) -> None:
    """Everything as tables."""
    console = Console(highlight=False, markup=False)
    how = "simulated in" if found["device"] == "sim" else "took"
    console.print(
        f"{found['model']}: {how} {found['seconds_of_this_call']:.2f} s; predicted on a stick "
        f"{found['predicted_seconds_on_a_stick'] * 1e3:.2f} ms per call at {found['clock_hz'] / 1e6:.0f} MHz"
    )
    if found["left_to_the_host"]:
        names = ", ".join(found["left_to_the_host"])
        console.print(f"not run (operators of the host; pip install 'tinycoral[litert]' runs them): {names}")
    for part in found["host"]:
        if part["by"] != "numpy" or part["note"]:
            why = f" ({part['note']})" if part["note"] else ""
            console.print(f"on the host, by {part['by']}{why}: {', '.join(part['operators'])}")
    table = Table("output", "shape", "type", "smallest", "largest", "mean")
    for output in found["outputs"]:
        numbers = [f"{output[name]:.6g}" for name in ("smallest", "largest", "mean")]
        table.add_row(output["name"], " x ".join(map(str, output["shape"])), output["dtype"], *numbers)
    console.print(table)
    for output in found["outputs"]:
        if "top" in output:
            table = Table("place", "index", "score", "label", title=output["name"])
            for place, entry in enumerate(output["top"], 1):
                table.add_row(str(place), str(entry["index"]), f"{entry['score']:.6g}", entry.get("label", ""))
            console.print(table)
    if "detections" in found:
        table = Table("class", "label", "score", "ymin", "xmin", "ymax", "xmax", title="found")
        for entry in found["detections"]:
            numbers = [f"{n:.3f}" for n in (entry["score"], *entry["box"])]
            table.add_row(str(entry["class"]), entry["label"], *numbers)
        console.print(table)
