"""Google's programs: what goes over the wire, and dense layers computed by the chip behind driver and stick."""

from __future__ import annotations

from pathlib import Path

import pytest

from coral import driver
from coral.chip import Chip, ChipState, UnwrittenRead
from coral.driver.segments import Prepared
from coral.package.program import Base, DmaHint, InstructionHint, Kind, Program
from coral.package.tflite_file import read_edgetpu
from coral.stick import SoftwareStick, StickBus
from driver.bench import open_on

# What Google's driver was seen to send at the first inference of each (I, A, P: tag 0, 1, 2), and to read (O).
GOOGLES_DRIVER = {
    "dense/dense_256_edgetpu.tflite": "I1072 P67584 I4224 A256 O256",
    "dense/dense_1024_edgetpu.tflite": "I2608 P1056768 I9984 A1024 O1024",
    "vision/mobilenet_v1_0.25_128_quant_edgetpu.tflite": "I12624 P566912 I170032 A49152",
    "vision/mobilenet_v1_0.5_160_quant_edgetpu.tflite": "I12624 P1473280 I205936 A76800",
    "vision/deeplabv3_mnv2_dm05_pascal_quant_edgetpu.tflite": "I8016 P766720 I160672 A789512 O278784",
    "vision/movenet_single_pose_lightning_ptq_edgetpu.tflite": (
        "I10032 P2862656 I133408 A110592 P64 O46080 O46080 P2304 O9216 O82944 O82944"
    ),
}


def programs(path: Path) -> dict[Kind, Program]:
    return {program.kind: program for program in read_edgetpu(path).package.programs}


def wire(prepared: Prepared) -> list[str]:
    words = []
    for segment in prepared.segments:
        words += [f"{'IAP'[out.tag]}{out.size}" for out in segment.outs]
        words += [f"O{part.size}" for part in segment.ins]
    return words


@pytest.mark.parametrize("name", GOOGLES_DRIVER)
def test_sequence_is_that_of_googles_driver(corpus: Path, name: str) -> None:
    found = programs(corpus / name)
    words = wire(driver.prepare(found[Kind.PARAMETER_CACHING])) + wire(driver.prepare(found[Kind.EXECUTION_ONLY]))
    expected = GOOGLES_DRIVER[name].split()
    assert words[: len(expected)] == expected


def test_every_program_of_the_corpus_is_prepared_or_refused_with_its_reason(corpus: Path) -> None:
    segments = {}
    for path in sorted(corpus.rglob("*_edgetpu.tflite")):
        for program in read_edgetpu(path).package.programs:
            if program.fully_deterministic:
                segments[path.name, program.kind] = len(driver.prepare(program).segments)
            else:
                with pytest.raises(driver.DriverError, match="not deterministic"):
                    driver.prepare(program)
                segments[path.name, program.kind] = 0
    several = {name: count for (name, _), count in segments.items() if count != 1}
    assert len(segments) == 38
    assert several == {
        "keras_lstm_mnist_ptq_edgetpu.tflite": 0,
        "movenet_single_pose_lightning_ptq_edgetpu.tflite": 2,
    }


def directly(found: dict[Kind, Program], inputs: dict[str, bytes]) -> list[bytes]:
    """Outputs of a chip that is fed by hand, hint by hint."""
    chip = Chip()
    for program in (found[Kind.PARAMETER_CACHING], found[Kind.EXECUTION_ONLY]):
        for hint in program.hints:
            match hint:
                case InstructionHint(chunk):
                    chip.feed(0, program.bitstreams[chunk].data)
                case DmaHint(Base.INPUT, offset, size, name):
                    chip.feed(1, inputs[name][offset : offset + size])
                case DmaHint(Base.PARAMETER, offset, size):
                    chip.feed(2, program.parameters[offset : offset + size])
        assert chip.run() is ChipState.FINISHED
    return list(chip.outputs)


@pytest.mark.parametrize("name", ["dense_256", "dense_512"])
@pytest.mark.parametrize("speed", ["super", "high"])
def test_dense_layers_through_driver_stick_and_chip(corpus: Path, name: str, speed: str) -> None:
    found = programs(corpus / "dense" / f"{name}_edgetpu.tflite")
    stick = open_on(StickBus([SoftwareStick(speed=speed)]))
    prepared = driver.prepare(found[Kind.EXECUTION_ONLY])
    for seed in range(2):
        inputs = {
            layer.name: bytes((seed * 7 + i * i) % 256 for i in range(layer.size_bytes))
            for layer in found[Kind.EXECUTION_ONLY].inputs
        }
        assert stick.ensure_cached(found[Kind.PARAMETER_CACHING]) == (seed == 0)
        (output,) = stick.run(prepared, inputs).values()
        assert [output] == directly(found, inputs)
        assert len(set(output)) > 20, "not a constant"


def test_running_without_parameters_is_the_chips_own_error(corpus: Path) -> None:
    found = programs(corpus / "dense" / "dense_256_edgetpu.tflite")
    stick = open_on(StickBus([SoftwareStick()]))
    inputs = {layer.name: bytes(layer.size_bytes) for layer in found[Kind.EXECUTION_ONLY].inputs}
    with pytest.raises(UnwrittenRead, match="never written"):
        stick.run(found[Kind.EXECUTION_ONLY], inputs)
    stick.ensure_cached(found[Kind.PARAMETER_CACHING])
    stick.run(found[Kind.EXECUTION_ONLY], inputs)
