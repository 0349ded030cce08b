"""Simulated sticks below the real libusb: a server for umockdev's preload library. Source: docs/stick.md.

A process that is started with ``UsbfsServer.environment`` sees the sticks under /sys and /dev/bus/usb, whatever it is
written in. Every opened device is a connection; its pending URBs are kept here and end when the stick lets them.
"""

from __future__ import annotations

import ctypes.util
import errno
import fcntl
import functools
import os
import selectors
import shutil
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from coral.stick.core import SoftwareStick
from coral.stick.errors import Gone, Stall, StickError
from coral.stick.host import HostController, HostTransfer, Status

LIBRARY = "umockdev-preload"
CAPABILITIES = 0x15
"""Zero packets, no limit of the packet count, reaping after a disconnect: libusb sends a transfer as one URB. With 0x11
or 0x13 it cuts transfers into URBs of 16 KiB."""
CONTINUATION = 0x4
TICK_S = 0.01
CLIENT_TIMEOUT_S = 10.0

_RECORD = struct.Struct("=QQQ")
_URB = struct.Struct("=BB2xiI4xQii24x")
_SETUP = struct.Struct("<BBHHH")
_IOCTL, _DONE, _READ_MEMORY, _WRITE_MEMORY = 1, 3, 5, 6
_F_SETPIPE_SZ = 1031
_STATUS = {"done": 0, "stall": -32, "gone": -108, "overflow": -75, "error": -71, "cancelled": -2}
_SPEED = {"super": "5000", "high": "480"}
# usbfs requests
_CLAIM, _RELEASE, _RESET, _CAPABILITIES = 0x8004550F, 0x80045510, 0x5514, 0x8004551A
_SUBMIT, _DISCARD, _REAP, _REAP_NOW = 0x8038550A, 0x550B, 0x4008550C, 0x4008550D
_CLEAR_HALT = 0x80045515
_ACCEPTED = {_RELEASE, 0x80045505, 0x80085504}
_NO_DRIVER = {0x41045508, 0xC0105512}


@functools.cache
def preload_library() -> str:
    """Name of umockdev's preload library; raises StickError with the install line when it is absent."""
    name = ctypes.util.find_library(LIBRARY)
    if name is None:
        raise StickError(
            "simulated sticks behind libusb need umockdev's library lib" + LIBRARY + ".so (Linux only). Install it "
            "with: sudo apt install umockdev"
        )
    return name


class _Urb(HostTransfer):
    """A transfer of a client: where its URB and buffer are in the client's memory."""

    def __init__(self, endpoint: int, payload: bytes, length: int, setup: tuple[int, ...] = ()) -> None:
        super().__init__(endpoint, payload, length, setup)
        self.address = self.buffer = self.flags = 0


class _Connection(HostController):
    """One opened device."""

    def __init__(self, node: _Node, client: socket.socket) -> None:
        super().__init__(node.stick)
        self.node, self.client = node, client
        self.completed: deque[_Urb] = deque()
        client.settimeout(CLIENT_TIMEOUT_S)

    def _finish(self, transfer: HostTransfer, status: Status) -> None:
        super()._finish(transfer, status)
        assert isinstance(transfer, _Urb)
        self.completed.append(transfer)
        if transfer.endpoint & 0x80 and transfer.actual < transfer.length:
            # the kernel unlinks what belongs to the same transfer of libusb as a URB that has ended short
            following = self.pending[transfer.endpoint]
            if following and getattr(following[0], "flags", 0) & CONTINUATION:
                self.cancel(following[0])
        self.node.show_readiness()

    def receive(self, size: int) -> bytes:
        """Exactly ``size`` bytes; raises OSError when the client has ended."""
        data = b""
        while len(data) < size:
            part = self.client.recv(size - len(data))
            if not part:
                raise ConnectionResetError("the client has ended")
            data += part
        return data

    def read_memory(self, address: int, size: int) -> bytes:
        """The client's memory, while it waits in an ioctl."""
        if not size:
            return b""
        self.client.sendall(_RECORD.pack(_READ_MEMORY, address, size))
        return self.receive(size)

    def answer(self, number: int = 0, memory: Iterable[tuple[int, bytes]] = ()) -> None:
        """Ends the client's ioctl: 0 or an errno, after writing to its memory."""
        writes = b"".join(_RECORD.pack(_WRITE_MEMORY, at, len(data)) + data for at, data in memory if data)
        result = (1 << 64) - 1 if number else 0
        self.client.sendall(writes + _RECORD.pack(_DONE, result, number))


class _Node:
    """A stick at one address: sysfs entries, device node, the connections to it."""

    def __init__(self, server: UsbfsServer, stick: SoftwareStick, port: str, number: int) -> None:
        self.stick, self.port, self.number, self.generation = stick, port, number, stick.generation
        self.connections: list[_Connection] = []
        self.owner: _Connection | None = None
        root, name = server.root, f"bus/usb/001/{number:03}"
        self._system = root / "sys/devices" / port
        self._link = root / "sys/bus/usb/devices" / port
        self._device, self._socket = root / "dev" / name, root / "ioctl/dev" / name
        for folder in (self._system, self._link.parent, self._device.parent, self._socket.parent):
            folder.mkdir(parents=True, exist_ok=True)
        self._publish()
        os.mkfifo(self._device)
        # Clients poll the node for finished URBs. A pipe of one page is writable only while it is empty.
        self._pipe = os.open(self._device, os.O_RDWR | os.O_NONBLOCK)
        fcntl.fcntl(self._pipe, _F_SETPIPE_SZ, 4096)
        os.write(self._pipe, b"x")
        self._ready = False
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self._socket))
        self.listener.listen()
        self._link.symlink_to(f"../../../devices/{port}")

    def _publish(self) -> None:
        vendor, product = self.stick.identity
        text = {
            "busnum": "1", "devnum": str(self.number), "devpath": self.port.partition("-")[2],
            "idVendor": f"{vendor:04x}", "idProduct": f"{product:04x}", "bConfigurationValue": "1",
            "speed": _SPEED[self.stick.speed],
            "uevent": f"DEVNAME=/dev/bus/usb/001/{self.number:03}\nDEVTYPE=usb_device\nBUSNUM=001\n"
            f"DEVNUM={self.number:03}\nPRODUCT={vendor:x}/{product:x}/100\nMAJOR=189\nMINOR={self.number - 1}",
        }  # fmt: skip
        for name, value in text.items():
            (self._system / name).write_text(value + "\n")
        (self._system / "descriptors").write_bytes(self.stick.descriptors())
        (self._system / "subsystem").symlink_to("../../bus/usb")

    def show_readiness(self) -> None:
        """Makes the node writable exactly when some URB can be reaped."""
        ready = any(connection.completed for connection in self.connections)
        if ready != self._ready:
            self._ready = ready
            if ready:
                os.read(self._pipe, 1)
            else:
                os.write(self._pipe, b"x")

    def accept(self) -> _Connection:
        """A client that has opened the device; raises OSError if none waits."""
        connection = _Connection(self, self.listener.accept()[0])
        self.connections.append(connection)
        return connection

    def unpublish(self) -> list[_Connection]:
        """The stick has left this address; open connections live on, and are told. Returns those of clients that
        opened the device just before: the preload library ends a process whose connection breaks."""
        for path in (self._socket, self._link, self._device):
            path.unlink(missing_ok=True)
        shutil.rmtree(self._system, ignore_errors=True)
        late: list[_Connection] = []
        self.listener.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                late.append(self.accept())
        self.listener.close()
        return late

    def close(self) -> None:
        """When the last connection has ended."""
        os.close(self._pipe)


class UsbfsServer:
    """Serves sticks to clients of libusb until it is closed; sticks need a clock that goes by itself: ``WallClock``."""

    def __init__(self, sticks: Iterable[SoftwareStick], *, capabilities: int = CAPABILITIES) -> None:
        """The sticks are in ports 1, 2, .. of bus 1 unless they have a ``port``. Raises StickError without umockdev."""
        self.library = preload_library()
        self.sticks, self.capabilities = list(sticks), capabilities
        self.root = Path(tempfile.mkdtemp(prefix="um"))  # short: the sockets' paths have a limit of 108 bytes
        (self.root / "sys/class").mkdir(parents=True)
        (self.root / "sys/bus/usb/devices").mkdir(parents=True)
        self._nodes: dict[SoftwareStick, _Node] = {}
        self._left: list[_Node] = []
        self._addresses = 1
        self._selector = selectors.DefaultSelector()
        self._closing = False
        self._work = {stick: threading.Event() for stick in self.sticks}
        self._follow()
        self._threads = [threading.Thread(target=self._serve, daemon=True, name="usbfs")]
        self._threads += [
            threading.Thread(target=self._compute, args=(stick, event), daemon=True, name="usbfs chip")
            for stick, event in self._work.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """What a client has to be started with."""
        return {"LD_PRELOAD": self.library, "UMOCKDEV_DIR": str(self.root)}

    @property
    def connections(self) -> int:
        """Devices that clients have open."""
        return sum(len(node.connections) for node in [*self._nodes.values(), *self._left])

    def close(self) -> None:
        """Unplugs everything. Clients that have a device open are told so and served until they close it: the preload
        library ends a process whose connection breaks."""
        for stick in self.sticks:
            with stick.lock:
                stick.unplug()
        self._closing = True
        for event in self._work.values():
            event.set()
        for thread in self._threads:
            thread.join(timeout=2.0)
        shutil.rmtree(self.root, ignore_errors=True)

    # threads

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(TICK_S):
                if isinstance(key.data, _Node):
                    with suppress(OSError):
                        self._listen(key.data.accept())
                else:
                    self._request(key.data)
            self._follow()
            if self._closing and not self._left and not self._nodes:
                self._selector.close()
                return

    def _listen(self, connection: _Connection) -> None:
        self._selector.register(connection.client, selectors.EVENT_READ, connection)

    def _compute(self, stick: SoftwareStick, event: threading.Event) -> None:
        while not self._closing:
            event.wait()
            event.clear()
            while stick.work():
                self._pump(stick)

    def _pump(self, stick: SoftwareStick) -> None:
        with stick.lock:
            for node in [*self._nodes.values(), *self._left]:
                if node.stick is stick:
                    for connection in list(node.connections):
                        connection.pump()

    def _follow(self) -> None:
        """Makes what clients see what the sticks are: present or not, under which identity and address."""
        for number, stick in enumerate(self.sticks, start=1):
            self._pump(stick)
            with stick.lock:
                stick.take_failure()
                node = self._nodes.get(stick)
                if node is not None and not (stick.present and stick.generation == node.generation):
                    self._selector.unregister(node.listener)
                    for connection in node.unpublish():
                        self._listen(connection)
                    self._left.append(self._nodes.pop(stick))
                elif node is None and stick.present and not self._closing:
                    self._addresses += 1
                    node = self._nodes[stick] = _Node(self, stick, stick.port or f"1-{number}", self._addresses)
                    self._selector.register(node.listener, selectors.EVENT_READ, node)
        for node in [node for node in self._left if not node.connections]:
            node.close()
            self._left.remove(node)

    # requests

    def _request(self, connection: _Connection) -> None:
        try:
            command, request, pointer = _RECORD.unpack(connection.receive(_RECORD.size))
            if command == _IOCTL:
                self._ioctl(connection, request, pointer)
            else:
                connection.answer(errno.EIO)
        except OSError:
            self._drop(connection)
        self._work[connection.stick].set()

    def _drop(self, connection: _Connection) -> None:
        """The client has closed the device or has ended: what it had under way is forgotten."""
        self._selector.unregister(connection.client)
        connection.client.close()
        node = connection.node
        with connection.stick.lock:
            node.connections.remove(connection)
            connection.pending.clear()
            connection.completed.clear()
            node.show_readiness()
            if node.owner is connection:
                node.owner = None

    def _ioctl(self, connection: _Connection, request: int, pointer: int) -> None:
        if request == _SUBMIT:
            self._submit(connection, pointer)
        elif request in (_REAP, _REAP_NOW):
            self._reap(connection, pointer)
        elif request == _CAPABILITIES:
            connection.answer(0, [(pointer, struct.pack("=I", self.capabilities))])
        elif request in _ACCEPTED or request in _NO_DRIVER:
            connection.answer(errno.ENODATA if request in _NO_DRIVER else 0)
        elif request in (_CLAIM, _DISCARD, _RESET, _CLEAR_HALT):
            if request == _CLEAR_HALT:
                (pointer,) = struct.unpack("=I", connection.read_memory(pointer, 4))
            with connection.stick.lock:
                action = {_CLAIM: self._claim, _DISCARD: self._discard, _RESET: self._reset, _CLEAR_HALT: self._clear}
                number = action[request](connection, pointer)
            connection.answer(number)
        else:
            connection.answer(errno.ENOTTY)

    def _claim(self, connection: _Connection, _: int) -> int:
        node = connection.node
        try:
            connection.stick.claim()
        except (Stall, Gone) as refusal:
            return errno.EBUSY if isinstance(refusal, Stall) else errno.ENODEV
        if node.owner not in (None, connection):
            return errno.EBUSY
        node.owner = connection
        return 0

    def _discard(self, connection: _Connection, pointer: int) -> int:
        for queue in connection.pending.values():
            for urb in list(queue):
                if isinstance(urb, _Urb) and urb.address == pointer:
                    connection.cancel(urb)
                    return 0
        return errno.EINVAL

    def _reset(self, connection: _Connection, _: int) -> int:
        return errno.ENODEV if connection.gone or connection.stick.reset() else 0

    def _clear(self, connection: _Connection, endpoint: int) -> int:
        try:
            connection.stick.clear_halt(endpoint)
        except Gone:
            return errno.ENODEV
        return 0

    def _submit(self, connection: _Connection, pointer: int) -> None:
        kind, endpoint, _, flags, buffer, size, _ = _URB.unpack(connection.read_memory(pointer, _URB.size))
        read = bool(endpoint & 0x80)
        data = connection.read_memory(buffer, 0 if read else size)
        if kind == 2:
            *setup, length = _SETUP.unpack(data[:8])
            urb = _Urb(0, data[8:], length, tuple(setup))
        else:
            urb = _Urb(endpoint, data, size)
        urb.address, urb.buffer, urb.flags = pointer, buffer, flags
        with connection.stick.lock:
            gone = connection.gone
            if not gone:
                connection.submit(urb)
        connection.answer(errno.ENODEV if gone else 0)

    def _reap(self, connection: _Connection, pointer: int) -> None:
        with connection.stick.lock:
            urb = connection.completed.popleft() if connection.completed else None
            connection.node.show_readiness()
            gone = connection.gone
        if urb is None:
            connection.answer(errno.ENODEV if gone else errno.EAGAIN)
            return
        received = bytes(urb.data)
        memory = [
            (urb.address + 4, struct.pack("=i", _STATUS[urb.status])),
            (urb.address + 28, struct.pack("=i", urb.actual)),
            (urb.buffer + (8 if urb.setup else 0), received),
            (pointer, struct.pack("=Q", urb.address)),
        ]
        connection.answer(0, memory)
