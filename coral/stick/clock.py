"""Time for a simulated stick: it passes only when somebody waits, so that time-outs cost nothing."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the stick was made; ``sleep`` is the only thing that moves it."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Moves the clock; returns at once."""
        self._now += max(0.0, seconds)
