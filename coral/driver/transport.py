"""The one interface to USB. ``libusb.py`` has it for real sticks, ``coral.stick.StickBus`` for simulated ones.

The protocols are structural. Opening, claiming and resetting raise OSError: EACCES no permission, EBUSY claimed by
another, ENODEV gone. Transfers are asynchronous and never raise for what happens on the wire: they end with a status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

Status = Literal["pending", "done", "stall", "overflow", "gone", "cancelled", "error"]
Buffer = bytes | bytearray | memoryview


class Clock(Protocol):
    """Time that deadlines are measured in: the system's, or a simulated stick's own."""

    def now(self) -> float:
        """Seconds from an arbitrary start."""
        ...

    def sleep(self, seconds: float) -> None:
        """Waits."""
        ...


class Transfer(Protocol):
    """A submitted transfer; ``data`` is what an IN received, ``actual`` the bytes that went through."""

    @property
    def endpoint(self) -> int: ...
    @property
    def status(self) -> Status: ...
    @property
    def actual(self) -> int: ...
    @property
    def data(self) -> Buffer: ...


class UsbHandle(Protocol):
    """An opened device. Buffers given to ``submit_out`` must not change until the transfer has ended."""

    def claim(self, interface: int) -> None: ...
    def release(self, interface: int) -> None: ...
    def reset(self) -> None: ...
    def clear_halt(self, endpoint: int) -> None: ...
    def close(self) -> None: ...
    def submit_control(
        self, request_type: int, request: int, value: int, index: int, data_or_length: Buffer | int
    ) -> Transfer: ...
    def submit_out(self, endpoint: int, data: Buffer) -> Transfer: ...
    def submit_in(self, endpoint: int, length: int) -> Transfer: ...

    def cancel(self, transfer: Any) -> None:
        """Asks a pending transfer to end; it has ended once its status says so."""
        ...

    def wait(self, seconds: float) -> None:
        """Returns when some transfer has ended since the last call, or after ``seconds``."""
        ...


class UsbDevice(Protocol):
    """A device as a search found it; ``path`` ("bus-port.port") stays the same over re-enumeration. ``serial`` is empty
    where there is none."""

    @property
    def vendor_id(self) -> int: ...
    @property
    def product_id(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def speed(self) -> str: ...
    @property
    def serial(self) -> str: ...
    @property
    def clock(self) -> Clock: ...
    def open(self) -> UsbHandle: ...


class Bus(Protocol):
    """Where devices are searched; ``shared`` is True when other processes see the same devices."""

    @property
    def shared(self) -> bool: ...
    def devices(self) -> Sequence[UsbDevice]: ...
