"""Random graphs with more images per call: every image is what the judge computes for it alone."""

from __future__ import annotations

import numpy as np
import pytest

import coral
from compiler.random_graphs import Grower, draw
from coral.apps.direct import DirectChip
from coral.apps.files import random_inputs
from coral.chip import Chip
from coral.compiler import CompileError, NothingToCompileError, compile_models, partition
from coral.evaluate.graph import run_operators
from coral.package.graph import Graph, Operator
from coral.package.graph_file import write_model


def check(graph: Graph, batch: int, seed: int) -> None:
    """The compiled model against the judge, image by image."""
    try:
        (compiled,) = compile_models([write_model([graph])], batch=batch)
    except NothingToCompileError:
        return
    model = coral.load(compiled.data, device=DirectChip(Chip(seed=seed)))
    inputs = random_inputs(model.inputs, seed)
    got = model(inputs)
    named = got if isinstance(got, dict) else {model.outputs[0].name: got}
    names = [t.name for t in graph.tensors]
    for image in range(batch):
        one = {i: inputs[names[i]][image : image + 1] for i in graph.inputs if names[i] in inputs}
        expected = run_operators(graph, range(len(graph.operators)), one)
        for i in graph.outputs:
            np.testing.assert_array_equal(named[names[i]][image : image + 1], expected[i], err_msg=names[i])


@pytest.mark.parametrize("seed", [50008, 50015, 50017, 50022, 50027, 50036, 50057])
@pytest.mark.parametrize("batch", [2, 5])
def test_random_graphs_in_batches(seed: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(partition, "OPERATOR_SECONDS", 1.0)
    check(draw(seed), batch, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40000, 40400))
def test_many_random_graphs_in_batches(seed: int) -> None:
    graph = draw(seed)
    if graph.tensors[graph.inputs[0]].shape[0] > 1 or any(op.name == "TRANSPOSE" for op in graph.operators):
        pytest.skip("several images already, or an operator that may mix them")
    check(graph, 2 + seed % 4, seed)


@pytest.mark.parametrize(
    ("begin", "end", "stride", "masks"),
    [((0, 0), (1, 2), (1, 2), {"shrink_axis_mask": 2}), ((-1, 0), (1, 2), (1, 1), {}), ((0, 0), (1, 4), (-1, 1), {})],
)
def test_slices_of_images_are_refused(begin: tuple, end: tuple, stride: tuple, masks: dict) -> None:
    grower = Grower(0)
    x = grower.tensor((1, 4))
    bounds = [grower.constant(np.array(values, np.int32)) for values in (begin, end, stride)]
    y = grower.tensor((1, end[1]), x)
    cut = Operator("STRIDED_SLICE", (x, *bounds), (y,), masks, (), None, "StridedSliceOptions")
    graph = Graph("main", tuple(grower.tensors), (x,), (y,), (cut,))
    with pytest.raises(CompileError, match="STRIDED_SLICE takes some of the images, or axes"):
        compile_models([write_model([graph])], batch=2)
