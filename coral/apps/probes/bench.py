"""What a step works with: a stick that can be opened again, its registers, and the time. See docs/selftest.md."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from statistics import median
from typing import Literal

from coral import devices, timing
from coral.driver import Buffer, Counters, DriverError, Prepared, Stick, find, list_sticks, prepare
from coral.driver.link import Link
from coral.driver.registers import OFFSETS
from coral.package.program import Program

CHIP_REGISTERS = 0x40000
REGISTERS = OFFSETS | {
    "topology": 0x44000, "scMemoryCapacity": 0x44008, "tileMemoryCapacity": 0x44010, "efuse_00": 0x1A200,
    "Error_Tile": 0x40370, "hib_first_error_timestamp": 0x48708, "Error_ScalarCore_info": 0x44280,
}  # fmt: skip
TIMES = 100


class Bench:
    """One stick, simulated (``kind`` "sim") or real ("usb"), opened on first use."""

    def __init__(self, kind: Literal["usb", "sim"], index: int = 0) -> None:
        self.kind: Literal["usb", "sim"] = kind
        self.index, self.real = index, kind == "usb"
        self.clock: str | None = None
        self.bus = devices.bus_of(kind, index)
        self.path = find(self.bus, devices.which(kind, index)).path
        self.found = next(stick for stick in list_sticks(self.bus) if stick.path == self.path)
        self.boot_descriptors = {} if self.found.running else self.descriptors()
        self.counters: list[Counters] = []
        self._stick: Stick | None = None

    @property
    def stick(self) -> Stick:
        """The driver's stick; DriverErrors of opening."""
        if self._stick is None:
            self._stick = devices.open_stick(self.kind, self.index, clock=self.clock)
            self.counters.append(self._stick.counters)
        return self._stick

    @property
    def faults(self) -> Counter[str]:
        """What the driver counted, over all openings."""
        return sum((counters.faults for counters in self.counters), Counter())

    def close(self) -> None:
        """Gives the stick back; the next use opens it, and the chip has lost its memories."""
        if self._stick is not None:
            self._stick.close()
            self._stick = None

    def run(self, program: Program | Prepared, inputs: Mapping[str, Buffer] | None = None) -> bytes:
        """One call; the bytes of the output ``y`` (empty without one)."""
        return self.stick.run(program, inputs).get("y", b"")

    def microseconds(self, program: Program, inputs: Mapping[str, Buffer]) -> dict[str, float]:
        """Median per call, and prediction. The simulated stick, whose time means nothing, is asked once."""
        prepared, seconds = prepare(program), []
        for _ in range(TIMES if self.real else 1):
            start = time.perf_counter()
            self.run(prepared, inputs)
            seconds.append(time.perf_counter() - start)
        predicted = timing.predicted_seconds(program, self.stick.clock_hz)
        return {"measured": round(median(seconds) * 1e6, 1), "predicted": round(predicted * 1e6, 1)}

    # beside the driver: control requests on a handle of their own, which claims nothing

    def descriptors(self) -> dict[str, str]:
        """Device and configuration descriptor of the present personality, in hexadecimal."""
        asked = {"device": (0x0100, 18), "configuration": (0x0200, 521)}
        with self._beside() as link:
            return {name: link.control_in(0x80, 6, value, 0, size).hex() for name, (value, size) in asked.items()}

    def registers(self) -> dict[str, int]:
        """Values of ``REGISTERS``, up to the first that is not answered."""
        values: dict[str, int] = {}
        with suppress(DriverError, OSError), self._beside() as link:
            for name, offset in REGISTERS.items():
                size, request = (8, 0) if offset >= CHIP_REGISTERS else (4, 1)
                data = link.control_in(0xC0, request, offset & 0xFFFF, offset >> 16, size, timeout_s=0.5)
                values[name] = int.from_bytes(data, "little")
        return values

    @contextmanager
    def _beside(self) -> Iterator[Link]:
        """The control pipe, on its own handle."""
        device = find(self.bus, self.path)
        handle = device.open()
        try:
            yield Link(handle, device.clock, Counters())
        finally:
            handle.close()
