"""What an operator's reference function gets and gives. Source: docs/numerics.md, "Layer references"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import CoralError
from coral.package.graph import Tensor

CODE_OFFSETS = {np.dtype(np.uint8): 0, np.dtype(np.int8): 128}
"""What the chip's unsigned codes have more than a tensor's values."""


class EvaluateError(CoralError):
    """A graph, input or operator that the judge cannot compute; the message names operator or tensor."""


@dataclass(frozen=True)
class Operand:
    """A tensor of the graph with its value; for an output that is still to be computed, ``value`` is None."""

    tensor: Tensor
    value: NDArray[Any] | None = None

    @property
    def array(self) -> NDArray[Any]:
        """The value. :raises EvaluateError: the operand is an output or was never computed."""
        if self.value is None:
            raise EvaluateError(f"tensor {self.tensor.name!r} is read before an operator computes it")
        return self.value

    @property
    def offset(self) -> int:
        """0 for uint8 and 128 for int8 tensors. :raises EvaluateError: any other dtype."""
        offset = None if self.tensor.dtype is None else CODE_OFFSETS.get(self.tensor.dtype)
        if offset is None:
            raise EvaluateError(
                f"tensor {self.tensor.name!r} is {self.tensor.dtype}, the chip's codes are uint8 or int8"
            )
        return offset

    @property
    def codes(self) -> NDArray[np.uint8]:
        """The value as the chip holds it: uint8, int8 values plus 128."""
        return (self.array.astype(np.int16) + self.offset).astype(np.uint8)

    @property
    def scale(self) -> float:
        """Scale of a tensor quantised as a whole. :raises coral.package.PackageError: it has none or several."""
        return self.tensor.scale

    @property
    def zero_point(self) -> int:
        """Zero point in the chip's codes.

        :raises EvaluateError: it lies outside 0..255
        :raises coral.package.PackageError: the tensor has none or several
        """
        if not 0 <= (zero_point := self.tensor.zero_point + self.offset) <= 255:
            raise EvaluateError(f"tensor {self.tensor.name!r} has zero point {zero_point} in codes of 0..255")
        return zero_point

    def from_codes(self, codes: NDArray[np.uint8]) -> NDArray[Any]:
        """An output's value from the chip's codes, in the tensor's dtype and shape."""
        return self.shaped((codes.astype(np.int16) - self.offset).astype(self.tensor.dtype))

    def shaped(self, array: NDArray[Any]) -> NDArray[Any]:
        """``array`` in the tensor's shape. :raises EvaluateError: another number of elements."""
        if array.size != math.prod(self.tensor.shape):
            raise EvaluateError(
                f"tensor {self.tensor.name!r} has shape {self.tensor.shape}, its operator computes {array.shape}"
            )
        return array.reshape(self.tensor.shape)


@dataclass(frozen=True)
class Call:
    """One operator of the graph: operands in TFLite's order (None where left out) and its options."""

    name: str
    inputs: tuple[Operand | None, ...]
    outputs: tuple[Operand, ...]
    options: dict[str, Any]

    def input(self, index: int) -> Operand:
        """An input that must be there. :raises EvaluateError: it is left out."""
        if index >= len(self.inputs) or (operand := self.inputs[index]) is None:
            raise EvaluateError(f"{self.name} lacks its input {index}")
        return operand

    def optional(self, index: int) -> Operand | None:
        """An input or None."""
        return self.inputs[index] if index < len(self.inputs) else None

    @property
    def output(self) -> Operand:
        """The only output. :raises EvaluateError: there is not exactly one."""
        if len(self.outputs) != 1:
            raise EvaluateError(f"{self.name} has {len(self.outputs)} outputs, expected is one")
        return self.outputs[0]
