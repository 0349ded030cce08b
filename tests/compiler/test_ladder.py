"""A ladder of image sizes of a detector: all compile, all are exact, and the predicted time grows with the image.

Large images take several programs; codegen/network/test_ladder.py looks at single ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coral
from compiler.random_graphs import Grower
from coral.apps.direct import DirectChip
from coral.apps.verify import verify_pair
from coral.chip import Chip
from coral.codegen import ShapeError
from coral.codegen import network as nw
from coral.compiler import compile_models, partition
from coral.evaluate.graph import run_operators
from coral.package.graph import Graph
from coral.package.graph_file import write_model

MOST = 1.3
"""Largest predicted time of a size over the line through its neighbours'."""


class Detector(Grower):
    """Three scales, a residual sum, a concatenation, two heads."""

    def __init__(self, y: int, x: int) -> None:
        super().__init__(y * 8192 + x)
        self.tensors, self.inputs, self.open = [], [], []
        last = self.tensor((1, y, x, 3))
        self.inputs = [last]
        last = self.layer(last, 16, 3, 2)
        a = self.layer(self.layer(last, 0, 3), 24, 1)
        b = self.layer(self.layer(a, 0, 3), 24, 1)
        total = self.tensor(self.tensors[a].shape)
        self.op("ADD", [a, b], [total], fused_activation_function="RELU")
        fine = self.layer(total, 32, 3, 2)
        other = self.layer(self.layer(self.layer(fine, 64, 1), 0, 3), 32, 1)
        shape = self.tensors[fine].shape
        both = self.tensor((*shape[:3], 64))
        self.op("CONCATENATION", [fine, other], [both], axis=3, fused_activation_function="NONE")
        self.layer(both, 24, 3)
        self.layer(self.layer(self.layer(both, 48, 3, 2), 0, 3), 24, 1)

    def layer(self, x: int, n: int, kernel: int, stride: int = 1) -> int:
        """A convolution with ``n`` results, or a depthwise layer."""
        _, h, w, c = self.tensors[x].shape
        y = self.tensor((1, -(-h // stride), -(-w // stride), n or c))
        shape = (n, kernel, kernel, c) if n else (1, kernel, kernel, c)
        weights, bias = self.weights(shape, 0 if n else 3, kernel * kernel * (c if n else 1), x, y)
        options: dict[str, Any] = {"padding": "SAME", "stride_h": stride, "stride_w": stride}
        name = "CONV_2D" if n else "DEPTHWISE_CONV_2D"
        more = {"dilation_h_factor": 1, "dilation_w_factor": 1} if n else {"depth_multiplier": 1}
        self.op(name, [x, weights, bias], [y], fused_activation_function="NONE", **options, **more)
        return y


def compiled(y: int, x: int) -> tuple[Graph, Any]:
    graph = Detector(y, x).graph()
    (one,) = compile_models([write_model([graph])])
    return graph, one


def check(y: int, x: int) -> None:
    """Nothing but cutting and joining is left to the host, and every value of both heads is the judge's."""
    graph, one = compiled(y, x)
    assert set(one.partition.reasons.values()) <= {"cuts or joins bands of rows of an image"}
    model = coral.load(one.data, device=DirectChip(Chip(seed=y + x)))
    image = np.random.default_rng(y).integers(0, 256, (1, y, x, 3)).astype(np.uint8).view(graph.tensors[0].dtype)
    got, expected = model(image), run_operators(graph, range(len(graph.operators)), {0: image})
    for i in graph.outputs:
        np.testing.assert_array_equal(got[graph.tensors[i].name], expected[i], err_msg=f"{y} x {x}")


def check_trend(sizes: list[tuple[int, int]]) -> None:
    times, areas = [], []
    for y, x in sizes:
        _, one = compiled(y, x)
        assert set(one.partition.reasons.values()) <= {"cuts or joins bands of rows of an image"}, (y, x)
        times.append(one.report().seconds)
        areas.append(y * x)
    for k in range(1, len(sizes) - 1):
        trend = np.interp(areas[k], [areas[k - 1], areas[k + 1]], [times[k - 1], times[k + 1]])
        assert times[k] <= MOST * trend, (
            f"{sizes[k]}: {times[k] * 1e3:.2f} ms, {trend * 1e3:.2f} between its neighbours"
        )


LADDERS = {
    "squares": [(n + extra, n + extra) for n in range(32, 641, 32) for extra in (0, 8, 16)],
    "odd": [(n, n + 2 * (n % 3)) for n in range(33, 644, 10)],
    "a row": [(1, n) for n in range(32, 5958, 75)],
    "a column": [(n, 1) for n in range(32, 5913, 120)],
    "wide": [(n, 2 * n + 1) for n in range(30, 330, 10)],
    "high": [(3 * n, n) for n in range(30, 246, 12)],
}


def test_there_are_three_hundred_sizes() -> None:
    assert len({size for ladder in LADDERS.values() for size in ladder}) == 300


@pytest.mark.parametrize(("y", "x"), [(40, 24), (37, 53), (1, 97), (65, 1)])
def test_sizes_are_exact(y: int, x: int) -> None:
    check(y, x)


def test_bands_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs for one image; compiled, written, run with the host's operators, and verified as a whole."""
    build = partition._program

    def small(network: nw.Network, images: int) -> nw.NetworkProgram:
        if network.tensors[network.inputs[0]].y > 90:
            raise ShapeError("too large")
        return build(network, images)

    monkeypatch.setattr(partition, "_program", small)
    monkeypatch.setattr(partition, "LARGE_IMAGE", 0)
    graph, one = compiled(150, 40)
    assert [segment.band for segment in one.partition.segments] == [True, True, True]
    places = {d.place for d in one.report().decisions if d.number < len(graph.operators)}
    assert places == {"chip 0, 1, 2"}
    assert sum(d.share for d in one.report().decisions) <= 1.01
    assert one.resident
    source = tmp_path / "detector.tflite"
    source.write_bytes(write_model([graph]))
    report = verify_pair(source, one.write(tmp_path / "out_edgetpu.tflite"), n=2, orders=1)
    assert report.ok
    assert report.orders == 1
    sizes = {graph.tensors[i].name: 2 * np.prod(graph.tensors[i].shape) for i in graph.outputs}
    assert {name: found.values for name, found in report.outputs.items()} == sizes


@pytest.mark.slow
@pytest.mark.parametrize("ladder", LADDERS)
def test_time_grows_smoothly(ladder: str) -> None:
    check_trend(LADDERS[ladder])


@pytest.mark.slow
@pytest.mark.parametrize(("y", "x"), [size for ladder in LADDERS.values() for size in ladder])
def test_three_hundred_sizes_are_exact(y: int, x: int) -> None:
    check(y, x)
