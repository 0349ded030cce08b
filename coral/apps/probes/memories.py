"""What memories keep, what fences wait for, where slots and counters stand. Source: docs/codegen.md."""

from __future__ import annotations

import time

import numpy as np

from coral import CoralError, isa
from coral.apps.probes import Finding, step
from coral.apps.probes.bench import Bench
from coral.apps.probes.layers import check, compare, random_layer
from coral.apps.probes.programs import INPUT, RESULT_WORD, begin, fill, from_row, linear, ring, tile_program, to_row
from coral.codegen import blocks, stream
from coral.codegen.builder import ALL_UNITS, V14
from coral.codegen.machine import ALL_TILES, ROW_BYTES, ROW_WORDS
from coral.driver import TransferFailed
from coral.isa import AluOp, StoreOp, TileCounter, Wait, Walk
from coral.package.program import Program

OLD, NEW, OTHER = 0x01010101, 0x02020202, 0x03030303
TILE, PARTNER = 1, 2
"""Masks of tiles 0 and 1."""
LAST = 63
"""A producer that moves so many rows and one more is still at work when the next instruction starts."""
PACKETS = 1200
CREDIT = 16
"""Words that one packet of an all-gather is worth to the compiler, of the 64 that it fills."""


def _words(bench: Bench, program: Program) -> list[int]:
    """Every second word of the output: programs leave everything twice."""
    return np.frombuffer(bench.run(program), np.uint32)[::2].tolist()


@step(7)
def narrow_memory_between_programs(bench: Bench) -> Finding:
    """One program writes a pattern; another copies it to the host, at once, after 1 s and after 60 s."""
    answers = []
    for seconds in (0, 1, 60):
        b = begin()
        fill(b, ALL_TILES, RESULT_WORD, 2, NEW)
        bench.run(tile_program(b, "write", 0, 2))
        time.sleep(seconds if bench.real else 0)
        kept = _words(bench, tile_program(begin(), "read", 0, 2)) == [NEW]
        answers.append(f"{'kept' if kept else 'lost'} after {seconds} s")
    return Finding(", ".join(answers))


@step(8)
def wide_memory_after_close(bench: Bench) -> Finding:
    """A layer whose parameters were loaded before the stick was closed and opened again."""
    layer = random_layer(6, 64, 64)
    check(bench, layer)
    bench.close()
    try:
        kept = not compare(bench.run(layer.fc.execution, {INPUT: layer.x}), layer.expected)
    except TransferFailed:
        raise
    except CoralError:  # the simulated chip refuses to read what nobody wrote
        kept = False
    return Finding("kept" if kept else "lost", "lost")


@step(10, 46)
def slots(bench: Bench) -> Finding:
    """Two ring packets, each received by an instruction of its own into the same two-slot buffer."""
    meaning = {f"{[OLD, OLD, NEW]}": "go on", f"{[OLD, NEW, OTHER]}": "start anew"}
    found = [f"{_words(bench, _two_receives(units))}" for units in (ALL_UNITS - 1, ALL_UNITS)]
    answer = "{}; after a full fence {}".format(*(meaning.get(words, words) for words in found))
    return Finding(answer, "go on; after a full fence start anew")


def _two_receives(units: int) -> Program:
    """The first row of the buffer after each packet, then the second row; fences drain ``units`` in between."""
    b = begin()
    for tiles, word, value in ((TILE, 0, OLD), (TILE, ROW_WORDS, NEW), (PARTNER, 0, OTHER)):
        fill(b, tiles, word, ROW_WORDS, value)
    b.fence()
    for tiles, word, row in ((TILE, 0, 100), (TILE, ROW_WORDS, 101), (PARTNER, 0, 200), (PARTNER, 0, 201)):
        to_row(b, tiles, word, ROW_WORDS, row)
    b.fence()
    for packet in range(2):
        ring(b, TILE, linear(100 + packet, 1), PARTNER, Walk(200, [1], [1], slot_level=1, slot_stride=1))
        b.fence(units=units)
        from_row(b, PARTNER, 200, RESULT_WORD + 2 * packet)
        b.fence(units=units)
    from_row(b, PARTNER, 201, RESULT_WORD + 4)
    return tile_program(b, "slots", 1, 6)


UNITS = ("w2n", "ring_send", "ring_recv0", "ring_recv1")


@step(9)
def fence_units(bench: Bench) -> Finding:
    """Which bits of a fence's mask wait for which DMA unit: a long producer, one bit, a reader that does not wait."""
    drained = {bit: [unit for unit in UNITS if _drains(bench, unit, bit)] for bit in range(1, 6)}
    return Finding(f"{drained}", f"{ {bit: [*UNITS] for bit in drained} }")


def _drains(bench: Bench, unit: str, bit: int) -> bool:
    """The last thing that a producer does is to replace OLD by NEW, or to send OLD; what follows comes right behind."""
    end, repeated, rows, far = 200 + LAST, Walk(100, [0], [LAST + 1]), linear(200, LAST + 1), 1024
    both, tile, words = TILE | PARTNER, 0, ROW_WORDS * (LAST + 1)
    b = begin()
    for word, count, value in ((0, ROW_WORDS, NEW), (ROW_WORDS, ROW_WORDS, OLD), (far + words - 1, 1, OLD)):
        fill(b, both, word, count, value)
    b.fence()
    for word, row in ((0, 100 if unit != "ring_send" else 101), (ROW_WORDS, end)):
        to_row(b, both, word, ROW_WORDS, row)
    if unit == "ring_send":
        to_row(b, both, ROW_WORDS, ROW_WORDS, 100)
    b.fence()
    if unit == "w2n":
        b.emit(isa.W2n, tile_mask=TILE, src=repeated, dst=linear(far, words), unpack_level=1)
        b.fence(units=1 << bit, tiles=TILE)
        to_row(b, TILE, far + words - 1, 1, end)
        b.fence()
    elif unit == "ring_send":
        ring(b, TILE, repeated, PARTNER, rows)
        b.fence(units=1 << bit, tiles=TILE)
        to_row(b, TILE, 0, ROW_WORDS, 100)
        b.fence()
        tile = 1
    else:
        ring(b, PARTNER, repeated, TILE, rows, consumer=int(unit == "ring_recv1"))
        b.fence(units=1 << bit, tiles=TILE)
    from_row(b, 1 << tile, end, RESULT_WORD)
    b.fence()
    return _words(bench, tile_program(b, f"fence_{unit}_{bit}", tile, 2)) == [OLD if unit == "ring_send" else NEW]


@step(18, bold=True)
def counters_beyond_16_bits(bench: Bench) -> Finding:
    """A FIFO of 76,800 counts: 1,200 packets through two rows of wide memory, the last of them sent back."""
    size, fifo = ROW_BYTES * PACKETS, Walk(1000, [0], [PACKETS], slot_level=0, slot_stride=1)
    b = stream.begin(V14, size)
    dst, arrived = Walk(RESULT_WORD, [1, 0], [ROW_WORDS, PACKETS]), [Wait(TileCounter.RING_READ_A, 1)]
    b.emit(isa.W2n, tile_mask=TILE, src=fifo, dst=dst, sig_dst=0, waits=arrived, unpack_level=1)
    space = [Wait(TileCounter.WIDE_TO_NARROW, -ROW_WORDS, step=ROW_WORDS, side=1)]
    b.emit(isa.RingRecv0, tile_mask=TILE, dst=fifo, sig_dst=0, waits=space)
    blocks.infeed_input(b, 0, size, TILE)
    sent = np.random.default_rng(9).integers(0, 256, size, np.uint8).tobytes()
    right = bench.run(tile_program(b, "counters", 0, ROW_WORDS, size), {INPUT: sent}) == sent[-ROW_BYTES:]
    return Finding("wrap" if right else "wrong bytes", "wrap")


@step(15, bold=True)
def infeed_from_scalar_memory(bench: Bench) -> Finding:
    """Words of scalar memory to tile 0, then to all 16 tiles, and back from the last of them."""
    return Finding(", ".join(f"{mask:#x}: {_from_scalar_memory(bench, mask)}" for mask in (1, ALL_TILES)))


def _from_scalar_memory(bench: Bench, mask: int) -> str:
    value, address, last = 16, 17, mask.bit_length() - 1
    b = begin()
    b.scalar(AluOp.MOV, value, imm=OLD)
    b.scalar(AluOp.MOV, address)
    b.emit(isa.Loop, count=ROW_WORDS, body=1)
    b.emit(isa.Scalar, st_op=StoreOp.STORE_INC, st_addr=address | 1 << 5, st_src=value)
    b.scalar_fence(idle=0b10000)
    b.emit(isa.RingRecv0, tile_mask=mask, dst=linear(300, 1))
    words = linear(0, ROW_WORDS)
    b.emit(isa.Infeed, stream=2, smem_308=3, buf=words, sig_infeed=0, dest_mask=mask, lane_words=15, lanes=3)
    b.fence()
    from_row(b, 1 << last, 300, RESULT_WORD)
    return "delivered" if _words(bench, tile_program(b, "infeed", last, 2)) == [OLD] else "something else"


@step(34)
def early_ring_packets(bench: Bench) -> Finding:
    """Two packets through one row under the compiler's loose credit, while the unit that empties it is kept busy."""
    b = begin()
    for word, value in ((0, OLD), (ROW_WORDS, NEW)):
        fill(b, PARTNER, word, ROW_WORDS, value)
    b.fence()
    for word, row in ((0, 100), (ROW_WORDS, 101)):
        to_row(b, PARTNER, word, ROW_WORDS, row)
    fill(b, TILE, 0, ROW_WORDS, OTHER)
    b.fence()
    to_row(b, TILE, 0, ROW_WORDS, 300)
    b.fence()
    busy = ROW_WORDS * (LAST + 1)
    b.emit(isa.W2n, tile_mask=TILE, src=Walk(300, [0], [LAST + 1]), dst=linear(1024, busy), unpack_level=1)
    for packet in range(2):
        arrived = [Wait(TileCounter.RING_READ_A, packet + 1)]
        place = linear(RESULT_WORD + CREDIT * packet, CREDIT)
        b.emit(isa.W2n, tile_mask=TILE, src=linear(500, 1), dst=place, sig_dst=0, waits=arrived, unpack_level=1)
    loose = [Wait(TileCounter.WIDE_TO_NARROW, CREDIT - ROW_WORDS, step=CREDIT, side=1)]
    b.emit(isa.RingRecv0, tile_mask=TILE, dst=Walk(500, [0], [2]), sig_dst=0, waits=loose)
    b.emit(isa.RingSend, tile_mask=PARTNER, src=linear(100, 2), dest_mask=TILE)
    b.fence()
    words = _words(bench, tile_program(b, "early", 0, 2 * CREDIT))
    meaning = {f"{[OLD] * 8 + [NEW] * 8}": "both are read", f"{[NEW] * 16}": "the first is overwritten"}
    return Finding(meaning.get(f"{words}", f"{words}"))
