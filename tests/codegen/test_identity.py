"""Byte identity with programs that Google's compiler wrote."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from codegen.compare import assert_same, first_difference
from coral import isa, numerics
from coral.codegen.builder import V14, Builder
from coral.codegen.conv2d import ImageConv
from coral.codegen.fc import FcQuant, fully_connected, fully_connected_per_channel
from coral.codegen.gather import Spread, mesh_gather
from coral.package.graph import read_model
from coral.package.program import Kind, Program
from coral.package.tflite_file import read_edgetpu


def f32(bits: int) -> float:
    return struct.unpack("<f", bits.to_bytes(4, "little"))[0]


@pytest.mark.parametrize("n", [256, 512, 1024])
def test_dense(corpus, n):
    """Everything from the uncompiled twin: weights, scales, zero points; nothing from the compiled file."""
    graph = read_model(corpus / "dense" / f"dense_{n}.tflite").graphs[0]
    (layer,) = [o for o in graph.operators if o.name == "FULLY_CONNECTED"]
    x, w, y = (graph.tensors[i] for i in (*layer.inputs[:2], layer.outputs[0]))
    assert layer.inputs[2] == -1
    assert w.data is not None
    scales = numerics.multiplier(x.scale, w.scales, y.scale)
    low, high = numerics.clamps(y.scale, y.zero_point + 128)
    quant = FcQuant(x.zero_point + 128, 0, y.zero_point + 128, 1.0, float(low), float(high), x.scale, y.scale)
    ours = fully_connected_per_channel(*w.shape, quant)
    blob = ours.blob(
        w.data.view(np.uint8) ^ 0x80, mult=scales.astype(np.float32), w_zp=(w.zero_points + 128).astype(np.int32)
    )
    caching = ours.caching(blob)

    package = read_edgetpu(corpus / "dense" / f"dense_{n}_edgetpu.tflite").package
    for program in package.programs:
        mine = caching if program.kind is Kind.PARAMETER_CACHING else ours.execution
        assert_same(mine.bitstreams[0].data, program.bitstreams[0].data, f"dense_{n} {program.kind.name}")
        assert_same_frame(mine, program)


def assert_same_frame(mine: Program, program: Program) -> None:
    """Parameters, relocations, transfers, layers and memory."""
    assert mine.parameters == program.parameters
    assert [(r.base, r.high, r.bit) for r in mine.bitstreams[0].relocations] == [
        (r.base, r.high, r.bit) for r in program.bitstreams[0].relocations
    ]
    assert mine.hint_pattern() == program.hint_pattern()
    assert [h.size for h in mine.hints if hasattr(h, "size")] == [h.size for h in program.hints if hasattr(h, "size")]
    for a, b in zip(mine.layers(), program.layers(), strict=True):
        for field in ("size_bytes", "y", "x", "z", "zero_point", "scale"):
            assert getattr(a, field) == getattr(b, field)
    assert mine.narrow_bytes_per_tile == program.narrow_bytes_per_tile
    mine.check()


def gabor(corpus: Path, name: str, rows_above: int) -> tuple[ImageConv, bytes, dict[Kind, Program]]:
    """The convolution of an uncompiled gabor model, its parameters, and the compiled model's programs."""
    graph = read_model(corpus / "robotics" / f"{name}.tflite").main
    layer = next(o for o in graph.operators if o.name == "DEPTHWISE_CONV_2D")
    x, w, y = (graph.tensors[i] for i in (*layer.inputs[:2], layer.outputs[0]))
    assert w.data is not None
    low, high = numerics.clamps(y.scale, y.zero_point + 128)
    (scale,) = set(w.scales.tolist())
    mult = float(numerics.multiplier(x.scale, scale, y.scale))
    quant = FcQuant(x.zero_point + 128, 0, y.zero_point + 128, mult, low, high, x.scale, y.scale)
    ours = ImageConv(*x.shape[1:3], w.shape[1], w.shape[3], quant, rows_above)
    weights = np.ascontiguousarray(np.moveaxis(w.data[0], -1, 0)).view(np.uint8) ^ 128
    blob = ours.blob(weights, (w.zero_points + 128).astype(np.int32))
    package = read_edgetpu(corpus / "robotics" / f"{name}_edgetpu.tflite").package
    return ours, blob, {program.kind: program for program in package.programs}


def test_convolution_of_an_image(corpus):
    """gabor_64x64_7k: both programs, everything from the uncompiled model."""
    ours, blob, google = gabor(corpus, "gabor_64x64_7k_4o_2s", 0)
    for mine in (ours.caching(blob), ours.execution):
        assert_same(mine.bitstreams[0].data, google[mine.kind].bitstreams[0].data, mine.kind.name)
        assert_same_frame(mine, google[mine.kind])
    assert ours.execution.outputs[0].layout == google[Kind.EXECUTION_ONLY].outputs[0].layout


def test_layers_of_a_network(corpus):
    """MobileNet in our own form: Google's arithmetic everywhere; 1 x 1 layers have nothing but Google's parameters."""
    spec = importlib.util.spec_from_file_location("layer_identity", ROOT / "tools" / "layer_identity.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool
    spec.loader.exec_module(tool)
    name = "mobilenet_v1_0.25_128_quant"
    rows = tool.compare(corpus / "vision" / f"{name}_edgetpu.tflite", corpus / "vision" / f"{name}.tflite")
    assert len(rows) == 28
    assert all(row.arithmetic for row in rows)
    pointwise = [row for row in rows if row.form == "Conv 1x1"]
    assert len(pointwise) == 13
    assert all(row.found == row.rows for row in pointwise)
    assert sum(row.ours.words for row in rows) < sum(row.google.words for row in rows)


def test_convolution_in_front_of_a_pool(corpus):
    """gabor_64x64_p4: the loading program and its parameters, and all instructions up to the end of the convolution. A
    table of the pool's takes the 64 rows above the weights."""
    ours, blob, google = gabor(corpus, "gabor_64x64_p4", 64)
    assert_same(ours.caching(blob).bitstreams[0].data, google[Kind.PARAMETER_CACHING].bitstreams[0].data, "parameters")
    assert blob == google[Kind.PARAMETER_CACHING].parameters
    mine, theirs = (
        [i.instruction for i in isa.decode(p.bitstreams[0].data)] for p in (ours.execution, google[Kind.EXECUTION_ONLY])
    )
    end = next(k for k, i in enumerate(mine) if isinstance(i, isa.RingSend)) + 1
    assert sum(type(i).words for i in mine[:end]) == 266
    assert mine[1:end] == theirs[1:end]


def test_bare_execution(corpus):
    quant = FcQuant(0, 128, 135, f32(0x3B890249), f32(0xC3070000), f32(0x42F00000))
    theirs = (corpus / "legacy_programs" / "dense_1_8_mul.coral").read_bytes()
    for k in range(1, 5):
        ours = fully_connected(8, k, quant).execution.bitstreams[0].data
        assert_same(ours, theirs, f"dense_1_8_mul, K = {k}")


@pytest.mark.parametrize(("name", "sizes"), [("0x80", range(1, 17)), ("0x100", range(17, 33))])
def test_bare_caching(corpus, name, sizes):
    theirs = (corpus / "legacy_programs" / f"weight_copy_in_{name}.coral").read_bytes()
    quant = FcQuant(0, 0, 0, 1.0, 0.0, 255.0)
    for n in sizes:
        fc = fully_connected(n, 4, quant)
        ours = fc.caching(bytes(fc.blob_bytes)).bitstreams[0].data
        assert_same(ours, theirs, f"weight_copy_in_{name}, N = {n}")


def test_mesh_gather_against_an_old_program(corpus):
    """matmul_256 (old style) writes plain moves with all levels and drains once; relays and fences must be equal."""
    decoded = [p.instruction for p in isa.decode((corpus / "legacy_programs" / "matmul_256.coral").read_bytes())]
    mesh = [i for i, at in enumerate(decoded) if isinstance(at, isa.MeshWest)]
    theirs = decoded[mesh[0] : mesh[-1] + 2]
    b = Builder(V14)
    mesh_gather(b, Spread(256, 64, 0, 0), 512)
    ours = [p.instruction for p in isa.decode(b.finish().data)][2:-4]
    assert len(ours) == len(theirs)
    relays = 0
    for mine, other in zip(ours, theirs, strict=True):
        mine = mine.replace(seq=other.seq)
        if isinstance(other, isa.MeshWest) and other.waits():
            relays += 1
        elif isinstance(other, isa.MeshWest):
            for name in ("src", "dst"):
                walk = mine.walk(name)
                if walk.counts[0] > 1:
                    strides, counts = [1, 64, 64, 64], walk.counts
                    mine = mine.replace(**{name: type(walk)(walk.addr, strides, counts), f"sig_{name}": 4})
        assert not first_difference(mine.to_bytes(), other.to_bytes())
    assert relays == 2


def test_ops_of_matmul_256(corpus):
    """Its four ops and bias load: class constants of the old style are those of style 14.1."""
    decoded = [p.instruction for p in isa.decode((corpus / "legacy_programs" / "matmul_256.coral").read_bytes())]
    theirs = [i for i in decoded if isinstance(i, isa.Op)]
    op = theirs[0]
    quant = FcQuant(op.in_zp, op.w_zp, op.out_zp, op.mult, op.clamp_min, op.clamp_max)
    program = fully_connected(256, 256, quant).execution
    ours = [i.instruction for i in isa.decode(program.bitstreams[0].data) if isinstance(i.instruction, isa.Op)]
    assert len(ours) == len(theirs) == 4
    for mine, other in zip(ours, theirs, strict=True):
        assert not first_difference(mine.replace(seq=other.seq).to_bytes(), other.to_bytes())


def test_difference_names_instruction_and_field():
    a = isa.encode([isa.Start(), isa.Halt(code=4), isa.End()])
    assert first_difference(a, a) == ""
    other = isa.encode([isa.Start(), isa.Halt(code=1), isa.End()])
    assert "instruction 1, word 1, halt: code 1 instead of 4" in first_difference(other, a)
    assert "ours End" in first_difference(isa.encode([isa.Start(), isa.End()]), a)
    assert "3 instructions instead of 4" in first_difference(a, a + isa.End().to_bytes())
    assert isa.signed16(0xFFFF) == -1
