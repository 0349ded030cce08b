"""The scalar core: walks through the program, runs its own bundles, hands everything else to the units.

Source: docs/chip.md, sections Dispatch and fences, Units.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from coral import isa
from coral.chip.errors import RuleViolation, UnknownInstruction, UnwrittenRead
from coral.chip.layout import (
    ALL_TILES,
    LEVEL_FIXED,
    LEVEL_HOST,
    SCALAR_NODE,
    SCALAR_WORDS,
    TILE_COUNTERS,
    TILES,
    UNWRITTEN,
)
from coral.chip.machine import MESH_UNITS, Machine, Unit
from coral.chip.memories import Ids
from coral.chip.movers import N2w, N2wJob
from coral.chip.plans import Plan
from coral.chip.program import Block, Chunk
from coral.chip.recording import ScalarCheck, ScalarFlush, ScalarForget, ScalarRun, ScalarStart, word_of
from coral.chip.scalar_code import Partial
from coral.isa import signed16

DMA_UNITS = ("ring_producer", "ring_consumer0", "ring_consumer1", "narrow_to_wide", "wide_to_narrow")
SCALAR_UNITS = ("activation_pop", "parameter_pop", "infeed", "outfeed")
ALL_UNITS = 0x3FF
STEPS_PER_BUNDLE = 64
"""Steps of tile units that weigh as much as one bundle in the program's budget."""
FINAL = 4
"""``halt.code`` of the last bitstream; the others have 0 or 1."""
KNOWN = {"pred_en": (0,), "final": (0, 3), "rel": (1,), "code": (0, 1, FINAL)}
"""Fields of the scalar core's own instructions of which only these values are understood."""


def fenced_units(unit_mask: int) -> list[str]:
    """Units that a tile fence drains. The order of bits 1 to 5 is not settled: any of them drains all five."""
    units = ["op"] if unit_mask & 1 else []
    if unit_mask & 0b111110:
        units += DMA_UNITS
    return units + [name for k, name in enumerate(MESH_UNITS) if unit_mask >> (6 + k) & 1]


def _nothing(registers: list[Any], predicates: list[Any], core: Any) -> None:
    """No bundles."""


class Dispatcher(Unit):
    """Hands the instructions of one tile to its units, in order; stops at a fence until it is passed."""

    __slots__ = ()

    def __init__(self, machine: Machine, place: int) -> None:
        super().__init__(machine, "dispatcher", place)
        self.queue: deque[Any] = deque()

    def accept(self, entry: Any) -> None:
        """Take the next job or fence of the program."""
        if self.queue or isinstance(entry, Fence):
            self.queue.append(entry)
            self.machine.wake(self)
        else:
            self.machine.unit(self.place, entry.plan.unit).put(entry)

    def run(self) -> None:
        machine, units = self.machine, self.machine.units[self.place]
        machine.idle_watchers[self.place] = None
        while self.queue:
            entry: Any = self.queue[0]
            if isinstance(entry, Fence):
                if any(name in units and not units[name].idle for name in entry.drains):
                    machine.idle_watchers[self.place] = self
                    return
                machine.passed(self.place, entry)
                for ctr in entry.counters:
                    machine.assign(self.place, ctr, entry.value)
                if entry.full:
                    machine.memory.unread[self.place] = False
                    machine.phases[self.place].clear()
                if entry.token:
                    machine.tokens[self.place] += 1
                    machine.wake(machine.core)
                self.queue.popleft()
            else:
                self.queue.popleft()
                machine.unit(self.place, entry.plan.unit).put(entry)


class Fence:
    """A tile fence on its way through a dispatcher."""

    def __init__(self, instruction: Any, word: int) -> None:
        self.where = f"tile_fence at word {word}, seq {instruction.seq}"
        self.drains = fenced_units(instruction.unit_mask)
        self.full = instruction.unit_mask == ALL_UNITS
        self.counters = [c for c in range(TILE_COUNTERS) if instruction.ctr_mask >> c & 1]
        self.value = signed16(instruction.ctr_value)
        self.token = bool(instruction.token)


class ScalarMemory:
    """4096 words: identifiers, with the words that the core itself has loaded or stored as numbers beside them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.words: dict[int, Any] = {}
        self.stored: dict[int, Any] = {}

    def outside(self, address: Any) -> NoReturn:
        if address is None:
            raise UnwrittenRead(f"{self.machine.core.where}: the address register was never written")
        raise RuleViolation(f"{self.machine.core.where}: scalar memory word {address} is outside 0..{SCALAR_WORDS - 1}")

    def load(self, address: Any) -> Any:
        """A word that is not known as a number yet; Partial if nobody wrote all of it."""
        if not isinstance(address, int) or not 0 <= address < SCALAR_WORDS:
            self.outside(address)
        ids, values = self.machine.memory.scalar[address].copy(), self.machine.values
        if values.level[np.maximum(ids, UNWRITTEN) >> 2].max() > LEVEL_FIXED:
            self.machine.evaluate()
            self.machine.core.tainted = True
        self.machine.core.now.loads[address] = ids
        word = self.words[address] = word_of(ids, values.data)
        return word

    def store(self, address: int, value: Any) -> None:
        if value is None:
            raise UnwrittenRead(f"{self.machine.core.where}: the stored register was never written")
        self.words[address] = self.stored[address] = value

    def write(self, addresses: Any, ids: Ids) -> None:
        """Words that come from the ring."""
        self.flush()
        self.machine.memory.scalar[addresses] = ids
        if self.machine.core.tainted:
            self.machine.recording.actions.append(ScalarForget(addresses.tolist()))
        for address in addresses.tolist():
            self.words.pop(address, None)

    def read(self, addresses: Any) -> Ids:
        """Words for the ring."""
        self.flush()
        return self.machine.memory.scalar[addresses]

    def flush(self) -> None:
        """Give identifiers to the words that the core stored."""
        if self.stored:
            ids = self.machine.core.identify(list(self.stored.values()))
            self.machine.memory.scalar[list(self.stored)] = ids
            if self.machine.core.tainted:
                self.machine.recording.actions.append(ScalarFlush(tuple(self.stored), int(ids[0, 0])))
            self.stored = {}


class ScalarCore(Unit):
    """Executes the program; blocked only by fences and by missing chunks."""

    def __init__(self, machine: Machine, budget: int) -> None:
        super().__init__(machine, "scalar core", SCALAR_NODE)
        self.registers: list[int | None] = [None] * 32
        self.predicates: list[int | None] = [None] * 8
        self.descriptor: list[Any] = [None] * 4
        self.chunks: deque[Chunk] = deque()
        self.chunk: Chunk | None = None
        self.pc = 0
        self.loops: list[list[int]] = []
        self.finished = False
        self.tainted = False
        self.waiting: list[Any] = []
        self.bundles = budget
        self.state = 0
        self.now = ScalarRun(_nothing)
        self.memory = machine.scalar_memory

    @property
    def idle(self) -> bool:
        return self.finished or (self.chunk is None and not self.chunks)

    @property
    def where(self) -> str:
        return f"scalar core at word {self.pc}"

    def run(self) -> None:
        self.waiting.clear()
        while not self.finished:
            if self.chunk is None:
                if not self.chunks:
                    return
                self.chunk, self.pc = self.chunks.popleft(), 0
            if not self.step():
                return

    def step(self) -> bool:
        """One instruction, or one run of bundles; False if blocked."""
        assert self.chunk is not None
        block = self.chunk.block(self.pc)
        if block is not None:
            self.spend(block.cost)
            self.run_block(block)
            self.go(block.end)
            return True
        i = self.chunk.at(self.pc).instruction
        for name, known in KNOWN.items():
            if name in i.fields and getattr(i, name) not in known:
                raise UnknownInstruction.of(i.opcode, name, getattr(i, name), self.where, ", ".join(map(str, known)))
        self.spend(1)
        return self.execute(i)

    def run_block(self, block: Block) -> None:
        """Execute bundles; note what a replay must do again once they have seen data."""
        self.now, actions = ScalarRun(block.run), self.machine.recording.actions
        start = None
        if not self.tainted:
            memory = self.memory
            start = ScalarStart(
                self.registers[:], self.predicates[:], self.descriptor[:], dict(memory.words), dict(memory.stored)
            )
        try:
            block.run(self.registers, self.predicates, self)
        except (TypeError, struct.error):
            raise UnwrittenRead(
                f"scalar bundles at words {self.pc}..{block.end - 1} use a register or predicate that nothing wrote"
            ) from None
        if self.tainted:
            actions += [self.now] if start is None else [start, self.now]

    def decide(self, predicate: bool, number: int, value: int) -> int:
        """A value that the course of the program depends on."""
        if self.tainted:
            self.machine.recording.actions.append(ScalarCheck(predicate, number, value))
        return value

    def spend(self, bundles: int) -> None:
        self.bundles -= bundles
        if self.bundles < 0:
            raise RuleViolation(f"{self.where}: the program goes on for longer than its budget, an endless loop?")

    def predicate(self, number: int) -> int:
        value = self.predicates[number]
        if value is None:
            raise UnwrittenRead(f"{self.where}: predicate p{number} was never written")
        return self.decide(True, number, int(value))

    def register(self, number: int, use: str) -> int:
        value = self.registers[number]
        if not isinstance(value, int):
            raise UnwrittenRead(f"{self.where}: {use} is in s{number}, which was never written")
        return self.decide(False, number, value)

    def go(self, word: int) -> None:
        """Continue at ``word``, or at the start of the innermost loop's body."""
        while self.loops and word == self.loops[-1][1]:
            loop = self.loops[-1]
            loop[2] -= 1
            if loop[2]:
                word = loop[0]
                break
            self.loops.pop()
        self.pc = word

    def execute(self, i: Any) -> bool:
        assert self.chunk is not None
        plan = self.chunk.plan(self.pc)
        if plan is not None:
            self.dispatch(plan, i)
        elif isinstance(i, isa.TileFence):
            fence = Fence(i, self.pc)
            self.machine.dispatched(fence)
            for tile in self.tiles(i.tile_mask):
                self.machine.dispatchers[tile].accept(fence)
        elif isinstance(i, isa.ScalarFence):
            if not self.fence(i):
                return False
        elif isinstance(i, isa.Branch):
            if not i.cond_en or self.predicate(i.cond_reg) == i.cond_val:
                self.jump(i)
                return True
        elif isinstance(i, isa.Loop):
            if self.loops or not i.count or not i.body:
                name = "count" if self.loops or not i.count else "body"
                known = "loops outside of loops, of at least one iteration and one word"
                raise UnknownInstruction.of(i.opcode, name, getattr(i, name), self.where, known)
            self.loops.append([self.pc + 1, self.pc + 1 + i.body, i.count])
        elif isinstance(i, isa.Halt):
            self.halt(i)
            return True
        elif isinstance(i, isa.End):
            raise RuleViolation(f"{self.where}: the bitstream ends without a halt")
        self.go(self.pc + i.words)
        return True

    def jump(self, i: isa.Branch) -> None:
        assert self.chunk is not None
        self.chunk.at(self.pc + i.offset)
        if self.loops:
            raise UnknownInstruction.of(i.opcode, "offset", i.offset, self.where, "branches outside of loops")
        self.pc += i.offset

    def halt(self, i: Any) -> None:
        self.finished = i.code == FINAL
        self.chunk = None

    def tiles(self, mask: int) -> list[int]:
        if not mask & ALL_TILES:
            raise RuleViolation(f"{self.where}: tile_mask = {mask:#x} names no tile")
        return [tile for tile in range(TILES) if mask >> tile & 1]

    def dispatch(self, plan: Plan, i: Any) -> None:
        """Put the instruction into the queues of its tiles, or of the scalar side."""
        machine = self.machine
        if not isinstance(i, isa.TileInstruction):
            job = plan.job(machine, SCALAR_NODE)
            machine.dispatched(job)
            machine.unit(SCALAR_NODE, plan.unit).put(job)
            return
        if not machine.bold and not isinstance(i, isa.N2w | isa.RingSend):
            plan.field_is("tile_mask_indirect", 0)
        mask = self.register(i.tile_mask_reg, "the tile mask") if i.tile_mask_indirect else i.tile_mask
        for tile in self.tiles(mask):
            if isinstance(plan, N2w) and plan.indirect:
                address = self.register(i.addr_reg, "the narrow source address")
                job = N2wJob(machine, plan, tile, address - plan.base)
            else:
                job = plan.job(machine, tile)
            machine.busy[tile] += plan.cycles
            machine.dispatched(job)
            machine.dispatchers[tile].accept(job)
        self.spend(plan.steps * plan.words * mask.bit_count() // STEPS_PER_BUNDLE)

    def fence(self, i: Any) -> bool:
        """Tokens, then counters, then idle units; ``state`` says how far this fence has come."""
        machine = self.machine
        if self.state == 0:
            tiles = [t for t in range(TILES) if i.token_tiles >> t & 1] if i.token_wait else []
            lacking = [t for t in tiles if not machine.tokens[t]]
            if lacking:
                self.waiting.append(f"a token from tiles {', '.join(map(str, lacking))}")
                return False
            for tile in tiles:
                machine.tokens[tile] -= 1
            self.state = 1
        for ctr in range(self.state - 1, 9):
            if i.ctr_mask >> ctr & 1:
                value = i.ctr_value
                if i.wait_mask >> ctr & 1:
                    threshold = getattr(i, f"thr{ctr}")
                    if signed16(machine.counters[SCALAR_NODE][ctr] - threshold) < 0:
                        self.waiting.append((ctr, threshold))
                        machine.waiters[SCALAR_NODE][ctr][self] = threshold
                        return False
                    value = 0
                machine.assign(SCALAR_NODE, ctr, value)
            self.state = ctr + 2
        busy = [n for k, n in enumerate(SCALAR_UNITS) if i.idle_mask >> k & 1 and not machine.unit(SCALAR_NODE, n).idle]
        if busy:
            self.waiting.append(f"{', '.join(busy)} to be idle")
            machine.idle_watchers[SCALAR_NODE] = self
            return False
        machine.idle_watchers[SCALAR_NODE] = None
        self.state = 0
        machine.passed(SCALAR_NODE, i)
        return True

    def identify(self, words: Sequence[Any]) -> Ids:
        """Identifiers ``[n, 4]`` of words that the core computed; 0 for the bytes that nobody wrote."""
        values = self.machine.values
        numbers = [word.value if isinstance(word, Partial) else word for word in words]
        if self.tainted:
            base = values.make(4 * len(words), LEVEL_HOST)
            values.data[base : base + 4 * len(words)] = np.array(numbers, np.uint32).view(np.uint8)
            ids = np.arange(base, base + 4 * len(words), dtype=np.int32).reshape(-1, 4)
        else:
            ids = np.array([values.constant(n) for n in numbers], np.int32)[:, None] + np.arange(4, dtype=np.int32)
        for k, word in enumerate(words):
            if isinstance(word, Partial):
                ids[k, [word.holes >> 8 * b & 0xFF != 0 for b in range(4)]] = UNWRITTEN
        return ids

    def push(self, value: Any) -> None:
        """A word for the host."""
        if value is None:
            raise UnwrittenRead(f"{self.where}: the pushed register was never written")
        ids = self.identify([value]).reshape(-1)
        self.now.pushes.append(int(ids[0]) if self.tainted else None)
        self.machine.host.push(ids)

    def issue(self, word: int) -> None:
        """Issue the host DMA whose descriptor words are set."""
        if None in self.descriptor:
            raise UnwrittenRead(f"scalar at word {word}: descriptor words {self.descriptor} are not all set")
        self.now.issues.append(self.descriptor[:])
        low, high, length, tag = self.descriptor
        self.machine.host.issue(low, high, length, tag, f"scalar at word {word}")
        for unit in tuple(self.machine.starving):
            self.machine.wake(unit)
        self.machine.starving.clear()
