"""FULLY_CONNECTED programs on the simulated chip, bit for bit against the layer reference of coral.numerics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from codegen.test_eltwise import LOGISTIC
from codegen.test_fc import EDGES
from coral import numerics
from coral.chip import Chip, ChipState
from coral.codegen import ShapeError
from coral.codegen.eltwise import Requantise, elementwise
from coral.codegen.fc import FcQuant, FcShape, FullyConnected, fully_connected, fully_connected_per_channel
from coral.codegen.machine import FORWARD_FIFO_ROW
from coral.package.graph import read_model
from coral.package.program import Kind, Program
from coral.package.tflite_file import read_edgetpu

INSTRUCTIONS, INPUT, PARAMETERS = range(3)


def run(chip: Chip, program: Program, inputs: bytes = b"") -> bytes:
    """One run as a host would do it; the outputs, one behind the other."""
    chip.feed(INSTRUCTIONS, program.bitstreams[0].data)
    if inputs:
        chip.feed(INPUT, inputs)
    if program.parameters:
        chip.feed(PARAMETERS, program.parameters)
    assert chip.run() is ChipState.FINISHED
    assert chip.interrupts.popleft() == 0
    result = b"".join(chip.outputs)
    chip.outputs.clear()
    return result


@dataclass
class Case:
    """A layer at a place, its data, and the reference's answer."""

    fc: FullyConnected
    blob: bytes
    x: np.ndarray
    expected: np.ndarray

    def check(self, chip: Chip) -> None:
        fc = self.fc
        run(chip, fc.caching(self.blob))
        for x, expected in zip(self.x, self.expected, strict=True):
            padded = np.full(fc.input_bytes, fc.quant.in_zp, np.uint8)
            padded[: len(x)] = x
            y = np.frombuffer(run(chip, fc.execution, padded.tobytes()), np.uint8)
            np.testing.assert_array_equal(y[: fc.shape.n], expected)
            assert len(y) == fc.output_bytes


def random_case(
    rng: np.random.Generator, n: int, k: int, *, per_channel: bool, place: bool = True, rows: int = 1
) -> Case:
    """Random data and quantisation; every third case has a multiplier of 1/2 or 1/4, so that ties abound."""
    bias = bool(rng.integers(2))
    form = fully_connected_per_channel if per_channel else fully_connected
    ties = rng.integers(3) == 0
    in_zp, w_zp, out_zp = (int(v) for v in rng.integers(0, 256, 3))
    spread = 2 if ties else 128
    x = np.clip(in_zp + rng.integers(-spread, spread + 1, (rows, k)), 0, 255).astype(np.uint8)
    zero_points = rng.integers(0, 256, n).astype(np.int32) if per_channel else np.full(n, w_zp, np.int32)
    w = np.clip(zero_points[:, None] + rng.integers(-spread, spread + 1, (n, k)), 0, 255).astype(np.uint8)
    b = rng.integers(-300, 300, n).astype(np.int32) if bias else None
    mult = rng.choice([0.5, 0.25], n) if ties else rng.uniform(0.3, 1.5, n) / (spread * spread * np.sqrt(k))
    mult = mult.astype(np.float32) if per_channel else np.float32(mult[0])
    low, high = sorted(rng.uniform(-255, 255, 2)) if rng.integers(2) else (-out_zp, 255 - out_zp)
    low, high = (float(np.float32(np.clip(v, -out_zp, 255 - out_zp))) for v in (low, high))
    quant = FcQuant(in_zp, 0 if per_channel else w_zp, out_zp, 1.0 if per_channel else float(mult), low, high)
    where = {"bias": bias}
    if place:
        shape, largest = FcShape(n, k), form(n, k, quant, bias=bias).rows_per_tile
        last_row = min(FORWARD_FIFO_ROW - largest, 1023 if shape.group_outputs < 64 else FORWARD_FIFO_ROW)
        where["parameter_row"] = int(rng.choice([0, last_row, rng.integers(0, last_row + 1)]))
        where["compute_shift"] = int(rng.integers(0, 17 - shape.tiles))
        if rng.integers(2):
            try:
                shift = int(rng.integers(1, 16))
                fc = form(n, k, quant, **where | {"compute_shift": 0, "tile_shift": shift})
                where |= {"compute_shift": int(rng.integers(-shift, 17 - shape.tiles - shift)), "tile_shift": shift}
            except ShapeError:
                pass
    fc = form(n, k, quant, **where)
    blob = fc.blob(w, b, mult=mult, w_zp=zero_points) if per_channel else fc.blob(w, b)
    expected = numerics.fully_connected(x, w, b, in_zp, zero_points if per_channel else w_zp, mult, low, high, out_zp)
    return Case(fc, blob, x, expected)


def random_shape(rng: np.random.Generator, largest: int) -> tuple[int, int]:
    """Log-uniform sizes that fit."""
    while True:
        n, k = (int(v) for v in np.exp(rng.uniform(0, np.log(largest), 2)))
        if k > 4 or n <= 1024:
            try:
                fully_connected_per_channel(n, k, FcQuant(0, 0, 0, 1.0, 0.0, 255.0), bias=True)
            except ShapeError:
                continue
            return n, k


@pytest.mark.parametrize("seed", range(20))
def test_random_layers(seed):
    rng = np.random.default_rng(seed)
    random_case(rng, *random_shape(rng, 700), per_channel=bool(seed % 2), rows=2).check(Chip(seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_random_layers(seed):
    rng = np.random.default_rng(seed)
    random_case(rng, *random_shape(rng, 4096), per_channel=bool(seed % 2)).check(Chip(seed=seed))


@pytest.mark.parametrize(("n", "k"), [shape for shape in EDGES if shape[0] * shape[1] < 300_000][::3])
def test_edge_shapes(n, k):
    random_case(np.random.default_rng(n + k), n, k, per_channel=False, place=False).check(Chip(seed=n + k))


@pytest.mark.slow
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("n", "k"), EDGES)
def test_all_edge_shapes(n, k, per_channel):
    random_case(np.random.default_rng(n + k), n, k, per_channel=per_channel, place=False).check(Chip(seed=n + k))


def test_resident_layers_do_not_disturb_each_other():
    """Ten layers at their places on one chip, each run again after all the others."""
    rng = np.random.default_rng(77)
    cases, row = [], 0
    for _ in range(10):
        n, k = random_shape(rng, 500)
        case = random_case(rng, max(n, 64), k, per_channel=False, place=False)
        fc = fully_connected(
            case.fc.shape.n,
            k,
            case.fc.quant,
            parameter_row=row,
            bias=case.fc.header.bias,
            compute_shift=int(rng.integers(0, 17 - case.fc.tiles)),
        )
        row += fc.rows_per_tile
        cases.append(Case(fc, case.blob, case.x, case.expected))
    chip = Chip()
    for case in cases:
        run(chip, case.fc.caching(case.blob))
    for case in cases[::-1]:
        padded = np.full(case.fc.input_bytes, case.fc.quant.in_zp, np.uint8)
        padded[: case.x.shape[1]] = case.x[0]
        y = np.frombuffer(run(chip, case.fc.execution, padded.tobytes()), np.uint8)
        np.testing.assert_array_equal(y[: case.fc.shape.n], case.expected[0])


@pytest.mark.parametrize("n", [256, 512, 1024])
def test_google_and_ours_on_random_inputs(corpus, n):
    """Google's program pair and the layer reference on 20 inputs; ours is the same bytes (test_identity)."""
    graph = read_model(corpus / "dense" / f"dense_{n}.tflite").graphs[0]
    (layer,) = [o for o in graph.operators if o.name == "FULLY_CONNECTED"]
    x, w, y = (graph.tensors[i] for i in (*layer.inputs[:2], layer.outputs[0]))
    assert w.data is not None
    mult = numerics.multiplier(x.scale, w.scales, y.scale)
    clamps = numerics.clamps(y.scale, y.zero_point + 128)
    codes = w.data.view(np.uint8) ^ 0x80
    inputs = np.random.default_rng(n).integers(0, 256, (20, n), np.uint8)
    expected = numerics.fully_connected(
        inputs, codes, None, x.zero_point + 128, w.zero_points + 128, mult, *clamps, y.zero_point + 128
    )
    programs = {p.kind: p for p in read_edgetpu(corpus / "dense" / f"dense_{n}_edgetpu.tflite").package.programs}
    chip = Chip(seed=n)
    run(chip, programs[Kind.PARAMETER_CACHING])
    for row, answer in zip(inputs, expected, strict=True):
        result = run(chip, programs[Kind.EXECUTION_ONLY], row.tobytes())
        np.testing.assert_array_equal(np.frombuffer(result, np.uint8), answer)


@pytest.mark.parametrize("n", [1, 5, 64, 130, 1000, 4096])
def test_elementwise(n):
    """Two steps, with and without the spline, all codes; ties come from the multiplier 1/2."""
    rng = np.random.default_rng(n)
    x = rng.integers(0, 256, n, np.uint8)
    steps = [
        Requantise(0.5, -60.0, 90.0, in_zp=30, out_zp=60, offset=3),
        Requantise(0.0625, -10.396732330322266, 10.396732330322266, in_zp=60, spline=LOGISTIC),
    ]
    for used in ([], steps[:1], steps):
        expected = x
        for step in used:
            acc = expected.astype(np.int32) - step.in_zp + step.offset
            clamps = step.clamp_min, step.clamp_max
            expected = numerics.requantise(acc, np.float32(step.mult), *clamps, step.out_zp, nlu=step.spline)
        padded = x.tobytes() + bytes(-n % 8)
        y = np.frombuffer(run(Chip(seed=n), elementwise(n, used), padded), np.uint8)
        np.testing.assert_array_equal(y[:n], expected)
