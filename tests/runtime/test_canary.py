"""The canary is right on the simulated chip, and wrong answers are noticed."""

from __future__ import annotations

import pytest

from coral import driver
from coral.runtime.canary import N, canary
from coral.stick import Effect, Fault, FaultPlan, Kind, SoftwareStick, StickBus, stand_in_firmware


def opened(*faults: Fault) -> driver.Stick:
    bus = StickBus([SoftwareStick(fault_plan=FaultPlan(*faults))])
    return driver.open_stick(bus, firmware=stand_in_firmware(), check_firmware_hash=False, canary=canary())


def test_every_input_and_bias_counts() -> None:
    (given,), (answer,) = canary().inputs.values(), canary().outputs.values()
    assert len(given) == len(answer) == len(set(given)) == N
    assert sorted(given) != sorted(answer)


@pytest.mark.parametrize("again", [0, 1])
def test_recovery_with_the_canary(again: int) -> None:
    """Before the faulty call nothing is run; packets 0 of 0x81 is the canary's first output."""
    lie = Fault(Kind.IN, 0, Effect.CORRUPT, size=63, data=b"\1", times=again)
    with opened(Fault(Kind.INPUT, 0, Effect.STALL), lie) as stick:
        program, caching = canary().program, canary().caching
        assert caching is not None
        stick.ensure_cached(caching)
        assert stick.run(program, canary().inputs) == canary().outputs
        assert (stick.counters.retries, stick.counters.recoveries) == (1, 1)
        assert stick.counters.faults["canary"] == again
