"""``coral.load``: a compiled model as a function of arrays, on a stick or a simulated one. Source: docs/run.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coral import CoralError, timing
from coral.apps.host import HostPart, available
from coral.numerics import inv
from coral.package.graph import Graph
from coral.package.program import Kind, Layer, Program
from coral.package.tensors import pack_input, unpack_output
from coral.package.tflite_file import EdgeTpuModel, read_edgetpu

Array = NDArray[Any]


class ModelError(CoralError):
    """A model or an array that cannot be used as given; the message names tensor, value and what is possible."""


class Target(Protocol):
    """What a model runs on: a driver's stick, or ``coral.apps.direct.DirectChip``."""

    clock_hz: Any

    def run(self, program: Program, inputs: Any = None) -> dict[str, bytes]: ...
    def ensure_cached(self, caching: Program) -> bool: ...


@dataclass(frozen=True)
class Port:
    """An input or output of a model: a TFLite tensor; ``scale`` is None where it is not quantised as a whole."""

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    scale: float | None
    zero_point: int

    def codes(self, array: ArrayLike) -> Array:
        """``array`` in this tensor's shape and dtype. Axes of length 1 may be missing or extra; floats for a quantised
        tensor become codes, ``rint(f32(x) * f32(1 / scale)) + zero point``, saturated.

        :raises ModelError: other shape or dtype, or not a number
        """
        given = np.asarray(array)
        if [n for n in given.shape if n != 1] != [n for n in self.shape if n != 1]:
            raise ModelError(f"input {self.name!r} must have shape {self.shape}, given is {given.shape}")
        if given.dtype != self.dtype:
            if given.dtype.kind != "f" or (self.scale is None and self.dtype.kind != "f"):
                wanted = f"{self.dtype} (or floats)" if self.scale is not None else f"{self.dtype}"
                raise ModelError(f"input {self.name!r} must be {wanted}, given is {given.dtype}")
            given = self._quantised(given.astype(np.float32)) if self.scale is not None else given.astype(self.dtype)
        return np.ascontiguousarray(given.reshape(self.shape))

    def _quantised(self, values: Array) -> Array:
        if np.isnan(values).any():
            raise ModelError(f"input {self.name!r} contains NaN, which has no code")
        limits = np.iinfo(self.dtype)
        with np.errstate(over="ignore"):
            codes = np.rint(values * inv(self.scale or 1.0)) + self.zero_point
        return np.clip(codes, limits.min, limits.max).astype(self.dtype)

    def values(self, codes: Array) -> NDArray[np.float32]:
        """Real values, float32, of this tensor's codes; a tensor without scale is only converted."""
        if self.scale is None:
            return codes.astype(np.float32)
        return (codes.astype(np.int64) - self.zero_point).astype(np.float32) * np.float32(self.scale)


class Model:
    """A compiled model that is ready to be called; made by :func:`load`.

    ``inputs`` and ``outputs`` are what a call takes and gives: the whole model's, or, where operators are left to the
    host and nothing runs them, the chip part's; ``left`` names those operators, before and behind the chip part.
    ``layers`` are the chip's inputs, variables too: tensor numbers and layers.
    Models compiled together share a parameter caching token and stay resident together when they are loaded on the same
    device; others displace each other, and are sent again when they are called.
    """

    def __init__(self, file: EdgeTpuModel, target: Target, *, name: str = "", host: bool = True) -> None:
        """Use :func:`load`. ``host`` False leaves operators outside the chip part alone. ModelError, PackageError."""
        self.file, self.target, self.name = file, target, name
        self.program = file.package.execution
        caching = [p for p in file.package.programs if p.kind is Kind.PARAMETER_CACHING]
        self.caching = caching[0] if caching and self.program.kind is Kind.EXECUTION_ONLY else None
        graph, operator = file.graph, file.graph.operators[file.operator]
        self.layers = [(i, _layer(graph, i, self.program.inputs)) for i in operator.inputs if i >= 0]
        self._results = [(i, _layer(graph, i, self.program.outputs)) for i in operator.outputs if i >= 0]
        self._variables = {i for i, _ in self.layers if graph.tensors[i].is_variable}
        before, behind = _around(file)
        self._parts: list[HostPart | None] = [None, None]
        self.left: tuple[str, ...] = ()
        chip = [i for i, _ in self.layers if i not in self._variables], [i for i, _ in self._results]
        ends: tuple[Sequence[int], Sequence[int]] = graph.inputs, graph.outputs
        if (before or behind) and not (host and available()):
            self.left, ends = tuple(graph.operators[number].name for number in (*before, *behind)), chip
        elif before:
            self._parts[0] = HostPart(file, before, graph.inputs, _made(graph, before))
        if behind and not self.left:
            known = {*graph.inputs, *chip[0], *chip[1], *_made(graph, before)}
            self._parts[1] = HostPart(file, behind, _used(graph, behind, known), graph.outputs)
        self.inputs, self.outputs = (tuple(_port(graph, i) for i in side) for side in ends)

    def __call__(self, inputs: ArrayLike | Sequence[ArrayLike] | Mapping[str, ArrayLike]) -> Array | dict[str, Array]:
        """Outputs by name, or the array itself where there is one output, in the tensors' shapes and dtypes.

        ``inputs``: by name, in order, or the array itself where there is one input; see :meth:`Port.codes`. Variables
        (states of an LSTM) begin at their zero points in every call.

        :raises ModelError: inputs of other number, name, shape or dtype; errors of driver and chip pass through
        """
        values = {port.number: port.codes(array) for port, array in self._matched(inputs)}
        if self._parts[0]:
            values |= self._parts[0](values)
        values |= self._on_chip(values)
        if self._parts[1]:
            values |= self._parts[1](values)
        results = {port.name: values[port.number] for port in self.outputs}
        return next(iter(results.values())) if len(results) == 1 else results

    @cached_property
    def predicted_seconds(self) -> float:
        """Predicted, never measured: seconds of one call on a stick over USB 3, without host operators."""
        return timing.predicted_seconds(self.program, float(self.target.clock_hz))

    def packed(self, values: Mapping[int, Array]) -> dict[str, bytes]:
        """Padded bytes of the chip's inputs by layer name, for arrays by tensor number."""
        packed = {}
        for number, layer in self.layers:
            array = values.get(number)
            if array is None:
                port = _port(self.file.graph, number)
                array = np.full(port.shape, port.zero_point, port.dtype)
            packed[layer.name] = pack_input(layer, array.reshape(layer.y, layer.x, layer.z))
        return packed

    def raw(self, values: Mapping[int, Array]) -> dict[str, bytes]:
        """Padded bytes of every output layer by name, for arrays of the chip's inputs by tensor number."""
        if self.caching is not None:
            self.target.ensure_cached(self.caching)
        return self.target.run(self.program, self.packed(values))

    def _on_chip(self, values: Mapping[int, Array]) -> dict[int, Array]:
        raw, tensors = self.raw(values), self.file.graph.tensors
        return {i: unpack_output(layer, raw[layer.name]).reshape(tensors[i].shape) for i, layer in self._results}

    def _matched(self, inputs: Any) -> list[tuple[Port, ArrayLike]]:
        names = [port.name for port in self.inputs]
        if isinstance(inputs, Mapping):
            if set(inputs) != set(names):
                raise ModelError(f"the model's inputs are {names}, given are {sorted(map(str, inputs))}")
            return [(port, inputs[port.name]) for port in self.inputs]
        if len(names) == 1 and not (isinstance(inputs, list | tuple) and len(inputs) == 1):
            return [(self.inputs[0], inputs)]
        if not isinstance(inputs, list | tuple) or len(inputs) != len(names):
            given = len(inputs) if isinstance(inputs, list | tuple) else 1
            raise ModelError(f"the model takes {len(names)} inputs ({', '.join(names)}), given are {given}")
        return list(zip(self.inputs, inputs, strict=True))


def load(
    path: Path | str | bytes,
    *,
    device: Literal["sim", "usb"] | Target = "sim",
    index: int = 0,
    clock: str | None = None,
    host: bool = True,
) -> Model:
    """A compiled file (``*_edgetpu.tflite``) on stick ``index``, simulated ("sim") or real ("usb"), or on a target.

    All models of a process on one stick share it, also with tinygrad's CORAL device. Operators that the compiler left
    to the host run through the optional extra ``litert`` if it is installed and ``host`` is true.

    :raises ModelError: the program cannot be run on this device
    :raises PackageError, DeviceError, DriverError: the file is damaged; there is no such stick, or it is in use
    """
    file = read_edgetpu(path)
    name = "model" if isinstance(path, bytes) else Path(path).name
    if device == "usb":
        refuse_over_usb(file, name)
    if isinstance(device, str):
        from coral.devices import shared_stick

        return Model(file, shared_stick(device, index, clock=clock), name=name, host=host)
    return Model(file, device, name=name, host=host)


def refuse_over_usb(file: EdgeTpuModel, name: str) -> None:
    """ModelError for a program that asks for its own transfers."""
    if not file.package.execution.fully_deterministic:
        raise ModelError(
            f"{name} cannot run over USB: its list of transfers is not complete (it names no outputs and no end), and "
            "a stick does not tell the host what its program asks for; use the simulated stick (--device sim)"
        )


def _layer(graph: Graph, number: int, layers: Sequence[Layer]) -> Layer:
    tensor = graph.tensors[number]
    for layer in layers:
        if layer.name == tensor.name and layer.y * layer.x * layer.z == math.prod(tensor.shape):
            return layer
    raise ModelError(f"tensor {tensor.name!r} {tensor.shape} of the compiled operator is no layer of its program")


def _port(graph: Graph, number: int) -> Port:
    tensor = graph.tensors[number]
    if tensor.dtype is None:
        raise ModelError(f"tensor {tensor.name!r} has TFLite type {tensor.type}, for which numpy has no type")
    quantised = len(tensor.scales) == 1 and tensor.dtype.kind in "iu"
    zero = int(tensor.zero_points[0]) if quantised and len(tensor.zero_points) else 0
    scale = float(tensor.scales[0]) if quantised else None
    return Port(number, tensor.name, tensor.shape, tensor.dtype, scale, zero)


def _around(file: EdgeTpuModel) -> tuple[list[int], list[int]]:
    """Operators that the chip part's inputs need, and all others."""
    graph, chip = file.graph, file.operator
    needed, before = set(graph.operators[chip].inputs), []
    for number in reversed(range(chip)):
        if needed & set(graph.operators[number].outputs):
            needed |= set(graph.operators[number].inputs)
            before.insert(0, number)
    return before, [n for n in range(len(graph.operators)) if n != chip and n not in before]


def _made(graph: Graph, operators: Sequence[int]) -> list[int]:
    return [i for number in operators for i in graph.operators[number].outputs if i >= 0]


def _used(graph: Graph, operators: Sequence[int], known: set[int]) -> list[int]:
    return sorted({i for number in operators for i in graph.operators[number].inputs} & known)
