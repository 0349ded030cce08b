"""``coral run``: files in and out, images, top classes, breaks, deadlocks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from coral import CoralError, isa
from coral.apps.debug import explained
from coral.apps.direct import DirectChip
from coral.apps.files import FileError, attached_labels, image_input, random_inputs, read_input, read_labels
from coral.apps.model import Model, Port
from coral.apps.timeline import record
from coral.chip import Chip
from coral.cli import app
from coral.evaluate.compare import chip_part
from coral.package.program import Bitstream
from coral.package.tflite_file import read_edgetpu
from tests.apps.pairs import edited, pair, with_fields


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def port(shape: tuple[int, ...], dtype: str = "u1") -> Port:
    return Port(0, "x", shape, np.dtype(dtype), 1.0, 0)


def test_arrays_in_and_out(corpus: Path, tmp_path: Path) -> None:
    original, compiled = pair(corpus, "sequence/split_concat")
    part = chip_part(original, compiled)
    x = part.random_inputs(np.random.default_rng(1))
    expected = part.evaluate(x)
    files: list[Path] = []
    for array in x.values():
        np.save(tmp_path / f"{len(files)}.npy", array)
        files.append(tmp_path / f"{len(files)}.npy")
    np.savez(tmp_path / "all.npz", **x)
    out = tmp_path / "out.npz"
    for inputs in (files, [tmp_path / "all.npz"]):
        given = [part for file in inputs for part in ("--input", file)]
        assert command("run", compiled, *given, "--output", out).exit_code == 0
        with np.load(out) as archive:
            assert all((archive[name] == expected[name]).all() for name in expected)
    assert "1 input files are given, the model takes 3" in str(command("run", compiled, "-i", files[0]).exception)
    assert "no input: give --input FILE" in str(command("run", compiled).exception)
    wrong = command("run", compiled, "--random", 1, "-o", tmp_path / "one.npy")
    assert "outputs are one .npz, or one .npy for each of" in str(wrong.exception)


def test_json_and_random_inputs(corpus: Path) -> None:
    compiled = pair(corpus, "dense/dense_256")[1]
    found = json.loads(command("run", compiled, "--random", 4, "--json", "--top", 2).stdout)
    again = json.loads(command("run", compiled, "--random", 4, "--json").stdout)
    (output,) = found["outputs"]
    assert output["sha256"] == again["outputs"][0]["sha256"]
    values = np.array(output["values"])
    assert [entry["index"] for entry in output["top"]] == np.argsort(-values[0], kind="stable")[:2].tolist()
    assert found["left_to_the_host"] == []
    assert 1e-4 < found["predicted_seconds_on_a_stick"] < 1e-3
    assert "predicted on a stick" in " ".join(command("run", compiled, "--random", 4).stdout.split())


def test_images_are_resized_and_coloured(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="Pillow: images NOT tested")
    rng = np.random.default_rng(2)
    pixels = rng.integers(0, 256, (6, 8, 3), np.uint8)
    pillow.fromarray(pixels).save(tmp_path / "a.png")
    assert (image_input(tmp_path / "a.png", port((1, 6, 8, 3)))[0] == pixels).all()
    signed = image_input(tmp_path / "a.png", port((1, 6, 8, 3), "i1"))
    assert signed.dtype == np.int8
    assert (signed[0].astype(int) + 128 == pixels).all()
    assert (image_input(tmp_path / "a.png", port((6, 8, 3), "f4")) == pixels).all()
    grey = image_input(tmp_path / "a.png", port((1, 6, 8, 1)))
    assert np.abs(grey[0, ..., 0] - pixels @ [0.299, 0.587, 0.114]).max() <= 1
    pillow.fromarray(np.full((30, 20), 77, np.uint8)).save(tmp_path / "b.bmp")
    assert (image_input(tmp_path / "b.bmp", port((1, 3, 5, 3))) == 77).all()
    with pytest.raises(FileError, match=r"need \[height, width, 1, 3 or 4\]"):
        image_input(tmp_path / "a.png", port((1, 256)))
    (tmp_path / "c.jpg").write_bytes(b"no image")
    with pytest.raises(FileError, match="cannot be read as an image"):
        image_input(tmp_path / "c.jpg", port((1, 3, 5, 3)))


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_damaged_arrays(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    np.savez(file, x=np.zeros(3)) if name.endswith("z") else np.save(file, np.zeros(3))
    data = file.read_bytes()
    assert read_input(file, port((3,))).shape == (3,)
    for cut in range(0, len(data) - 1, 7):
        file.write_bytes(data[:cut])
        with pytest.raises(FileError):
            read_input(file, port((3,)))
    np.save(tmp_path / "o.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(FileError, match="allow_pickle"):
        read_input(tmp_path / "o.npy", port((1,)))
    with pytest.raises(FileError, match=r"inputs are .npy, .npz or images"):
        read_input(tmp_path / "x.txt", port((1,)))


def test_labels(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("background\ntench, Tinca tinca\n")
    (tmp_path / "numbered").write_text("0  background\n1  tench, Tinca tinca\n")
    expected = ["background", "tench, Tinca tinca"]
    assert read_labels(tmp_path / "plain") == read_labels(tmp_path / "numbered") == expected
    (tmp_path / "gaps").write_text("0  person\n2: car\n3\n")  # as COCO's are
    assert read_labels(tmp_path / "gaps") == ["person", "", "car", ""]
    for text in ("1 a\n1 b", "7 dwarfs\nthe wolf", "", "2 b\n1 a", f"0 a\n{1 << 40} b", "0 a\n\u00b2 b"):
        (tmp_path / "names").write_text(text)
        assert read_labels(tmp_path / "names") == text.splitlines()


def test_labels_come_from_the_model_itself(corpus: Path, tmp_path: Path) -> None:
    """Google's compiler and ours keep the archive behind a model."""
    vision = corpus / "vision"
    expected = read_labels(vision / "imagenet_labels.txt")
    theirs = vision / "mobilenet_v1_0.25_128_quant_edgetpu.tflite"
    assert attached_labels(theirs) == expected
    assert attached_labels(corpus / "dense" / "dense_256_edgetpu.tflite") == []
    found = json.loads(command("run", theirs, "--random", 0, "--top", 1, "--json").stdout)
    best = found["outputs"][0]["top"][0]
    assert best["label"] == expected[best["index"]]


def test_a_break_shows_counters_and_memories(corpus: Path, tmp_path: Path) -> None:
    """At the first op of the program the input is in narrow memory and the weights are in wide memory."""
    original, compiled = pair(corpus, "dense/dense_256")
    part = chip_part(original, compiled)
    x = next(iter(part.random_inputs(np.random.default_rng(3)).values()))
    np.save(tmp_path / "x.npy", x)
    op = next(p for p in _instructions(compiled) if isinstance(p, isa.Op) and p.bias_en | p.scale_en)
    dump = tmp_path / "dump.npz"
    result = command("run", compiled, "-i", tmp_path / "x.npy", "--break", hex(op.seq), "--dump", dump)
    assert result.exit_code == 0
    assert "stopped before op at word" in result.stdout
    assert f"seq {op.seq} on tile 0" in result.stdout
    assert "RING_PRODUCER_A" in result.stdout
    with np.load(dump) as archive:
        narrow, written, wide = archive["narrow"], archive["narrow_written"], archive["wide"]
        assert archive["counters"].shape == (16, 19)
    assert x.tobytes() in narrow[0].tobytes()
    assert written[0].sum() >= 256
    weights = next(t.data for t in part.graph.tensors if t.data is not None and t.data.shape == (256, 256))
    first = (weights[:64, :4].astype(np.int16) + 128).astype(np.uint8)
    assert any((row.reshape(64, 4) == first).all() for row in wide.reshape(-1, 256))
    assert "has sequence number 4096, it has 0.." in str(
        command("run", compiled, "--random", 1, "--break", 4096).exception
    )


def _instructions(compiled: Path) -> Iterator[Any]:
    for stream in read_edgetpu(compiled).package.execution.bitstreams:
        yield from (placed.instruction for placed in isa.decode(stream.data))


def test_a_deadlock_is_shown_with_the_program_around_it(corpus: Path, tmp_path: Path) -> None:
    """Every wait of the first op for the ring asks for more than will ever come."""
    compiled = pair(corpus, "dense/dense_256")[1]
    op = next(i for i in _instructions(compiled) if isinstance(i, isa.Op) and i.wait0_valid)
    wrong = tmp_path / "wrong_edgetpu.tflite"
    wrong.write_bytes(edited(compiled, lambda i: with_fields(i, wait0_base=30000) if i == op else i))
    text = str(command("run", wrong, "--random", 1).exception)
    assert "op of tile 0: op at word" in text
    assert ">= 300" in text
    (line,) = [line for line in text.splitlines() if line.startswith("> op")]
    assert f"seq={op.seq}" in line
    assert sum(line.startswith("  ") and "# " in line for line in text.splitlines()) >= 2


def test_damaged_programs_end_in_sentences(corpus: Path) -> None:
    """One or two flipped bits: the program still runs, or a typed error says what is wrong, also when it is timed."""
    file = read_edgetpu(pair(corpus, "dense/dense_256")[1])
    rng, kinds = np.random.default_rng(4), Counter()
    for trial in range(40):
        data = bytearray(file.package.execution.bitstreams[0].data)
        for bit in rng.integers(0, len(data) * 8, 1 + trial % 2).tolist():
            data[bit // 8] ^= 1 << bit % 8
        program = replace(file.package.execution, bitstreams=(Bitstream(bytes(data)),))
        programs = tuple(program if p is file.package.execution else p for p in file.package.programs)
        damaged = replace(file, package=replace(file.package, programs=programs))
        model = Model(damaged, DirectChip(Chip(budget=100_000)), host=False)
        inputs = random_inputs(model.inputs, trial)
        try:
            with explained(program):
                model(inputs) if trial % 4 else record(model.chips[0], {p.number: inputs[p.name] for p in model.inputs})
            kinds["ran"] += 1
        except CoralError as error:
            kinds[type(error).__name__] += 1
    assert {"ran", "ProgramFault", "DecodeError"} <= set(kinds)


CLASSIFIERS = [
    "mobilenet_v1_0.25_128_quant", "mobilenet_v1_0.25_128_quant_legacy", "mobilenet_v1_0.5_160_quant",
    "mobilenet_v2_1.0_224_quant_legacy",
]  # fmt: skip


@pytest.mark.slow
def test_grace_hopper_wears_a_military_uniform(corpus: Path) -> None:
    pytest.importorskip("PIL.Image", reason="Pillow: images NOT tested")
    folder = corpus / "vision"
    options = ("--top", 5, "--labels", folder / "imagenet_labels.txt", "--json")
    compiled = folder / "mobilenet_v2_1.0_224_quant_legacy_edgetpu.tflite"
    found = json.loads(command("run", compiled, "-i", folder / "grace_hopper.bmp", *options).stdout)
    top = found["outputs"][0]["top"]
    assert top[0]["label"] == "military uniform"
    assert top[0]["score"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_first_class_is_that_of_litert(corpus: Path, name: str) -> None:
    """On every image of the corpus, TFLite's own kernels on the uncompiled model name the same class."""
    litert = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert: classes NOT compared")
    pytest.importorskip("PIL.Image", reason="Pillow: images NOT tested")
    folder = corpus / "vision"
    interpreter = litert.Interpreter(model_path=str(folder / f"{name}.tflite"))
    interpreter.allocate_tensors()
    (given,), (wanted,) = interpreter.get_input_details(), interpreter.get_output_details()
    images = sorted(folder.glob("*.bmp"))
    assert images
    for image in images:
        found = json.loads(command("run", folder / f"{name}_edgetpu.tflite", "-i", image, "--top", 1, "--json").stdout)
        interpreter.set_tensor(given["index"], image_input(image, port(tuple(given["shape"]))))
        interpreter.invoke()
        assert found["outputs"][0]["top"][0]["index"] == interpreter.get_tensor(wanted["index"]).argmax(), image
