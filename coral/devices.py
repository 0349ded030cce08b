"""The one place that wires a stick, its driver and the runtime together. Source: docs/runtime.md, section Devices."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from coral import CoralError
from coral.driver import FoundStick, NoStick, Stick, clock_name, find, firmware, list_sticks
from coral.driver import open_stick as open_stick_on
from coral.runtime import Runtime
from coral.runtime.canary import canary

if TYPE_CHECKING:
    from coral.driver import Bus
    from coral.stick import SoftwareStick, StickBus

MAX_SIMULATED = 16

_lock = threading.RLock()
_runtimes: dict[tuple[str, int], tuple[Runtime, Stick]] = {}


class DeviceError(CoralError):
    """A device that does not exist or is in use in another way; the message says which are possible."""


def open_runtime(kind: Literal["usb", "sim"], index: int = 0, *, clock: str | None = None) -> Runtime:
    """The runtime of stick ``index``: on USB by bus and port (or CORAL_STICKS, see ``which``), or simulated in this
    process. One per stick and process, opened on first use and closed at exit.

    ``clock`` is max, std, medium or low (default: CORAL_CLOCK, else std). DeviceError for another kind, index or clock
    than possible; DriverErrors of opening (NoStick, StickBusy, NoFirmware, ...) pass through.
    """
    wanted = clock_name(clock)
    with _lock:
        runtime, stick = _runtimes.get((kind, index), (None, None))
        if runtime is None or stick is None or runtime.closed:
            stick = open_stick(kind, index, clock=wanted)
            runtime = Runtime(stick)
            _runtimes[kind, index] = runtime, stick
        elif clock is not None and stick.clock != wanted:
            raise DeviceError(
                f"stick {index} ({kind}) is open at clock {stick.clock!r}; close it before opening it at {wanted!r}"
            )
        return runtime


def shared_stick(kind: Literal["usb", "sim"], index: int = 0, *, clock: str | None = None) -> Stick:
    """The stick under ``open_runtime``, for other programs beside the runtime's; errors as there."""
    with _lock:
        open_runtime(kind, index, clock=clock)
        return _runtimes[kind, index][1]


@functools.cache
def _simulated_bus() -> StickBus:
    from coral.stick import StickBus

    return StickBus([])


def simulated_stick(index: int = 0) -> SoftwareStick:
    """Simulated stick ``index`` of this process, made on first use; DeviceError for an index outside 0..15. With
    ``CORAL_BOLD=1`` its chip does what no program of Google's shows (docs/transformer.md, Forms)."""
    from coral.chip import Chip
    from coral.stick import SoftwareStick

    if not 0 <= index < MAX_SIMULATED:
        raise DeviceError(f"simulated stick {index}: a process has 0..{MAX_SIMULATED - 1}")
    with _lock:
        sticks = _simulated_bus().sticks
        while len(sticks) <= index:
            sticks.append(SoftwareStick(chip=Chip(bold=os.environ.get("CORAL_BOLD") == "1")))
        return sticks[index]


def bus_of(kind: Literal["usb", "sim"], index: int = 0) -> Bus:
    """Where stick ``index`` of a kind is searched; DeviceError for another kind or index, LibusbMissing."""
    if kind == "sim":
        simulated_stick(index)
        return _simulated_bus()
    if kind != "usb":
        raise DeviceError(f"there is no kind of device {kind!r}, only 'usb' and 'sim'")
    from coral.driver.libusb import LibusbBus

    return LibusbBus()


def which(kind: Literal["usb", "sim"], index: int) -> int | str:
    """What ``driver.find`` has to look for: ``index`` itself, or the name at that place of CORAL_STICKS, which has
    paths such as "1-2.3" or serial numbers of sticks on USB, separated by commas. DeviceError beyond its end."""
    named = os.environ.get("CORAL_STICKS", "") if kind == "usb" else ""
    names = [name.strip() for name in named.split(",") if name.strip()]
    if names and not 0 <= index < len(names):
        raise DeviceError(f"stick {index}: CORAL_STICKS names only {len(names)} ({named})")
    return names[index] if names else index


def sticks_on_usb() -> list[FoundStick]:
    """Every stick on USB by its index here: all of them, or those that CORAL_STICKS names up to the first that is not
    plugged in. LibusbMissing, OSError."""
    bus = bus_of("usb")
    found, chosen = list_sticks(bus), []
    with suppress(NoStick, DeviceError):
        while len(chosen) < len(found):
            path = find(bus, which("usb", len(chosen))).path
            chosen += [stick for stick in found if stick.path == path]
    return chosen


def open_stick(kind: Literal["usb", "sim"], index: int = 0, *, clock: str | None = None) -> Stick:
    """A stick without a runtime, for tools; the caller closes it. Arguments and errors as ``open_runtime``."""
    bus = bus_of(kind, index)
    if kind == "usb":
        found = firmware.find()
        image = found[0] if found else None
    else:
        from coral.stick import stand_in_firmware

        image = stand_in_firmware()
    checked = kind == "usb"
    wanted = which(kind, index)
    return open_stick_on(bus, index=wanted, clock=clock, firmware=image, check_firmware_hash=checked, canary=canary())


def close_all() -> None:
    """Closes every runtime that is open; runs at exit."""
    with _lock:
        for runtime, _ in _runtimes.values():
            with suppress(CoralError):
                runtime.close()
        _runtimes.clear()


atexit.register(close_all)
