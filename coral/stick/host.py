"""The host controller's side of a simulated stick: pending transfers per endpoint, in order. Source: docs/stick.md."""

from __future__ import annotations

from collections import deque
from typing import Literal

from coral.stick.core import SoftwareStick
from coral.stick.descriptors import MAX_PACKET_BYTES
from coral.stick.errors import Broken, Gone, Later, Short, Stall

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
        self.ignored, self.begun, self.due = False, -1, 0.0


class HostController:
    """Keeps the transfers of one opened device; ``pump`` moves what can move.

    ``split_bytes``: OUT transfers reach the stick in pieces of that size, as old host systems cut them.
    """

    def __init__(self, stick: SoftwareStick, *, split_bytes: int | None = None) -> None:
        self.stick = stick
        self.pending: dict[int, deque[HostTransfer]] = {}
        self.finished = 0
        self._moved, self._split_bytes = 0, split_bytes
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

    def pump(self) -> bool:
        """Retries the oldest transfer of every endpoint until none moves; True when bytes moved or one ended."""
        before = self.finished, self._moved
        for queue in list(self.pending.values()):
            self._advance(queue)
        return (self.finished, self._moved) != before

    def next_alarm(self) -> float | None:
        """When a late answer is due, or something happens to the stick by itself."""
        due = [transfer.due for queue in self.pending.values() for transfer in list(queue)[:1]]
        times = [moment for moment in due if moment > self.stick.clock.now()]
        return min([*times, *filter(None, [self.stick.next_alarm()])], default=None)

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
        now = self.stick.clock.now()
        if now < self.stick.suspended_until:
            return "error"
        if now < transfer.due:
            return "pending"
        try:
            if transfer.setup:
                return self._control(transfer)
            return self._receive(transfer) if transfer.endpoint & 0x80 else self._send(transfer)
        except Stall:
            return "stall"
        except Broken:
            return "error"
        except Gone:
            return "gone"
        except Later as later:
            transfer.due = now + later.seconds
            return "pending"
        except Short as short:
            transfer.actual += short.taken
            return "done"

    def _control(self, transfer: HostTransfer) -> Status:
        if transfer.ignored:  # a request that the firmware has ignored is never answered later
            return "pending"
        request_type, request, value, index = transfer.setup
        read = bool(request_type & 0x80)
        payload = transfer.length if read else transfer.payload
        first, transfer.begun = transfer.begun < 0, 0
        answer = self.stick.control(request_type, request, value, index, payload, first=first)
        if answer is None:
            transfer.ignored = True
            return "pending"
        transfer.data = bytearray(answer[: transfer.length]) if read else bytearray()
        transfer.actual = len(transfer.data) if read else len(transfer.payload)
        return "overflow" if read and len(answer) > transfer.length else "done"

    def _send(self, transfer: HostTransfer) -> Status:
        view = memoryview(transfer.payload)
        step = self._split_bytes or len(view)
        while transfer.actual < len(view):
            start = transfer.actual - transfer.actual % step
            first, transfer.begun = transfer.begun != start, start
            taken = self.stick.bulk_out(transfer.endpoint, view[transfer.actual : start + step], first=first)
            if not taken:
                return "pending"
            transfer.actual += taken
            self._moved += 1
        return "done"

    def _receive(self, transfer: HostTransfer) -> Status:
        while transfer.actual < transfer.length:
            room = transfer.length - transfer.actual
            packet = self.stick.bulk_in(transfer.endpoint, room)
            if packet is None:
                return "pending"
            self._moved += 1
            transfer.data += packet[:room]
            transfer.actual += min(len(packet), room)
            if len(packet) > room:
                return "overflow"
            if len(packet) < self._packet_bytes(transfer.endpoint):
                break
        return "done"

    def _packet_bytes(self, endpoint: int) -> int:
        return 64 if endpoint == 0x83 else MAX_PACKET_BYTES[self.stick.speed]
