"""The server below umockdev's preload library, spoken to without libusb; the driver's second bed covers the rest."""

from __future__ import annotations

import ctypes.util
import errno
import socket
import struct
import time

import pytest

from coral.stick import SoftwareStick, WallClock
from coral.stick.usbfs import LIBRARY, UsbfsServer
from stick.fake_chip import FakeChip

RECORD = struct.Struct("=QQQ")
IOCTL, DONE = 1, 3
REAP_NOW = 0x4008550D


@pytest.mark.skipif(ctypes.util.find_library(LIBRARY) is None, reason="umockdev is not installed: apt install umockdev")
def test_a_client_that_opens_a_stick_as_it_leaves_is_told() -> None:
    """A broken connection would end the client's process."""
    stick = SoftwareStick(chip=FakeChip(), clock=WallClock())
    server = UsbfsServer([stick])
    try:
        (path,) = (server.root / "ioctl/dev/bus/usb/001").iterdir()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(5)
            with stick.lock:
                time.sleep(0.1)  # the server waits for the lock, behind its look at who has connected
                client.connect(str(path))
                stick.unplug()
            client.sendall(RECORD.pack(IOCTL, REAP_NOW, 0))
            assert RECORD.unpack(client.recv(RECORD.size, socket.MSG_WAITALL)) == (DONE, (1 << 64) - 1, errno.ENODEV)
            assert not path.exists()
    finally:
        server.close()
