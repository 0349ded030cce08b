"""From a network to its pair of programs. Source: docs/network.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import overload

import numpy as np

from coral.codegen import blocks
from coral.codegen.builder import SHORT, Builder
from coral.codegen.errors import CodegenError, ShapeError
from coral.codegen.fc import RESIDENT_TOKEN
from coral.codegen.machine import ROW_BYTES, TILES, ceil_div
from coral.codegen.network import emit, vectors, windows, words
from coral.codegen.network.cost import candidates, fitting
from coral.codegen.network.frame import images_in, input_layer, output_layer, receive_inputs, send_output, senders
from coral.codegen.network.graph import (
    Add,
    AveragePool,
    Concatenate,
    Conv,
    Interleave,
    L2Normalise,
    MaxPool,
    Multiply,
    Network,
    Requantise,
    Resize,
    Slice,
    Softmax,
    Stage,
)
from coral.codegen.network.lower import lowered
from coral.codegen.network.means import mean
from coral.codegen.network.normalise import normalise
from coral.codegen.network.places import collects, shared
from coral.codegen.network.plan import Plan
from coral.codegen.network.regions import with_region
from coral.codegen.network.resize import resize
from coral.codegen.network.rewrite import weight_rows, with_cut_layers
from coral.codegen.network.tiling import Grid
from coral.codegen.network.wide import PIECE_ROWS, Wide
from coral.package.program import Base, Bitstream, DmaHint, Hint, InstructionHint, InterruptHint, Kind, Program
from coral.package.tensors import unpack_output

MAX_BATCH = 256
STREAM_ROWS, CUT_ROWS = 1800, 2048
"""Weights of more rows per tile are streamed in part; layers of more rows are then cut, so that a part of them is."""
TURNS_FROM = 8
"""Tiles that send one after the other at least, where that the ring counters are uneven saves instructions."""
MAX_WORDS = 16384
"""Instruction words of one bitstream."""


class NetworkProgram:
    """A network on the chip: ``caching()`` loads its parameters, ``execution`` runs ``batch`` images.

    Interface of the pair as ``codegen.fc``: ``tiles`` hold parameters, ``rows_per_tile`` is where they end, from
    ``floor_rows`` on every call overwrites wide memory on all tiles.
    """

    def __init__(
        self,
        network: Network,
        *,
        batch: int = 1,
        grid: Grid | None = None,
        base_rows: tuple[int | None, ...] = (0,) * TILES,
        top: int = 0,
        piece_rows: int | None = PIECE_ROWS,
        own_input: bool = False,
        stream: bool = False,
    ) -> None:
        """``stream``: weights for which there is no room come from the host at every call; else they are refused."""
        if not 1 <= batch <= MAX_BATCH:
            raise ShapeError(f"network {network.name!r}: batch {batch}, allowed are 1..{MAX_BATCH}")
        self.network, self.batch = network, batch
        network = lowered(network)
        if stream and weight_rows(network.stages) > sum(STREAM_ROWS - row for row in base_rows if row is not None):
            network = with_cut_layers(network, CUT_ROWS)
        plans = candidates(network, batch) if grid is None else [fitting(network, grid, batch, own_input=own_input)]
        plans = [p for plan in plans for p in (with_region(plan), plan) if p is not None]
        self._place = partial(Wide, base_rows=base_rows, top=top, piece_rows=piece_rows, stream=stream)
        self.plan, self.wide, self.execution = self._first_that_fits(plans, self._place)
        """``execution``: the program that runs the network once, on ``batch`` images."""

    def _first_that_fits(self, plans: list[Plan], place: Callable[[Plan], Wide]) -> tuple[Plan, Wide, Program]:
        problem: ShapeError | None = None
        for plan in plans:
            try:
                self.plan, self.wide = plan, place(plan)
                return self.plan, self.wide, self._build()
            except ShapeError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    @property
    def passes(self) -> int:
        """How often a call goes through the instructions, each time with as many images as the plan holds."""
        return ceil_div(self.batch, images_in(self.plan))

    @property
    def images(self) -> int:
        """Images of a pass that are sent back."""
        return self.batch if self.passes == 1 else images_in(self.plan)

    @property
    def tiles(self) -> int:
        """Tiles up to the highest that holds parameters."""
        masks = [piece.tiles for piece, _ in self.wide.parts]
        return max((mask.bit_length() for mask in masks), default=0)

    @property
    def rows_per_tile(self) -> int:
        """Row behind the last parameter row."""
        return self.wide.used

    @property
    def floor_rows(self) -> int:
        """Lowest wide row that the execution program writes."""
        return self.wide.floor

    @property
    def parameters(self) -> bytes:
        """What ``caching`` loads."""
        return self.wide.blob

    def parameters_of(self, network: Network) -> bytes:
        """What ``caching`` loads for a network that differs from this one in weights and multipliers per channel only.

        CodegenError if its weights would lie elsewhere.
        """
        wide = self._place(Plan(lowered(network), self.plan.form))
        if [piece for piece, _ in wide.parts] != [piece for piece, _ in self.wide.parts]:
            raise CodegenError(f"network {network.name!r}: other weights than those of the program, or other layers")
        return wide.blob

    def caching(self, blob: bytes | None = None) -> Program:
        """Program that loads the parameters (or others of the same layout)."""
        data = self.parameters if blob is None else blob
        size = sum(piece.rows for piece, _ in self.wide.parts) * ROW_BYTES
        if len(data) != size:
            raise CodegenError(f"parameters are {len(data)} bytes long, {size} are needed")
        return Program(
            Kind.PARAMETER_CACHING,
            (self._caching_bitstream,),
            (InstructionHint(), DmaHint(Base.PARAMETER, 0, size), InterruptHint()),
            parameters=data,
            token=RESIDENT_TOKEN,
            name=f"{self.network.name}_parameters",
        )

    @cached_property
    def _caching_bitstream(self) -> Bitstream:
        b = Builder(SHORT, caching=True)
        blocks.load_rows(b, [(piece.tiles, piece.row, piece.rows) for piece, _ in self.wide.parts])
        b.epilogue()
        return b.finish()

    def _build(self) -> Program:
        plan, passes = self.plan, self.passes
        inputs = tuple(replace(input_layer(plan, x, self.images), executions=passes) for x in plan.network.inputs)
        outputs = tuple(replace(output_layer(plan, y, self.images), executions=passes) for y in plan.network.outputs)
        b = Builder(SHORT)
        b.prologue()
        if max((len(tiles) for tiles in senders(plan, self.images)), default=0) > TURNS_FROM:
            b.take_turns()
        if passes > 1:
            b.begin_passes([layer.size_bytes for layer in (*inputs, *outputs)])
        receive_inputs(b, plan, {x.name: x.size_bytes for x in inputs})
        exchanged: set[str] = set()
        self.begins: dict[str, int] = {}
        """Results of stages in order -> first instruction word; under "" that of the outputs' transfers."""
        for stage in plan.stages:
            self.begins[stage.output] = b.words
            self._stage(b, stage, exchanged)
            exchanged.discard(plan.roots[stage.output][0])  # a part that is written later has to be exchanged, too
        self.begins[""] = b.words
        b.separate()
        for index, name in enumerate(plan.network.outputs):
            send_output(b, plan, name, self.images, index)
        if passes > 1:
            b.end_pass(passes)
        b.epilogue()
        stream = b.finish()
        size = len(stream.data) // 16
        if size > MAX_WORDS:
            raise ShapeError(f"network {self.network.name!r}: {size} instruction words, the limit is {MAX_WORDS}")
        streamed, weights = self.wide.streamed, []
        for stage in plan.stages:
            if (rows := streamed.get(stage.output)) is not None:
                weights.append(DmaHint(Base.PARAMETER, sum(h.size for h in weights), len(rows)))
        transfers: list[Hint] = []
        for k in range(passes):
            transfers += [DmaHint(Base.INPUT, k * x.size_bytes, x.size_bytes, x.name) for x in inputs]
            transfers += weights
            transfers += [DmaHint(Base.OUTPUT, k * y.size_bytes, y.size_bytes, y.name, out=True) for y in outputs]
        return Program(
            Kind.EXECUTION_ONLY,
            (stream,),
            (InstructionHint(), *transfers, InterruptHint()),
            parameters=b"".join(streamed[stage.output] for stage in plan.stages if stage.output in streamed),
            inputs=inputs,
            outputs=outputs,
            token=RESIDENT_TOKEN,
            name=self.network.name,
            narrow_bytes_per_tile=plan.narrow_bytes,
        )

    def _stage(self, b: Builder, stage: Stage, exchanged: set[str]) -> None:
        plan, wide = self.plan, self.wide
        if isinstance(stage, Concatenate | Slice | Interleave):
            return
        new = {plan.roots[name][0] for name in stage.inputs if plan.needs_exchange(stage, name)} - exchanged
        exchanged |= new
        read = {plan.roots[name][0] for name in stage.inputs}
        if isinstance(stage, Conv | Multiply) or new or collects(plan, stage) or read & {*plan.network.inputs}:
            b.separate()
        if stage.output in wide.streamed:
            b.handshake()  # what comes from the host waits for nobody

        def exchange() -> None:
            for root in sorted(new):
                windows.exchange(b, plan, root, plan.border_value(root))

        if isinstance(stage, Conv):
            if stage.output in plan.spread:
                vectors.dense(b, plan, wide, stage)
                return
            if shared(plan, stage):
                vectors.gather(b, plan, stage)
            emit.layer(b, plan, wide, stage, exchange)
            return
        exchange()
        match stage:
            case MaxPool():
                windows.maximum(b, plan, stage)
            case AveragePool() if stage.output in plan.summed:
                mean(b, plan, wide, stage)
            case AveragePool():
                words.average(b, plan, wide, stage)
            case Add():
                words.add(b, plan, wide, stage)
            case Requantise():
                words.requantise(b, plan, wide, stage)
            case Multiply():
                words.multiply(b, plan, wide, stage)
            case Resize():
                resize(b, plan, wide, stage)
            case Softmax() | L2Normalise():
                normalise(b, plan, wide, stage)
            case _:
                raise CodegenError(f"stage {stage.output!r}: {type(stage).__name__} has no generator")

    @overload
    def pack(self, x: np.ndarray) -> bytes: ...
    @overload
    def pack(self, x: Mapping[str, np.ndarray]) -> dict[str, bytes]: ...
    def pack(self, x: np.ndarray | Mapping[str, np.ndarray]) -> bytes | dict[str, bytes]:
        """Input bytes of images uint8 [n, y, x, c], n up to ``batch``, of all inputs by name or of the only one.

        Missing images, and what the plan's ``host_size`` adds, are zero points. ShapeError for other names or shapes.
        """
        names = self.network.inputs
        if isinstance(x, Mapping):
            if x.keys() != set(names):
                raise ShapeError(f"inputs are {sorted(x)}, needed are {sorted(names)}")
            return {name: self._pack(name, x[name]) for name in names}
        if len(names) != 1:
            raise ShapeError(f"one array for {len(names)} inputs, needed are arrays by name: {sorted(names)}")
        return self._pack(names[0], x)

    def _pack(self, name: str, x: np.ndarray) -> bytes:
        t, (rows, columns), whole = self.plan.tensors[name], self.plan.host_size(name), self.network.tensors[name]
        layer = next(layer for layer in self.execution.inputs if layer.name == name)
        per_pass = images_in(self.plan)
        if x.dtype != np.uint8 or x.ndim < 1 or len(x) > self.batch or x[:1].size != whole.size:
            raise ShapeError(
                f"input {name!r} is {x.dtype} {x.shape}, needed are up to {self.batch} images of {whole.size} uint8"
            )
        images = np.full((self.passes * per_pass, rows, columns, t.c), t.zero_point, np.uint8)
        channels = whole.size // (t.y * t.x)
        images[: len(x), : t.y, : t.x, :channels] = x.reshape(len(x), t.y, t.x, channels)
        data = np.zeros((self.passes, layer.size_bytes), np.uint8)
        data[:, : images[:per_pass].size] = images.reshape(self.passes, -1)
        return data.tobytes()

    @overload
    def unpack(self, name: str, raw: bytes) -> np.ndarray: ...
    @overload
    def unpack(self, name: Mapping[str, bytes]) -> dict[str, np.ndarray]: ...
    def unpack(self, name: str | Mapping[str, bytes], raw: bytes = b"") -> np.ndarray | dict[str, np.ndarray]:
        """Output ``name`` uint8 [batch, y, x, c] from its bytes, or several from their bytes by name."""
        if isinstance(name, Mapping):
            return {key: self.unpack(key, data) for key, data in name.items()}
        t, layer = self.network.tensors[name], next(y for y in self.execution.outputs if y.name == name)
        return unpack_output(layer, raw).reshape(-1, t.y, t.x, t.c)[: self.batch]


__all__ = ["NetworkProgram"]
