"""Google's programs through driver, USB and simulated chip, on both layers: outputs and what goes over the wire."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from coral import driver
from coral.chip import Chip, ChipState, UnwrittenRead
from coral.package.program import Base, DmaHint, InstructionHint, Kind, Program
from coral.package.tflite_file import read_edgetpu
from coral.stick.parser import Dma
from driver.bed import Bed, RecordingBus

SMALL = (
    "dense/dense_256",
    "dense/dense_512",
    "dense/dense_1024",
    "robotics/bright_16x16",
    "robotics/gabor_64x64_7k_4o_2s",
    "robotics/gabor_64x64_p4",
    "sequence/split_concat",
)
LARGE = (
    "robotics/bright_64x64",
    "robotics/looming_64x64_3x3",
    "sequence/keras_lstm_mnist_ptq",
    "vision/mobilenet_v1_0.25_128_quant_legacy",
    "vision/mobilenet_v1_0.25_128_quant",
    "vision/mobilenet_v1_0.5_160_quant",
    "vision/mobilenet_v1_1.0_224_quant_embedding_extractor",
    "vision/mobilenet_v2_1.0_224_quant_legacy",
    "vision/deeplabv3_mnv2_dm05_pascal_quant",
    "vision/movenet_single_pose_lightning_ptq",
)
COCOMPILED = (
    "cocompiled/mobilenet_v1_0.25_128_quant_cocompiled_with_mobilenet_v1_0.5_160_quant",
    "cocompiled/mobilenet_v1_0.5_160_quant_cocompiled_with_mobilenet_v1_0.25_128_quant",
)
TEN = (*SMALL, "robotics/bright_64x64", "robotics/looming_64x64_3x3", "vision/mobilenet_v1_0.25_128_quant_legacy")

# What Google's driver was seen to send at the first inference of each (I, A, P: tag 0, 1, 2), and to read (O).
GOOGLES_DRIVER = {
    "dense/dense_256": "I1072 P67584 I4224 A256 O256",
    "dense/dense_1024": "I2608 P1056768 I9984 A1024 O1024",
    "robotics/bright_16x16": "I944 P8384 I18240 A256",
    "robotics/gabor_64x64_7k_4o_2s": "I688 P3200 I6512 A4096",
    "robotics/looming_64x64_3x3": "I944 P1024 I20320 A4096",
    "vision/mobilenet_v1_0.25_128_quant": "I12624 P566912 I170032 A49152",
    "vision/mobilenet_v1_0.5_160_quant": "I12624 P1473280 I205936 A76800",
    "vision/deeplabv3_mnv2_dm05_pascal_quant": "I8016 P766720 I160672 A789512 O278784",
    "vision/movenet_single_pose_lightning_ptq": (
        "I10032 P2862656 I133408 A110592 P64 O46080 O46080 P2304 O9216 O82944 O82944"
    ),
}
LSTM = "I60864 P576 A784 A24 A40 A672"
"""28 pieces of scratch are read between A40 and A672, which sends them back."""


def slow(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def programs(corpus: Path, name: str) -> dict[Kind, Program]:
    return {program.kind: program for program in read_edgetpu(corpus / f"{name}_edgetpu.tflite").package.programs}


def inputs_for(program: Program, seed: int = 0) -> dict[str, bytes]:
    return {
        layer.name: bytes((seed * 37 + i * i * 7 + index) % 251 for i in range(layer.size_bytes))
        for index, layer in enumerate(program.inputs)
    }


class Direct:
    """A chip that is fed by hand, hint by hint; programs that ask for their transfers are served by their asking."""

    def __init__(self) -> None:
        self.chip = Chip()

    def run(self, program: Program, inputs: dict[str, bytes]) -> dict[str, bytes]:
        chip = self.chip
        chip.outputs.clear()
        for hint in program.hints:
            match hint:
                case InstructionHint(chunk):
                    chip.feed(0, program.bitstreams[chunk].data)
                case DmaHint(Base.INPUT, offset, size, name):
                    chip.feed(1, inputs[name][offset : offset + size])
                case DmaHint(Base.PARAMETER, offset, size):
                    chip.feed(2, program.parameters[offset : offset + size])
        state = chip.run()
        if program.scratch_bytes:
            assert state is ChipState.NEEDS_HOST
            chip.feed(1, b"".join(chip.outputs))
            chip.outputs.clear()
            state = chip.run()
        assert state is ChipState.FINISHED
        sent = b"".join(chip.outputs)
        outs = [h for h in program.hints if isinstance(h, DmaHint) and h.out]
        order = [(h.name, h.size) for h in outs] or [(layer.name, layer.size_bytes) for layer in program.outputs]
        results: dict[str, bytes] = {}
        for name, size in order:
            results[name], sent = results.get(name, b"") + sent[:size], sent[size:]
        assert not sent
        return results


def directly(found: dict[Kind, Program], inputs: dict[str, bytes]) -> dict[str, bytes]:
    direct = Direct()
    direct.run(found[Kind.PARAMETER_CACHING], {})
    return direct.run(found[Kind.EXECUTION_ONLY], inputs)


def opened(bed: Bed, **options: Any) -> driver.Stick:
    """A stick around the simulated chip; in real time the simulation may take its minutes."""
    return bed.open(bed.bus(chip=Chip, **options), stall_timeout_s=600.0 if bed.layer else 2.0)


def run(stick: driver.Stick, found: dict[Kind, Program], inputs: dict[str, bytes]) -> dict[str, bytes]:
    stick.ensure_cached(found[Kind.PARAMETER_CACHING])
    return stick.run(found[Kind.EXECUTION_ONLY], inputs)


@pytest.mark.parametrize("name", [*SMALL, *slow(LARGE)])
def test_outputs_are_those_of_the_chip_alone(bed: Bed, corpus: Path, name: str) -> None:
    found = programs(corpus, name)
    stick, inputs = opened(bed), inputs_for(found[Kind.EXECUTION_ONLY])
    received: list[Dma] = []
    accept = bed.stick.engine.accept
    bed.stick.engine.accept = lambda dma: (received.append(dma), accept(dma))[1]  # pyright: ignore[reportAttributeAccessIssue]
    outputs = run(stick, found, inputs)
    assert outputs == directly(found, inputs)
    assert len(set(b"".join(outputs.values()))) > 2, "not a constant"
    assert stick.counters.faults == {}
    check_wire(received, found, inputs, name)


def check_wire(received: list[Dma], found: dict[Kind, Program], inputs: dict[str, bytes], name: str) -> None:
    """Tags, sizes and order as Google's driver was seen to send them; bytes as in the file, address words masked."""
    words = [f"{'IAP'[dma.tag]}{len(dma.data)}" for dma in received]
    googles = GOOGLES_DRIVER.get(name, LSTM if "lstm" in name else "")
    expected = [word for word in googles.split() if word[0] != "O"]
    start = 2 if "lstm" in name else 0
    assert words[start : start + len(expected)] == expected
    execution = found[Kind.EXECUTION_ONLY]
    chunks = iter([(p, b) for p in found.values() for b in p.bitstreams if p.kind is Kind.PARAMETER_CACHING])
    rest = iter([(execution, b) for b in execution.bitstreams])
    parameters = found[Kind.PARAMETER_CACHING].parameters + execution.parameters
    assert b"".join(dma.data for dma in received if dma.tag == 2) == parameters
    for dma in received:
        if dma.tag == 0:
            _, bitstream = next(chunks, None) or next(rest)
            assert masked(dma.data, bitstream) == masked(bitstream.data, bitstream)
    sent = b"".join(dma.data for dma in received if dma.tag == 1)
    hinted = [h for h in execution.hints if isinstance(h, DmaHint) and h.base is Base.INPUT]
    assert sent.startswith(b"".join(inputs[h.name][h.offset : h.offset + h.size] for h in hinted))


def masked(data: bytes, bitstream: Any) -> int:
    words = int.from_bytes(data, "little")
    for relocation in bitstream.relocations:
        words &= ~(0xFFFFFFFF << relocation.bit)
    return words


def test_second_call_sends_only_the_execution_program(bed: Bed, corpus: Path) -> None:
    found = programs(corpus, "dense/dense_256")
    stick = opened(bed)
    for seed in range(3):
        inputs = inputs_for(found[Kind.EXECUTION_ONLY], seed)
        assert run(stick, found, inputs) == directly(found, inputs)
    assert (stick.counters.uploads, stick.counters.parameter_bytes) == (1, 67584)
    assert stick.counters.instruction_bytes == 1072 + 3 * 4224


@pytest.mark.slow
def test_two_models_compiled_together_are_uploaded_once_each(bed: Bed, corpus: Path) -> None:
    found = [programs(corpus, name) for name in COCOMPILED]
    inputs = [inputs_for(each[Kind.EXECUTION_ONLY]) for each in found]
    expected = [directly(*pair) for pair in zip(found, inputs, strict=True)]
    stick = opened(bed)
    for which in (0, 1, 0, 0, 1):
        assert run(stick, found[which], inputs[which]) == expected[which]
    assert stick.counters.uploads == 2
    del found[0]
    found.insert(0, programs(corpus, COCOMPILED[0]))
    assert run(stick, found[0], inputs[0]) == expected[0], "known by content: read again from the file, sent no more"
    assert stick.counters.uploads == 2


@pytest.mark.slow
def test_ten_models_in_one_process(bed: Bed, corpus: Path) -> None:
    stick = opened(bed)
    models = [programs(corpus, name) for name in TEN]
    for found in models:
        inputs = inputs_for(found[Kind.EXECUTION_ONLY])
        assert run(stick, found, inputs) == directly(found, inputs)
    assert stick.counters.uploads == 10


def test_three_threads_with_a_model_each(bed: Bed, corpus: Path) -> None:
    stick, errors = opened(bed), []
    mutex = threading.Lock()  # parameters and the call that needs them belong together

    def work(name: str) -> None:
        try:
            found = programs(corpus, name)
            inputs = inputs_for(found[Kind.EXECUTION_ONLY])
            expected = directly(found, inputs)
            for _ in range(3):
                with mutex:
                    outputs = run(stick, found, inputs)
                assert outputs == expected
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in SMALL[:3]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_running_without_parameters_is_the_chips_own_error(corpus: Path) -> None:
    bed = Bed()
    found = programs(corpus, "dense/dense_256")
    stick, inputs = opened(bed), inputs_for(found[Kind.EXECUTION_ONLY])
    with pytest.raises(UnwrittenRead, match="never written"):
        stick.run(found[Kind.EXECUTION_ONLY], inputs)
    run(stick, found, inputs)
    bed.close()


@pytest.mark.slow
def test_the_state_of_a_recurrent_model_goes_round(bed: Bed, corpus: Path) -> None:
    """The outputs called *_variable_output are the next call's inputs; the chip names its transfers by address."""
    found = programs(corpus, "sequence/keras_lstm_mnist_ptq")
    execution = found[Kind.EXECUTION_ONLY]
    stick, direct = opened(bed), Direct()
    direct.run(found[Kind.PARAMETER_CACHING], {})
    inputs = {**inputs_for(execution), "tfl.pseudo_qconst": b"\x7f" * 24, "tfl.pseudo_qconst1": b"\0\x80" * 20}
    seen = []
    for _ in range(2):
        outputs = run(stick, found, inputs)
        assert outputs == direct.run(execution, inputs)
        seen.append(outputs)
        inputs = {name: outputs.get(f"{name}_variable_output", data) for name, data in inputs.items()}
    assert seen[0] != seen[1]
    assert stick.counters.uploads == 1


def test_every_program_of_the_corpus_is_prepared(corpus: Path) -> None:
    segments = {}
    for path in sorted(corpus.rglob("*_edgetpu.tflite")):
        for program in read_edgetpu(path).package.programs:
            prepared = driver.prepare(program)
            segments[path.name, program.kind] = 0 if prepared.places else len(prepared.segments)
    several = {name: count for (name, _), count in segments.items() if count != 1}
    assert len(segments) == 38
    assert several == {
        "keras_lstm_mnist_ptq_edgetpu.tflite": 0,
        "movenet_single_pose_lightning_ptq_edgetpu.tflite": 2,
    }


CLIENT = """
import os, sys
from pathlib import Path
from coral import driver
from coral.driver.libusb import LibusbBus
from coral.stick import stand_in_firmware
from driver.test_corpus import inputs_for, programs, run
found = programs(Path(sys.argv[1]), "dense/dense_256")
from coral.package.program import Kind
inputs = inputs_for(found[Kind.EXECUTION_ONLY])
stick = driver.open_stick(LibusbBus(), firmware=stand_in_firmware(), check_firmware_hash=False, lock_dir=sys.argv[2],
                          stall_timeout_s=60.0)
print(run(stick, found, inputs).popitem()[1].hex(), flush=True)
while "forever" in sys.argv:
    run(stick, found, inputs)
stick.close()
"""


def client(*arguments: Any) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_another_process_after_a_clean_close_and_after_a_kill(bed: Bed, corpus: Path) -> None:
    found = programs(corpus, "dense/dense_256")
    inputs = inputs_for(found[Kind.EXECUTION_ONLY])
    expected = directly(found, inputs)
    stick = opened(bed)
    assert run(stick, found, inputs) == expected
    if not bed.layer:  # no other process sees these sticks: what another one would find is a new opening
        stick.close()
        second = bed.open(bed.libusb(), lock_dir=None)
        assert run(second, found, inputs) == expected
        assert isinstance(bed.libusb(), RecordingBus)
        bed.libusb()._owners.clear()  # pyright: ignore[reportAttributeAccessIssue] - what the kernel does for the dead
        third = bed.open(bed.libusb())
        assert run(third, found, inputs) == expected
        assert (second.counters.uploads, third.counters.uploads) == (1, 1)
        return
    refused = client(corpus, bed.directory)
    assert refused.communicate()[0] == "", "the stick is ours"
    assert refused.returncode != 0
    stick.close()
    other = client(corpus, bed.directory)
    assert bytes.fromhex(other.communicate()[0]) in expected.values()
    killed = client(corpus, bed.directory, "forever")
    assert killed.stdout is not None
    assert bytes.fromhex(killed.stdout.readline()) in expected.values()
    time.sleep(0.05)
    with pytest.raises(driver.StickBusy, match=f"used by process {killed.pid} "):
        bed.open(bed.libusb())
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    again = bed.open(bed.libusb(), stall_timeout_s=60.0)
    assert run(again, found, inputs) == expected
    again.close()
