"""Real sticks: the transport over libusb-1.0 by the ``usb1`` module. Source: docs/driver.md.

Every search and every opened device has a libusb context of its own: a context learns of a stick that has come back
with another identity only through hotplug events, which containers and some builds do not deliver.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from coral.driver.errors import APPLICATION_ID, DFU_ID, LibusbMissing
from coral.driver.transport import Buffer, Status

_ERRNO = {
    -3: errno.EACCES, -4: errno.ENODEV, -5: errno.ENODEV, -6: errno.EBUSY, -11: errno.ENOMEM, -12: errno.EACCES,
}  # fmt: skip
"""-12, not supported, is what Windows gives for a device without WinUSB."""
_STATUS: dict[int, Status] = {0: "done", 3: "cancelled", 4: "stall", 5: "gone", 6: "overflow"}
_SPEEDS = {1: "low", 2: "full", 3: "high"}
_INTERRUPT_ENDPOINT = 0x83


class SystemClock:
    """Monotonic time."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)


def load_usb1() -> Any:
    """The ``usb1`` module with its library loaded: the one named by CORAL_LIBUSB, the system's, or the one of the
    package libusb-package; raises LibusbMissing."""
    try:
        import usb1
    except ImportError as error:
        raise LibusbMissing(f"{error}; pip install libusb1") from None
    named = os.environ.get("CORAL_LIBUSB")
    try:
        usb1.loadLibrary(ctypes.CDLL(named, use_errno=True) if named else None)
    except (OSError, AttributeError, TypeError) as error:
        if named or not _load_bundled(usb1):
            raise LibusbMissing(error) from None
    return usb1


def _load_bundled(usb1: Any) -> bool:
    try:
        import libusb_package  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    path = libusb_package.get_library_path()
    if path is not None:
        usb1.loadLibrary(ctypes.CDLL(str(path), use_errno=True))
    return path is not None


class LibusbBus:
    """All USB devices of the machine."""

    shared = True

    def __init__(self, usb1: Any = None) -> None:
        """Raises LibusbMissing."""
        self._usb1 = usb1 or load_usb1()

    def devices(self) -> list[LibusbDevice]:
        """A fresh search."""
        with _os_errors(self._usb1), self._usb1.USBContext() as context:
            return [
                LibusbDevice(
                    self._usb1,
                    device.getVendorID(),
                    device.getProductID(),
                    _path(device),
                    _SPEEDS.get(device.getDeviceSpeed(), "super"),
                    _serial(device),
                )
                for device in context.getDeviceList(skip_on_error=True)
            ]


@dataclass(frozen=True)
class LibusbDevice:
    """A device as a search found it; ``path`` is Linux' name, bus-port.port."""

    usb1: Any
    vendor_id: int
    product_id: int
    path: str
    speed: str
    serial: str = ""
    clock: SystemClock = field(default_factory=SystemClock)

    def open(self) -> LibusbHandle:
        """Raises OSError: ENODEV when it has left or changed, EACCES without permission."""
        context = self.usb1.USBContext()
        try:
            with _os_errors(self.usb1):
                context.open()
                for device in context.getDeviceList(skip_on_error=True):
                    if (_path(device), device.getVendorID(), device.getProductID()) == (
                        self.path,
                        self.vendor_id,
                        self.product_id,
                    ):
                        return LibusbHandle(self.usb1, context, device.open())
            raise OSError(errno.ENODEV, f"the device at {self.path} is gone")
        except BaseException:
            context.close()
            raise


class LibusbTransfer:
    """One submitted transfer. The callback only records: what it raised would be lost inside libusb."""

    def __init__(self, endpoint: int, transfer: Any) -> None:
        self.endpoint, self.transfer = endpoint, transfer
        self.status: Status = "pending"
        self.actual = 0

    @property
    def data(self) -> memoryview:
        """What was received."""
        return memoryview(self.transfer.getBuffer())[: self.actual]

    def ended(self, transfer: Any) -> None:
        """Completion callback."""
        self.actual = transfer.getActualLength()
        self.status = _STATUS.get(transfer.getStatus(), "error")
        transfer.setCallback(None)  # else a cycle keeps the buffers until the garbage collector comes by


class LibusbHandle:
    """An opened device; its events are handled by whoever waits."""

    def __init__(self, usb1: Any, context: Any, handle: Any) -> None:
        self._usb1, self._context, self._handle = usb1, context, handle

    def claim(self, interface: int) -> None:
        """Raises OSError: EBUSY, ENODEV, EACCES."""
        with _os_errors(self._usb1):
            self._handle.claimInterface(interface)

    def release(self, interface: int) -> None:
        """Raises OSError."""
        with _os_errors(self._usb1):
            self._handle.releaseInterface(interface)

    def reset(self) -> None:
        """Port reset; raises OSError ENODEV when the device comes back as another."""
        with _os_errors(self._usb1):
            self._handle.resetDevice()

    def clear_halt(self, endpoint: int) -> None:
        """Makes a stalled pipe usable again; raises OSError."""
        with _os_errors(self._usb1):
            self._handle.clearHalt(endpoint)

    def close(self) -> None:
        """Cancels what is pending, closes device and context."""
        with _os_errors(self._usb1):
            self._handle.close()
            self._context.close()

    def submit_control(
        self, request_type: int, request: int, value: int, index: int, data_or_length: Buffer | int
    ) -> LibusbTransfer:
        """A control request."""
        payload = data_or_length if isinstance(data_or_length, int) else bytes(data_or_length)
        transfer = self._handle.getTransfer()
        own = LibusbTransfer(0, transfer)
        transfer.setControl(request_type, request, value, index, payload, callback=own.ended)
        return self._submit(own)

    def submit_out(self, endpoint: int, data: Buffer) -> LibusbTransfer:
        """A bulk OUT; writable buffers are not copied."""
        return self._data(endpoint, data)

    def submit_in(self, endpoint: int, length: int) -> LibusbTransfer:
        """A bulk or interrupt IN."""
        return self._data(endpoint, length)

    def cancel(self, transfer: LibusbTransfer) -> None:
        """The transfer ends when its callback has come."""
        with suppress(self._usb1.USBError):  # it may just have ended by itself
            transfer.transfer.cancel()

    def wait(self, seconds: float) -> None:
        """Handles events; may return early."""
        with suppress(self._usb1.USBErrorInterrupted):
            self._context.handleEventsTimeout(max(0.0, seconds))

    def _data(self, endpoint: int, buffer_or_length: Buffer | int) -> LibusbTransfer:
        transfer = self._handle.getTransfer()
        own = LibusbTransfer(endpoint, transfer)
        fill = transfer.setInterrupt if endpoint == _INTERRUPT_ENDPOINT else transfer.setBulk
        fill(endpoint, buffer_or_length, callback=own.ended)
        return self._submit(own)

    def _submit(self, own: LibusbTransfer) -> LibusbTransfer:
        try:
            own.transfer.submit()
        except self._usb1.USBErrorNoDevice:
            own.status = "gone"
        except self._usb1.USBError:
            own.status = "error"
        return own


def _serial(device: Any) -> str:
    stick = (device.getVendorID(), device.getProductID()) in (DFU_ID, APPLICATION_ID)
    if not stick or not device.getSerialNumberDescriptor():  # reading one means opening the device
        return ""
    with suppress(Exception):
        return device.getSerialNumber()
    return ""


def _path(device: Any) -> str:
    return f"{device.getBusNumber()}-{'.'.join(map(str, device.getPortNumberList()))}"


@contextmanager
def _os_errors(usb1: Any) -> Iterator[None]:
    try:
        yield
    except usb1.USBError as error:
        raise OSError(_ERRNO.get(error.value, errno.EIO), str(error)) from error
