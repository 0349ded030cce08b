"""The host side of USB: real sticks through libusb, simulated ones through ``coral.stick``. See docs/driver.md."""

from coral.driver.bringup import CLOCK_HZ, CLOCKS, clock_name
from coral.driver.discovery import FoundStick, find, list_sticks
from coral.driver.errors import (
    UDEV_FILE,
    UDEV_RULE,
    BadFirmware,
    BringUpFailed,
    ChipFault,
    DfuFailed,
    DriverError,
    GivenUp,
    InputError,
    LibusbMissing,
    NoAnswer,
    NoFirmware,
    NoStick,
    PermissionDenied,
    StickBusy,
    StickGone,
    StickHung,
    TransferFailed,
)
from coral.driver.link import Counters
from coral.driver.lock import StickLock
from coral.driver.segments import Prepared, prepare
from coral.driver.session import Canary
from coral.driver.stick import Call, Stick, open_stick
from coral.driver.transport import Buffer, Bus, Clock, Transfer, UsbDevice, UsbHandle

# fmt: off
__all__ = [
    "CLOCKS", "CLOCK_HZ", "UDEV_FILE", "UDEV_RULE", "BadFirmware", "BringUpFailed", "Buffer", "Bus", "Call", "Canary",
    "ChipFault", "Clock", "Counters", "DfuFailed", "DriverError", "FoundStick", "GivenUp", "InputError",
    "LibusbMissing", "NoAnswer", "NoFirmware", "NoStick", "PermissionDenied", "Prepared", "Stick", "StickBusy",
    "StickGone", "StickHung", "StickLock", "Transfer", "TransferFailed", "UsbDevice", "UsbHandle", "clock_name", "find",
    "list_sticks", "open_stick", "prepare",
]
