"""The data movers of a tile: ring producer and consumers, narrow to wide, wide to narrow.

Each plan turns its walks into arrays of addresses once; a job then moves whole slices of them. Source: docs/chip.md,
section Units.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coral import isa
from coral.chip.errors import Hazard, RuleViolation
from coral.chip.layout import (
    BIAS_ENTRY,
    NARROW_WORDS,
    ROW_BYTES,
    ROW_WORDS,
    SCALAR_NODE,
    SCALING_ENTRIES,
    SCALING_SLOT,
    SMALL_GROUP_LIMIT_ROWS,
    TILES,
    WIDE_ROWS,
)
from coral.chip.machine import BLOCKED, DONE, MORE, Job, Machine
from coral.chip.memories import Queue
from coral.chip.plans import COUNTER, Plan, done
from coral.chip.walks import Index, gates

PRODUCERS = (
    (COUNTER.RING_PRODUCER_A, isa.ScalarCounter.PRODUCER_A),
    (COUNTER.RING_PRODUCER_B, isa.ScalarCounter.PRODUCER_B),
)
"""Counters of every tile and of the scalar core that a sender raises, by ``to_consumer1``."""


def announce(machine: Machine, to_consumer1: int, amount: int) -> None:
    """Raise the producer counters everywhere."""
    tile_counter, scalar_counter = PRODUCERS[to_consumer1]
    for tile in range(TILES):
        machine.bump(tile, tile_counter, amount)
    machine.bump(SCALAR_NODE, scalar_counter, amount)


SENT_AT_ONCE = 1 << 12
"""Rows that one array operation copies at most."""


class RingSendJob(Job):
    """Reads rows of wide memory and sends each as a packet."""

    plan: RingSend

    def begin(self) -> None:
        self.rows = self.slot("src", self.plan.nest)

    def advance(self) -> int:
        plan, machine, memory = self.plan, self.machine, self.machine.memory
        while self.position < plan.nest.steps:
            start = self.position
            limit = min(self.limit(plan.gates, start), plan.nest.steps)
            if limit == start:
                return BLOCKED
            end = self.trim(start, min(limit, start + SENT_AT_ONCE))
            rows = self.rows[start:end]
            memory.unread[self.place, rows] = False
            machine.send(plan.dest_mask, plan.to_consumer1, memory.wide[self.place, rows], self.where)
            self.position = end
            machine.bump(self.place, COUNTER.RING_WRITE, done(plan.read, start, end))
            announce(machine, plan.to_consumer1, done(plan.sent, start, end))
            if machine.rng is not None:
                return DONE if end == plan.nest.steps else MORE
        return DONE


class RingSend(Plan):
    """Plan of 0x10."""

    job_class = RingSendJob
    words = ROW_WORDS

    def __init__(self, instruction: Any, word: int) -> None:
        super().__init__(instruction, word)
        self.nest = self.walk("src").within(WIDE_ROWS, "wide memory rows")
        self.gates = gates(instruction, (self.nest,))
        self.steps = self.nest.steps
        self.read, self.sent = self.signal("sig_src", self.nest), self.signal("sig_ring", self.nest)
        self.dest_mask, self.to_consumer1 = instruction.dest_mask, instruction.to_consumer1
        self.require(self.dest_mask != 0, "dest_mask = 0, the ring packets go to nobody")


class RingRecvJob(Job):
    """Stores packets as rows, header rows first in every group."""

    plan: RingRecv

    def __init__(self, machine: Machine, plan: Plan, place: int) -> None:
        super().__init__(machine, plan, place)
        self.packets = 0

    def begin(self) -> None:
        self.rows = self.plan.packet_rows(self.slot("dst", self.plan.nest))

    def advance(self) -> int:
        plan, machine = self.plan, self.machine
        queue: Queue = machine.ring[self.place, plan.consumer]
        limit = min(self.limit(plan.gates, self.position), plan.steps)
        if limit == self.position:
            return BLOCKED
        count = min(queue.size, int(plan.first_packet[limit]) - self.packets)
        if count == 0:
            self.waiting.append(f"ring packets for consumer {plan.consumer}")
            return BLOCKED
        rows = self.rows[self.packets : self.packets + count]
        if count > 1:
            rows = rows[: 1 if machine.rng is not None else self.free(rows)]
        data = queue.take(len(rows))
        if plan.stay and plan.first_row >= SMALL_GROUP_LIMIT_ROWS and not machine.small.isdisjoint(data[:, 0].tolist()):
            raise RuleViolation(
                f"{self.where}: parameters of fewer than 64 outputs at row {plan.first_row}; they must begin below row "
                f"{SMALL_GROUP_LIMIT_ROWS} (256 KiB)"
            )
        machine.write_rows(self, rows, data, plan.fifo, plan.stay)
        self.packets += len(rows)
        before, self.position = self.position, int(plan.steps_done[self.packets])
        machine.bump(self.place, plan.counter, done(plan.stored, before, self.position))
        return DONE if self.packets == len(self.rows) else MORE

    def free(self, rows: np.ndarray) -> int:
        """How many packets can be taken at once: until a row repeats or still waits for its reader."""
        busy = self.machine.memory.unread[self.place, rows]
        busy[0] = False
        if not self.plan.distinct:
            repeats = np.ones(len(rows), bool)
            repeats[np.unique(rows, return_index=True)[1]] = False
            busy |= repeats
        return int(busy.argmax()) or len(rows)


class RingRecv(Plan):
    """Plan of 0x11 and 0x12: the destination row of every packet, headers included."""

    job_class = RingRecvJob

    def __init__(self, instruction: Any, word: int) -> None:
        super().__init__(instruction, word)
        self.consumer = int(isinstance(instruction, isa.RingRecv1))
        self.counter = (COUNTER.RING_READ_A, COUNTER.RING_READ_B)[self.consumer]
        self.nest = nest = self.walk("dst").within(WIDE_ROWS, "wide memory rows")
        self.gates = gates(instruction, (nest,))
        self.stored, self.steps = self.signal("sig_dst", nest), nest.steps
        headers = instruction.hdr_rows + 1 if instruction.hdr_en else 0
        self.fifo, self.stay = instruction.dst_slot_stride != 0, not self.gates
        self.first_row = min(instruction.dst_addr, instruction.hdr_first_row if instruction.hdr_en else WIDE_ROWS)
        self.distinct = len(np.unique(nest.at(0))) == nest.steps and not headers
        first = np.zeros(nest.steps, bool)
        if headers:
            groups = nest.blocks(min(instruction.hdr_level + 1, len(nest.counts)))
            first[[groups.start(g) for g in range(groups.count)]] = True
        self.first_packet = np.r_[0, np.cumsum(np.where(first, headers, 0) + 1)]
        self.is_data = np.zeros(int(self.first_packet[-1]), bool)
        self.is_data[self.first_packet[1:] - 1] = True
        self.steps_done = np.r_[0, np.cumsum(self.is_data)]
        if headers:
            low, high = instruction.hdr_first_row, instruction.hdr_last_row
            self.require(low <= high < WIDE_ROWS, f"header rows {low}..{high} are outside 0..{WIDE_ROWS - 1}")
            self.headers = low + np.arange(int((~self.is_data).sum())) % (high - low + 1)

    def packet_rows(self, rows: Index) -> Index:
        """Destination of every packet, given those of the data packets."""
        if self.is_data.all():
            return rows
        out = np.empty(len(self.is_data), np.int64)
        out[self.is_data], out[~self.is_data] = rows, self.headers
        return out


class N2wJob(Job):
    """Packs words of narrow memory into rows; a row is moved when all of it may be read and written."""

    plan: N2w

    def __init__(self, machine: Machine, plan: Plan, place: int, shift: int = 0) -> None:
        super().__init__(machine, plan, place)
        self.shift = shift

    def begin(self) -> None:
        self.words, self.rows = self.slot("src", self.plan.src), self.slot("dst", self.plan.dst)
        if self.plan.indirect:
            self.words = self.words + self.shift
            low, high = int(self.words.min()), int(self.words.max())
            self.plan.require(
                low >= 0 and high < NARROW_WORDS, f"narrow words {low}..{high} are outside 0..{NARROW_WORDS - 1}"
            )

    def advance(self) -> int:
        plan, machine = self.plan, self.machine
        values = machine.counters[self.place]
        while self.position < plan.dst.steps:
            row = self.position
            last = min(self.limit(plan.space, row), plan.dst.steps)
            if plan.data and last > row:
                words = min(gate.limit(int(plan.row_start[row]), values[gate.ctr])[0] for gate in plan.data)
                last = min(last, int(np.searchsorted(plan.row_start, words, side="right")) - 1)
                if last == row:
                    self.wait_for_data(row)
            if last == row:
                return BLOCKED
            end = self.trim(row, last)
            if plan.fifo and end - row > 1 and len(np.unique(self.rows[row:end])) < end - row:
                raise Hazard(f"{self.where} writes a row of wide memory twice before anything can read it")
            a, b = plan.row_start[row], plan.row_start[end]
            rows = np.zeros(((end - row) * ROW_WORDS, 4), np.int32)
            rows[plan.slot[a:b] - row * ROW_WORDS] = machine.memory.narrow[self.place, self.words[a:b]]
            machine.write_rows(self, self.rows[row:end], plan.arrange(rows).reshape(-1, ROW_BYTES), plan.fifo)
            self.position = end
            machine.bump(self.place, COUNTER.NARROW_TO_WIDE, done(plan.stored, row, end))
            if machine.rng is not None:
                return DONE if end == plan.dst.steps else MORE
        return DONE

    def wait_for_data(self, row: int) -> None:
        """Register the threshold of the block that keeps the row from being complete."""
        values = self.machine.counters[self.place]
        for gate in self.plan.data:
            limit, threshold = gate.limit(int(self.plan.row_start[row]), values[gate.ctr])
            if limit < self.plan.row_start[row + 1]:
                self.wait(gate.ctr, threshold)


class N2w(Plan):
    """Plan of 0x13: where the words of every row come from."""

    job_class = N2wJob

    def __init__(self, instruction: Any, word: int) -> None:
        super().__init__(instruction, word)
        self.src = src = self.walk("src", short_dim=instruction.transpose)
        self.dst = self.walk("dst").within(WIDE_ROWS, "wide memory rows")
        self.base, self.fifo = instruction.src_addr, instruction.dst_slot_stride != 0
        self.indirect = instruction.addr_indirect
        if not self.indirect:
            src.within(NARROW_WORDS, "narrow memory words")
        bound = gates(instruction, (src, self.dst))
        self.data = tuple(g for g in bound if g.side == 0)
        self.space = tuple(g for g in bound if g.side == 1)
        self.stored, self.steps = self.signal("sig_dst", self.dst), src.steps
        blocks = src.blocks(instruction.pack_level)
        edges = np.array([blocks.start(i) for i in range(blocks.count + 1)])
        rows = -(-np.diff(edges) // ROW_WORDS)
        inside = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        self.row_start = np.r_[np.repeat(edges[:-1], rows) + inside * ROW_WORDS, edges[-1]]
        self.require(
            len(self.row_start) - 1 == self.dst.steps,
            f"{len(self.row_start) - 1} rows are packed, but the destination walk has {self.dst.steps} steps",
        )
        row = np.searchsorted(self.row_start, np.arange(src.steps), side="right") - 1
        self.slot = row * ROW_WORDS + np.arange(src.steps) - self.row_start[row]
        self.mode = instruction.transpose + 2 * instruction.transpose16
        self.field_is("transpose", *((0, 1) if not instruction.transpose16 else (1,)))

    def arrange(self, words: np.ndarray) -> np.ndarray:
        """Words of rows, [n, 4] identifiers, in the order in which the row holds them."""
        if self.mode == 1:
            return words.reshape(-1, 4, 4).transpose(0, 2, 1)
        if self.mode == 3:
            return words.reshape(-1, 2, 2, 2).transpose(0, 2, 1, 3)
        return words


class W2nJob(Job):
    """Moves the words of rows, as one stream, to narrow memory or to the scaling store."""

    plan: W2n

    def begin(self) -> None:
        self.rows, self.target = self.slot("src", self.plan.src), self.slot("dst", self.plan.dst)

    def advance(self) -> int:
        plan, machine, memory, tile = self.plan, self.machine, self.machine.memory, self.place
        while self.position < plan.dst.steps:
            start = self.position
            end = min(self.limit(plan.space, start), plan.dst.steps)
            if plan.data and end > start:
                row = int(plan.source[start - 1]) + 1 if start else 0
                if row <= plan.source[-1]:
                    end = min(end, int(np.searchsorted(plan.source, self.limit(plan.data, row))))
            if end == start:
                return BLOCKED
            end = self.trim(start, end)
            source = plan.source[start:end]
            rows = self.rows[source]
            memory.unread[tile, self.rows[int(plan.source[start - 1]) if start else 0 : int(source[-1]) + 1]] = False
            if plan.to_scaling:
                words = memory.wide[tile].reshape(WIDE_ROWS, -1, 8)[rows, plan.offset[start:end]]
                self.load_scaling(start, end, words)
            else:
                words = memory.wide[tile].reshape(WIDE_ROWS, ROW_WORDS, 4)[rows, plan.offset[start:end]]
                memory.narrow[tile, self.target[start:end]] = words
            self.position = end
            machine.bump(tile, plan.counter, done(plan.stored, start, end))
            if machine.rng is not None:
                return DONE if end == plan.dst.steps else MORE
        return DONE

    def load_scaling(self, start: int, end: int, words: np.ndarray) -> None:
        """Entries of 8 bytes; a slot that the op has not finished with must not be touched."""
        plan = self.plan
        for block in range(plan.slots.index(start), plan.slots.index(end - 1) + 1):
            first = plan.slots.start(block)
            slot = int(self.target[first]) % BIAS_ENTRY // SCALING_SLOT
            self.machine.scaling[self.place].load(slot, first >= start, self.where)
        self.machine.memory.scaling[self.place, self.target[start:end]] = words


class W2n(Plan):
    """Plan of 0x14: row and word of the stream for every step of the destination walk."""

    job_class = W2nJob

    def __init__(self, instruction: Any, word: int) -> None:
        super().__init__(instruction, word)
        self.to_scaling = instruction.to_scaling
        self.src = src = self.walk("src").within(WIDE_ROWS, "wide memory rows")
        limit = (SCALING_ENTRIES, "scaling store entries") if self.to_scaling else (NARROW_WORDS, "narrow memory words")
        self.dst = self.walk("dst").within(*limit)
        bound = gates(instruction, (src, self.dst))
        self.data = tuple(g for g in bound if g.side == 0)
        self.space = tuple(g for g in bound if g.side == 1)
        self.stored, self.steps = self.signal("sig_dst", self.dst), self.dst.steps
        self.counter = COUNTER.WIDE_TO_SCALING if self.to_scaling else COUNTER.WIDE_TO_NARROW
        self.slots = self.dst.blocks(
            instruction.dst_slot_level if instruction.dst_slot_stride else len(self.dst.counts)
        )
        per_row = ROW_WORDS // 2 if self.to_scaling else ROW_WORDS
        blocks = self.dst.blocks(instruction.unpack_level)
        edges = np.array([blocks.start(i) for i in range(blocks.count + 1)])
        sizes = np.diff(edges)
        skip = instruction.skip_cnt + 1 if instruction.skip_en else 0
        if skip and self.to_scaling:
            self.field_is("skip_en", 0)
        sizes[0] += skip
        first_row = np.r_[0, np.cumsum(-(-sizes // per_row))[:-1]]
        block = np.repeat(np.arange(blocks.count), np.diff(edges))
        inside = np.arange(self.dst.steps) - edges[block] + np.where(block == 0, skip, 0)
        self.source = first_row[block] + inside // per_row
        self.offset = inside % per_row
        self.require(
            int(self.source[-1]) < src.steps,
            f"the destination needs {int(self.source[-1]) + 1} rows, the source walk has {src.steps}",
        )
