"""The DarwiNN package: what we write is read back equal, what Google wrote is written back byte for byte."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import flatbuffers
import pytest
from flatbuffers import number_types
from hypothesis import HealthCheck, given, settings

from coral.package import Bitstream, InstructionHint, InterruptHint, Kind, Layer, PackageError, Program
from coral.package.container import Package, read_package, write_package
from coral.package.tflite_file import read_edgetpu

from .package_programs import packages

EXECUTION_HINTS = {
    "mobilenet_v1_0.25_128_quant_cocompiled_with_mobilenet_v1_0.5_160_quant": "IAO!",
    "mobilenet_v1_0.5_160_quant_cocompiled_with_mobilenet_v1_0.25_128_quant": "IAO!",
    "dense_256": "IAO!",
    "dense_512": "IAO!",
    "dense_1024": "IAO!",
    "bright_16x16": "IAO!",
    "bright_64x64": "IAO!",
    "gabor_64x64_7k_4o_2s": "IAO!",
    "gabor_64x64_p4": "IAO!",
    "looming_64x64_3x3": "IAO!",
    "keras_lstm_mnist_ptq": "IPA3",
    "split_concat": "IA3O5!",
    "deeplabv3_mnv2_dm05_pascal_quant": "IAO2!",
    "mobilenet_v1_0.25_128_quant": "IAO!",
    "mobilenet_v1_0.25_128_quant_legacy": "IAO!",
    "mobilenet_v1_0.5_160_quant": "IAO!",
    "mobilenet_v1_1.0_224_quant_embedding_extractor": "IAO!",
    "mobilenet_v2_1.0_224_quant_legacy": "IAO!",
    "movenet_single_pose_lightning_ptq": "IAPO2PO3!",
}
"""Reference pages: executable.md 4 and README.md 2 for the special ones; every other execution program is IAO!."""


def compiled(corpus: Path) -> dict[str, Path]:
    return {path.name.removesuffix("_edgetpu.tflite"): path for path in sorted(corpus.rglob("*_edgetpu.tflite"))}


def program(**changes: object) -> Program:
    base = Program(Kind.STAND_ALONE, (Bitstream(bytes(16)),), (InstructionHint(0), InterruptHint(0)))
    return replace(base, **changes)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(packages())
def test_written_package_reads_back_equal(package: Package) -> None:
    data = write_package(package)
    assert read_package(data) == package
    assert len(data) % 4096 == 0


def test_corpus_is_written_back_byte_for_byte(corpus: Path) -> None:
    files = compiled(corpus)
    assert len(files) == 19
    for path in files.values():
        package = read_edgetpu(path).package
        written = write_package(package)
        assert written in path.read_bytes(), path.name
        assert read_package(written) == package


def test_corpus_programs(corpus: Path) -> None:
    files = compiled(corpus)
    assert set(files) == set(EXECUTION_HINTS)
    for name, path in files.items():
        package = read_edgetpu(path).package
        assert [p.kind for p in package.programs] == [Kind.EXECUTION_ONLY, Kind.PARAMETER_CACHING]
        execution, caching = package.programs
        assert (package.execution, package.caching) == (execution, caching)
        assert execution.hint_pattern() == EXECUTION_HINTS[name]
        assert caching.hint_pattern() == "IP!"
        assert execution.fully_deterministic == (name != "keras_lstm_mnist_ptq")
        assert execution.token == caching.token != 0
        assert (execution.name, caching.name) == ("model", "Unknown")
        assert {p.chip for p in package.programs} == {"beagle"}
        assert not caching.inputs
        assert not caching.outputs
        assert len(execution.parameters) % 64 == len(caching.parameters) % 64 == 0
        assert (package.min_runtime_version, package.virtual_chip_id) in {(12, 0), (13, 0), (14, 0)}


def test_corpus_special_fields(corpus: Path) -> None:
    files = {name: read_edgetpu(path).package for name, path in compiled(corpus).items()}
    cycles = {name: p.execution.estimated_cycles for name, p in files.items() if p.execution.estimated_cycles}
    assert cycles == {
        "mobilenet_v1_0.25_128_quant_legacy": 21_568,
        "mobilenet_v2_1.0_224_quant_legacy": 458_040,
    }
    scratch = {name: p.execution.scratch_bytes for name, p in files.items() if p.execution.scratch_bytes}
    assert scratch == {"keras_lstm_mnist_ptq": 672}
    tokens = {name: p.execution.token for name, p in files.items()}
    pair = [name for name in files if "cocompiled" in name]
    assert len(pair) == 2
    assert tokens[pair[0]] == tokens[pair[1]]
    assert len(set(tokens.values())) == len(tokens) - 1
    assert files["split_concat"].compiler_version == "cl/343520747"
    assert {p.compiler_version for name, p in files.items() if name != "split_concat"} == {"cl/"}
    assert [layer.name for layer in files["keras_lstm_mnist_ptq"].execution.outputs] == [
        "StatefulPartitionedCall:0",
        "tfl.pseudo_qconst_variable_output",
        "tfl.pseudo_qconst1_variable_output",
    ]


def test_corpus_relocations(corpus: Path) -> None:
    """Caching programs have the two parameter fields, execution programs begin with parameter and scratch."""
    for path in compiled(corpus).values():
        execution, caching = read_edgetpu(path).package.programs
        (fields,) = [b.relocations for b in caching.bitstreams]
        assert [(f.base.name, f.high) for f in fields] == [("PARAMETER", False), ("PARAMETER", True)]
        fields = execution.bitstreams[0].relocations
        assert [f.base.name for f in fields[:4]] == ["PARAMETER", "PARAMETER", "SCRATCH", "SCRATCH"]
        assert {f.bit % 128 for f in fields} == {70}
        assert sorted(f.name for f in fields[4:]) == sorted([layer.name for layer in execution.layers()] * 2)


def test_slots_of_a_written_executable() -> None:
    """An independent look with the flatbuffers library: slots and page positions of the file format."""
    written = write_package(
        Package((program(parameters=b"\x07" * 64, token=0x1122334455667788, kind=Kind.EXECUTION_ONLY),), 12, "cl/x")
    )
    assert written[4:8] == b"DWN1"
    package = flatbuffers.table.Table(bytearray(written), struct.unpack_from("<I", written)[0])
    assert package.Get(number_types.Int32Flags, package.Pos + package.Offset(4)) == 12
    assert package.String(package.Pos + package.Offset(12)) == b"cl/x"
    assert package.Vector(package.Offset(6)) == 4096
    multi = written[4096 : 4096 + package.VectorLen(package.Offset(6))]
    assert len(multi) % 4096 == 0
    table = flatbuffers.table.Table(bytearray(multi), struct.unpack_from("<I", multi)[0])
    start = table.Indirect(table.Vector(table.Offset(4))) + 4
    assert start == 4096
    (size,) = struct.unpack_from("<I", multi, start - 4)
    assert size % 4096 == 0
    assert multi[start + size] == 0
    blob = bytearray(multi[start : start + size])
    executable = flatbuffers.table.Table(blob, struct.unpack_from("<I", blob)[0])
    assert executable.Get(number_types.Int16Flags, executable.Pos + executable.Offset(30)) == 2
    assert executable.Get(number_types.Uint64Flags, executable.Pos + executable.Offset(32)) == 0x1122334455667788
    assert (executable.Pos + executable.Offset(32)) % 8 == 0
    assert executable.Vector(executable.Offset(16)) == 4096
    assert executable.VectorLen(executable.Offset(16)) == 64


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ((program(), program()), "cannot combine"),
        ((program(), program(kind=Kind.EXECUTION_ONLY, token=1)), "cannot combine"),
        ((), "cannot combine"),
        (
            (program(kind=Kind.EXECUTION_ONLY, token=2), program(kind=Kind.PARAMETER_CACHING, token=3)),
            r"different tokens \[2, 3\]",
        ),
        ((program(kind=Kind.PARAMETER_CACHING, token=0),), "token is 0"),
    ],
)
def test_illegal_combinations(programs: tuple[Program, ...], message: str) -> None:
    with pytest.raises(PackageError, match=message):
        write_package(Package(programs))


def test_multi_chip_packages_are_refused() -> None:
    with pytest.raises(PackageError, match="several chips"):
        write_package(Package((program(),), virtual_chip_id=-1))


def test_three_programs_mean_the_stand_alone_one() -> None:
    package = Package(
        (
            program(kind=Kind.PARAMETER_CACHING, token=5),
            program(kind=Kind.EXECUTION_ONLY, token=5),
            program(name="all in one"),
        )
    )
    assert read_package(write_package(package)).execution.name == "all in one"
    assert package.caching is None


def test_values_that_do_not_fit_name_their_field() -> None:
    with pytest.raises(PackageError, match=r"Executable\.version: 4294967296 does not fit type i32"):
        write_package(Package((program(version=1 << 32),)))
    with pytest.raises(PackageError, match=r"Executable\.name"):
        write_package(Package((program(name="\ud800"),)))


def test_scale_is_kept_as_float32() -> None:
    layer = Layer("x", 8, 1, 1, 8, 0, 0.1)
    assert layer.scale == struct.unpack("<f", struct.pack("<f", 0.1))[0] != 0.1
    with pytest.raises(PackageError, match="exceeds float32"):
        Layer("x", 8, 1, 1, 8, 0, 1e39)
