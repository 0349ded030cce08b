"""The simulated chip, as the stick sees it: bytes in, bytes out.

Source: docs/chip.md.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import CoralError, isa
from coral.chip.errors import Deadlock, RuleViolation
from coral.chip.layout import DYNAMIC0, ROW_BYTES, SCALAR_NODE, TILES, WIDE0, WIDE_ROWS
from coral.chip.machine import Machine
from coral.chip.memories import Memory, Values
from coral.chip.program import Chunk
from coral.chip.recording import Recording, Replay, Segment, Signature, signature

BUDGET = 8_000_000
"""Scalar bundles and instructions that one program may execute."""
RECORDINGS = 64
"""Programs whose recordings are kept, the latest used ones."""


class ChipState(Enum):
    """What a call of ``run`` ended with."""

    IDLE = "no program"
    NEEDS_HOST = "waits for bytes of the host"
    FINISHED = "program complete"


class Chip:
    """Sixteen tiles, a scalar core, and the host's DMAs.

    :param seed: units run in a random order, reproducible by seed, with ring consumers last; None: a fixed order
    :param budget: instructions that a program may execute before it counts as an endless loop; with a seed, whose short
        turns count, four times as many by default
    :param replay: repeat recorded effects when a program is run again (never with a seed)
    :param bold: take for granted what no program of Google's shows: narrow memory and all of wide memory survive from
        program to program, every tile instruction may take its mask from a register (without replay)
    :param machine_type: a subclass of ``Machine`` that watches (without replay, so that there is something to see)
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        budget: int | None = None,
        replay: bool = True,
        bold: bool = False,
        machine_type: type[Machine] = Machine,
    ) -> None:
        self.seed, self.bold = seed, bold
        self.budget = budget if budget is not None else BUDGET if seed is None else 4 * BUDGET
        self.replays = replay and seed is None and not bold
        self.machine_type = machine_type
        self.outputs: deque[bytes] = deque()
        self.written: deque[NDArray[np.bool_]] = deque()
        self.interrupts: deque[int] = deque()
        self.events: deque[str] = deque()
        self.descriptors: list[tuple[int, int]] = []
        self.addresses: list[int] = []
        self.cycles = 0
        self.missing: tuple[int, int] | None = None
        self.chunks: OrderedDict[bytes, Chunk] = OrderedDict()
        self.recordings: OrderedDict[Signature, Recording] = OrderedDict()
        self.versions = np.zeros(TILES * WIDE_ROWS, np.int64)
        self.reset()

    def reset(self) -> None:
        """Put the chip to sleep: every byte of its memories is unwritten, queues are empty, no program runs."""
        self.values, self.memory = Values(), Memory(survives=self.bold)
        self.versions += 1
        self.machine: Machine | None = None
        self.running: Replay | None = None
        self.history: list[tuple[int, bytes]] = []
        self.pending: list[tuple[int, bytes]] = []
        self.told = 0
        for queue in (self.outputs, self.written, self.interrupts, self.events):
            queue.clear()

    def feed(self, tag: int, data: bytes) -> None:
        """One whole DMA from the host: tag 0 a bitstream, 1 input, 2 parameters.

        :raises DecodeError, UnknownInstruction, RuleViolation: the bitstream is not one
        """
        data = bytes(data)
        if tag not in (isa.Tag.INSTRUCTIONS, isa.Tag.INPUT, isa.Tag.PARAMETERS):
            raise RuleViolation(f"the host sent data with tag {tag}; the chip takes 0, 1 and 2")
        if tag == isa.Tag.INSTRUCTIONS:
            if data not in self.chunks:
                self.chunks[data] = Chunk(data)
            self.chunks.move_to_end(data)
            while len(self.chunks) > RECORDINGS:
                self.chunks.popitem(last=False)
        self.pending.append((int(tag), data))

    def run(self) -> ChipState:
        """Go on until nothing can move; see ``ChipState``. Raises a ChipError if the program does something wrong."""
        feeds, self.pending = self.pending, []
        idle = self.machine is None and self.running is None
        if idle:
            if not feeds:
                return ChipState.IDLE
            self.memory.abandon()
            self.history, self.told = [], 0
            recording = self.recordings.get(signature(feeds)) if self.replays else None
            if recording is not None and recording.holds(self.memory, self.versions):
                self.recordings.move_to_end(signature(feeds))
                self.running = Replay(recording, self.values)
        self.history += feeds
        if self.running is not None:
            segment = self.running.step(feeds)
            if segment is not None:
                return self.repeat(segment, self.running.recording)
            self.running, feeds = None, self.history
        return self.execute(feeds)

    def repeat(self, segment: Segment, recording: Recording) -> ChipState:
        """Hand over what a segment of a recording gives."""
        self.deliver(segment.delivered)
        self.missing = segment.missing
        for name in ("descriptors", "addresses"):
            setattr(self, name, recording.info[name][: segment.issued])
        if segment.state is ChipState.FINISHED:
            self.settle(*recording.final)
            self.take(recording.info)
            self.running = None
        return segment.state

    def execute(self, feeds: list[tuple[int, bytes]]) -> ChipState:
        """Execute instruction by instruction."""
        if self.machine is None:
            self.values.restart()
            self.memory.restart(self.values)
            self.machine = self.machine_type(self.memory, self.values, self.seed, self.budget)
            self.machine.bold = self.bold
        machine = self.machine
        for tag, data in feeds:
            if tag == isa.Tag.INSTRUCTIONS:
                machine.core.chunks.append(self.chunks.get(data) or Chunk(data))
                machine.wake(machine.core)
            else:
                machine.host.fed[tag].append(data)
        for unit in tuple(machine.starving):
            machine.wake(unit)
        machine.starving.clear()
        try:
            machine.run()
            self.missing = self.what_is_missing(machine)
            if self.missing is None:
                self.check_end(machine)
            machine.evaluate()
        except Exception as error:
            self.machine, self.pending, self.versions = None, [], self.versions + 1
            if isinstance(error, CoralError) and self.machine_type is Machine:
                machine.release()
            raise
        state = ChipState.FINISHED if self.missing is None else ChipState.NEEDS_HOST
        delivered = list(machine.host.delivered)
        machine.host.delivered.clear()
        self.deliver(delivered)
        self.descriptors, self.addresses = list(machine.host.descriptors), list(machine.host.addresses)
        machine.recording.end_segment(feeds, state, self.missing, delivered, len(self.descriptors))
        if state is ChipState.FINISHED:
            self.finish(machine)
        return state

    def finish(self, machine: Machine) -> None:
        """After the last instruction: wide memory keeps what was written; early data is for the next program."""
        own, stay, ids = self.memory.settle()
        info = {
            "cycles": round(max(machine.busy)),
            "descriptors": list(machine.host.descriptors),
            "addresses": list(machine.host.addresses),
        }
        early = [(isa.Tag.INSTRUCTIONS, chunk.data) for chunk in machine.core.chunks]
        early += [(tag, data) for tag, fed in machine.host.fed.items() for data in fed]
        if self.replays and not early and len(machine.recording.segments[0].feeds):
            machine.recording.complete(self.values, (own, stay, ids), info)
            self.recordings[machine.recording.segments[0].feeds] = machine.recording
            while len(self.recordings) > RECORDINGS:
                self.recordings.popitem(last=False)
            for tag, data in self.history:
                if tag == isa.Tag.INSTRUCTIONS and data in self.chunks:
                    self.chunks[data].forget()
        self.settle(own, stay, ids)
        self.memory.keep(self.values)
        self.take(info)
        self.machine, self.pending = None, [(int(t), d) for t, d in early] + self.pending
        if self.machine_type is Machine:
            machine.release()

    def settle(self, own: NDArray[Any], stay: NDArray[Any], ids: NDArray[np.int32]) -> None:
        """Wide memory after a program: rows that it used, rows that it loaded and the identifiers of their bytes."""
        data = self.values.data
        data[WIDE0:DYNAMIC0].reshape(-1, ROW_BYTES)[stay] = data[np.maximum(ids, 0)]
        self.memory.close(own, stay, ids)
        self.versions[own] += 1
        self.versions[stay] += 1

    def take(self, info: dict[str, Any]) -> None:
        """What is known about the program that has finished."""
        self.cycles = info["cycles"]

    def deliver(self, items: list[Any]) -> None:
        """Hand over what is complete and was not handed over before."""
        for item in items[self.told :] if self.running is None else items:
            if isinstance(item, int):
                self.interrupts.append(item)
                self.events.append("interrupt")
            else:
                self.outputs.append(self.values.data[np.maximum(item, 0)].tobytes())
                self.written.append(item > 0)
                self.events.append("output")
        self.told = self.told + len(items) if self.running is not None else max(0, self.told - len(items))

    def what_is_missing(self, machine: Machine) -> tuple[int, int] | None:
        """(tag, bytes) that the host must send before anything can go on; Deadlock if something else is wrong."""
        unfinished = machine.unfinished()
        if machine.core.finished and not unfinished:
            return None
        missing = machine.host.missing()
        if missing is not None:
            return missing
        if machine.core.chunk is None and not machine.core.finished:
            return int(isa.Tag.INSTRUCTIONS), 0
        raise Deadlock(machine.report(unfinished))

    def check_end(self, machine: Machine) -> None:
        """Nothing may be left over when a program has halted."""
        left = []
        for (node, consumer), queue in machine.ring.items():
            if queue.size:
                who = "the scalar core" if node == SCALAR_NODE else f"consumer {consumer} of tile {node}"
                left.append(f"{queue.size} ring packets for {who}")
        left += [f"{q.size} words for {unit} of tile {t}" for (t, unit), q in machine.mesh.items() if q.size]
        left += [f"{n} tokens of tile {t}" for t, n in enumerate(machine.tokens) if n]
        left += [
            f"the scaling of slots {sorted(s.fresh)} on tile {t}" for t, s in enumerate(machine.scaling) if s.fresh
        ]
        left += [f"{n} bytes of the host's stream {s}" for s, n in machine.host.left() if n]
        if machine.host.leaving:
            left.append(f"an output of {machine.host.leaving[0][1]} bytes that was never filled")
        if left:
            raise RuleViolation(f"the program has halted with leftovers: {'; '.join(left)}")
