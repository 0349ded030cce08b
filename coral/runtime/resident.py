"""Parameters on the chip and calls of the programs that use them. Source: docs/runtime.md, section Residency."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from coral import timing
from coral.codegen.machine import WIDE_ROWS
from coral.driver import Buffer, Prepared, prepare
from coral.package.program import Base, DmaHint, Program
from coral.runtime.placement import Footprint, Placement, Space

HEADER_BYTES, EVENT_BYTES = 8, 16
"""USB overhead: header of a transfer to the chip, end-of-run event."""


class Running(Protocol):
    """A call that was started."""

    def result(self) -> dict[str, bytes]:
        """Waits for it; padded bytes of every output by name."""
        ...


class OpenStick(Protocol):
    """What the runtime needs of a driver's stick (``coral.driver.Stick``)."""

    @property
    def clock_hz(self) -> int: ...
    def run(self, program: Program | Prepared, inputs: Mapping[str, Buffer] | None = None) -> dict[str, bytes]: ...
    def start(self, program: Prepared, inputs: Mapping[str, Buffer]) -> Running: ...
    def ensure_cached(self, caching: Program) -> bool: ...
    def evict(self, caching: Program) -> None: ...
    def close(self) -> None: ...


class Layout(Protocol):
    """A generator's way of laying parameters out."""

    def find(self, space: Space) -> Footprint:
        """Where they would go; raises ShapeError if they do not fit."""
        ...

    def caching(self, footprint: Footprint) -> Program:
        """The program that loads them there."""
        ...


@dataclass
class Stats:
    """What the runtime has done. Bytes are payload; ``usb_bytes`` adds what the protocol needs, uploads included."""

    calls: int = 0
    rows: int = 0
    """Images and rows of linear layers, without padding."""
    programs: int = 0
    """Execution programs that were generated."""
    uploads: int = 0
    upload_bytes: int = 0
    repacks: int = 0
    evictions: int = 0
    instruction_bytes: int = 0
    input_bytes: int = 0
    streamed_bytes: int = 0
    """Weights that did not fit the chip and went to it with a call."""
    output_bytes: int = 0
    usb_bytes: int = 0
    predicted_seconds: float = 0.0

    @property
    def to_chip_bytes(self) -> int:
        """Everything sent but the instructions of uploads."""
        return self.instruction_bytes + self.input_bytes + self.streamed_bytes + self.upload_bytes

    @property
    def predicted_seconds_per_call(self) -> float:
        """Mean of the predictions (docs/runtime.md) over all calls; 0 before the first."""
        return self.predicted_seconds / self.calls if self.calls else 0.0


@dataclass(frozen=True)
class CallPlan:
    """One program, ready to run, and what a run moves and takes."""

    prepared: Prepared
    instruction_bytes: int
    input_bytes: int
    streamed_bytes: int
    output_bytes: int
    predicted_seconds: float


def call_plan(program: Program, cycles: float, clock_hz: int) -> CallPlan:
    """``cycles``: what the chip needs for a run."""
    instructions = sum(len(bitstream.data) for bitstream in program.bitstreams)
    to_chip, from_chip = timing.call_bytes(program)
    seconds = timing.call_seconds(cycles, to_chip, from_chip, clock_hz)
    streamed = sum(h.size for h in program.hints if isinstance(h, DmaHint) and h.base is Base.PARAMETER)
    inputs = to_chip - instructions - streamed
    return CallPlan(prepare(program), instructions, inputs, streamed, from_chip, seconds)


@dataclass
class _Item:
    """Parameters that have a place: the program that loads them, whether it has run there."""

    layout: Layout
    caching: Program
    loaded: bool = False


class Residents:
    """What has a place on one stick's chip. Not for several threads."""

    def __init__(self, stick: OpenStick, limit_rows: int = WIDE_ROWS) -> None:
        self.stick, self.stats = stick, Stats()
        self.placement = Placement(limit_rows)
        self._items: dict[Hashable, _Item] = {}

    def placed(self, key: Hashable) -> tuple[Footprint, Program] | None:
        """Where parameters have their place and what loads them; None if they have none."""
        footprint = self.placement.footprints.get(key)
        return None if footprint is None else (footprint, self._items[key].caching)

    def variants(self, weights: Hashable) -> Iterator[tuple[Hashable, Footprint, Program]]:
        """Everything under a key (``weights``, n) that has a place: (key, where, what loads it)."""
        for key, footprint in self.placement.footprints.items():
            if isinstance(key, tuple) and key[0] == weights:
                yield key, footprint, self._items[key].caching

    def place(self, key: Hashable, layout: Layout) -> Footprint:
        """A place for new parameters; others may lose or change theirs. ShapeError if they do not
        even fit an empty chip."""
        change = self.placement.place(key, layout.find)
        self._drop(change.evicted)
        self.stats.repacks += bool(change.moved)
        for moved in change.moved:
            self.renew(moved)
        self._items[key] = _Item(layout, layout.caching(change.footprint))
        return change.footprint

    def renew(self, key: Hashable) -> None:
        """Parameters that have a place have other contents now: their layout is asked again."""
        item = self._items[key]
        self.stick.evict(item.caching)
        self._items[key] = _Item(item.layout, item.layout.caching(self.placement.footprints[key]))

    def load(self, key: Hashable, floor: int) -> None:
        """Parameters that have a place are on the chip afterwards; a program that uses them and writes from row
        ``floor`` on may run."""
        self.placement.use(key)
        self._drop(self.placement.lower(key, floor))
        item = self._items[key]
        if item.loaded:
            ran = self.stick.ensure_cached(item.caching)
        else:
            # unconditional: the same program may have run before other parameters took the place
            self.stick.run(item.caching)
            item.loaded = ran = True
        if ran:
            sent = len(item.caching.parameters) + len(item.caching.bitstreams[0].data)
            self.stats.uploads += 1
            self.stats.upload_bytes += len(item.caching.parameters)
            self.stats.usb_bytes += sent + 2 * HEADER_BYTES + EVENT_BYTES

    def start(self, plan: CallPlan, inputs: Mapping[str, Buffer], rows: int = 1) -> Running:
        """Begins a call, of whose rows ``rows`` are wanted, and waits for the one before if that is still running."""
        call = self.stick.start(plan.prepared, inputs)
        stats, payload = self.stats, plan.input_bytes + plan.streamed_bytes + plan.output_bytes
        stats.calls += 1
        stats.rows += rows
        stats.instruction_bytes += plan.instruction_bytes
        stats.input_bytes += plan.input_bytes
        stats.streamed_bytes += plan.streamed_bytes
        stats.output_bytes += plan.output_bytes
        transfers = sum(len(segment.outs) for segment in plan.prepared.segments)
        stats.usb_bytes += plan.instruction_bytes + payload + transfers * HEADER_BYTES + EVENT_BYTES
        stats.predicted_seconds += plan.predicted_seconds
        return call

    def _drop(self, keys: tuple[Hashable, ...]) -> None:
        for key in keys:
            self.stick.evict(self._items.pop(key).caching)
        self.stats.evictions += len(keys)
