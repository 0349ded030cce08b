"""Programs by Google's compiler: every one runs to its end, and what they compute is what the layers say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coral.chip import Chip, ChipState, UnwrittenRead
from coral.evaluate.compare import chip_part
from coral.package import Kind
from coral.package.graph import read_model
from coral.package.tensors import pack_input, unpack_output
from coral.package.tflite_file import read_edgetpu
from tests.chip.harness import programs, run

CHEAP = [
    "robotics/bright_16x16", "robotics/bright_64x64", "robotics/gabor_64x64_7k_4o_2s", "robotics/gabor_64x64_p4",
    "robotics/looming_64x64_3x3", "sequence/split_concat", "vision/mobilenet_v1_0.25_128_quant_legacy",
]  # fmt: skip
SLOW = [
    "vision/mobilenet_v1_0.25_128_quant", "vision/mobilenet_v1_0.5_160_quant",
    "vision/mobilenet_v1_1.0_224_quant_embedding_extractor", "vision/mobilenet_v2_1.0_224_quant_legacy",
    "vision/deeplabv3_mnv2_dm05_pascal_quant", "vision/movenet_single_pose_lightning_ptq",
]  # fmt: skip


def differences(corpus: Path, name: str, seed: int | None, inputs: int) -> list[int]:
    """Differing bytes per output and input, chip against the layer-level judge."""
    compiled = read_edgetpu(corpus / f"{name}_edgetpu.tflite")
    part = chip_part(corpus / f"{name}.tflite", compiled)
    pair = {p.kind: p for p in compiled.package.programs}
    program, chip, rng = pair[Kind.EXECUTION_ONLY], Chip(seed=seed), np.random.default_rng(7)
    run(chip, pair[Kind.PARAMETER_CACHING])
    found = []
    for _ in range(inputs):
        x = part.random_inputs(rng)
        raw = run(chip, program, {i.name: pack_input(i, x[i.name].reshape(i.y, i.x, i.z)) for i in program.inputs})
        want = part.evaluate(x)
        for layer in program.outputs:
            got = unpack_output(layer, raw[layer.name]).reshape(-1)
            found.append(int((got != want[layer.name].reshape(-1)).sum()))
    return found


@pytest.mark.parametrize("name", CHEAP)
def test_layers_and_instructions_agree(corpus: Path, name: str) -> None:
    """Two inputs each: the first is executed, the second repeats the recording."""
    assert not any(differences(corpus, name, None, 2))


@pytest.mark.parametrize("name", ["robotics/bright_16x16", "robotics/gabor_64x64_p4", "sequence/split_concat"])
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_the_units_gives_the_same(corpus: Path, name: str, seed: int) -> None:
    assert not any(differences(corpus, name, seed, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_layers_and_instructions_agree_in_large_networks(corpus: Path, name: str) -> None:
    assert not any(differences(corpus, name, None, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CHEAP, SLOW[0], SLOW[5]])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_the_units_gives_the_same_in_all(corpus: Path, name: str, seed: int) -> None:
    assert not any(differences(corpus, name, seed, 1))


def test_gabor_is_a_depthwise_convolution(corpus: Path) -> None:
    """The 7x7 filters written out: int32 sums, float32 multiplier, half to even."""
    path = corpus / "robotics" / "gabor_64x64_7k_4o_2s"
    graph = read_model(path.with_name(path.name + ".tflite")).main
    operator = next(o for o in graph.operators if o.name == "DEPTHWISE_CONV_2D")
    w, y_t = graph.tensors[operator.inputs[1]], graph.tensors[operator.outputs[0]]
    x_t = graph.tensors[operator.inputs[0]]
    pair = programs(path.with_name(path.name + "_edgetpu.tflite"))
    program = pair[Kind.EXECUTION_ONLY]
    image = np.random.default_rng(3).integers(0, 256, (64, 64), np.uint8)
    chip = Chip()
    run(chip, pair[Kind.PARAMETER_CACHING])
    raw = run(chip, program, {program.inputs[0].name: image.tobytes()})
    got = unpack_output(program.outputs[0], raw[program.outputs[0].name])

    zero = x_t.zero_point + (128 if x_t.dtype == np.int8 else 0)
    padded = np.pad(image.astype(np.int64) - zero, 3)
    assert w.data is not None
    acc = sum(
        padded[dy : dy + 64, dx : dx + 64, None] * w.data[0, dy, dx].astype(np.int64)
        for dy in range(7)
        for dx in range(7)
    )
    f = np.float32
    mult = f(f(x_t.scale) * w.scales.astype(f)) * (f(1) / f(y_t.scale))
    out_zero = y_t.zero_point + (128 if y_t.dtype == np.int8 else 0)
    want = np.rint(np.clip(acc.astype(f) * mult, -out_zero, 255 - out_zero)).astype(np.int64) + out_zero
    low = 0 if operator.options["fused_activation_function"] == "NONE" else out_zero
    assert (got == want.clip(low, 255)).all()


def test_split_and_concatenation_move_channels(corpus: Path) -> None:
    pair = programs(corpus / "sequence" / "split_concat_edgetpu.tflite")
    program = pair[Kind.EXECUTION_ONLY]
    rng = np.random.default_rng(4)
    inputs = {i.name: rng.integers(0, 256, (i.y, i.x, i.z), np.uint8) for i in program.inputs}
    chip = Chip()
    run(chip, pair[Kind.PARAMETER_CACHING])
    raw = run(chip, program, {name: array.tobytes() for name, array in inputs.items()})
    channels = {(name, c): inputs[name][..., c].tobytes() for name in inputs for c in range(inputs[name].shape[2])}
    for layer in program.outputs:
        found = unpack_output(layer, raw[layer.name])
        for c in range(layer.z):
            assert found[..., c].tobytes() in channels.values(), f"{layer.name} channel {c} is no input channel"


COMPLETE = {
    "add1": (8, 8), "div2": (8, 8), "div2_10": (16, 16), "div2_20": (32, 32), "div2_40": (64, 64), "div2_8": (8, 8),
    "div2_80": (128, 128), "mul2": (8, 8), "mul2_add10": (8, 8), "relu": (8, 8), "relu_2": (8, 8), "relu_4": (8, 8),
    "sigmoid": (8, 8), "sub1": (8, 8), "div2_10_aarch64": (16, 16), "div2_20_aarch64": (32, 32),
    "div2_8_aarch64": (8, 8), "div4": (8, 8), "relu_sub_1": (8, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPLETE)
def test_bare_programs_of_2020_run(corpus: Path, name: str) -> None:
    chip, (taken, given) = Chip(), COMPLETE[name]
    chip.feed(0, (corpus / "legacy_programs" / f"{name}.coral").read_bytes())
    chip.feed(1, bytes(range(taken)))
    while chip.run() is ChipState.NEEDS_HOST:
        assert chip.missing is not None
        chip.feed(chip.missing[0], bytes(chip.missing[1]))
    assert [len(o) for o in chip.outputs] == [given]


@pytest.mark.parametrize("size", [0x100, 0x80])
def test_bare_parameter_programs_run(corpus: Path, size: int) -> None:
    chip = Chip()
    chip.feed(0, (corpus / "legacy_programs" / f"weight_copy_in_{size:#x}.coral").read_bytes())
    chip.feed(2, bytes(size))
    assert chip.run() is ChipState.FINISHED


@pytest.mark.parametrize(("name", "size"), [("dense_1_8_mul", 8), ("matmul_256", 256), ("inception_0", 268208)])
def test_bare_programs_without_their_weights_are_refused(corpus: Path, name: str, size: int) -> None:
    chip = Chip()
    chip.feed(0, (corpus / "legacy_programs" / f"{name}.coral").read_bytes())
    chip.feed(1, bytes(size))
    with pytest.raises(UnwrittenRead, match="scale, bias or zero point"):
        chip.run()


def test_relu_program_is_an_identity_for_codes_above_the_zero_point(corpus: Path) -> None:
    chip = Chip()
    chip.feed(0, (corpus / "legacy_programs" / "relu.coral").read_bytes())
    chip.feed(1, bytes([0, 127, 128, 255, 0, 0, 0, 0]))
    assert chip.run() is ChipState.FINISHED
    assert chip.written.popleft().tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    ("name", "estimate"),
    [
        ("vision/mobilenet_v1_0.25_128_quant_legacy", 21_568),
        pytest.param("vision/mobilenet_v2_1.0_224_quant_legacy", 458_040, marks=pytest.mark.slow),
    ],
)
def test_predicted_cycles_are_near_the_compilers_estimate(corpus: Path, name: str, estimate: int) -> None:
    pair = programs(corpus / f"{name}_edgetpu.tflite")
    program = pair[Kind.EXECUTION_ONLY]
    assert program.estimated_cycles == estimate
    chip = Chip()
    run(chip, pair[Kind.PARAMETER_CACHING])
    run(chip, program, {i.name: bytes(i.size_bytes) for i in program.inputs})
    assert abs(chip.cycles / estimate - 1) < 0.02
