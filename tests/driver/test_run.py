"""Runs: segments, pieces, caching, inputs, counters."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stick.fake_chip import ScriptError, caching_program, execution_program, layer, output_bytes

from coral import driver
from coral.driver.segments import prepare
from coral.package.program import Base, DmaHint, FenceHint, InstructionHint, InterruptHint, PackageError
from coral.stick import DeadlockViolation
from coral.stick.bus import StickHandle
from driver.bench import check, expected, inputs_of, make, make_bus, open_on

MOVENET = execution_program(
    "A110592 P64 O46080 O46080 P2304 O9216 O82944 O82944 !", parameters=bytes(range(256)) * 9 + bytes(64)
)


def shape(program) -> list[tuple[int, int, int]]:
    return [(len(part.outs), len(part.ins), len(part.events)) for part in prepare(program).segments]


@pytest.mark.parametrize(
    ("pattern", "segments"),
    [
        ("A8 O8 !", [(2, 1, 1)]),
        ("P8 !", [(2, 0, 1)]),
        ("A8 P8 O8 O8 P8 O8 O8 O8 !", [(3, 2, 0), (1, 3, 1)]),
        ("A8 I P8 O8 P8 O8 P8 O8 !", [(4, 1, 0), (1, 1, 0), (1, 1, 1)]),
        ("A8 ! A8 !", [(2, 0, 1), (1, 0, 1)]),
    ],
)
def test_segments(pattern: str, segments: list[tuple[int, int, int]]) -> None:
    program = execution_program(pattern, parameters=bytes(8 * pattern.count("P")))
    assert shape(program) == segments


@pytest.mark.parametrize("speed", ["super", "high"])
@pytest.mark.parametrize("zero", [False, True])
def test_two_segments_like_movenet(speed: str, zero: bool) -> None:
    stick, _ = make(speed=speed, zero_length_packets=zero)
    parameters = bytes(range(256)) * 11182
    assert stick.ensure_cached(caching_program(parameters))
    for _ in range(3):
        check(stick, MOVENET, parameters)
    assert stick.counters.faults == {}


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40).map(lambda n: n * 64), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    speed=st.sampled_from(["super", "high"]),
    zero=st.booleans(),
)
def test_outputs_in_several_device_dmas(sizes: list[int], cuts: list[int], speed: str, zero: bool) -> None:
    """An output hint that the chip delivers in pieces, each ended by a short packet, arrives whole and in place."""
    steps, pieces = ["A64"], []
    for size, count in zip(sizes, cuts, strict=False):
        parts = [size // count] * (count - 1) + [size - size // count * (count - 1)]
        steps += [f"O{part}" for part in parts]
        pieces.append(parts)
    pattern = " ".join(["A64", *(f"O{size}" for size in sizes), "!"])
    program = execution_program(pattern, steps=" ".join([*steps, "!"]))
    stick, _ = make(speed=speed, zero_length_packets=zero)
    given_inputs, index, wanted = inputs_of(program), 0, {}
    for number, parts in enumerate(pieces):
        data = b""
        for part in parts:
            data += output_bytes(b"", given_inputs["in0"], index, part)
            index += 1
        wanted[f"out{number}"] = data
    prepared = prepare(program)
    for _ in range(3):
        assert stick.run(prepared, given_inputs) == wanted


def test_large_dmas_are_cut_into_transfers_of_whole_packets() -> None:
    stick, simulated = make()
    taken: list[int] = []
    original = simulated.bulk_out

    def recording(endpoint: int, data, **options) -> int:
        taken.append(len(data))
        return original(endpoint, data, **options)

    simulated.bulk_out = recording  # pyright: ignore[reportAttributeAccessIssue]
    parameters = bytes(2_862_656)
    stick.ensure_cached(caching_program(parameters))
    assert taken == [8 + 32, 1 << 20, 1 << 20, 2_862_656 + 8 - (2 << 20)]


def test_scratch_goes_out_and_comes_back() -> None:
    # the chip writes 24 and 16 bytes of scratch, then reads all 40 back as input
    program = execution_program("A8 O24 O16 A40 O8 !")
    hints = (
        InstructionHint(0),
        DmaHint(Base.INPUT, 0, 8, "in0"),
        DmaHint(Base.SCRATCH, 0, 24, out=True),
        FenceHint(),
        DmaHint(Base.SCRATCH, 24, 16, out=True),
        DmaHint(Base.SCRATCH, 0, 40),
        DmaHint(Base.OUTPUT, 0, 8, "result", out=True),
        InterruptHint(0),
    )
    program = replace(program, hints=hints, inputs=(layer("in0", 8),), outputs=(layer("result", 8),), scratch_bytes=40)
    assert shape(program) == [(2, 1, 0), (0, 1, 0), (1, 1, 1)]
    stick, _ = make()
    data = bytes(range(8))
    scratch = output_bytes(b"", data, 0, 24) + output_bytes(b"", data, 1, 16)
    assert stick.run(program, {"in0": data}) == {"result": output_bytes(b"", data + scratch, 2, 8)}


def test_overlapping_input_pieces_are_sent_as_written() -> None:
    program = execution_program("A96 A96 O8 !")
    hints = (
        InstructionHint(0),
        DmaHint(Base.INPUT, 0, 96, "in0"),
        DmaHint(Base.INPUT, 32, 96, "in0"),
        *program.hints[3:],
    )
    program = replace(program, hints=hints, inputs=(layer("in0", 128),))
    stick, _ = make()
    data = bytes(range(128))
    assert stick.run(program, {"in0": data})["out0"] == output_bytes(b"", data[:96] + data[32:], 0, 8)


def test_buffers_of_any_kind_are_taken() -> None:
    np = pytest.importorskip("numpy")
    program = execution_program("A64 O64 !")
    stick, _ = make()
    raw = inputs_of(program)["in0"]
    for buffer in (raw, bytearray(raw), memoryview(raw), np.frombuffer(raw, np.uint8).reshape(4, 16)):
        assert stick.run(program, {"in0": buffer}) == expected(program)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"inputs \[\] were given, the program takes \['in0'\]"),
        ({"in0": bytes(64), "in1": b""}, "in1"),
        ({"in0": bytes(63)}, "'in0' has 63 bytes, the program takes 64"),
        ({"in0": "text"}, "'in0' is a str, not a buffer"),
    ],
)
def test_wrong_inputs_send_nothing(inputs: dict, message: str) -> None:
    stick, _ = make()
    with pytest.raises(driver.InputError, match=message):
        stick.run(execution_program("A64 O64 !"), inputs)
    assert stick.counters.transfers == 0
    check(stick, execution_program("A64 O64 !"))
    assert stick.counters.recoveries == 0


def bad_programs() -> dict[str, tuple]:
    good = execution_program("A64 O64 !")
    return {
        "hint past the buffer": (replace(good, hints=(good.hints[0], DmaHint(Base.INPUT, 8, 64, "in0"))), PackageError),
        "no bitstream": (replace(good, bitstreams=()), PackageError),
        "asks for its transfers, in two chunks": (
            replace(execution_program("A8 I O8 !"), fully_deterministic=False),
            driver.DriverError,
        ),
        "batch": (replace(good, batch_size=4), driver.DriverError),
        "same name": (
            replace(good, inputs=(layer("out0", 64),), hints=(good.hints[0], *good.hints[2:])),
            driver.DriverError,
        ),
    }


@pytest.mark.parametrize("name", bad_programs())
def test_programs_that_contradict_themselves_send_nothing(name: str) -> None:
    program, error = bad_programs()[name]
    stick, _ = make()
    with pytest.raises(error):
        stick.run(program, inputs_of(program))
    assert stick.counters.transfers == 0


def test_caching_follows_content_and_token() -> None:
    stick, simulated = make()
    a, b = caching_program(b"a" * 64, token=5), caching_program(b"b" * 64, token=5)
    other = caching_program(b"c" * 64, token=6)
    uploads = [stick.ensure_cached(program) for program in (a, a, b, a, b)]
    assert uploads == [True, False, True, False, False], "one token: both stay resident"
    same_content = caching_program(bytes(bytearray(b"a" * 64)), token=5)
    assert same_content is not a
    assert not stick.ensure_cached(same_content)
    assert stick.ensure_cached(replace(a, parameters=b"A" * 64)), "other content is another program"
    assert [stick.ensure_cached(program) for program in (other, other, a, b)] == [True, False, True, True]
    assert stick.counters.uploads == 6
    assert stick.counters.parameter_bytes == 6 * 64
    stick.forget()
    assert stick.ensure_cached(a)
    with pytest.raises(driver.DriverError, match="EXECUTION_ONLY, not a parameter caching program"):
        stick.ensure_cached(execution_program("O8 !"))
    assert simulated.faults.seen["out"] == 7 * 2


def test_a_program_with_another_token_displaces_what_is_cached() -> None:
    stick, _ = make()
    a = caching_program(b"a" * 64, token=5)
    stick.ensure_cached(a)
    check(stick, execution_program("A64 O64 !", token=5), b"a" * 64)
    assert not stick.ensure_cached(a)
    stick.run(execution_program("O64 !", token=0))
    assert stick.ensure_cached(a)
    stick.run(execution_program("O64 !", token=9))
    assert stick.ensure_cached(a)


def test_a_new_object_at_a_deleted_objects_address_is_not_taken_for_it() -> None:
    # Google's driver keys its cache by address and runs the second model without its parameters
    stick, _ = make()
    for round_number in range(50):
        parameters = bytes([round_number]) * 64
        program = caching_program(parameters)
        assert stick.ensure_cached(program)
        del program
        check(stick, execution_program("A64 O64 !"), parameters)


def test_counters() -> None:
    stick, _ = make()
    stick.ensure_cached(caching_program(bytes(640)))
    check(stick, execution_program("A64 P32 O64 O16 !", parameters=bytes(32)), bytes(640))
    counters = stick.counters
    assert (counters.calls, counters.uploads, counters.recoveries) == (2, 1, 0)
    assert (counters.instruction_bytes, counters.input_bytes) == (2 * 16 + 5 * 16, 64)
    assert (counters.parameter_bytes, counters.output_bytes) == (640 + 32, 80)
    standing = 2  # the reads that always stand on 0x81 and 0x82
    assert counters.transfers == standing + (2 + 1) + (3 + 2 + 1)


def test_an_error_of_the_chip_is_the_callers_error_and_the_next_call_works() -> None:
    stick, simulated = make()
    caching = caching_program(b"w" * 64)
    stick.ensure_cached(caching)
    with pytest.raises(ScriptError, match="a byte that nothing wrote was read at tile 3, row 17"):
        stick.run(execution_program("A8 O8 !", steps="A8 X"), {"in0": bytes(8)})
    assert stick.ensure_cached(caching), "the chip was reset, so parameters are sent again"
    check(stick, execution_program("A64 O64 !"), b"w" * 64)
    assert stick.counters.recoveries == 1
    assert simulated.application


def test_a_driver_that_does_not_wait_is_told_of_the_deadlock() -> None:
    stick, _ = make()
    prepared = prepare(MOVENET)
    first, second = prepared.segments
    first.outs += second.outs  # what a naive driver does: everything out, then everything in
    second.outs.clear()
    with pytest.raises(DeadlockViolation, match=r"parameters \(tag 2, 2304 bytes\) while 46080 of the 46080"):
        stick.run(prepared, inputs_of(MOVENET))
    check(stick, MOVENET)


def test_threads_take_turns() -> None:
    stick, _ = make()
    program, errors = prepare(execution_program("A64 O640 !")), []

    def work() -> None:
        try:
            for _ in range(30):
                check(stick, program)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert stick.counters.calls == 90


def test_sticks_are_independent() -> None:
    bus = make_bus(2)
    with open_on(bus, index=0) as first, open_on(bus, index="1-2") as second:
        second.ensure_cached(caching_program(b"z" * 64))
        check(first, execution_program("A64 O64 !"))
        check(second, execution_program("A64 O64 !"), b"z" * 64)
        assert (first.path, second.path) == ("1-1", "1-2")


def test_prepared_programs_are_remembered_by_content() -> None:
    stick, _ = make()
    for size in range(8, 8 + 8 * 80, 8):
        stick.run(execution_program(f"O{size} !"))
    assert len(stick._prepared) == 64
    check(stick, execution_program("A64 O64 !"))
    first = stick._prepare(execution_program("A64 O64 !"))
    assert stick._prepare(execution_program("A64 O64 !")) is first


def test_what_does_not_change_between_calls_is_not_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[int]] = []
    original = StickHandle.submit_out

    def recording(self: StickHandle, endpoint: int, data: memoryview):
        sent[-1].append(id(data.obj))
        return original(self, endpoint, data)

    monkeypatch.setattr(StickHandle, "submit_out", recording)
    stick, _ = make()
    program = prepare(execution_program("A64 P64 O64 !", parameters=bytes(64)))
    for _ in range(3):
        sent.append([])
        check(stick, program)
    instructions, _, parameters = zip(*sent, strict=True)
    assert len(set(instructions)) == len(set(parameters)) == 1, "the same buffers each time"
