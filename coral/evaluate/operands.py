"""What an operator's reference function gets and gives. Source: docs/evaluate.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coral import CoralError, numerics
from coral.package.graph import Tensor

Generation = Literal["new", "old"]
"""Of Google's compiler, where the two compute differently: average pools and SOFTMAX."""
MAX_ELEMENTS = 2**26
"""Largest tensor that is computed: a damaged file must not take all memory."""
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
    def is_constant(self) -> bool:
        """Whether the file holds the value."""
        return self.tensor.data is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value, or of the tensor where it has none yet."""
        return self.tensor.shape if self.value is None else self.value.shape

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
        return self.array.view(np.uint8) ^ np.uint8(self.offset) if self.offset else self.array

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

    @property
    def centred(self) -> NDArray[np.int32]:
        """Codes less zero point, int32."""
        return self.codes.astype(np.int32) - np.int32(self.zero_point)

    def from_codes(self, codes: NDArray[np.uint8]) -> NDArray[Any]:
        """An output's value from the chip's codes, in the tensor's dtype and shape."""
        return self.shaped((codes ^ np.uint8(128)).view(np.int8) if self.offset else codes)

    def shaped(self, array: NDArray[Any]) -> NDArray[Any]:
        """``array`` in the tensor's shape. :raises EvaluateError: another number of elements."""
        if array.size != math.prod(self.tensor.shape):
            raise EvaluateError(
                f"tensor {self.tensor.name!r} has shape {self.tensor.shape}, its operator computes {array.shape}"
            )
        return array.reshape(self.tensor.shape)

    def same_quantisation(self, other: Operand) -> bool:
        """Whether codes mean the same in both tensors."""
        return (self.scale, self.zero_point) == (other.scale, other.zero_point)


@dataclass(frozen=True)
class Call:
    """One operator of the graph: operands in TFLite's order (None where left out) and its options."""

    name: str
    inputs: tuple[Operand | None, ...]
    outputs: tuple[Operand, ...]
    options: dict[str, Any]
    generation: Generation = "new"

    def input(self, index: int) -> Operand:
        """An input that must be there. :raises EvaluateError: it is left out."""
        if index >= len(self.inputs) or (operand := self.inputs[index]) is None:
            raise EvaluateError(f"input {index} is missing")
        return operand

    def optional(self, index: int) -> Operand | None:
        """An input or None."""
        return self.inputs[index] if index < len(self.inputs) else None

    def constant(self, index: int) -> NDArray[np.int64]:
        """An integer input that the file holds, int64. :raises EvaluateError: it is computed, or not of integers."""
        operand = self.input(index)
        if not operand.is_constant or not np.issubdtype(operand.array.dtype, np.integer):
            raise EvaluateError(f"input {index} ({operand.tensor.name!r}) must be a constant of integers")
        return operand.array.astype(np.int64)

    def number(self, index: int) -> int:
        """A constant of one integer. :raises EvaluateError: it is something else."""
        if (values := self.constant(index)).size != 1:
            raise EvaluateError(f"input {index} has the shape {values.shape}, expected is one integer")
        return int(values.ravel()[0])

    @property
    def output(self) -> Operand:
        """The only output. :raises EvaluateError: there is not exactly one."""
        if len(self.outputs) != 1:
            raise EvaluateError(f"there are {len(self.outputs)} outputs, expected is one")
        return self.outputs[0]

    @property
    def activation(self) -> str:
        """The fused activation's TFLite name."""
        return self.options.get("fused_activation_function", "NONE")

    def image(self, index: int) -> Operand:
        """An input ``[N, H, W, C]``. :raises EvaluateError: another rank, or no elements."""
        operand = self.input(index)
        if len(operand.shape) != 4 or 0 in operand.shape:
            raise EvaluateError(f"input {index} has shape {operand.shape}, expected is [N, H, W, C]")
        return operand

    def require(self, **expected: Any) -> None:
        """:raises EvaluateError: an option that is not among the expected values (a value, or a tuple of them)."""
        for option, value in expected.items():
            allowed = value if isinstance(value, tuple) else (value,)
            if option in self.options and self.options[option] not in allowed:
                raise EvaluateError(f"option {option} is {self.options[option]!r}, supported is {value!r}")

    def output_stage(self, acc: NDArray[np.int32], mult: Any, **options: Any) -> tuple[NDArray[Any], ...]:
        """The only output's value from accumulators and multiplier, with the fused activation's clamps."""
        y = self.output
        low, high = numerics.clamps(y.scale, y.zero_point, options.pop("activation", self.activation))
        return (y.from_codes(numerics.requantise(acc, mult, low, high, y.zero_point, **options)),)


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front. :raises EvaluateError: there is no such axis."""
    if not -rank <= axis < rank:
        raise EvaluateError(f"axis {axis} of a tensor with {rank} dimensions")
    return axis % rank


Function = Callable[[Call], tuple[NDArray[Any], ...]]
OPERATORS: dict[str, Function] = {}
"""The reference functions by TFLite's builtin names."""


def operator(*names: str) -> Callable[[Function], Function]:
    """Registers the reference function of the builtin operators ``names``."""

    def register(function: Function) -> Function:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register
