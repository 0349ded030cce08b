"""Words chosen from the blocks that can hold them are those chosen from all logits."""

from __future__ import annotations

import numpy as np
import pytest
from codegen.network.harness import outputs, run, transfers
from hypothesis import given, settings
from hypothesis import strategies as st

from coral.chip import Chip
from coral.codegen import network as nw
from coral.llm.bits import Bits
from coral.llm.shortlist import BLOCK, Shortlist
from coral.llm.story import choose


def largest(s: Shortlist, x: np.ndarray) -> np.ndarray:
    """What the chip finds, [rows, blocks]."""
    return Bits(s.network(x))({"words": s.codes})["largest"].reshape(s.blocks, len(x)).T


def made(seed: int, vocabulary: int, dim: int, rows: int, step: float = 1.0) -> tuple[Shortlist, np.ndarray]:
    """A classifier whose words differ in length, and inputs; ``step`` below 1 lets codes saturate."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(0, 1, (vocabulary, dim)) * rng.uniform(0.05, 1, (vocabulary, 1))
    x = rng.normal(0, 1, (rows, dim)) * rng.uniform(0.1, 3, (rows, 1))
    usual = float(np.abs(matrix @ x.T).max()) * step
    return Shortlist(matrix.astype(np.float32), usual), x.astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**20),
    st.integers(1, 1500),
    st.integers(2, 24).map(lambda n: 4 * n),
    st.integers(1, 11),
    st.sampled_from([1.0, 0.5, 0.05, 4.0]),
)
def test_the_same_words_are_chosen(seed: int, vocabulary: int, dim: int, rows: int, step: float) -> None:
    s, x = made(seed, vocabulary, dim, rows, step)
    codes, full = largest(s, x), s.logits(x)
    np.testing.assert_allclose(full, x.astype(np.float64) @ s.matrix.reshape(-1, dim)[:vocabulary].T, atol=1e-3)
    lower, upper = s.bounds(x, codes)
    padded = np.pad(full.astype(np.float64), ((0, 0), (0, s.blocks * BLOCK - vocabulary)), constant_values=-np.inf)
    best = padded.reshape(rows, s.blocks, BLOCK).max(2)
    real = np.isfinite(best)
    assert (best <= upper)[real].all()
    assert (best >= lower)[real].all()
    chances = np.random.default_rng(seed).random(rows)
    for temperature, top_p in ((0.0, 1.0), (0.8, 0.9), (1.0, 0.3), (0.2, 0.99), (2.0, 0.0)):
        found = s.chosen(x, codes, temperature, top_p)
        known = np.isfinite(found)
        np.testing.assert_array_equal(found[known], full[known])
        picked = choose(found, chances, temperature, top_p)
        np.testing.assert_array_equal(picked, choose(full, chances, temperature, top_p))


def test_equal_logits_are_all_there() -> None:
    s = Shortlist(np.ones((300, 8), np.float32), 8.0)
    x = np.ones((2, 8), np.float32)
    found = s.chosen(x, largest(s, x), 0.0, 1.0)
    assert np.isfinite(found).all()
    assert choose(found, np.zeros(2), 0.0, 1.0).tolist() == [0, 0]
    nothing = Shortlist(np.zeros((100, 8), np.float32), 0.0)
    assert np.isfinite(nothing.chosen(x * 0, largest(nothing, x * 0), 0.5, 0.5)).all()


def test_few_blocks_are_computed() -> None:
    """A peaked distribution needs few of 100 blocks."""
    s, x = made(3, 6400, 64, 4)
    x[:] = s.matrix.reshape(-1, 64)[[5, 900, 3000, 6399]] * 2
    found = s.chosen(x, largest(s, x), 0.0, 1.0)
    assert found.argmax(1).tolist() == (x @ s.matrix.reshape(-1, 64).T).argmax(1).tolist()
    assert np.isfinite(found).mean() < 0.2


def check(s: Shortlist, x: np.ndarray, seeds: range) -> nw.NetworkProgram:
    """The program on the simulated chip against the bit model; other tokens are other parameters of a program."""
    p = nw.NetworkProgram(s.network(x[::-1].copy()), batch=s.images)
    network = s.network(x)
    expected = Bits(network)({"words": s.codes})["largest"]
    for seed in seeds:
        chip = Chip(seed=seed)
        run(chip, p.caching(p.parameters_of(network)))
        got = outputs(p, transfers(chip, p.execution, p.pack({"words": s.codes}))[0])["largest"]
        np.testing.assert_array_equal(got, expected)
    return p


def test_the_chip_finds_the_largest() -> None:
    """Full and last images, several passes are in the slow one; tokens around the 4, 64 and 128 columns of a row."""
    for vocabulary, dim, rows in ((1000, 48, 3), (64, 16, 66), (700, 32, 5)):
        check(*made(rows, vocabulary, dim, rows), range(rows, rows + 2))


@pytest.mark.slow
def test_32000_words() -> None:
    """288 x 32,000, every block, in 20 orders of units; several passes."""
    s, x = made(1, 32000, 288, 4)
    p = check(s, x, range(20))
    assert (s.blocks, s.images, s.each) == (500, 250, 2)
    assert p.passes > 1
