"""Networks at places on the chip, for any number of images. Source: docs/runtime.md, section Numbers of images."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np

from coral import CoralError, timing
from coral.codegen import network as nw
from coral.codegen.errors import ShapeError
from coral.codegen.machine import tiles_of
from coral.codegen.network.matmul import TOP_ROW
from coral.codegen.network.program import MAX_BATCH
from coral.package.program import Program
from coral.runtime.errors import PlacementError, RuntimeFault
from coral.runtime.placement import Footprint, Region, Space
from coral.runtime.resident import CallPlan, Residents, Running, call_plan

NETWORKS, SIZES = 128, 16
"""Networks kept ready, with their weights, and numbers of images for which each has a program."""
ATTEMPTS = 4
"""Places for which a network's program, or why there is none, is remembered."""
PATIENCE, WASTE = 3, 8
"""Calls with an odd number of images that are filled up to a known program, of so many times the images at most,
before they get their own."""


class NetworkLayout:
    """Parameters of a network as its program for ``batch`` images wants them: on top of what each tile has."""

    def __init__(self, known: _Known, batch: int) -> None:
        self._known, self._batch, self._stream = known, batch, known.stream
        self._made: OrderedDict[tuple[int, ...], nw.NetworkProgram | str] = OrderedDict()

    def program(self, base_rows: tuple[int, ...]) -> nw.NetworkProgram:
        """The pair for tiles that are filled up to given rows; ShapeError if it does not fit."""
        if base_rows not in self._made:
            try:
                self._made[base_rows] = nw.NetworkProgram(
                    self._known.network,
                    batch=self._batch,
                    grid=self._known.grid,
                    base_rows=base_rows,
                    top=TOP_ROW,
                    piece_rows=None,
                    stream=self._stream,
                )
            except ShapeError as error:
                self._made[base_rows] = str(error)
            if len(self._made) > ATTEMPTS:
                self._made.popitem(last=False)
        self._made.move_to_end(base_rows)
        found = self._made[base_rows]
        if isinstance(found, str):
            raise ShapeError(found)
        return found

    def find(self, space: Space) -> Footprint:
        """Where the generator puts them on top of what is taken. What needs streaming gets the whole chip, so that
        as little as possible is sent at every call."""
        if self._stream and space.taken:
            raise PlacementError("a network with more weights than a chip holds is never beside others")
        base_rows = space.fill()
        program = self.program(base_rows)
        return Footprint(regions_of(program), program.floor_rows, base_rows)

    def caching(self, footprint: Footprint) -> Program:
        """The program that loads them."""
        program, network = self.program(footprint.place), self._known.network
        return program.caching(None if program.network is network else program.parameters_of(network))


def regions_of(program: nw.NetworkProgram) -> tuple[Region, ...]:
    """What the parameters occupy: for every set of tiles that hold the same, from the first row to the last."""
    rows: dict[int, list[int]] = {}
    for piece, _ in program.wide.parts:
        rows.setdefault(piece.tiles, []).extend((piece.row, piece.row + piece.rows))
    return tuple(
        Region(tiles_of(mask)[0], mask.bit_count(), min(ends), max(ends) - min(ends)) for mask, ends in rows.items()
    )


@dataclass(frozen=True)
class _Ready:
    """The program for a number of images, and the parameters that it was made for."""

    program: nw.NetworkProgram
    plan: CallPlan
    parameters: Hashable
    place: tuple[int, ...]


@dataclass
class _Known:
    """A network and its programs by number of images; ``weights`` stands for the contents of its weights, ``grid`` is
    the only tiling allowed, ``asked`` counts calls by number of images.

    One that no program can hold has ``parts`` that follow each other, or else gets part of its weights with every call
    (``stream``).
    """

    network: nw.Network
    weights: Hashable
    grid: nw.Grid | None = None
    stream: bool = False
    parts: list[_Known] = field(default_factory=list)
    ready: OrderedDict[int, _Ready] = field(default_factory=OrderedDict)
    layouts: dict[int, NetworkLayout] = field(default_factory=dict)
    asked: Counter[int] = field(default_factory=Counter)

    @property
    def sizes(self) -> list[int]:
        """Numbers of images for which there are programs."""
        return self.parts[0].sizes if self.parts else list(self.ready)

    def size(self, batch: int) -> int:
        """Images per call: equal shares of the batch; filled up to a program that exists, unless this number of images
        comes often."""
        size = -(-batch // -(-batch // MAX_BATCH))
        self.asked[size] += 1
        larger = [s for s in self.sizes if size < s <= WASTE * size]
        return size if size in self.sizes or not larger or self.asked[size] > PATIENCE else min(larger)

    def layout(self, size: int) -> NetworkLayout:
        """The layout for a number of images; it remembers its last programs, so that networks that take each other's
        place are not generated again."""
        if size not in self.layouts:
            self.layouts[size] = NetworkLayout(self, size)
        return self.layouts[size]

    def divide(self, batch: int, problem: CoralError) -> None:
        """Makes the best of a network that does not fit an empty chip; ``problem`` if nothing is left to do."""
        if self.stream:
            raise problem
        parts = nw.split(self.network, batch=batch)
        if len(parts) == 1:
            self.stream = True
            self.layouts.clear()
        else:
            self.parts = [_Known(part, (self.weights, k), self.grid) for k, part in enumerate(parts)]


class Networks:
    """The networks of one stick. Not for several threads."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()

    def run(
        self,
        key: Hashable,
        build: Callable[[], nw.Network],
        inputs: Mapping[str, np.ndarray],
        *,
        weights: Hashable = None,
        grid: nw.Grid | None = None,
        fresh: bool = False,
    ) -> dict[str, np.ndarray]:
        """See ``Runtime.network``. ``weights`` stands for the contents of the weights alone (by default ``key``), so
        that networks that differ elsewhere share them; ``grid``: the only tiling to use."""
        if fresh and key in self._known:
            self._renew(key, build())
        if key not in self._known:
            self._known[key] = _Known(build(), key if weights is None else weights, grid)
            if len(self._known) > NETWORKS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        known = self._known[key]
        network, batch = known.network, check_inputs(known.network, inputs)
        if not batch:
            return {n: np.empty((0, t.y, t.x, t.c), np.uint8) for n in network.outputs for t in [network.tensors[n]]}
        return self._run(known, known.size(batch), inputs)

    def _renew(self, key: Hashable, network: nw.Network) -> None:
        """Other weights for a network; what was generated stays, if all of them have a place on the chip."""
        known = self._known[key]
        if known.parts or known.stream:
            self._known[key] = _Known(network, known.weights, known.grid)
            return
        known.network = network
        for parameters, _, _ in list(self._residents.variants(known.weights)):
            self._residents.renew(parameters)

    def _run(self, known: _Known, size: int, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All images, ``size`` per call."""
        if not known.parts:
            try:
                ready = self._program(known, size)
            except ShapeError as error:
                known.divide(size, error)
                return self._run(known, size, inputs)
            return self._calls(ready, size, inputs)
        values = dict(inputs)
        for part in known.parts:
            values |= self._run(part, size, {name: values[name] for name in part.network.inputs})
        return {name: values[name] for name in known.network.outputs}

    def _calls(self, ready: _Ready, size: int, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._residents.load(ready.parameters, ready.program.floor_rows)
        batch, program = len(next(iter(inputs.values()))), ready.program
        results: list[dict[str, np.ndarray]] = []
        running: Running | None = None
        for start in range(0, batch, size):
            packed = program.pack({name: x[start : start + size] for name, x in inputs.items()})
            started = self._residents.start(ready.plan, packed, min(size, batch - start))
            if running is not None:
                results.append(program.unpack(running.result()))
            running = started
        if running is not None:
            results.append(program.unpack(running.result()))
        return {n: _joined([result[n] for result in results])[:batch] for n in program.network.outputs}

    def _program(self, known: _Known, size: int) -> _Ready:
        """The program for ``size`` images where its parameters have their place."""
        ready = known.ready.get(size)
        if ready is not None:
            known.ready.move_to_end(size)
            placed = self._residents.placed(ready.parameters)
            if placed is not None and placed[0].place == ready.place:
                return ready
        layout = known.layout(size)
        parameters, place = self._shared(known.weights, layout) or self._place(known.weights, layout)
        program = layout.program(place)
        if ready is not None and ready.program is program:
            plan = ready.plan
        else:
            self._residents.stats.programs += 1
            cycles = timing.chip_cycles(b.data for b in program.execution.bitstreams) * program.passes
            plan = call_plan(program.execution, cycles, self._residents.stick.clock_hz)
        ready = known.ready[size] = _Ready(program, plan, parameters, place)
        if len(known.ready) > SIZES:
            del known.layouts[known.ready.popitem(last=False)[0]]
        return ready

    def _shared(self, weights: Hashable, layout: NetworkLayout) -> tuple[Hashable, tuple[int, ...]] | None:
        """Parameters that are on the chip, if this layout has the same there."""
        for parameters, footprint, caching in self._residents.variants(weights):
            try:
                program = layout.program(footprint.place)
            except ShapeError:
                continue
            if program.caching() == caching:
                return parameters, footprint.place
        return None

    def _place(self, weights: Hashable, layout: NetworkLayout) -> tuple[Hashable, tuple[int, ...]]:
        taken = [parameters for parameters, _, _ in self._residents.variants(weights)]
        parameters = next((weights, n) for n in range(len(taken) + 1) if (weights, n) not in taken)
        return parameters, self._residents.place(parameters, layout).place


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


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
