"""Fault plans: a typed error within the deadline, nothing left behind, and the next good call is right."""

from __future__ import annotations

from typing import Any

import pytest
from stick.fake_chip import caching_program, execution_program

from coral import driver
from coral.stick import Effect, Fault, FaultPlan, Kind, ProtocolError, StickBus, Strictness
from driver.bench import check, make_bus, open_on

PROGRAM = execution_program("A640 P64 O3000 O1024 P64 O16 !", parameters=bytes(128))
PARAMETERS = b"w" * 4096
DEADLINE_S = 2.0 + 5.0
"""Device time and recovery that the project promises."""


def start(plan: FaultPlan, **options: Any) -> tuple[driver.Stick, StickBus]:
    bus = make_bus(fault_plan=plan, **options)
    stick = open_on(bus)
    return stick, bus


CASES = (
    [
        (Kind.OUT, ordinal, effect, error)
        for ordinal in (0, 1, 2, 4)  # caching instructions, parameters, execution instructions, streamed parameters
        for effect, error in (
            (Effect.TIMEOUT, driver.TransferFailed),
            (Effect.STALL, driver.TransferFailed),
            (Effect.SHORT, (driver.TransferFailed, ProtocolError)),
            (Effect.DISCONNECT, driver.StickGone),
        )
    ]
    + [
        (kind, ordinal, effect, error)
        for kind, ordinal in ((Kind.IN, 0), (Kind.IN, 2), (Kind.IN, 4), (Kind.EVENT, 0), (Kind.EVENT, 1))
        for effect, error in (
            (Effect.TIMEOUT, driver.TransferFailed),
            (Effect.STALL, driver.TransferFailed),
            (Effect.DISCONNECT, driver.StickGone),
        )
    ]
    + [(Kind.EVENT, 1, Effect.SHORT, driver.TransferFailed), (Kind.IN, 4, Effect.SHORT, driver.TransferFailed)]
)


@pytest.mark.parametrize(("kind", "ordinal", "effect", "error"), CASES)
@pytest.mark.parametrize("speed", ["super", "high"])
def test_fault_in_the_data_pipes(kind: Kind, ordinal: int, effect: Effect, error: Any, speed: str) -> None:
    plan = FaultPlan(Fault(kind, ordinal, effect, keep_bytes=12, back_after_s=1.0))
    stick, bus = start(plan, speed=speed)
    caching = caching_program(PARAMETERS)
    started = bus.sticks[0].clock.now()
    with pytest.raises(error) as caught:  # noqa: PT012 - the fault may hit either call
        stick.ensure_cached(caching)
        check(stick, PROGRAM, PARAMETERS)
    assert type(caught.value) in (error if isinstance(error, tuple) else (error,))
    assert not plan.unfired
    assert bus.sticks[0].clock.now() - started <= 2.5
    assert all(transfer.status != "pending" for transfer in stick._pipes._in_flight)
    bus.sticks[0].clock.sleep(1.0)
    assert stick.ensure_cached(caching)
    check(stick, PROGRAM, PARAMETERS)
    assert bus.sticks[0].clock.now() - started <= DEADLINE_S
    assert stick.counters.recoveries == 1
    stick.close()


def test_message_says_what_was_under_way_and_what_the_chip_says() -> None:
    stick, _ = start(FaultPlan(Fault(Kind.OUT, 1, Effect.TIMEOUT)))
    message = (
        r"nothing happened for 2 s while waiting for taking input in0 \(640 bytes\), output \(0 of 4024 bytes came\)"
        r" \(registers: hib_error_status 0x0, .*currentPc 0x0, .*\); the stick is re-opened before the next call"
    )
    with pytest.raises(driver.TransferFailed, match=message):
        check(stick, PROGRAM)
    assert stick.counters.faults == {"timeout": 1, "TransferFailed": 1}


def test_stick_that_is_not_back_yet_and_then_is() -> None:
    stick, bus = start(FaultPlan(Fault(Kind.OUT, 1, Effect.DISCONNECT)))
    with pytest.raises(driver.StickGone, match="plug it in again"):
        check(stick, PROGRAM)
    for _ in range(2):
        with pytest.raises(driver.NoStick):
            check(stick, PROGRAM)
    bus.sticks[0].plug()
    check(stick, PROGRAM)


def test_control_requests_that_stall_twice_are_repeated() -> None:
    plan = FaultPlan(Fault(Kind.CONTROL, 3, Effect.STALL, times=2))
    bus = make_bus(fault_plan=plan, firmware_required=False)
    stick = open_on(bus)
    check(stick, PROGRAM)
    assert stick.counters.faults == {"control stall": 2}


@pytest.mark.parametrize(
    ("effect", "ordinal"), [(e, n) for e in (Effect.TIMEOUT, Effect.DISCONNECT) for n in (0, 20, 56)]
)
def test_faults_during_bring_up_leave_nothing_open(effect: Effect, ordinal: int) -> None:
    plan = FaultPlan(Fault(Kind.CONTROL, ordinal, effect, back_after_s=0.5))
    bus = make_bus(fault_plan=plan, firmware_required=False)
    with pytest.raises(driver.TransferFailed):
        open_on(bus)
    assert bus._owners == {}
    assert bus.sticks[0].clock.now() < 2
    bus.sticks[0].clock.sleep(0.5)
    check(open_on(bus), PROGRAM)


def test_wedged_stick_needs_a_replug_and_is_never_reset() -> None:
    bus = make_bus(mode=Strictness.WEDGE)
    stick = open_on(bus)
    prepared = driver.prepare(PROGRAM)
    first, second = prepared.segments
    first.outs += second.outs
    second.outs.clear()
    started = bus.sticks[0].clock.now()
    with pytest.raises(driver.StickHung, match="control requests are not answered any more: unplug the stick"):
        stick.run(prepared, {"in0": bytes(640)})
    assert bus.sticks[0].clock.now() - started < 5
    with pytest.raises(driver.StickHung, match="does not answer"):
        check(stick, PROGRAM)
    assert bus.sticks[0].present, "a port reset would have made it vanish"
    with pytest.raises(driver.StickHung):
        open_on(bus)
    bus.sticks[0].plug()
    check(stick, PROGRAM)


def test_fatal_error_word_with_a_cause_ends_the_run() -> None:
    stick, bus = start(FaultPlan())
    bus.sticks[0].registers["hib_error_status"] = 1 << 3
    bus.sticks[0].interrupt(1)
    with pytest.raises(driver.ChipFault, match="hib_error_status 0x8"):
        check(stick, PROGRAM)
    check(stick, PROGRAM)


def test_words_without_a_cause_are_cleared_and_counted() -> None:
    stick, bus = start(FaultPlan())
    bus.sticks[0].registers["fatal_err_int_status"] = 1
    bus.sticks[0].registers["top_level_int_3_status"] = 1
    bus.sticks[0].interrupt(1 | 1 << 4)
    check(stick, PROGRAM)
    assert stick.counters.faults == {"top-level interrupt 3": 1}
    assert bus.sticks[0].registers["fatal_err_int_status"] == bus.sticks[0].registers["top_level_int_3_status"] == 0


@pytest.mark.parametrize("packet", [bytes(12), bytes(12) + b"\5\0\0\0"])
def test_malformed_events(packet: bytes) -> None:
    stick, bus = start(FaultPlan())
    bus.sticks[0]._packets[0x82].append(packet)
    with pytest.raises(driver.TransferFailed, match="16 bytes with tag 4 were expected"):
        check(stick, PROGRAM)
    check(stick, PROGRAM)


def test_more_output_than_the_program_has() -> None:
    program = execution_program("A8 O64 !", steps="A8 O64 O64 !")
    stick, _ = start(FaultPlan())
    stick.run(program, {"in0": bytes(8)})
    with pytest.raises(driver.TransferFailed, match="came before the program was sent"):
        check(stick, PROGRAM)
    check(stick, PROGRAM)


def test_endless_program_ends_at_the_deadline() -> None:
    stick, bus = start(FaultPlan())
    started = bus.sticks[0].clock.now()
    with pytest.raises(driver.TransferFailed, match="event of interrupt 0"):
        stick.run(execution_program("O8 !", steps="O8"))
    assert bus.sticks[0].clock.now() - started == pytest.approx(2.0)


def test_stick_logs_what_its_program_waits_for() -> None:
    stick, bus = start(FaultPlan())
    with pytest.raises(driver.TransferFailed, match="event of interrupt 0"):
        stick.run(execution_program("!", steps="P64 !"))
    assert "2 s pass: the program waits for 64 bytes of parameters" in bus.sticks[0].log


def test_a_faulty_stick_does_not_slow_its_neighbour() -> None:
    bus = make_bus(2)
    faulty, healthy = open_on(bus, index=0), open_on(bus, index=1)
    bus.sticks[0].faults = FaultPlan(Fault(Kind.OUT, 0, Effect.TIMEOUT))
    with pytest.raises(driver.TransferFailed):
        check(faulty, PROGRAM)
    check(healthy, PROGRAM)
    assert bus.sticks[1].clock.now() < 0.1


def test_interrupted_by_the_user() -> None:
    stick, bus = start(FaultPlan())
    original = bus.sticks[0].work

    def interrupted() -> None:
        bus.sticks[0].work = original  # pyright: ignore[reportAttributeAccessIssue]
        raise KeyboardInterrupt

    bus.sticks[0].work = interrupted  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(KeyboardInterrupt):
        check(stick, PROGRAM)
    check(stick, PROGRAM)
    assert stick.counters.recoveries == 1
