"""Detectors as converters write them: SSD with TFLite's post-processing, and YOLO with everything that is in it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from detectors import OPTIONS as DETECTOR
from detectors import flex

import coral
from compiler.random_graphs import NONE
from compiler.test_ladder import Detector
from coral.apps.direct import DirectChip
from coral.chip import Chip
from coral.compiler import compile_models
from coral.evaluate.detection import DETECTION
from coral.evaluate.graph import run_operators
from coral.package.graph import Graph, Operator, Tensor
from coral.package.graph_file import write_model

CLASSES, ANCHORS = 5, 3
NO_ACTIVATION = {"fused_activation_function": "NONE"}


class Ssd(Detector):
    """Maps of 1/4 and 1/8 of the image."""

    def __init__(self, y: int, x: int) -> None:
        super(Detector, self).__init__(y * 8192 + x)
        self.tensors, self.inputs, self.open = [], [], []
        self.inputs = [last := self.tensor((1, y, x, 3))]
        coarse = self.layer(fine := self.layer(self.layer(last, 8, 3, 2), 16, 3, 2), 24, 3, 2)
        boxes, scores = (self.head((fine, coarse), n) for n in (4, CLASSES + 1))
        shares = self.tensor(self.tensors[scores].shape)
        lowest = np.array([-128 if self.dtype == "i1" else 0])
        self.tensors[shares] = replace(self.tensors[shares], scales=np.array([1 / 256], "f4"), zero_points=lowest)
        self.op("LOGISTIC", [scores], [shares])
        anchors = self.rng.uniform(0.1, 0.9, (self.tensors[boxes].shape[1], 4)).astype(np.float32)
        given = (boxes, shares, self.floats("anchors", anchors.shape, anchors))
        found = tuple(self.floats(name, ()) for name in ("corners", "classes", "scores", "number"))
        options = DETECTOR | {"num_classes": CLASSES, "nms_score_threshold": 0.5}
        self.operators.append(Operator(DETECTION, given, found, options, custom_options=flex(options), custom=True))
        self.open = [*found]

    def floats(self, name: str, shape: tuple[int, ...], data: np.ndarray | None = None) -> int:
        self.tensors.append(Tensor(name, shape, 0, np.dtype("f4"), *NONE, 0, data, False))
        return len(self.tensors) - 1

    def head(self, maps: tuple[int, ...], values: int) -> int:
        """[1, boxes, values] of convolutions on maps, whose quantisations differ."""
        parts = []
        for m in maps:
            y = self.layer(m, ANCHORS * values, 3)
            shape = (1, math.prod(self.tensors[y].shape) // values, values)
            parts.append(self.tensor(shape, y))
            self.op("RESHAPE", [y, self.constant(np.array(shape, np.int32))], [parts[-1]], new_shape=shape)
        joined = self.tensor((1, sum(self.tensors[p].shape[1] for p in parts), values))
        self.op("CONCATENATION", parts, [joined], axis=1, **NO_ACTIVATION)
        return joined


def ssd(y: int, x: int) -> Graph:
    found = Ssd(y, x)
    return Graph("main", tuple(found.tensors), tuple(found.inputs), tuple(found.open), tuple(found.operators))


@pytest.mark.parametrize("size", [(64, 64), (48, 80), (37, 53)])
def test_a_detector_runs_to_its_boxes(size: tuple[int, int]) -> None:
    graph = ssd(*size)
    (one,) = compile_models([write_model([graph])])
    on_chip = {n for s in one.partition.segments for n in s.operators}
    assert {graph.operators[n].name for n in range(len(graph.operators)) if n not in on_chip} <= {
        "RESHAPE", "CONCATENATION", "LOGISTIC", DETECTION,
    }  # fmt: skip
    assert len(one.programs) == 1
    model = coral.load(one.data, device=DirectChip(Chip(seed=1)))
    image = np.random.default_rng(2).integers(0, 256, (1, *size, 3)).astype(np.uint8).view(graph.tensors[0].dtype)
    found, expected = model(image), run_operators(graph, range(len(graph.operators)), {graph.inputs[0]: image})
    assert isinstance(found, dict)
    for i in graph.outputs:
        np.testing.assert_array_equal(found[graph.tensors[i].name], expected[i])
    assert found["number"][0] > 0


def test_the_command_names_what_was_found(run: Any, tmp_path: Path) -> None:
    graph = ssd(64, 64)
    (one,) = compile_models([write_model([graph])])
    path = one.write(tmp_path / "ssd_edgetpu.tflite")
    (tmp_path / "labels.txt").write_text("0 person\n1 car\n4 dog\n")
    code, text, _ = run("run", path, "--random", 3, "--labels", tmp_path / "labels.txt", "--json")
    found = json.loads(text)
    assert code == 0
    values = {output["name"]: output["values"] for output in found["outputs"]}
    assert len(found["detections"]) == values["number"][0] > 0
    for k, entry in enumerate(found["detections"]):
        label = ["person", "car", "", "", "dog"][entry["class"]]
        assert entry == {"class": values["classes"][0][k], "label": label, "score": values["scores"][0][k],
                         "box": values["corners"][0][k]}  # fmt: skip
    assert "person" in run("run", path, "--random", 3, "--labels", tmp_path / "labels.txt")[1] or "dog" in text
    assert "detections" not in json.loads(run("run", path, "--random", 3, "--json", "--no-host")[1])


class Yolo(Detector):
    """YOLOv5's graph as it is exported in int8: SiLU, C3 blocks, SPPF, two ways through three scales, three heads."""

    def __init__(self, size: int, width: int, values: int = 85) -> None:
        super(Detector, self).__init__(size)
        self.dtype, self.kind, self.per_channel = "i1", 9, True
        self.tensors, self.open = [], []
        self.inputs = [image := self.tensor((1, size, size, 3))]
        w = width
        x = self.c3(self.silu(self.silu(image, w, 3, 2), 2 * w, 3, 2), 2 * w)
        fine = self.c3(self.silu(x, 4 * w, 3, 2), 4 * w)
        middle = self.c3(self.silu(fine, 8 * w, 3, 2), 8 * w)
        x = self.pyramid(self.c3(self.silu(middle, 16 * w, 3, 2), 16 * w), 16 * w)
        coarse = self.silu(x, 8 * w, 1)
        x = self.c3(self.joined(self.doubled(coarse), middle), 8 * w, short=False)
        between = self.silu(x, 4 * w, 1)
        first = self.c3(self.joined(self.doubled(between), fine), 4 * w, short=False)
        second = self.c3(self.joined(self.silu(first, 4 * w, 3, 2), between), 8 * w, short=False)
        third = self.c3(self.joined(self.silu(second, 8 * w, 3, 2), coarse), 16 * w, short=False)
        heads = [self.head(x, values) for x in (first, second, third)]
        boxes = sum(self.tensors[x].shape[2] for x in heads)
        self.op("CONCATENATION", heads, [self.tensor((1, 3, boxes, values), heads[0])], axis=2, **NO_ACTIVATION)
        self.open = self.open[-1:]

    def silu(self, x: int, n: int, kernel: int, stride: int = 1) -> int:
        share = self.share(y := self.layer(x, n, kernel, stride))
        found = self.tensor(self.tensors[y].shape)
        scale = self.tensors[y].scales * np.float32(0.6)
        self.tensors[found] = replace(self.tensors[found], scales=scale)
        self.op("MUL", [y, share], [found], **NO_ACTIVATION)
        return found

    def share(self, x: int) -> int:
        found = self.tensor(self.tensors[x].shape)
        scales, lowest = np.array([1 / 256], np.float32), np.array([-128])
        self.tensors[found] = replace(self.tensors[found], scales=scales, zero_points=lowest)
        self.op("LOGISTIC", [x], [found])
        return found

    def joined(self, *parts: int) -> int:
        shapes = [self.tensors[part].shape for part in parts]
        found = self.tensor((*shapes[0][:3], sum(shape[3] for shape in shapes)), parts[0])
        self.op("CONCATENATION", [*parts], [found], axis=3, **NO_ACTIVATION)
        return found

    def c3(self, x: int, n: int, *, short: bool = True) -> int:
        a = self.silu(x, n // 2, 1)
        b = self.silu(self.silu(a, n // 2, 1), n // 2, 3)
        if short:
            total = self.tensor(self.tensors[a].shape)
            self.op("ADD", [a, b], [total], **NO_ACTIVATION)
            b = total
        return self.silu(self.joined(b, self.silu(x, n // 2, 1)), n, 1)

    def pyramid(self, x: int, n: int) -> int:
        parts = [self.silu(x, n // 2, 1)]
        window = {"padding": "SAME", "stride_h": 1, "stride_w": 1, "filter_height": 5, "filter_width": 5}
        for _ in range(3):
            y = self.tensor(self.tensors[parts[0]].shape, parts[0])
            self.op("MAX_POOL_2D", [parts[-1]], [y], **window, **NO_ACTIVATION)
            parts.append(y)
        return self.silu(self.joined(*parts), n, 1)

    def doubled(self, x: int) -> int:
        _, h, w, c = self.tensors[x].shape
        y, size = self.tensor((1, 2 * h, 2 * w, c), x), self.constant(np.array([2 * h, 2 * w], np.int32))
        self.op("RESIZE_NEAREST_NEIGHBOR", [x, size], [y], align_corners=False, half_pixel_centers=True)
        return y

    def head(self, x: int, values: int) -> int:
        y = self.layer(x, 3 * values, 1)
        _, h, w, _ = self.tensors[y].shape
        shape = (1, h * w, 3, values)
        z, turned = self.tensor(shape, y), self.tensor((1, 3, h * w, values), y)
        self.op("RESHAPE", [y, self.constant(np.array(shape, np.int32))], [z], new_shape=shape)
        self.op("TRANSPOSE", [z, self.constant(np.array([0, 2, 1, 3], np.int32))], [turned])
        return self.share(turned)


@pytest.mark.parametrize(
    ("size", "width"),
    [(64, 8), pytest.param(160, 16, marks=pytest.mark.slow), pytest.param(320, 16, marks=pytest.mark.slow)],
)
def test_yolo_is_one_program_up_to_its_heads(size: int, width: int) -> None:
    yolo = Yolo(size, width)
    graph = Graph("main", tuple(yolo.tensors), tuple(yolo.inputs), tuple(yolo.open), tuple(yolo.operators))
    (one,) = compile_models([write_model([graph])])
    on_chip = {n for s in one.partition.segments for n in s.operators}
    left = [graph.operators[n].name for n in range(len(graph.operators)) if n not in on_chip]
    assert len(one.programs) == 1
    assert left == ["TRANSPOSE", "LOGISTIC"] * 3 + ["CONCATENATION"]
    image = np.random.default_rng(size).integers(-128, 128, (1, size, size, 3)).astype(np.int8)
    found = coral.load(one.data, device=DirectChip(Chip(seed=size)))(image)
    expected = run_operators(graph, range(len(graph.operators)), {graph.inputs[0]: image})
    np.testing.assert_array_equal(found, expected[graph.outputs[0]])
