"""Programs whose instructions are sent before their inputs are known."""

from __future__ import annotations

from typing import Any

import pytest
from stick.fake_chip import execution_program, output_bytes

from coral import driver
from coral.stick import Effect, Fault
from coral.stick import Kind as FaultKind
from driver.bed import CACHING, PROGRAM, WEIGHTS, Bed
from driver.bench import check, expected, inputs_of

SMALL = execution_program("A64 O64 !")


def settled(bed: Bed, kind: FaultKind, count: int) -> bool:
    """Whether the other end has seen so many transfers, once it had its turn."""
    for _ in range(500 * bed.layer):
        if bed.stick.faults.seen[kind] >= count:
            break
        bed.sleep(0.01)
    return bed.stick.faults.seen[kind] == count


def test_instructions_go_ahead_of_the_inputs(bed: Bed) -> None:
    stick = bed.start()
    stick.ensure_cached(CACHING)
    program = driver.prepare(SMALL)
    before = bed.stick.faults.seen[FaultKind.INSTRUCTIONS]
    for number in range(4):
        call = stick.announce(program)
        assert call.waiting
        assert settled(bed, FaultKind.INSTRUCTIONS, before + 1 + number)
        assert bed.stick.faults.seen[FaultKind.INPUT] == number
        bed.sleep(0.2)
        data = bytearray([number]) * 64
        call.give({"in0": data})
        data[:] = bytes(64)  # the call has its own copy
        assert call.result() == call.result() == {"out0": output_bytes(WEIGHTS, bytes([number]) * 64, 0, 64)}
    assert stick.counters.calls == 5
    assert stick.counters.faults == {}


def test_programs_of_several_inputs_and_segments(bed: Bed) -> None:
    stick = bed.start()
    stick.ensure_cached(CACHING)
    for program in (PROGRAM, execution_program("A64 A8 P16 O64 A128 O8 O64 !", parameters=bytes(range(16)))):
        for _ in range(2):
            assert stick.announce(program).give(inputs_of(program)).result() == expected(program, WEIGHTS)
        check(stick, program, WEIGHTS)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.INSTRUCTIONS, 2, Effect.STALL),
        Fault(FaultKind.INSTRUCTIONS, 2, Effect.DISCONNECT, seconds=0.1),
        Fault(FaultKind.INPUT, 1, Effect.STALL),
        Fault(FaultKind.INPUT, 1, Effect.ERROR),
        Fault(FaultKind.INPUT, 1, Effect.DISCONNECT, seconds=0.1),
        Fault(FaultKind.IN, 1, Effect.STALL),
        Fault(FaultKind.EVENT, 2, Effect.DROP),
        Fault(FaultKind.INPUT, 1, Effect.FATAL, size=1 << 3),
    ],
    ids=lambda fault: f"{fault.kind.value} {fault.effect.value}",
)
@pytest.mark.parametrize("idempotent", [True, False])
def test_faults_between(bed: Bed, fault: Any, idempotent: bool) -> None:
    """A repetition sends everything; what must not be repeated fails once, and the stick works afterwards."""
    stick = bed.start(fault)
    stick.ensure_cached(CACHING)
    program, right = driver.prepare(PROGRAM, idempotent=idempotent), expected(PROGRAM, WEIGHTS)
    failed = 0
    for _ in range(4):
        try:
            call = stick.announce(program)
            bed.sleep(0.1)
            assert call.give(inputs_of(PROGRAM)).result() == right
        except driver.TransferFailed:
            failed += 1
            stick.ensure_cached(CACHING)
    assert failed == (not idempotent)
    assert stick.counters.recoveries == 1
    assert stick.counters.retries == idempotent
    assert bed.stick.faults.unfired == []


def test_another_call_comes_first(bed: Bed) -> None:
    stick = bed.start()
    stick.ensure_cached(CACHING)
    for between in (
        lambda: check(stick, PROGRAM, WEIGHTS),
        lambda: stick.announce(SMALL).give({"in0": bytes(64)}).result(),
        lambda: (stick.forget(), stick.ensure_cached(CACHING)),
    ):
        call = stick.announce(PROGRAM)
        between()
        assert call.waiting
        with pytest.raises(driver.GivenUp, match="another one was started before its inputs came"):
            call.give(inputs_of(PROGRAM))
        with pytest.raises(driver.GivenUp):
            call.result()
    check(stick, PROGRAM, WEIGHTS)
    assert stick.counters.recoveries == 0


def test_a_stick_that_fails_while_a_program_is_given_up(bed: Bed) -> None:
    stick = bed.start(Fault(FaultKind.IN, 0, Effect.STALL))
    stick.ensure_cached(CACHING)
    call = stick.announce(PROGRAM)
    check(stick, PROGRAM, WEIGHTS)
    with pytest.raises(driver.GivenUp):
        call.give(inputs_of(PROGRAM))
    assert stick.counters.recoveries == 1
    assert stick.counters.retries == 0


def test_misuse(bed: Bed) -> None:
    stick = bed.start()
    stick.ensure_cached(CACHING)
    call = stick.announce(PROGRAM)
    with pytest.raises(driver.DriverError, match="still waits for its inputs"):
        call.result()
    with pytest.raises(driver.InputError, match="inputs"):
        call.give({})
    assert call.give(inputs_of(PROGRAM)).result() == expected(PROGRAM, WEIGHTS)
    with pytest.raises(driver.DriverError, match="has its inputs"):
        call.give(inputs_of(PROGRAM))
    waiting = stick.announce(PROGRAM)
    stick.close()
    with pytest.raises(driver.DriverError, match="or the stick was closed"):
        waiting.give(inputs_of(PROGRAM))
    with pytest.raises(driver.DriverError, match="was closed"):
        stick.announce(PROGRAM)
