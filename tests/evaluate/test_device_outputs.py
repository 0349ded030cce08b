"""What a physical stick computed: hashes of six convolutions (docs/evaluate.md, "Proof")."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import shared
from evaluate_graphs import run, single, tensor


@pytest.fixture(scope="module")
def runs() -> list[tuple[dict[str, Any], np.ndarray, np.ndarray]]:
    """(description, weights, weight scales) of every run."""
    folder = shared("reference")
    if not (folder / "device_outputs.npz").is_file():
        message = f"{folder}/device_outputs.npz is absent: the stick's own outputs are NOT compared"
        warnings.warn(message, stacklevel=2)
        pytest.skip(message)
    arrays = np.load(Path(folder) / "device_outputs.npz")
    described = json.loads((folder / "device_outputs.json").read_text())["runs"]
    return [(r, arrays[r["weights"]], arrays[r["weight_scales"]]) for r in described]


def fnv1a(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def parts(size: int) -> list[slice]:
    """Rows (columns) of the four tile rows (columns); none of the six runs has a remainder."""
    assert size % 4 == 0
    return [slice(i * size // 4, (i + 1) * size // 4) for i in range(4)]


@pytest.mark.parametrize("number", range(6))
def test_outputs_of_a_physical_stick(runs: list[tuple[dict[str, Any], np.ndarray, np.ndarray]], number: int) -> None:
    described, weights, scales = runs[number]
    h, w, c = described["height"], described["width"], described["channels"]
    x = (np.arange(h * w * c) % 251 - 128).astype(np.int8).reshape(1, h, w, c)
    tensors = [
        tensor("x", x.shape, "i1", [described["input_scale"]], [described["input_zero_point"]]),
        tensor("w", weights.shape, "i1", scales, np.zeros(c), weights),
        tensor("y", x.shape, "i1", [described["output_scale"]], [described["output_zero_point"]]),
    ]
    graph = single("CONV_2D", tensors, (0, 1, -1), padding="SAME", stride_h=1, stride_w=1)
    codes = (run(graph, x).astype(int)[0] + 128).astype(np.uint8)
    raw = b"".join(codes[rows, columns].tobytes() for rows in parts(h) for columns in parts(w))
    assert len(raw) == described["output_bytes"]
    assert fnv1a(raw) == int(described["output_fnv1a64"], 16)
