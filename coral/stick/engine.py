"""Between pipes and chip: queues per tag, a DMA for every descriptor, the deadlock rule. Source: docs/stick.md."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from coral.stick.errors import DeadlockViolation, DmaMismatch, ProtocolError, StickError
from coral.stick.parser import TAG_NAMES, Dma

INSTRUCTIONS, INPUT, PARAMETERS, OUTPUT = range(4)
HALTED_BYTES = 16384
"""More than this, sent while the scalar core is halted, wedges a stick (docs/usb.md)."""


class Chip(Protocol):
    """What a stick needs of a chip; ``coral.chip.Chip`` is one.

    ``run`` works until nothing more can happen and returns a state whose name is IDLE, NEEDS_HOST or FINISHED;
    ``missing`` is (tag, bytes) in NEEDS_HOST; ``descriptors`` are the (tag, bytes[, address]) that the running program
    has issued so far; a chip may have their ``addresses`` apart.
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

    def __init__(self, chip: Chip, report: Callable[[StickError], None], *, queue_bytes: int | None = None) -> None:
        """``report`` receives a broken rule; it raises, or returns when the work shall go on regardless.
        ``queue_bytes``: most that waits per tag while the chip does not ask for it; None is without limit."""
        self.chip, self._report, self._limit = chip, report, queue_bytes
        self.era, self._busy = 0, False
        self.reset()

    def reset(self) -> None:
        """Chip reset: memories, program, queues, pending outputs and events are gone, at once also for a chip that
        another thread is computing: what it still produces belongs to an earlier ``era``."""
        self.era += 1
        if not self._busy:
            self._clear_chip()
        self.queues: dict[int, deque[Dma]] = {tag: deque() for tag in (INSTRUCTIONS, INPUT, PARAMETERS)}
        self.issued: deque[tuple[int, ...]] = deque()
        self.read_bytes = 0
        self._waiting: dict[int, deque[_Request]] = {INPUT: deque(), PARAMETERS: deque()}
        self._outputs: list[tuple[int, int]] = []
        self._output_bytes, self._seen, self._state = 0, 0, "IDLE"

    def drop(self) -> None:
        """Forgets DMAs that the chip has not taken."""
        for queue in self.queues.values():
            queue.clear()

    def accept(self, dma: Dma) -> None:
        """A complete DMA has arrived."""
        self.queues[dma.tag].append(dma)

    def room(self, tag: int, arriving_bytes: int, *, running: bool = True) -> int | None:
        """Bytes that the stick takes of the arriving DMA; None when the chip takes them as they come. ``running``: the
        scalar core; ProtocolError for what a stick does not survive while it is halted."""
        queue = self.queues[tag]
        asked = (
            not queue and self._wants_instructions() if tag == INSTRUCTIONS else len(self._waiting[tag]) > len(queue)
        )
        free = None
        if self._limit is not None and not asked:
            free = max(0, self._limit - arriving_bytes - sum(len(dma.data) for dma in queue))
        if running or free == 0:
            return free
        held = arriving_bytes + sum(len(dma.data) for each in self.queues.values() for dma in each)
        if held >= HALTED_BYTES:
            raise ProtocolError(f"more than {HALTED_BYTES} bytes were sent while the scalar core does not run")
        return HALTED_BYTES - held if free is None else min(free, HALTED_BYTES - held)

    @property
    def idle(self) -> bool:
        """Nothing queued and no program under way."""
        return self._state != "NEEDS_HOST" and not any(self.queues.values())

    @property
    def finished(self) -> bool:
        """The last ``compute`` has ended a program."""
        return self._state == "FINISHED"

    def begin(self) -> list[tuple[int, bytes]]:
        """(tag, data) of what the chip can be fed now; with something to feed, ``compute`` and ``end`` must follow."""
        orders = self._feed_instructions() + self._feed_streams()
        self._busy = bool(orders)
        return orders

    def compute(self, orders: list[tuple[int, bytes]]) -> None:
        """Feeds and runs the chip; raises ChipError. The only part that takes long, and needs no lock."""
        for tag, data in orders:
            self.chip.feed(tag, data)
        self._result = self.chip.run().name

    def end(self, era: int) -> bool:
        """Whether what was computed counts: the chip was not reset since ``era``."""
        self._busy = False
        if era != self.era:
            self._clear_chip()
            return False
        self._state = self._result
        self._read_descriptors()
        return True

    def _clear_chip(self) -> None:
        self.chip.reset()
        self.chip.outputs.clear()
        self.chip.interrupts.clear()
        self._result = "IDLE"

    def missing(self) -> str:
        """What the chip waits for, in words."""
        if self._state == "NEEDS_HOST" and self.chip.missing is not None:
            tag, length = self.chip.missing
            return f"the program waits for {length} bytes of {TAG_NAMES.get(tag, f'tag {tag}')}"
        return "no program is running"

    def _wants_instructions(self) -> bool:
        missing = self.chip.missing
        return self._state != "NEEDS_HOST" or (missing is not None and missing[0] == INSTRUCTIONS)

    def _feed_instructions(self) -> list[tuple[int, bytes]]:
        if not (self.queues[INSTRUCTIONS] and self._wants_instructions()):
            return []
        dma = self.queues[INSTRUCTIONS].popleft()
        self._check_order(dma, self._output_bytes)
        if self._state != "NEEDS_HOST":
            self._seen = 0
            queued = [item.read_bytes for queue in self.queues.values() for item in queue]
            oldest = min([dma.read_bytes, *queued])
            self._outputs = [output for output in self._outputs if output[0] > oldest]
        return [(dma.tag, dma.data)]

    def _feed_streams(self) -> list[tuple[int, bytes]]:
        orders = []
        for tag, waiting in self._waiting.items():
            while waiting and self.queues[tag]:
                request, dma = waiting.popleft(), self.queues[tag].popleft()
                if request.length != len(dma.data):
                    self._report(
                        DmaMismatch(f"the program asks for {request.length} bytes of tag {tag}, the host sent {dma}")
                    )
                self._check_order(dma, request.before_bytes)
                orders.append((dma.tag, dma.data))
        return orders

    def _read_descriptors(self) -> None:
        addresses = getattr(self.chip, "addresses", ())
        for index, descriptor in enumerate(self.chip.descriptors[self._seen :], self._seen):
            self._seen += 1
            self.issued.append((*descriptor[:2], *addresses[index : index + 1], *descriptor[2:]))
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
