"""Memories, queues and the scaling store, as identifiers of bytes.

Source: docs/chip.md, sections Values are identifiers, Memories and what survives.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral.chip.errors import Hazard
from coral.chip.layout import (
    DYNAMIC0,
    LEVEL_FIXED,
    NARROW_WORDS,
    ROW_BYTES,
    SCALAR_WORDS,
    SCALING_ENTRIES,
    STAGING_UNITS,
    TILES,
    UNIT_BYTES,
    WIDE0,
    WIDE_ROWS,
)

Ids = NDArray[np.int32]
Rows = NDArray[np.int64]


class Values:
    """Byte values by identifier, and the dependency level of every aligned word of them."""

    def __init__(self) -> None:
        self.data = np.zeros(DYNAMIC0 + (1 << 20), np.uint8)
        self.level = np.zeros(len(self.data) // 4, np.int16)
        self.used = DYNAMIC0
        self.constants: dict[int, int] = {}

    def restart(self) -> None:
        """Forget everything that the last program made."""
        self.used = DYNAMIC0
        self.constants = {}

    def reserve(self, used: int) -> None:
        """Make room for identifiers below ``used``."""
        if used > len(self.data):
            grown = np.zeros(max(used, len(self.data) * 3 // 2) + 3 & ~3, np.uint8)
            grown[: len(self.data)] = self.data
            level = np.zeros(len(grown) // 4, np.int16)
            level[: len(self.level)] = self.level
            self.data, self.level = grown, level

    def make(self, size: int, level: int) -> int:
        """First of ``size`` new identifiers, aligned to a word, all of dependency level ``level``."""
        base = self.used
        self.used = base + size + 3 & ~3
        self.reserve(self.used)
        self.level[base >> 2 : self.used >> 2] = level
        return base

    def constant(self, word: int) -> int:
        """First identifier of the four bytes of a 32-bit constant."""
        base = self.constants.get(word)
        if base is None:
            base = self.constants[word] = self.make(4, LEVEL_FIXED)
            self.data[base : base + 4] = np.frombuffer(word.to_bytes(4, "little"), np.uint8)
        return base


class Memory:
    """The memories as identifiers.

    Only rows that a program loaded to stay (``resident``: by a ring consumer that waits for nothing) keep their content
    for the next program. Whether anything else survives is not known, so nothing may rely on it. ``lost`` are rows
    whose parameters a later program overwrote. With ``survives`` every row counts as loaded to stay, and narrow memory
    keeps its content, too.
    """

    def __init__(self, *, survives: bool = False) -> None:
        self.survives = survives
        self.kept: tuple[NDArray[np.bool_], NDArray[np.uint8]] | None = None
        self.wide: Ids = np.zeros((TILES, WIDE_ROWS, ROW_BYTES), np.int32)
        self.dirty = np.zeros((TILES, WIDE_ROWS), bool)
        self.resident = np.zeros((TILES, WIDE_ROWS), bool)
        self.lost = np.zeros((TILES, WIDE_ROWS), bool)
        self.restart()

    def restart(self, values: Values | None = None) -> None:
        """What a new program finds: resident rows as they were, kept narrow memory, everything else unwritten."""
        self.narrow: Ids = np.zeros((TILES, NARROW_WORDS, 4), np.int32)
        if self.kept is not None and values is not None:
            written, data = self.kept
            base = values.make(data.size, LEVEL_FIXED)
            values.data[base : base + data.size] = data.reshape(-1)
            self.narrow = np.where(written, base + np.arange(data.size, dtype=np.int32).reshape(data.shape), 0)
        self.scalar: Ids = np.zeros((SCALAR_WORDS, 4), np.int32)
        self.staging = {s: np.zeros((n, UNIT_BYTES[s]), np.int32) for s, n in STAGING_UNITS.items()}
        self.scaling: Ids = np.zeros((TILES, SCALING_ENTRIES, 8), np.int32)
        self.unread = np.zeros((TILES, WIDE_ROWS), bool)

    def keep(self, values: Values) -> None:
        """Remember what narrow memory holds, if it survives."""
        if self.survives:
            self.kept = self.narrow > 0, values.data[np.maximum(self.narrow, 0)]

    def settle(self) -> tuple[Rows, Rows, Ids]:
        """Wide rows that the program wrote for its own use, and those it loaded to stay with their identifiers."""
        own, stay = np.flatnonzero(self.dirty & ~self.resident), np.flatnonzero(self.dirty & self.resident)
        return own, stay, self.wide.reshape(-1, ROW_BYTES)[stay]

    def close(self, own: Rows, stay: Rows, ids: Ids) -> None:
        """Wide memory as the next program finds it, after one that wrote these rows."""
        wide, resident, lost = self.wide.reshape(-1, ROW_BYTES), self.resident.reshape(-1), self.lost.reshape(-1)
        lost[own] |= resident[own]
        resident[own], resident[stay], lost[stay] = False, True, False
        self.dirty.fill(False)
        wide[own] = 0
        wide[stay] = np.where(ids > 0, (WIDE0 + stay * ROW_BYTES)[:, None] + np.arange(ROW_BYTES), 0)

    def abandon(self) -> None:
        """Forget what a program wrote that did not come to its end."""
        if self.dirty.any():
            self.close(np.flatnonzero(self.dirty), np.zeros(0, np.int64), np.zeros((0, ROW_BYTES), np.int32))

    def note(self, tile: int, rows: Any, stay: bool) -> None:
        """Rows of wide memory are written, to stay for later programs or not."""
        self.dirty[tile, rows] = True
        stay = stay or self.survives
        if stay:
            self.lost[tile, rows] = False
        else:
            self.lost[tile, rows] |= self.resident[tile, rows]
        self.resident[tile, rows] = stay


class Queue:
    """Packets (rows of 256 identifiers) or words on their way, oldest first, in the pieces they were sent in."""

    def __init__(self) -> None:
        self.pieces: deque[Ids] = deque()
        self.size = 0

    def put(self, piece: Ids) -> None:
        self.pieces.append(piece)
        self.size += len(piece)

    def take(self, count: int) -> Ids:
        """The ``count`` oldest items, stacked."""
        self.size -= count
        first = self.pieces[0]
        if len(first) > count:
            self.pieces[0] = first[count:]
            return first[:count]
        taken: list[Ids] = []
        while count:
            first = self.pieces.popleft()
            if len(first) > count:
                self.pieces.appendleft(first[count:])
                first = first[:count]
            taken.append(first)
            count -= len(first)
        return taken[0] if len(taken) == 1 else np.concatenate(taken)


class ScalingStore:
    """Which slots of a tile's scaling store hold a group that the op has not begun with, and which one it is using."""

    def __init__(self) -> None:
        self.fresh: set[int] = set()
        self.held: int | None = None

    def take(self, slot: int) -> None:
        """The op begins with the group in ``slot``."""
        self.fresh.discard(slot)
        self.held = slot

    def load(self, slot: int, begins: bool, where: str) -> None:
        """Words of a group are written to ``slot``; Hazard if the op still needs what they replace."""
        if slot == self.held or (begins and slot in self.fresh):
            raise Hazard(f"{where} overwrites slot {slot} of the scaling store before the op has used it")
        self.fresh.add(slot)
