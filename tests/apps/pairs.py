"""Pairs of the corpus, and wrong programs made of right ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from coral import isa
from coral.package.program import Bitstream, Kind
from coral.package.tflite_file import read_edgetpu, replace_package

FAST = [
    "dense/dense_256", "dense/dense_512", "dense/dense_1024", "robotics/bright_16x16", "robotics/gabor_64x64_p4",
    "robotics/gabor_64x64_7k_4o_2s", "sequence/split_concat", "sequence/keras_lstm_mnist_ptq",
]  # fmt: skip
SLOW = [
    "robotics/bright_64x64", "robotics/looming_64x64_3x3", "vision/mobilenet_v1_0.25_128_quant",
    "vision/mobilenet_v1_0.25_128_quant_legacy", "vision/mobilenet_v1_0.5_160_quant",
    "vision/mobilenet_v1_1.0_224_quant_embedding_extractor", "vision/mobilenet_v2_1.0_224_quant_legacy",
    "vision/deeplabv3_mnv2_dm05_pascal_quant", "vision/movenet_single_pose_lightning_ptq",
]  # fmt: skip
COCOMPILED = [("mobilenet_v1_0.25_128_quant", "mobilenet_v1_0.5_160_quant")]


def pair(corpus: Path, name: str) -> tuple[Path, Path]:
    """(original, compiled)."""
    return corpus / f"{name}.tflite", corpus / f"{name}_edgetpu.tflite"


def cocompiled(corpus: Path, name: str, other: str) -> Path:
    return corpus / "cocompiled" / f"{name}_cocompiled_with_{other}_edgetpu.tflite"


def edited(compiled: Path, edit: Callable[[Any], Any]) -> bytes:
    """A compiled file whose execution program has every instruction replaced by ``edit`` of it."""
    file = read_edgetpu(compiled)
    programs = []
    for program in file.package.programs:
        if program.kind is not Kind.PARAMETER_CACHING:
            streams = []
            for stream in program.bitstreams:
                data = isa.encode([edit(placed.instruction) for placed in isa.decode(stream.data)])
                streams.append(Bitstream(data, stream.relocations))
            program = replace(program, bitstreams=tuple(streams))
        programs.append(program)
    return replace_package(file, replace(file.package, programs=tuple(programs)))


def with_fields(instruction: Any, **fields: Any) -> Any:
    """The instruction with some fields changed."""
    return type(instruction)(**(instruction.changed() | fields))
