"""What can go wrong on the way to a stick; every message says what to do. Source: docs/driver.md."""

from __future__ import annotations

import sys

from coral import CoralError

DFU_ID = (0x1A6E, 0x089A)
APPLICATION_ID = (0x18D1, 0x9302)

UDEV_FILE = "/etc/udev/rules.d/60-coral.rules"
UDEV_RULE = "".join(
    f'SUBSYSTEM=="usb", ATTRS{{idVendor}}=="{vendor:04x}", ATTRS{{idProduct}}=="{product:04x}", '
    'MODE="0664", GROUP="plugdev", TAG+="uaccess"\n'
    for vendor, product in (DFU_ID, APPLICATION_ID)
)

_LIBUSB_INSTALL = {
    "linux": "sudo apt install libusb-1.0-0   (Fedora: sudo dnf install libusb1, Arch: sudo pacman -S libusb)",
    "darwin": "brew install libusb",
    "win32": "pip install --force-reinstall libusb1   (its wheel brings the DLL; bind WinUSB to both ids with Zadig)",
}


_PERMISSION = {
    "linux": f"As root write to {UDEV_FILE}:\n{UDEV_RULE}then run `udevadm control --reload && udevadm trigger`, and "
    "plug the stick in again",
    "darwin": "Close what else uses it (a virtual machine, libedgetpu), or try as root",
    "win32": "Bind WinUSB to both ids, 1a6e:089a and 18d1:9302, with Zadig",
}


class DriverError(CoralError):
    """Base of everything the driver raises on purpose."""


class GivenUp(DriverError):
    """An announced program ran without its inputs, because another call came first; start it again."""


class LibusbMissing(DriverError):
    """The USB library cannot be loaded; the message has the install line of this system."""

    def __init__(self, reason: object) -> None:
        install = _LIBUSB_INSTALL.get(sys.platform, "install libusb 1.0")
        super().__init__(f"the USB library libusb-1.0 cannot be loaded ({reason}). Install it with: {install}")


class NoStick(DriverError):
    """No stick where one was expected."""


class NoFirmware(DriverError):
    """The stick is in boot mode and there is no image to give it."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"the stick at {where} has to be given its firmware, and none is installed. Run one of: "
            "`coral firmware install --from-libedgetpu` (takes it from an installed libedgetpu), "
            "`coral firmware install --download`, `coral firmware install FILE`; or set CORAL_FIRMWARE=FILE"
        )


class BadFirmware(DriverError):
    """A file that is not the firmware image."""


class StickBusy(DriverError):
    """Another process has the stick; the message names its pid where it is known."""


class PermissionDenied(DriverError):
    """The system does not let this user open the stick."""

    def __init__(self, where: str, reason: object) -> None:
        remedy = _PERMISSION.get(sys.platform, "Ask for the right to use USB devices")
        super().__init__(f"no permission to open the stick at {where} ({reason}). {remedy}")


class BringUpFailed(DriverError):
    """A register did not become what the bring-up needs."""


class DfuFailed(DriverError):
    """The boot ROM refused the firmware, or the stick did not come back with it."""


class InputError(DriverError):
    """Inputs that do not fit the program; nothing was sent."""


class TransferFailed(DriverError):
    """A USB transfer ended other than it should; the stick is re-opened before the next call."""


class NoAnswer(TransferFailed):
    """A control request was not answered in time."""


class StickGone(TransferFailed):
    """The stick left the bus."""


class StickHung(TransferFailed):
    """The stick does not answer control requests any more: only unplugging helps."""


class ChipFault(TransferFailed):
    """The chip reported a fatal error by its interrupt endpoint."""
