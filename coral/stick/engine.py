"""Between pipes and chip: queues per tag, a DMA for every descriptor, the deadlock rule. Source: docs/stick.md."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from coral.stick.errors import DeadlockViolation, DmaMismatch, StickError
from coral.stick.parser import TAG_NAMES, Dma

INSTRUCTIONS, INPUT, PARAMETERS, OUTPUT = range(4)


class Chip(Protocol):
    """What a stick needs of a chip; ``coral.chip.Chip`` is one.

    ``run`` works until nothing more can happen and returns a state whose name is IDLE, NEEDS_HOST or FINISHED;
    ``missing`` is (tag, bytes) in NEEDS_HOST; ``descriptors`` are the (tag, bytes, ...) that the running program has
    issued so far.
    """

    @property
    def outputs(self) -> deque[bytes]: ...
    @property
    def interrupts(self) -> deque[int]: ...
    @property
    def descriptors(self) -> Sequence[tuple[int, ...]]: ...
    @property
    def missing(self) -> tuple[int, int] | None: ...
    def reset(self) -> None: ...
    def feed(self, tag: int, data: bytes) -> None: ...
    def run(self) -> Enum: ...


class _Request(NamedTuple):
    """A descriptor that waits for its DMA; ``before_bytes`` of output precede it in the program's order."""

    length: int
    before_bytes: int


class Engine:
    """Feeds the chip what its program asks for, and checks what the host sent against it.

    The program's order is the order of its descriptors. A DMA breaks the deadlock rule if the host began to send it
    before it had read all outputs whose descriptors come earlier; it does not matter when the chip produced them, so
    the verdict does not depend on how fast the chip is simulated.
    """

    def __init__(self, chip: Chip, report: Callable[[StickError], None]) -> None:
        """``report`` receives a broken rule; it raises, or returns when the work shall go on regardless."""
        self.chip, self._report = chip, report
        self.reset()

    def reset(self) -> None:
        """Chip reset: memories, program, queues, pending outputs and events are gone."""
        self.chip.reset()
        self.chip.outputs.clear()
        self.chip.interrupts.clear()
        self.queues: dict[int, deque[Dma]] = {tag: deque() for tag in (INSTRUCTIONS, INPUT, PARAMETERS)}
        self.issued: deque[tuple[int, ...]] = deque()
        self.read_bytes = 0
        self._waiting: dict[int, deque[_Request]] = {INPUT: deque(), PARAMETERS: deque()}
        self._outputs: list[tuple[int, int]] = []
        self._output_bytes, self._seen, self._state, self._dirty = 0, 0, "IDLE", False

    def drop(self) -> None:
        """Forgets DMAs that the chip has not taken."""
        for queue in self.queues.values():
            queue.clear()

    def accept(self, dma: Dma) -> None:
        """A complete DMA has arrived."""
        self.queues[dma.tag].append(dma)
        self._dirty = True

    @property
    def idle(self) -> bool:
        """Nothing queued and no program under way."""
        return self._state != "NEEDS_HOST" and not any(self.queues.values())

    def work(self) -> None:
        """Runs the chip as far as the DMAs that have arrived allow; raises ChipError and what ``report`` raises."""
        while self._dirty:
            self._dirty = self._feed_instructions() | self._feed_streams()
            if self._dirty:
                self._state = self.chip.run().name
                self._read_descriptors()
                self._dirty |= self._can_feed()

    def missing(self) -> str:
        """What the chip waits for, in words."""
        if self._state == "NEEDS_HOST" and self.chip.missing is not None:
            tag, length = self.chip.missing
            return f"the program waits for {length} bytes of {TAG_NAMES.get(tag, f'tag {tag}')}"
        return "no program is running"

    def _wants_instructions(self) -> bool:
        missing = self.chip.missing
        return self._state != "NEEDS_HOST" or (missing is not None and missing[0] == INSTRUCTIONS)

    def _can_feed(self) -> bool:
        if self.queues[INSTRUCTIONS] and self._wants_instructions():
            return True
        return any(waiting and self.queues[tag] for tag, waiting in self._waiting.items())

    def _feed_instructions(self) -> bool:
        if not (self.queues[INSTRUCTIONS] and self._wants_instructions()):
            return False
        dma = self.queues[INSTRUCTIONS].popleft()
        self._check_order(dma, self._output_bytes)
        if self._state != "NEEDS_HOST":
            self._seen = 0
            oldest = min(
                (queued.read_bytes for queue in self.queues.values() for queued in queue), default=dma.read_bytes
            )
            self._outputs = [output for output in self._outputs if output[0] > min(oldest, dma.read_bytes)]
        self.chip.feed(dma.tag, dma.data)
        return True

    def _feed_streams(self) -> bool:
        fed = False
        for tag, waiting in self._waiting.items():
            while waiting and self.queues[tag]:
                request, dma = waiting.popleft(), self.queues[tag].popleft()
                if request.length != len(dma.data):
                    self._report(
                        DmaMismatch(f"the program asks for {request.length} bytes of tag {tag}, the host sent {dma}")
                    )
                self._check_order(dma, request.before_bytes)
                self.chip.feed(dma.tag, dma.data)
                fed = True
        return fed

    def _read_descriptors(self) -> None:
        for descriptor in list(self.chip.descriptors)[self._seen :]:
            self._seen += 1
            self.issued.append(descriptor)
            tag, length = descriptor[:2]
            if tag == OUTPUT:
                self._output_bytes += length
                self._outputs.append((self._output_bytes, length))
            elif tag in self._waiting:
                self._waiting[tag].append(_Request(length, self._output_bytes))

    def _check_order(self, dma: Dma, before_bytes: int) -> None:
        if dma.read_bytes < before_bytes:
            end, length = next(output for output in self._outputs if output[0] > dma.read_bytes)
            unread = min(length, end - dma.read_bytes)
            self._report(
                DeadlockViolation(
                    f"the host began to send {dma} while {unread} of the {length} bytes of an output DMA that precedes "
                    f"it were unread ({dma.read_bytes} of {before_bytes} output bytes read): on a stick both sides now "
                    "wait for each other and it has to be replugged"
                )
            )
