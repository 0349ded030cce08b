"""Models of the corpus, compiled by us, against the layers of the original graphs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coral.apps.verify import verify_pair
from coral.compiler import compile_models
from coral.package.program import Kind
from coral.package.strict import strict_checks
from coral.package.tflite_file import read_edgetpu

WHOLE = ["dense/dense_256", "dense/dense_1024", "robotics/gabor_64x64_p4", "robotics/gabor_64x64_7k_4o_2s",
         "robotics/bright_16x16", "robotics/bright_64x64", "sequence/split_concat",
         "vision/mobilenet_v1_0.25_128_quant"]  # fmt: skip
PARTS = ["robotics/bright_64x64", "sequence/keras_lstm_mnist_ptq", "vision/movenet_single_pose_lightning_ptq",
         "vision/deeplabv3_mnv2_dm05_pascal_quant"]  # fmt: skip
"""Models of which something is left to the host."""
LARGE = ["dense/dense_512", "robotics/looming_64x64_3x3", "vision/mobilenet_v1_0.25_128_quant_legacy",
         "vision/mobilenet_v1_0.5_160_quant", "vision/mobilenet_v1_1.0_224_quant_embedding_extractor",
         "vision/mobilenet_v2_1.0_224_quant_legacy"]  # fmt: skip
ORDERS = 20


def verified(corpus: Path, tmp_path: Path, name: str, n: int = 1, orders: int = 1):
    """The compiled model, after a comparison with the original."""
    source = corpus / f"{name}.tflite"
    (compiled,) = compile_models([source])
    report = verify_pair(source, compiled.write(tmp_path / "out_edgetpu.tflite"), n=n, orders=orders)
    assert report.ok
    assert report.inputs == n
    return compiled


@pytest.mark.parametrize("name", WHOLE)
def test_compiled_models_equal_their_layers(corpus, tmp_path, name):
    compiled = verified(corpus, tmp_path, name)
    assert set(compiled.partition.reasons.values()) <= {"only another way to see a tensor"}


def test_these_are_all_models(corpus):
    whole = {f"{p.parent.name}/{p.stem}" for p in corpus.glob("*/*.tflite") if not p.stem.endswith("_edgetpu")}
    assert whole == {*WHOLE, *LARGE, *PARTS}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LARGE, *PARTS])
def test_large_compiled_models_equal_their_layers(corpus, tmp_path, name):
    compiled = verified(corpus, tmp_path, name)
    on_chip = {n for segment in compiled.partition.segments for n in segment.operators}
    names = [compiled.partition.graph.operators[n].name for n in compiled.partition.reasons]
    assert len(on_chip) >= {"vision/movenet_single_pose_lightning_ptq": 95}.get(name, 1)
    if name == "vision/deeplabv3_mnv2_dm05_pascal_quant":
        assert names == ["RESIZE_BILINEAR", "ARG_MAX"]
    if name == "sequence/keras_lstm_mnist_ptq":
        assert "UNIDIRECTIONAL_SEQUENCE_LSTM has no program on the chip" in compiled.partition.reasons.values()
    if name in LARGE:
        assert not names


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WHOLE, *LARGE, *PARTS])
def test_the_order_of_units_changes_nothing(corpus, tmp_path, name):
    verified(corpus, tmp_path, name, orders=ORDERS)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux: memory of the compiler NOT measured")
def test_mobilenet_v2_compiles_in_five_seconds_and_a_gibibyte(corpus):
    """In a process of its own, imports included."""
    model = corpus / "vision" / "mobilenet_v2_1.0_224_quant_legacy.tflite"
    code = (
        "import sys, time; from coral.compiler import compile_models; compile_models([sys.argv[1]])\n"
        "print(time.process_time(), open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    run = subprocess.run([sys.executable, "-c", code, str(model)], check=True, capture_output=True, text=True)
    seconds, kib = run.stdout.split()
    assert float(seconds) < 5
    assert int(kib) < 1 << 20


def test_models_compiled_together_are_resident_together(corpus):
    names = ["mobilenet_v1_0.25_128_quant", "mobilenet_v1_0.5_160_quant"]
    both = compile_models([corpus / "vision" / f"{name}.tflite" for name in names])
    assert all(one.resident for one in both)
    files = [read_edgetpu(one.data) for one in both]
    assert len({file.package.execution.token for file in files}) == 1
    places = []
    for one in both:
        rows = [
            {
                (tile, row)
                for tile in range(16)
                if piece.tiles >> tile & 1
                for row in range(piece.row, piece.row + piece.rows)
            }
            for piece, _ in one.programs[0].wide.parts
        ]
        places.append(set().union(*rows))
    assert not places[0] & places[1]
    lowest = min(p.floor_rows for one in both for p in one.programs)
    assert max(row for rows in places for _, row in rows) < lowest


def test_what_is_written_is_read(corpus):
    (compiled,) = compile_models([corpus / "vision" / "mobilenet_v1_0.25_128_quant.tflite"])
    file = read_edgetpu(compiled.data)
    assert [op.name for op in file.graph.operators] == ["edgetpu-custom-op"]
    assert all(check.ok for check in strict_checks(compiled.data))
    assert {p.kind for p in file.package.programs} == {Kind.EXECUTION_ONLY, Kind.PARAMETER_CACHING}
    assert file.package.execution.bitstreams[0].data == compiled.programs[0].execution.bitstreams[0].data


def test_results_that_only_take_longer_to_send_are_left_to_the_host(corpus):
    """MoveNet sends its heat maps; a second copy in another scale is the host's."""
    (compiled,) = compile_models([corpus / "vision" / "movenet_single_pose_lightning_ptq.tflite"])
    (segment,) = compiled.partition.segments
    graph = compiled.partition.graph
    (number,) = [n for n, why in compiled.partition.reasons.items() if why.startswith("sending its result")]
    assert graph.operators[number].name == "QUANTIZE"
    assert graph.operators[number].inputs[0] in segment.outputs.values()
    assert compiled.partition.order.index(number) == 1 + compiled.partition.order.index(segment)
