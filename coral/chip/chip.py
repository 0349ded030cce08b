"""The simulated chip, as the stick sees it: bytes in, bytes out.

Source: docs/chip.md.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any

import numpy as np

from coral import isa
from coral.chip.errors import Deadlock, RuleViolation
from coral.chip.layout import DYNAMIC0, ROW_BYTES, SCALAR_NODE, WIDE0
from coral.chip.machine import Machine, Memory, Unit, Values
from coral.chip.program import Chunk

BUDGET = 8_000_000
"""Scalar bundles and instructions that one program may execute."""


class ChipState(Enum):
    """What a call of ``run`` ended with."""

    IDLE = "no program"
    NEEDS_HOST = "waits for bytes of the host"
    FINISHED = "program complete"


class Chip:
    """Sixteen tiles, a scalar core, and the host's DMAs.

    :param seed: units run in a random order, reproducible by seed, with ring consumers last; None: a fixed order
    :param budget: instructions that a program may execute before it counts as an endless loop
    """

    def __init__(self, *, seed: int | None = None, budget: int = BUDGET) -> None:
        self.seed, self.budget = seed, budget
        self.outputs: deque[bytes] = deque()
        self.written: deque[np.ndarray[Any, Any]] = deque()
        self.interrupts: deque[int] = deque()
        self.events: deque[str] = deque()
        self.cycles = 0
        self.chunks: dict[bytes, Chunk] = {}
        self.reset()

    def reset(self) -> None:
        """Put the chip to sleep: every byte of its memories is unwritten, queues are empty, no program runs."""
        self.values, self.memory = Values(), Memory()
        self.machine: Machine | None = None
        self.waiting_data: list[tuple[int, bytes]] = []
        self.state = ChipState.IDLE
        self.missing: tuple[int, int] | None = None
        for queue in (self.outputs, self.written, self.interrupts, self.events):
            queue.clear()

    def feed(self, tag: int, data: bytes) -> None:
        """One whole DMA from the host: tag 0 a bitstream, 1 input, 2 parameters.

        :raises DecodeError, UnknownInstruction, RuleViolation: the bitstream is not one
        """
        data = bytes(data)
        if tag not in (isa.Tag.INSTRUCTIONS, isa.Tag.INPUT, isa.Tag.PARAMETERS):
            raise RuleViolation(f"the host sent data with tag {tag}; the chip takes 0, 1 and 2")
        if self.machine is None:
            self.begin()
        assert self.machine is not None
        if tag == isa.Tag.INSTRUCTIONS:
            chunk = self.chunks.get(data)
            if chunk is None:
                chunk = self.chunks[data] = Chunk(data)
            self.machine.core.chunks.append(chunk)
            self.machine.wake(self.machine.core)
        else:
            self.machine.host.fed[tag].append(data)
            for unit in tuple(self.machine.starving):
                self.machine.wake(unit)
            self.machine.starving.clear()

    def begin(self) -> None:
        """A new program: wide memory stays, everything else is unwritten."""
        self.values.restart()
        self.memory.restart()
        self.machine = Machine(self.memory, self.values, self.seed, self.budget)

    def run(self) -> ChipState:
        """Go on until nothing can move; see ``ChipState``. Raises a ChipError if the program does something wrong."""
        machine = self.machine
        if machine is None:
            return ChipState.IDLE
        try:
            machine.run()
            self.missing = self.what_is_missing()
            if self.missing is None and machine.core.finished:
                self.check_end()
        except Exception:
            self.machine = None
            raise
        machine.evaluate()
        self.deliver()
        if self.missing is not None:
            return ChipState.NEEDS_HOST
        self.finish()
        return ChipState.FINISHED

    def what_is_missing(self) -> tuple[int, int] | None:
        """(tag, bytes) that the host must send before anything can go on; Deadlock if something else is wrong."""
        machine = self.machine
        assert machine is not None
        unfinished = machine.unfinished()
        if machine.core.finished and not unfinished:
            return None
        missing = machine.host.missing()
        if missing is not None:
            return missing
        if machine.core.chunk is None and not machine.core.finished:
            return int(isa.Tag.INSTRUCTIONS), 0
        raise Deadlock(machine.report(unfinished))

    def check_end(self) -> None:
        """Nothing may be left over when a program has halted."""
        machine = self.machine
        assert machine is not None
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

    def deliver(self) -> None:
        """Hand over what is complete."""
        machine = self.machine
        assert machine is not None
        for item in machine.host.delivered:
            if isinstance(item, int):
                self.interrupts.append(item)
                self.events.append("interrupt")
            else:
                self.outputs.append(self.values.data[np.maximum(item, 0)].tobytes())
                self.written.append(item > 0)
                self.events.append("output")
        machine.host.delivered.clear()
        self.descriptors = list(machine.host.descriptors)
        self.addresses = [high << 32 | low for high, low in machine.host.addresses]

    def finish(self) -> None:
        """After the last instruction: wide memory keeps what was written."""
        machine = self.machine
        assert machine is not None
        rows, ids = self.memory.settle()
        flat = self.values.data[WIDE0:DYNAMIC0].reshape(-1, ROW_BYTES)
        flat[rows] = self.values.data[np.maximum(ids, 0)]
        self.cycles = max((sum(units.values()) for units in machine.busy), default=0)
        self.last, self.machine = machine, None

    def unit(self, place: int, name: str) -> Unit:
        """A unit of the running program, for debugging."""
        assert self.machine is not None
        return self.machine.unit(place, name)
