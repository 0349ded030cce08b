"""The libusb transport against a stand-in for the ``usb1`` module: what it asks for, how it translates answers.

The real library behind it is exercised by the umockdev test bed (docs/stick.md).
"""

from __future__ import annotations

import errno
import sys
from typing import Any

import pytest

from coral import driver
from coral.driver import libusb


class USBError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class USBErrorNoDevice(USBError):
    pass


class USBErrorInterrupted(USBError):
    pass


class Transfer:
    def __init__(self, handle: Handle) -> None:
        self.handle, self.status, self.actual = handle, 0, 0

    def setControl(self, *args: Any, callback: Any) -> None:
        self.setup, self.callback = args, callback
        self.buffer = bytearray(args[4])

    def setBulk(self, endpoint: int, data: Any, callback: Any) -> None:
        self.kind, self.endpoint, self.callback, self.given = "bulk", endpoint, callback, data
        self.buffer = bytearray(data) if isinstance(data, int) else data

    def setInterrupt(self, endpoint: int, data: Any, callback: Any) -> None:
        self.setBulk(endpoint, data, callback)
        self.kind = "interrupt"

    def submit(self) -> None:
        if self.handle.gone:
            raise USBErrorNoDevice(-4)
        self.handle.context.pending.append(self)

    def cancel(self) -> None:
        self.finish(3, 0)
        self.handle.context.pending.remove(self)

    def setCallback(self, callback: None) -> None:
        self.callback = callback

    def getActualLength(self) -> int:
        return self.actual

    def getStatus(self) -> int:
        return self.status

    def getBuffer(self) -> memoryview:
        return memoryview(self.buffer)

    def finish(self, status: int, actual: int) -> None:
        self.status, self.actual = status, actual
        self.callback(self)


class Handle:
    def __init__(self, context: Context) -> None:
        self.context, self.gone, self.claimed, self.error = context, False, [], 0

    def getTransfer(self) -> Transfer:
        return Transfer(self)

    def _call(self, *_: Any) -> None:
        if self.error:
            raise USBError(self.error)

    claimInterface = releaseInterface = resetDevice = clearHalt = _call

    def close(self) -> None:
        self.context.log.append("close handle")


class Device:
    def __init__(self, context: Context, ports: list[int], ids: tuple[int, int], speed: int) -> None:
        self.context, self.ports, self.ids, self.speed = context, ports, ids, speed

    def getVendorID(self) -> int:
        return self.ids[0]

    def getProductID(self) -> int:
        return self.ids[1]

    def getSerialNumberDescriptor(self) -> int:
        return int(self.ports != [1, 3])

    def getSerialNumber(self) -> str:
        self.context.usb1.read_from.add(self.ids[0])
        if self.context.usb1.open_error:
            raise USBError(self.context.usb1.open_error)
        return "S4"

    def getBusNumber(self) -> int:
        return 2

    def getPortNumberList(self) -> list[int]:
        return self.ports

    def getDeviceSpeed(self) -> int:
        return self.speed

    def open(self) -> Handle:
        if self.context.usb1.open_error:
            raise USBError(self.context.usb1.open_error)
        return Handle(self.context)


class Context:
    def __init__(self, usb1: Usb1) -> None:
        self.usb1, self.pending, self.log = usb1, [], usb1.log

    def open(self) -> Context:
        self.log.append("open context")
        return self

    def close(self) -> None:
        self.log.append("close context")

    __enter__ = open

    def __exit__(self, *_: Any) -> None:
        self.close()

    def getDeviceList(self, skip_on_error: bool) -> list[Device]:
        assert skip_on_error
        return [Device(self, *row) for row in self.usb1.rows]

    def handleEventsTimeout(self, seconds: float) -> None:
        assert seconds >= 0
        if self.usb1.interrupted:
            self.usb1.interrupted = False
            raise USBErrorInterrupted(-10)
        for transfer in self.pending:
            transfer.finish(self.usb1.status, self.usb1.actual)
        self.pending.clear()


class Usb1:
    USBError, USBErrorNoDevice, USBErrorInterrupted = USBError, USBErrorNoDevice, USBErrorInterrupted

    def __init__(self) -> None:
        self.log: list[str] = []
        self.rows = [([1, 3], (0x18D1, 0x9302), 5), ([4], (0x1A6E, 0x089A), 3), ([5], (0x1234, 1), 1)]
        self.status, self.actual, self.open_error, self.interrupted = 0, 4, 0, False
        self.read_from: set[int] = set()

    def USBContext(self) -> Context:
        return Context(self)


@pytest.fixture
def usb1() -> Usb1:
    return Usb1()


def open_handle(usb1: Usb1) -> libusb.LibusbHandle:
    return libusb.LibusbBus(usb1).devices()[0].open()


def test_search(usb1: Usb1) -> None:
    bus = libusb.LibusbBus(usb1)
    assert [(d.path, d.speed, d.vendor_id) for d in bus.devices()] == [
        ("2-1.3", "super", 0x18D1),
        ("2-4", "high", 0x1A6E),
        ("2-5", "low", 0x1234),
    ]
    bus.devices()
    assert usb1.log == ["open context", "close context"] * 2, "every search in a context of its own"
    assert [(stick.path, stick.serial) for stick in driver.list_sticks(bus)] == [("2-1.3", ""), ("2-4", "S4")]
    assert driver.find(bus, "S4").path == "2-4"
    assert usb1.read_from == {0x1A6E}, "devices that are no sticks are not opened"
    usb1.open_error = -3
    assert [stick.serial for stick in driver.list_sticks(bus)] == ["", ""], "a number that cannot be read is none"
    assert bus.shared


@pytest.mark.parametrize(
    ("code", "number"), [(-3, errno.EACCES), (-4, errno.ENODEV), (-6, errno.EBUSY), (-1, errno.EIO)]
)
def test_errors_of_opening_become_os_errors_and_leave_no_context(usb1: Usb1, code: int, number: int) -> None:
    device = libusb.LibusbBus(usb1).devices()[0]
    usb1.open_error = code
    with pytest.raises(OSError) as caught:
        device.open()
    assert caught.value.errno == number
    assert usb1.log.count("open context") == usb1.log.count("close context")


def test_a_device_that_has_changed_is_gone(usb1: Usb1) -> None:
    device = libusb.LibusbBus(usb1).devices()[1]
    usb1.rows[1] = ([4], (0x18D1, 0x9302), 5)
    with pytest.raises(OSError, match="gone"):
        device.open()


def test_transfers(usb1: Usb1) -> None:
    handle = open_handle(usb1)
    payload = bytearray(b"abcd")
    out, read, word = handle.submit_out(1, payload), handle.submit_in(0x81, 1024), handle.submit_in(0x83, 4)
    control = handle.submit_control(0xC0, 1, 0xA30C, 1, 4)
    assert out.transfer.given is payload, "not copied"
    assert (read.transfer.kind, word.transfer.kind) == ("bulk", "interrupt")
    assert control.transfer.setup == (0xC0, 1, 0xA30C, 1, 4)
    assert {t.status for t in (out, read, word, control)} == {"pending"}
    usb1.interrupted = True
    handle.wait(1.0)
    assert read.status == "pending"
    handle.wait(-1.0)
    assert {t.status for t in (out, read, word, control)} == {"done"}
    assert bytes(read.data) == bytes(4)


@pytest.mark.parametrize(
    ("code", "status"),
    [(0, "done"), (1, "error"), (2, "error"), (3, "cancelled"), (4, "stall"), (5, "gone"), (6, "overflow")],
)
def test_statuses(usb1: Usb1, code: int, status: str) -> None:
    handle = open_handle(usb1)
    usb1.status = code
    transfer = handle.submit_in(0x81, 1024)
    handle.wait(1.0)
    assert transfer.status == status


def test_submitting_to_a_device_that_has_left_ends_at_once(usb1: Usb1) -> None:
    handle = open_handle(usb1)
    handle._handle.gone = True
    assert handle.submit_in(0x81, 1024).status == "gone"


def test_cancel_close_and_reset(usb1: Usb1) -> None:
    handle = open_handle(usb1)
    transfer = handle.submit_in(0x81, 1024)
    handle.cancel(transfer)
    assert transfer.status == "cancelled"
    handle.clear_halt(0x81)
    handle._handle.error = -5
    with pytest.raises(OSError) as caught:
        handle.reset()
    assert caught.value.errno == errno.ENODEV, "the descriptors changed: normal after a firmware download"
    handle.close()
    assert usb1.log[-2:] == ["close handle", "close context"]


def test_missing_library_gives_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORAL_LIBUSB", "/absent/libusb.so")
    with pytest.raises(driver.LibusbMissing, match=r"/absent/libusb.so.* Install it with: "):
        libusb.load_usb1()
    monkeypatch.delenv("CORAL_LIBUSB")
    monkeypatch.setitem(sys.modules, "usb1", None)
    for platform, line in (
        ("linux", "apt install libusb-1.0-0"),
        ("darwin", "brew install libusb"),
        ("win32", "WinUSB"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        with pytest.raises(driver.LibusbMissing, match=line):
            libusb.load_usb1()


def test_the_driver_imports_no_usb_library() -> None:
    import subprocess

    code = "import sys, coral.driver, coral.stick; sys.exit('usb1' in sys.modules or 'tinygrad' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_search_through_the_real_library_if_there_is_one() -> None:
    try:
        bus = libusb.LibusbBus()
        devices = bus.devices()
    except (driver.LibusbMissing, OSError) as error:
        pytest.skip(f"no usable libusb here: {error}")
    assert all(device.path for device in devices)
