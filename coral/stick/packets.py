"""One IN pipe of the stick: packets in order, and what a fault plan does to them. Source: docs/stick.md."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from coral.stick.faults import Effect, Fault, FaultPlan, Kind

_ON_DELIVERY = {"timeout", "stall", "error", "stale", "fatal", "disconnect", "suspend", "wedge"}


@dataclass
class Packet:
    """``counts``: bytes that the host has read once it has this, whatever became of them; ``fault`` strikes when the
    host asks for the packet; it is not there before ``due``."""

    data: bytes
    counts: int
    fault: Fault | None = None
    due: float = 0.0


class InPipe:
    """Packets that wait for the host. ``silent``: none comes until the chip is reset."""

    def __init__(self, kind: Kind, plan: Callable[[], FaultPlan], now: Callable[[], float]) -> None:
        self.kind, self._plan, self._now = kind, plan, now
        self._queue: deque[Packet] = deque()
        self.silent = self.keeps = False

    def put(self, data: bytes) -> None:
        """The stick sends a packet; its ordinal in the fault plan is the order of these calls."""
        fault = self._plan().next(self.kind)
        packet = Packet(data, len(data))
        if fault is None:
            self._queue.append(packet)
        elif fault.effect in _ON_DELIVERY:
            packet.fault = fault
            self._queue.append(packet)
        elif fault.effect is not Effect.DROP:
            packet.data = fault.spoil(data)
            packet.due = self._now() + (fault.seconds or 0.0)
            self._queue.append(packet)
            if fault.effect in (Effect.REPEAT, Effect.EXTRA):
                again = data if fault.effect is Effect.REPEAT else fault.data
                self._queue.append(Packet(again, 0))

    @property
    def head(self) -> Packet | None:
        """The packet that the host would get now."""
        ready = not self.silent and self._queue and self._queue[0].due <= self._now()
        return self._queue[0] if ready else None

    @property
    def due(self) -> float | None:
        """When a packet that is late will be there."""
        return self._queue[0].due if self._queue and self._queue[0].due > self._now() else None

    def pop(self) -> Packet:
        """Takes the head."""
        return self._queue.popleft()

    def reset(self, *, pipe_only: bool = False) -> None:
        """Chip or pipe reset: what waits is lost, unless a stale packet is to survive the chip's reset."""
        self.silent = False
        if not self.keeps or pipe_only:
            self._queue.clear()
        self.keeps = False
