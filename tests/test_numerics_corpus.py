"""coral.numerics against constants and tables in programs that Google's compiler wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coral import isa, numerics
from coral.package.bitstreams import bitstreams_of
from coral.package.graph import Graph, Operator, Tensor, read_model
from coral.package.tflite_file import read_edgetpu


def instructions(path: Path) -> list[isa.Instruction]:
    return [placed.instruction for stream in bitstreams_of(path) for placed in isa.decode(stream.data)]


def operands(graph: Graph, operator: Operator) -> tuple[Tensor, Tensor, Tensor]:
    return graph.tensors[operator.inputs[0]], graph.tensors[operator.inputs[1]], graph.tensors[operator.outputs[0]]


WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
MODELS = [  # name, weighted layers and additions that run on the chip, those the compiler left to the host
    ("mobilenet_v1_0.25_128_quant", 28, 0, 0),
    ("mobilenet_v1_0.25_128_quant_legacy", 28, 0, 0),
    ("mobilenet_v1_0.5_160_quant", 28, 0, 0),
    ("mobilenet_v1_1.0_224_quant_embedding_extractor", 27, 0, 0),
    ("mobilenet_v2_1.0_224_quant_legacy", 53, 10, 0),
    ("deeplabv3_mnv2_dm05_pascal_quant", 55, 10, 2),
]


@pytest.mark.parametrize(("name", "weighted", "additions", "on_host"), MODELS)
def test_constants_of_whole_networks(corpus: Path, name: str, weighted: int, additions: int, on_host: int) -> None:
    """Multiplier, clamps and zero points of every layer, bit for bit, in some op instruction of the program."""
    ops = [i for i in instructions(corpus / "vision" / f"{name}_edgetpu.tflite") if isinstance(i, isa.Op)]
    layers = {(o.mult, o.clamp_min, o.clamp_max, o.out_zp, o.in_zp, o.w_zp) for o in ops}
    sums = {(o.mult, o.clamp_min, o.clamp_max, o.out_zp, o.acc_offset) for o in ops}
    graph = read_model(corpus / "vision" / f"{name}.tflite").main
    found, found_sums, absent = 0, 0, 0
    for operator in graph.operators:
        if operator.name not in (*WEIGHTED, "ADD"):
            continue
        a, b, y = operands(graph, operator)
        limits = numerics.clamps(y.scale, y.zero_point, operator.options["fused_activation_function"])
        if operator.name == "ADD":
            w_1, w_2 = numerics.add_weights(a.scale, b.scale)
            offset = -(w_1 * a.zero_point + w_2 * b.zero_point)
            mult = float(numerics.add_multiplier(a.scale, w_1, y.scale))
            found_sums += (mult, *limits, y.zero_point, offset) in sums
        else:
            mult = float(numerics.multiplier(a.scale, b.scale, y.scale))
            is_there = (mult, *limits, y.zero_point, a.zero_point, b.zero_point) in layers
            found, absent = found + is_there, absent + (not is_there)
    assert (found, found_sums, absent) == (weighted - on_host, additions, on_host)


@pytest.mark.parametrize("size", [256, 512, 1024])
def test_scales_per_channel(corpus: Path, size: int) -> None:
    path = corpus / "dense" / f"dense_{size}_edgetpu.tflite"
    graph = read_model(corpus / "dense" / f"dense_{size}.tflite").main
    operator = next(o for o in graph.operators if o.name == "FULLY_CONNECTED")
    x, w, y = operands(graph, operator)
    mult = numerics.multiplier(x.scale, w.scales, y.scale)
    assert mult.shape == (size,)
    parameters = b"".join(program.parameters for program in read_edgetpu(path).package.programs)
    stored = np.frombuffer(parameters[: len(parameters) // 4 * 4], "<f4")
    assert np.isin(mult, stored).all()
    ops = [i for i in instructions(path) if isinstance(i, isa.Op) and i.scale_en]
    assert {(o.clamp_min, o.clamp_max) for o in ops} == {numerics.clamps(y.scale, y.zero_point + 128)}
    assert {o.mult for o in ops} == {1.0}


def splines(path: Path) -> list[tuple[numerics.Spline, isa.Op]]:
    """Every use of the non-linear unit: the table loaded last, with the op's switches, and the op."""
    uses: list[tuple[numerics.Spline, isa.Op]] = []
    table: isa.NluLoad | None = None
    for instruction in instructions(path):
        if isinstance(instruction, isa.NluLoad):
            table = instruction
        elif isinstance(instruction, isa.Op) and instruction.nlu_en:
            assert table is not None
            c = np.float32([[getattr(table, f"c{s}_{j}") for j in range(5)] for s in range(8)])
            brk = np.float32([getattr(table, f"brk{k}") for k in range(7)])
            op = instruction
            uses.append((numerics.Spline(c, brk, op.nlu_odd == 3, bool(op.nlu_range_reduce)), op))
    return uses


def test_logistic_of_every_code(corpus: Path) -> None:
    """The table is within 0.008 steps of the exact function, so rounded codes differ next to a boundary only."""
    used = splines(corpus / "vision" / "movenet_single_pose_lightning_ptq_edgetpu.tflite")
    assert len(used) == 2
    differing = 0
    for spline, op in used:
        acc = np.arange(-255, 256, dtype=np.int32)
        got = numerics.requantise(acc, op.mult, op.clamp_min, op.clamp_max, op.out_zp, nlu=spline)
        exact = 256 / (1 + np.exp(-np.clip(acc * np.float64(op.mult), op.clamp_min, op.clamp_max)))
        wrong = got != np.minimum(np.rint(exact), 255)
        assert np.all(np.abs(exact[wrong] % 1 - 0.5) < 0.008)
        assert len(np.unique(got)) > 30
        differing += np.count_nonzero(wrong)
    assert differing == 1


def test_tanh_and_exponential_within_one_step(corpus: Path) -> None:
    kinds = set()
    for spline, op in splines(corpus / "sequence" / "keras_lstm_mnist_ptq_edgetpu.tflite"):
        x = np.linspace(op.clamp_min, op.clamp_max, 20001).astype(np.float32)
        y = spline(x).astype(np.float64)
        if spline.odd:
            kinds.add(("tanh", op.out16))
            steps = 16384 if op.out16 else 127.5
            assert np.abs(y - steps * np.tanh(x.astype(np.float64))).max() < (32 if op.out16 else 0.25)
        elif op.clamp_max == 0:
            kinds.add(("exp", op.out16))
            assert np.abs(y - 65535 * np.exp(x.astype(np.float64))).max() < 1
    assert {("tanh", 0), ("tanh", 1), ("exp", 1)} <= kinds


def test_reciprocal_square_root_table(corpus: Path) -> None:
    path = corpus / "vision" / "mobilenet_v1_0.25_128_quant_edgetpu.tflite"
    tables = [i for i in instructions(path) if isinstance(i, isa.NluLoad) and i.brk6 == np.inf]
    assert len(tables) == 1
    c = np.float32([[getattr(tables[0], f"c{s}_{j}") for j in range(5)] for s in range(8)])
    spline = numerics.Spline(c, np.float32([getattr(tables[0], f"brk{k}") for k in range(7)]), range_reduce=True)
    x = np.float32(np.geomspace(1e-6, 1e9, 5001))
    assert np.abs(spline(x) * np.sqrt(x.astype(np.float64)) / 46340.95 - 1).max() < 3e-5
