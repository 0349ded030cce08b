"""Differences, and compiled files that do not belong to a graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coral.evaluate import EvaluateError
from coral.evaluate.compare import chip_part, difference
from coral.package.graph import Graph, read_model


def test_difference() -> None:
    expected = np.int8([[-128, 5], [6, 127]])
    found = difference(expected, np.int8([127, 5, 5, 126]))
    assert (found.values, found.differing, found.largest, found.amounts) == (4, 3, 255, {255: 1, -1: 2})
    same = difference(expected, expected)
    assert (same.values, same.differing, same.largest) == (4, 0, 0)
    for other in (np.int8([1, 2, 3]), np.float32([1, 2, 3, 4])):
        with pytest.raises(EvaluateError, match=r"cannot compare int8 \(2, 2\) with"):
            difference(expected, other)


def test_another_graph(corpus: Path) -> None:
    """A missing tensor, another size, and the same names with another scale."""
    compiled = corpus / "dense" / "dense_256_edgetpu.tflite"
    with pytest.raises(EvaluateError, match="no tensors named 'serving_default_keras_tensor:0'"):
        chip_part(corpus / "dense" / "dense_512.tflite", compiled)
    graph = read_model(corpus / "dense" / "dense_256.tflite").main
    for change in ({"scales": np.float32([0.5])}, {"shape": (1, 255)}, {"type": 9}, {"zero_points": np.int64([1])}):
        tensors = (replace(graph.tensors[0], **change), *graph.tensors[1:])
        with pytest.raises(EvaluateError, match="was compiled from another graph"):
            chip_part(Graph(graph.name, tensors, graph.inputs, graph.outputs, graph.operators), compiled)


def test_layers_of_other_shape(corpus: Path) -> None:
    """Inputs may have the layer's shape instead of the tensor's; names must be all the chip part's."""
    part = chip_part(corpus / "robotics" / "bright_16x16.tflite", corpus / "robotics" / "bright_16x16_edgetpu.tflite")
    (name,) = part.inputs
    x = part.random_inputs(np.random.default_rng(0))[name]
    assert x.shape == (1, 16, 16, 1)
    (as_tensor,), (as_layer,) = (part.evaluate({name: v}).values() for v in (x, x.reshape(1, 1, 256)))
    assert np.array_equal(as_tensor, as_layer)
    with pytest.raises(EvaluateError, match=r"inputs are \['serving_default_keras_tensor:0'\], given are \[\]"):
        part.evaluate({})
    with pytest.raises(EvaluateError, match=r"must be uint8 \(1, 16, 16, 1\), given is uint8 \(7,\)"):
        part.evaluate({name: x.ravel()[:7]})


def test_states_of_the_lstm(corpus: Path) -> None:
    """Variables are inputs, and outputs under another name."""
    files = [corpus / "sequence" / f"keras_lstm_mnist_ptq{kind}.tflite" for kind in ("", "_edgetpu")]
    part = chip_part(*files)
    assert {name: tensor.name for name, tensor in part.outputs.items()} == {
        "StatefulPartitionedCall:0": "StatefulPartitionedCall:0",
        "tfl.pseudo_qconst_variable_output": "tfl.pseudo_qconst",
        "tfl.pseudo_qconst1_variable_output": "tfl.pseudo_qconst1",
    }
    inputs = part.random_inputs(np.random.default_rng(0))
    outputs = part.evaluate(inputs)
    assert [value.dtype.str[1:] for value in outputs.values()] == ["u1", "i1", "i2"]
    assert not np.array_equal(outputs["tfl.pseudo_qconst1_variable_output"], inputs["tfl.pseudo_qconst1"])
