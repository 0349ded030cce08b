"""In-process attachment: what a driver opens instead of a USB bus. Source: docs/stick.md.

The classes have the methods of the driver's protocols (docs/driver.md) without knowing them. Errors of opening and
claiming are OSErrors with the errno a USB library would give.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from coral.stick.clock import Clock
from coral.stick.core import SoftwareStick
from coral.stick.errors import Gone, Stall
from coral.stick.host import HostController, HostTransfer


class StickBus:
    """Simulated sticks of this process, in the ports 1, 2, .. of bus 1 unless a stick has its own ``port``.

    ``split_bytes``: see ``HostController``.
    """

    shared = False

    def __init__(self, sticks: Iterable[SoftwareStick], *, split_bytes: int | None = None) -> None:
        self.sticks, self.split_bytes = list(sticks), split_bytes
        self._owners: dict[SoftwareStick, StickHandle] = {}

    def devices(self) -> list[StickDevice]:
        """Every stick that can be seen now."""
        return [
            StickDevice(self, stick, stick.port or f"1-{number}")
            for number, stick in enumerate(self.sticks, start=1)
            if stick.present
        ]

    def claim(self, handle: StickHandle) -> None:
        """Makes ``handle`` the owner of its stick; raises OSError EBUSY."""
        owner = self._owners.get(handle.stick)
        if owner is not None and owner is not handle and not owner.gone:
            raise OSError(errno.EBUSY, "interface 0 is claimed by another handle")
        self._owners[handle.stick] = handle

    def release(self, handle: StickHandle) -> None:
        """Gives the stick up, if ``handle`` has it."""
        if self._owners.get(handle.stick) is handle:
            del self._owners[handle.stick]


class StickDevice:
    """A stick as a search of the bus found it."""

    def __init__(self, bus: StickBus, stick: SoftwareStick, path: str) -> None:
        self.path, self.speed, self.clock, self.serial = path, stick.speed, stick.clock, stick.serial
        self.vendor_id, self.product_id = stick.identity
        self._bus, self._stick, self._generation = bus, stick, stick.generation

    def open(self) -> StickHandle:
        """Raises OSError ENODEV when the stick has left since the search."""
        if not self._stick.present or self._stick.generation != self._generation:
            raise OSError(errno.ENODEV, f"the device at {self.path} is gone")
        return StickHandle(self._bus, self._stick)


class StickHandle(HostController):
    """An opened stick. Errors of the simulated chip and broken rules are raised by ``wait``."""

    def __init__(self, bus: StickBus, stick: SoftwareStick) -> None:
        super().__init__(stick, split_bytes=bus.split_bytes)
        self._bus = bus
        self._seen = 0

    @property
    def clock(self) -> Clock:
        """The stick's own time."""
        return self.stick.clock

    def claim(self, interface: int) -> None:
        """Raises OSError: ENODEV, or EBUSY when another handle has it."""
        if self.gone:
            raise OSError(errno.ENODEV, "the device is gone")
        if interface != 0:
            raise OSError(errno.ENOENT, f"there is no interface {interface}")
        try:
            self.stick.claim()
        except Stall:
            raise OSError(errno.EBUSY, "interface 0 is claimed by another program") from None
        except Gone:
            raise OSError(errno.ENODEV, "the device is gone") from None
        self._bus.claim(self)

    def release(self, interface: int) -> None:
        """Never fails."""
        self._bus.release(self)

    def reset(self) -> None:
        """USB port reset; raises OSError ENODEV when the device has changed, as a USB library does."""
        with self.stick.lock:
            if self.gone or self.stick.reset():
                raise OSError(errno.ENODEV, "the device has to be enumerated again")

    def clear_halt(self, endpoint: int) -> None:
        """Makes a stalled pipe usable again; raises OSError ENODEV."""
        try:
            self.stick.clear_halt(endpoint)
        except Gone:
            raise OSError(errno.ENODEV, "the device is gone") from None

    def close(self) -> None:
        """Cancels what is pending and releases."""
        with self.stick.lock:
            for queue in list(self.pending.values()):
                for transfer in list(queue):
                    super().cancel(transfer)
        self._bus.release(self)

    def submit_control(
        self,
        request_type: int,
        request: int,
        value: int,
        index: int,
        data_or_length: bytes | bytearray | memoryview | int,
    ) -> HostTransfer:
        """A control request; ``data_or_length`` is bytes for OUT, a length for IN."""
        payload, length = (b"", data_or_length) if isinstance(data_or_length, int) else (data_or_length, 0)
        return self._submit(HostTransfer(0, payload, length, (request_type, request, value, index)))

    def submit_out(self, endpoint: int, data: bytes | bytearray | memoryview) -> HostTransfer:
        """One bulk OUT transfer."""
        return self._submit(HostTransfer(endpoint, data, len(data)))

    def submit_in(self, endpoint: int, length: int) -> HostTransfer:
        """One bulk or interrupt IN transfer of at most ``length`` bytes."""
        return self._submit(HostTransfer(endpoint, b"", length))

    def cancel(self, transfer: HostTransfer) -> None:
        """The transfer ends at once, with what it has received."""
        with self.stick.lock:
            super().cancel(transfer)

    def wait(self, seconds: float) -> None:
        """Returns when a transfer has ended since the last call, else after ``seconds`` of the stick's time."""
        end = self.clock.now() + seconds
        while True:
            while self._pump_locked() | (not self.gone and self.stick.work()):
                pass
            failure = self.stick.take_failure()
            if failure is not None:
                raise failure
            now = self.clock.now()
            if self.finished != self._seen or now >= end:
                break
            alarm = self.next_alarm()
            self.stick.log.append(f"{seconds:g} s pass: {self.stick.engine.missing()}")
            self.clock.sleep(min(end, alarm or end) - now)
        self._seen = self.finished

    def _pump_locked(self) -> bool:
        with self.stick.lock:
            return self.pump()

    def _submit(self, transfer: HostTransfer) -> HostTransfer:
        with self.stick.lock:
            self.submit(transfer)
        return transfer
