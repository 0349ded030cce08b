"""Networks at places on the chip, for any number of images. Source: docs/runtime.md, section Networks."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from coral import timing
from coral.codegen import network as nw
from coral.codegen.errors import ShapeError
from coral.codegen.machine import tiles_of
from coral.codegen.network.matmul import TOP_ROW
from coral.codegen.network.program import MAX_BATCH
from coral.package.program import Program
from coral.runtime.errors import RuntimeFault
from coral.runtime.placement import Footprint, Region, Space
from coral.runtime.resident import CallPlan, Residents, call_plan

PROGRAMS = 256
"""Execution programs kept ready."""
NETWORKS = 128
"""Networks, with their weights, kept ready."""
PATIENCE = 3
"""Calls with an odd number of images that are filled up to a known program before they get their own."""


class NetworkLayout:
    """Parameters of a network as its program for ``batch`` images wants them: on top of what each tile has."""

    def __init__(self, network: nw.Network, batch: int, grid: nw.Grid | None) -> None:
        self._network, self._batch, self._grid = network, batch, grid
        self.program = functools.lru_cache(maxsize=2)(self._program)
        """The pair for tiles that are filled up to given rows; ShapeError if it does not fit."""

    def _program(self, base_rows: tuple[int, ...]) -> nw.NetworkProgram:
        return nw.NetworkProgram(self._network, batch=self._batch, grid=self._grid, base_rows=base_rows, top=TOP_ROW)

    def find(self, space: Space) -> Footprint:
        """Where the generator puts them on top of what is taken."""
        base_rows = space.fill()
        program = self.program(base_rows)
        return Footprint(regions_of(program), program.floor_rows, base_rows)

    def caching(self, footprint: Footprint) -> Program:
        """The program that loads them."""
        return self.program(footprint.place).caching()


def regions_of(program: nw.NetworkProgram) -> tuple[Region, ...]:
    """What the parameters occupy: for every set of tiles that hold the same, from the first row to the last."""
    rows: dict[int, list[int]] = {}
    for piece, _ in program.wide.parts:
        rows.setdefault(piece.tiles, []).extend((piece.row, piece.row + piece.rows))
    return tuple(
        Region(tiles_of(mask)[0], mask.bit_count(), min(ends), max(ends) - min(ends)) for mask, ends in rows.items()
    )


@dataclass
class _Known:
    """A network, cut into what fits a program; ``asked``: calls by number of images."""

    parts: list[nw.Network]
    sizes: set[int] = field(default_factory=set)
    asked: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Ready:
    """The program of a part for a number of images, and the parameters that it was made for."""

    program: nw.NetworkProgram
    plan: CallPlan
    parameters: Hashable
    place: tuple[int, ...]


class Networks:
    """The networks of one stick. Not for several threads."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self._ready: OrderedDict[tuple[Hashable, int, int], _Ready] = OrderedDict()
        self._parameters: dict[tuple[Hashable, int], list[Hashable]] = {}

    def run(
        self,
        key: Hashable,
        build: Callable[[], nw.Network],
        inputs: Mapping[str, np.ndarray],
        *,
        weights: Hashable = None,
        grid: nw.Grid | None = None,
    ) -> dict[str, np.ndarray]:
        """See ``Runtime.network``. ``weights`` stands for the contents of the weights alone (by default ``key``), so
        that networks that differ elsewhere share them; ``grid``: the only tiling to use."""
        known = self._network(key, build)
        (network,) = known.parts
        batch = check_inputs(network, inputs)
        if not batch:
            return {n: np.empty((0, t.y, t.x, t.c), np.uint8) for n in network.outputs for t in [network.tensors[n]]}
        size = self._size(known, batch)
        return self._run_part((key, 0), (weights or key, 0), network, size, grid, inputs)

    def _network(self, key: Hashable, build: Callable[[], nw.Network]) -> _Known:
        if key not in self._known:
            self._known[key] = _Known([build()])
            if len(self._known) > NETWORKS:
                old, _ = self._known.popitem(last=False)
                for k in [k for k in self._ready if k[0] == old]:
                    del self._ready[k]
        self._known.move_to_end(key)
        return self._known[key]

    def _size(self, known: _Known, batch: int) -> int:
        """Images per call: equal shares of the batch; filled up to a program that exists, unless this number of images
        comes often."""
        size = -(-batch // -(-batch // MAX_BATCH))
        known.asked[size] = known.asked.get(size, 0) + 1
        larger = [s for s in known.sizes if s >= size]
        if larger and known.asked[size] <= PATIENCE:
            size = min(larger)
        known.sizes.add(size)
        return size

    def _run_part(
        self,
        part: tuple[Hashable, int],
        weights: tuple[Hashable, int],
        network: nw.Network,
        size: int,
        grid: nw.Grid | None,
        inputs: Mapping[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        ready = self._program(part, weights, network, size, grid)
        self._residents.load(ready.parameters, ready.program.floor_rows)
        batch = len(next(iter(inputs.values())))
        pieces: dict[str, list[np.ndarray]] = {name: [] for name in network.outputs}
        for start in range(0, batch, size):
            images = {name: x[start : start + size] for name, x in inputs.items()}
            n = min(size, batch - start)
            raw = self._residents.run(ready.plan, ready.program.pack(images), n)
            for name, found in pieces.items():
                found.append(ready.program.unpack(name, raw[name])[:n])
        return {name: found[0] if len(found) == 1 else np.concatenate(found) for name, found in pieces.items()}

    def _program(
        self,
        part: tuple[Hashable, int],
        weights: tuple[Hashable, int],
        network: nw.Network,
        size: int,
        grid: nw.Grid | None,
    ) -> _Ready:
        """The part's program for ``size`` images where its parameters have their place."""
        key = (*part, size)
        ready = self._ready.get(key)
        if ready is not None:
            self._ready.move_to_end(key)
            placed = self._residents.placed(ready.parameters)
            if placed is not None and placed[0].place == ready.place:
                return ready
        layout = NetworkLayout(network, size, grid)
        parameters, place = self._shared(weights, layout) or self._placed_anew(weights, layout)
        program = layout.program(place)
        self._residents.stats.programs += 1
        cycles = timing.chip_cycles(b.data for b in program.execution.bitstreams) * program.passes
        plan = call_plan(program.execution, cycles, self._residents.stick.clock_hz)
        ready = self._ready[key] = _Ready(program, plan, parameters, place)
        if len(self._ready) > PROGRAMS:
            self._ready.popitem(last=False)
        return ready

    def _shared(self, weights: tuple[Hashable, int], layout: NetworkLayout) -> tuple[Hashable, tuple[int, ...]] | None:
        """Parameters that are on the chip, if this layout has the same there."""
        for parameters, footprint, caching in self._of(weights):
            try:
                program = layout.program(footprint.place)
            except ShapeError:
                continue
            if program.caching() == caching:
                return parameters, footprint.place
        return None

    def _placed_anew(self, weights: tuple[Hashable, int], layout: NetworkLayout) -> tuple[Hashable, tuple[int, ...]]:
        known = self._parameters.setdefault(weights, [])
        known[:] = [parameters for parameters, _, _ in self._of(weights)]
        number = next(n for n in range(len(known) + 1) if (*weights, n) not in known)
        parameters = (*weights, number)
        known.append(parameters)
        return parameters, self._residents.place(parameters, layout).place

    def _of(self, weights: tuple[Hashable, int]) -> Iterator[tuple[Hashable, Footprint, Program]]:
        """All parameters of a part's weights that have a place."""
        for parameters in self._parameters.get(weights, []):
            placed = self._residents.placed(parameters)
            if placed is not None:
                yield parameters, *placed


def check_inputs(network: nw.Network, inputs: Mapping[str, np.ndarray]) -> int:
    """The number of images; RuntimeFault unless there are uint8 images of the right sizes for every input."""
    names = network.inputs
    if sorted(inputs) != sorted(names):
        raise RuntimeFault(f"network {network.name!r}: inputs {sorted(inputs)} were given, it takes {sorted(names)}")
    batches = set()
    for name in names:
        x, t = inputs[name], network.tensors[name]
        if x.dtype != np.uint8 or x.shape[1:] != (t.y, t.x, t.c):
            raise RuntimeFault(
                f"network {network.name!r}: input {name!r} is {x.dtype} {x.shape}, needed is uint8 "
                f"(images, {t.y}, {t.x}, {t.c})"
            )
        batches.add(len(x))
    if len(batches) > 1:
        raise RuntimeFault(f"network {network.name!r}: inputs of {sorted(batches)} images, all must have as many")
    return batches.pop()
