"""The timing model against the compiler's estimates and published times of sticks (docs/timing.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from coral import isa, timing
from coral.codegen.fc import FcQuant, fully_connected
from coral.package.program import Program
from coral.package.tflite_file import read_edgetpu

ESTIMATES = {
    "mobilenet_v1_0.25_128_quant_legacy": (21_568, 0.02),
    "mobilenet_v2_1.0_224_quant_legacy": (458_040, 0.01),
    "mobilenet_v1_0.25_128_quant": (21_568, 0.02),
    "mobilenet_v1_0.5_160_quant": (117_088, 0.03),
    "mobilenet_v1_1.0_224_quant_embedding_extractor": (685_376, 0.051),
    "deeplabv3_mnv2_dm05_pascal_quant": (1_279_736, 0.01),
}
"""The older compiler's cycles and how near the rule comes. Only the two legacy files carry the figure; for the others
it is that of the same network compiled by the older compiler."""
FULLY_CONNECTED = {(64, 64): 0.149, (288, 288): 0.176, (768, 288): 0.195, (1024, 1024): 0.209, (2048, 1024): 0.229}
"""Milliseconds, outputs x inputs, measured by others on a stick, USB included."""


def execution(corpus: Path, name: str) -> Program:
    return read_edgetpu(corpus / "vision" / f"{name}_edgetpu.tflite").package.execution


@pytest.mark.parametrize("name", ESTIMATES)
def test_the_compilers_estimate(corpus: Path, name: str) -> None:
    program, (estimate, tolerance) = execution(corpus, name), ESTIMATES[name]
    if "legacy" in name:
        assert program.estimated_cycles == estimate
    assert timing.estimated_cycles(b.data for b in program.bitstreams) == pytest.approx(estimate, rel=tolerance)


@pytest.mark.parametrize("shape", FULLY_CONNECTED)
def test_published_times_of_fully_connected_layers(shape: tuple[int, int]) -> None:
    program = fully_connected(*shape, FcQuant(0, 0, 0, 1.0, 0.0, 255.0)).execution
    assert timing.predicted_seconds(program) * 1e3 == pytest.approx(FULLY_CONNECTED[shape], rel=0.05)


@pytest.mark.parametrize(("clock_hz", "milliseconds"), [(250e6, 3.89), (500e6, 2.35)])
def test_published_time_of_mobilenet_v1(corpus: Path, clock_hz: float, milliseconds: float) -> None:
    """The corpus has the network without its classifier, which is a small part of it."""
    program = execution(corpus, "mobilenet_v1_1.0_224_quant_embedding_extractor")
    assert timing.predicted_seconds(program, clock_hz) * 1e3 == pytest.approx(milliseconds, rel=0.03)


def test_transfers_of_a_call(corpus: Path) -> None:
    """Whole inputs and outputs, every chunk once, and the parameters that are streamed (MoveNet, DeepLab)."""
    for name in ("deeplabv3_mnv2_dm05_pascal_quant", "movenet_single_pose_lightning_ptq"):
        program = execution(corpus, name)
        to_chip, from_chip = timing.call_bytes(program)
        assert from_chip == sum(layer.size_bytes for layer in program.outputs)
        inputs = sum(layer.size_bytes for layer in program.inputs)
        instructions = sum(len(b.data) for b in program.bitstreams)
        assert to_chip == inputs + instructions + len(program.parameters)
    assert timing.call_seconds(0, 330, 0) - timing.CALL_S == pytest.approx(1e-6)
    assert timing.call_seconds(0, 0, 55) - timing.CALL_S == pytest.approx(1e-6)
    assert timing.call_seconds(250, 0, 0, 500e6) - timing.CALL_S == pytest.approx(0.5e-6)


def stream(*body: isa.Instruction) -> bytes:
    return isa.encode([isa.Start(body_bits=0), *body, isa.Halt(code=4), isa.End()])


def test_steps_loops_and_tiles() -> None:
    op = isa.Op(tile_mask=0b11, loop_cnt0=4, loop_cnt1=2, out_ch=15, reduce_mask=1)
    assert timing.op_steps(op) == 15
    assert timing.op_steps(isa.Op(loop_cnt0=4, loop_cnt1=2, loop_last_dim=1, loop_last_cnt=1)) == 5 + 5 + 2
    assert timing.op_estimate(op) == pytest.approx(15 * 0.79)
    assert timing.op_estimate(isa.Op(loop_cnt0=9, out_ch=3)) == pytest.approx(10 * 0.45)
    other = isa.Op(tile_mask=0b10, loop_cnt0=99, out_ch=15)
    assert timing.estimated_cycles([stream(op, other)]) == pytest.approx(115 * 0.79)
    assert timing.estimated_cycles([stream(isa.Loop(count=7, body=op.words), op)]) == pytest.approx(7 * 15 * 0.79)
    assert timing.op_cycles(isa.Op(loop_cnt0=255, reduce_mask=1, out_ch=63)) == 256
    bundles = [isa.Scalar(), isa.Scalar()]
    assert timing.scalar_loop_cycles(stream(isa.Loop(count=100, body=2), *bundles)) == 200
    assert timing.scalar_loop_cycles(stream(isa.Loop(count=100, body=op.words), op)) == 0
