"""The host controller's side of a simulated stick: pending transfers per endpoint, in order. Source: docs/stick.md."""

from __future__ import annotations

from collections import deque
from typing import Literal

from coral.stick.core import SoftwareStick
from coral.stick.descriptors import MAX_PACKET_BYTES
from coral.stick.errors import Gone, Stall

Status = Literal["pending", "done", "stall", "overflow", "gone", "cancelled", "error"]


class HostTransfer:
    """A transfer on its way. ``data``: what an IN has received; ``actual``: bytes that went through."""

    def __init__(
        self, endpoint: int, payload: bytes | bytearray | memoryview, length: int, setup: tuple[int, ...] = ()
    ):
        self.endpoint, self.payload, self.length, self.setup = endpoint, payload, length, setup
        self.status: Status = "pending"
        self.data = bytearray()
        self.actual = 0
        self.offered = False


class HostController:
    """Keeps the transfers of one opened device; ``pump`` moves what can move."""

    def __init__(self, stick: SoftwareStick) -> None:
        self.stick = stick
        self.pending: dict[int, deque[HostTransfer]] = {}
        self.finished = 0
        self._generation = stick.generation

    def submit(self, transfer: HostTransfer) -> None:
        """Queues behind earlier transfers of the same endpoint and tries at once."""
        queue = self.pending.setdefault(transfer.endpoint, deque())
        queue.append(transfer)
        self._advance(queue)

    def cancel(self, transfer: HostTransfer) -> None:
        """Ends a pending transfer; what it has received stays in it."""
        if transfer.status == "pending":
            self.pending[transfer.endpoint].remove(transfer)
            self._finish(transfer, "cancelled")

    def pump(self) -> None:
        """Retries the oldest transfer of every endpoint until none moves."""
        for queue in list(self.pending.values()):
            self._advance(queue)

    def _advance(self, queue: deque[HostTransfer]) -> None:
        while queue:
            status = self._step(queue[0])
            if status == "pending":
                break
            self._finish(queue.popleft(), status)

    @property
    def gone(self) -> bool:
        """The device that was opened has left the bus or has come back as another."""
        return self._generation != self.stick.generation or not self.stick.present

    def _finish(self, transfer: HostTransfer, status: Status) -> None:
        transfer.status = status
        self.finished += 1

    def _step(self, transfer: HostTransfer) -> Status:
        if self.gone:
            return "gone"
        try:
            if transfer.setup:
                return self._control(transfer)
            return self._receive(transfer) if transfer.endpoint & 0x80 else self._send(transfer)
        except Stall:
            return "stall"
        except Gone:
            return "gone"

    def _control(self, transfer: HostTransfer) -> Status:
        if transfer.offered:  # a request that the firmware has ignored is never answered later
            return "pending"
        transfer.offered = True
        request_type, request, value, index = transfer.setup
        read = bool(request_type & 0x80)
        answer = self.stick.control(request_type, request, value, index, transfer.length if read else transfer.payload)
        if answer is None:
            return "pending"
        transfer.data = bytearray(answer)
        transfer.actual = len(answer) if read else len(transfer.payload)
        return "done"

    def _send(self, transfer: HostTransfer) -> Status:
        taken = self.stick.bulk_out(transfer.endpoint, transfer.payload)
        if taken is None:
            return "pending"
        transfer.actual = taken
        return "done"

    def _receive(self, transfer: HostTransfer) -> Status:
        while transfer.actual < transfer.length:
            room = transfer.length - transfer.actual
            packet = self.stick.bulk_in(transfer.endpoint, room)
            if packet is None:
                return "pending"
            transfer.data += packet[:room]
            transfer.actual += min(len(packet), room)
            if len(packet) > room:
                return "overflow"
            if len(packet) < self._packet_bytes(transfer.endpoint):
                break
        return "done"

    def _packet_bytes(self, endpoint: int) -> int:
        return 64 if endpoint == 0x83 else MAX_PACKET_BYTES[self.stick.speed]
