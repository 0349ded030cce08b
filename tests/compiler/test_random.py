"""Random graphs: every part that goes to the chip is exact, the rest is on the host with a reason."""

from __future__ import annotations

import numpy as np
import pytest

import coral
from compiler.random_graphs import draw
from coral.apps.direct import DirectChip
from coral.apps.files import random_inputs
from coral.chip import Chip
from coral.compiler import NothingToCompileError, compile_models, partition
from coral.evaluate.graph import run_operators
from coral.package.graph_file import write_model


def check(seed: int) -> None:
    """The compiled model gives what the judge gives for the whole graph."""
    graph = draw(seed)
    try:
        (compiled,) = compile_models([write_model([graph])])
    except NothingToCompileError:
        return
    assert all(compiled.partition.reasons.values())
    model = coral.load(compiled.data, device=DirectChip(Chip(seed=seed)))
    inputs = random_inputs(model.inputs, seed)
    got = model(inputs)
    values = {i: inputs[graph.tensors[i].name] for i in graph.inputs if graph.tensors[i].name in inputs}
    expected = run_operators(graph, range(len(graph.operators)), values)
    named = got if isinstance(got, dict) else {model.outputs[0].name: got}
    for i in graph.outputs:
        name = graph.tensors[i].name
        np.testing.assert_array_equal(named[name], expected[i], err_msg=f"seed {seed}, {name}")


@pytest.fixture(autouse=True)
def slow_host(monkeypatch, request):
    """Every other graph keeps programs that the host would be faster than."""
    if request.node.callspec.params["seed"] % 2:
        monkeypatch.setattr(partition, "OPERATOR_SECONDS", 1.0)


@pytest.mark.parametrize(
    "seed", [*range(6), *range(10000, 10006), 113, 116, 120, 135, 185, 1077, 1178, 2018, 3245, 3935]
)
def test_random_graphs(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10000, 11000))
def test_many_random_graphs(seed):
    check(seed)
