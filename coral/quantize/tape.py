"""What quantised layers do during one call of a model, for those who write it down in another form.

Source: docs/quantize.md, "Export".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tinygrad.tensor import Tensor
from tinygrad.uop.ops import UOp


@dataclass(frozen=True)
class Step:
    """Codes were made.

    :param kind: "quantise", "layer", "sum", "mean", "max" or "clip"
    :param result: node of the uint8 codes, ``inputs`` the nodes it came from (real values for "quantise")
    :param quant: the codes' :class:`~coral.quantize.peel.Quant`
    :param detail: the layer, or the (lowest, highest) code
    """

    kind: str
    result: UOp
    inputs: tuple[UOp, ...]
    quant: Any
    detail: Any = None


_tape: list[Step] | None = None


@contextmanager
def taping() -> Iterator[list[Step]]:
    """Inside, every step is appended to the list."""
    global _tape
    before, _tape = _tape, []
    try:
        yield _tape
    finally:
        _tape = before


def note(kind: str, result: Tensor, inputs: tuple[Tensor, ...], quant: Any, detail: Any = None) -> Tensor:
    """Tells the tape, if one is running; gives ``result``."""
    if _tape is not None:
        _tape.append(Step(kind, result.uop, tuple(t.uop for t in inputs), quant, detail))
    return result
