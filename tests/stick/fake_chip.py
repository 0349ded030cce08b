"""A chip that understands scripts instead of instructions, for tests of what surrounds a chip.

A script is made of 16-byte words: a letter, a length, and the host address that its descriptor names (``A8@0x100``).
``A n`` / ``P n``: ask for n bytes of input / parameters and wait for them; ``K n``: parameters that stay resident;
``a n`` / ``p n``: ask only, ``W``: wait for the oldest asked; ``O n``: n bytes of output; ``!``: interrupt 0;
``N``: the program goes on in the next chunk; ``X``: an error.
Output k of a program is a function of the resident parameters, all bytes consumed so far, and k.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import deque
from collections.abc import Iterator
from enum import Enum

from coral import CoralError
from coral.package.program import (
    Base,
    Bitstream,
    DmaHint,
    InstructionHint,
    InterruptHint,
    Kind,
    Layer,
    Program,
)


class State(Enum):
    IDLE = 0
    NEEDS_HOST = 1
    FINISHED = 2


class ScriptError(CoralError):
    """Stands for any error of a real simulated chip."""


def script(*steps: str) -> bytes:
    words = []
    for step in steps:
        size, _, address = step[1:].partition("@")
        words.append(struct.pack("<cIQ3x", step[0].encode(), int(size or 0), int(address or "0", 0)))
    return b"".join(words)


def output_bytes(resident: bytes, consumed: bytes, index: int, size: int) -> bytes:
    """What the chip computes; the tests' independent reference."""
    seed = hashlib.sha256(resident + b"|" + consumed + b"|" + bytes([index])).digest()
    return (seed * (size // len(seed) + 1))[:size]


class FakeChip:
    def __init__(self, delay_s: float = 0.0) -> None:
        self.resets, self.delay_s, self.cycles = 0, delay_s, 0
        self.reset()

    def reset(self) -> None:
        self.resets += 1
        self.outputs: deque[bytes] = deque()
        self.interrupts: deque[int] = deque()
        self.descriptors: list[tuple[int, ...]] = []
        self.missing: tuple[int, int] | None = None
        self.resident = b""
        self._queues: dict[int, deque[bytes]] = {tag: deque() for tag in range(3)}
        self._running: Iterator[tuple[int, int]] | None = None

    def feed(self, tag: int, data: bytes) -> None:
        self._queues[tag].append(data)

    def run(self) -> State:
        time.sleep(self.delay_s)
        if self._running is None:
            if not self._queues[0]:
                return State.IDLE
            self.descriptors = []
            self._running = self._program(self._queues[0].popleft())
        self.missing = next(self._running, None)
        if self.missing is not None:
            return State.NEEDS_HOST
        self._running = None
        return State.FINISHED

    def _take(self, tag: int, size: int) -> Iterator[tuple[int, int]]:
        while not self._queues[tag]:
            yield tag, size
        data = self._queues[tag].popleft()
        if len(data) != size:
            raise ScriptError(f"tag {tag}: {len(data)} bytes instead of {size}")
        return data

    def _program(self, chunk: bytes) -> Iterator[tuple[int, int]]:
        consumed, asked, produced, position = b"", deque(), 0, 0
        while position < len(chunk):
            letter, size, address = struct.unpack_from("<cIQ", chunk, position)
            position += 16
            if letter in b"AaPpK":
                tag = 1 if letter in b"Aa" else 2
                self.descriptors.append((tag, size, address))
                asked.append((tag, size))
            if letter == b"W":
                consumed += yield from self._take(*asked.popleft())
            elif letter in b"AP":
                consumed += yield from self._take(*asked.pop())
            elif letter == b"K":
                self.resident = yield from self._take(*asked.pop())
            elif letter == b"O":
                self.descriptors.append((3, size, address))
                self.outputs.append(output_bytes(self.resident, consumed, produced, size))
                produced += 1
            elif letter == b"!":
                self.descriptors.append((4, 0, 0))
                self.interrupts.append(0)
            elif letter == b"N":
                chunk, position = (yield from self._take_chunk()), 0
            elif letter == b"X":
                raise ScriptError("a byte that nothing wrote was read at tile 3, row 17")

    def _take_chunk(self) -> Iterator[tuple[int, int]]:
        while not self._queues[0]:
            yield 0, 16
        return self._queues[0].popleft()


def layer(name: str, size: int) -> Layer:
    return Layer(name, size, 1, 1, size, 0, 1.0)


def caching_program(parameters: bytes, token: int = 7) -> Program:
    steps = [f"K{len(parameters)}", "!"]
    hints = (InstructionHint(0), DmaHint(Base.PARAMETER, 0, len(parameters)), InterruptHint(0))
    return Program(Kind.PARAMETER_CACHING, (Bitstream(script(*steps)),), hints, parameters, token=token)


def execution_program(pattern: str, *, parameters: bytes = b"", token: int = 7, steps: str | None = None) -> Program:
    """A program out of a pattern of hints such as ``"A256 O64 !"``: inputs in0.., outputs out0.. in order.

    ``I`` is another chunk. ``steps`` is what the chip really does, where it differs from the hints.
    """
    hints: list = [InstructionHint(0)]
    inputs, outputs, offset, chunk = [], [], 0, 0
    for word in pattern.split():
        size = int(word[1:] or 0)
        if word[0] == "A":
            inputs.append(layer(f"in{len(inputs)}", size))
            hints.append(DmaHint(Base.INPUT, 0, size, inputs[-1].name))
        elif word[0] == "P":
            hints.append(DmaHint(Base.PARAMETER, offset, size))
            offset += size
        elif word[0] == "O":
            outputs.append(layer(f"out{len(outputs)}", size))
            hints.append(DmaHint(Base.OUTPUT, 0, size, outputs[-1].name, out=True))
        elif word[0] == "!":
            hints.append(InterruptHint(0))
        elif word[0] == "I":
            chunk += 1
            hints.append(InstructionHint(chunk))
    chunks = [part.split() for part in (steps or pattern).replace("I", "N I").split("I")]
    return Program(
        Kind.EXECUTION_ONLY,
        tuple(Bitstream(script(*part)) for part in chunks),
        tuple(hints),
        parameters,
        tuple(inputs),
        tuple(outputs),
        token=token,
    )
