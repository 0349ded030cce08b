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
from coral.apps.host import HostRun, Step, Way, available, host_runs
from coral.evaluate.graph import known
from coral.numerics import inv
from coral.package.graph import Graph
from coral.package.program import Layer, Program
from coral.package.tensors import pack_input, unpack_output
from coral.package.tflite_file import EdgeTpuModel, read_parts

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


class OnChip:
    """One custom operator of a compiled file on a target. ``layers`` are its inputs, variables too: tensor numbers and
    layers."""

    def __init__(self, file: EdgeTpuModel, target: Target) -> None:
        """:raises ModelError: a tensor of the operator is no layer of its program"""
        self.file, self.target, self.program = file, target, file.package.execution
        self.caching = file.package.caching
        graph, operator = file.graph, file.graph.operators[file.operator]
        self.layers = [(i, _layer(graph, i, self.program.inputs)) for i in operator.inputs if i >= 0]
        self.results = [(i, _layer(graph, i, self.program.outputs)) for i in operator.outputs if i >= 0]
        self.inputs = [i for i, _ in self.layers if not graph.tensors[i].is_variable]

    def __call__(self, values: Mapping[int, Array]) -> dict[int, Array]:
        """Results by tensor number."""
        raw, tensors = self.raw(values), self.file.graph.tensors
        return {i: unpack_output(layer, raw[layer.name]).reshape(tensors[i].shape) for i, layer in self.results}

    def packed(self, values: Mapping[int, Array]) -> dict[str, bytes]:
        """Padded bytes of the inputs by layer name, for arrays by tensor number."""
        packed = {}
        for number, layer in self.layers:
            array = values.get(number)
            if array is None:
                port = _port(self.file.graph, number)
                array = np.full(port.shape, port.zero_point, port.dtype)
            packed[layer.name] = pack_input(layer, array.reshape(layer.executions, layer.y, layer.x, layer.z))
        return packed

    def raw(self, values: Mapping[int, Array]) -> dict[str, bytes]:
        """Padded bytes of every output layer by name, for arrays of the inputs by tensor number."""
        if self.caching is not None:
            self.target.ensure_cached(self.caching)
        return self.target.run(self.program, self.packed(values))


class Model:
    """A compiled model that is ready to be called; made by :func:`load`.

    ``inputs`` and ``outputs`` are what a call takes and gives: the whole model's, or, where operators are left to the
    host and nothing runs them, the chip's; ``left`` names those operators, ``host`` has those that run, and by what.
    ``chips`` are the file's custom operators in order; ``program``, ``layers``, ``packed``, ``raw`` speak of the first.
    Models compiled together share a parameter caching token and stay resident together when they are loaded on the same
    device; others displace each other, and are sent again when they are called.
    """

    def __init__(
        self, file: EdgeTpuModel | Sequence[EdgeTpuModel], target: Target, *, name: str = "", host: bool | Way = True
    ) -> None:
        """Use :func:`load`. ModelError, HostError, PackageError."""
        files = [file] if isinstance(file, EdgeTpuModel) else list(file)
        self.target, self.name, self.chips = target, name, [OnChip(f, target) for f in files]
        self.graph = graph = files[0].graph
        self.steps: list[Step] = []
        chips = {chip.file.operator: chip for chip in self.chips}
        groups = _groups(graph, set(chips))
        self.left: tuple[str, ...] = ()
        if not host or not all(available() or known(graph, group) for group in groups if group[0] not in chips):
            self.left = tuple(op.name for number, op in enumerate(graph.operators) if number not in chips)
        ends: tuple[Sequence[int], Sequence[int]] = graph.inputs, graph.outputs
        if self.left:
            made = [i for chip in self.chips for i, _ in chip.results]
            ends = list(dict.fromkeys(i for chip in self.chips for i in chip.inputs if i not in made)), made
        for group in groups:
            if group[0] in chips:
                self.steps.append(chips[group[0]])
            elif not self.left:
                self.steps += host_runs(files[0], group, "auto" if host is True else host or "numpy")
        self.host = tuple(step for step in self.steps if isinstance(step, HostRun))
        self.inputs, self.outputs = (tuple(_port(graph, i) for i in side) for side in ends)
        first = self.chips[0]
        self.file, self.program, self.caching, self.layers = first.file, first.program, first.caching, first.layers
        self.packed, self.raw = first.packed, first.raw

    def __call__(self, inputs: ArrayLike | Sequence[ArrayLike] | Mapping[str, ArrayLike]) -> Array | dict[str, Array]:
        """Outputs by name, or the array itself where there is one output, in the tensors' shapes and dtypes.

        ``inputs``: by name, in order, or the array itself where there is one input; see :meth:`Port.codes`. Variables
        (states of an LSTM) begin at their zero points in every call.

        :raises ModelError: inputs of other number, name, shape or dtype; errors of driver and chip pass through
        """
        constants = {i: t.data for i in self.graph.outputs if (t := self.graph.tensors[i]).data is not None}
        values = constants | {port.number: port.codes(array) for port, array in self._matched(inputs)}
        for step in self.steps:
            values |= step(values)
        results = {port.name: values[port.number] for port in self.outputs}
        return next(iter(results.values())) if len(results) == 1 else results

    @cached_property
    def predicted_seconds(self) -> float:
        """Predicted, never measured: seconds of one call on a stick over USB 3, without host operators."""
        return sum(timing.predicted_seconds(chip.program, float(self.target.clock_hz)) for chip in self.chips)

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
    host: bool | Way = True,
) -> Model:
    """A compiled file (``*_edgetpu.tflite``) on stick ``index``, simulated ("sim") or real ("usb"), or on a target.

    All models of a process on one stick share it, also with tinygrad's CORAL device. Operators that the compiler left
    to the host run unless ``host`` is False: in NumPy, or, where that lacks one, by the optional extra ``litert``; by
    code that tinygrad compiles, in seconds, to the same bytes, on large tensors (True, "auto") or wherever it can
    ("tinygrad"). ``model.host`` says what runs them.

    :raises ModelError: the program cannot be run on this device
    :raises HostError: ``host`` is "tinygrad", and it cannot compile on this machine
    :raises PackageError, DeviceError, DriverError: the file is damaged; there is no such stick, or it is in use
    """
    files = read_parts(path)
    name = "model" if isinstance(path, bytes) else Path(path).name
    if device == "usb":
        for file in files:
            refuse_over_usb(file, name)
    if isinstance(device, str):
        from coral.devices import shared_stick

        return Model(files, shared_stick(device, index, clock=clock), name=name, host=host)
    return Model(files, device, name=name, host=host)


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
        size = layer.y * layer.x * layer.z * layer.executions
        if layer.name == tensor.name and size == math.prod(tensor.shape):
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


def _groups(graph: Graph, chips: set[int]) -> list[list[int]]:
    """Operators in order: those of the chip alone, those of the host in runs."""
    groups: list[list[int]] = []
    for number in range(len(graph.operators)):
        if groups and number not in chips and groups[-1][0] not in chips:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups
