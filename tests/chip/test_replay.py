"""A repeated program: same bytes as when executed, and executed again whenever something is different."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coral import isa
from coral.chip import Chip, ChipState
from coral.chip.machine import Machine
from coral.isa import Walk
from coral.package import Kind
from tests.chip.builder import (
    alu,
    descriptor,
    fence,
    identity,
    input_to_tile,
    load_rows,
    move,
    output_from_tile,
    program,
    requantise,
)
from tests.chip.harness import programs, run


class Watch:
    """How often programs were executed instruction by instruction."""

    def __init__(self) -> None:
        self.count = 0
        self.chip = Chip()
        execute = self.chip.execute

        def counted(feeds: list[tuple[int, bytes]]) -> ChipState:
            self.count += self.chip.machine is None
            return execute(feeds)

        self.chip.execute = counted  # type: ignore[method-assign]


def double(tile: int = 0) -> bytes:
    """Eight bytes in, eight doubled and clamped bytes out."""
    return program(
        *input_to_tile(tile, 1), *identity(1 << tile, 1000),
        requantise(1 << tile, 0, 2048, 2, mult=2.0, clamp_max=99.0), *fence(1 << tile), *output_from_tile(tile, 2, 512),
    )  # fmt: skip


def call(chip: Chip, stream: bytes, data: bytes) -> bytes:
    chip.feed(0, stream)
    chip.feed(1, data)
    assert chip.run() is ChipState.FINISHED
    return chip.outputs.popleft()


def test_the_second_call_is_a_replay() -> None:
    watch = Watch()
    for k in range(5):
        data = bytes(range(k, k + 8))
        assert call(watch.chip, double(), data) == bytes(2 * b for b in data)
    assert watch.count == 1
    assert watch.chip.descriptors == [(1, 8), (3, 8)]


@pytest.mark.parametrize("options", [{"seed": 3}, {"replay": False}])
def test_no_replay_with_a_seed_or_on_request(options: dict[str, int]) -> None:
    chip = Chip(**options)  # type: ignore[arg-type]
    call(chip, double(), bytes(8))
    assert not chip.recordings


def test_other_portions_are_executed_anew() -> None:
    watch = Watch()
    call(watch.chip, double(), bytes(8))
    watch.chip.feed(0, double())
    assert watch.chip.run() is ChipState.NEEDS_HOST
    assert watch.chip.missing == (1, 8)
    assert watch.chip.descriptors == [(1, 8)]
    watch.chip.feed(1, bytes([1] * 8))
    assert watch.chip.run() is ChipState.FINISHED
    assert watch.chip.outputs.popleft() == bytes([2] * 8)
    assert watch.count == 2
    for _ in range(2):
        watch.chip.feed(0, double())
        assert watch.chip.run() is ChipState.NEEDS_HOST
        assert watch.chip.missing == (1, 8)
        watch.chip.feed(1, bytes([3] * 8))
        assert watch.chip.run() is ChipState.FINISHED
        assert watch.chip.outputs.popleft() == bytes([6] * 8)
    assert watch.count == 2


def with_row(row: int) -> bytes:
    """A program that requantises with an identity row that another program has loaded."""
    return program(*input_to_tile(0, 1), requantise(1, 0, 2048, 2, row=row), *fence(1), *output_from_tile(0, 2, 512))


def matrix(factor: int) -> bytes:
    row = np.zeros(256, np.uint8)
    row[[0, 5, 10, 15]] = factor
    return row.tobytes()


def load(chip: Chip, row: int, data: bytes) -> None:
    chip.feed(0, load_rows(0, row, 1))
    chip.feed(2, data)
    assert chip.run() is ChipState.FINISHED


def test_other_weights_are_seen() -> None:
    watch = Watch()
    for factor in (1, 3, 5, 5):
        load(watch.chip, 7, matrix(factor))
        assert call(watch.chip, with_row(7), bytes(range(8))) == bytes(factor * k for k in range(8))
    assert watch.count == 2


def test_weights_beside_stay() -> None:
    watch = Watch()
    load(watch.chip, 7, matrix(1))
    load(watch.chip, 8, matrix(2))
    for _ in range(2):
        assert call(watch.chip, with_row(7), bytes(range(8))) == bytes(range(8))
        assert call(watch.chip, with_row(8), bytes(range(8))) == bytes(2 * k for k in range(8))
    assert watch.count == 4


def doubled_in_scalar_code(branch: bool) -> bytes:
    """The first input word plus one, by the scalar core; with ``branch`` minus one if it is above 1000."""
    to_scalar = [
        isa.N2w(tile_mask=1, src=Walk(0, [1], [2]), dst=Walk(2072), pack_level=1), *fence(1),
        isa.Outfeed(dst=Walk(100, [1], [2])), isa.RingSend(tile_mask=1, src=Walk(2072), dest_mask=1 << 16), *fence(1),
        isa.ScalarFence(idle_mask=0b1000),
    ]  # fmt: skip
    work: list[isa.Instruction] = [isa.Scalar(ld_mode=1, ld_dst=2, ld_addr=100)]
    if branch:
        work += [
            alu(isa.AluOp.GT, 0, 2, 1000),
            isa.Branch(cond_en=1, cond_reg=0, cond_val=1, offset=3),
            alu(isa.AluOp.ADD, 2, 2, 1), isa.Branch(offset=2), alu(isa.AluOp.SUB, 2, 2, 1),
        ]  # fmt: skip
    else:
        work += [alu(isa.AluOp.ADD, 2, 2, 1)]
    push = [isa.Scalar(st_op=isa.StoreOp.PUSH, st_src=r) for r in (2, 3)]
    return program(*input_to_tile(0, 1), *to_scalar, *work, move(3, 0xABCD), *descriptor(3, 8), *push)


@pytest.mark.parametrize("branch", [False, True])
def test_scalar_code_on_data_is_run_again(branch: bool) -> None:
    watch = Watch()
    stream = doubled_in_scalar_code(branch)
    for value in (5, 700, 2000, 12):
        out = np.frombuffer(call(watch.chip, stream, np.array([value, 0], "<u4").tobytes()), "<u4")
        assert out.tolist() == [value - 1 if branch and value > 1000 else value + 1, 0xABCD]
    assert watch.count == (3 if branch else 1)


def test_scalar_softmax_is_replayed(corpus: Path) -> None:
    pair = programs(corpus / "vision" / "mobilenet_v1_0.25_128_quant_legacy_edgetpu.tflite")
    layer = pair[Kind.EXECUTION_ONLY].inputs[0]
    images = [np.random.default_rng(k).integers(0, 256, layer.size_bytes, np.uint8).tobytes() for k in range(2)]
    watch = Watch()
    run(watch.chip, pair[Kind.PARAMETER_CACHING])
    first = [run(watch.chip, pair[Kind.EXECUTION_ONLY], {layer.name: image}) for image in images]
    assert watch.count == 2
    watch.chip.recordings.popitem()
    assert run(watch.chip, pair[Kind.EXECUTION_ONLY], {layer.name: images[1]}) == first[1]
    assert watch.count == 3
    assert first[0] != first[1]


def test_an_error_leaves_no_trace() -> None:
    watch = Watch()
    load(watch.chip, 7, matrix(1))
    assert call(watch.chip, with_row(7), bytes(range(8))) == bytes(range(8))
    watch.chip.feed(0, program(isa.TileFence()))
    with pytest.raises(Exception, match="names no tile"):
        watch.chip.run()
    assert watch.chip.run() is ChipState.IDLE
    assert call(watch.chip, with_row(7), bytes(range(8))) == bytes(range(8))


def test_data_that_comes_early_is_for_the_next_program() -> None:
    chip = Chip()
    for stream in (double(), double()):
        chip.feed(0, stream)
        chip.feed(1, bytes([4] * 8))
    assert chip.run() is ChipState.FINISHED
    assert chip.run() is ChipState.FINISHED
    assert chip.run() is ChipState.IDLE
    assert list(chip.outputs) == [bytes([8] * 8)] * 2


def test_machines_that_watch_see_every_job() -> None:
    seen: list[str] = []

    class Watching(Machine):
        def after(self, job: object, state: int) -> None:
            seen.append(job.where)  # type: ignore[attr-defined]

    chip = Chip(replay=False, machine_type=Watching)
    call(chip, double(), bytes(8))
    assert any("op at word" in where for where in seen)
