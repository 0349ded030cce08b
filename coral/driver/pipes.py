"""The data pipes: one program's transfers, segment by segment. Source: docs/usb.md, docs/driver.md.

Rule of the deadlock: nothing that follows an output in the program is sent before that output has been read whole.
Reads are queued before the writes of their segment; that is allowed and wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from coral.driver.bringup import OUTFEED_CHUNK_BYTES
from coral.driver.errors import ChipFault, StickGone, TransferFailed
from coral.driver.link import Link
from coral.driver.registers import Registers
from coral.driver.segments import In, Out, Prepared, Segment
from coral.driver.transport import Buffer, Transfer

OUT, OUTPUTS, EVENTS, INTERRUPTS = 0x01, 0x81, 0x82, 0x83
OUT_TRANSFER_BYTES = 1 << 20
"""A multiple of every packet size, so that no short packet falls inside a DMA."""
OUT_DEPTH, IN_DEPTH = 4, 16
EVENT_BYTES, INTERRUPT_BYTES = 16, 4
DRAIN_TIMEOUT_S = 0.05
DRAIN_READS = 4096
_NAMES = {0: "instructions", 1: "input", 2: "parameters"}


class _Reader:
    """Collects the outputs of one segment as one stream of bytes.

    At first there is one read per output. The chip ends every DMA of its own with a short packet; an output that
    takes several of them, like every output of a USB 2 link, is read packet by packet with several reads queued.
    """

    def __init__(self, pipes: Pipes, ins: Sequence[In], packet_bytes: int, whole: bool) -> None:
        self.received = bytearray()
        self.total = sum(part.size for part in ins)
        self.whole = whole
        self._pipes, self._packet_bytes = pipes, packet_bytes
        self._to_ask = deque(part.size for part in ins)
        self._asked: deque[tuple[Transfer, int]] = deque()

    @property
    def done(self) -> bool:
        return len(self.received) >= self.total

    def ask(self) -> None:
        """Queues reads."""
        packet = self._packet_bytes
        while self.whole and self._to_ask and len(self._asked) < IN_DEPTH:
            size = self._to_ask.popleft()
            self._asked.append((self._pipes.read(OUTPUTS, -(-size // packet) * packet), size))
        needed = min(-(-(self.total - len(self.received)) // packet), IN_DEPTH)
        while not self.whole and len(self._asked) < needed:
            self._asked.append((self._pipes.read(OUTPUTS, packet), packet))

    def take(self) -> bool:
        """Moves what has arrived into ``received``; True when there was something."""
        progress = False
        while self._asked and self._asked[0][0].status != "pending":
            transfer, expected = self._asked.popleft()
            progress = True
            self._append(transfer)
            if self.whole and transfer.actual < expected:
                self._fall_back()
        if len(self.received) > self.total:
            raise TransferFailed(f"the stick sent {len(self.received)} bytes of output, the program has {self.total}")
        return progress

    def finish(self) -> None:
        """Ends reads that are left over."""
        rest = [transfer for transfer, _ in self._asked]
        self._asked.clear()
        self._pipes.link.abandon(rest)
        extra = sum(transfer.actual for transfer in rest)
        if extra:
            raise TransferFailed(f"the stick sent {extra} bytes more than the {self.total} bytes of output")

    def _append(self, transfer: Transfer) -> None:
        if transfer.status not in ("done", "cancelled"):
            self._pipes.failed(transfer, f"reading output bytes {len(self.received)} of {self.total}")
        self.received += memoryview(transfer.data)[: transfer.actual]

    def _fall_back(self) -> None:
        # Later reads were sized for later outputs. Cancelling keeps what they hold, and order is order of submission.
        self.whole = False
        rest = [transfer for transfer, _ in self._asked]
        self._asked.clear()
        self._pipes.link.abandon(rest)
        for transfer in rest:
            self._append(transfer)


class Pipes:
    """Bulk and interrupt endpoints of a running stick."""

    def __init__(self, link: Link, registers: Registers, speed: str, stall_timeout_s: float) -> None:
        """``stall_timeout_s``: a run fails when no transfer ends for so long."""
        self.link, self._registers = link, registers
        self._packet_bytes, self._whole = OUTFEED_CHUNK_BYTES[speed], speed != "high"
        self._stall_timeout_s = stall_timeout_s
        self._in_flight: list[Transfer] = []
        self._watch: Transfer | None = None

    def run(self, prepared: Prepared, inputs: Mapping[str, Buffer]) -> dict[str, bytes]:
        """Runs a program and returns the padded bytes of every output; raises TransferFailed.

        After any exception ``abandon`` must be called before anything else.
        """
        buffers = prepared.buffers(inputs)
        if self._watch is None:
            self._watch = self.link.handle.submit_in(INTERRUPTS, INTERRUPT_BYTES)
        for segment in prepared.segments:
            self._segment(prepared, segment, buffers)
        return {name: bytes(buffers[name]) for name in prepared.output_bytes}

    def abandon(self) -> None:
        """Cancels everything that is under way."""
        watch = [self._watch] if self._watch is not None else []
        self._watch = None
        self.link.abandon([*self._in_flight, *watch])
        self._in_flight.clear()

    def drain(self) -> int:
        """Reads what an earlier user of the stick has left in its IN pipes; returns the number of bytes."""
        total = 0
        for endpoint in (OUTPUTS, EVENTS, INTERRUPTS):
            for _ in range(DRAIN_READS):
                transfer = self.link.handle.submit_in(endpoint, 1024)
                deadline = self.link.clock.now() + DRAIN_TIMEOUT_S
                while transfer.status == "pending" and (left := deadline - self.link.clock.now()) > 0:
                    self.link.handle.wait(left)
                silent = transfer.status == "pending"
                self.link.abandon([transfer])
                total += transfer.actual
                if transfer.status == "gone":
                    raise StickGone("the stick left the bus while its pipes were drained; plug it in again")
                if silent:
                    break
        return total

    def read(self, endpoint: int, size: int) -> Transfer:
        """Queues one read that ``abandon`` knows of."""
        return self._track(self.link.handle.submit_in(endpoint, size))

    def write(self, data: memoryview) -> Transfer:
        """Queues one write that ``abandon`` knows of."""
        return self._track(self.link.handle.submit_out(OUT, data))

    def failed(self, transfer: Transfer, doing: str) -> None:
        """Raises what a transfer's status means."""
        self.link.counters.faults[f"{'in' if transfer.endpoint & 0x80 else 'out'} {transfer.status}"] += 1
        if transfer.status == "gone":
            raise StickGone(f"the stick left the bus while {doing}; plug it in again")
        raise TransferFailed(
            f"{doing}: the transfer on endpoint {transfer.endpoint:#04x} ended with {transfer.status!r}"
        )

    def _track(self, transfer: Transfer) -> Transfer:
        self._in_flight.append(transfer)
        self.link.counters.transfers += 1
        return transfer

    def _segment(self, prepared: Prepared, segment: Segment, buffers: dict[str, Buffer]) -> None:
        link, clock = self.link, self.link.clock
        reader = _Reader(self, segment.ins, self._packet_bytes, self._whole and not prepared.in_pieces)
        reader.ask()
        events = [(number, self.read(EVENTS, EVENT_BYTES)) for number in segment.events]
        writer = _Writer(self, segment.outs, buffers)
        deadline = clock.now() + self._stall_timeout_s
        reader.take()
        if segment is prepared.segments[0] and (reader.received or any(e.status == "done" for _, e in events)):
            raise TransferFailed("an answer came before the program was sent: an earlier program sent more than it has")
        while True:
            progress = writer.send() | reader.take()
            reader.ask()
            while events and events[0][1].status != "pending":
                self._check_event(*events.pop(0))
                progress = True
            self._check_interrupt()
            if writer.done and reader.done and not events:
                break
            if progress:
                deadline = clock.now() + self._stall_timeout_s
            left = deadline - clock.now()
            if left <= 0:
                self.link.counters.faults["timeout"] += 1
                raise TransferFailed(self._silence(writer, reader, events))
            link.handle.wait(left)
        reader.finish()
        prepared.in_pieces |= self._whole and not reader.whole
        self._in_flight.clear()
        link.counters.output_bytes += reader.total
        self._deliver(segment, reader.received, buffers)

    @staticmethod
    def _deliver(segment: Segment, received: bytearray, buffers: dict[str, Buffer]) -> None:
        view, position = memoryview(received), 0
        for part in segment.ins:
            target = memoryview(buffers[part.name])
            target[part.offset : part.offset + part.size] = view[position : position + part.size]
            position += part.size

    def _silence(self, writer: _Writer, reader: _Reader, events: list[tuple[int, Transfer]]) -> str:
        waiting = [] if writer.done else [f"taking {writer.doing}"]
        if not reader.done:
            waiting.append(f"output ({len(reader.received)} of {reader.total} bytes came)")
        waiting += [f"the event of interrupt {number}" for number, _ in events]
        return f"nothing happened for {self._stall_timeout_s:g} s while waiting for {', '.join(waiting)}"

    def _check_event(self, number: int, transfer: Transfer) -> None:
        if transfer.status != "done":
            self.failed(transfer, f"waiting for interrupt {number}")
        packet = bytes(transfer.data)
        if len(packet) != EVENT_BYTES or packet[12] & 0xF != 4 + number:
            self.link.counters.faults["event"] += 1
            raise TransferFailed(f"event {packet.hex() or 'empty'}: 16 bytes with tag {4 + number} were expected")

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
        self._watch = self.link.handle.submit_in(INTERRUPTS, INTERRUPT_BYTES)


class _Writer:
    """Sends the DMAs of one segment in order: header and payload together, never two DMAs in one transfer."""

    def __init__(self, pipes: Pipes, outs: Sequence[Out], buffers: Mapping[str, Buffer]) -> None:
        self._pipes, self._outs, self._buffers = pipes, deque(outs), buffers
        self._pieces: deque[memoryview] = deque()
        self._sending: deque[tuple[Transfer, int, Out]] = deque()
        self._current: Out | None = None

    @property
    def done(self) -> bool:
        return not (self._outs or self._pieces or self._sending)

    @property
    def doing(self) -> str:
        """The DMA that is under way, in words."""
        out = self._sending[0][2] if self._sending else self._current
        return f"{_NAMES[out.tag]} {out.name} ({out.size} bytes)" if out else "nothing"

    def send(self) -> bool:
        """Checks what has been taken and queues more; True when something was taken."""
        progress = False
        while self._sending and self._sending[0][0].status != "pending":
            transfer, size, _ = self._sending[0]
            if transfer.status != "done":
                self._pipes.failed(transfer, f"sending {self.doing}")
            if transfer.actual != size:
                self._pipes.link.counters.faults["out short"] += 1
                raise TransferFailed(f"sending {self.doing}: the stick took {transfer.actual} of {size} bytes")
            self._sending.popleft()
            progress = True
        while len(self._sending) < OUT_DEPTH and (self._pieces or self._outs):
            if not self._pieces:
                self._current = self._outs.popleft()
                wire = memoryview(self._current.on_wire(self._buffers))
                self._pieces.extend(wire[i : i + OUT_TRANSFER_BYTES] for i in range(0, len(wire), OUT_TRANSFER_BYTES))
                self._pipes.link.counters.sent(self._current.tag, self._current.size)
            piece = self._pieces.popleft()
            assert self._current is not None
            transfer = self._pipes.write(piece)
            self._sending.append((transfer, len(piece), self._current))
        return progress
