"""``coral.load``: arrays in, arrays out; equality with the layer reference; models that share a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coral
from coral.apps.direct import DirectChip, DirectError
from coral.apps.host import HostPart
from coral.apps.model import ModelError, Port
from coral.devices import open_runtime, shared_stick
from coral.evaluate.compare import chip_part
from coral.package.program import Base, InterruptHint
from coral.package.tflite_file import read_edgetpu
from coral.runtime import LinearSpec
from tests.apps.pairs import cocompiled, pair


def random(ports: tuple[Port, ...], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {p.name: rng.integers(0, 256, p.shape, np.uint8).astype(p.dtype) for p in ports}


def test_by_name_by_position_and_alone(corpus: Path) -> None:
    original, compiled = pair(corpus, "dense/dense_256")
    model = coral.load(compiled)
    assert model.left == ()
    (port,) = model.inputs
    assert (port.shape, port.dtype) == ((1, 256), np.uint8)
    x = random(model.inputs, 1)
    expected = next(iter(chip_part(original, compiled).evaluate(x).values()))
    for given in (x, [x[port.name]], x[port.name], x[port.name][0]):
        result = model(given)
        assert isinstance(result, np.ndarray)
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        assert (result == expected).all()


def test_several_inputs_and_outputs(corpus: Path) -> None:
    original, compiled = pair(corpus, "sequence/split_concat")
    model = coral.load(compiled)
    x = random(model.inputs, 2)
    expected = chip_part(original, compiled).evaluate(x)
    for given in (x, list(x.values())):
        result = model(given)
        assert isinstance(result, dict)
        assert {n: a.tolist() for n, a in result.items()} == {n: a.tolist() for n, a in expected.items()}
    with pytest.raises(ModelError, match=r"takes 3 inputs .* given are 1"):
        model(x["input1"])
    with pytest.raises(ModelError, match=r"inputs are .* given are"):
        model({"input1": x["input1"]})


def test_floats_become_codes_and_wrong_arrays_are_refused(corpus: Path) -> None:
    model = coral.load(pair(corpus, "dense/dense_256")[1])
    (port,) = model.inputs
    codes = np.arange(256, dtype=np.uint8)
    values = port.values(codes)
    assert (port.codes(values)[0] == codes).all()
    assert (port.codes(values.astype(np.float64))[0] == codes).all()
    assert port.codes(np.full(256, 1e30)).max() == 255
    assert port.codes(np.full(256, -np.inf)).max() == 0
    with pytest.raises(ModelError, match="NaN"):
        port.codes(np.full(256, np.nan))
    with pytest.raises(ModelError, match=r"must have shape \(1, 256\), given is \(255,\)"):
        model(codes[:255])
    with pytest.raises(ModelError, match=r"must be uint8 \(or floats\), given is int64"):
        model(codes.astype(np.int64))


def test_int8_outputs_have_real_values(corpus: Path) -> None:
    model = coral.load(pair(corpus, "robotics/bright_16x16")[1])
    (port,) = model.outputs
    assert port.dtype == np.int8
    result = model(random(model.inputs, 3))
    assert isinstance(result, np.ndarray)
    assert port.values(result).dtype == np.float32
    (tensor,) = chip_part(*pair(corpus, "robotics/bright_16x16")).outputs.values()
    assert np.allclose(port.values(result), (result.astype(float) - tensor.zero_point) * tensor.scale)


def test_states_begin_at_zero_in_every_call(corpus: Path) -> None:
    """The LSTM: the program asks for its own transfers; variables are no inputs, and calls do not depend on others."""
    original, compiled = pair(corpus, "sequence/keras_lstm_mnist_ptq")
    part, model = chip_part(original, compiled), coral.load(compiled, device=DirectChip())
    assert [p.name for p in model.inputs] == ["serving_default_x:0"]
    assert [p.name for p in model.outputs] == ["StatefulPartitionedCall:0"]
    states = {n: np.full(t.shape, t.zero_point, t.dtype) for n, t in part.inputs.items() if t.is_variable}
    for seed in (1, 2):
        x = random(model.inputs, seed)
        assert (model(x) == part.evaluate(x | states)["StatefulPartitionedCall:0"]).all()
    with pytest.raises(ModelError, match="cannot run over USB: its list of transfers is not complete"):
        coral.load(compiled, device="usb")


@pytest.mark.slow
def test_models_compiled_together_stay_resident_together(corpus: Path) -> None:
    """Loaded together: one upload each, and the same results as loaded alone."""
    small, large = "mobilenet_v1_0.25_128_quant", "mobilenet_v1_0.5_160_quant"
    together = [coral.load(cocompiled(corpus, a, b)) for a, b in ((small, large), (large, small))]
    assert together[0].program.token == together[1].program.token != 0
    inputs = [random(m.inputs, 5) for m in together]
    stick = shared_stick("sim")
    results = [m(x) for m, x in zip(together, inputs, strict=True)]
    before = stick.counters.uploads
    for m, x, first in zip(together, inputs, results, strict=True):
        assert (m(x) == first).all()
    assert stick.counters.uploads == before
    for name, x, result in zip((small, large), inputs, results, strict=True):
        alone = chip_part(*pair(corpus, f"vision/{name}")).evaluate(x)
        assert (result == next(iter(alone.values()))).all()
        assert (coral.load(pair(corpus, f"vision/{name}")[1], device=DirectChip())(x) == result).all()


def test_models_that_were_not_compiled_together_displace_each_other(corpus: Path) -> None:
    names = ["dense/dense_256", "dense/dense_512"]
    models = [coral.load(pair(corpus, name)[1]) for name in names]
    inputs = [random(m.inputs, 6) for m in models]
    expected = [chip_part(*pair(corpus, n)).evaluate(x) for n, x in zip(names, inputs, strict=True)]
    for _ in range(2):
        for m, x, y in zip(models, inputs, expected, strict=True):
            assert (m(x) == next(iter(y.values()))).all()


def test_a_model_beside_the_runtime_on_one_stick(corpus: Path) -> None:
    """Layers and model displace each other's parameters; both notice."""
    original, compiled = pair(corpus, "dense/dense_512")
    runtime, model = open_runtime("sim"), coral.load(compiled)
    assert model.target is shared_stick("sim")
    rng = np.random.default_rng(9)
    spec = LinearSpec(64, 64, 3, 5, 7, 0.001953125)
    x, w = (rng.integers(0, 256, shape, np.uint8) for shape in ((1, 64), (64, 64)))
    acc = (x.astype(np.int64) - 3) @ (w.T.astype(np.int64) - 5)
    expected = np.clip(np.rint(acc * spec.mult) + 7, 0, 255)
    given = random(model.inputs, 9)
    answer = next(iter(chip_part(original, compiled).evaluate(given).values()))
    for _ in range(2):
        assert (runtime.linear(spec, x, w, key="layer") == expected).all()
        assert (model(given) == answer).all()


def test_operators_before_the_chip_part_alone(corpus: Path) -> None:
    """MoveNet's CAST and QUANTIZE of the image, as ai-edge-litert computes them and by hand."""
    pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert: operators of the host NOT run")
    file = read_edgetpu(pair(corpus, "vision/movenet_single_pose_lightning_ptq")[1])
    operators, chip = (0, 1), file.graph.operators[file.operator]
    assert [file.graph.operators[n].name for n in operators] == ["CAST", "QUANTIZE"]
    part = HostPart(file, operators, file.graph.inputs, chip.inputs)
    (number,), (result,) = file.graph.inputs, chip.inputs
    image = np.random.default_rng(10).integers(0, 256, file.graph.tensors[number].shape, np.uint8)
    tensor = file.graph.tensors[result]
    expected = np.clip(np.rint(image / tensor.scale) + tensor.zero_point, -128, 127)
    assert (part({number: image})[result] == expected).all()


@pytest.mark.slow
def test_operators_of_the_host(corpus: Path) -> None:
    """They run; not wanted, they are named and left."""
    original, compiled = pair(corpus, "vision/deeplabv3_mnv2_dm05_pascal_quant")
    whole = coral.load(compiled)
    assert whole.left == ()
    assert [(p.name, p.shape, p.dtype.name) for p in whole.outputs] == [("ArgMax", (1, 513, 513), "int64")]
    part = coral.load(compiled, host=False)
    assert part.left[0] == "RESIZE_BILINEAR"
    assert part.left[-1] == "ARG_MAX"
    x = random(part.inputs, 7)
    result, chip, classes = chip_part(original, compiled).evaluate(x), part(x), whole(x)
    assert isinstance(chip, dict)
    assert all((chip[name] == result[name]).all() for name in result)
    assert isinstance(classes, np.ndarray)
    assert 0 <= classes.min() <= classes.max() < 21


@pytest.mark.slow
def test_operators_before_the_chip_part(corpus: Path) -> None:
    compiled = pair(corpus, "vision/movenet_single_pose_lightning_ptq")[1]
    model = coral.load(compiled)
    assert [(p.name, p.dtype.name) for p in model.inputs] == [("serving_default_input:0", "uint8")]
    pose = model(random(model.inputs, 8))
    assert isinstance(pose, np.ndarray)
    assert (pose.shape, pose.dtype) == ((1, 1, 17, 3), np.float32)
    part = coral.load(compiled, host=False)
    assert [p.name for p in part.inputs] == ["tfl.quantize"]
    assert part.left[:2] == ("CAST", "QUANTIZE")


def test_a_chip_without_usb_says_what_does_not_fit(corpus: Path) -> None:
    """Every mistake is named, and the chip is usable afterwards."""
    original, compiled = pair(corpus, "dense/dense_256")
    model = coral.load(compiled, device=DirectChip())
    target: Any = model.target
    x = random(model.inputs, 11)
    packed = model.packed({model.inputs[0].number: x[model.inputs[0].name]})
    with pytest.raises(DirectError, match="takes 256 bytes, given is nothing"):
        target.run(model.program, {})
    with pytest.raises(DirectError, match="takes 256 bytes, given is 3 bytes"):
        target.run(model.program, {model.inputs[0].name: b"abc"})
    hints = model.program.hints
    unfed = replace(model.program, hints=tuple(h for h in hints if getattr(h, "base", None) is not Base.INPUT))
    with pytest.raises(DirectError, match="while an output of 256 bytes is due"):
        target.run(unfed, packed)
    twice = replace(model.program, hints=(*hints, InterruptHint(0)))
    assert model.caching is not None
    target.ensure_cached(model.caching)
    with pytest.raises(DirectError, match="ended with 1 interrupts, 2 are announced"):
        target.run(twice, packed)
    assert (model(x) == next(iter(chip_part(original, compiled).evaluate(x).values()))).all()


def test_a_program_that_asks_for_what_there_is_not(corpus: Path) -> None:
    """The LSTM with its scratch buffer too small, and with the output at the parameters' address."""
    model = coral.load(pair(corpus, "sequence/keras_lstm_mnist_ptq")[1], device=DirectChip())
    target: Any = model.target
    assert model.caching is not None
    small = replace(model.program, scratch_bytes=8)
    (stream,) = model.program.bitstreams
    moved = tuple(replace(r, base=Base.PARAMETER, name="") if r.base is Base.OUTPUT else r for r in stream.relocations)
    wrong = replace(model.program, bitstreams=(replace(stream, relocations=moved),))
    for program in (small, wrong):
        target.ensure_cached(model.caching)
        with pytest.raises(DirectError, match="beyond it"):
            target.run(program, model.packed({}))
