"""Networks on the simulated chip, every output byte against the graph's own arithmetic."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import shared

from codegen.network.harness import Maker, check, outputs, run
from codegen.network.random_networks import draw
from coral import numerics
from coral.chip import Chip
from coral.codegen import ShapeError
from coral.codegen import network as nw
from coral.compiler.lowering import Lowering, unique_names
from coral.evaluate import evaluate
from coral.package.graph import read_model


def fnv1a64(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return value


@pytest.mark.parametrize("index", range(6))
def test_outputs_of_a_physical_stick(index):
    """The raw output of six convolutions, tile by tile, has the hash that a stick's output had."""
    folder = shared("reference")
    case = json.loads((folder / "device_outputs.json").read_text())["runs"][index]
    arrays = np.load(folder / "device_outputs.npz")
    h, w, c = case["height"], case["width"], case["channels"]
    weights = (arrays[case["weights"]].reshape(c, 3, 3, c).astype(np.int16) + 128).astype(np.uint8)
    scales = np.float32(case["input_scale"]) * arrays[case["weight_scales"]].astype(np.float32)
    mult = np.asarray(numerics.f32(scales / np.float32(case["output_scale"])), np.float32)
    zero_in, zero_out = (case[k] + 128 for k in ("input_zero_point", "output_zero_point"))
    tensors = {"x": nw.Tensor("x", h, w, c, zero_in), "y": nw.Tensor("y", h, w, c, zero_out)}
    limits = (float(-zero_out), float(255 - zero_out))
    layer = nw.Conv(("x",), "y", limits, weights, None, 128, mult, nw.same((h, w), (3, 3), (1, 1)))
    p = nw.NetworkProgram(nw.Network("stick", tensors, ("x",), (layer,), ("y",)))
    image = (np.arange(h * w * c) % 251).astype(np.uint8)
    chip = Chip(seed=index)
    run(chip, p.caching())
    (raw,) = run(chip, p.execution, p.pack(image[None]))
    assert len(raw) == case["output_bytes"]
    assert fnv1a64(raw) == int(case["output_fnv1a64"], 16)


def beautiful_mnist(seed: int = 1) -> Maker:
    """The network of tinygrad's beautiful_mnist, batch norm folded."""
    m = Maker(seed, 28, 28, 1)
    for n, k in ((32, (5, 5)), (32, (5, 5))):
        m.layer(nw.Conv, n, k, pad="valid")
    m.pool(nw.MaxPool, (2, 2), (2, 2))
    for n, k in ((64, (3, 3)), (64, (3, 3))):
        m.layer(nw.Conv, n, k, pad="valid")
    m.pool(nw.MaxPool, (2, 2), (2, 2))
    m.dense(10)
    return m


@pytest.mark.parametrize(("batch", "words"), [(1, None), (7, None), (32, 3563)])
def test_beautiful_mnist_is_one_program(batch, words):
    """Also with fewer instruction bytes for 32 images than Google's 57 KB for one."""
    m = beautiful_mnist()
    p = nw.NetworkProgram(m.network(), batch=batch)
    check(p, m.images(batch), seed=batch if batch == 1 else None)
    if words is not None:
        assert len(p.execution.bitstreams[0].data) <= 16 * words


def test_an_image_does_not_depend_on_the_others():
    m = beautiful_mnist(3)
    images = m.images(3)
    together = nw.NetworkProgram(m.network(), batch=3)
    chip = Chip()
    run(chip, together.caching())
    got = outputs(together, run(chip, together.execution, together.pack(images)))[m.last]
    alone = nw.NetworkProgram(m.network(), batch=1)
    chip = Chip()
    run(chip, alone.caching())
    for image, expected in zip(images, got, strict=True):
        one = outputs(alone, run(chip, alone.execution, alone.pack(image[None])))[m.last]
        np.testing.assert_array_equal(one[0], expected)


MODELS = {
    "vision/mobilenet_v1_0.25_128_quant.tflite": 2569,
    "vision/mobilenet_v1_0.5_160_quant.tflite": 3371,
    "vision/mobilenet_v1_1.0_224_quant_embedding_extractor.tflite": 2812 + 250,
    "vision/mobilenet_v2_1.0_224_quant_legacy.tflite": 4590,
    "robotics/gabor_64x64_7k_4o_2s.tflite": 460,
    "robotics/gabor_64x64_p4.tflite": 480,
}
"""Models and the instruction words that the regular form is said to take (docs/network.md)."""


@pytest.mark.parametrize("name", [*list(MODELS)[:1], *list(MODELS)[4:]])
def test_models_against_the_layer_judge(corpus, name):
    _model(corpus, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS)[1:4])
def test_large_models_against_the_layer_judge(corpus, name):
    _model(corpus, name)


def network_of(graph, first, last) -> nw.Network:
    """The operators between two tensors as one network."""
    lowering = Lowering(graph, unique_names(graph), 1)
    lowering.source(first)
    for number, op in enumerate(graph.operators):
        if lowering.values.keys() & set(op.inputs):
            lowering.take(number)
        if last in op.outputs:
            break
    return lowering.network("model", (lowering.values[last].name,))


def _model(corpus, name):
    graph = read_model(corpus / name).main
    first = graph.inputs[0]
    last = next((op.inputs[0] for op in graph.operators if op.name == "SOFTMAX"), graph.outputs[0])
    network = network_of(graph, first, last)
    p = nw.NetworkProgram(network)
    source, target = graph.tensors[first], graph.tensors[last]
    assert len(p.execution.bitstreams[0].data) <= 16 * MODELS[name]
    x = np.random.default_rng(5).integers(0, 256, source.shape).astype(np.uint8)
    value = x if source.dtype == np.uint8 else (x ^ 128).view(np.int8)
    expected = evaluate(graph, {source.name: value}, outputs=[target.name])[target.name]
    codes = expected if expected.dtype == np.uint8 else expected.view(np.uint8) ^ 128
    chip = Chip()
    run(chip, p.caching())
    got = outputs(p, run(chip, p.execution, p.pack(x)))[network.outputs[0]]
    np.testing.assert_array_equal(got.reshape(-1), codes.reshape(-1))


@pytest.mark.slow
def test_backbone_of_movenet(corpus):
    """66 stages, int8 with scales per channel, up to the first resize."""
    graph = read_model(corpus / "vision" / "movenet_single_pose_lightning_ptq.tflite").main
    first = next(op.inputs[0] for op in graph.operators if op.name == "CONV_2D")
    last = next(op.inputs[0] for op in graph.operators if op.name == "RESIZE_BILINEAR")
    p = nw.NetworkProgram(network_of(graph, first, last))
    source, target = graph.tensors[first], graph.tensors[last]
    x = np.random.default_rng(5).integers(0, 256, source.shape).astype(np.uint8)
    expected = evaluate(graph, {source.name: (x ^ 128).view(np.int8)}, outputs=[target.name])[target.name]
    chip = Chip()
    run(chip, p.caching())
    got = outputs(p, run(chip, p.execution, p.pack(x)))[p.network.outputs[0]]
    np.testing.assert_array_equal(got.reshape(-1), expected.view(np.uint8).reshape(-1) ^ 128)


@pytest.mark.parametrize("seed", range(40))
def test_random_networks(seed):
    _random(seed, 1e5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10_000, 12_000))
def test_many_random_networks(seed):
    _random(seed, 2e6)


def _random(seed: int, budget: float) -> None:
    m, grid, batch = draw(seed, budget)
    try:
        p = nw.NetworkProgram(m.network(), batch=batch, grid=grid, own_input=seed % 4 == 0)
    except ShapeError:  # images too large for this grid; some other one must do
        p = nw.NetworkProgram(m.network(), batch=batch)
    check(p, m.all_images(batch), seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(50))
def test_order_of_units_does_not_matter(number):
    m, grid, batch = draw(20_000 + number, 2e5)
    p, images = nw.NetworkProgram(m.network(), batch=batch, grid=grid), m.all_images(batch)
    check(p, images, seed=0)
    caching, data, results = p.caching(), p.pack(images), set()
    for seed in range(20):
        chip = Chip(seed=seed)
        run(chip, caching)
        results.add(tuple(run(chip, p.execution, data)))
    assert len(results) == 1


def test_passes_over_images_that_do_not_fit_together():
    """A loop on the scalar core; two outputs of different sizes, the last pass is not full."""
    m = Maker(11, 40, 36, 4)
    a = m.layer(nw.Conv, 64, (1, 1))
    b = m.layer(nw.Conv, 12, (3, 3), (2, 2))
    p = nw.NetworkProgram(m.network(a, b), batch=35, grid=nw.Grid(1, 1))
    assert p.passes == 3
    assert p.execution.hint_pattern() == "IAO2AO2AO2!"
    once = nw.NetworkProgram(m.network(a, b), batch=16, grid=nw.Grid(1, 1))
    words = [len(program.execution.bitstreams[0].data) // 16 for program in (p, once)]
    assert words[0] - words[1] <= 16 + 18  # tiles take turns again
    check(p, m.images(35))


@pytest.mark.slow
def test_body_of_deeplab(corpus):
    """513 x 513: the first six layers in bands. Down to the last depthwise block's projection."""
    graph = read_model(corpus / "vision" / "deeplabv3_mnv2_dm05_pascal_quant.tflite").main
    last = next(op.inputs[0] for op in graph.operators if op.name == "AVERAGE_POOL_2D")
    p = nw.NetworkProgram(network_of(graph, graph.inputs[0], last))
    assert p.plan.bands
    source, target = graph.tensors[graph.inputs[0]], graph.tensors[last]
    x = np.random.default_rng(5).integers(0, 256, source.shape).astype(np.uint8)
    expected = evaluate(graph, {source.name: x}, outputs=[target.name])[target.name]
    chip = Chip()
    run(chip, p.caching())
    got = outputs(p, run(chip, p.execution, p.pack(x)))[p.network.outputs[0]]
    np.testing.assert_array_equal(got.reshape(-1), expected.reshape(-1))
