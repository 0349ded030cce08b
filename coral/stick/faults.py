"""Fault plans: which transfer of which kind goes wrong, and how. A plan is data, so that every attachment runs it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is counted: control requests, bulk OUT transfers, packets on 0x81, on 0x82, on 0x83."""

    CONTROL = "control"
    OUT = "out"
    IN = "in"
    EVENT = "event"
    INTERRUPT = "interrupt"


class Effect(StrEnum):
    """TIMEOUT: no answer (a pipe stays silent until the chip is reset). STALL: refused once. SHORT: only
    ``keep_bytes`` pass. DISCONNECT: the stick leaves the bus and loses its firmware."""

    TIMEOUT = "timeout"
    STALL = "stall"
    SHORT = "short"
    DISCONNECT = "disconnect"


ENDPOINT_KINDS = {0x01: Kind.OUT, 0x81: Kind.IN, 0x82: Kind.EVENT, 0x83: Kind.INTERRUPT}


@dataclass(frozen=True)
class Fault:
    """``effect`` on the transfers ``ordinal`` .. ``ordinal + times - 1`` (from 0, counted per kind by the plan);
    after a disconnect the stick is back in ``back_after_s`` seconds, or by ``plug()`` only when that is None."""

    kind: Kind
    ordinal: int
    effect: Effect
    times: int = 1
    keep_bytes: int = 0
    back_after_s: float | None = None


class FaultPlan:
    """Counts transfers and hands out the fault for each; one plan belongs to one stick."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        self.seen: Counter[Kind] = Counter()
        self.fired: Counter[Fault] = Counter()

    def next(self, kind: Kind) -> Fault | None:
        """Call once per transfer."""
        ordinal = self.seen[kind]
        self.seen[kind] += 1
        for fault in self.faults:
            if fault.kind is kind and fault.ordinal <= ordinal < fault.ordinal + fault.times:
                self.fired[fault] += 1
                return fault
        return None

    @property
    def unfired(self) -> list[Fault]:
        """Faults that never happened: a test that sees any here tested nothing."""
        return [fault for fault in self.faults if not self.fired[fault]]
