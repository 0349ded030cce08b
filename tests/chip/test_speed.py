"""Processor time of a call once a program was translated; the targets leave a slow machine some room."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from coral.chip import Chip
from coral.package import Kind
from tests.chip.harness import programs, run


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("dense/dense_1024", 0.005),
        pytest.param("vision/mobilenet_v1_0.25_128_quant", 0.15, marks=pytest.mark.slow),
        pytest.param("vision/mobilenet_v1_0.25_128_quant_legacy", 0.15, marks=pytest.mark.slow),
        pytest.param("vision/mobilenet_v2_1.0_224_quant_legacy", 1.0, marks=pytest.mark.slow),
    ],
)
def test_replayed_calls_are_fast(corpus: Path, name: str, seconds: float) -> None:
    """The best of five: what else the machine does is not the question."""
    pair = programs(corpus / f"{name}_edgetpu.tflite")
    inputs = {layer.name: bytes(range(256)) * (layer.size_bytes // 256) for layer in pair[Kind.EXECUTION_ONLY].inputs}
    chip, took = Chip(), []
    run(chip, pair[Kind.PARAMETER_CACHING])
    for _ in range(7):
        start = time.process_time()
        run(chip, pair[Kind.EXECUTION_ONLY], inputs)
        took.append(time.process_time() - start)
    assert min(took[2:]) < seconds, took
