"""``coral bench call``: what a call costs on the host, with a chip that answers at once. See docs/bench.md."""

from __future__ import annotations

import cProfile
import json
import pstats
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from coral import CoralError
from coral.chip.chip import ChipState
from coral.codegen.fc import FcQuant, fully_connected_per_channel
from coral.driver import open_stick, prepare
from coral.package.program import DmaHint, Program
from coral.stick import SoftwareStick, StickBus, WallClock, stand_in_firmware

WARM_UP, PROFILED = 100, 20
N = 256


class NullChip:
    """Stands in for a chip: asks for what a program's hints say, and answers zeros as soon as it has that."""

    def __init__(self, program: Program) -> None:
        dmas = [hint for hint in program.hints if isinstance(hint, DmaHint)]
        self._asked = [(1, hint.size) for hint in dmas if not hint.out]
        self._answers = [bytes(hint.size) for hint in dmas if hint.out]
        self.outputs: deque[bytes] = deque()
        self.interrupts: deque[int] = deque()
        self.reset()

    def reset(self) -> None:
        """No program."""
        self.descriptors: list[tuple[int, int]] = []
        self.missing: tuple[int, int] | None = None
        self._left = -1

    def feed(self, tag: int, data: bytes) -> None:
        """Instructions start the program, everything else is swallowed."""
        if tag == 0:
            self.descriptors, self._left = list(self._asked), len(self._asked)
        else:
            self._left -= 1

    def run(self) -> ChipState:
        """Answers once nothing is missing."""
        self.missing = self._asked[-self._left] if self._left > 0 else None
        if self._left:
            return ChipState.NEEDS_HOST if self.missing else ChipState.IDLE
        self._left = -1
        self.descriptors += [(3, len(answer)) for answer in self._answers]
        self.outputs.extend(self._answers)
        self.interrupts.append(0)
        return ChipState.FINISHED


class Timed:
    """Passes everything on to a bus, a device or a handle, and adds up the time that a handle's methods take."""

    def __init__(self, inner: Any, spent: list[float]) -> None:
        self._inner, self._spent = inner, spent

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result: Any = value(*arguments)
            self._spent[0] += time.perf_counter() - start
            if name == "devices":
                return [Timed(device, self._spent) for device in result]
            return Timed(result, self._spent) if name == "open" else result

        setattr(self, name, timed)
        return timed


def null_stick(**options: Any) -> SoftwareStick:
    """A simulated stick with a null chip."""
    return SoftwareStick(chip=NullChip(program()), **options)


def program() -> Program:
    """The execution program of a layer of 256 x 256: 4 KiB of instructions, 256 bytes in and out."""
    return fully_connected_per_channel(N, N, FcQuant(0, 0, 0, 1.0, 0.0, 255.0)).execution


@contextmanager
def _opened(bus: Any) -> Iterator[Callable[[], object]]:
    """A stick on a bus, as a function that makes one call."""
    prepared, inputs = prepare(program()), {"x": bytes(N)}
    with open_stick(bus, firmware=stand_in_firmware(), check_firmware_hash=False) as stick:
        for _ in range(WARM_UP):
            stick.run(prepared, inputs)
        yield lambda: stick.run(prepared, inputs)


def measure(bus: Any, calls: int) -> dict[str, float]:
    """Median microseconds per call; ours and the transport's from a second pass with every transport call timed."""
    spent, medians = [0.0], []
    for watched in (bus, Timed(bus, spent)):
        ours, transport = [], []
        with _opened(watched) as call:
            for _ in range(calls):
                spent[0], start = 0.0, time.perf_counter()
                call()
                ours.append(time.perf_counter() - start - spent[0])
                transport.append(spent[0])
        medians += [median(ours), median(transport)]
    return {n: round(medians[k] * 1e6, 1) for n, k in (("median_us", 0), ("ours_us", 2), ("transport_us", 3))}


def behind_libusb(calls: int) -> dict[str, Any]:
    """The same over the real libusb in another process; the reason where that cannot be."""
    from coral.apps.stick_serve import served

    command = [sys.executable, "-m", "coral", "bench", "call", "--over-libusb", "--calls", str(calls)]
    try:
        with served([null_stick(firmware_required=False, clock=WallClock())]) as environment:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except CoralError as error:
        return {"skipped": str(error)}
    return json.loads(done.stdout) if done.returncode == 0 else {"skipped": done.stderr.strip()}


def call(calls: int, as_json: bool, profiled: bool, over_libusb: bool) -> None:
    """Measures and prints. ``over_libusb``: only that, on the bus that this process sees, as JSON."""
    if over_libusb:
        from coral.driver.libusb import LibusbBus

        print(json.dumps(measure(LibusbBus(), calls)))
        return
    transports = {"in-process": measure(StickBus([null_stick()]), calls), "libusb/umockdev": behind_libusb(calls)}
    if as_json:
        print(json.dumps({"program": program().name, "calls": calls, "transports": transports}, indent=1))
        return
    print(f"{program().name}, {calls} calls, a chip that answers at once; median microseconds per call")
    for name, found in transports.items():
        text = "{median_us} ({ours_us} ours, {transport_us} the transport)" if "ours_us" in found else "{skipped}"
        print(f"{name}: {text.format(**found)}")
    if profiled:
        profiler = cProfile.Profile()
        with _opened(StickBus([null_stick()])) as one, profiler:
            for _ in range(calls):
                one()
        pstats.Stats(profiler).sort_stats("tottime").print_stats("coral/driver", PROFILED)
