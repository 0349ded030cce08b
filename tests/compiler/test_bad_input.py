"""What cannot be compiled says why; what the chip lacks in the middle of a model stays on the host."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coral
from coral import CoralError
from coral.apps.direct import DirectChip
from coral.compiler import CompileError, compile_models, partition
from coral.compiler.partition import Segment
from coral.evaluate.graph import run_operators
from coral.package.graph import Graph, Operator, Tensor, read_model
from coral.package.graph_file import write_model


def tensor(name: str, shape: tuple[int, ...], dtype: str = "u1", scale: float = 0.1) -> Tensor:
    kind = {"u1": 3, "i1": 9, "f4": 0, "i4": 2}[dtype]
    quant = ([scale], [7]) if dtype in ("u1", "i1") else ([], [])
    return Tensor(
        name, shape, kind, np.dtype(dtype), np.array(quant[0], np.float32), np.array(quant[1], np.int64), 0, None, False
    )


def chain(tensors: list[Tensor], *names: str) -> Graph:
    ops = [Operator(name, (i,), (i + 1,), {}) for i, name in enumerate(names)]
    return Graph("main", tuple(tensors), (0,), (len(names),), tuple(ops))


def compiled(graph: Graph, **options: Any) -> Any:
    return compile_models([write_model([graph])], **options)[0]


def test_float_models_name_a_tensor_and_what_to_do():
    graph = chain([tensor("x", (1, 4), "f4"), tensor("middle", (1, 4), "f4")], "RELU")
    with pytest.raises(CompileError, match=r"tensor 'middle' is float32, .* coral.quantize"):
        compiled(graph)


def test_dynamic_shapes():
    graph = chain([tensor("x", (1, 0, 4)), tensor("y", (1, 0, 4))], "RELU")
    with pytest.raises(CompileError, match=r"'x' has the dynamic shape \(1, 0, 4\)"):
        compiled(graph)


def test_nothing_to_compute():
    x = replace(tensor("x", (1, 4)), shape=())
    for graph, sentence in (
        (replace(chain([tensor("x", (1, 4)), tensor("y", (1, 4))], "RELU"), outputs=()), "1 operators and 0 outputs"),
        (replace(chain([tensor("x", (1, 4))]), outputs=(0,)), "1 inputs, 0 operators"),
        (chain([x, tensor("y", (1, 4))], "RELU"), "'x' has no dimensions"),
    ):
        with pytest.raises(CompileError, match=sentence):
            compiled(graph)


def test_tensors_that_nobody_computes():
    x, y, z = (tensor(name, (1, 4)) for name in "xyz")
    relu, late = Operator("RELU", (0,), (1,), {}), Operator("RELU6", (2,), (1,), {})
    packed = replace(z, type=17, dtype=None)
    for operators, outputs, last, sentence in (
        ((relu,), (1, 2), z, "an output is 'z'"),
        ((relu,), (1, -1), z, "an output is no tensor"),
        ((late, replace(relu, outputs=(2,))), (1,), z, "operator 0, RELU6, reads 'z'"),
        ((Operator("ADD", (0, 2), (1,), {}),), (1,), packed, r"'z' \(TFLite type 17\), which no constant holds"),
        ((Operator("ADD", (0, 1), (1,), {}),), (1,), z, "ADD, reads 'y'"),
        ((relu, Operator("ASSIGN_VARIABLE", (0, 1), (), {})), (1,), z, "ASSIGN_VARIABLE, lacks an output"),
        ((relu, replace(relu, outputs=(-1,))), (1,), z, "operator 1, RELU, lacks an output"),
    ):
        with pytest.raises(CompileError, match=sentence):
            compiled(Graph("main", (x, y, last), (0,), outputs, operators))
    with pytest.raises(CompileError, match="needed is one of each"):
        compiled(Graph("main", (x, y), (0, -1), (1,), (relu,)))


@pytest.mark.parametrize("op", ["CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"])
@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (1, 1, 3), (1, 1, 1, 1, 3)])
def test_weights_of_another_rank(op: str, shape: tuple[int, ...]):
    w = constant("w", np.ones(shape, np.uint8))
    layer = Operator(op, (0, 1), (2,), {"padding": "SAME"})
    graph = Graph("main", (tensor("x", (1, 2, 2, 3)), w, tensor("y", (1, 2, 2, 3))), (0,), (2,), (layer,))
    with pytest.raises(CoralError):
        coral.load(compiled(graph).data, device=DirectChip())(np.zeros((1, 2, 2, 3), np.uint8))
    with pytest.raises(CoralError):
        run_operators(graph, [0], {0: np.zeros((1, 2, 2, 3), np.uint8)})


def test_reports_on_operators_of_odd_shapes():
    """A result without channels, and one that is no array: only guesses at the host's time, which must not fail."""
    w = constant("w", np.ones((5, 4), np.uint8))
    for shape in ((1, 3, -7, 0), ()):
        dense = Operator("FULLY_CONNECTED", (0, 1), (2,), {}, (), None, "FullyConnectedOptions")
        tensors = (tensor("x", (1, 4)), w, replace(tensor("y", (1, 5)), shape=shape), tensor("z", (1, 4)))
        one = compiled(Graph("main", tensors, (0,), (2, 3), (dense, Operator("RELU", (0,), (3,), {}))))
        assert [d.place for d in one.report().decisions] == ["host", "chip 0"]


def test_windows_that_no_host_has_memory_for():
    """Averages over a map of 16 positions, by a kernel of 2^31 - 1 rows and columns."""
    size = 2**31 - 1
    options = {"filter_height": size, "filter_width": size, "stride_h": 1, "stride_w": 1, "padding": "SAME"}
    pool = Operator("AVERAGE_POOL_2D", (0,), (1,), options, (), None, "Pool2DOptions")
    graph = Graph("main", (tensor("x", (1, 4, 4, 3)), tensor("y", (1, 4, 4, 3))), (0,), (1,), (pool,))
    with pytest.raises(CompileError, match=f"windows .{size}, {size}. that have"):
        compiled(graph)


def constant(name: str, data: np.ndarray) -> Tensor:
    return replace(tensor(name, data.shape, data.dtype.str[1:]), data=data)


@pytest.mark.parametrize(
    ("shapes", "op", "kind", "sentence"),
    [
        ([(1, 3, 3, 8), (1, 8)], "MUL", "MulOptions", r"MUL repeats 'b' of shape \(1, 8\)"),
        ([(1, 3, 3, 8), (1, 3, 8)], "ADD", "AddOptions", "ADD repeats 'b'"),
        ([(2, 3, 3, 8), np.ones((2, 1, 1, 8), np.uint8)], "ADD", "AddOptions", "ADD repeats 'b'"),
        (
            [(1, 3, 3, 8), np.ones((1, 3, 3, 8), np.uint8)],
            "CONCATENATION",
            "ConcatenationOptions",
            "joins the constant",
        ),
        ([np.ones((1, 4), np.uint8)], "RELU", "", "RELU has only constants"),
        ([(1, 4), (1, 4)], "FULLY_CONNECTED", "FullyConnectedOptions", r"reads the images \['a', 'b'\]"),
    ],
)
def test_batches_of_operators_whose_operands_would_not_fit(shapes: Any, op: str, kind: str, sentence: str):
    """With N images the first axis would meet columns of the other operand: wrong values, or a file that cannot run."""
    ends = [constant(n, s) if isinstance(s, np.ndarray) else tensor(n, s) for n, s in zip("ab", shapes, strict=False)]
    inputs = tuple(i for i, s in enumerate(shapes) if isinstance(s, tuple)) or (len(ends),)
    y = len(ends) if inputs != (len(ends),) else len(ends) + 1
    images = ends[0].shape[0]
    tensors = [*ends, *([tensor("x", (1, 4))] if y > len(ends) else []), tensor("y", (images, *ends[0].shape[1:]))]
    first = Operator(op, tuple(range(len(ends))), (y,), {"axis": 3} if op[0] == "C" else {}, (), None, kind)
    graph = Graph("main", tuple(tensors), inputs, (y,), (first,))
    with pytest.raises(CompileError, match=sentence):
        compiled(graph, batch=3)


def test_batches():
    graph = chain([tensor("x", (1, 5)), tensor("y", (1, 5))], "RELU")
    for batch in (0, -1, 257):
        with pytest.raises(CompileError, match=f"batch {batch}: a program takes 1 to 256"):
            compiled(graph, batch=batch)
    one = compiled(graph, batch=6)
    model = coral.load(one.data, device=DirectChip())
    assert model.inputs[0].shape == (6, 5)
    x = np.arange(30, dtype=np.uint8).reshape(6, 5)
    assert (model(x) == np.maximum(x, 7)).all()
    order = Tensor(
        "o",
        (2,),
        2,
        np.dtype("i4"),
        np.zeros(0, np.float32),
        np.zeros(0, np.int64),
        0,
        np.array([1, 0], np.int32),
        False,
    )
    turned = Graph(
        "main",
        (tensor("x", (1, 5)), order, tensor("y", (5, 1))),
        (0,),
        (2,),
        (Operator("TRANSPOSE", (0, 1), (2,), {}, (), None, "TransposeOptions"),),
    )
    with pytest.raises(CompileError, match=r"treat images alike|along the first axis"):
        compiled(turned, batch=2)


def test_models_that_need_too_much_memory():
    graph = chain([tensor("x", (1, 4)), tensor("huge", (1, 30000, 20000))], "RELU")
    with pytest.raises(CompileError, match=r"needs 600 MB .* limit is 300 MB; the largest is 'huge'"):
        compiled(graph)
    graph = chain([tensor("x", (1, 4)), tensor("y", (1, 5000, 1000))], "RELU")
    with pytest.raises(CompileError, match=r"with batch 100 needs 500 MB .* limit is 300 MB"):
        compiled(graph, batch=100)


@pytest.mark.parametrize("slow_host", [True, False])
def test_an_unknown_operator_in_the_middle(monkeypatch: pytest.MonkeyPatch, slow_host: bool):
    """Two segments around it, or one where a second call would take longer than the host; and the whole still runs."""
    if slow_host:
        monkeypatch.setattr(partition, "OPERATOR_SECONDS", 1.0)
    shape = (1, 6, 6, 8)
    names = ["RELU", "ABS", "LOGISTIC"]
    graph = chain([tensor(n, shape) for n in "xabc"], *names)
    one = compiled(graph)
    assert one.partition.reasons[1] == "ABS has no program on the chip"
    assert slow_host or "a call of the chip would take" in one.partition.reasons[2]
    assert [isinstance(item, Segment) for item in one.partition.order] == [True, False, slow_host]
    assert {d.place for d in one.report().decisions} == (
        {"chip 0", "host", "chip 1"} if slow_host else {"chip 0", "host"}
    )
    x = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    expected = run_operators(graph, range(3), {0: x})[3]
    assert (coral.load(one.data, device=DirectChip())(x) == expected).all()


def test_compiled_models_are_not_compiled_again(corpus: Path):
    with pytest.raises(CompileError, match="compiled already"):
        compile_models([corpus / "dense" / "dense_256_edgetpu.tflite"])


def test_damaged_files_give_typed_errors(corpus: Path):
    data = (corpus / "robotics" / "gabor_64x64_p4.tflite").read_bytes()
    rng = np.random.default_rng(1)
    for size in (0, 3, 8, 100, len(data) // 2, len(data) - 40):
        with pytest.raises(CoralError):
            compile_models([data[:size]])
    for _ in range(60):
        damaged = bytearray(data)
        for at in rng.integers(0, len(data), 3):
            damaged[at] = rng.integers(256)
        with contextlib.suppress(CoralError):
            compile_models([bytes(damaged)])


def test_tensors_without_names_or_with_the_same(corpus: Path, tmp_path: Path):
    graph = read_model(corpus / "robotics" / "gabor_64x64_p4.tflite").main
    same = replace(graph, tensors=tuple(replace(t, name="t") for t in graph.tensors))
    model = coral.load(compiled(same).data, device=DirectChip())
    names = [port.name for port in itertools.chain(model.inputs, model.outputs)]
    assert len(set(names)) == len(names)


def test_a_pad_to_another_quantisation_stays_on_the_host():
    """TFLite copies the codes and pads with the output's zero point; no converter writes this."""
    borders = replace(tensor("p", (4, 2), "i4"), data=np.array([[0, 0], [1, 2], [0, 3], [0, 0]], np.int32))
    other = replace(tensor("y", (1, 9, 9, 4)), zero_points=np.array([90]))
    tensors = (tensor("x", (1, 6, 6, 4)), borders, other, replace(other, name="z"))
    ops = (Operator("PAD", (0, 1), (2,), {}), Operator("RELU", (2,), (3,), {}))
    graph = Graph("main", tensors, (0,), (3,), ops)
    one = compiled(graph)
    assert one.partition.reasons == {0: "changes the quantisation"}
    x = np.random.default_rng(0).integers(0, 256, (1, 6, 6, 4)).astype(np.uint8)
    assert (coral.load(one.data, device=DirectChip())(x) == run_operators(graph, range(2), {0: x})[3]).all()


def test_outputs_that_are_inputs_or_constants():
    """Odd, but a file may have them."""
    shape, data = (1, 4, 4, 4), np.arange(3, dtype=np.uint8).reshape(1, 3)
    constant = replace(tensor("c", (1, 3)), data=data)
    tensors = (tensor("x", shape), tensor("y", shape), constant)
    graph = Graph("main", tensors, (0,), (1, 2, 0), (Operator("RELU", (0,), (1,), {}),))
    x = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    found = coral.load(compiled(graph).data, device=DirectChip())(x)
    assert isinstance(found, dict)
    assert (found["y"] == np.maximum(x, 7)).all()
    assert (found["c"] == data).all()
    assert (found["x"] == x).all()
