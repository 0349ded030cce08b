"""What is written: read back, checked as Google's runtime checks it, loaded by TFLite but for the chip's operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coral
from compiler.random_graphs import draw
from compiler.test_ladder import Detector
from coral.apps.host import HostPart
from coral.codegen import ShapeError
from coral.compiler import compile_models, partition
from coral.devices import shared_stick
from coral.evaluate.graph import run_operators
from coral.package.graph import read_model
from coral.package.graph_file import write_model
from coral.package.strict import strict_checks
from coral.package.tflite_file import CUSTOM_CODE, read_parts

CORPUS = [
    ("robotics/gabor_64x64_p4", 4), ("robotics/bright_64x64", 1), ("sequence/keras_lstm_mnist_ptq", 1),
    ("sequence/split_concat", 1), ("dense/dense_256", 3),
]  # fmt: skip
SLOW = [("vision/movenet_single_pose_lightning_ptq", 1), ("vision/deeplabv3_mnv2_dm05_pascal_quant", 1),
        ("vision/mobilenet_v2_1.0_224_quant_legacy", 2)]  # fmt: skip


def check(data: bytes) -> None:
    """The same when read and written again; every check of the runtime; what is left to the host runs in TFLite."""
    failed = [c for c in strict_checks(data) if not c.ok]
    assert not failed
    model, files = read_model(data), read_parts(data)
    again = write_model(list(model.graphs), source=model.source)
    assert again == write_model(list(read_model(again).graphs), source=again)
    for old, new in zip(files, read_parts(again), strict=True):
        assert old.package.programs == new.package.programs
        assert [t.name for t in old.graph.tensors] == [t.name for t in new.graph.tensors]
        assert [(o.name, o.inputs, o.outputs) for o in old.graph.operators] == [
            (o.name, o.inputs, o.outputs) for o in new.graph.operators
        ]
    in_litert(data)


def in_litert(data: bytes) -> None:
    """TFLite misses nothing but the chip's operator, and computes what we do on the host."""
    litert: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert: files NOT loaded in TFLite")
    with pytest.raises(RuntimeError, match=f"unresolved custom op: {CUSTOM_CODE}"):
        litert.Interpreter(model_content=data).allocate_tensors()
    (file, *_) = read_parts(data)
    graph, rng = file.graph, np.random.default_rng(0)
    numbers = [k for k, op in enumerate(graph.operators) if op.name != CUSTOM_CODE]
    if not numbers:
        return
    made = [i for k in numbers for i in graph.operators[k].outputs]
    read = dict.fromkeys(i for k in numbers for i in graph.operators[k].inputs if i >= 0 and i not in made)
    inputs = [i for i in read if graph.tensors[i].data is None and not graph.tensors[i].is_variable]
    theirs = HostPart(file, numbers, inputs, [i for i in made if i >= 0])
    values = {}
    for i in inputs:
        t = graph.tensors[i]
        assert t.dtype is not None
        low, high = (np.iinfo(t.dtype).min, np.iinfo(t.dtype).max) if t.dtype.itemsize == 1 else (0, 2)
        values[i] = rng.integers(low, high, t.shape, endpoint=True).astype(t.dtype)
    got = theirs(values)
    exact = {"STRIDED_SLICE", "CONCATENATION", "RESHAPE", "PAD", "TRANSPOSE"}
    if all(graph.operators[k].name in exact for k in numbers):
        for i, expected in run_operators(graph, numbers, values).items():
            np.testing.assert_array_equal(got[i], expected, err_msg=graph.tensors[i].name)


@pytest.mark.parametrize(("name", "batch"), CORPUS)
def test_models_of_the_corpus(corpus: Path, name: str, batch: int) -> None:
    check(compile_models([corpus / f"{name}.tflite"], batch=batch)[0].data)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), SLOW)
def test_large_models_of_the_corpus(corpus: Path, name: str, batch: int) -> None:
    check(compile_models([corpus / f"{name}.tflite"], batch=batch)[0].data)


@pytest.mark.parametrize("seed", [10000, 10003, 10006, 10007, 10013, 10017, 10022, 10025])
def test_random_graphs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with several programs and operators in between."""
    monkeypatch.setattr(partition, "OPERATOR_SECONDS", 1.0)
    check(compile_models([write_model([draw(seed)])])[0].data)


def test_bands_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    build: Callable[..., Any] = partition._program

    def small(network: Any, images: int) -> Any:
        if network.tensors[network.inputs[0]].y > 90:
            raise ShapeError("too large")
        return build(network, images)

    monkeypatch.setattr(partition, "_program", small)
    monkeypatch.setattr(partition, "LARGE_IMAGE", 0)
    for size in ((150, 40), (130, 31)):
        check(compile_models([write_model([Detector(*size).graph()])])[0].data)


def together(corpus: Path, names: list[str], index: int) -> None:
    """Compiled together and loaded on one stick: one upload each, however often they take turns."""
    compiled = compile_models([corpus / f"{name}.tflite" for name in names])
    assert all(one.resident for one in compiled)
    models = [coral.load(one.data, index=index) for one in compiled]
    stick, rng = shared_stick("sim", index), np.random.default_rng(0)
    inputs = [rng.integers(0, 256, m.inputs[0].shape).astype(np.uint8) for m in models]
    first, uploads = [], []
    for m, x in zip(models, inputs, strict=True):
        before = stick.counters.parameter_bytes
        first.append(m(x))
        uploads.append(stick.counters.parameter_bytes - before)
    counted = stick.counters.uploads, stick.counters.parameter_bytes
    assert counted[0] == len(names)
    assert uploads == [len(one.programs[0].parameters) for one in compiled]
    for m, x, y in [*zip(models, inputs, first, strict=True)] * 2:
        np.testing.assert_array_equal(m(x), y)
    assert (stick.counters.uploads, stick.counters.parameter_bytes) == counted


def test_small_models_are_resident_together(corpus: Path) -> None:
    together(corpus, ["robotics/gabor_64x64_p4", "dense/dense_256", "robotics/looming_64x64_3x3"], 11)


@pytest.mark.slow
def test_two_mobilenets_are_resident_together(corpus: Path) -> None:
    together(corpus, ["vision/mobilenet_v1_0.25_128_quant", "vision/mobilenet_v1_0.5_160_quant"], 12)


def test_bands_share_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bands of an image, the inner ones alike: what is equal lies on the chip once and is sent once."""
    build: Callable[..., Any] = partition._program

    def small(network: Any, images: int) -> Any:
        if network.tensors[network.inputs[0]].y > 112:
            raise ShapeError("too large")
        return build(network, images)

    monkeypatch.setattr(partition, "_program", small)
    monkeypatch.setattr(partition, "LARGE_IMAGE", 0)
    graph = Detector(256, 24).graph()
    (one,) = compile_models([write_model([graph])])
    assert len(one.programs) == 4
    distinct = {p.parameters for p in one.programs}
    assert len(distinct) < len(one.programs)
    model, stick = coral.load(one.data, index=10), shared_stick("sim", 10)
    x = np.random.default_rng(0).integers(0, 256, (1, 256, 24, 3)).astype(np.uint8).view(graph.tensors[0].dtype)
    expected = run_operators(graph, range(len(graph.operators)), {0: x})
    before = stick.counters.parameter_bytes
    for _ in range(2):
        got = model(x)
        assert isinstance(got, dict)
        for i in graph.outputs:
            np.testing.assert_array_equal(got[graph.tensors[i].name], expected[i])
        assert stick.counters.parameter_bytes - before == sum(map(len, distinct))
