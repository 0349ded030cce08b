"""The host's operators through tinygrad: byte for byte what coral.evaluate computes in NumPy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import coral
from coral.apps import host, host_tinygrad
from coral.apps.direct import DirectChip
from coral.apps.host import HostError, host_runs
from coral.apps.host_tinygrad import Piece, is_exact
from coral.cli import app
from coral.evaluate import EvaluateError
from coral.evaluate.graph import run_operators
from coral.package.graph import Graph, Operator, Tensor
from coral.package.program import Program
from coral.package.tflite_file import read_edgetpu
from tests.apps.pairs import pair

SPECIAL = np.array([0, -0.0, 1e-42, -3e-45, 1.5, -2.5, 0.49999997, 3e38, -1e-38, np.inf, -np.inf], np.float32)


class Net:
    """A graph of operators side by side, with random tensors."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []

    def tensor(self, shape: Any, dtype: str, quantised: bool = False, data: np.ndarray | None = None) -> int:
        scales, zeros = np.zeros(0, np.float32), np.zeros(0, np.int64)
        if quantised:
            low = -128 if dtype == "i1" else 0
            scales = np.exp(self.rng.uniform(-6, 0, 1)).astype(np.float32)
            zeros = self.rng.integers(low, low + 256, 1)
        name = f"t{len(self.tensors)}"
        shape = tuple(map(int, shape))
        self.tensors.append(Tensor(name, shape, 0, np.dtype(dtype), scales, zeros, 0, data, False))
        return len(self.tensors) - 1

    def integers(self, values: Any) -> int:
        data = np.array(values, np.int32)
        return self.tensor(data.shape, "i4", data=data)

    def codes(self, shape: Any, dtype: str = "", constant: bool = False) -> int:
        dtype = dtype or str(self.rng.choice(["u1", "i1"]))
        data = self.rng.integers(0, 256, shape).astype(dtype) if constant else None
        return self.tensor(shape, dtype, True, data)

    def like(self, number: int, shape: Any) -> int:
        """A tensor of the same dtype and quantisation."""
        t = self.tensors[number]
        self.tensors.append(
            Tensor(f"t{len(self.tensors)}", tuple(map(int, shape)), 0, t.dtype, t.scales, t.zero_points, 0, None, False)
        )
        return len(self.tensors) - 1

    def add(self, name: str, inputs: Any, outputs: Any, **options: Any) -> None:
        self.operators.append(Operator(name, tuple(inputs), tuple(outputs), options))

    def shape(self, rank: int = 0) -> tuple[int, ...]:
        return tuple(self.rng.integers(1, 8, rank or self.rng.integers(1, 5)).tolist())

    def any(self, shape: Any) -> int:
        dtype = str(self.rng.choice(["u1", "i1", "i4", "f4", "i8"]))
        return self.codes(shape, dtype) if dtype in ("u1", "i1") else self.tensor(shape, dtype)

    @property
    def graph(self) -> Graph:
        made = {i for op in self.operators for i in op.outputs}
        given = [i for op in self.operators for i in op.inputs if self.tensors[i].data is None and i not in made]
        return Graph("main", tuple(self.tensors), tuple(dict.fromkeys(given)), tuple(made), tuple(self.operators))

    def values(self, special: bool = False) -> dict[int, np.ndarray]:
        found = {}
        for i in self.graph.inputs:
            t = self.tensors[i]
            assert t.dtype is not None
            if t.dtype.kind == "f":
                real = self.rng.normal(0, 20, t.shape)
                found[i] = np.where(special, self.rng.choice(SPECIAL, t.shape), real).astype(t.dtype)
            else:
                limits = np.iinfo(t.dtype)
                found[i] = self.rng.integers(limits.min, limits.max, t.shape, endpoint=True).astype(t.dtype)
        return found


def unary(name: str, to: str = "codes", **options: Any) -> Callable[[Net], None]:
    def case(net: Net) -> None:
        shape = net.shape()
        y = net.codes(shape) if to == "codes" else net.tensor(shape, to)
        net.add(name, [net.codes(shape)], [y], **options)

    return case


def real_unary(name: str, to: str = "f4", of: str = "f4") -> Callable[[Net], None]:
    def case(net: Net) -> None:
        shape = net.shape()
        net.add(name, [net.tensor(shape, of)], [net.codes(shape) if to == "codes" else net.tensor(shape, to)])

    return case


def binary(name: str, kind: str = "") -> Callable[[Net], None]:
    def case(net: Net) -> None:
        a = net.shape()
        b = tuple(n if net.rng.integers(2) else 1 for n in a)[net.rng.integers(len(a)) :]
        kinds = ["same", "broadcast", "one", "channels", "constant"]
        second = {"same": a, "one": (), "channels": a[-1:], "constant": a}.get(which := kinds[net.rng.integers(5)], b)
        if kind:
            operands = [net.tensor(a, kind), net.tensor(second, kind)]
        else:
            operands = [net.codes(a), net.codes(second, constant=which in ("one", "channels", "constant"))]
        y = net.tensor(a, kind) if kind else net.codes(a)
        activation = "NONE" if kind else str(net.rng.choice(["NONE", "RELU", "RELU6"]))
        if net.rng.integers(2):
            operands.reverse()
        net.add(name, operands, [y], fused_activation_function=activation)

    return case


def reduction(name: str) -> Callable[[Net], None]:
    def case(net: Net) -> None:
        shape = net.shape(int(net.rng.integers(2, 5)))
        axis = int(net.rng.integers(-len(shape), len(shape)))
        left = tuple(n for i, n in enumerate(shape) if i != axis % len(shape))
        if name.startswith("ARG"):
            dtype = str(net.rng.choice(["u1", "i1"]))
            net.add(name, [net.tensor(shape, dtype), net.integers(axis)], [net.tensor(left, "i8")])
        else:
            net.add(name, [net.codes(shape), net.integers([axis])], [net.codes(left)], keep_dims=False)

    return case


def resize(name: str, whole: int = 0) -> Callable[[Net], None]:
    def case(net: Net) -> None:
        n, h, w, c = net.shape(4)
        y = (n, whole * h, whole * w, c) if whole else (n, *net.rng.integers(1, 30, 2), c)
        x = net.tensor((n, h, w, c), "f4") if net.rng.integers(3) == 0 and not whole else net.codes((n, h, w, c))
        ways = ((False, False), (True, False), (False, True))
        corners, centres = ways[0 if whole else net.rng.integers(3)]
        out = net.like(x, y)
        net.add(name, [x, net.integers(y[1:3])], [out], align_corners=corners, half_pixel_centers=centres)

    return case


def transpose(net: Net) -> None:
    shape = net.shape()
    order = net.rng.permutation(len(shape)).tolist()
    x = net.any(shape)
    net.add("TRANSPOSE", [x, net.integers(order)], [net.like(x, [shape[i] for i in order])])


def reshape(net: Net) -> None:
    shape = net.shape()
    x = net.any(shape)
    net.add("RESHAPE", [x, net.integers(shape[::-1])], [net.like(x, shape[::-1])])


def cut(net: Net) -> None:
    shape = net.shape()
    x = net.any(shape)
    begins = [int(net.rng.integers(n)) for n in shape]
    sizes = [int(net.rng.integers(1, n - b + 1)) for n, b in zip(shape, begins, strict=True)]
    net.add("SLICE", [x, net.integers(begins), net.integers(sizes)], [net.like(x, sizes)])


def strided(net: Net) -> None:
    shape = net.shape()
    x = net.any(shape)
    bounds = [(int(net.rng.integers(n)), int(net.rng.integers(n + 1)), int(net.rng.choice([1, 2, -1]))) for n in shape]
    spans = [slice(b if s > 0 else None, None, s) for b, _, s in bounds]
    result = np.zeros(shape)[tuple(spans)].shape
    masks = {"begin_mask": 0, "end_mask": (1 << len(shape)) - 1, "shrink_axis_mask": 0}
    for i, (_, _, step) in enumerate(bounds):
        masks["begin_mask"] |= (step < 0) << i
    given = [net.integers(list(values)) for values in zip(*bounds, strict=True)]
    net.add("STRIDED_SLICE", [x, *given], [net.like(x, result)], **masks)


def concatenation(net: Net) -> None:
    shape = list(net.shape())
    axis = int(net.rng.integers(len(shape)))
    first = net.any(shape)
    kind = net.tensors[first].dtype
    assert kind is not None
    parts = [first]
    for _ in range(2):
        shape[axis] = int(net.rng.integers(1, 5))
        one = kind.itemsize > 1 or net.rng.integers(2)
        parts.append(net.like(first, shape) if one else net.codes(shape))
    shape[axis] = sum(net.tensors[i].shape[axis] for i in parts)
    net.add("CONCATENATION", parts, [net.like(first, shape)], axis=axis, fused_activation_function="NONE")


def split(net: Net) -> None:
    shape = net.shape()
    x, axis = net.any(shape), int(net.rng.integers(len(shape)))
    ys = [net.like(x, (*shape[:axis], 1, *shape[axis + 1 :])) for _ in range(shape[axis])]
    net.add("SPLIT", [net.integers(axis), x], ys)
    x = net.any(shape)
    net.add("SPLIT_V", [x, net.integers([shape[axis]]), net.integers(axis)], [net.like(x, shape)])


def pack(net: Net) -> None:
    shape = net.shape(int(net.rng.integers(1, 4)))
    x, axis = net.any(shape), int(net.rng.integers(-len(shape), len(shape)))
    at = axis % (len(shape) + 1)
    net.add("PACK", [x, net.like(x, shape)], [net.like(x, (*shape[:at], 2, *shape[at:]))], axis=axis)
    x, at = net.any(shape), axis % len(shape)
    ys = [net.like(x, shape[:at] + shape[at + 1 :]) for _ in range(shape[at])]
    net.add("UNPACK", [x], ys, axis=axis)


def pad(net: Net) -> None:
    shape = net.shape()
    borders = net.rng.integers(0, 3, (len(shape), 2))
    x = net.codes(shape)
    net.add("PAD", [x, net.integers(borders)], [net.like(x, np.array(shape) + borders.sum(1))])


CODES_TO_CODES = (
    "QUANTIZE", "RELU", "RELU6", "RELU_N1_TO_1", "LOGISTIC", "TANH", "HARD_SWISH", "EXP", "SIN", "COS", "ELU",
)  # fmt: skip
ARITHMETIC = ("ADD", "SUB", "MUL", "SQUARED_DIFFERENCE", "PRELU")
CASES: dict[str, Callable[[Net], None]] = {
    **{f"{name} of codes": unary(name) for name in (*CODES_TO_CODES, "ABS", "NEG", "SQUARE", "FLOOR", "CEIL", "ROUND")},
    "LEAKY_RELU of codes": unary("LEAKY_RELU", alpha=0.3),
    **{f"{name} to {to}": unary(name, to) for name, to in (("DEQUANTIZE", "f4"), ("CAST", "f4"), ("CAST", "i4"))},
    **{f"{name} of float32": real_unary(name) for name in ["ABS", "NEG", "SQUARE", "FLOOR", "CEIL", "ROUND"]},
    **{f"CAST of {a} to {b}": real_unary("CAST", b, a) for a, b in (("f4", "i4"), ("i4", "f4"), ("i4", "i8"))},
    "QUANTIZE of float32": real_unary("QUANTIZE", "codes"),
    **{f"{name} of codes": binary(name) for name in (*ARITHMETIC, "MAXIMUM", "MINIMUM")},
    **{f"{name} of float32": binary(name, "f4") for name in (*ARITHMETIC, "DIV")},
    **{f"{name} of int32": binary(name, "i4") for name in ARITHMETIC[:-1]},
    "MUL of int64": binary("MUL", "i8"),
    **{name: reduction(name) for name in ["ARG_MAX", "ARG_MIN", "REDUCE_MAX", "REDUCE_MIN"]},
    "RESIZE_BILINEAR": resize("RESIZE_BILINEAR"), "RESIZE_NEAREST_NEIGHBOR": resize("RESIZE_NEAREST_NEIGHBOR"),
    "RESIZE_NEAREST_NEIGHBOR x3": resize("RESIZE_NEAREST_NEIGHBOR", 3),
    "TRANSPOSE": transpose, "RESHAPE": reshape, "SLICE": cut, "STRIDED_SLICE": strided, "SPLIT": split, "PACK": pack,
    "CONCATENATION": concatenation, "PAD": pad,
}  # fmt: skip


def check(seed: int, names: list[str], draws: int = 10) -> None:
    """All cases as one function; every byte of every result."""
    net = Net(seed)
    for name in names:
        CASES[name](net)
    graph = net.graph
    numbers = list(range(len(graph.operators)))
    assert [graph.operators[n].name for n in numbers if not is_exact(graph, n)] == []
    piece = Piece(graph, numbers, graph.outputs)
    for _ in range(draws):
        values = net.values()
        expected, found = run_operators(graph, numbers, values), piece._run(values)
        assert found is not None
        for n in numbers:
            for i in graph.operators[n].outputs:
                assert (found[i].dtype, found[i].shape) == (expected[i].dtype, expected[i].shape)
                assert found[i].tobytes() == expected[i].tobytes(), (seed, graph.operators[n])


@pytest.mark.parametrize("part", range(4))
def test_every_operator(part: int) -> None:
    check(part, list(CASES)[part::4])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_every_operator_in_many_shapes(seed: int) -> None:
    check(seed, list(CASES))


def chain(net: Net, length: int) -> None:
    """Operators one behind the other, on 8-bit codes and float32, each on the last results or an earlier one."""
    shape = net.shape(3)
    codes, reals = [net.codes(shape)], [net.tensor(shape, "f4")]
    for _ in range(length):
        x, y = (int(net.rng.choice(codes[-2:])) for _ in range(2))
        a, b = (int(net.rng.choice(reals[-2:])) for _ in range(2))
        new, real = net.codes(shape), net.tensor(shape, "f4")
        match net.rng.integers(9):
            case 0:
                net.add("DEQUANTIZE", [x], [real])
            case 1:
                net.add("QUANTIZE", [a], [new])
            case 2:
                net.add(str(net.rng.choice(["ADD", "SUB", "MUL", "MAXIMUM"])), [x, y], [new])
            case 3 | 4 if a != b:
                net.add(str(net.rng.choice(["ADD", "SUB", "MUL", "DIV", "SQUARED_DIFFERENCE"])), [a, b], [real])
            case 5:
                net.add(str(net.rng.choice(["ABS", "NEG", "SQRT", "SQUARE", "FLOOR", "ROUND"])), [a], [real])
            case 6:
                net.add(str(net.rng.choice(["LOGISTIC", "RELU6", "EXP", "QUANTIZE"])), [x], [new])
            case 7:
                net.add("CAST", [x], [real])
            case _:
                constant = net.tensor((), "f4", data=np.array(net.rng.normal(), np.float32))
                net.add(str(net.rng.choice(["ADD", "MUL", "DIV"])), [a, constant], [real])
        op = net.operators[-1]
        (codes if op.outputs[0] == new else reals).append(op.outputs[0])


def check_chains(seed: int) -> bool:
    """Whether compiled code was used; if it was, its results are NumPy's."""
    net = Net(seed)
    chain(net, 12)
    graph, numbers = net.graph, list(range(12))
    assert all(is_exact(graph, n) for n in numbers)
    try:
        piece = Piece(graph, numbers, graph.outputs)
    except coral.CoralError:
        return False
    used = False
    for special in (False, False, True):
        values = net.values(special)
        assert outcome(lambda: piece(values)) == outcome(lambda: run_operators(graph, numbers, values)), seed  # noqa: B023
        used |= piece._run(values) is not None
    return used


def test_operators_in_a_row() -> None:
    assert sum(check_chains(seed) for seed in range(4)) >= 1


@pytest.mark.slow
def test_operators_in_many_rows() -> None:
    assert sum(check_chains(seed) for seed in range(100, 160)) >= 15


def single(case: str, seed: int = 0) -> tuple[Net, Piece]:
    net = Net(seed)
    CASES[case](net)
    graph = net.graph
    return net, Piece(graph, range(len(graph.operators)), graph.outputs)


def test_float32_at_its_edges() -> None:
    """Zeros of two signs, denormals, infinities: all operators on the same values, but where NaN comes out."""
    net, n, names = Net(5), 4096, ["ABS", "NEG", "SQUARE", "FLOOR", "CEIL", "ROUND", "SQRT"]
    x, y = net.tensor((n,), "f4"), net.tensor((n,), "f4")
    for name in names:
        net.add(name, [x], [net.tensor((n,), "f4")])
    for name in ["ADD", "SUB", "MUL", "DIV", "SQUARED_DIFFERENCE", "PRELU"]:
        net.add(name, [x, y], [net.tensor((n,), "f4")], fused_activation_function="NONE")
    moved = net.tensor((2, n), "f4")
    net.add("PACK", [x, y], [moved], axis=0)
    net.add("QUANTIZE", [x], [net.codes((n,))])
    numbers = list(range(len(net.operators)))
    piece = Piece(net.graph, numbers, net.graph.outputs)
    values = net.values(special=True)
    for _ in range(3):  # whatever gave NaN becomes 1
        for array in run_operators(net.graph, numbers, values).values():
            if array.dtype.kind == "f":
                nan = np.isnan(array).reshape(-1, n).any(0)
                values = {i: np.where(nan, np.float32(1), v) for i, v in values.items()}
    expected, found = run_operators(net.graph, numbers, values), piece._run(values)
    assert found is not None
    assert {i: a.tobytes() for i, a in found.items()} == {i: expected[i].tobytes() for i in found}
    assert len(np.unique(values[x].view(np.int32))) >= 8


@pytest.mark.parametrize("case", ["DIV of float32", "CAST of f4 to i4", "QUANTIZE of float32", "CONCATENATION"])
def test_where_compiled_code_may_differ_numpy_decides(case: str) -> None:
    """NaN, and numbers that an integer cannot hold: the same bytes, or the judge's sentence."""
    net, piece = single(case, seed=2)
    for value in (np.nan, 1e20, -np.inf):
        values = {i: np.full_like(v, value) if v.dtype.kind == "f" else v for i, v in net.values().items()}
        assert outcome(lambda: piece(values)) == outcome(lambda: run_operators(net.graph, piece.operators, values))  # noqa: B023


def outcome(run: Callable[[], dict[int, np.ndarray]]) -> Any:
    try:
        return {i: array.tobytes() for i, array in run().items()}
    except EvaluateError as error:
        return str(error)


def test_what_is_not_exact_stays() -> None:
    net = Net(3)
    x = net.tensor((3, 4), "f4")
    for name in ["EXP", "LOG", "SIN", "COS", "LOGISTIC", "TANH", "RELU"]:
        net.add(name, [x], [net.tensor((3, 4), "f4")])
    net.add("MAXIMUM", [x, x], [net.tensor((3, 4), "f4")])
    net.add("ARG_MAX", [x, net.integers(1)], [net.tensor((3,), "i8")])
    net.add("RESHAPE", [x, net.integers([5])], [net.tensor((5,), "f4")])  # damaged: the judge says so when it runs
    assert [op.name for n, op in enumerate(net.operators) if is_exact(net.graph, n)] == []


@pytest.mark.parametrize("name", ["DIV", "SUB"])
def test_a_tensor_with_itself(name: str) -> None:
    """tinygrad's algebra knows 0 / 0 = 1 and NaN - NaN = 0, under whatever name the tensor comes."""
    net = Net(4)
    x, y = net.tensor((50,), "f4"), net.tensor((5, 10), "f4")
    again, z = net.tensor((50,), "f4"), net.tensor((50,), "f4")
    net.add("RESHAPE", [x, net.integers([5, 10])], [y])
    net.add("RESHAPE", [y, net.integers([50])], [again])
    net.add(name, [x, again], [z], fused_activation_function="NONE")
    net.add(name, [x, x], [net.tensor((50,), "f4")], fused_activation_function="NONE")
    assert not is_exact(net.graph, 3)
    values = {x: np.resize(SPECIAL, 50)}
    expected = run_operators(net.graph, [0, 1, 2], values)
    try:
        piece = Piece(net.graph, [0, 1, 2], [again, z])
    except host_tinygrad.InexactError:
        return
    assert {i: a.tobytes() for i, a in piece(values).items()} == {i: expected[i].tobytes() for i in (again, z)}


HOST_PARTS = [("vision/movenet_single_pose_lightning_ptq", 2**14), ("vision/deeplabv3_mnv2_dm05_pascal_quant", 2**18)]


@pytest.mark.parametrize(("name", "large"), HOST_PARTS)
def test_host_parts_of_the_corpus(corpus: Path, monkeypatch: pytest.MonkeyPatch, name: str, large: int) -> None:
    """What is behind the chip part, in runs of NumPy and tinygrad, from random codes of the chip."""
    monkeypatch.setattr(host, "LARGE", large)
    file = read_edgetpu(pair(corpus, name)[1])
    graph, behind = file.graph, list(range(file.operator + 1, len(file.graph.operators)))
    runs = host_runs(file, behind, "auto")
    assert "tinygrad" in {part.by for part in runs}
    assert [name for part in runs for name in part.operators] == [graph.operators[n].name for n in behind]
    rng = np.random.default_rng(1)
    made = graph.operators[file.operator].outputs
    values = {i: rng.integers(0, 256, graph.tensors[i].shape).astype(graph.tensors[i].dtype) for i in made}
    found = dict(values)
    for part in runs:
        found |= part(found)
    expected = run_operators(graph, behind, values)
    assert all(found[i].tobytes() == expected[i].tobytes() for i in graph.outputs)


def test_threads() -> None:
    """Two functions called from four threads: everybody gets his own results."""
    nets = [single("ADD of codes", seed=7), single("QUANTIZE of float32", seed=8)]
    wrong: list[int] = []

    def call(k: int) -> None:
        net, piece = nets[k % 2]
        values = given[k]
        expected = run_operators(net.graph, piece.operators, values)
        for _ in range(20):
            if any(a.tobytes() != expected[i].tobytes() for i, a in piece(values).items()):
                wrong.append(k)

    given = [nets[k % 2][0].values() for k in range(4)]
    threads = [threading.Thread(target=call, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_without_a_compiler(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy, and the model says so; asked for, it is refused."""
    compiled = pair(corpus, "vision/deeplabv3_mnv2_dm05_pascal_quant")[1]

    def missing(*_: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory: 'clang'")

    monkeypatch.setattr(host_tinygrad, "Piece", missing)
    model = coral.load(compiled, device=DirectChip())
    assert {part.by for part in model.host} == {"numpy"}
    assert any("clang" in part.note for part in model.host)
    with pytest.raises(HostError, match=r"cannot compile .*clang.*--host numpy"):
        coral.load(compiled, device=DirectChip(), host="tinygrad")
    monkeypatch.setattr(host_tinygrad, "is_exact", missing)
    assert any("clang" in part.note for part in coral.load(compiled, device=DirectChip()).host)
    assert not any(part.note for part in coral.load(compiled, device=DirectChip(), host="numpy").host)
    assert coral.load(compiled, device=DirectChip(), host=False).host == ()


SCRIPT = """
import sys
from tests.apps.test_host_tinygrad import single
from coral.evaluate.graph import run_operators
from tinygrad import Device
before = Device.DEFAULT
net, piece = single("SQUARED_DIFFERENCE of codes", seed=1)
for values in (net.values(), net.values()):
    expected = run_operators(net.graph, piece.operators, values)
    found = piece._run(values)
    assert {i: a.tobytes() for i, a in found.items()} == {i: expected[i].tobytes() for i in found}
assert (before, Device.DEFAULT) == ("CORAL", "CORAL") and not [d for d in Device._opened_devices if "CORAL" in d]
print("same")
"""


@pytest.mark.parametrize("jit", ["1", "0"])
def test_another_default_device(jit: str) -> None:
    """``DEV=CORAL`` stays the default, and is not opened. With ``JIT=0`` tinygrad makes new tensors in every call."""
    env = os.environ | {"DEV": "CORAL", "MOCKCORAL": "1", "JIT": jit}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "same", done.stderr


class AnyChip:
    """Answers at once, with random bytes."""

    clock_hz = 250e6

    def run(self, program: Program, inputs: Any = None) -> dict[str, bytes]:
        rng = np.random.default_rng(0)
        return {layer.name: rng.bytes(layer.size_bytes * layer.executions) for layer in program.outputs}

    def ensure_cached(self, caching: Program) -> bool:
        return False


def test_a_whole_model_by_every_way(corpus: Path) -> None:
    """DeepLab around a chip of random answers."""
    compiled = pair(corpus, "vision/deeplabv3_mnv2_dm05_pascal_quant")[1]
    ways: tuple[Any, ...] = ("numpy", "auto", "tinygrad", True)
    models = [coral.load(compiled, device=AnyChip(), host=way) for way in ways]
    image = np.random.default_rng(2).integers(0, 256, models[0].inputs[0].shape, np.uint8)
    first, *others = (model(image) for model in models)
    assert isinstance(first, np.ndarray)
    assert len(np.unique(first)) > 4
    assert all(isinstance(other, np.ndarray) and other.tobytes() == first.tobytes() for other in others)
    by = [[part.by for part in model.host] for model in models]
    assert by[0] == ["numpy"]
    assert by[1] == by[3] == ["tinygrad", "numpy", "tinygrad"]
    assert all(len({name for part in model.host for name in part.operators}) == 5 for model in models)


def test_command_line(corpus: Path) -> None:
    compiled = str(pair(corpus, "dense/dense_256")[1])
    for options in (["--host", "tinygrad"], ["--host", "none"], ["--no-host"], []):
        done = CliRunner().invoke(app, ["run", compiled, "--random", "1", "--json", *options])
        assert done.exit_code == 0
        assert json.loads(done.stdout)["host"] == []
    assert CliRunner().invoke(app, ["run", compiled, "--random", "1", "--host", "litert"]).exit_code == 2
