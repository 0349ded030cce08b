"""Runs quantised layers and networks on one stick, keeping their weights on the chip. Source: docs/runtime.md."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping

import numpy as np

from coral import timing
from coral.codegen import network as nw
from coral.codegen.fc import INPUT, OUTPUT, FcQuant, FcShape
from coral.codegen.machine import WIDE_ROWS
from coral.codegen.network.graph import MAX_EXTENT
from coral.runtime.errors import RuntimeFault
from coral.runtime.linear import LinearSpec, chunk_outputs, fc_call, fc_layout, fc_shape, product, product_rows
from coral.runtime.networks import Networks
from coral.runtime.placement import Footprint, Region
from coral.runtime.resident import CallPlan, OpenStick, Residents, Stats

PROGRAMS = 256
"""Execution programs of single rows kept ready."""
LONGER = 0.125
"""Part of a call by which it may become longer to save a second copy of its weights."""


class Runtime:
    """Layers and networks on one opened stick. Any thread may call; one call runs at a time.

    ``parameter_rows``: 256-byte rows of every tile that parameters may take, if others need the rest.
    """

    def __init__(self, stick: OpenStick, parameter_rows: int = WIDE_ROWS) -> None:
        self._mutex = threading.RLock()
        self._residents = Residents(stick, parameter_rows)
        self._networks = Networks(self._residents)
        self._plans: OrderedDict[tuple[FcShape, FcQuant, Region], CallPlan] = OrderedDict()
        self._closed = False

    @property
    def stats(self) -> Stats:
        """What was done so far."""
        return self._residents.stats

    @property
    def clock_hz(self) -> int:
        """Of the stick's chip."""
        return self._residents.stick.clock_hz

    def network(
        self, key: Hashable, build: Callable[[], nw.Network], inputs: Mapping[str, np.ndarray], *, fresh: bool = False
    ) -> dict[str, np.ndarray]:
        """Outputs uint8 [B, y, x, c] by name, of ``inputs`` uint8 [B, y, x, c]; any B, image i as if it were alone.

        ``key`` stands for the layers and the contents of their weights: it must change when anything of the network
        does. ``build`` is called when the key is not known (any more). Weights go to the chip once, until others need
        their place. ``fresh``: weights and multipliers per channel, but nothing else, are others at every call, so that
        ``build`` is called and they are sent every time. RuntimeFault for wrong arrays, CodegenErrors of a network that
        no program can run: nothing is sent then. DriverErrors and, on a simulated stick, errors of the chip pass
        through.
        """
        with self._mutex:
            self._check_open()
            return self._networks.run(("network", key), build, inputs, fresh=fresh)

    def linear(
        self, spec: LinearSpec, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, key: Hashable | None = None
    ) -> np.ndarray:
        """uint8 [M, N] of uint8 ``x`` [M, K], ``w`` uint8 [N, K] and ``b`` int32 [N]; up to 256 rows per call.

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
            self._check_open()
            if key is None:
                key = hashlib.blake2b(np.ascontiguousarray(w).data).digest()
                key += hashlib.blake2b(b"" if b is None else np.ascontiguousarray(b).data).digest()
            for start in range(0, spec.n, MAX_EXTENT):
                part = slice(start, min(start + MAX_EXTENT, spec.n))
                bias = None if b is None else b[part]
                item = (key, spec.k, part.start, part.stop, spec.w_zp, b is None)
                form = self._row if self._as_row(spec, len(x), part.stop - part.start, item) else self._product
                out[:, part] = form(spec, x, w[part], bias, item)
        return out

    def regions(self) -> dict[Hashable, Footprint]:
        """Where parameters lie now, in order of their last use."""
        with self._mutex:
            return dict(self._residents.placement.footprints)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Closes the stick; further calls raise. May be called twice."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                self._residents.stick.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeFault("the runtime was closed; open another one")

    def _as_row(self, spec: LinearSpec, rows: int, outputs: int, item: Hashable) -> bool:
        """Whether FULLY_CONNECTED is the form for a call. A single row runs through a matrix product only if weights of
        that form are on the chip, so that they need not lie there twice, and it takes hardly longer."""
        if rows > 1 or outputs > chunk_outputs(spec.k):
            return False
        if self._residents.placed(("row", item)) or not any(self._residents.variants(("product", item))):
            return True
        shape = fc_shape(outputs, spec.k)
        longer = (shape.groups - shape.groups_per_tile) * shape.words / self._residents.stick.clock_hz
        return longer > LONGER * timing.CALL_S

    def _product(
        self, spec: LinearSpec, x: np.ndarray, w: np.ndarray, b: np.ndarray | None, item: Hashable
    ) -> np.ndarray:
        """Several rows through one program."""
        rows = {"x": product_rows(spec, x)}
        key, grid = ("product", item, spec), nw.Grid(1, 1)
        found = self._networks.run(
            key, lambda: product(spec, *_copies(w, b)), rows, weights=("product", item), grid=grid
        )
        return found["y"].reshape(len(x), len(w))

    def _row(self, spec: LinearSpec, x: np.ndarray, w: np.ndarray, b: np.ndarray | None, item: Hashable) -> np.ndarray:
        """One row through FULLY_CONNECTED."""
        shape, key = fc_shape(len(w), spec.k), ("row", item)
        placed = self._residents.placed(key)
        footprint = placed[0] if placed else self._residents.place(key, fc_layout(shape, spec.w_zp, *_copies(w, b)))
        plan = self._plan(shape, spec.quant(), footprint.place)
        self._residents.load(key, footprint.floor)
        padded = np.full(plan.input_bytes, spec.in_zp, np.uint8)
        padded[: spec.k] = x[0]
        raw = self._residents.start(plan, {INPUT: padded.data}).result()[OUTPUT]
        return np.frombuffer(raw, np.uint8)[None, : len(w)]

    def _plan(self, shape: FcShape, quant: FcQuant, region: Region) -> CallPlan:
        key = (shape, quant, region)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = fc_call(shape, quant, region, self._residents.stick.clock_hz)
            self.stats.programs += 1
            if len(self._plans) > PROGRAMS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plan


def _check(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype:
        raise RuntimeFault(f"{name} is {array.dtype}, {np.dtype(dtype)} is needed")
    if array.shape != shape:
        wanted = " x ".join("M" if n == -1 else str(n) for n in shape)
        raise RuntimeFault(f"{name} has shape {array.shape}, {wanted} is needed")


def _copies(w: np.ndarray, b: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Weights to keep: they are laid out anew when others need room, and the caller's arrays may have changed then."""
    return w.copy(), None if b is None else b.copy()
