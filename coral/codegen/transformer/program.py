"""From a decoder to its programs: parameters, caches, one token. Source: docs/transformer.md."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coral.codegen import blocks
from coral.codegen.builder import V14, Builder
from coral.codegen.errors import CodegenError, ShapeError
from coral.codegen.machine import ALL_TILES, ROW_BYTES, TILES, WORD_BYTES, mask_of
from coral.codegen.network.program import MAX_WORDS
from coral.codegen.transformer import frame
from coral.codegen.transformer.frame import Codes
from coral.codegen.transformer.graph import ONE_COLUMNS, ZERO, Transformer
from coral.codegen.transformer.model import Cache
from coral.codegen.transformer.plan import Form, Plan
from coral.codegen.transformer.rows import parameters
from coral.codegen.transformer.stages import Stages
from coral.package.program import Base, Bitstream, DmaHint, InstructionHint, InterruptHint, Kind, Layer, Program

CACHE_OUTPUTS = ("keys", "values")
PER_POSITION = ("scores", "weights")
STAGES = ("normal", "qk", "v", "q", "k", *PER_POSITION, "attention", "x2", "normal2", "a", "h3", "m", "y")
"""Stages of a layer that ``probe`` can stop after."""


@dataclass(frozen=True)
class Token:
    """What a token's program gave: ``result`` uint8 [dim] or [vocabulary]; ``keys``, ``values`` uint8 [layers,
    kv_heads, head_size] of its position, None if they stay on the chip."""

    result: Codes
    keys: Codes | None
    values: Codes | None


class TransformerProgram:
    """A decoder on the chip: ``caching()`` loads its parameters, ``execution(p)`` computes the token at position p.

    With ``form.keep``, ``initialise(n)`` brings the keys and values of the first n positions; afterwards every token's
    program appends its own. Raises ShapeError, with the numbers, if the model does not fit the form.
    """

    def __init__(self, model: Transformer, form: Form = Form()) -> None:  # noqa: B008
        self.model, self.form = model, form
        self.plan = Plan(model, form)
        self._executions: dict[int, Program] = {}

    @property
    def tiles(self) -> int:
        """Tiles that may hold parameters."""
        return TILES

    @property
    def rows_per_tile(self) -> int:
        """Row behind the last parameter row."""
        return self.plan.used

    @property
    def floor_rows(self) -> int:
        """Lowest wide row that the programs write."""
        return self.plan.floor

    @cached_property
    def token(self) -> int:
        """Stands for the parameters: programs with other ones displace them, as this one does others."""
        return int.from_bytes(hashlib.sha256(self.parameters).digest()[:8], "little") | 1

    @cached_property
    def parameters(self) -> bytes:
        """What ``caching`` loads."""
        return b"".join(rows.tobytes() for _, _, rows in parameters(self.plan))

    def caching(self) -> Program:
        """Program that loads the parameters."""
        data, b = self.parameters, Builder(V14, caching=True)
        blocks.load_rows(b, [(tiles, row, len(rows)) for tiles, row, rows in parameters(self.plan)])
        b.epilogue()
        hints = (InstructionHint(), DmaHint(Base.PARAMETER, 0, len(data)), InterruptHint())
        name = f"{self.model.name}_parameters"
        return Program(Kind.PARAMETER_CACHING, (self._finish(b),), hints, parameters=data, token=self.token, name=name)

    def initialise(self, positions: int) -> Program:
        """Program that fills the caches: keys and values of the first positions from the host, 128 behind them.

        At least one position and not all: ShapeError.
        """
        self._check(positions)
        plan, b = self.plan, Builder(V14)
        size = len(plan.kv_tiles) * 2 * frame.stream_bytes(plan, positions)
        b.prologue()
        frame.begin_input(b, size)
        frame.receive_cache(b, plan, positions, self.model.geometry.context, 0)
        if plan.append:
            e = Stages(b, plan, self.model.geometry.context - 1)
            for local in range(plan.local_layers):
                e.rows(plan.head_mask, local, groups=(0, e.groups), quads=(0, e.quads))
            b.reset()
        b.epilogue()
        return self._program(b, f"{self.model.name}_caches", size, {})

    def pack_caches(self, cache: Cache, positions: int) -> bytes:
        """Input of ``initialise``."""
        return frame.pack_cache(self.plan, cache, positions)

    def execution(self, position: int) -> Program:
        """Program of the token at a position from 1 on; ShapeError for others."""
        if position not in self._executions:
            self._executions[position] = self._build(position)
        return self._executions[position]

    def pack(self, x: Codes, position: int, cache: Cache | None = None) -> bytes:
        """Input of ``execution``: codes uint8 [dim]; without ``form.keep`` also the cache of earlier positions."""
        if x.dtype != np.uint8 or x.shape != (self.model.geometry.dim,):
            raise ShapeError(f"a token is uint8 [{self.model.geometry.dim}], not {x.dtype} {x.shape}")
        data = frame.pack_token(self.plan, x, position)
        if self.form.keep:
            return data
        if cache is None:
            raise ShapeError("keys and values do not stay on the chip in this form: they must be given")
        return data + frame.pack_cache(self.plan, cache, position)

    def probe(self, position: int, layer: int, stage: str) -> Program:
        """The beginning of ``execution``, up to a stage of a layer, whose result is the output ``stage``.

        For comparing buffers with the bit model, stage by stage. CodegenError: in a loop, or no such stage.
        """
        if self.form.loop:
            raise CodegenError(f"{self.model.name}: in a loop no layer can be stopped at; use the form without")
        return self._build(position, (layer, stage))

    def unpack_probe(self, position: int, layer: int, stage: str, raw: bytes) -> list[Codes]:
        """What every share of the layer holds of a stage, to be compared with ``held``."""
        found = frame.unpack(frame.held_parts(self.plan, layer, stage, position), raw)
        if stage in PER_POSITION:
            return [codes.reshape(self.plan.heads, -1)[:, : position + 1] for codes in found]
        return found

    def held(self, layer: int, stage: str, share: int, seen: Mapping[str, Codes]) -> Codes:
        """What a share of a layer should hold of a stage, in its order, by what the bit model gave (``step``)."""
        g, plan, codes = self.model.geometry, self.plan, seen[stage]
        own = plan.held(layer, stage, 0)[0][share]
        mine, size = slice(own.first, own.first + own.count), g.head_size
        first = own.first // (g.heads // g.kv_heads)
        kv = slice(first, first + plan.kv_heads)
        match stage:
            case "normal" | "normal2":
                return codes
            case "q":
                return codes[mine].reshape(-1)
            case "k":
                return codes[kv].reshape(-1)
            case "qk":
                heads = codes.reshape(-1, size)
                return np.concatenate([heads[: g.heads][mine], heads[g.heads :][kv]]).reshape(-1)
            case "v":
                ones = np.full((plan.kv_heads, ONE_COLUMNS), ZERO + 1, np.uint8)
                return np.concatenate([ones, codes.reshape(-1, size)[kv]], 1).reshape(-1)
            case "attention":
                heads = codes.reshape(-1, size)[mine]
                return np.concatenate([heads[:, ::2], heads[:, 1::2]], 1).reshape(-1)
        return codes[mine]

    def unpack(self, position: int, outputs: Mapping[str, bytes]) -> Token:
        """What the transfers of ``execution``, by name, hold."""
        plan, g = self.plan, self.model.geometry
        result = np.concatenate(frame.unpack(frame.result_parts(plan), outputs["y"]))
        if plan.logit_groups and self.model.classifier is not None:
            result = result[: len(self.model.classifier.weights)]
        if not self.form.reports:
            return Token(result, None, None)
        shape = (len(self.model.blocks), g.kv_heads, g.head_size)
        found = np.full(shape, ZERO, np.uint8), np.full(shape, ZERO, np.uint8)
        for target, parts, name in zip(found, frame.cache_parts(plan, position), CACHE_OUTPUTS, strict=True):
            for (first, layer), piece in zip(plan.kv_tiles, frame.unpack(parts, outputs[name]), strict=True):
                where = (slice(layer, layer + plan.local_layers), slice(first, first + plan.kv_heads))
                target[where] = piece.reshape(plan.local_layers, plan.kv_heads, g.head_size)
        return Token(result, *found)

    def _check(self, position: int) -> None:
        context = self.model.geometry.context
        if not 1 <= position < context:
            raise ShapeError(f"{self.model.name}: position {position}, the chip's programs are for 1..{context - 1}")

    def _build(self, position: int, stop: tuple[int, str] | None = None) -> Program:
        self._check(position)
        plan, keep = self.plan, self.form.keep
        size = frame.token_rows(plan) * ROW_BYTES
        total = size if keep else size + len(plan.kv_tiles) * 2 * frame.stream_bytes(plan, position)
        b = Builder(V14)
        e = Stages(b, plan, position)
        b.prologue()
        frame.begin_input(b, total)
        frame.receive_token(e)
        if not keep:
            frame.receive_cache(b, plan, position, position + 1, size)
        if stop is None:
            self._layers(e)
            outputs = {"y": frame.result_parts(plan)}
            if self.form.reports:
                outputs |= dict(zip(CACHE_OUTPUTS, frame.cache_parts(plan, position), strict=True))
        else:
            outputs = {stop[1]: frame.held_parts(plan, *stop, position)}
            self._beginning(e, *stop)
        for index, (name, parts) in enumerate(outputs.items()):
            frame.send(b, name, 1 + index, parts)
        b.epilogue()
        sizes = {name: sum(frame.sent_bytes(words) for _, words in parts) for name, parts in outputs.items()}
        return self._program(b, self.model.name, total, sizes)

    def _beginning(self, e: Stages, last: int, stage: str) -> None:
        for index in range(last):
            e.layer(index)
            e.hand_over(index, mask_of(s.tile for s in self.plan.layouts[index + 1].heads))
        next(names for names in e.stages(last) if stage in names)

    def _layers(self, e: Stages) -> None:
        plan, b, layers = self.plan, e.b, len(self.model.blocks)
        readers = ALL_TILES if plan.logit_groups else 0
        if self.form.loop:
            b.barrier()
            b.restart()
            b.begin_tile_loop()
            e.layer(0)
            e.hand_over(0, plan.head_mask | readers)
            b.handshake()
            b.end_tile_loop(layers)
        else:
            for index in range(layers):
                e.layer(index)
                if index + 1 < layers:
                    e.hand_over(index, mask_of(s.tile for s in plan.layouts[index + 1].heads))
            if readers:
                e.hand_over(layers - 1, readers)
        if readers:
            e.classify()

    def _program(self, b: Builder, name: str, size: int, outputs: dict[str, int]) -> Program:
        hints = [DmaHint(Base.INPUT, 0, size, "x")]
        hints += [DmaHint(Base.OUTPUT, 0, n, output, out=True) for output, n in outputs.items()]
        return Program(
            Kind.EXECUTION_ONLY,
            (self._finish(b),),
            (InstructionHint(), *hints, InterruptHint()),
            inputs=(Layer("x", size, 1, 1, size, ZERO, self.model.x_scale),),
            outputs=tuple(Layer(output, n, 1, 1, n, ZERO, self.model.y_scale) for output, n in outputs.items()),
            token=self.token,
            name=name,
            narrow_bytes_per_tile=self.plan.narrow_bytes,
        )

    def _finish(self, b: Builder) -> Bitstream:
        stream = b.finish()
        words = len(stream.data) // (WORD_BYTES * 4)
        if words > MAX_WORDS:
            raise CodegenError(f"{self.model.name}: {words} instruction words, the limit is {MAX_WORDS}")
        return stream
