"""Random histories of opening, caching, running, faults and closing: never wrong bytes, never late, nothing left.

Virtual clock, both ends in this process. CORAL_STATE_STEPS sets the number of steps (a nightly run: 1000000).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from stick.fake_chip import FakeChip, caching_program, execution_program

from coral import driver
from coral.stick import Effect, Fault, FaultPlan, Kind, SoftwareStick, stand_in_firmware
from driver.bed import CANARY, RECOVERY_S, RecordingBus
from driver.bench import expected, inputs_of

STEPS = int(os.environ.get("CORAL_STATE_STEPS", "20000"))
STEPS_PER_HISTORY = 50
STALL_S = 2.0
UPLOAD_S = 0.5
"""Virtual time of everything that is not waiting."""

CACHING = [caching_program(bytes([number]) * 600, token=7 + number) for number in range(3)]
PROGRAMS = [
    driver.prepare(execution_program("A64 O64 !", token=7)),
    driver.prepare(execution_program("A640 P64 O3000 O1024 P64 O16 !", parameters=bytes(128), token=7)),
    driver.prepare(execution_program("A8 O2048 !", token=8), idempotent=False),
    driver.prepare(execution_program("A64 O500 O100 !", steps="A64 O250 O250 O100 !", token=8)),
]
PIECES = 3
"""Of this program the fake chip's outputs are not the hints'; only its size is known here."""

DATA_KINDS = (Kind.OUT, Kind.INSTRUCTIONS, Kind.INPUT, Kind.PARAMETERS)
PACKET_KINDS = (Kind.IN, Kind.EVENT)
CONTROL_KINDS = (Kind.CONTROL, Kind.READ, Kind.WRITE, Kind.DOWNLOAD, Kind.STATUS, Kind.UPLOAD)
# What alters data without leaving a trace (CORRUPT and GARBAGE of outputs) cannot be found by any driver.
EFFECTS: dict[tuple[Kind, ...], tuple[Effect, ...]] = {
    DATA_KINDS: (
        Effect.TIMEOUT, Effect.STALL, Effect.ERROR, Effect.SHORT, Effect.DELAY, Effect.FATAL, Effect.DISCONNECT,
        Effect.SUSPEND, Effect.WEDGE,
    ),
    PACKET_KINDS: (
        Effect.TIMEOUT, Effect.STALL, Effect.ERROR, Effect.BABBLE, Effect.EXTRA, Effect.DROP, Effect.REPEAT,
        Effect.DELAY, Effect.STALE, Effect.FATAL, Effect.DISCONNECT, Effect.SUSPEND, Effect.WEDGE,
    ),
    CONTROL_KINDS: (
        Effect.TIMEOUT, Effect.STALL, Effect.ERROR, Effect.SHORT, Effect.BABBLE, Effect.DELAY, Effect.DISCONNECT,
        Effect.SUSPEND, Effect.WEDGE,
    ),
    (Kind.RESET,): (Effect.TIMEOUT, Effect.DISCONNECT),
    (Kind.CLAIM,): (Effect.STALL, Effect.DISCONNECT),
}  # fmt: skip


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    kinds = draw(st.sampled_from(list(EFFECTS)))
    effect = draw(st.sampled_from(EFFECTS[kinds]))
    return Fault(
        draw(st.sampled_from(kinds)),
        draw(st.integers(0, 12)),
        effect,
        times=draw(st.sampled_from([1, 1, 1, 2, 5, 1000])),
        size=draw(st.sampled_from([0, 1, 4, 8, 12, 100, 5000])),
        data=b"\xa5" * draw(st.integers(1, 40)),
        seconds=draw(st.sampled_from([0.01, 0.3, 1.5, 4.0, None] if effect is Effect.DISCONNECT else [0.01, 0.3, 1.5])),
        running=draw(st.booleans()),
    )


class Histories(RuleBasedStateMachine):
    @initialize(speed=st.sampled_from(["super", "high"]), zero=st.booleans(), firmware=st.booleans())
    def plug_in(self, speed: str, zero: bool, firmware: bool) -> None:
        self.threads = threading.active_count()
        self.directory = Path(tempfile.mkdtemp(prefix="coralstates"))
        self.simulated = SoftwareStick(
            chip=FakeChip(), speed=speed, zero_length_packets=zero, firmware_required=firmware, reenumeration_s=0.2
        )
        self.bus = RecordingBus([self.simulated])
        self.stick: driver.Stick | None = None
        self.cached: int | None = None
        self.call: tuple[driver.Call, int, bytes] | None = None

    def timed(self, action: Any, calls: int = 1, opening: bool = False) -> Any:
        """Result of an action; None when it fails with a typed error. Never late."""
        started = self.simulated.clock.now()
        try:
            return action()
        except driver.DriverError:  # anything else means that the driver broke a rule of the stick
            self.cached = None
            return None
        finally:
            took = self.simulated.clock.now() - started
            limit = 40.0 if opening or took > calls * (STALL_S + RECOVERY_S) else calls * (STALL_S + RECOVERY_S)
            if self.simulated.faults.seen[Kind.DOWNLOAD] == 0:  # loading firmware has its own, longer deadlines
                limit = 16.0 if opening else calls * (STALL_S + RECOVERY_S + UPLOAD_S)
            assert took <= limit

    @precondition(lambda self: self.stick is None)
    @rule(reset=st.booleans())
    def open(self, reset: bool) -> None:
        self.stick = self.timed(
            lambda: driver.open_stick(
                self.bus,
                firmware=stand_in_firmware(),
                check_firmware_hash=False,
                lock_dir=self.directory,
                canary=CANARY,
                port_reset=reset,
            ),
            opening=True,
        )
        self.cached = None

    @precondition(lambda self: self.stick is not None)
    @rule(which=st.integers(0, len(CACHING) - 1))
    def cache(self, which: int) -> None:
        self.take()
        assert self.stick is not None
        if self.timed(lambda: self.stick.ensure_cached(CACHING[which])) is not None:
            self.cached = which

    @precondition(lambda self: self.stick is not None and self.cached is not None)
    @rule(which=st.integers(0, len(PROGRAMS) - 1), overlap=st.booleans())
    def run(self, which: int, overlap: bool) -> None:
        assert self.stick is not None
        assert self.cached is not None
        if PROGRAMS[which].program.token != CACHING[self.cached].token:
            return
        previous, self.call = self.call, None
        call = self.timed(lambda: self.stick.start(PROGRAMS[which], inputs_of(PROGRAMS[which].program)), calls=2)
        resident = CACHING[self.cached].parameters if self.cached is not None else b""
        if previous is not None:
            self.check(previous)
        if call is not None:
            self.call = (call, which, resident)
            if not overlap:
                self.take()

    @precondition(lambda self: self.stick is not None and self.cached is not None)
    @rule(which=st.integers(0, len(PROGRAMS) - 1), give=st.booleans(), overlap=st.booleans())
    def announce(self, which: int, give: bool, overlap: bool) -> None:
        """Instructions first, then the inputs; or never, so that whatever comes next gives the program up."""
        assert self.stick is not None
        assert self.cached is not None
        program = PROGRAMS[which].program
        if program.token != CACHING[self.cached].token or PROGRAMS[which].places:
            return
        previous, self.call = self.call, None
        call = self.timed(lambda: self.stick.announce(PROGRAMS[which]), calls=2)
        resident = CACHING[self.cached].parameters if self.cached is not None else b""
        if previous is not None:
            self.check(previous)
        if call is None:
            return
        if not give:
            with pytest.raises(driver.DriverError):
                call.result()
        elif self.timed(lambda: call.give(inputs_of(program))) is not None:
            self.call = (call, which, resident)
            if not overlap:
                self.take()

    def take(self) -> None:
        """Looks at the call that is under way."""
        if self.call is not None:
            call, self.call = self.call, None
            self.check(call)

    def check(self, entry: tuple[driver.Call, int, bytes]) -> None:
        call, which, resident = entry
        outputs = self.timed(call.result)
        if outputs is None:
            return
        if which == PIECES:
            assert {name: len(data) for name, data in outputs.items()} == {"out0": 500, "out1": 100}
        else:
            assert outputs == expected(PROGRAMS[which].program, resident), "wrong bytes"

    @rule(plan=st.lists(faults(), min_size=1, max_size=2))
    def go_wrong(self, plan: list[Fault]) -> None:
        self.simulated.faults = FaultPlan(*plan)

    @rule()
    def heal(self) -> None:
        self.simulated.faults = FaultPlan()
        if self.simulated.wedged or not self.simulated.present:
            self.simulated.plug()

    @rule(seconds=st.sampled_from([0.01, 1.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.simulated.clock.sleep(seconds)

    @precondition(lambda self: self.stick is not None)
    @rule()
    def close(self) -> None:
        assert self.stick is not None
        started = self.simulated.clock.now()
        self.stick.close()
        assert self.simulated.clock.now() - started < 5
        self.stick = self.call = None

    @invariant()
    def nothing_is_left(self) -> None:
        if not hasattr(self, "simulated"):
            return
        assert threading.active_count() == self.threads
        if self.stick is None:
            assert self.bus._owners == {}
            assert not any(queue for handle in self.bus.handles for queue in handle.pending.values())
            driver.StickLock("1-1", self.directory).release()
        self.bus.handles = self.bus.handles[-2:]

    def teardown(self) -> None:
        """After everything, a healed stick computes rightly."""
        if not hasattr(self, "simulated"):
            return
        self.heal()
        self.simulated.clock.sleep(5.0)
        if self.stick is None:
            self.open(reset=False)
        assert self.stick is not None
        self.call = None
        for _ in range(2):  # a call that failed before may be reported once more
            if self.timed(lambda: self.stick.ensure_cached(CACHING[0])) is not None:
                break
        assert self.stick.run(PROGRAMS[0], inputs_of(PROGRAMS[0].program)) == expected(
            PROGRAMS[0].program, CACHING[0].parameters
        )
        self.stick.close()
        shutil.rmtree(self.directory)


@pytest.mark.parametrize("steps", [2000, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_random_histories(steps: int) -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=max(1, steps // STEPS_PER_HISTORY),
            stateful_step_count=STEPS_PER_HISTORY,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, *([Phase.shrink] if "CORAL_STATE_SHRINK" in os.environ else [])],
        ),
    )
