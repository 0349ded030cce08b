"""Runs quantised layers on one stick, keeping their weights on the chip. Source: docs/runtime.md."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coral import CoralError, timing
from coral.codegen.fc import INPUT, OUTPUT, FcQuant, FcShape, FullyConnected, fully_connected
from coral.codegen.machine import FORWARD_FIFO_ROW, GROUP, TILES, WORD_BYTES
from coral.driver import Buffer, Prepared, prepare
from coral.package.program import Program
from coral.runtime.placement import Placement, Region

MAX_DIMENSION = 4096
PROGRAMS = 256
"""Execution programs kept ready."""
HEADER_BYTES, EVENT_BYTES = 8, 16
"""USB overhead: header of a transfer to the chip, end-of-run event."""


class RuntimeFault(CoralError):
    """A layer, array or use that the runtime refuses; the message has place, value and limit."""


class OpenStick(Protocol):
    """What the runtime needs of a driver's stick (``coral.driver.Stick``)."""

    @property
    def clock_hz(self) -> int: ...
    def run(self, program: Program | Prepared, inputs: Mapping[str, Buffer] | None = None) -> dict[str, bytes]: ...
    def ensure_cached(self, caching: Program) -> bool: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer on codes: y[N] = clip(rne(f32(acc) * mult) + out_zp, lo, hi), acc over (x - in_zp)(w - w_zp) + b.

    Codes are 0..255, ``mult`` is a float32 value. RuntimeFault otherwise.
    """

    n: int
    k: int
    in_zp: int
    w_zp: int
    out_zp: int
    mult: float
    lo: int = 0
    hi: int = 255

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise RuntimeFault(f"linear layer of {self.n} outputs and {self.k} inputs, both must be at least 1")
        if self.k > MAX_DIMENSION:
            raise RuntimeFault(f"linear layer with {self.k} inputs, the limit is {MAX_DIMENSION}")
        for name in ("in_zp", "w_zp", "out_zp", "lo", "hi"):
            value = getattr(self, name)
            if not 0 <= value <= 255:
                raise RuntimeFault(f"linear layer: {name} is {value}, a code is 0..255")
        if self.lo > self.hi:
            raise RuntimeFault(f"linear layer: lo is {self.lo}, above hi, which is {self.hi}")
        if float(np.float32(self.mult)) != self.mult or not math.isfinite(self.mult):
            raise RuntimeFault(f"linear layer: mult is {self.mult!r}, which is not a float32 value")

    def quant(self) -> FcQuant:
        """The op's constants."""
        low, high = float(self.lo - self.out_zp), float(self.hi - self.out_zp)
        return FcQuant(self.in_zp, self.w_zp, self.out_zp, self.mult, low, high)


@dataclass
class Stats:
    """What the runtime has done. Bytes are payload; ``usb_bytes`` adds what the protocol needs, uploads included."""

    calls: int = 0
    uploads: int = 0
    upload_bytes: int = 0
    repacks: int = 0
    evictions: int = 0
    instruction_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    usb_bytes: int = 0
    predicted_seconds: float = 0.0

    @property
    def predicted_seconds_per_call(self) -> float:
        """Mean of the predictions (docs/runtime.md) over all calls; 0 before the first."""
        return self.predicted_seconds / self.calls if self.calls else 0.0


@dataclass(frozen=True)
class CallPlan:
    """One program, ready to run, and what a run moves and takes."""

    prepared: Prepared
    instruction_bytes: int
    input_bytes: int
    output_bytes: int
    predicted_seconds: float


@dataclass
class _Item:
    """Parameters of one chunk of a layer: where they belong, the program that loads them, whether it has run there."""

    shape: FcShape
    region: Region
    caching: Program
    loaded: bool = False


class Runtime:
    """Layers on one opened stick. Any thread may call; one call runs at a time."""

    def __init__(self, stick: OpenStick) -> None:
        self.stats = Stats()
        self._stick = stick
        self._mutex = threading.RLock()
        self._placement = Placement(FORWARD_FIFO_ROW)
        self._items: dict[Hashable, _Item] = {}
        self._plans: OrderedDict[tuple[FcShape, FcQuant, Region], CallPlan] = OrderedDict()
        self._closed = False

    def linear(
        self, spec: LinearSpec, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, key: Hashable | None = None
    ) -> np.ndarray:
        """uint8 [M, N] of uint8 ``x`` [M, K], ``w`` uint8 [N, K] and ``b`` int32 [N]; one call of the chip per row.

        Weights go to the chip once, until others need their place. ``key`` tells them apart; it must change when their
        contents do. Without one the contents are hashed. RuntimeFault for wrong arrays, nothing is sent then;
        DriverErrors and, on a simulated stick, errors of the chip pass through.
        """
        _check("x", x, np.uint8, (x.shape[0] if x.ndim == 2 else -1, spec.k))
        _check("w", w, np.uint8, (spec.n, spec.k))
        if b is not None:
            _check("b", b, np.int32, (spec.n,))
        out = np.empty((x.shape[0], spec.n), np.uint8)
        if not x.shape[0]:
            return out
        with self._mutex:
            if self._closed:
                raise RuntimeFault("the runtime was closed; open another one")
            if key is None:
                key = hashlib.blake2b(np.ascontiguousarray(w).data).digest()
                key += hashlib.blake2b(b"" if b is None else np.ascontiguousarray(b).data).digest()
            chunk = chunk_outputs(spec.k)
            for start in range(0, spec.n, chunk):
                part = slice(start, min(start + chunk, spec.n))
                plan = self._ready(spec, part, w, b, key)
                out[:, part] = self._run_rows(spec, plan, x)[:, : part.stop - start]
        return out

    def regions(self) -> dict[Hashable, Region]:
        """Where parameters lie now, by key, in order of their last use."""
        with self._mutex:
            return dict(self._placement.regions)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Closes the stick; further calls raise. May be called twice."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                self._stick.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self, spec: LinearSpec, part: slice, w: np.ndarray, b: np.ndarray | None, key: Hashable) -> CallPlan:
        """The part's parameters are on the chip; the plan of its execution program there."""
        shape = FcShape(max(part.stop - part.start, GROUP), spec.k)
        item_key = (key, shape, part.start, part.stop, spec.w_zp, b is None)
        region = self._placement.use(item_key)
        if region is None:
            region = self._place(item_key, shape)
            blob = _blob(_generate(shape, spec.quant(), region), w[part], None if b is None else b[part])
            self._items[item_key] = _Item(shape, region, _generate(shape, spec.quant(), region).caching(blob))
        item = self._items[item_key]
        plan = self._plan(shape, spec.quant(), region)
        self._load(item)
        return plan

    def _place(self, key: Hashable, shape: FcShape) -> Region:
        change = self._placement.place(key, shape.tiles, rows_per_tile(shape))
        for gone in change.evicted:
            del self._items[gone]
        self.stats.evictions += len(change.evicted)
        self.stats.repacks += bool(change.moved)
        for moved in change.moved:
            item = self._items[moved]
            region = self._placement.regions[moved]
            program = _generate(item.shape, _ANY_QUANT, region).caching(item.caching.parameters)
            self._items[moved] = _Item(item.shape, region, program)
        return change.region

    def _load(self, item: _Item) -> None:
        """Runs the caching program if it has to run: first use here, or the stick has lost its parameters."""
        if item.loaded:
            ran = self._stick.ensure_cached(item.caching)
        else:
            # unconditional: the same program may have run before other parameters took the place
            self._stick.run(item.caching)
            item.loaded = ran = True
        if ran:
            sent = len(item.caching.parameters) + len(item.caching.bitstreams[0].data)
            self.stats.uploads += 1
            self.stats.upload_bytes += len(item.caching.parameters)
            self.stats.usb_bytes += sent + 2 * HEADER_BYTES + EVENT_BYTES

    def _plan(self, shape: FcShape, quant: FcQuant, region: Region) -> CallPlan:
        key = (shape, quant, region)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _call_plan(_generate(shape, quant, region), self._stick.clock_hz)
            if len(self._plans) > PROGRAMS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plan

    def _run_rows(self, spec: LinearSpec, plan: CallPlan, x: np.ndarray) -> np.ndarray:
        padded = np.full((x.shape[0], plan.input_bytes), spec.in_zp, np.uint8)
        padded[:, : spec.k] = x
        results = np.empty((x.shape[0], plan.output_bytes), np.uint8)
        stats = self.stats
        for row, result in zip(padded, results, strict=True):
            raw = self._stick.run(plan.prepared, {INPUT: row.data})[OUTPUT]
            result[:] = np.frombuffer(raw, np.uint8)
            stats.calls += 1
            stats.instruction_bytes += plan.instruction_bytes
            stats.input_bytes += plan.input_bytes
            stats.output_bytes += plan.output_bytes
            stats.usb_bytes += plan.instruction_bytes + plan.input_bytes + plan.output_bytes
            stats.usb_bytes += 2 * HEADER_BYTES + EVENT_BYTES
            stats.predicted_seconds += plan.predicted_seconds
        return results


_ANY_QUANT = FcQuant(0, 0, 0, 1.0, 0.0, 255.0)
"""For caching programs, which do not depend on the quantisation."""


def rows_per_tile(shape: FcShape) -> int:
    """Parameter rows on each tile: bias and weight rows of its groups."""
    return shape.groups_per_tile * (1 + shape.words)


def chunk_outputs(k: int) -> int:
    """Most outputs of one program with ``k`` inputs: what the tiles hold, a multiple of 64."""
    if k <= WORD_BYTES:
        return TILES * GROUP
    groups = FORWARD_FIFO_ROW // (1 + -(-k // WORD_BYTES))
    return min(MAX_DIMENSION, TILES * GROUP * groups)


def _generate(shape: FcShape, quant: FcQuant, region: Region) -> FullyConnected:
    return fully_connected(shape.n, shape.k, quant, parameter_row=region.row, compute_shift=region.first_tile)


def _blob(fc: FullyConnected, w: np.ndarray, b: np.ndarray | None) -> bytes:
    """Parameters of weights [n, K]; layers of fewer than 64 outputs are filled up with outputs that nobody reads."""
    weights = np.full((fc.shape.n, fc.shape.k), fc.quant.w_zp, np.uint8)
    weights[: len(w)] = w
    bias = np.zeros(fc.shape.n, np.int32)
    if b is not None:
        bias[: len(b)] = b
    return fc.blob(weights, bias)


def _call_plan(fc: FullyConnected, clock_hz: int) -> CallPlan:
    """The prediction: transfer times, a fixed cost per call, and one cycle per step of the busiest tile."""
    program = fc.execution
    instructions = sum(len(bitstream.data) for bitstream in program.bitstreams)
    steps = fc.shape.groups_per_tile * fc.shape.words
    seconds = timing.call_seconds(steps, instructions + fc.input_bytes, fc.output_bytes, clock_hz)
    return CallPlan(prepare(program), instructions, fc.input_bytes, fc.output_bytes, seconds)


def _check(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype:
        raise RuntimeFault(f"{name} is {array.dtype}, {np.dtype(dtype)} is needed")
    if array.shape != shape:
        wanted = " x ".join("M" if n == -1 else str(n) for n in shape)
        raise RuntimeFault(f"{name} has shape {array.shape}, {wanted} is needed")
