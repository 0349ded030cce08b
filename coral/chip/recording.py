"""Record and replay: what a program did depends on its instructions only, so the next call just repeats the arithmetic.

A recording is the list of a program's effects on values: bytes that arrive, batches of op results, stretches of scalar
code that saw data, bytes that leave. It holds as long as the host sends the same instructions and amounts, in the same
portions, and the rows of wide memory that it uses are written. Scalar code is run again and its decisions compared;
``Diverged`` means that the program must be executed anew. Source: docs/chip.md, section Record and replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coral.chip.blas import one_thread
from coral.chip.errors import ChipError
from coral.chip.layout import DYNAMIC0, ROW_BYTES, TILES, WIDE0, WIDE_ROWS
from coral.chip.scalar_code import Partial, Run

if TYPE_CHECKING:
    from coral.chip.memories import Memory, Values
    from coral.chip.nodes import Node

Ids = NDArray[np.int32]
Feeds = Sequence[tuple[int, bytes]]
Signature = tuple[tuple[int, bytes | int], ...]


class Diverged(Exception):
    """Scalar code decided otherwise than when it was recorded."""


def signature(feeds: Feeds) -> Signature:
    """What must be the same for a recording to hold: instructions by content, data by length."""
    return tuple((tag, data if tag == 0 else len(data)) for tag, data in feeds)


def word_of(ids: Ids, data: NDArray[np.uint8]) -> Any:
    """The 32-bit word in four identifiers; Partial if some are unwritten."""
    holes = sum(0xFF << 8 * k for k in range(4) if ids[k] <= 0)
    return Partial.of(int.from_bytes(data[np.maximum(ids, 0)].tobytes(), "little"), holes)


@dataclass
class Arrival:
    """A host DMA enters its stream."""

    tag: int
    base: int
    length: int

    def replay(self, run: Replay) -> None:
        data = run.fed[self.tag].popleft()
        run.values.data[self.base : self.base + self.length] = np.frombuffer(data, np.uint8)


@dataclass
class Compute:
    """Op results."""

    nodes: list[Node]

    def replay(self, run: Replay) -> None:
        with one_thread():
            for node in self.nodes:
                node.run(run.values)


@dataclass
class ScalarStart:
    """The scalar core as it was before the first bundles that saw data."""

    registers: list[Any]
    predicates: list[Any]
    descriptor: list[Any]
    words: dict[int, Any]
    stored: dict[int, Any]

    def replay(self, run: Replay) -> None:
        run.registers, run.predicates = self.registers[:], self.predicates[:]
        run.descriptor = self.descriptor[:]
        run.words, run.stored = dict(self.words), dict(self.stored)


@dataclass
class ScalarRun:
    """A run of bundles: the words it loaded, where its pushed words went (None: constants), what it issued."""

    run: Run
    loads: dict[int, Ids] = field(default_factory=dict)
    pushes: list[int | None] = field(default_factory=list)
    issues: list[list[Any]] = field(default_factory=list)

    def replay(self, run: Replay) -> None:
        run.now, run.pushed, run.issued = self, [], []
        try:
            self.run(run.registers, run.predicates, run)
        except (TypeError, ValueError, ChipError) as error:
            raise Diverged from error
        if run.issued != self.issues or len(run.pushed) != len(self.pushes):
            raise Diverged
        words = run.values.data.view("<u4")
        for base, value in zip(self.pushes, run.pushed, strict=True):
            if base is not None:
                if not isinstance(value, int):
                    raise Diverged
                words[base >> 2] = value


@dataclass
class ScalarFlush:
    """Stored words become identifiers."""

    addresses: tuple[int, ...]
    base: int

    def replay(self, run: Replay) -> None:
        values = list(run.stored.values())
        if tuple(run.stored) != self.addresses or not all(isinstance(v, int) for v in values):
            raise Diverged
        run.values.data.view("<u4")[self.base >> 2 : (self.base >> 2) + len(values)] = values
        run.stored = {}


@dataclass
class ScalarForget:
    """Words of scalar memory are overwritten from the ring."""

    addresses: list[int]

    def replay(self, run: Replay) -> None:
        for address in self.addresses:
            run.words.pop(address, None)


@dataclass
class ScalarCheck:
    """A register or predicate decided something."""

    predicate: bool
    number: int
    value: int

    def replay(self, run: Replay) -> None:
        found = (run.predicates if self.predicate else run.registers)[self.number]
        if found is None or found != self.value:
            raise Diverged


@dataclass
class Segment:
    """What happens between two calls of ``Chip.run``."""

    feeds: Signature
    actions: list[Any]
    state: Any = None
    missing: tuple[int, int] | None = None
    delivered: list[Ids | int] = field(default_factory=list)
    issued: int = 0


class Recording:
    """One execution of a program."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.actions: list[Any] = []
        self.versions: NDArray[np.int64] | None = None

    def end_segment(
        self, feeds: Feeds, state: Any, missing: tuple[int, int] | None, delivered: list[Any], issued: int
    ) -> None:
        """``Chip.run`` returns; the program has issued so many descriptors."""
        self.segments.append(Segment(signature(feeds), self.actions, state, missing, delivered, issued))
        self.actions = []

    def complete(self, values: Values, final: tuple[Any, Any, Ids], info: dict[str, Any]) -> None:
        """The program is finished: what it left in wide memory, and which of its old content it used."""
        self.final = final
        self.info, self.used = info, values.used
        bases = np.array(list(values.constants.values()), np.int64) >> 2
        self.constants = bases, np.array(list(values.constants), np.uint32)
        used = np.zeros((TILES * WIDE_ROWS, ROW_BYTES), bool)
        for array in self.identifiers():
            old = array[(array >= WIDE0) & (array < DYNAMIC0)]
            used.reshape(-1)[old - WIDE0] = True
        self.used_rows = np.flatnonzero(used.any(axis=1))
        self.used_bytes = used[self.used_rows]

    def nodes(self) -> list[Node]:
        """All op results, in order."""
        return [n for s in self.segments for a in s.actions if isinstance(a, Compute) for n in a.nodes]

    def identifiers(self) -> Any:
        """All identifiers whose values the recording reads."""
        for node in self.nodes():
            yield from node.identifiers()
        for segment in self.segments:
            yield from (item for item in segment.delivered if not isinstance(item, int))
            for action in segment.actions:
                if isinstance(action, ScalarRun):
                    yield from action.loads.values()
        yield self.final[2]

    def holds(self, memory: Memory, versions: NDArray[np.int64]) -> bool:
        """Whether the old content it used is there; if it has changed, what was derived from it is forgotten."""
        now = versions[self.used_rows]
        if self.versions is None or not np.array_equal(now, self.versions):
            written = memory.wide.reshape(-1, ROW_BYTES)[self.used_rows] > 0
            if not written[self.used_bytes].all():
                return False
            for node in self.nodes():
                node.constants = None
            self.versions = now
        return True


class Replay:
    """A recording being repeated; the scalar code's view of the core, too."""

    def __init__(self, recording: Recording, values: Values) -> None:
        self.recording, self.values = recording, values
        self.position = 0
        self.fed: dict[int, deque[bytes]] = {1: deque(), 2: deque()}
        self.registers: list[Any] = []
        self.predicates: list[Any] = []
        self.descriptor: list[Any] = []
        self.words: dict[int, Any] = {}
        self.stored: dict[int, Any] = {}
        self.now: ScalarRun | None = None
        self.pushed: list[Any] = []
        self.issued: list[list[Any]] = []
        self.memory = self
        values.restart()
        values.reserve(recording.used)
        bases, words = recording.constants
        values.data.view(np.uint32)[bases] = words

    def step(self, feeds: Feeds) -> Segment | None:
        """The next segment; None if the host did something else than recorded, or scalar code decided otherwise."""
        segments = self.recording.segments
        if self.position == len(segments) or signature(feeds) != segments[self.position].feeds:
            return None
        segment = segments[self.position]
        self.position += 1
        for tag, data in feeds:
            if tag:
                self.fed[tag].append(data)
        try:
            for action in segment.actions:
                action.replay(self)
        except Diverged:
            return None
        return segment

    def load(self, address: Any) -> Any:
        """A word of scalar memory that came from the ring."""
        assert self.now is not None
        ids = self.now.loads.get(address)
        if ids is None:
            raise TypeError
        word = self.words[address] = word_of(ids, self.values.data)
        return word

    def store(self, address: int, value: Any) -> None:
        self.words[address] = self.stored[address] = value

    def outside(self, address: Any) -> None:
        raise TypeError

    def push(self, value: Any) -> None:
        self.pushed.append(value)

    def issue(self, word: int) -> None:
        self.issued.append(self.descriptor[:])
