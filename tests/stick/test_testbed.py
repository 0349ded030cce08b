"""What a simulated stick needed so that Google's own driver ran its models on it, each item by itself (docs/stick.md);
fault plans; time."""

from __future__ import annotations

import struct
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral.stick import (
    Effect,
    Fault,
    FaultPlan,
    Gone,
    Kind,
    SoftwareStick,
    Stall,
    StickBus,
    StickError,
    Strictness,
    VirtualClock,
)
from stick.fake_chip import FakeChip, output_bytes, script
from stick.wire import Wire, dma

EVENT = bytes(12) + b"\4\0\0\0"


def wire(*faults: Fault, chip: FakeChip | None = None, split_bytes: int | None = None, **options) -> Wire:
    plan = FaultPlan(*faults)
    stick = SoftwareStick(firmware_required=False, chip=chip or FakeChip(), fault_plan=plan, **options)
    return Wire.started(stick, split_bytes=split_bytes)


def test_out_is_always_accepted_however_far_the_chip_is_behind() -> None:
    subject = wire()
    subject.out(dma(0, script("P64", "!")))
    subject.settle()
    waiting = [subject.out(dma(tag, bytes(1 << 20))) for tag in (0, 1, 1, 1, 0, 1)]
    assert {transfer.status for transfer in waiting} == {"done"}


def test_programs_queue_behind_each_other_per_tag() -> None:
    subject = wire()
    subject.out(dma(0, script("K64", "!")))
    subject.out(dma(0, script("A32", "O8", "!")))
    subject.out(dma(1, b"i" * 32))
    subject.settle()
    assert subject.read(16, 0x82).status == "pending", "parameters of the first program are not there yet"
    subject.out(dma(2, b"p" * 64))
    subject.settle()
    assert subject.read(1024).data == output_bytes(b"p" * 64, b"i" * 32, 0, 8)


def test_a_limited_queue_is_consumed_by_bytes() -> None:
    subject = wire(queue_bytes=16384)
    subject.out(dma(0, script("P100000", "A32", "!")))
    early = subject.out(dma(1, b"i" * 32))
    too_much = subject.out(dma(1, bytes(20000)))
    assert (early.status, too_much.status) == ("done", "pending")
    assert too_much.actual == 8 + 16384 - 32, "as much as the queue holds beside what waits"
    subject.handle.cancel(too_much)
    other = wire(queue_bytes=16384)
    large = other.out(dma(2, bytes(100000)))
    assert (large.status, large.actual) == ("pending", 8 + 16384)
    other.handle.cancel(large)
    third = wire(queue_bytes=16384)
    third.out(dma(0, script("P100000", "!")))
    third.settle()
    asked_for = third.out(dma(2, bytes(100000)))
    third.settle()
    assert asked_for.status == "done", "the chip takes it as it comes, although no queue holds it"
    assert third.read(16, 0x82).data == EVENT


def test_a_pending_out_goes_on_when_the_chip_has_made_room() -> None:
    subject = wire(queue_bytes=16384)
    subject.out(dma(0, script("P16000", "P16000", "P16000", "!")))
    transfers = [subject.out(dma(2, bytes(16000))) for _ in range(3)]
    assert [transfer.status for transfer in transfers] == ["done", "pending", "pending"]
    subject.settle()
    assert {transfer.status for transfer in transfers} == {"done"}
    assert subject.read(16, 0x82).data == EVENT


def test_issuing_a_descriptor_does_not_stop_the_core() -> None:
    """Like movenet: parameters are asked for that the host sends only after it has read an output."""
    subject = wire()
    subject.out(dma(0, script("a32", "W", "O100", "p64", "O50", "W", "O8", "!")))
    subject.out(dma(1, b"i" * 32))
    subject.settle()
    assert [subject.read(1024).actual for _ in range(2)] == [100, 50], "both outputs came before the parameters"
    subject.out(dma(2, b"p" * 64))
    subject.settle()
    assert subject.read(1024).actual == 8


def test_the_event_comes_when_all_output_is_produced_and_may_be_read_first() -> None:
    subject = wire()
    subject.out(dma(0, script("A32", "O3000", "!")))
    event, output = subject.read(16, 0x82), subject.read(4096)
    subject.settle()
    assert event.status == "pending"
    subject.handle.cancel(output)
    subject.out(dma(1, b"i" * 32))
    subject.settle()
    assert event.data == EVENT
    assert subject.read(4096).actual == 3000


def test_descriptors_are_announced_with_address_and_length_when_they_are_issued() -> None:
    subject = wire()
    subject.write64(0x4C148, 0xFF)
    steps = ("A32@0x100000040", "O8@0x7fff00001000", "!")
    subject.out(dma(0, script(*steps)))
    subject.settle()
    first = struct.unpack("<QIB3x", subject.read(16, 0x82).data)
    assert first == (0x100000040, 32, 1), "before the input is there"
    subject.out(dma(1, b"i" * 32))
    subject.settle()
    rest = [struct.unpack("<QIB3x", subject.read(16, 0x82).data) for _ in range(2)]
    assert rest == [(0x7FFF00001000, 8, 3), (0, 0, 4)]


def test_a_dead_hosts_transfers_and_half_a_dma_are_dropped_by_the_next_open() -> None:
    subject = wire()
    subject.read(4096)
    subject.out(dma(0, script("A32", "O8", "!")))
    subject.out(dma(1, b"i" * 32)[:20])
    subject.handle.close()
    subject.write32(0x1A318, 0x00C50404)
    again = Wire.started(subject.stick)
    again.out(dma(0, script("A32", "O8", "!")))
    again.out(dma(1, b"j" * 32))
    again.settle()
    assert again.read(1024).data == output_bytes(b"", b"j" * 32, 0, 8)


def test_requests_are_answered_while_the_chip_computes_and_late_output_is_dropped() -> None:
    subject = wire(chip=FakeChip(0.3))
    subject.out(dma(0, script("O8", "!")))
    thread = threading.Thread(target=subject.stick.work)
    thread.start()
    time.sleep(0.05)
    started = time.monotonic()
    assert subject.read32(0x1A30C) == 0xF0959
    subject.write32(0x1A318, 0x00C50404)  # sleep: the chip is reset in the middle of its work
    assert time.monotonic() - started < 0.2
    thread.join()
    again = Wire.started(subject.stick)
    output = again.read(1024)
    again.settle()
    assert output.status == "pending", "what the dropped run has produced is not delivered"
    again.out(dma(0, script("O16", "!")))
    again.settle()
    assert output.data == output_bytes(b"", b"", 0, 16)


@pytest.mark.parametrize("size", [1, 16383, 16384, 16385, 100000])
def test_transfers_cut_by_the_host_mean_the_same(size: int) -> None:
    subject = wire(split_bytes=16384)
    data = bytes(i % 251 for i in range(size))
    subject.out(dma(0, script(f"A{size}", "O8", "!")))
    subject.out(dma(1, data))
    subject.settle()
    assert subject.read(1024).data == output_bytes(b"", data, 0, 8)


# fault plans


def test_an_ordinal_counts_transfers_of_its_kind() -> None:
    subject = wire(Fault(Kind.PARAMETERS, 1, Effect.STALL), Fault(Kind.READ, 1, Effect.GARBAGE, data=b"\xff"))
    transfers = [subject.out(dma(tag, bytes(8))) for tag in (0, 2, 1, 2)]
    assert [transfer.status for transfer in transfers] == ["done", "done", "done", "stall"]
    assert [subject.read32(0x1A30C) for _ in range(3)] == [0xF0959, 0xFFFFFFFF, 0xF0959]


def test_a_stalled_pipe_stays_so_until_the_host_clears_it() -> None:
    subject = wire(Fault(Kind.OUT, 0, Effect.STALL))
    assert [subject.out(dma(0, script("!"))).status for _ in range(2)] == ["stall", "stall"]
    subject.handle.clear_halt(0x01)
    assert subject.out(dma(0, script("!"))).status == "done"


@pytest.mark.parametrize(
    ("fault", "packets"),
    [
        (Fault(Kind.IN, 1, Effect.DROP), [b"a" * 1024, b"c" * 10]),
        (Fault(Kind.IN, 2, Effect.REPEAT), [b"a" * 1024, b"b" * 1024, b"c" * 10, b"c" * 10]),
        (Fault(Kind.IN, 2, Effect.EXTRA, data=b"xy"), [b"a" * 1024, b"b" * 1024, b"c" * 10, b"xy"]),
        (Fault(Kind.IN, 1, Effect.SHORT, size=7), [b"a" * 1024, b"b" * 7, b"c" * 10]),
        (Fault(Kind.IN, 2, Effect.BABBLE, size=4), [b"a" * 1024, b"b" * 1024, b"c" * 10 + bytes(4)]),
        (Fault(Kind.IN, 2, Effect.CORRUPT, size=1, data=b"\1\2"), [b"a" * 1024, b"b" * 1024, b"cba" + b"c" * 7]),
        (Fault(Kind.IN, 2, Effect.GARBAGE, data=b"123"), [b"a" * 1024, b"b" * 1024, b"1231231231"]),
    ],
)
def test_what_becomes_of_packets(fault: Fault, packets: list[bytes]) -> None:
    subject = wire(fault)
    for packet in (b"a" * 1024, b"b" * 1024, b"c" * 10):
        subject.stick.pipes[0x81].put(packet)
    received = []
    while (packet := subject.stick.bulk_in(0x81, 4096)) is not None:
        received.append(packet)
    assert received == packets
    assert not subject.stick.faults.unfired


def test_late_and_stale_packets() -> None:
    subject = wire(Fault(Kind.IN, 0, Effect.DELAY, seconds=0.5), Fault(Kind.EVENT, 0, Effect.STALE))
    read, event = subject.read(1024), subject.read(16, 0x82)
    subject.stick.pipes[0x81].put(b"late")
    subject.stick.pipes[0x82].put(EVENT)
    subject.settle()
    subject.handle.wait(5.0)
    assert subject.stick.clock.now() == 0.5
    assert (read.data, event.status) == (b"late", "pending")
    subject.write32(0x1A318, 0x00C50404)
    subject.settle()
    assert event.data == EVENT, "it has survived the chip's reset"


def test_suspended_transfers_break_and_the_state_is_kept() -> None:
    subject = wire(Fault(Kind.INPUT, 0, Effect.SUSPEND, seconds=1.0))
    subject.out(dma(0, script("A8", "O8", "!")))
    assert subject.out(dma(1, bytes(8))).status == "error"
    assert subject.control(0xC0, 1, 0xA30C, 1, 4).status == "error"
    subject.stick.clock.sleep(1.0)
    subject.out(dma(1, bytes(8)))
    subject.settle()
    assert subject.read(1024).actual == 8


@pytest.mark.parametrize(("running", "identity"), [(False, (0x1A6E, 0x089A)), (True, (0x18D1, 0x9302))])
def test_disconnected_and_back_elsewhere(running: bool, identity: tuple[int, int]) -> None:
    subject = wire(Fault(Kind.OUT, 0, Effect.DISCONNECT, seconds=1.0, running=running, port="1-9"))
    generation = subject.stick.generation
    assert subject.out(dma(0, script("!"))).status == "gone"
    bus = StickBus([subject.stick])
    assert bus.devices() == []
    subject.stick.clock.sleep(1.0)
    (device,) = bus.devices()
    assert (device.path, (device.vendor_id, device.product_id)) == ("1-9", identity)
    assert subject.stick.generation > generation
    assert subject.handle.gone


def test_wedge_fatal_claim_and_reset() -> None:
    subject = wire(Fault(Kind.INPUT, 0, Effect.WEDGE))
    subject.out(dma(1, bytes(8)))
    assert subject.control(0xC0, 1, 0xA30C, 1, 4).status == "pending"
    fatal = wire(Fault(Kind.INPUT, 0, Effect.FATAL, size=8))
    fatal.out(dma(1, bytes(8)))
    assert fatal.read(4, 0x83).data == b"\1\0\0\0"
    assert fatal.read64(0x486F0) == fatal.read64(0x48700) == 8
    stick = SoftwareStick(
        chip=FakeChip(),
        firmware_required=False,
        fault_plan=FaultPlan(
            Fault(Kind.CLAIM, 0, Effect.STALL),
            Fault(Kind.RESET, 0, Effect.TIMEOUT),
            Fault(Kind.RESET, 1, Effect.DISCONNECT),
        ),
    )
    with pytest.raises(Stall):
        stick.claim()
    assert not stick.reset()
    assert stick.reset()
    assert not stick.present
    with pytest.raises(Gone):
        stick.control(0xC0, 1, 0xA30C, 1, 4)


FAULTS = st.builds(
    Fault,
    st.sampled_from([Kind.IN, Kind.EVENT, Kind.INTERRUPT]),
    st.integers(0, 99),
    st.sampled_from(list(Effect)),
    times=st.integers(1, 9),
    size=st.integers(0, 5000),
    data=st.binary(min_size=1, max_size=9),
    seconds=st.none() | st.floats(0, 9),
    running=st.booleans(),
    port=st.sampled_from(["", "1-2.3"]),
)


@given(st.lists(FAULTS, max_size=4))
def test_plans_are_data(faults: list[Fault]) -> None:
    assert FaultPlan.from_json(FaultPlan(*faults).to_json()).faults == tuple(faults)


@pytest.mark.parametrize(
    "text", ["", "{", "3", '["in"]', "[{}]", '[{"kind": "in", "ordinal": 0, "effect": "no"}]', '[{"kind": "x"}]',
             '[{"kind": "in", "ordinal": 0, "effect": "stall", "colour": 1}]', '[{"kind": "in", "effect": "stall"}]']
)  # fmt: skip
def test_plans_from_strangers(text: str) -> None:
    with pytest.raises(StickError, match="not a fault plan"):
        FaultPlan.from_json(text)


@pytest.mark.parametrize(
    ("kind", "effect"),
    [(Kind.OUT, Effect.DROP), (Kind.CONTROL, Effect.STALE), (Kind.RESET, Effect.STALL), (Kind.CLAIM, Effect.SHORT),
     (Kind.IN, Effect.GARBAGE), (Kind.IN, Effect.CORRUPT)],
)  # fmt: skip
def test_impossible_faults_are_refused(kind: Kind, effect: Effect) -> None:
    with pytest.raises(StickError, match="fault plan has"):
        Fault(kind, 0, effect)


# time


@pytest.mark.parametrize(("clock_bits", "hertz"), [(0x0, 500e6), (0x5, 250e6), (0x6, 125e6), (0xF, 63e6)])
def test_the_clock_goes_on_by_what_transfers_and_cycles_take(clock_bits: int, hertz: float) -> None:
    chip = FakeChip()
    chip.cycles = 50_000
    subject = wire(chip=chip, timed=True)
    subject.write32(0x1A318, clock_bits << 28 | 0x00850404)
    started = subject.stick.clock.now()
    subject.out(dma(0, script("A33000", "O5500", "!")))
    subject.out(dma(1, bytes(33000)))
    subject.settle()
    subject.read(8192)
    took = subject.stick.clock.now() - started
    transfers = 2 * 65e-6 + (33008 + 56) / 330e6 + 5500 / 55e6
    assert took == pytest.approx(transfers + 50_000 / hertz)
    assert isinstance(subject.stick.clock, VirtualClock)


def test_strict_sticks_do_not_blame_the_host_for_a_planned_fault() -> None:
    subject = wire(Fault(Kind.INPUT, 0, Effect.SHORT, size=4), mode=Strictness.STRICT)
    transfer = subject.out(dma(1, bytes(8)))
    assert (transfer.status, transfer.actual) == ("done", 4)
    subject.settle()
