"""The parts of engine ``blocks``: their programs on the simulated chip against the bit model, that against formulas."""

from __future__ import annotations

import numpy as np
import pytest
from codegen.network.harness import outputs, run, transfers
from codegen.network.reference import run_network
from story_models import decoder, random_checkpoint

from coral.chip import Chip
from coral.codegen import CodegenError
from coral.codegen import network as nw
from coral.llm.bits import Bits
from coral.llm.blocks import Blocks
from coral.llm.checkpoint import Config

TINY = Config(dim=48, hidden=92, layers=2, heads=4, kv_heads=2, vocabulary=300, context=24)
SHAPE_15M = Config(dim=288, hidden=768, layers=1, heads=6, kv_heads=6, vocabulary=512, context=256)


def blocks(config: Config, seed: int = 0) -> Blocks:
    stories = [[1, *range(261 + k, 261 + k + 20)] for k in range(3)]
    return Blocks(random_checkpoint(config, seed), stories)


def on_chip(network: nw.Network, x: np.ndarray, seed: int | None) -> np.ndarray:
    p = nw.NetworkProgram(network, batch=len(x))
    chip = Chip(seed=seed)
    run(chip, p.caching())
    return outputs(p, transfers(chip, p.execution, p.pack({"x": x}))[0])["y"]


def bits(network: nw.Network, x: np.ndarray) -> np.ndarray:
    return Bits(network)({"x": x})["y"]


def codes(rng: np.random.Generator, rows: int, dim: int) -> np.ndarray:
    return rng.integers(0, 256, (rows, 1, 1, dim), dtype=np.uint8)


def test_bit_model_and_reference() -> None:
    rng = np.random.default_rng(0)
    for part in blocks(TINY).parts.values():
        x = codes(rng, 5, part.network.tensors["x"].c)
        expected = [run_network(part.network, image)["y"] for image in x]
        np.testing.assert_array_equal(bits(part.network, x), expected)
    pooled = nw.Network(
        "pool",
        {"x": nw.Tensor("x", 4, 6, 8, 3), "y": nw.Tensor("y", 2, 2, 8, 3)},
        ("x",),
        (nw.MaxPool(("x",), "y", (-3.0, 252.0), nw.Window((2, 3), (2, 3))),),
        ("y",),
    )
    x = rng.integers(0, 256, (2, 4, 6, 8), dtype=np.uint8)
    np.testing.assert_array_equal(bits(pooled, x), [run_network(pooled, image)["y"] for image in x])
    total = nw.Network("add", pooled.tensors, ("x",), (nw.AveragePool(("x",), "y", (-3.0, 252.0)),), ("y",))
    with pytest.raises(CodegenError, match="'y': AveragePool is none of those"):
        bits(total, x)


def test_programs_of_all_parts() -> None:
    rng, made = np.random.default_rng(1), blocks(TINY)
    for seed, name in enumerate(("0 qkv", "1 wo", "0 ffn")):
        network = made.parts[name].network
        for rows in (1, 3, 33):
            x = codes(rng, rows, network.tensors["x"].c)
            np.testing.assert_array_equal(on_chip(network, x, seed), bits(network, x), err_msg=f"{name} {rows}")


def test_near_the_float_model() -> None:
    """Logits follow the formulas; a row is the same alone and in company."""
    made = blocks(TINY, 3)
    ids = np.array([[1, *range(262, 278)], [1, *range(270, 286)]])
    models = {name: Bits(part.network) for name, part in made.parts.items()}

    def compute(name: str, x: np.ndarray) -> np.ndarray:
        return models[name]({"x": x[:, None, None]})["y"].reshape(len(x), -1)

    together, alone = made.cache(2), made.cache(1)
    expected = [decoder(made.checkpoint, row.tolist()) for row in ids]
    for position in range(1, ids.shape[1]):
        x = made.step(compute, ids[:, position], position, together)
        np.testing.assert_array_equal(made.step(compute, ids[:1, position], position, alone), x[:1])
        found = made.shortlist.logits(x)
        for row in (0, 1):
            right = expected[row][position]
            assert np.corrcoef(found[row], right)[0, 1] > 0.98
            assert np.abs(found[row] - right).max() < 0.5 * right.std()


@pytest.mark.slow
def test_feed_forward_of_the_15m_shape() -> None:
    """130 different tokens in one call, 256 rows, single rows; 20 orders of units."""
    network, rng = blocks(SHAPE_15M).parts["0 ffn"].network, np.random.default_rng(2)
    many = codes(rng, 130, 288)
    assert len(np.unique(many, axis=0)) == 130
    expected = bits(network, many)
    assert len(np.unique(expected)) > 100
    np.testing.assert_array_equal(on_chip(network, many, 0), expected)
    full = codes(rng, 256, 288)
    np.testing.assert_array_equal(on_chip(network, full, 1), bits(network, full))
    for seed in range(20):
        for rows in (1, 5):
            np.testing.assert_array_equal(
                on_chip(network, many[seed : seed + rows], seed), expected[seed : seed + rows]
            )
