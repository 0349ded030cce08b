"""Proven layers as tinygrad sees them: a PROGRAM whose source is a line of JSON, and the object that runs it.

Source: docs/backend.md, "Chip programs".
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tinygrad.device import Program, TinyELF
from tinygrad.helpers import Context
from tinygrad.renderer import Estimates
from tinygrad.runtime.ops_cpu import CPUProgram
from tinygrad.tensor import Tensor
from tinygrad.uop import Ops
from tinygrad.uop.ops import KernelInfo, ProgramInfo, UOp

from coral.backend.chain import MAGIC, Chain, tensor
from coral.backend.counters import counters
from coral.backend.layers import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER, Layer, Linear
from coral.backend.memory import HostBuffer
from coral.backend.switches import selection_off

if TYPE_CHECKING:
    from coral.backend.device import CORALDevice
    from coral.runtime import LinearSpec


def is_chip_source(source: str | bytes) -> bool:
    """Whether a program's source (or its compiled form, the same bytes) is for the chip."""
    return source.startswith(MAGIC) if isinstance(source, str) else source.startswith(MAGIC.encode())


def chip_program(chain: Chain, buffers: Sequence[UOp]) -> UOp:
    """The three-source PROGRAM of a chain; ``buffers`` are PARAMs in the order of the chain's arguments."""
    operations = sum(step.layer.operations for step in chain.steps)
    touched_bytes = sum(buffer.max_numel() * buffer.dtype.itemsize for buffer in dict.fromkeys(buffers))
    estimates = Estimates(operations, touched_bytes, touched_bytes)
    sink = UOp.sink(*buffers, arg=KernelInfo(name=chain.name, estimates=estimates))
    slots, outputs = tuple(buffer.arg.slot for buffer in buffers), len(chain.outputs)
    source = UOp(Ops.SOURCE, arg=chain.to_source())
    info = ProgramInfo(name=chain.name, globals=slots, outs=slots[:outputs], ins=slots[outputs:])
    return UOp(Ops.PROGRAM, src=(sink, UOp(Ops.LINEAR, src=tuple(sink.toposort())), source), arg=info)


class ChipProgram(Program["CORALDevice"]):
    """One chain of layers, ready to run on its device's chip."""

    def __init__(self, dev: CORALDevice, obj: TinyELF):
        self.dev = dev
        self.chain = Chain.from_source(obj.lib)
        self._layers = self.chain.identity()
        self._in_range: tuple[Hashable, bool] = (None, False)
        self._apart = False

    def __call__(
        self,
        *bufs: HostBuffer,
        global_size: tuple[int, int, int] = (1, 1, 1),
        local_size: tuple[int, int, int] | None = (1, 1, 1),
        vals: tuple[int | None, ...] = (),
        wait: bool = False,
        timeout: int | None = None,
    ) -> float | None:
        """Runs the layers on ``bufs`` (outputs, inputs, parameters); seconds of wall time if ``wait``."""
        start = time.perf_counter()
        chain = self.chain
        values = {value: _images(bufs[argument], chain, value) for value, argument in chain.inputs}
        arrays = {
            number: np.frombuffer(bufs[number].memory, np.dtype(dtype.fmt or "B")).reshape(shape)
            for step in chain.steps
            for number, (dtype, shape) in zip(
                step.parameters, step.layer.operands[step.layer.activations :], strict=True
            )
        }
        key = self._layers, tuple(_identity(bufs[number]) for number in chain.parameters)
        if not self._exact(key, arrays):
            for number in range(len(chain.steps)):
                self._on_host(number, values, arrays)
        elif self._apart or not self._on_chip(chain, key, values, arrays):
            for number in range(len(chain.steps)):
                if not self._on_chip(chain.only(number), (key, number), values, arrays):
                    self._on_host(number, values, arrays)
        for value, argument in chain.outputs:
            planes = values[value].transpose(0, 3, 1, 2)
            np.frombuffer(bufs[argument].memory, np.uint8, planes.size).reshape(planes.shape)[:] = planes
        return time.perf_counter() - start if wait else None

    def _exact(self, key: Hashable, arrays: dict[int, np.ndarray]) -> bool:
        """Whether no accumulator can leave int32 and all multipliers are in range, for these parameters."""
        if self._in_range[0] != key:
            self._in_range = (
                key,
                all(_in_range(step.layer, [arrays[number] for number in step.parameters]) for step in self.chain.steps),
            )
        return self._in_range[1]

    def _on_chip(
        self, chain: Chain, key: Hashable, values: dict[int, np.ndarray], arrays: dict[int, np.ndarray]
    ) -> bool:
        """Computes a chain's outputs by one network; False if the chip has no form for it."""
        from coral.codegen.errors import CodegenError
        from coral.runtime import PlacementError

        start, layer = time.perf_counter(), chain.steps[0].layer
        if len(chain.steps) == 1 and isinstance(layer, Linear) and (spec := linear_spec(layer)) is not None:
            x, step = values[chain.steps[0].reads[0]], chain.steps[0]
            rows = x.transpose(0, 3, 1, 2).reshape(layer.rows, -1)
            bias = arrays[step.parameters[1]] if layer.bias else None
            y = self.dev.chip.linear(spec, rows, arrays[step.parameters[0]], bias, key=key)
            values[step.writes] = y.reshape(chain.values[step.writes].nhwc)
        else:
            inputs = {tensor(value): values[value] for value, _ in chain.inputs}
            try:
                results = self.dev.chip.network(key, lambda: chain.network(_copies(chain, arrays)), inputs)
            except (CodegenError, PlacementError):
                self._apart = True
                return False
            values.update((value, results[tensor(value)]) for value, _ in chain.outputs)
        counters.chip_programs += 1
        counters.chip_layers += len(chain.steps)
        counters.chip_rows += chain.images
        counters.chip_seconds += time.perf_counter() - start
        return True

    def _on_host(self, number: int, values: dict[int, np.ndarray], arrays: dict[int, np.ndarray]) -> None:
        """One layer by the host's code for it: modulo 2^32 where the chip's answer is unknown."""
        step = self.chain.steps[number]
        codes = [values[value].transpose(0, 3, 1, 2) for value in step.reads]
        operands: list[Any] = [*codes, *(arrays[number] for number in step.parameters)]
        with selection_off(), Context(CAPTURING=0, DEBUG=0):
            tensors = [
                Tensor(np.ascontiguousarray(a).reshape(shape), device=self.dev.device).realize()
                for a, (_, shape) in zip(operands, step.layer.operands, strict=True)
            ]
            planes = step.layer.expression(*tensors).numpy()
        n, h, w, c = self.chain.values[step.writes].nhwc
        values[step.writes] = np.ascontiguousarray(planes.reshape(n, c, h, w).transpose(0, 2, 3, 1))
        counters.host_fallbacks += 1


class HostProgram(CPUProgram):
    """Machine code, run and counted."""

    def __call__(self, *bufs: HostBuffer, **launch) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Runs the kernel in the calling thread; seconds of wall time if ``wait``."""
        counters.host_programs += 1
        return super().__call__(*bufs, **launch)  # pyright: ignore[reportArgumentType]


def load_program(dev: CORALDevice, obj: TinyELF) -> ChipProgram | HostProgram:
    """The runnable form of a compiled program of either kind."""
    return ChipProgram(dev, obj) if is_chip_source(obj.lib) else HostProgram(dev, obj)  # pyright: ignore[reportArgumentType]


def _images(buffer: HostBuffer, chain: Chain, value: int) -> np.ndarray:
    """A value's codes as rows, columns, channels."""
    image = chain.values[value].image
    planes = np.frombuffer(buffer.memory, np.uint8, int(np.prod(image))).reshape(image)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def _copies(chain: Chain, arrays: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The parameters to keep: the runtime lays networks out anew when buffers may hold something else already."""
    return {number: arrays[number].copy() for number in chain.parameters}


def _identity(buffer: HostBuffer) -> tuple[int, int, int]:
    """Tells weights apart: nobody reports a write to a buffer, so the contents are part of the name."""
    return buffer.va_addr, buffer.size, zlib.crc32(buffer.memory)


def _in_range(layer: Layer, parameters: Sequence[np.ndarray]) -> bool:
    bias = next((int(np.abs(a.astype(np.int64)).max()) for a in parameters if a.dtype == np.int32), 0)
    multipliers = [a for a in parameters if a.dtype == np.float32]
    usable = all(((a >= SMALLEST_MULTIPLIER) & (a < LARGEST_MULTIPLIER)).all() for a in multipliers)
    return usable and layer.largest_accumulator(bias) < 2**31


def linear_spec(layer: Linear) -> LinearSpec | None:
    """The layer as ``Runtime.linear`` takes it; None if only a network computes it."""
    from coral.runtime import LinearSpec, RuntimeFault

    if layer.mult is None:
        return None
    numbers = layer.in_zps[0], layer.w_zp, layer.out_zp, layer.mult, layer.lo, layer.hi
    try:
        return LinearSpec(layer.outputs, layer.shape[-1], *numbers)
    except RuntimeFault:
        return None
