"""Where layers run: the rule, its switch, and what CORAL_DEBUG says about it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from coral.backend import placement, reset_stats, stats
from coral.quantize.expressions import qlinear_expression
from coral.quantize.expressions_windows import qmax_pool_expression

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (4, 32), dtype=np.uint8)
W = RNG.integers(0, 256, (32, 32), dtype=np.uint8)


def alternating(x: Tensor, w: Tensor, times: int) -> Tensor:
    """Layers with something between them that is none: the codes' last bit is flipped."""
    for _ in range(times):
        x = qlinear_expression(x, w, None, 128, 128, 0.001, 0, 255, 128)
        x = (x ^ 1).contiguous()
    return x


@pytest.mark.parametrize(("times", "place", "programs"), [(11, "", 11), (12, "", 0), (12, "chip", 12), (2, "cost", 0)])
def test_alternation_with_host_code(
    chip, cpu: str, monkeypatch: pytest.MonkeyPatch, times: int, place: str, programs: int
) -> None:
    """Twelve small programs between host kernels cost more than they save; fewer stay where the user sent them."""
    monkeypatch.setenv("CORAL_PLACE", place)
    results = []
    for device in ("CORAL", cpu):
        reset_stats()
        results.append(alternating(*(Tensor(a, device=device).realize() for a in (X, W)), times).numpy())
        if device == "CORAL":
            assert (stats().chip_programs, stats().host_programs) == (programs, 2 * times - programs)
    assert np.array_equal(*results)


def test_large_layers_of_a_fragmented_network_stay(chip) -> None:
    """The decision is made per program: a layer that saves time goes to the chip."""
    x = Tensor(RNG.integers(0, 256, (256, 1024), dtype=np.uint8), device="CORAL").realize()
    w = Tensor(RNG.integers(0, 256, (1024, 1024), dtype=np.uint8), device="CORAL").realize()
    small = [Tensor(a, device="CORAL").realize() for a in (X, W)]
    y = qlinear_expression(x, w, None, 128, 128, 0.001, 0, 255, 128)
    Tensor.realize(alternating(*small, 12), y)
    assert stats().chip_programs == 1


def test_a_pool_on_its_own_stays_on_the_host(chip, cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = RNG.integers(0, 256, (2, 3, 8, 8), dtype=np.uint8)
    for place, programs in (("", 0), ("chip", 1)):
        monkeypatch.setenv("CORAL_PLACE", place)
        reset_stats()
        got, want = (qmax_pool_expression(Tensor(image, device=d).realize(), 2, 2).numpy() for d in ("CORAL", cpu))
        assert np.array_equal(got, want)
        assert (stats().chip_programs, stats().host_programs) == (programs, 1 - programs)


def test_debug_names_operation_place_reason_and_both_costs(
    chip, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CORAL_DEBUG", "1")
    x, w = Tensor(X[:3, :31], device="CORAL").contiguous().realize(), Tensor(W[:29, :31], device="CORAL").contiguous()
    w = w.realize()
    image = Tensor(RNG.integers(0, 256, (1, 3, 9, 9), dtype=np.uint8), device="CORAL").realize()
    capfd.readouterr()
    qlinear_expression(x, w, None, 128, 128, 0.001, 0, 255, 128).realize()
    qmax_pool_expression(image, 3, 3).realize()
    (x.cast(dtypes.float32).exp2() * 3).realize()
    chip_line, pool_line, host_line = (line for line in capfd.readouterr().err.splitlines() if "coral: " in line)
    costs = r"predicted [\d,]+ µs on the chip, [\d,]+ µs on the host$"
    assert re.match(r"coral: chip coral_linear_3_31_29_31: identical to Linear, 3 images or rows; " + costs, chip_line)
    assert re.match(
        r"coral: host host_maxpool_1_3_9_9: identical to the quantised layer MaxPool .*, but " + costs, pool_line
    )
    assert re.match(r"coral: host \S+: the result is not stored as uint8; computes EXP2, MUL; predicted ", host_line)


def test_an_unknown_rule_is_an_error(chip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORAL_PLACE", "moon")
    with pytest.raises(placement.PlacementError, match="CORAL_PLACE is 'moon'; it can be auto, chip, cost"):
        qlinear_expression(
            Tensor(X, device="CORAL").realize(), Tensor(W, device="CORAL").realize(), None, 1, 2, 0.5, 0, 255, 3
        ).realize()
