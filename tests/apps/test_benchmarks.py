"""``coral bench fc|conv|mnist|cifar``: geometry, figures that follow from it, and what was published."""

from __future__ import annotations

import pytest

from apps.conftest import Command
from coral.apps import benchmarks


def test_products_and_bytes_follow_from_the_geometry() -> None:
    mnist = 24**2 * 32 * 25 + 20**2 * 32 * 25 * 32 + 8**2 * 64 * 9 * 32 + 6**2 * 64 * 9 * 64 + 576 * 10
    assert benchmarks.beautiful_mnist().products == mnist
    speedy, size = 31**2 * 24 * 2 * 2 * 3, 31
    for c, n in ((24, 64), (64, 256), (256, 512)):
        speedy += size**2 * 9 * c * n + (size // 2) ** 2 * 9 * n * n
        size //= 2
    assert benchmarks.speedy_conv_net().products == speedy + 512 * 10
    assert benchmarks.mobilenet_v1().products == pytest.approx(569e6, rel=0.01)
    found = {f.batch: f for f in benchmarks.mnist()}
    assert found[32].bound_cycles == 32 * mnist / 4096
    assert all(f.bound_cycles < f.cycles for f in found.values())
    assert found[1].bytes_to_chip == found[1].instruction_bytes + 28 * 28
    assert found[32].bytes_to_chip == found[32].instruction_bytes + 32 * 28 * 28
    assert all(f.bytes_from_chip >= 10 * f.batch for f in found.values())


def test_goals_for_beautiful_mnist() -> None:
    """Published: 22,994 and 24,178 images/s at 500 MHz, 57 KB of instructions for one image."""
    found = {f.batch: f for f in benchmarks.mnist()}
    assert found[32].per_second["max"] > 26_000
    assert found[32].instruction_bytes < 57_000
    assert found[32].seconds["max"] < found[32].seconds["std"] < 32 / 16_000


def test_predictions_against_a_stick() -> None:
    """The model's constants were fitted on these rows: within 5 per cent. Our MobileNet is faster than Google's."""
    single = [f for f in benchmarks.fc() if f.batch == 1]
    assert len(single) == 5
    for f in single:
        assert f.seconds["std"] * 1e3 == pytest.approx(float(f.published[0].text.split()[0]), rel=0.05)
    (mobilenet,) = [f for f in benchmarks.conv() if f.name.startswith("MobileNet")]
    assert mobilenet.seconds["std"] < 3.9e-3
    assert mobilenet.seconds["max"] < 2.35e-3


def test_command(run: Command) -> None:
    found = run("bench", "fc", "--json").json
    assert [p["name"] for p in found["programs"]][:2] == ["64 x 64", "288 x 288"]
    assert found["programs"][0]["published"][0]["source"].startswith("programs_fused.md")
    assert set(found["programs"][0]["seconds"]) == {"std", "max"}
    shown = run("bench", "cifar").stdout
    assert "predicted, no stick involved" in shown
    assert "published" not in shown
