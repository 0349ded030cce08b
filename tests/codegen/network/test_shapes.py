"""Shapes that fail elsewhere: positions and channels around powers of two, any number of images."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.network.harness import Maker, check, outputs, run
from coral.chip import Chip
from coral.codegen import network as nw

POSITIONS = {127: (1, 127), 128: (8, 16), 129: (3, 43)}
CHANNELS = (767, 768, 769)


def pointwise(positions: int, channels: int) -> None:
    y, x = POSITIONS[positions]
    m = Maker(channels, y, x, channels, per_channel=positions % 2 > 0)
    m.layer(nw.Conv, 288)
    check(nw.NetworkProgram(m.network()), m.images(1))


@pytest.mark.parametrize(("positions", "channels"), list(zip(POSITIONS, CHANNELS, strict=True)))
def test_pointwise(positions, channels):
    pointwise(positions, channels)


@pytest.mark.slow
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("channels", CHANNELS)
def test_pointwise_in_all_combinations(positions, channels):
    pointwise(positions, channels)


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 31, 32, 33, 256])
def test_any_number_of_images(batch):
    """Every image as the reference has it; so it does not depend on the others."""
    m = Maker(5, 6, 7, 3)
    m.layer(nw.Conv, 10, (3, 3), (2, 2))
    m.pool(nw.MaxPool, (2, 2), (1, 1))
    m.dense(5)
    check(nw.NetworkProgram(m.network(), batch=batch), m.images(batch), seed=batch if batch < 9 else None)


def test_an_image_alone_and_among_others():
    m = Maker(6, 9, 8, 4)
    m.layer(nw.Depthwise, 8, (3, 3))
    m.normalise(nw.Softmax)
    images, results = m.images(33), []
    for n in (1, 33):
        p, chip = nw.NetworkProgram(m.network(), batch=n), Chip(seed=n)
        run(chip, p.caching())
        results.append(outputs(p, run(chip, p.execution, p.pack(images[:n])))[m.last])
    np.testing.assert_array_equal(results[0][0], results[1][0])
