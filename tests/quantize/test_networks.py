"""Convolutional networks: batch norms go, neighbours share codes, sums are added on the chip, and it is all checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, nn
from tinygrad.helpers import GlobalCounters

import coral
from coral.quantize.layers import ChannelQuant, QConv2d, QLinear
from coral.quantize.report import Report

F = np.float32
RNG = np.random.default_rng(21)


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return Tensor(F(np.random.default_rng(seed).normal(0.3, 1, shape))).realize()


def conv(*arguments: Any, **options: Any) -> nn.Conv2d:
    layer = nn.Conv2d(*arguments, **options)
    layer.weight = Tensor(F(RNG.normal(0, 0.3, layer.weight.shape))).realize()
    if layer.bias is not None:
        layer.bias = Tensor(F(RNG.normal(0, 0.3, layer.bias.shape))).realize()
    return layer


def norm(channels: int, *, positive: bool = True, statistics: bool = True) -> nn.BatchNorm:
    layer, scale = nn.BatchNorm(channels, track_running_stats=statistics), RNG.uniform(0.5, 1.5, channels)
    layer.weight = Tensor(F(scale if positive else scale * RNG.choice([-1, 1], channels))).realize()
    layer.bias = Tensor(F(RNG.normal(0, 0.5, channels))).realize()
    if statistics:
        layer.running_mean = Tensor(F(RNG.normal(0, 0.5, channels))).realize()
        layer.running_var = Tensor(F(RNG.uniform(0.5, 2, channels))).realize()
    return layer


def check(model: Any, x: Tensor, limit: float = 0.06) -> tuple[Any, Report]:
    """Quantise; the original must not change, and the result must be near it and what the report says."""
    floats = model(x).numpy() if callable(model) else x.sequential(model).numpy()
    quantised, report = coral.quantize(model, x, report=True)
    got = quantised(x).numpy() if callable(quantised) else x.sequential(quantised).numpy()
    assert np.array_equal(model(x).numpy() if callable(model) else x.sequential(model).numpy(), floats)
    assert np.sqrt(np.mean((got - floats) ** 2)) <= limit * np.sqrt(np.mean(floats**2))
    assert report.error.rms == pytest.approx(np.sqrt(np.mean((got - floats) ** 2)), rel=0.25)
    return quantised, report


def places(report: Report) -> dict[str, tuple[str, str]]:
    return {layer.name: (layer.place, layer.reason.removesuffix(", channels balanced")) for layer in report.layers}


def test_beautiful_mnist_in_small() -> None:
    """Every fold and every link of tinygrad's MNIST network: ten kernels, of which the first and last are not uint8."""
    model = [
        conv(1, 4, 5), Tensor.relu, conv(4, 4, 5), Tensor.relu, norm(4), Tensor.max_pool2d,
        conv(4, 8, 3), Tensor.relu, conv(8, 8, 3), Tensor.relu, norm(8), Tensor.max_pool2d,
        lambda x: x.flatten(1), nn.Linear(8, 10),
    ]  # fmt: skip
    x = inputs(16, 1, 20, 20)
    quantised, report = check(model, x)
    assert places(report) == {
        "0": ("chip", "ReLU merged"),
        "2": ("chip", "ReLU merged, takes the codes of 0"),
        "4": ("folded", "into 2 behind ReLU"),
        "6": ("chip", "ReLU merged, takes the codes of 2, pooled"),
        "8": ("chip", "ReLU merged, takes the codes of 6"),
        "10": ("folded", "into 8 behind ReLU"),
        "13": ("chip", "takes the codes of 8, pooled"),
    }
    GlobalCounters.reset()
    x.sequential(quantised).realize()
    assert GlobalCounters.kernel_count == 9  # quantise, 4 convolutions, 2 pools, linear, dequantise


class Block:
    """A residual block of two convolutions with batch norms."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        self.conv1, self.bn1 = conv(channels, channels, 3, stride=stride, padding=1, bias=False), norm(channels)
        self.conv2, self.bn2 = conv(channels, channels, 3, padding=1, bias=False), norm(channels)
        self.down = conv(channels, channels, 1, stride=stride) if stride > 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + (x if self.down is None else self.down(x))).relu()


class Residual:
    def __init__(self) -> None:
        self.stem, self.blocks, self.head = conv(3, 6, 3, padding=1), [Block(6), Block(6, 2), Block(6)], nn.Linear(6, 5)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu().max_pool2d(3, 2, padding=1)
        return self.head(x.sequential(self.blocks).mean((2, 3)))


def test_residual_networks_stay_in_codes() -> None:
    model, x = Residual(), inputs(8, 3, 16, 16)
    quantised, report = check(model, x)
    found = places(report)
    assert {place for place, _ in found.values()} == {"chip", "folded"}
    assert found["blocks.0.bn1"] == ("folded", "into blocks.0.conv1")
    assert found["blocks.1.conv1"] == ("chip", "ReLU merged, adds the codes of blocks.0.conv2 and stem")
    assert found["head"][1].startswith("adds the codes of blocks.2.conv2 and blocks.1.conv2 and blocks.1.down")
    assert found["head"][1].endswith("averaged")
    GlobalCounters.reset()
    quantised(x).realize()
    # Quantise, dequantise, 9 layers, max pool, three sums, the mean: nothing else, and no float code in between.
    assert GlobalCounters.kernel_count == 2 + 9 + 1 + 3 + 1


class Other:
    """What cannot be folded becomes a depthwise convolution; padding does not know a shift, scales may be negative."""

    def __init__(self) -> None:
        self.first, self.conv1, self.bn1 = norm(3), conv(3, 4, 3), norm(4)
        self.conv2, self.bn2 = conv(4, 8, 3, padding=1, groups=2), norm(8, positive=False)
        self.conv3, self.bn3, self.head = conv(8, 6, 3, stride=2, padding=(0, 1, 0, 1)), norm(6), nn.Linear(6, 4)
        self.flat = norm(4)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(self.first(x)).relu())
        x = self.bn2(self.conv2(x).relu6())
        x = self.bn3(self.conv3(x).max_pool2d()).relu()
        return self.flat(self.head(x.max((2, 3)))).relu() + 1


def test_batch_norms_that_cannot_be_folded() -> None:
    _, report = check(Other(), inputs(8, 3, 12, 12))
    found = places(report)
    dw = "as a depthwise 1x1 convolution: "
    assert found["first"][0] == found["bn1"][0] == found["bn2"][0] == "chip"
    assert found["first"][1].startswith(dw + "it is not behind a layer")
    assert found["bn1"][1].startswith(dw + "the padding of conv2 does not know its shift")
    assert found["bn2"][1].startswith(dw + "a ReLU6 lies between conv2 and it")
    assert found["bn3"] == ("folded", "into conv3 through max pool")
    assert found["flat"] == ("folded", "into head")
    assert "ReLU6 merged" in found["conv2"][1]


@pytest.mark.parametrize(
    ("stack", "what"),
    [
        (lambda: [conv(2, 3, 3), Tensor.max_pool2d, norm(3)], "into 0 through max pool"),
        (lambda: [conv(2, 3, 3), Tensor.relu, Tensor.max_pool2d, norm(3), conv(3, 2, 2)], "into 0 behind ReLU through"),
        pytest.param(lambda: [conv(2, 3, 3), norm(3, positive=False), conv(3, 2, 2)], "into 0", marks=pytest.mark.slow),
        pytest.param(
            lambda: [conv(2, 3, 3), Tensor.max_pool2d, norm(3, positive=False)],
            "a scale is not positive",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: [conv(2, 3, 3), Tensor.relu, norm(3)], "no layer behind it takes its shift", marks=pytest.mark.slow
        ),
        (
            lambda: [conv(2, 3, 3), Tensor.relu, norm(3), Tensor.relu, conv(3, 2, 2)],
            "2 takes its shift in a way|4 takes",
        ),
    ],
)
def test_folds(stack: Callable[[], list[Any]], what: str) -> None:
    _, report = check(stack(), inputs(8, 2, 12, 12, seed=3))
    reasons = [layer.reason for layer in report.layers if layer.kind == "BatchNorm"]
    assert any(text in reasons[0] for text in what.split("|")), reasons


def test_batch_norms_without_statistics_are_frozen() -> None:
    model = [conv(3, 4, 3), Tensor.max_pool2d, norm(4, statistics=False), Tensor.quick_gelu, conv(4, 5, 3)]
    x = inputs(16, 3, 12, 12)
    quantised, report = check(model, x)
    assert places(report)["2"] == ("folded", "into 0 through max pool, statistics of the calibration inputs")
    assert not hasattr(model[2], "running_mean")
    one = x[:1].sequential(quantised).numpy()
    assert np.array_equal(one, x.sequential(quantised).numpy()[:1])
    GlobalCounters.reset()
    x.sequential(quantised).realize()
    assert GlobalCounters.kernel_count == 6  # the pool is taken from codes although quick_gelu is float


def test_a_model_whose_norm_is_read_elsewhere_keeps_its_meaning() -> None:
    class Reads:
        def __init__(self) -> None:
            self.conv1, self.bn, self.conv2 = conv(2, 3, 3), norm(3), conv(3, 2, 1)

        def __call__(self, x: Tensor) -> Tensor:
            y = self.conv1(x)
            return self.conv2(self.bn(y)) + y.mean()

    _, report = check(Reads(), inputs(8, 2, 9, 9))
    assert places(report)["bn"][1].startswith("as a depthwise 1x1 convolution: folding it changes the model's output")


def test_weights_per_channel_where_they_win() -> None:
    """One output cancels large weights, the other has small ones: no single scale holds both."""
    layer, twice = nn.Linear(2, 2), F(RNG.normal(0, 1, (64, 1))).repeat(2, 1)
    layer.weight, layer.bias = Tensor(F([[100, -100], [0.5, 0.3]])).realize(), None
    q, report = coral.quantize(layer, twice, report=True)
    assert isinstance(q.quant.w, ChannelQuant)
    assert report.layers[0].reason == "int8 weights per channel"
    assert report.error.rms < 0.03 * report.error.signal_rms
    assert np.array_equal(q(Tensor(twice)).numpy(), q.reference(twice))
    plain, report = coral.quantize(layer, twice, report=True, per_channel=False)
    assert not isinstance(plain.quant.w, ChannelQuant)
    assert report.error.rms > 0.1 * report.error.signal_rms


@pytest.mark.parametrize(
    ("options", "per_channel"),
    [
        ({"padding": 1, "stride": 2}, True),
        ({"groups": 4, "padding": (0, 1)}, False),
        pytest.param({}, False, marks=pytest.mark.slow),
        pytest.param({"groups": 4, "padding": (0, 1)}, True, marks=pytest.mark.slow),
        pytest.param({"dilation": 2}, False, marks=pytest.mark.slow),
        pytest.param({"bias": False}, True, marks=pytest.mark.slow),
    ],
)
def test_a_convolution_equals_its_reference_on_every_device(options: dict[str, Any], per_channel: bool) -> None:
    layer, x = conv(4, 8, 3, **options), inputs(3, 4, 7, 8)
    q = coral.quantize(layer, x, per_channel=per_channel)
    assert isinstance(q, QConv2d)
    expected = q.reference(x.numpy())
    assert np.array_equal(q(x).numpy(), expected)
    for name in ("weight_codes", "bias_codes", "multipliers"):
        tensor = getattr(q, name)
        setattr(q, name, None if tensor is None else Tensor(tensor.numpy(), device="PYTHON").realize())
    assert np.array_equal(q(Tensor(x.numpy(), device="PYTHON")).numpy(), expected)


def test_wrong_shapes_are_refused() -> None:
    q = coral.quantize(conv(4, 8, 3), inputs(3, 4, 7, 8))
    with pytest.raises(coral.CoralError, match=r"\[N, 4, H, W\], not \(3, 5, 7, 8\)"):
        q(inputs(3, 5, 7, 8))
    assert "stride=1" in repr(q)
    assert isinstance(coral.quantize(nn.Linear(3, 2), inputs(4, 3)), QLinear)
