"""Metadata, signatures and attached files: kept by what we write, as Google's compiler keeps its metadata."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coral.compiler import compile_models
from coral.package import PackageError
from coral.package.extras import MAX_FILES_BYTES, Extras, Signature, associated_files, with_files
from coral.package.graph import Graph, Operator, Tensor, read_model
from coral.package.graph_file import write_model

NONE = np.zeros(0, np.float32), np.zeros(0, np.int64)
X, UNUSED, Y = (Tensor(name, (1, 4), 0, np.dtype("f4"), *NONE, 0, None, False) for name in ("x", "unused", "y"))
GRAPH = Graph("main", (X, UNUSED, Y), (0,), (2,), (Operator("RELU", (0,), (2,), {}),))
SIGNATURE = Signature("serving_default", {"image": 0}, {"scores": 2})
EXTRAS = Extras({"TFLITE_METADATA": b"about the model", "empty": b"", "min_runtime_version": b"1.5.0"}, (SIGNATURE,))


@pytest.mark.parametrize("name", ["mobilenet_v1_0.25_128_quant", "mobilenet_v1_0.5_160_quant"])
def test_google_keeps_metadata_and_labels_and_so_do_we(corpus: Path, name: str) -> None:
    original, theirs = (read_model(corpus / "vision" / f"{name}{end}.tflite") for end in ("", "_edgetpu"))
    (ours,) = compile_models([corpus / "vision" / f"{name}.tflite"])
    assert "TFLITE_METADATA" in original.extras.metadata
    assert read_model(ours.data).extras.metadata == theirs.extras.metadata
    assert associated_files(ours.data) == associated_files(theirs.source) == associated_files(original.source)
    assert len(associated_files(ours.data)["imagenet_labels.txt"].splitlines()) == 1001


def test_signatures_name_the_same_tensors(corpus: Path) -> None:
    original = read_model(corpus / "dense" / "dense_256.tflite")
    compiled = read_model(compile_models([corpus / "dense" / "dense_256.tflite"])[0].data)
    for model in (original, compiled):
        (s,) = model.extras.signatures
        ends = [[model.main.tensors[i].name for i in end.values()] for end in (s.inputs, s.outputs)]
        assert (s.key, *ends) == (
            "serving_default", ["serving_default_keras_tensor:0"], ["StatefulPartitionedCall_1:0"],
        )  # fmt: skip
        assert [*s.inputs.values()] == [*model.main.inputs]


def test_what_is_written_is_read() -> None:
    data = write_model([GRAPH], extras=EXTRAS)
    model = read_model(data)
    assert model.extras.metadata == {"TFLITE_METADATA": b"about the model", "empty": b""}
    assert model.extras.signatures == (Signature("serving_default", {"image": 0}, {"scores": 1}),)  # renumbered
    assert [t.name for t in model.main.tensors] == ["x", "y"]
    attached = with_files(data, {"labels.txt": b"a\nb\n", "vocab/é.txt": b""})
    assert attached.startswith(data)
    assert associated_files(attached) == {"labels.txt": b"a\nb\n", "vocab/é.txt": b""}
    assert read_model(attached).main.tensors[1].name == "y"
    assert with_files(data, {}) is data


def test_signatures_of_tensors_that_are_gone_are_left_out() -> None:
    extras = Extras({}, (SIGNATURE, Signature("other", {"image": 0}, {"inner": 1}), Signature("far", {}, {}, 3)))
    assert [s.key for s in read_model(write_model([GRAPH], extras=extras)).extras.signatures] == ["serving_default"]


def test_litert_finds_the_signature() -> None:
    litert: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert: signatures NOT read by it")
    interpreter = litert.Interpreter(model_content=with_files(write_model([GRAPH], extras=EXTRAS), {"a.txt": b"a"}))
    assert interpreter.get_signature_list() == {"serving_default": {"inputs": ["image"], "outputs": ["scores"]}}
    x = np.array([[-1, 2, -3, 4]], np.float32)
    assert interpreter.get_signature_runner()(image=x)["scores"].tolist() == [[0, 2, 0, 4]]


def test_damage() -> None:
    sound = write_model([GRAPH], extras=Extras({"m": b"data"}, (SIGNATURE,)))
    rng, refused = np.random.default_rng(0), 0
    for _ in range(3000):
        damaged = bytearray(sound)
        at = int(rng.integers(8, len(sound)))
        damaged[at] = rng.integers(256)
        try:
            read_model(bytes(damaged))
        except PackageError:
            refused += 1
    assert 0 < refused < 3000


def test_archives_that_are_none(tmp_path: Path) -> None:
    data = write_model([GRAPH])
    attached = with_files(data, {"a": b"x" * 1000})
    assert associated_files(data) == {}
    for cut in range(1, len(attached) - len(data), 7):
        assert associated_files(attached[:-cut]) in ({}, {"a": b"x" * 1000})
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", bytes(MAX_FILES_BYTES + 1))
    assert associated_files(data + stream.getvalue()) == {}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damaged_archives_of_any_method_hold_nothing(method: int) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr("labels.txt", "cat\ndog\n" * 100)
    data, rng = stream.getvalue(), np.random.default_rng(method)
    usual = method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    assert bool(associated_files(data)) is usual
    for _ in range(300):
        damaged = bytearray(data)
        for at in rng.integers(0, len(data), 2):
            damaged[at] = rng.integers(256)
        assert set(associated_files(bytes(damaged)).values()) <= {b"cat\ndog\n" * 100, b""}
