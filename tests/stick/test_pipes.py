"""Data pipes from a bare host's view: packets, events, order, mistakes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral.stick import (
    DeadlockViolation,
    DmaMismatch,
    NotStarted,
    ProtocolError,
    SoftwareStick,
    StickBus,
    Strictness,
)
from stick.fake_chip import FakeChip, ScriptError, output_bytes, script
from stick.wire import Wire, dma

EVENT = bytes(12) + b"\4\0\0\0"


def wire(**options) -> Wire:
    chunk = options.pop("chunk_bytes", 1024)
    return Wire.started(SoftwareStick(firmware_required=False, chip=FakeChip(), **options), chunk_bytes=chunk)


def test_a_program_from_instructions_to_event(running: Wire) -> None:
    event, output = running.read(16, 0x82), running.read(2048)
    running.out(dma(0, script("A100", "P64", "O1500", "!")))
    running.out(dma(1, b"i" * 100))
    running.settle()
    assert (event.status, output.status) == ("pending", "pending")
    running.out(dma(2, b"p" * 64))
    running.settle()
    assert output.data == output_bytes(b"", b"i" * 100 + b"p" * 64, 0, 1500)
    assert event.data == EVENT


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    link=st.sampled_from([("super", 1024), ("high", 256), ("super", 256)]),
    zero=st.booleans(),
)
def test_packets(sizes: list[int], link: tuple[str, int], zero: bool) -> None:
    """Packets of the chunk's length, one short at the end of every DMA of the device, none shared by two DMAs."""
    speed, chunk = link
    subject = wire(speed=speed, chunk_bytes=chunk, zero_length_packets=zero)
    subject.out(dma(0, script(*(f"O{size}" for size in sizes))))
    subject.settle()
    packets = []
    while (packet := subject.stick.bulk_in(0x81, 1024)) is not None:
        packets.append(packet)
    expected = []
    for index, size in enumerate(sizes):
        data, whole = output_bytes(b"", b"", index, size), 1024 if speed == "super" else 512
        expected += [data[start : start + chunk] for start in range(0, size, chunk)]
        if zero and size % whole == 0:
            expected.append(b"")
    assert packets == expected


def test_transfers_end_full_or_short_and_stay_pending_between(running: Wire) -> None:
    running.out(dma(0, script("O2048", "O100")))
    running.settle()
    first, second, third = running.read(1024), running.read(4096), running.read(1024)
    assert (first.status, first.actual) == ("done", 1024)
    assert (second.status, second.actual) == ("done", 1024 + 100), "a full packet does not end a transfer"
    assert (third.status, third.actual) == ("pending", 0)


def test_zero_length_packet_ends_a_transfer() -> None:
    subject = wire(zero_length_packets=True)
    subject.out(dma(0, script("O1024")))
    subject.settle()
    longer, next_one = subject.read(2048), subject.read(2048)
    assert (longer.status, longer.actual, next_one.status) == ("done", 1024, "pending")


def test_a_buffer_smaller_than_the_packet_overflows(running: Wire) -> None:
    running.out(dma(0, script("O100", "O7")))
    running.settle()
    small, after = running.read(64), running.read(64)
    assert (small.status, small.actual) == ("overflow", 64)
    assert after.data == output_bytes(b"", b"", 1, 7)


def test_a_cancelled_read_keeps_what_it_has_received(running: Wire) -> None:
    read = running.read(4096)
    running.out(dma(0, script("O1024")))
    running.settle()
    assert (read.status, read.actual) == ("pending", 1024)
    running.handle.cancel(read)
    assert (read.status, bytes(read.data)) == ("cancelled", output_bytes(b"", b"", 0, 1024))


def test_next_program_may_be_queued_while_the_first_waits(running: Wire) -> None:
    # Google's driver sends instructions and input of the second program before the parameters of the first
    running.out(dma(0, script("P64", "!")))
    running.out(dma(0, script("A32", "O8", "!")))
    running.out(dma(1, b"i" * 32))
    running.settle()
    running.out(dma(2, b"p" * 64))
    running.settle()
    assert running.read(1024).data == output_bytes(b"", b"i" * 32, 0, 8)
    assert [running.read(16, 0x82).data for _ in range(2)] == [EVENT, EVENT]


def test_descriptors_do_not_block_the_core(running: Wire) -> None:
    running.out(dma(0, script("a32", "p64", "W", "W", "O8", "!")))
    running.out(dma(2, b"p" * 64))
    running.settle()
    running.out(dma(1, b"i" * 32))
    running.settle()
    assert running.read(1024).data == output_bytes(b"", b"i" * 32 + b"p" * 64, 0, 8)


def test_chunks_of_one_program(running: Wire) -> None:
    running.out(dma(0, script("A32", "N")))
    running.out(dma(0, script("O8", "!")))
    running.out(dma(1, b"i" * 32))
    running.settle()
    assert running.read(1024).data == output_bytes(b"", b"i" * 32, 0, 8)


def test_descriptor_events(running: Wire) -> None:
    running.write64(0x4C148, 0xFF)
    running.out(dma(0, script("A32", "O8", "!")))
    running.out(dma(1, b"i" * 32))
    running.settle()
    events = [running.read(16, 0x82).data for _ in range(3)]
    tags = [(event[12], int.from_bytes(event[8:12], "little")) for event in events]
    assert tags == [(1, 32), (3, 8), (4, 0)]


def test_interrupt_words(running: Wire) -> None:
    read = running.read(4, 0x83)
    assert read.status == "pending"
    running.stick.interrupt(1)
    running.settle()
    assert read.data == b"\1\0\0\0"


def movenet_like(subject: Wire, *, read_first: bool) -> None:
    subject.out(dma(0, script("A32", "O3000", "O8", "P64", "O16", "!")))
    subject.out(dma(1, b"i" * 32))
    if read_first:
        subject.settle()
        assert subject.read(4096).actual == 3000
        assert subject.read(1024).actual == 8
    subject.out(dma(2, b"p" * 64))
    subject.settle()


def test_a_dma_sent_before_an_earlier_output_was_read_is_the_deadlock(running: Wire) -> None:
    message = r"parameters \(tag 2, 64 bytes\) while 3000 of the 3000 bytes of an output DMA"
    with pytest.raises(DeadlockViolation, match=message):
        movenet_like(running, read_first=False)
    assert running.read(16, 0x82).status == "pending", "the chip stands still"


def test_reading_the_outputs_first_is_right(running: Wire) -> None:
    movenet_like(running, read_first=True)
    assert running.read(1024).data == output_bytes(b"", b"i" * 32 + b"p" * 64, 2, 16)


def test_partly_read_outputs_count_as_unread(running: Wire) -> None:
    running.out(dma(0, script("A32", "O3000", "P64", "!")))
    running.out(dma(1, b"i" * 32))
    running.settle()
    assert running.read(1024).actual == 1024
    running.out(dma(2, b"p" * 64))
    with pytest.raises(DeadlockViolation, match="1976 of the 3000 bytes"):
        running.settle()


def test_reads_that_are_only_queued_do_not_count_but_their_data_does(running: Wire) -> None:
    reads = [running.read(1024) for _ in range(3)]
    running.out(dma(0, script("A32", "O2000", "P64", "!")))
    running.out(dma(1, b"i" * 32))
    running.settle()
    assert [read.status for read in reads] == ["done", "done", "pending"]
    running.out(dma(2, b"p" * 64))
    running.settle()
    assert running.read(16, 0x82).data == EVENT


def test_an_output_that_the_program_orders_later_does_not_count(running: Wire) -> None:
    # both inputs are asked for before the output, so the host may send the second while the output is unread
    running.out(dma(0, script("a32", "a16", "W", "O8", "W", "!")))
    running.out(dma(1, b"i" * 32))
    running.settle()
    running.out(dma(1, b"j" * 16))
    running.settle()
    assert running.read(16, 0x82).data == EVENT


def test_two_programs_without_reading_between_is_the_deadlock(running: Wire) -> None:
    for _ in range(2):
        running.out(dma(0, script("A32", "O8", "!")))
        running.out(dma(1, b"i" * 32))
    with pytest.raises(DeadlockViolation, match=r"instructions \(tag 0, 48 bytes\)"):
        running.settle()


def test_verdict_does_not_depend_on_when_the_chip_runs() -> None:
    for eager in (False, True):
        subject = wire()
        subject.out(dma(0, script("A32", "O8", "P64", "!")))
        subject.out(dma(1, b"i" * 32))
        if eager:
            subject.settle()
        subject.out(dma(2, b"p" * 64))
        with pytest.raises(DeadlockViolation, match="8 of the 8 bytes"):
            subject.settle()


def test_wedge_mode_falls_silent_and_lenient_mode_goes_on() -> None:
    silent = wire(mode=Strictness.WEDGE)
    movenet_like(silent, read_first=False)
    assert silent.stick.wedged
    assert "DeadlockViolation" in silent.stick.log[-1]
    assert silent.control(0xC0, 1, 0xA30C, 1, 4).status == "pending"
    lenient = wire(mode=Strictness.LENIENT)
    movenet_like(lenient, read_first=False)
    assert "DeadlockViolation" in lenient.stick.log[-1]
    assert lenient.read(16, 0x82).data == EVENT


def test_lengths_must_be_what_the_program_asks_for(running: Wire) -> None:
    running.out(dma(0, script("A32", "!")))
    running.out(dma(1, b"i" * 33))
    with pytest.raises(DmaMismatch, match=r"asks for 32 bytes of tag 1, the host sent input \(tag 1, 33 bytes\)"):
        running.settle()


def test_two_dmas_in_one_transfer(running: Wire) -> None:
    running.out(dma(0, script("A32", "!")) + dma(1, b"i" * 32))
    with pytest.raises(ProtocolError, match="two DMAs in one transfer"):
        running.settle()


def test_a_program_needs_its_units_started() -> None:
    subject = wire()
    subject.write64(0x400C0, 0)
    subject.out(dma(0, script("!")))
    with pytest.raises(NotStarted, match="op"):
        subject.settle()
    halted = wire()
    halted.write64(0x44018, 2)
    halted.out(dma(0, script("!")))
    halted.settle()
    event = halted.read(16, 0x82)
    assert event.status == "pending", "a halted scalar core runs nothing"
    halted.write64(0x44018, 1)
    halted.settle()
    assert event.data == EVENT


@pytest.mark.parametrize("sizes", [[16384, 8], [8, 16384], [40000]])
def test_more_than_16_kib_for_a_halted_core(sizes: list[int]) -> None:
    running = wire()
    for size in sizes:
        running.out(dma(1, bytes(size)))
    running.settle()
    halted = wire()
    halted.write64(0x44018, 2)
    halted.out(dma(1, bytes(16384)))
    halted.settle()
    halted = wire()
    halted.write64(0x44018, 2)
    for size in sizes:
        halted.out(dma(1, bytes(size)))
    with pytest.raises(ProtocolError, match="more than 16384 bytes were sent while the scalar core does not run"):
        halted.settle()
    wedging = wire(mode=Strictness.WEDGE)
    wedging.write64(0x44018, 2)
    for size in sizes:
        wedging.out(dma(1, bytes(size)))
    wedging.settle()
    assert wedging.stick.wedged


def test_errors_of_the_chip_reach_the_caller_and_a_chip_reset_heals(running: Wire) -> None:
    running.out(dma(0, script("X")))
    with pytest.raises(ScriptError, match="tile 3, row 17"):
        running.settle()
    running.out(dma(0, script("!")))
    running.settle()
    assert running.read(16, 0x82).status == "pending", "the chip stands still until it is reset"
    running.write32(0x1A318, 0x00C50404)
    again = Wire.started(running.stick)
    again.out(dma(0, script("!")))
    again.settle()
    assert again.read(16, 0x82).data == EVENT


def test_zero_length_dma_sets_the_error_register(running: Wire) -> None:
    running.out(bytes(8))
    with pytest.raises(ProtocolError, match="length 0"):
        running.settle()
    assert running.read64(0x486F0) == running.read64(0x48700) == 1 << 13


def test_bulk_credits_drop_what_is_queued(running: Wire) -> None:
    running.out(dma(0, script("A8", "!")))
    running.out(dma(1, bytes(8))[:12])
    running.write32(0x1907C, 0xF)
    running.write32(0x1907C, 0)
    running.out(dma(0, script("!")))
    running.settle()
    assert running.read(16, 0x82).data == EVENT


def test_pipes_that_do_not_exist_stall(running: Wire) -> None:
    assert running.handle.submit_out(0x02, bytes(8)).status == "stall"
    assert running.handle.submit_in(0x84, 8).status == "stall"


def test_second_opener_is_refused_and_handles_die_with_their_device() -> None:
    bus = StickBus([SoftwareStick(firmware_required=False, chip=FakeChip())])
    (device,) = bus.devices()
    first, second = device.open(), device.open()
    first.claim(0)
    with pytest.raises(OSError, match="claimed by another"):
        second.claim(0)
    pending = first.submit_in(0x81, 1024)
    bus.sticks[0].unplug(back_after_s=1.0)
    first.wait(0.0)
    assert pending.status == "gone"
    assert bus.devices() == []
    with pytest.raises(OSError, match="gone"):
        device.open()
    bus.sticks[0].clock.sleep(1.0)
    bus.devices()[0].open().claim(0)


def test_time_passes_only_when_nothing_happens(running: Wire) -> None:
    start = running.stick.clock.now()
    running.out(dma(0, script("!")))
    running.handle.wait(5.0)
    assert running.stick.clock.now() == start
    running.handle.wait(5.0)
    assert running.stick.clock.now() == start + 5.0
