"""``TFLite_Detection_PostProcess`` against TFLite's kernel, on random heads of a detector."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from detectors import OPTIONS, flex
from evaluate_graphs import tensor

from coral.evaluate import EvaluateError
from coral.evaluate.detection import DETECTION
from coral.evaluate.graph import run_operators
from coral.package.graph import Graph, Operator, custom_options, read_model
from coral.package.graph_file import write_model


def detector(boxes: int, columns: int, options: dict[str, Any], seed: int, dtype: str = "u1") -> Graph:
    """Encodings and scores are inputs, anchors a constant; the results have no shapes, as in converters' files."""
    rng = np.random.default_rng(seed)
    quant = (lambda scale, zero: ([scale], [zero])) if dtype != "f4" else (lambda *_: ([], []))
    places = np.concatenate([rng.uniform(0.2, 0.8, (boxes, 2)), rng.uniform(0.1, 0.4, (boxes, 2))], 1).astype("f4")
    anchors = tensor("anchors", (boxes, 4), "f4", data=places)
    if dtype != "f4":
        codes = np.rint(places * 200).astype(np.uint8)
        anchors = tensor("anchors", (boxes, 4), "u1", [1 / 200], [0], codes)
    given = [
        tensor("boxes", (1, boxes, 4), dtype, *quant(0.06, 120)),
        tensor("scores", (1, boxes, columns), dtype, *quant(1 / 256, 0)),
    ]
    found = [tensor(name, (), "f4") for name in ("corners", "classes", "found", "number")]
    op = Operator(DETECTION, (0, 1, 2), (3, 4, 5, 6), options, custom_options=flex(options), custom=True)
    tensors = tuple(replace(t, type=3 if t.dtype == np.uint8 else 0) for t in (*given, anchors, *found))
    return Graph("main", tensors, (0, 1), (3, 4, 5, 6), (op,))


def heads(graph: Graph, seed: int, *, distinct: bool) -> dict[int, np.ndarray]:
    """``distinct``: no box has two equal scores; which comes first is then the kernel's partial sort's affair."""
    rng = np.random.default_rng(seed)
    (boxes, scores), dtype = (graph.tensors[i].shape for i in (0, 1)), graph.tensors[0].dtype
    codes = rng.integers(0, 256, scores)
    if distinct:
        codes = rng.permuted(np.tile(np.arange(256), (scores[1], 1)), axis=1)[None, :, : scores[2]]
    if dtype == np.float32:
        return {0: rng.normal(0, 3, boxes).astype("f4"), 1: (codes / 256).astype("f4")}
    return {0: rng.integers(60, 180, boxes).astype(np.uint8), 1: codes.astype(np.uint8)}


def of_litert(graph: Graph, x: dict[int, np.ndarray]) -> list[np.ndarray]:
    litert: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert: its kernel NOT compared")
    interpreter = litert.Interpreter(model_content=write_model([graph]))
    interpreter.allocate_tensors()
    for detail, value in zip(interpreter.get_input_details(), x.values(), strict=True):
        interpreter.set_tensor(detail["index"], value)
    interpreter.invoke()
    return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]


@pytest.mark.parametrize("dtype", ["u1", "f4"])
@pytest.mark.parametrize("regular", [False, True])
@pytest.mark.parametrize(
    ("boxes", "background", "per_box", "most"),
    [(60, 1, 1, 10), (200, 0, 3, 7), (1, 1, 1, 4), (40, 1, 9, 100), (300, 1, 1, 3)],
)
def test_equal_to_tflite(dtype: str, regular: bool, boxes: int, background: int, per_box: int, most: int) -> None:
    options = OPTIONS | {"use_regular_nms": regular, "max_classes_per_detection": per_box, "max_detections": most}
    graph = detector(boxes, 7 + background, options, boxes, dtype)
    for seed in range(8):
        x = heads(graph, seed, distinct=per_box > 1)
        ours, theirs = run_operators(graph, [0], x), of_litert(graph, x)
        number = int(theirs[3][0])
        assert ours[6].tolist() == theirs[3].tolist()
        filled = np.zeros(most * per_box, bool)  # the kernel leaves the rest as it finds it
        filled.reshape(most, per_box)[:number, :7] = True
        if regular:
            filled = np.arange(most * per_box) < number
        for mine, his in zip((ours[i] for i in (3, 4, 5)), theirs[:3], strict=True):
            assert (mine.shape, mine.dtype) == (his.shape, his.dtype)
            np.testing.assert_array_equal(mine[0, filled], his[0, filled])
            assert not mine[0, ~filled].any()


def test_options_are_read_from_the_file() -> None:
    graph = read_model(write_model([detector(5, 8, OPTIONS, 0)])).main
    (op,) = graph.operators
    assert (op.name, op.custom) == (DETECTION, True)
    assert op.options == {k: pytest.approx(v) for k, v in OPTIONS.items()}
    assert type(op.options["use_regular_nms"]) is bool


def test_damaged_options_are_none() -> None:
    data, rng = flex(OPTIONS), np.random.default_rng(0)
    assert custom_options(b"") == {}
    for _ in range(2000):
        damaged = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(data))] = rng.integers(256)
        found = custom_options(bytes(damaged[: rng.integers(1, len(data) + 1)]))
        assert all(isinstance(v, int | float) for v in found.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_classes": None}, "lack num_classes"), ({"num_classes": 5}, "do not belong together"),
     ({"max_detections": 0}, "0 detections of 1 classes"), ({"max_detections": 1 << 40}, "supported are 1 to 10000"),
     ({"y_scale": "ten"}, "lack y_scale"), ({"h_scale": 0.0}, "not finite"), ({"y_scale": float("nan")}, "not finite")],
)  # fmt: skip
def test_refusals(change: dict[str, Any], message: str) -> None:
    graph = detector(20, 8, {k: v for k, v in (OPTIONS | change).items() if v is not None}, 0)
    with pytest.raises(EvaluateError, match=message):
        run_operators(graph, [0], heads(graph, 0, distinct=False))
