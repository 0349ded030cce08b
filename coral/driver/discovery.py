"""Finding sticks on a bus and opening them. Source: docs/usb.md, docs/driver.md."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from coral.driver.errors import APPLICATION_ID, DFU_ID, DriverError, NoStick, PermissionDenied, StickBusy, StickGone
from coral.driver.transport import Bus, Clock, UsbDevice, UsbHandle

CLAIM_PATIENCE_S = 5.0
"""A process that has just ended may still be letting go."""
CLAIM_INTERVAL_S = 0.1
REENUMERATION_S = 10.0
REENUMERATION_INTERVAL_S = 0.05

_ADVICE = (
    "Plug a Coral USB Accelerator in (`lsusb` shows 1a6e:089a before and 18d1:9302 after its firmware is loaded), try "
    "another cable or a powered hub; in a container pass /dev/bus/usb through. Without a stick use DEV=SIM+CORAL"
)


@dataclass(frozen=True)
class FoundStick:
    """A stick that is plugged in: where, how fast, and whether its firmware runs."""

    path: str
    speed: str
    running: bool
    serial: str = ""


def identity(device: UsbDevice) -> tuple[int, int]:
    """(vendor, product)."""
    return device.vendor_id, device.product_id


def _sticks(bus: Bus) -> list[UsbDevice]:
    found = [device for device in bus.devices() if identity(device) in (DFU_ID, APPLICATION_ID)]
    return sorted(found, key=lambda device: [int(number) for number in re.findall(r"\d+", device.path)])


def list_sticks(bus: Bus) -> list[FoundStick]:
    """All sticks by bus and port; nothing is opened."""
    return [
        FoundStick(device.path, device.speed, identity(device) == APPLICATION_ID, device.serial)
        for device in _sticks(bus)
    ]


def find(bus: Bus, which: int | str) -> UsbDevice:
    """The stick of an index, counted by bus and port, at a path such as "1-2.3", or of a serial number (sticks that
    were sold have none); raises NoStick."""
    sticks = _sticks(bus)
    for index, device in enumerate(sticks):
        if which in (index, device.path) or (which and which == device.serial):
            return device
    where = ", ".join(f"{index} at {device.path}" for index, device in enumerate(sticks))
    if not sticks:
        raise NoStick(f"no Coral stick found. {_ADVICE}")
    raise NoStick(f"there is no stick {which!r}; plugged in are: {where}")


def await_stick(
    bus: Bus, path: str, clock: Clock, *, running: bool = False, seconds: float = REENUMERATION_S
) -> UsbDevice | None:
    """The stick at ``path`` once it is there, with its firmware ``running`` if asked; None if that takes too long."""
    deadline = clock.now() + seconds
    while True:
        for device in bus.devices():
            if device.path == path and identity(device) in ((APPLICATION_ID,) if running else (DFU_ID, APPLICATION_ID)):
                return device
        if clock.now() >= deadline:
            return None
        clock.sleep(REENUMERATION_INTERVAL_S)


def open_and_claim(
    device: UsbDevice, interface: int, *, fresh: bool = False, patience_s: float = CLAIM_PATIENCE_S
) -> UsbHandle:
    """Opens a device, waiting for an earlier owner to let go.

    ``fresh``: it has just been enumerated, and the system may still be setting its permissions. Raises
    PermissionDenied, StickBusy, StickGone or DriverError.
    """
    clock = device.clock
    deadline = clock.now() + patience_s
    patient = {errno.EBUSY} | ({errno.EACCES} if fresh else set())
    while True:
        try:
            return _open_once(device, interface)
        except OSError as error:
            if error.errno in patient and clock.now() < deadline:
                clock.sleep(CLAIM_INTERVAL_S)
                continue
            raise _explain(device.path, error, patience_s) from error


def _open_once(device: UsbDevice, interface: int) -> UsbHandle:
    handle = device.open()
    try:
        handle.claim(interface)
    except BaseException:
        handle.close()
        raise
    return handle


def _explain(path: str, error: OSError, patience_s: float) -> DriverError:
    if error.errno == errno.EACCES:
        return PermissionDenied(path, error.strerror)
    if error.errno == errno.EBUSY:
        return StickBusy(
            f"the stick at {path} is claimed by a program that does not use this driver's lock (libedgetpu? a virtual "
            f"machine?); it was not released within {patience_s:g} s"
        )
    if error.errno == errno.ENODEV:
        return StickGone(f"the stick at {path} left the bus while it was being opened; plug it in again")
    return DriverError(f"the stick at {path} cannot be opened: {error.strerror}")
