"""Time for a simulated stick."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What a stick needs of a clock."""

    def now(self) -> float:
        """Seconds from an arbitrary start."""
        ...

    def sleep(self, seconds: float) -> None:
        """Waits."""
        ...


class VirtualClock:
    """Seconds since the stick was made; ``sleep`` is the only thing that moves it, so that time-outs cost nothing."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Moves the clock; returns at once."""
        self._now += max(0.0, seconds)


class WallClock:
    """The system's time, for sticks behind a real USB library."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(max(0.0, seconds))
