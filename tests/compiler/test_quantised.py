"""Models that ``coral.quantize`` made: compiled, they compute the quantised model's own codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, nn

import coral
from coral.apps.direct import DirectChip
from coral.chip import Chip


class Network:
    """Strides, a depthwise layer, a residual sum, a mean, a dense layer."""

    def __init__(self) -> None:
        self.stem, self.one = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.two, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 5)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu().max_pool2d(2)
        x = (self.two(self.one(x).relu6()) + x).relu()
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("per_channel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_quantised_models(per_channel: bool) -> None:
    Tensor.manual_seed(1)
    images = np.random.default_rng(1).normal(0.2, 1, (4, 3, 12, 16)).astype(np.float32)
    quantised: Any = coral.quantize(Network(), images, per_channel=per_channel)
    one = coral.compile(quantised, batch=4)
    assert not one.partition.reasons
    model = coral.load(one.data, device=DirectChip(Chip(seed=3)))
    got, (port,) = model(images.transpose(0, 2, 3, 1)), model.outputs
    np.testing.assert_array_equal(port.values(np.asarray(got)), quantised(Tensor(images)).numpy())
