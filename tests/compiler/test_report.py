"""The report against figures that are counted in another way: from formulas, and from the whole program."""

from __future__ import annotations

from pathlib import Path

import pytest

from coral import timing
from coral.apps.compile import NAME, show
from coral.compiler import Compiled, compile_models
from coral.compiler.report import Decision
from tests.compiler.test_bad_input import chain, compiled, tensor


def of(corpus: Path, name: str, batch: int = 1) -> tuple[Compiled, dict[int, Decision]]:
    (one,) = compile_models([corpus / f"{name}.tflite"], batch=batch)
    return one, {d.number: d for d in one.report().decisions}


def test_a_dense_layer_by_formula(corpus: Path):
    """256 inputs are 64 words; 256 outputs are 4 groups on 4 tiles."""
    _, decisions = of(corpus, "dense/dense_256")
    (layer,) = (d for d in decisions.values() if d.op == "FULLY_CONNECTED")
    assert (layer.tiles, layer.steps, layer.weight_bytes, layer.share) == (4, 64, 256 * 256, 1.0)
    assert layer.reason == "outputs divided among 4 tiles"


def test_mobilenet_layers_by_formula(corpus: Path):
    """Pointwise layers: positions of a tile x words of the input x groups of 64 outputs."""
    one, decisions = of(corpus, "vision/mobilenet_v1_0.25_128_quant")
    graph, seen = one.partition.graph, 0
    for d in decisions.values():
        op = graph.operators[d.number]
        x, y = (graph.tensors[i].shape for i in (op.inputs[0], op.outputs[0]))
        if d.op == "CONV_2D" and x[1:3] == y[1:3] and y[1] % 4 == 0 and y[3] in (32, 64, 128):
            assert d.steps == y[1] // 4 * y[2] // 4 * x[3] // 4 * -(-y[3] // 64)
            assert d.reason.startswith(f"{y[1] // 4} x {y[2] // 4} of {y[1]} x {y[2]} per tile")
            seen += 1
    assert seen >= 6
    assert any("phantoms" in d.reason or "divided among" in d.reason for d in decisions.values())


@pytest.mark.parametrize(
    ("name", "batch"),
    [("vision/mobilenet_v1_0.25_128_quant", 1), ("robotics/bright_64x64", 1), ("robotics/gabor_64x64_p4", 5),
     ("sequence/split_concat", 1), ("vision/movenet_single_pose_lightning_ptq", 1)],
)  # fmt: skip
def test_layers_add_up_to_the_program(corpus: Path, name: str, batch: int):
    one, decisions = of(corpus, name, batch)
    (program,) = one.report().programs
    on_chip = [d for d in decisions.values() if d.place == "chip 0"]
    assert max(d.steps for d in on_chip) <= program.busiest_tile_steps <= sum(d.steps for d in on_chip)
    assert program.cycles <= sum(d.cycles for d in on_chip) * (1 + 1e-9)
    words, (receiving, *_) = sum(d.instruction_bytes for d in on_chip) // 16, one.programs[0].begins.values()
    assert words + receiving == one.programs[0].begins[""] < program.instruction_words
    assert sum(d.share for d in on_chip) == pytest.approx(1)
    assert all(d.reason and d.seconds * timing.CLOCK_HZ == pytest.approx(d.cycles) for d in on_chip)


def test_every_decision_says_why_and_what_it_costs(corpus: Path):
    for name in ("vision/movenet_single_pose_lightning_ptq", "sequence/keras_lstm_mnist_ptq"):
        _, decisions = of(corpus, name)
        host = [d for d in decisions.values() if d.place == "host"]
        assert host
        assert all(d.reason for d in decisions.values())
        assert all(d.seconds > 0 for d in host if d.reason != "only another way to see a tensor")


def test_the_text_is_one_line_per_layer_where_names_are_long(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    shape = (1, 16, 16, 8)
    names = [f"{'block/' * 20}{n}" for n in "xab"]
    show(compiled(chain([tensor(name, shape) for name in names], "RELU", "LOGISTIC")).report(), tmp_path / "out.tflite")
    lines = [line for line in capsys.readouterr().out.splitlines() if "4 x 4 of 16 x 16 per tile" in line]
    assert len(lines) == 2
    for line, name in zip(lines, names[1:], strict=True):
        assert "…" + name[1 - NAME :] in line
