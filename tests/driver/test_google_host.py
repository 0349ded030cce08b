"""A host that does on the wire what Google's driver was seen to do (docs/usb.md), against the simulated stick and chip.

libedgetpu itself is not available here (docs/selftest.md, Stick serve, says how to try it). This host has its habits,
which are not our driver's: a port reset before every opening, headers as transfers of their own, the execution program
sent right behind the caching program's parameters, eight reads of one packet always queued, host addresses written into
the instructions.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coral.chip import Chip
from coral.driver.errors import APPLICATION_ID, DFU_ID
from coral.package.program import Base, DmaHint, InstructionHint, InterruptHint, Kind, Program
from coral.stick import Strictness
from driver.bed import Bed
from driver.test_bringup import CLOSE, OPEN, rows
from driver.test_corpus import directly, inputs_for, programs

BLOCK_BYTES, ROM_BYTES = 256, 32768
PIECE_BYTES, READS, IN_FLIGHT = 1 << 20, 8, 3
DEADLINE_S = 600.0
RESET = "W32 1a318 80c50410|R32 1a318 80c5065c|W32 1907c f\nW32 1907c 0|"
"""What is left out of ``OPEN`` when the core sleeps already."""


class GoogleHost:
    """One opening of the stick; ``run`` takes programs as they are queued."""

    def __init__(self, bed: Bed, packet_bytes: int = 1024) -> None:
        self.bed, self.packet_bytes = bed, packet_bytes
        (device,) = bed.libusb().devices()
        if (device.vendor_id, device.product_id) == DFU_ID:
            self.device, self.handle = device, device.open()
            self.boot(bed.firmware)
        self.enter(APPLICATION_ID)
        self.reset()
        self.enter(APPLICATION_ID)
        self.handle.claim(0)
        asleep = int.from_bytes(self.control(0xC0, 1, 0xA318, 1, 4), "little") >> 22 & 3 == 3
        self.replay(OPEN.replace(RESET, "") if asleep else OPEN, exact=not asleep)
        self.reads = deque(self.handle.submit_in(0x81, packet_bytes) for _ in range(READS))
        self.event, self.watch = self.handle.submit_in(0x82, 16), self.handle.submit_in(0x83, 4)
        self.output, self.events = bytearray(), 0

    def enter(self, identity: tuple[int, int]) -> None:
        for _ in range(100):
            for device in self.bed.libusb().devices():
                if (device.vendor_id, device.product_id) == identity:
                    self.device, self.handle = device, device.open()
                    return
            self.bed.sleep(0.05)
        pytest.fail(f"{identity} never came")

    def wait(self, *transfers: Any) -> None:
        until = self.device.clock.now() + DEADLINE_S
        while any(transfer.status == "pending" for transfer in transfers) and self.device.clock.now() < until:
            self.handle.wait(0.05)

    def control(self, *setup: Any) -> bytes:
        transfer = self.handle.submit_control(*setup)
        self.wait(transfer)
        assert transfer.status == "done", setup
        return bytes(transfer.data)

    def reset(self) -> None:
        with suppress(OSError):
            self.handle.reset()
        self.handle.close()

    def boot(self, image: bytes) -> None:
        self.handle.claim(0)
        assert len(self.control(0x80, 6, 0x0100, 0, 18)) == 18
        assert self.control(0x80, 6, 0x0200, 0, 521)
        blocks = [image[at : at + BLOCK_BYTES] for at in range(0, len(image), BLOCK_BYTES)]
        for number, block in enumerate([*blocks, b""]):
            self.control(0x21, 1, number, 0, block)
            status = self.control(0xA1, 3, 0, 0, 6)
            assert (status[0], status[4]) == (0, 5 if block else 2)
        read = b""
        while (block := self.control(0xA1, 2, len(read) // BLOCK_BYTES, 0, BLOCK_BYTES)) and len(read) < ROM_BYTES:
            read += block
            if len(block) < BLOCK_BYTES:
                break
        assert read[: len(image)] == image
        self.reset()

    def replay(self, log: str, exact: bool = True) -> None:
        """Register accesses in the recorded order; ``exact``: every read gives what was recorded."""
        for row in rows(log):
            operation, offset, value = row[0], int(row.split()[1], 16), int(row.split()[2], 16)
            size = int(row[1:3]) // 8
            setup = (int(size == 4), offset & 0xFFFF, offset >> 16)
            if operation == "W":
                self.control(0x40, *setup, value.to_bytes(size, "little"))
            else:
                read = int.from_bytes(self.control(0xC0, *setup, size), "little")
                assert read == value or not exact, row

    def run(self, *queue: tuple[Program, dict[str, bytes]]) -> dict[str, bytes]:
        """All requests in hint order over the programs; the outputs of the last."""
        requests = [request for program, inputs in queue for request in self.requests(program, inputs)]
        before, reading = 0, 0
        self.output, self.events = bytearray(), 0
        flight: deque[Any] = deque()
        for kind, *what in requests:
            if kind == "in":
                reading += what[0]
            elif kind == "out":
                self.until(lambda wanted=reading: len(self.output) >= wanted)
                tag, data = what
                pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
                for piece in [struct.pack("<IB3x", len(data), tag), *pieces]:
                    self.until(lambda: sum(sent.status == "pending" for sent in flight) < IN_FLIGHT)
                    flight.append(self.handle.submit_out(0x01, bytearray(piece)))
                self.until(lambda: all(sent.status != "pending" for sent in flight))  # before the next DMA's header
                assert all(sent.status == "done" for sent in flight)
                flight.clear()
            else:
                before += 1
        self.until(lambda: len(self.output) >= reading and self.events >= before)
        assert (len(self.output), self.events) == (reading, before)
        return self.sorted_out(queue[-1][0])

    def requests(self, program: Program, inputs: dict[str, bytes]) -> Iterator[tuple[Any, ...]]:
        for hint in program.hints:
            match hint:
                case InstructionHint(chunk):
                    bitstream = program.bitstreams[chunk]
                    words = int.from_bytes(bitstream.data, "little")
                    for relocation in bitstream.relocations:
                        words &= ~(0xFFFFFFFF << relocation.bit)
                        words |= random.Random(relocation.bit).getrandbits(32) << relocation.bit
                    yield "out", 0, words.to_bytes(len(bitstream.data), "little")
                case DmaHint(Base.INPUT, offset, size, name):
                    yield "out", 1, inputs[name][offset : offset + size]
                case DmaHint(Base.PARAMETER, offset, size):
                    yield "out", 2, program.parameters[offset : offset + size]
                case DmaHint():
                    yield "in", hint.size
                case InterruptHint():
                    yield ("event",)

    def sorted_out(self, program: Program) -> dict[str, bytes]:
        outputs: dict[str, bytes] = {}
        left = bytes(self.output)
        for hint in program.hints:
            if isinstance(hint, DmaHint) and hint.out:
                outputs[hint.name] = outputs.get(hint.name, b"") + left[: hint.size]
                left = left[hint.size :]
        return outputs

    def until(self, done: Any) -> None:
        """Takes what comes, and queues every read again, until ``done``."""
        end = self.device.clock.now() + DEADLINE_S
        while not done():
            assert self.device.clock.now() < end, "nothing comes any more"
            self.handle.wait(0.05)
            while self.reads[0].status != "pending":
                read = self.reads.popleft()
                assert read.status == "done"
                self.output += bytes(read.data)
                self.reads.append(self.handle.submit_in(0x81, self.packet_bytes))
            if self.event.status != "pending":
                assert bytes(self.event.data) == bytes(12) + b"\4\0\0\0"
                self.events += 1
                self.event = self.handle.submit_in(0x82, 16)
            assert self.watch.status == "pending"

    def close(self) -> None:
        transfers = [*self.reads, self.event, self.watch]
        for transfer in transfers:
            self.handle.cancel(transfer)
        self.wait(*transfers)
        assert {transfer.status for transfer in transfers} == {"cancelled"}
        self.replay(CLOSE)
        self.handle.release(0)
        self.handle.close()


@pytest.mark.parametrize(
    ("name", "openings", "calls"),
    [
        ("dense/dense_256", 2, 2),
        pytest.param("robotics/gabor_64x64_7k_4o_2s", 2, 2, marks=pytest.mark.waits),
        pytest.param("sequence/split_concat", 2, 2, marks=pytest.mark.waits),
        pytest.param("vision/movenet_single_pose_lightning_ptq", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_googles_habits_end_in_right_results(bed: Bed, corpus: Path, name: str, openings: int, calls: int) -> None:
    """Boot, inferences (the caching program's event is not waited for), close; the same in another opening."""
    found = programs(corpus, name)
    caching, execution = found[Kind.PARAMETER_CACHING], found[Kind.EXECUTION_ONLY]
    bed.bus(chip=Chip, mode=Strictness.WEDGE, reenumeration_s=0.1)
    for opening in range(openings):
        host = GoogleHost(bed)
        for call in range(calls):
            inputs = inputs_for(execution, 2 * opening + call)
            uploads = [(caching, {})] if call == 0 else []
            assert host.run(*uploads, (execution, inputs)) == directly(found, inputs)
        host.close()
    assert not bed.stick.wedged


def test_reads_on_a_usb_2_link_are_of_256_bytes(bed: Bed, corpus: Path) -> None:
    found = programs(corpus, "dense/dense_1024")
    inputs = inputs_for(found[Kind.EXECUTION_ONLY])
    bed.bus(chip=Chip, mode=Strictness.WEDGE, reenumeration_s=0.1, speed="high")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "OPEN", OPEN.replace("W64 4c058 80", "W64 4c058 20"))
        host = GoogleHost(bed, packet_bytes=256)
    outputs = host.run((found[Kind.PARAMETER_CACHING], {}), (found[Kind.EXECUTION_ONLY], inputs))
    host.close()
    assert outputs == directly(found, inputs)
