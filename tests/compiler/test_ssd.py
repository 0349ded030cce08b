"""A detector as converters write it: two heads on two maps, joined, and TFLite's post-processing on the host."""

from __future__ import annotations

import math
from dataclasses import replace

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
        self.op("CONCATENATION", parts, [joined], axis=1, fused_activation_function="NONE")
        return joined


@pytest.mark.parametrize("size", [(64, 64), (48, 80), (37, 53)])
def test_a_detector_runs_to_its_boxes(size: tuple[int, int]) -> None:
    ssd = Ssd(*size)
    graph = Graph("main", tuple(ssd.tensors), tuple(ssd.inputs), tuple(ssd.open), tuple(ssd.operators))
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
