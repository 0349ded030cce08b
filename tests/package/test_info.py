"""``coral info``: for people and as JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from coral.apps.info import info, layout_name
from coral.package import Bitstream, InstructionHint, Kind, Layer, Layout, PackageError, Program, Slice
from coral.package.container import Package
from coral.package.tflite_file import read_edgetpu, write_edgetpu


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_every_file_of_the_corpus(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted([*corpus.rglob("*.tflite"), *corpus.rglob("*.coral")]):
        info(path, as_json=False)
        assert path.name in capsys.readouterr().out
        info(path, as_json=True)
        assert json.loads(capsys.readouterr().out)["file"] == str(path)


def test_text_names_what_matters(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info(corpus / "vision" / "mobilenet_v2_1.0_224_quant_legacy_edgetpu.tflite", as_json=False)
    text = capsys.readouterr().out
    for part in (
        "458,040",
        "IAO!",
        "IP!",
        "0xbdd28bdebd944998",
        "3,900,864",
        "224 x 224 x 3",
        "0.0078125",
        "runtime 12",
    ):
        assert part in text
    info(corpus / "vision" / "movenet_single_pose_lightning_ptq_edgetpu.tflite", as_json=False)
    text = capsys.readouterr().out
    for part in ("IAPO2PO3!", "before: CAST, QUANTIZE;", "4 GATHER_ND", "re-ordered, 16 slabs", "z padded to 4"):
        assert part in text
    info(corpus / "sequence" / "keras_lstm_mnist_ptq_edgetpu.tflite", as_json=False)
    assert "IPA3 (not deterministic)" in capsys.readouterr().out


def test_json_is_complete(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = corpus / "vision" / "deeplabv3_mnv2_dm05_pascal_quant_edgetpu.tflite"
    info(path, as_json=True)
    report, package = json.loads(capsys.readouterr().out), read_edgetpu(path).package
    assert report["file_bytes"] == path.stat().st_size
    assert report["package"]["compiler_version"] == "cl/"
    assert len(report["graphs"][0]["operators"]) == 9
    for described, program in zip(report["package"]["programs"], package.programs, strict=True):
        assert described["kind"] == program.kind.name
        assert described["token"] == program.token
        assert described["hint_pattern"] == program.hint_pattern()
        assert len(described["hints"]) == len(program.hints)
        assert described["parameters"] == {
            "bytes": len(program.parameters),
            "sha256": hashlib.sha256(program.parameters).hexdigest(),
        }
        assert len(described["bitstreams"][0]["relocations"]) == len(program.bitstreams[0].relocations)
        for layer, other in zip(program.outputs, described["outputs"], strict=True):
            assert (other["name"], other["scale"], other["zero_point"]) == (layer.name, layer.scale, layer.zero_point)
            assert layer.layout
            assert other["layout"]["tile_byte_offset"] == list(layer.layout.tile_byte_offset)


def test_layout_names() -> None:
    layer = Layer("t", 64, 2, 2, 3, 0, 1.0, layout=Layout((0, 0), (0, 0), (0,), (0, 3), (0, 1), (6, 6)))
    assert layout_name(layer) == "packed"
    assert layer.layout
    assert layout_name(replace(layer, layout=None)) == "packed"
    wide = replace(layer.layout, x_local_byte_offset=(0, 4), x_row_size=(8, 8))
    assert layout_name(replace(layer, layout=wide)) == "z padded to 4"
    tiles = replace(layer.layout, x_to_tile=(0, 1), tile_byte_offset=(32, 0))
    assert layout_name(replace(layer, layout=tiles)) == "re-ordered, 2 slabs"
    box = Slice(((0, 1), (0, 1), (0, 2)), (6, 3, 1), 0)
    assert layout_name(replace(layer, layout=None, slices=(box,))) == "1 slices"


def test_names_of_strangers_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = Layer("\x1b[31m[bold]x", 8, 1, 1, 8, 0, 1.0)
    program = Program(Kind.STAND_ALONE, (Bitstream(bytes(16)),), (InstructionHint(0),), inputs=(layer,))
    path = tmp_path / "bad_edgetpu.tflite"
    path.write_bytes(write_edgetpu(Package((program,)), description="\x1b[2J"))
    info(path, as_json=False)
    text = capsys.readouterr().out
    assert "\x1b[31m" not in text
    assert "\x1b[2J" not in text
    assert "[bold]x" in text


def test_damage_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "cut_edgetpu.tflite"
    path.write_bytes(b"\x1c\0\0\0TFL3")
    with pytest.raises(PackageError, match="offset 28 is outside the 8 bytes"):
        info(path, as_json=True)
