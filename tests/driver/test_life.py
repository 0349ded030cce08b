"""Lives and deaths: owners that are killed, programs and files from strangers, calls that overlap, programs that ask
for their own transfers."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stick.fake_chip import execution_program, output_bytes, script

from coral import CoralError, driver, isa
from coral.chip import Chip
from coral.driver.discovery import open_and_claim
from coral.driver.segments import SCRATCH, Out, Place, Prepared, Segment
from coral.package.program import Base, Bitstream, DmaHint, InstructionHint, Kind, PackageError, Program, Relocation
from coral.package.tflite_file import read_edgetpu
from coral.stick import Effect, Fault, FaultPlan
from coral.stick import Kind as FaultKind
from coral.stick.bus import StickHandle
from driver.bed import CACHING, PROGRAM, WEIGHTS, Bed
from driver.bench import check, expected, inputs_of

POINTS = [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 50))]


def good(stick: driver.Stick, program: Any = PROGRAM) -> None:
    stick.ensure_cached(CACHING)
    check(stick, program, WEIGHTS)


# owners that are killed

OWNER = """
import sys
from coral import driver
from coral.driver.libusb import LibusbBus
from coral.stick import stand_in_firmware
from driver.bed import CACHING, PROGRAM, WEIGHTS
from driver.bench import check
print("here", flush=True)
while True:
    with driver.open_stick(
        LibusbBus(), firmware=stand_in_firmware(), check_firmware_hash=False, lock_dir=sys.argv[1]
    ) as stick:
        for _ in range(5):
            stick.forget()
            stick.ensure_cached(CACHING)
            check(stick, PROGRAM, WEIGHTS)
"""


class Killed(BaseException):
    """Nothing of the owner runs any more."""


def die_in_process(bed: Bed, bus: Any, point: int) -> None:
    """An owner that is dead after a random number of requests: what it has under way stays, until the kernel looks."""
    left = random.Random(point).randrange(600)

    def dying(method: Any, self: StickHandle, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return method(self, *arguments)

    names = ("submit_control", "submit_out", "submit_in", "wait", "cancel", "reset", "close", "release")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            method = getattr(StickHandle, name)
            wrapper = functools.partialmethod(lambda self, *a, m: dying(m, self, *a), m=method)
            patch.setattr(StickHandle, name, wrapper)
        with pytest.raises(Killed):  # noqa: PT012 - it may die anywhere
            stick = driver.open_stick(bus, firmware=bed.firmware, check_firmware_hash=False)
            while True:
                stick.forget()
                good(stick)
    for handle in bus.handles:  # the kernel's work
        handle.pending.clear()
    bus._owners.clear()


def die_behind_libusb(bed: Bed, point: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", OWNER, str(bed.directory)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "here\n"
    time.sleep(random.Random(point).uniform(0, 0.7))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()


@pytest.mark.parametrize("point", POINTS)
def test_owner_killed_at_a_random_point(bed: Bed, point: int) -> None:
    bus = bed.bus()
    if bed.layer:
        die_behind_libusb(bed, point)
    else:
        die_in_process(bed, bus, point)
    started = bed.now()
    good(bed.open(bed.libusb()))
    assert bed.now() - started < 5


def test_a_program_without_our_lock_is_kept_out_by_the_claim(bed: Bed) -> None:
    bus = bed.bus()
    good(bed.open(bus))
    with pytest.raises(driver.StickBusy, match=r"does not use this driver's lock.*not released within 0.1 s"):
        open_and_claim(bed.libusb().devices()[0], 0, patience_s=0.1)


# strangers


def hostile_programs() -> dict[str, Program]:
    good = execution_program("A64 O64 !")
    word = isa.Scalar().to_bytes()
    return {
        "hint past its buffer": replace(good, hints=(good.hints[0], DmaHint(Base.INPUT, 8, 64, "in0"))),
        "hint of a huge size": replace(good, hints=(good.hints[0], DmaHint(Base.INPUT, 0, 1 << 40, "in0"))),
        "hint at a negative offset": replace(good, hints=(good.hints[0], DmaHint(Base.INPUT, -8, 8, "in0"))),
        "hint of a layer that is not there": replace(good, hints=(good.hints[0], DmaHint(Base.INPUT, 0, 8, "x"))),
        "chunk that is not there": replace(good, hints=(InstructionHint(7),)),
        "relocation past the end": replace(
            good, bitstreams=(Bitstream(word, (Relocation(Base.INPUT, False, 70 + 128 * 9, "in0"),)),)
        ),
    }


@pytest.mark.waits
@pytest.mark.parametrize("name", hostile_programs())
def test_hostile_programs_are_refused_and_nothing_is_sent(bed: Bed, name: str) -> None:
    stick = bed.start()
    program = hostile_programs()[name]
    with pytest.raises(PackageError):
        stick.run(program, inputs_of(program))
    assert stick.counters.transfers == 0
    good(stick)


@pytest.mark.waits
@pytest.mark.parametrize("seed", range(8))
def test_damaged_files_end_in_typed_errors(bed: Bed, corpus: Path, seed: int) -> None:
    """Offsets anywhere in the file's tables point to anywhere; what can still be read runs or is refused."""
    rng = random.Random(seed)
    whole = (corpus / "robotics" / "bright_16x16_edgetpu.tflite").read_bytes()
    data = bytearray(whole)
    for _ in range(3):
        at = rng.randrange(0, len(data) - 4) & ~3
        data[at : at + 4] = rng.choice([b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\1\0\0\0"])
    stick = bed.open(bed.bus(chip=functools.partial(Chip, budget=200_000)), stall_timeout_s=2.0)
    results = []
    for file in (bytes(data), whole, whole):
        with suppress(CoralError) if file is not whole else nullcontext():
            for program in sorted(read_edgetpu(file).package.programs, key=lambda p: p.kind):
                results.append(stick.run(program, inputs_of(program)))
    assert results[-1] == results[-3] != {}, "a good file runs rightly afterwards"


def endless() -> Program:
    body = [isa.Scalar(), isa.Branch(offset=-1), isa.Halt(code=4)]
    stream = isa.encode([isa.Start(body_bits=128 * len(body)), *body, isa.End()])
    good = execution_program("O8 !")
    return replace(good, bitstreams=(Bitstream(stream),))


@pytest.mark.waits
def test_a_program_that_never_ends(bed: Bed, corpus: Path) -> None:
    found = {p.kind: p for p in read_edgetpu(corpus / "dense" / "dense_256_edgetpu.tflite").package.programs}
    stick = bed.open(bed.bus(chip=functools.partial(Chip, budget=20_000)), stall_timeout_s=2.0)
    started = bed.now()
    with pytest.raises(driver.TransferFailed if bed.layer else CoralError, match=r"nothing happened|endless loop"):
        stick.run(endless())
    assert bed.now() - started < 2 * 2.0 + 5.0
    stick.ensure_cached(found[Kind.PARAMETER_CACHING])
    assert len(stick.run(found[Kind.EXECUTION_ONLY], inputs_of(found[Kind.EXECUTION_ONLY]))) == 1


# calls that overlap


def test_the_next_call_is_sent_while_the_last_ones_outputs_are_in_hand(bed: Bed) -> None:
    stick = bed.start()
    stick.ensure_cached(CACHING)
    program = driver.prepare(execution_program("A64 O64 !"))
    data = [bytearray([n]) * 64 for n in range(5)]
    calls = []
    for number, buffer in enumerate(data):
        calls.append(stick.start(program, {"in0": buffer}))
        buffer[:] = bytes(64)  # the call has its own copy
        if number:
            assert calls[-2].result()["out0"] == output_bytes(WEIGHTS, bytes([number - 1]) * 64, 0, 64)
            for _ in range(500 * bed.layer):  # the other end works when it gets its turn
                if bed.stick.faults.seen[FaultKind.INPUT] == number + 1:
                    break
                bed.sleep(0.01)
            assert bed.stick.faults.seen[FaultKind.INPUT] == number + 1, "sent before the one before was looked at"
    assert calls[-1].result() == calls[-1].result()
    assert calls[-1].result()["out0"] == output_bytes(WEIGHTS, b"\4" * 64, 0, 64)
    assert stick.counters.calls == 6


def test_overlap_keeps_the_order_of_outputs_and_later_sends() -> None:
    """On a stick that watches the deadlock rule: nothing of the next call goes out before all outputs are read."""
    bed = Bed()
    stick = bed.start()
    stick.ensure_cached(CACHING)
    calls = [stick.start(PROGRAM, inputs_of(PROGRAM)) for _ in range(4)]
    assert [call.result() for call in calls] == [expected(PROGRAM, WEIGHTS)] * 4
    bed.close()


def test_a_started_call_is_repeated_too(bed: Bed) -> None:
    stick = bed.start(Fault(FaultKind.INPUT, 0, Effect.STALL))
    stick.ensure_cached(CACHING)
    first = stick.start(PROGRAM, inputs_of(PROGRAM))
    second = stick.start(PROGRAM, inputs_of(PROGRAM))
    assert first.result() == second.result() == expected(PROGRAM, WEIGHTS)
    assert stick.counters.retries == 1


def test_a_failed_call_is_reported_to_its_owner_and_to_the_next_start(bed: Bed) -> None:
    stick = bed.start(Fault(FaultKind.INPUT, 0, Effect.STALL))
    once = driver.prepare(PROGRAM, idempotent=False)
    stick.ensure_cached(CACHING)
    call = stick.start(once, inputs_of(PROGRAM))
    with pytest.raises(driver.TransferFailed):
        stick.start(once, inputs_of(PROGRAM))
    with pytest.raises(driver.TransferFailed):
        call.result()
    good(stick)


def test_closing_ends_a_call_that_is_under_way(bed: Bed) -> None:
    stick = bed.start()
    call = stick.start(PROGRAM, inputs_of(PROGRAM))
    stick.close()
    with pytest.raises(driver.DriverError, match="closed before the program had ended"):
        call.result()


@pytest.mark.parametrize("seconds", [0.05, 0.3, 0.9])
def test_closing_a_stick_that_answers_late_ends_soon(bed: Bed, seconds: float) -> None:
    bus = bed.bus()
    stick = bed.open(bus)
    good(stick)
    bed.stick.faults = FaultPlan(Fault(FaultKind.CONTROL, 0, Effect.DELAY, 1000, seconds=seconds))
    started = bed.now()
    stick.close()
    assert bed.now() - started < 4
    bed.stick.faults = FaultPlan()
    good(bed.open(bus))


def test_opening_a_stick_that_answers_late_fails_soon(bed: Bed) -> None:
    bus = bed.bus()
    bed.open(bus).close()
    bed.stick.faults = FaultPlan(Fault(FaultKind.CONTROL, 0, Effect.DELAY, 1000, seconds=0.3))
    started = bed.now()
    with pytest.raises(driver.DriverError, match="answers so late that the time for all its answers was over"):
        bed.open(bus)
    assert bed.now() - started < 10
    bed.stick.faults = FaultPlan()
    good(bed.open(bus))


# programs that ask for their own transfers

ADDRESSES = {"p": 1 << 32, "s": 2 << 32, "x": 3 << 32, "y": 4 << 32}


def asking(*steps: str) -> Prepared:
    """Like keras_lstm_mnist: 64 parameters, 48 bytes of scratch, input x and output y."""
    base = execution_program("A64 O64 !", parameters=bytes(range(64)))
    program = replace(base, scratch_bytes=48, fully_deterministic=False)
    for letter, address in ADDRESSES.items():
        steps = tuple(step.replace(f"@{letter}", f"@{address:#x}", 1) for step in steps)
    data = script(*steps)
    wire = bytearray(len(data).to_bytes(4, "little") + bytes(4) + data)
    places = (
        Place(ADDRESSES["p"], 64, Base.PARAMETER),
        Place(ADDRESSES["s"], 48, Base.SCRATCH, SCRATCH),
        Place(ADDRESSES["x"], 64, Base.INPUT, "in0"),
        Place(ADDRESSES["y"], 64, Base.OUTPUT, "out0"),
    )
    return Prepared(program, [Segment([Out(0, len(data), wire=wire)])], {"in0": 64}, {"out0": 64}, places=places)


@pytest.mark.parametrize("speed", ["super", "high"])
def test_transfers_are_made_as_the_program_asks(bed: Bed, speed: str) -> None:
    stick = bed.start(speed=speed)
    prepared = asking("P64@p", "A64@x", "O24@s", f"O24@{(2 << 32) + 24:#x}", "A48@s", "O64@y", "!")
    data = bytes(range(100, 164))
    consumed = bytes(range(64)) + data
    scratch = output_bytes(b"", consumed, 0, 24) + output_bytes(b"", consumed, 1, 24)
    for _ in range(2):
        assert stick.run(prepared, {"in0": data}) == {"out0": output_bytes(b"", consumed + scratch, 2, 64)}
    assert stick.counters.faults == {}
    check(stick, execution_program("A64 O64 !"))
    assert bed.stick.registers["descr_ep"] == 0xF0, "only interrupts are announced again"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("A65@x", "tag 1 of 65 bytes at 0x300000000: no buffer"),
        ("O8@x", "tag 3 of 8 bytes at 0x300000000: no buffer"),
        ("A8@0x12345", "at 0x12345: no buffer"),
        ("O64@0x40000003c", "at 0x40000003c: no buffer"),
    ],
)
def test_requests_outside_the_buffers_are_refused(bed: Bed, step: str, message: str) -> None:
    stick = bed.start()
    with pytest.raises(driver.TransferFailed, match=message):
        stick.run(asking(step, "!"), {"in0": bytes(64)})
    bed.stick.faults = FaultPlan()
    good(stick)


def test_choosing_by_serial_number(bed: Bed) -> None:
    bus = bed.bus(serial="A17-4")
    (found,) = driver.list_sticks(bus)
    assert found.serial == bed.stick.serial
    good(bed.open(bus, index=found.serial))
    with pytest.raises(driver.NoStick, match="no stick 'A18'"):
        bed.open(bed.libusb(), index="A18")
