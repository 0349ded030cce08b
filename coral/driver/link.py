"""The control pipe of an opened device, and what is counted. Source: docs/driver.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from coral.driver.errors import NoAnswer, StickGone, TransferFailed
from coral.driver.transport import Buffer, Clock, Transfer, UsbHandle

CONTROL_TRIES = 3
CANCEL_TIMEOUT_S = 1.0


@dataclass
class Counters:
    """What went over the wire since the stick was opened; bytes are payload without headers."""

    calls: int = 0
    uploads: int = 0
    instruction_bytes: int = 0
    input_bytes: int = 0
    parameter_bytes: int = 0
    output_bytes: int = 0
    transfers: int = 0
    retries: int = 0
    recoveries: int = 0
    port_resets: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """Every kind of fault by name, also those that a retry has made good."""

    def sent(self, tag: int, size: int) -> None:
        """Counts the payload of one DMA."""
        if tag == 0:
            self.instruction_bytes += size
        elif tag == 1:
            self.input_bytes += size
        else:
            self.parameter_bytes += size


class Link:
    """Control requests with retries, and the common way to end transfers.

    ``until``: when a recovery has to be over; every wait ends then.
    """

    def __init__(self, handle: UsbHandle, clock: Clock, counters: Counters, until: float = math.inf) -> None:
        self.handle, self.clock, self.counters, self.until = handle, clock, counters, until

    def deadline(self, timeout_s: float) -> float:
        """The moment ``timeout_s`` from now, or ``until`` if that is earlier."""
        return min(self.clock.now() + timeout_s, self.until)

    def wait_for(self, transfer: Transfer, timeout_s: float) -> bool:
        """Waits for a transfer to end; False when it is still pending."""
        deadline = self.deadline(timeout_s)
        while transfer.status == "pending" and (left := deadline - self.clock.now()) > 0:
            self.handle.wait(left)
        return transfer.status != "pending"

    def control_in(
        self, request_type: int, request: int, value: int, index: int, length: int, *, timeout_s: float = 1.0
    ) -> bytes:
        """What the device answers, perhaps shorter than ``length``; raises TransferFailed."""
        return bytes(self._control((request_type, request, value, index), length, timeout_s).data)

    def control_out(self, request_type: int, request: int, value: int, index: int, data: bytes) -> None:
        """Raises TransferFailed."""
        self._control((request_type, request, value, index), data, 1.0)

    def abandon(self, transfers: Iterable[Transfer]) -> None:
        """Cancels what is pending and waits until it has ended."""
        pending = [transfer for transfer in transfers if transfer.status == "pending"]
        for transfer in pending:
            self.handle.cancel(transfer)
        deadline = self.clock.now() + CANCEL_TIMEOUT_S
        while any(transfer.status == "pending" for transfer in pending):
            left = deadline - self.clock.now()
            if left <= 0:
                self.counters.faults["cancellation without end"] += 1
                return
            self.handle.wait(left)

    def _control(self, setup: tuple[int, int, int, int], data_or_length: Buffer | int, timeout_s: float) -> Transfer:
        request = "control request {:#04x}/{:#04x} value {:#06x} index {}".format(*setup)
        status = ""
        for _ in range(CONTROL_TRIES):
            transfer = self.handle.submit_control(*setup, data_or_length)
            self.wait_for(transfer, timeout_s)
            status = transfer.status
            if status == "done":
                return transfer
            self.counters.faults[f"control {'timeout' if status == 'pending' else status}"] += 1
            if status == "gone":
                raise StickGone(f"the stick left the bus during {request}; plug it in again")
            if status == "pending":
                self.abandon([transfer])
                late = "the stick answers so late that the time for all its answers was over at"
                raise NoAnswer(
                    f"{request} was not answered within {timeout_s:g} s"
                    if self.clock.now() < self.until
                    else f"{late} {request}"
                )
        raise TransferFailed(f"{request} ended with {status!r} {CONTROL_TRIES} times")
