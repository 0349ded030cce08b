"""The record of a program: what its ops computed from what, in identifiers.

Operands of weights and scales are interned: equal identifiers, whichever tile and slice they were found by, are one
entry, so that work on the same parameters can be joined. Source: docs/chip.md, section Record and replay.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


class Interned:
    """Arrays of identifiers by content."""

    def __init__(self) -> None:
        self.entries: list[Ids] = [np.zeros(0, np.int32)]
        self.numbers: dict[tuple[tuple[int, ...], bytes], int] = {}

    def intern(self, arrays: Ids) -> NDArray[np.int32]:
        """Numbers of the arrays along the first axis."""
        out = np.empty(len(arrays), np.int32)
        shape = arrays.shape[1:]
        for k, array in enumerate(arrays):
            key = (shape, array.tobytes())
            number = self.numbers.get(key)
            if number is None:
                number = self.numbers[key] = len(self.entries)
                self.entries.append(array.copy())
            out[k] = number
        return out


class Trace:
    """What a program did so far."""

    def __init__(self) -> None:
        self.weights, self.scales = Interned(), Interned()
        self.items: list[tuple[Any, int, int]] = []
