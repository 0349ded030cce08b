"""The data pipes: one program's transfers, segment by segment. Source: docs/usb.md, docs/driver.md.

Rule of the deadlock: nothing that follows an output in the program is sent before that output has been read whole.
Reads are queued before the writes of their segment; that is allowed and wanted.
"""

from __future__ import annotations

import struct
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress

from coral.driver.bringup import OUTFEED_CHUNK_BYTES
from coral.driver.errors import ChipFault, StickGone, TransferFailed
from coral.driver.link import Link
from coral.driver.registers import Registers
from coral.driver.segments import In, Out, Prepared, Segment
from coral.driver.transport import Buffer, Transfer

OUT, OUTPUTS, EVENTS, INTERRUPTS = 0x01, 0x81, 0x82, 0x83
OUT_TRANSFER_BYTES = 1 << 20
"""A multiple of every packet size, so that no short packet falls inside a DMA."""
OUT_DEPTH, IN_DEPTH = 1 if sys.platform == "darwin" else 4, 16
"""Transfers under way; on macOS Google's driver sends one at a time."""
EVENT_BYTES, INTERRUPT_BYTES = 16, 4
DRAIN_TIMEOUT_S = 0.05
DRAIN_READS = 4096
INTERRUPT_EVENTS, ALL_EVENTS = 0xF0, 0xFF
END_TAG = 4
_EVENT = struct.Struct("<QIB3x")
_NAMES = {0: "instructions", 1: "input", 2: "parameters"}

Wires = Sequence[Sequence[bytearray | None]]


class Pipes:
    """Bulk and interrupt endpoints of a running stick.

    One read always stands on every IN endpoint, also between programs: on 0x81 for one packet, behind all reads that
    a program needs. Whatever nobody asked for ends up there and is found before the next program is sent.
    """

    def __init__(self, link: Link, registers: Registers, speed: str, stall_timeout_s: float) -> None:
        """``stall_timeout_s``: a run fails when no transfer ends for so long."""
        self.link, self._registers = link, registers
        self.packet_bytes, self._whole = OUTFEED_CHUNK_BYTES[speed], speed != "high"
        self.stall_timeout_s = stall_timeout_s
        self.reads: deque[tuple[Transfer, int]] = deque()
        self.writes: deque[tuple[Transfer, int]] = deque()
        self._event: Transfer | None = None
        self._watch: Transfer | None = None
        self._waits_for: Callable[[], str] = str

    def begin(self, prepared: Prepared, wires: Wires, buffers: dict[str, Buffer]) -> Iterator[bool]:
        """Sends what can be sent of a program without waiting; ``finish`` has to follow with what is returned.

        ``wires`` and ``buffers`` are the program's, see ``Prepared``; an input that is not there yet is waited for, and
        everything behind it, until it is put into ``buffers``. Raises TransferFailed; after any exception, also
        of ``finish``, ``abandon`` must be called before anything else.
        """
        self._arm()
        self.link.handle.wait(0.0)
        self._check_quiet("before the program was sent: an earlier program sent more than it has")
        steps = self._on_request(prepared, wires, buffers) if prepared.places else self._steps(prepared, wires, buffers)
        next(steps, None)
        return steps

    def finish(self, steps: Iterator[bool]) -> None:
        """Waits until a program has ended and its outputs are in the buffers; raises TransferFailed."""
        clock = self.link.clock
        deadline = self.link.deadline(self.stall_timeout_s)
        for progress in steps:
            if progress:
                deadline = self.link.deadline(self.stall_timeout_s)
            left = deadline - clock.now()
            if left <= 0:
                self.link.counters.faults["timeout"] += 1
                raise TransferFailed(
                    f"nothing happened for {self.stall_timeout_s:g} s while waiting for {self._waits_for()}"
                )
            self.link.handle.wait(left)
        self._check_quiet("beyond the program's outputs and events")

    def abandon(self) -> None:
        """Cancels everything that is under way."""
        standing = [transfer for transfer in (self._event, self._watch) if transfer is not None]
        self._event = self._watch = None
        transfers = [*(read for read, _ in self.reads), *(write for write, _ in self.writes), *standing]
        self.reads.clear()
        self.writes.clear()
        self.link.abandon(transfers)

    def drain(self) -> int:
        """Reads what an earlier user of the stick has left in its IN pipes; returns the number of bytes."""
        total = 0
        for endpoint in (OUTPUTS, EVENTS, INTERRUPTS):
            for _ in range(DRAIN_READS):
                transfer = self.link.handle.submit_in(endpoint, 1024)
                answered = self.link.wait_for(transfer, DRAIN_TIMEOUT_S)
                self.link.abandon([transfer])
                total += transfer.actual
                if transfer.status == "gone":
                    raise StickGone("the stick left the bus while its pipes were drained; plug it in again")
                if not answered:
                    break
        return total

    def submit_read(self, size: int, expected: int) -> None:
        """Queues a read of outputs; ``expected`` bytes of it are an output's."""
        self.link.counters.transfers += 1
        self.reads.append((self.link.handle.submit_in(OUTPUTS, size), expected))

    def submit_write(self, data: memoryview) -> None:
        """Queues a write."""
        self.link.counters.transfers += 1
        self.writes.append((self.link.handle.submit_out(OUT, data), len(data)))

    def failed(self, transfer: Transfer, doing: str) -> None:
        """Raises what a transfer's status means."""
        self.link.counters.faults[f"{'in' if transfer.endpoint & 0x80 else 'out'} {transfer.status}"] += 1
        if transfer.status == "gone":
            raise StickGone(f"the stick left the bus while {doing}; plug it in again")
        if transfer.status == "stall":  # the pipe refuses everything until this, also after the stick is re-opened
            with suppress(OSError):
                self.link.handle.clear_halt(transfer.endpoint)
        raise TransferFailed(
            f"{doing}: the transfer on endpoint {transfer.endpoint:#04x} ended with {transfer.status!r}"
        )

    def _arm(self) -> None:
        if not self.reads:
            self.submit_read(self.packet_bytes, 0)
        if self._event is None:
            self.link.counters.transfers += 1
            self._event = self.link.handle.submit_in(EVENTS, EVENT_BYTES)
        if self._watch is None:
            self._watch = self.link.handle.submit_in(INTERRUPTS, INTERRUPT_BYTES)

    def _check_quiet(self, when: str) -> None:
        read, _ = self.reads[0]
        if read.status != "pending":
            self.reads.popleft()
            if read.status != "done":
                self.failed(read, "listening for output")
            if read.actual:
                self.link.counters.faults["in extra"] += 1
                raise TransferFailed(f"{read.actual} bytes of output came {when}")
        if self._event is not None and self._event.status != "pending":
            if self._event.status != "done":
                self.failed(self._event, "listening for events")
            self.link.counters.faults["event extra"] += 1
            raise TransferFailed(f"the event {bytes(self._event.data).hex()} came {when}")
        self._arm()

    def _steps(self, prepared: Prepared, wires: Wires, buffers: dict[str, Buffer]) -> Iterator[bool]:
        for segment, wire in zip(prepared.segments, wires, strict=True):
            yield from self._segment(prepared, segment, wire, buffers)

    def _on_request(self, prepared: Prepared, wires: Wires, buffers: dict[str, Buffer]) -> Iterator[bool]:
        """A program that asks for its transfers by events, each sent or read before the next is looked at."""
        self._registers.write("descr_ep", ALL_EVENTS)
        yield from self._segment(prepared, prepared.segments[0], wires[0], buffers)
        while (request := (yield from self._next_event("a request of the program")))[2] != END_TAG:
            address, size, tag = request
            if tag not in (1, 2, 3):
                raise self._bad_event(f"tag {tag}", "1 to 4")
            segment = prepared.transfer(tag, address, size)
            yield from self._segment(prepared, segment, [None] * len(segment.outs), buffers)
        self._registers.write("descr_ep", INTERRUPT_EVENTS)

    def _segment(
        self, prepared: Prepared, segment: Segment, wires: Sequence[bytearray | None], buffers: dict[str, Buffer]
    ) -> Iterator[bool]:
        """Yields when it has to wait, True if something has moved since it last did."""
        reader = _Reader(self, segment.ins, self._whole and not prepared.in_pieces)
        writer = _Writer(self, segment.outs, wires, buffers)
        reader.ask()
        self._waits_for = lambda: " and ".join(filter(None, [writer.waits_for, reader.waits_for]))
        while True:
            progress = writer.send() | reader.take()
            reader.ask()
            self._check_interrupt()
            if writer.done and reader.done:
                break
            yield progress
        prepared.in_pieces |= self._whole and not reader.whole
        self.link.counters.output_bytes += reader.total
        _deliver(segment.ins, reader.received, buffers)
        for number in segment.events:
            tag = (yield from self._next_event(f"the event of interrupt {number}"))[2]
            if tag != END_TAG + number:
                raise self._bad_event(f"tag {tag}", f"{END_TAG + number}")

    def _next_event(self, what: str) -> Generator[bool, None, tuple[int, int, int]]:
        """(address, size, tag) of the next event."""
        self._waits_for, progress = lambda: what, True
        assert self._event is not None
        while self._event.status == "pending":
            self._check_interrupt()
            yield progress
            progress = False
        if self._event.status != "done":
            self.failed(self._event, f"waiting for {what}")
        packet = bytes(self._event.data)
        if len(packet) != EVENT_BYTES:
            raise self._bad_event(packet.hex() or "empty", f"{EVENT_BYTES} bytes")
        self._event = None
        self._arm()
        address, size, tag = _EVENT.unpack(packet)
        return address, size, tag & 0xF

    def _bad_event(self, found: str, expected: str) -> TransferFailed:
        self.link.counters.faults["event"] += 1
        return TransferFailed(f"an event with {found} came, {expected} was expected")

    def _check_interrupt(self) -> None:
        """Endpoint 0x83: a fatal error ends the run, the warnings of the four top-level interrupts are counted."""
        watch = self._watch
        if watch is None or watch.status == "pending":
            return
        self._watch = None
        if watch.status != "done":
            self.failed(watch, "listening for fatal errors")
        word = int.from_bytes(bytes(watch.data), "little")
        if word & 1:
            status = self._registers.read("hib_error_status")
            first = self._registers.read("hib_first_error_status")
            if status:
                self.link.counters.faults["fatal error"] += 1
                raise ChipFault(
                    f"the chip reports a fatal error: hib_error_status {status:#x}, the first was {first:#x} (bits in "
                    "docs/usb.md)"
                )
            self._registers.write("fatal_err_int_status", 0)
        for number in range(4):
            if word >> 1 + number & 1:
                self.link.counters.faults[f"top-level interrupt {number}"] += 1
                self._registers.write(f"top_level_int_{number}_status", 0)
        self._arm()


def _deliver(ins: Sequence[In], received: bytearray, buffers: dict[str, Buffer]) -> None:
    view, position = memoryview(received), 0
    for part in ins:
        target = memoryview(buffers[part.name])
        data = view[position : position + part.size]
        if part.size == len(target):
            buffers[part.name] = bytes(data)
        else:
            target[part.offset : part.offset + part.size] = data
        position += part.size


class _Reader:
    """Collects the outputs of one segment as one stream of bytes.

    At first there is one read per output. The chip ends every DMA of its own with a short packet; an output that
    takes several of them, like every output of a USB 2 link, is read packet by packet with several reads queued.
    """

    def __init__(self, pipes: Pipes, ins: Sequence[In], whole: bool) -> None:
        self.received = bytearray()
        self.total = sum(part.size for part in ins)
        self.whole = whole
        self._pipes = pipes
        self._to_ask: deque[int] = deque()
        if ins:  # the standing read takes the first packet
            standing, first = pipes.reads[0][0], min(ins[0].size, pipes.packet_bytes)
            pipes.reads[0] = standing, first
            self._to_ask.extend(filter(None, [ins[0].size - first, *(part.size for part in ins[1:])]))
            self._to_ask.append(0)

    @property
    def done(self) -> bool:
        return len(self.received) >= self.total

    @property
    def waits_for(self) -> str:
        return "" if self.done else f"output ({len(self.received)} of {self.total} bytes came)"

    def ask(self) -> None:
        """Queues reads; the last of them is the next standing one."""
        reads, packet = self._pipes.reads, self._pipes.packet_bytes
        if self.whole:
            while self._to_ask and len(reads) < IN_DEPTH:
                size = self._to_ask.popleft()
                self._pipes.submit_read(max(-(-size // packet), 1) * packet, size)
            return
        wanted = min(-(-(self.total - len(self.received)) // packet) + 1, IN_DEPTH)
        while len(reads) < wanted:
            self._pipes.submit_read(packet, packet)

    def take(self) -> bool:
        """Moves what has arrived into ``received``; True when there was something."""
        before, reads = len(self.received), self._pipes.reads
        while not self.done and reads and reads[0][0].status != "pending":
            transfer, expected = reads.popleft()
            self._append(transfer)
            if self.whole and transfer.actual < expected:
                self._fall_back()
        if len(self.received) > self.total:
            self._pipes.link.counters.faults["in extra"] += 1
            raise TransferFailed(f"the stick sent {len(self.received)} bytes of output, the program has {self.total}")
        return len(self.received) > before

    def _append(self, transfer: Transfer) -> None:
        if transfer.status not in ("done", "cancelled"):
            self._pipes.failed(transfer, f"reading output bytes {len(self.received)} of {self.total}")
        self.received += memoryview(transfer.data)[: transfer.actual]

    def _fall_back(self) -> None:
        # Later reads were sized for later outputs. Cancelling keeps what they hold, and order is order of submission.
        self.whole = False
        rest = [transfer for transfer, _ in self._pipes.reads]
        self._pipes.reads.clear()
        self._pipes.link.abandon(rest)
        for transfer in rest:
            self._append(transfer)


class _Writer:
    """Sends the DMAs of one segment in order: header and payload together, never two DMAs in one transfer."""

    def __init__(
        self, pipes: Pipes, outs: Sequence[Out], wires: Sequence[bytearray | None], buffers: Mapping[str, Buffer]
    ) -> None:
        self._pipes, self._buffers = pipes, buffers
        self._outs = deque(zip(outs, wires, strict=True))
        self._pieces: deque[tuple[Out, memoryview]] = deque()
        self._sending: deque[Out] = deque()

    @property
    def done(self) -> bool:
        return not (self._outs or self._pieces or self._sending)

    @property
    def doing(self) -> str:
        """The DMA that is under way, in words."""
        out = self._sending[0]
        return f"{_NAMES[out.tag]} {out.name} ({out.size} bytes)"

    @property
    def waits_for(self) -> str:
        if self._sending:
            return f"taking {self.doing}"
        return f"input {self._outs[0][0].name!r} of the caller" if self._outs else ""

    def send(self) -> bool:
        """Checks what has been taken and queues more; True when something was taken."""
        progress, writes = False, self._pipes.writes
        while writes and writes[0][0].status != "pending":
            transfer, size = writes.popleft()
            if transfer.status != "done":
                self._pipes.failed(transfer, f"sending {self.doing}")
            if transfer.actual != size:
                self._pipes.link.counters.faults["out short"] += 1
                raise TransferFailed(f"sending {self.doing}: the stick took {transfer.actual} of {size} bytes")
            self._sending.popleft()
            progress = True
        while len(writes) < OUT_DEPTH and (self._pieces or self._outs):
            if not self._pieces:
                out, wire = self._outs[0]
                if wire is None and out.data is None and out.name not in self._buffers:
                    break
                self._outs.popleft()
                view = memoryview(wire if wire is not None else out.on_wire(self._buffers))
                cuts = range(0, len(view), OUT_TRANSFER_BYTES)
                self._pieces.extend((out, view[i : i + OUT_TRANSFER_BYTES]) for i in cuts)
                self._pipes.link.counters.sent(out.tag, out.size)
            out, piece = self._pieces.popleft()
            self._sending.append(out)
            self._pipes.submit_write(piece)
        return progress
