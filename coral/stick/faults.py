"""Fault plans: which transfer of which kind goes wrong, and how. A plan is data, so that every attachment runs it.

Source: docs/stick.md, section Fault plans.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from coral.stick.errors import StickError


class Kind(StrEnum):
    """What is counted, from 0. A transfer may be of two kinds: a register read is a control request too, a bulk OUT
    also counts by the DMA that it belongs to."""

    CONTROL = "control"
    READ = "read"
    WRITE = "write"
    DOWNLOAD = "download"
    STATUS = "status"
    UPLOAD = "upload"
    OUT = "out"
    INSTRUCTIONS = "instructions"
    INPUT = "input"
    PARAMETERS = "parameters"
    IN = "in"
    EVENT = "event"
    INTERRUPT = "interrupt"
    RESET = "reset"
    CLAIM = "claim"


class Effect(StrEnum):
    """What happens to the transfer.

    TIMEOUT: nothing, and a pipe stays silent until the chip is reset. STALL, ERROR: refused, broken on the bus.
    BABBLE: more than was asked for. SHORT: only ``size`` bytes. EXTRA: ``data`` follows as a packet of its own.
    DROP, REPEAT: a packet never comes, comes twice. DELAY: ``seconds`` late. CORRUPT: ``data`` is xored onto the bytes
    from ``size`` on. GARBAGE: every byte comes from ``data``, repeated. STALE: as TIMEOUT, but the packet survives the
    chip's reset. FATAL: hib_error_status becomes ``size``, endpoint 0x83 says so, the chip stops. DISCONNECT: the stick
    leaves after ``size`` bytes of an OUT (elsewhere: before the transfer, with ``size`` after it) and comes back in
    ``seconds`` (None: when it is plugged in), in boot mode or, if ``running``, with its firmware. SUSPEND: transfers
    break for ``seconds``, the state is kept. WEDGE: no answer to anything until the stick is replugged.
    """

    TIMEOUT = "timeout"
    STALL = "stall"
    ERROR = "error"
    BABBLE = "babble"
    SHORT = "short"
    EXTRA = "extra"
    DROP = "drop"
    REPEAT = "repeat"
    DELAY = "delay"
    CORRUPT = "corrupt"
    GARBAGE = "garbage"
    STALE = "stale"
    FATAL = "fatal"
    DISCONNECT = "disconnect"
    SUSPEND = "suspend"
    WEDGE = "wedge"


ENDPOINT_KINDS = {0x01: Kind.OUT, 0x81: Kind.IN, 0x82: Kind.EVENT, 0x83: Kind.INTERRUPT}
TAG_KINDS = {0: Kind.INSTRUCTIONS, 1: Kind.INPUT, 2: Kind.PARAMETERS}
_PACKETS = (Kind.IN, Kind.EVENT, Kind.INTERRUPT)
_ONLY_PACKETS = (Effect.EXTRA, Effect.DROP, Effect.REPEAT, Effect.STALE)
_ONLY = {Kind.RESET: (Effect.TIMEOUT, Effect.DISCONNECT), Kind.CLAIM: (Effect.STALL, Effect.DISCONNECT)}


@dataclass(frozen=True)
class Fault:
    """``effect`` on the transfers ``ordinal`` .. ``ordinal + times - 1`` of ``kind``; a reset with TIMEOUT changes
    nothing, a claim with STALL is refused as busy. Raises StickError for an effect that the kind cannot have."""

    kind: Kind
    ordinal: int
    effect: Effect
    times: int = 1
    size: int = 0
    data: bytes = b""
    seconds: float | None = None
    running: bool = False
    port: str = ""

    def __post_init__(self) -> None:
        packets_only = self.effect in _ONLY_PACKETS and self.kind not in _PACKETS
        if packets_only or self.effect not in _ONLY.get(self.kind, (self.effect,)):
            raise StickError(f"a fault plan has {self.effect.value!r} on {self.kind.value!r}, which cannot have it")
        if self.effect in (Effect.GARBAGE, Effect.CORRUPT) and not self.data:
            raise StickError(f"a fault plan has {self.effect.value!r} without data")

    def spoil(self, data: bytes) -> bytes:
        """``data`` as SHORT, BABBLE, CORRUPT and GARBAGE leave it."""
        if self.effect is Effect.SHORT:
            return data[: self.size]
        if self.effect is Effect.BABBLE:
            return data + bytes(self.size or 4096)
        if self.effect is Effect.GARBAGE:
            return (self.data * (len(data) // len(self.data) + 1))[: len(data)]
        if self.effect is Effect.CORRUPT:
            mask = (bytes(self.size) + self.data).ljust(len(data), b"\0")
            return bytes(a ^ b for a, b in zip(data, mask, strict=False))
        return data


class FaultPlan:
    """Counts transfers and hands out the fault for each; one plan belongs to one stick."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        self.seen: Counter[Kind] = Counter()
        self.fired: Counter[Fault] = Counter()

    def next(self, *kinds: Kind) -> Fault | None:
        """Call once per transfer, with every kind that it is of."""
        ordinals = [(kind, self.seen[kind]) for kind in kinds]
        self.seen.update(kinds)
        for fault in self.faults:
            for kind, ordinal in ordinals:
                if fault.kind is kind and fault.ordinal <= ordinal < fault.ordinal + fault.times:
                    self.fired[fault] += 1
                    return fault
        return None

    @property
    def unfired(self) -> list[Fault]:
        """Faults that never happened: a test that sees any here tested nothing."""
        return [fault for fault in self.faults if not self.fired[fault]]

    def to_json(self) -> str:
        """The plan as a list of objects; bytes as hexadecimal digits."""
        return json.dumps([{**asdict(fault), "data": fault.data.hex()} for fault in self.faults])

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """A plan out of ``to_json``'s text, where defaults may be left out; raises StickError."""
        try:
            return cls(*(_fault(entry) for entry in json.loads(text)))
        except (ValueError, TypeError, AttributeError) as error:
            names = ", ".join(field.name for field in fields(Fault))
            raise StickError(f"this is not a fault plan ({error}); it is a list of objects with {names}") from None


def _fault(entry: Mapping[str, Any]) -> Fault:
    values = {**entry, "kind": Kind(entry.get("kind")), "effect": Effect(entry.get("effect"))}
    return Fault(**{**values, "data": bytes.fromhex(entry.get("data", ""))})
