"""Operators of the host: by hand, and where it is installed against ai-edge-litert on whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluate_graphs import run, single, tensor

from coral.evaluate import EvaluateError
from coral.evaluate.graph import run_operators
from coral.package.graph import read_model

HOST_OF = {"vision/movenet_single_pose_lightning_ptq": (0, 156), "vision/deeplabv3_mnv2_dm05_pascal_quant": (69, 71)}


def constant(values: Any, dtype: str = "i4") -> Any:
    data = np.array(values, dtype)
    return tensor("c", data.shape, dtype, data=data)


def unary(op: str, x: np.ndarray, y: Any, *more: Any, **options: Any) -> np.ndarray:
    given = tensor("x", x.shape, x.dtype.str[1:])
    return run(single(op, [given, *more, y], tuple(range(1 + len(more))), **options), x)


def test_float_functions():
    x = np.array([-4, -1, 0, 0.25, 2, 9], np.float32)
    y = tensor("y", (6,), "f4")
    assert (unary("ABS", x, y) == [4, 1, 0, 0.25, 2, 9]).all()
    assert (unary("HARD_SWISH", x, y)[[0, 2, 5]] == [0, 0, 9]).all()
    assert (unary("LEAKY_RELU", x, y, alpha=0.5)[:2] == [-2, -0.5]).all()
    assert (unary("ADD", x, y, constant(1, "f4"), fused_activation_function="RELU6") == [0, 0, 1, 1.25, 3, 6]).all()
    assert (unary("FLOOR_DIV", np.array([-7, 7]), tensor("y", (2,), "i8"), constant(2)) == [-4, 3]).all()


def test_codes_pass_through_real_values():
    """0.5 steps are rounded away from zero."""
    x = np.arange(256, dtype=np.uint8)
    given, y = tensor("x", (256,), "u1", [0.5], [100]), tensor("y", (256,), "u1", [1.0], [50])
    got = run(single("ABS", [given, y], (0,)), x).astype(int)
    real = np.abs(x.astype(float) - 100) / 2
    assert (got == np.clip(np.floor(real + 0.5) + 50, 0, 255)).all()


def test_movement():
    x = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    assert (unary("TRANSPOSE", x, tensor("y", (4, 2, 3), "i4"), constant([2, 0, 1])) == x.transpose(2, 0, 1)).all()
    assert (
        unary("SLICE", x, tensor("y", (1, 2, 4), "i4"), constant([1, 1, 0]), constant([1, 2, -1])) == x[1:, 1:]
    ).all()
    bounds = [constant([0, 2, 3]), constant([9, 0, 0]), constant([1, -1, -2])]
    cut = unary("STRIDED_SLICE", x, tensor("y", (2, 2, 2), "i4"), *bounds, begin_mask=1, end_mask=1)
    assert (cut == x[:, 2:0:-1, 3:0:-2]).all()
    one = unary("STRIDED_SLICE", x, tensor("y", (3, 4), "i4"), *bounds[:1], *bounds[:1], constant([1, 1, 1]),
                begin_mask=6, end_mask=6, shrink_axis_mask=1)  # fmt: skip
    assert (one == x[0]).all()
    assert (unary("GATHER", x, tensor("y", (2, 2, 4), "i4"), constant([2, 0]), axis=1) == x[:, [2, 0]]).all()
    assert (unary("GATHER_ND", x, tensor("y", (1, 4), "i4"), constant([[1, 2]])) == x[1, 2]).all()
    assert unary("ARG_MAX", x, tensor("y", (2, 3), "i8"), constant(2)).tolist() == [[3] * 3] * 2


def test_resizing_to_any_size():
    """Corners aligned: linear ramps stay linear; a single pixel is repeated."""
    ramp = np.arange(0, 50, 10, dtype=np.uint8).reshape(1, 1, 5, 1)
    x, y = tensor("x", ramp.shape, "u1", [1.0], [0]), tensor("y", (1, 3, 41, 1), "u1", [1.0], [0])
    graph = single("RESIZE_BILINEAR", [x, constant([3, 41]), y], (0, 1), align_corners=True, half_pixel_centers=False)
    (got,) = run_operators(graph, [0], {0: ramp}).values()
    assert (got[0, :, :, 0] == np.arange(41)).all()


def test_mistakes_are_named():
    x = np.zeros((2, 3), np.float32)
    y = tensor("y", (2, 3), "f4")
    with pytest.raises(EvaluateError, match="do not fit"):
        unary("DIV", x, y, constant([1, 2], "f4"))
    with pytest.raises(EvaluateError, match="by 0"):
        unary("FLOOR_DIV", np.zeros((2, 3), np.int32), tensor("y", (2, 3), "i4"), constant(0))
    with pytest.raises(EvaluateError, match="no reference function"):
        unary("WHERE", x, y)
    with pytest.raises(EvaluateError, match="outside"):
        unary("GATHER", x, tensor("y", (2, 1), "f4"), constant([7]), axis=1)
    with pytest.raises(EvaluateError, match="shape"):
        unary("TRANSPOSE", x, y, constant([1, 0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", HOST_OF)
def test_host_parts_equal_litert(corpus: Path, name: str) -> None:
    """Float32, integer and moving operators of two models, each on TFLite's inputs."""
    litert: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="TFLite's kernels NOT compared")
    path = corpus / f"{name}.tflite"
    graph = read_model(path).main
    interpreter = litert.Interpreter(str(path), experimental_preserve_all_tensors=True)
    interpreter.allocate_tensors()
    source = graph.tensors[graph.inputs[0]]
    image = np.random.default_rng(0).integers(0, 256, source.shape, np.uint8)
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image)
    interpreter.invoke()
    first, last = HOST_OF[name]
    chip = {"CONV_2D", "DEPTHWISE_CONV_2D", "ADD", "SUB", "MUL", "LOGISTIC"}
    compared = 0
    for number, op in enumerate(graph.operators[: last + 1]):
        codes = graph.tensors[op.outputs[0]].dtype in (np.uint8, np.int8)
        whole = op.name != "RESIZE_BILINEAR" or name.startswith("vision/deeplab")
        if number < first or (op.name in chip and codes) or not whole:
            continue
        given = {i: interpreter.get_tensor(i) for i in op.inputs if i >= 0 and graph.tensors[i].data is None}
        for i, ours in run_operators(graph, [number], given).items():
            theirs = interpreter.get_tensor(i)
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            if op.name == "SQRT":
                np.testing.assert_allclose(ours, theirs, rtol=2e-7)
            else:
                np.testing.assert_array_equal(ours, theirs, err_msg=f"{number} {op.name}")
            compared += 1
    assert compared >= 3
