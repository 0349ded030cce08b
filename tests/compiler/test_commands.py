"""``coral compile`` and ``coral info --strict`` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coral
from compiler.test_bad_input import chain, tensor
from coral.apps.direct import DirectChip
from coral.compiler import CompileError, partition
from coral.evaluate import evaluate
from coral.package.graph_file import write_model
from coral.package.strict import strict_checks


def test_compile_writes_a_file_and_says_what_it_did(run: Any, corpus: Path, tmp_path: Path) -> None:
    source, out = corpus / "robotics" / "gabor_64x64_p4.tflite", tmp_path / "out_edgetpu.tflite"
    code, text, _ = run("compile", source, "-o", out, "--clock", "max")
    assert code == 0
    assert "AVERAGE_POOL_2D" in text
    assert "at 500 MHz" in text.replace("\n", " ")
    code, text, _ = run("compile", source, "-o", out, "--batch", 4, "--report", "json")
    (report,) = json.loads(text)
    assert code == 0
    assert report["programs"][0]["images"] == 4
    assert [d["place"] for d in report["decisions"]] == ["chip 0"] * 4
    assert sum(d["share"] for d in report["decisions"]) <= 1.01
    assert run("verify", source, out, "--n", 1, "--device", "direct")[0] == 0
    assert run("info", "--strict", out)[0] == 0
    assert run("run", out, "--random", 1, "--json")[0] == 0


def test_several_models_and_wrong_places(run: Any, corpus: Path, tmp_path: Path) -> None:
    models = [corpus / "dense" / f"dense_{n}.tflite" for n in (256, 512)]
    assert run("compile", *models, "-o", tmp_path / "folder", "--report", "none")[0] == 0
    files = sorted((tmp_path / "folder").iterdir())
    assert [f.name for f in files] == ["dense_256_edgetpu.tflite", "dense_512_edgetpu.tflite"]
    for out in (models[0], models[0].parent / ".." / "dense" / models[0].name):
        code, _, error = run("compile", models[0], "-o", out, "--report", "none")
        assert code == 1
        assert "would replace a model" in error
    twice = tmp_path / models[0].name
    twice.write_bytes(models[0].read_bytes())
    assert "would both become" in run("compile", models[0], twice, "-o", tmp_path / "twice")[2]
    assert "is a file, several models need a folder" in run("compile", *models, "-o", twice)[2]
    assert "cannot make the folder" in run("compile", *models, "-o", twice / "folder", "--report", "none")[2]
    assert run("compile", models[0], models[0].with_stem("dense_256_edgetpu"), "-o", tmp_path / "none")[0] == 1
    assert not list(tmp_path.glob("*twice*")) + list(tmp_path.glob("none"))
    assert "clock 'fast' is unknown" in run("compile", models[0], "-o", tmp_path / "x", "--clock", "fast")[2]
    assert "cannot write" in run("compile", models[0], "-o", tmp_path / "no" / "x", "--report", "none")[2]


def test_files_of_several_programs(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks into files shows every program of one that the host divides."""
    monkeypatch.setattr(partition, "OPERATOR_SECONDS", 1.0)
    names = ["RELU", "ABS", "LOGISTIC", "ABS"]
    graph = chain([tensor(name, (1, 6, 6, 8)) for name in "xabcd"], *names)
    source, out = tmp_path / "two.tflite", tmp_path / "two_edgetpu.tflite"
    source.write_bytes(write_model([graph]))
    assert run("compile", source)[0] == 0
    code, text, _ = run("info", out)
    assert code == 0
    assert "before: nothing; after: ABS; between: ABS" in text
    assert "Programs of operator 0" in text
    assert "Programs of operator 2" in text
    report = json.loads(run("info", out, "--json")[1])
    assert [p["custom_operator"]["index"] for p in report["parts"]] == [0, 2]
    code, text, _ = run("disasm", out)
    assert code == 0
    assert "two_edgetpu.tflite operator 2 EXECUTION_ONLY chunk 0" in text
    assert run("isa", "check", out)[0] == 0
    assert run("verify", source, out, "--n", 1)[0] == 0


def test_the_picture(run: Any, corpus: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow: pictures are NOT drawn")
    models = [corpus / "dense" / f"dense_{n}.tflite" for n in (256, 512)]
    out, picture = tmp_path / "out_edgetpu.tflite", tmp_path / "picture.png"
    assert run("compile", models[0], "-o", out, "--report", "none", "--picture", picture)[0] == 0
    with image.open(picture) as drawn:
        assert drawn.format == "PNG"
        assert len(drawn.convert("RGB").getcolors(1 << 20)) > 5
    code, text, _ = run("compile", *models, "-o", tmp_path / "both", "--report", "json", "--picture", picture)
    assert code == 0
    assert [r["model"] for r in json.loads(text)] == ["dense_256", "dense_512"]
    for model in models:
        with image.open(tmp_path / f"picture_{model.stem}.png") as drawn:
            assert drawn.format == "PNG"
    code, _, error = run("compile", models[0], "-o", out, "--report", "none", "--picture", tmp_path / "no" / "x.png")
    assert code == 1
    assert "x.png" in error.replace("\n", "")


@pytest.mark.parametrize("arguments", [["--batch", 0], ["--batch", 1000], ["--clock", "fast"]])
def test_wrong_options_are_refused_in_a_sentence(run: Any, corpus: Path, tmp_path: Path, arguments: list) -> None:
    model = corpus / "dense" / "dense_256.tflite"
    code, _, error = run("compile", model, "-o", tmp_path / "x", *arguments)
    assert code
    assert str(arguments[1]) in error
    assert "Traceback" not in error
    assert not (tmp_path / "x").exists()


def test_wrong_files_are_refused_in_a_sentence(run: Any, corpus: Path, tmp_path: Path) -> None:
    data = (corpus / "dense" / "dense_256.tflite").read_bytes()
    for content in (b"", b"TFL3", data[: len(data) // 2], bytes(reversed(data))):
        path = tmp_path / "model.tflite"
        path.write_bytes(content)
        code, _, error = run("compile", path, "-o", tmp_path / "x")
        assert code == 1
        assert "Traceback" not in error
        assert "model.tflite" in error.replace("\n", "") or "TFLite" in error


def test_compile_in_python(corpus: Path) -> None:
    source = corpus / "dense" / "dense_256.tflite"
    one = coral.compile(source)
    x = np.arange(256, dtype=np.uint8).reshape(1, 256)
    assert repr(one) == f"<Compiled 'dense_256': {len(one.data):,} bytes, programs: 1>"
    model = coral.load(one.data, device=DirectChip())
    (expected,) = evaluate(source, {model.inputs[0].name: x}).values()
    assert (model(x) == expected).all()
    assert len(coral.compile(source, source.read_bytes())) == 2
    for batch in (0, 2.5, "3"):
        with pytest.raises(CompileError, match=f"batch {batch!r}: a program takes"):
            coral.compile(source, batch=batch)


def test_strict_on_every_file_of_googles(corpus: Path) -> None:
    for path in sorted(corpus.glob("*/*_edgetpu.tflite")):
        failed = [check.name for check in strict_checks(path) if not check.ok]
        lstm = ["every program: the list of transfers is complete"] if "lstm" in path.name else []
        assert failed == lstm, path.name


def test_strict_finds_what_is_wrong(run: Any, corpus: Path, tmp_path: Path) -> None:
    data = bytearray((corpus / "dense" / "dense_256_edgetpu.tflite").read_bytes())
    at = data.find(b"DWN1")
    data[at : at + 4] = b"XXXX"
    bad = tmp_path / "bad.tflite"
    bad.write_bytes(data)
    code, text, _ = run("info", "--strict", bad)
    assert code == 1
    assert "NO" in text
    assert run("info", "--strict", corpus / "dense" / "dense_256.tflite")[0] == 1
