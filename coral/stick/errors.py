"""What a simulated stick reports, and the answers of a USB device that are not data. Source: docs/stick.md."""

from __future__ import annotations

from coral import CoralError


class StickError(CoralError):
    """The host or the program did something that a real stick would answer with silence or wrong data."""


class ProtocolError(StickError):
    """The bulk OUT stream cannot be parsed the way the firmware parses it."""


class DeadlockViolation(StickError):
    """The host sent a DMA while an output that precedes it was unread: hardware wedges until it is replugged."""


class DmaMismatch(StickError):
    """The program asked for another number of bytes than the host sent."""


class NotStarted(StickError):
    """A program arrived while run controls of the chip's units were not 1."""


class Stall(Exception):
    """Protocol stall: the request is refused."""


class Broken(Exception):
    """The transfer is lost on the bus."""


class Gone(Exception):
    """The device is not on the bus (any more)."""


class Later(Exception):
    """The answer comes in ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Short(Exception):
    """A bulk OUT ends after ``taken`` bytes."""

    def __init__(self, taken: int) -> None:
        super().__init__(taken)
        self.taken = taken
