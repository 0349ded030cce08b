"""A selected layer as tinygrad sees it: a PROGRAM whose source is a line of JSON, and the object that runs it.

Source: docs/backend.md, "Chip programs".
"""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from tinygrad.device import Program, TinyELF
from tinygrad.helpers import Target
from tinygrad.renderer import Estimates
from tinygrad.runtime.ops_cpu import CPUProgram
from tinygrad.uop import Ops
from tinygrad.uop.ops import KernelInfo, ProgramInfo, UOp

from coral import numerics
from coral.backend.counters import counters
from coral.backend.memory import HostBuffer

if TYPE_CHECKING:
    from coral.backend.device import CORALDevice
    from coral.runtime import LinearSpec

MAGIC = "//coral chip program 1\n"


def is_chip_source(source: str | bytes) -> bool:
    """Whether a program's source (or its compiled form, the same bytes) is a layer for the chip."""
    return source.startswith(MAGIC) if isinstance(source, str) else source.startswith(MAGIC.encode())


@dataclass(frozen=True)
class LinearKernel:
    """``out[rows, n] = requantise(x[rows, k] @ w[n, k].T + b[n])``; codes 0..255, ``mult`` a float32 value."""

    rows: int
    n: int
    k: int
    in_zp: int
    w_zp: int
    out_zp: int
    mult: float
    lo: int
    hi: int
    bias: bool

    def to_source(self) -> str:
        """The text tinygrad carries as the program's source."""
        return MAGIC + json.dumps(asdict(self))

    @classmethod
    def from_source(cls, source: bytes) -> LinearKernel:
        """The inverse of :meth:`to_source`."""
        return cls(**json.loads(source.decode().removeprefix(MAGIC)))

    def spec(self) -> LinearSpec:
        """The layer as the runtime knows it.

        :raises CoralError: no chip program computes such a layer; the message has the limit and the number
        """
        from coral.runtime import LinearSpec

        return LinearSpec(self.n, self.k, self.in_zp, self.w_zp, self.out_zp, self.mult, self.lo, self.hi)

    def largest_accumulator(self, bias_magnitude: int) -> int:
        """Bound of ``|accumulator|`` when no bias exceeds ``bias_magnitude``."""
        return self.k * max(self.in_zp, 255 - self.in_zp) * max(self.w_zp, 255 - self.w_zp) + bias_magnitude


def chip_program(kernel: LinearKernel, buffers: tuple[UOp, ...], target: Target) -> UOp:
    """The three-source PROGRAM of a layer; ``buffers`` are the kernel's PARAMs in the order out, x, w[, b]."""
    operations = 2 * kernel.rows * kernel.n * kernel.k
    touched_bytes = sum(buffer.max_numel() * buffer.dtype.itemsize for buffer in buffers)
    name = f"coral_linear_{kernel.rows}_{kernel.n}_{kernel.k}"
    sink = UOp.sink(*buffers, arg=KernelInfo(name=name, estimates=Estimates(operations, touched_bytes, touched_bytes)))
    slots = tuple(buffer.arg.slot for buffer in buffers)
    source = UOp(Ops.SOURCE, arg=kernel.to_source())
    info = ProgramInfo(name=name, globals=slots, outs=slots[:1], ins=slots[1:], target=target)
    return UOp(Ops.PROGRAM, src=(sink, UOp(Ops.LINEAR, src=tuple(sink.toposort())), source), arg=info)


class ChipProgram(Program["CORALDevice"]):
    """One selected layer, ready to run on its device's chip."""

    def __init__(self, dev: CORALDevice, obj: TinyELF):
        self.dev = dev
        self.kernel = LinearKernel.from_source(obj.lib)
        self.spec = self.kernel.spec()

    def __call__(
        self,
        *bufs: HostBuffer,
        global_size: tuple[int, int, int] = (1, 1, 1),
        local_size: tuple[int, int, int] | None = (1, 1, 1),
        vals: tuple[int | None, ...] = (),
        wait: bool = False,
        timeout: int | None = None,
    ) -> float | None:
        """Runs the layer on ``bufs`` (out, x, w[, b]); seconds of wall time if ``wait``."""
        start = time.perf_counter()
        kernel = self.kernel
        x = _codes(bufs[1], kernel.rows, kernel.k)
        w = _codes(bufs[2], kernel.n, kernel.k)
        b = np.frombuffer(bufs[3].memory, np.int32, kernel.n) if kernel.bias else None
        if kernel.largest_accumulator(0 if b is None else int(np.abs(b.astype(np.int64)).max())) < 2**31:
            out = self.dev.chip.linear(self.spec, x, w, b, key=tuple(_identity(buffer) for buffer in bufs[2:]))
            counters.chip_programs += 1
            counters.chip_rows += kernel.rows
            counters.chip_seconds += time.perf_counter() - start
        else:
            out = _wrapping_linear(kernel, x, w, b)
            counters.host_programs += 1
            counters.host_fallbacks += 1
        _codes(bufs[0], kernel.rows, kernel.n)[:] = out
        return time.perf_counter() - start if wait else None


class HostProgram(CPUProgram):
    """Machine code, run and counted."""

    def __call__(self, *bufs: HostBuffer, **launch) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Runs the kernel in the calling thread; seconds of wall time if ``wait``."""
        counters.host_programs += 1
        return super().__call__(*bufs, **launch)  # pyright: ignore[reportArgumentType]


def load_program(dev: CORALDevice, obj: TinyELF) -> ChipProgram | HostProgram:
    """The runnable form of a compiled program of either kind."""
    return ChipProgram(dev, obj) if is_chip_source(obj.lib) else HostProgram(dev, obj)  # pyright: ignore[reportArgumentType]


def _codes(buffer: HostBuffer, rows: int, columns: int) -> np.ndarray:
    return np.frombuffer(buffer.memory, np.uint8, rows * columns).reshape(rows, columns)


def _identity(buffer: HostBuffer) -> tuple[int, int, int]:
    """Tells weights apart: nobody reports a write to a buffer, so the contents are part of the name."""
    return buffer.va_addr, buffer.size, zlib.crc32(buffer.memory)


def _wrapping_linear(kernel: LinearKernel, x: np.ndarray, w: np.ndarray, b: np.ndarray | None) -> np.ndarray:
    """The layer in int32 arithmetic modulo 2^32, as compiled host code does it; the chip's answer there is unknown."""
    acc = (x.astype(np.int32) - kernel.in_zp) @ (w.astype(np.int32) - kernel.w_zp).T
    acc = acc if b is None else acc + b
    clamps = numerics.integer_clamps(kernel.out_zp, kernel.lo, kernel.hi)
    return numerics.requantise(acc, numerics.f32(kernel.mult), *clamps, kernel.out_zp)
