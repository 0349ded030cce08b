"""``coral verify``: Google's programs against the layer reference. All pairs, all bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coral import isa
from coral.apps.verify import verify_pair
from coral.cli import app
from tests.apps.pairs import COCOMPILED, FAST, SLOW, cocompiled, edited, pair, with_fields

ORDERS = 20
IMAGE = "grace_hopper.bmp"


def images(corpus: Path, name: str) -> list[Path]:
    return [corpus / "vision" / IMAGE] if name.startswith("vision/") else []


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_no_byte_differs(corpus: Path, name: str) -> None:
    """Three random inputs, and the photograph for models of images; every output, states included."""
    report = verify_pair(*pair(corpus, name), n=3, seed=11, images=images(corpus, name))
    assert report.ok
    assert report.inputs == 3 + len(images(corpus, name))
    assert all(output.values and not output.differing for output in report.outputs.values())
    assert report.device == ("direct" if "lstm" in name else "sim")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "other"), [*COCOMPILED, *(names[::-1] for names in COCOMPILED)])
def test_no_byte_differs_in_models_compiled_together(corpus: Path, name: str, other: str) -> None:
    original = corpus / "vision" / f"{name}.tflite"
    assert verify_pair(original, cocompiled(corpus, name, other), n=3, images=[corpus / "vision" / IMAGE]).ok


@pytest.mark.parametrize("name", ["dense/dense_256", "sequence/split_concat"])
def test_the_order_of_units_does_not_matter(corpus: Path, name: str) -> None:
    report = verify_pair(*pair(corpus, name), n=1, orders=5)
    assert report.ok
    assert report.orders == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_twenty_orders_of_units(corpus: Path, name: str) -> None:
    assert verify_pair(*pair(corpus, name), n=1, orders=ORDERS).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_an_order_of_units_in_big_models(corpus: Path, name: str) -> None:
    """One seed here; more were run by hand (docs/run.md, section Proof)."""
    assert verify_pair(*pair(corpus, name), n=1, orders=1).ok


def test_a_wrong_constant_is_found_and_counted(corpus: Path, tmp_path: Path) -> None:
    """One zero point in the program: every result is one higher, except the saturated ones."""
    original, compiled = pair(corpus, "dense/dense_256")
    wrong = tmp_path / "wrong_edgetpu.tflite"
    wrong.write_bytes(edited(compiled, _one_higher))
    result = CliRunner().invoke(app, ["verify", str(original), str(wrong), "--n", "2", "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    (output,) = report["outputs"].values()
    assert not report["ok"]
    assert output["values"] == 512
    assert set(output["amounts"]) == {"1"}
    assert 400 < output["differing"] == output["amounts"]["1"] <= 512


def _one_higher(i: Any) -> Any:
    return with_fields(i, out_zp=i.out_zp + 1) if isinstance(i, isa.Op) and i.scale_en else i


def test_command_line(corpus: Path) -> None:
    original, compiled = map(str, pair(corpus, "dense/dense_256"))
    result = CliRunner().invoke(app, ["verify", original, compiled, "--n", "1", "--orders", "2", "--device", "direct"])
    assert result.exit_code == 0
    assert "1 inputs on the simulated chip, without USB" in result.stdout
    assert "2 random orders of units, the same bytes" in " ".join(result.stdout.split())
    assert result.stdout.endswith("equal\n")
    other = str(pair(corpus, "dense/dense_512")[0])
    result = CliRunner().invoke(app, ["verify", other, compiled])
    assert "tensors named" in str(result.exception)
    result = CliRunner().invoke(app, ["verify", original, compiled, "--n", "0"])
    assert "nothing to compare" in str(result.exception)
    lstm = map(str, pair(corpus, "sequence/keras_lstm_mnist_ptq"))
    result = CliRunner().invoke(app, ["verify", *lstm, "--device", "usb"])
    assert "cannot run over USB" in str(result.exception)
