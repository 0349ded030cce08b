"""Compiled files: written, read, re-written and damaged."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tflite
from flatbuffers import flexbuffers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coral.package import (
    Base,
    Bitstream,
    DmaHint,
    DType,
    InstructionHint,
    InterruptHint,
    Kind,
    Layer,
    PackageError,
    Program,
    Relocation,
)
from coral.package.container import Package, write_package
from coral.package.tflite_file import (
    CustomMap,
    EdgeTpuModel,
    read_custom_map,
    read_edgetpu,
    replace_package,
    write_custom_map,
    write_edgetpu,
)

from .package_programs import MOVE_IMMEDIATE, damaged, packages


@cache
def small_package() -> Package:
    """A caching pair with every kind of table but scratch and slices."""
    layers = (Layer("in", 16, 1, 1, 16, 3, 0.5), Layer("out", 8, 1, 1, 8, 128, 0.25, DType.I8, shape=((0, 7),)))
    bitstream = Bitstream(MOVE_IMMEDIATE, (Relocation(Base.PARAMETER, False, 70),))
    caching = Program(
        Kind.PARAMETER_CACHING,
        (bitstream,),
        (InstructionHint(0), DmaHint(Base.PARAMETER, 0, 64), InterruptHint(0)),
        bytes(range(64)),
        token=77,
    )
    output = DmaHint(Base.OUTPUT, 0, 8, "out", out=True)
    execution = Program(
        Kind.EXECUTION_ONLY,
        (bitstream,),
        (InstructionHint(0), DmaHint(Base.INPUT, 0, 16, "in"), output, InterruptHint(0)),
        inputs=layers[:1],
        outputs=layers[1:],
        token=77,
    )
    return Package((execution, caching), compiler_version="test")


@cache
def small_file() -> bytes:
    return write_edgetpu(small_package())


def test_written_file_for_other_readers() -> None:
    """The tflite and flexbuffers packages see what Google's runtime checks (executable.md 9)."""
    data = small_file()
    assert tflite.Model.ModelBufferHasIdentifier(data, 0)
    model = tflite.Model.GetRootAs(data, 0)
    assert (model.Version(), model.SubgraphsLength(), model.BuffersLength()) == (3, 1, 1)
    code, graph = model.OperatorCodes(0), model.Subgraphs(0)
    assert (code.BuiltinCode(), code.DeprecatedBuiltinCode(), code.CustomCode()) == (32, 32, b"edgetpu-custom-op")
    assert graph.OperatorsLength() == 1
    operator = graph.Operators(0)
    assert (operator.Inputs(0), operator.Outputs(0), operator.CustomOptionsFormat()) == (0, 1, 0)
    source, result = graph.Tensors(0), graph.Tensors(1)
    assert (source.Name(), source.Type(), source.ShapeAsNumpy().tolist()) == (b"in", 3, [1, 1, 1, 16])
    assert (source.Quantization().Scale(0), source.Quantization().ZeroPoint(0)) == (0.5, 3)
    assert (result.Name(), result.Type(), result.ShapeAsNumpy().tolist()) == (b"out", 9, [8])
    assert (result.Quantization().Scale(0), result.Quantization().ZeroPoint(0)) == (0.25, 0)
    root = flexbuffers.GetRoot(operator.CustomOptionsAsNumpy().tobytes()).AsMap
    assert [key.AsKey for key in (root.Keys[i] for i in range(len(root)))] == ["1", "4", "5", "6", "7"]
    assert (root["1"].AsInt, root["5"].AsInt) == (0, -1)
    assert root["4"].AsStringBytes == write_package(small_package())
    assert root["6"].IsVector
    assert not root["6"].IsTypedVector
    chips = root["6"].AsVector
    assert (len(chips), chips[0].AsInt, len(root["7"].AsVector)) == (1, 18, 0)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(packages(), st.sampled_from([None, (17,), (18,), (-3,)]), st.integers(-1, 1))
def test_written_file_reads_back_equal(package: Package, chips: tuple[int, ...] | None, preference: int) -> None:
    custom = CustomMap(0, preference, chips)
    compiled = read_edgetpu(write_edgetpu(package, custom=custom, description="x"))
    assert compiled.package == package
    assert compiled.custom == custom
    assert compiled.model.description == "x"
    names = [tensor.name for tensor in compiled.graph.tensors]
    assert names == [layer.name for layer in package.execution.layers() if not layer.name.endswith("_variable_output")]


def test_corpus_files_are_written_back_byte_for_byte(corpus: Path) -> None:
    for path in corpus.rglob("*_edgetpu.tflite"):
        compiled = read_edgetpu(path)
        assert replace_package(compiled, compiled.package) == path.read_bytes(), path.name
        assert compiled.custom in (CustomMap(0, -1, (18,)), CustomMap(0, -1, None))


@pytest.mark.parametrize("extra", [0, 100_000])
def test_another_package_leaves_the_rest_of_a_file(corpus: Path, extra: int) -> None:
    """A smaller package is written in place, a larger one behind the file; host operators and tensors stay."""
    path = corpus / "vision" / "movenet_single_pose_lightning_ptq_edgetpu.tflite"
    before = read_edgetpu(path)
    programs = [
        replace(p, parameters=p.parameters + bytes(extra), hints=p.hints, token=5) for p in before.package.programs
    ]
    package = replace(before.package, programs=tuple(programs), compiler_version="ours")
    data = replace_package(before, package)
    after = read_edgetpu(data)
    assert after.package == package != before.package
    assert (after.custom, after.operator) == (before.custom, before.operator)
    old, new = path.read_bytes(), tflite.Model.GetRootAs(data, 0)
    span = before.graph.operators[before.operator].custom_options
    assert span
    edited = {*range(span.slot, span.slot + 4), *range(span.start - 4, span.start + span.size)}
    assert all(data[i] == byte for i, byte in enumerate(old) if i not in edited)
    assert (len(data) > len(old)) == (extra > 0)
    options = new.Subgraphs(0).Operators(before.operator).CustomOptionsAsNumpy().tobytes()
    assert read_custom_map(options)[1] == write_package(package)


def test_files_without_the_operator(corpus: Path) -> None:
    with pytest.raises(PackageError, match="has no operator 'edgetpu-custom-op': it is not compiled"):
        read_edgetpu(corpus / "dense" / "dense_256.tflite")


def custom(**entries: object) -> bytes:
    return bytes(flexbuffers.Dumps(entries))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "damaged flexbuffer map"),
        (b"\0\0\0\0", "damaged flexbuffer map"),
        (custom(**{"1": 0, "5": -1}), "entry 4 is not a string"),
        (custom(**{"1": 0, "4": 7}), "entry 4 is not a string"),
        (custom(**{"4": "x", "6": [1, 2], "7": []}), "2 chip numbers and 0 further packages"),
        (custom(**{"4": "x", "6": [1], "7": ["y"]}), "1 chip numbers and 1 further packages"),
        (custom(**{"4": "x", "6": ["a"], "7": []}), "1 chip numbers"),
        (custom(**{"4": "x", "6": 3}), "damaged flexbuffer map"),
    ],
)
def test_bad_custom_maps(data: bytes, message: str) -> None:
    with pytest.raises(PackageError, match=message):
        read_custom_map(data)


@given(st.binary(max_size=300), st.integers(-(1 << 63), (1 << 63) - 1))
def test_custom_map_round_trip(package: bytes, number: int) -> None:
    written = CustomMap(number, -number - 1, (number,))
    assert read_custom_map(write_custom_map(written, package)) == (written, package)


def read_or_refuse(data: bytes) -> None:
    start = time.perf_counter()
    with suppress(PackageError):
        assert isinstance(read_edgetpu(data), EdgeTpuModel)
    assert time.perf_counter() - start < 2


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damaged_files_of_ours(data: st.DataObject) -> None:
    read_or_refuse(data.draw(damaged(small_file())))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(["robotics/gabor_64x64_p4", "sequence/split_concat"]))
def test_damaged_files_of_google(corpus: Path, data: st.DataObject, name: str) -> None:
    read_or_refuse(data.draw(damaged((corpus / f"{name}_edgetpu.tflite").read_bytes())))


@pytest.mark.slow
def test_every_bit_and_every_length_of_a_small_file() -> None:
    good = small_file()
    for position in range(len(good)):
        read_or_refuse(good[:position])
        if any(good[max(position - 8, 0) : position + 8]):
            for bit in range(8):
                bad = bytearray(good)
                bad[position] ^= 1 << bit
                read_or_refuse(bytes(bad))
