"""Parameters of several programs side by side, so that all stay on the chip. Source: docs/compiler.md, Placement."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coral.codegen import CodegenError
from coral.codegen import network as nw
from coral.compiler.partition import Segment
from coral.package.container import Package
from coral.package.program import Base, Bitstream, DmaHint, DType, Hint, Layer, Program

TILES = 16
DTYPES = {"uint8": DType.U8, "int8": DType.I8}


def placed(programs: Sequence[nw.NetworkProgram]) -> tuple[list[nw.NetworkProgram], bool]:
    """(programs whose parameters do not overlap and that no program overwrites, whether that was possible).

    Programs with the same parameters, as bands of an image have, share them.
    """
    programs, kinds = list(programs), [_contents(p) for p in programs]
    for top in (0, sum(p.rows_per_tile for p in dict(zip(kinds, programs, strict=True)).values())):
        base, found, places = [0] * TILES, [], {}
        try:
            for p, kind in zip(programs, kinds, strict=True):
                at = places.setdefault(kind, base)
                found.append(p if not any(at) and not top else _moved(p, at, top))
                base = [max(a, b) for a, b in zip(base, _ends(found[-1]), strict=True)]
        except CodegenError:
            continue
        if max(base) <= min(p.floor_rows for p in found):
            return found, True
    return programs, len(programs) == 1


def _contents(p: nw.NetworkProgram) -> bytes:
    """What is equal for programs that want the same parameters at the same places."""
    places = repr([piece for piece, _ in p.wide.parts]).encode()
    return hashlib.sha256(places + p.parameters).digest()


def _moved(p: nw.NetworkProgram, base: Sequence[int], top: int) -> nw.NetworkProgram:
    return nw.NetworkProgram(p.network, batch=p.batch, grid=p.plan.grid, base_rows=tuple(base), top=top, stream=True)


def _ends(p: nw.NetworkProgram) -> list[int]:
    """Row behind the last parameter row, by tile."""
    ends = [0] * TILES
    for piece, _ in p.wide.parts:
        for tile in range(TILES):
            if piece.tiles >> tile & 1:
                ends[tile] = max(ends[tile], piece.row + piece.rows)
    return ends


def token_of(programs: Sequence[nw.NetworkProgram]) -> int:
    """The parameter caching token of programs that are resident together: from all they contain, never 0."""
    digest = hashlib.sha256()
    for p in programs:
        digest.update(p.parameters)
        digest.update(p.execution.bitstreams[0].data)
    return int.from_bytes(digest.digest()[:8], "little") | 1


def package_of(segment: Segment, program: nw.NetworkProgram, token: int, name: str, version: str) -> Package:
    """The pair of programs as a file holds it: layers named and typed as the graph's tensors."""
    graph, names = segment.lowering.graph, segment.lowering.names
    ends = {segment.lowering.values[i].name: i for i in segment.inputs} | segment.outputs
    layers = {inner: (names[i], DTYPES[str(graph.tensors[i].dtype)]) for inner, i in ends.items()}
    execution = replace(renamed(program.execution, layers), token=token, name=name)
    caching = replace(program.caching(), token=token, name=name)
    return Package((execution, caching), compiler_version=version)


def renamed(program: Program, layers: Mapping[str, tuple[str, DType | None]]) -> Program:
    """A program whose layers have other names and, where given, types."""

    def layer(old: Layer) -> Layer:
        name, dtype = layers.get(old.name, (old.name, None))
        return replace(old, name=name, dtype=old.dtype if dtype is None else dtype)

    def named(base: Base, name: str) -> str:
        return layers[name][0] if base in (Base.INPUT, Base.OUTPUT) and name in layers else name

    def hint(old: Hint) -> Hint:
        return replace(old, name=named(old.base, old.name)) if isinstance(old, DmaHint) else old

    streams = tuple(
        Bitstream(b.data, tuple(replace(r, name=named(r.base, r.name)) for r in b.relocations))
        for b in program.bitstreams
    )
    return replace(
        program,
        bitstreams=streams,
        hints=tuple(map(hint, program.hints)),
        inputs=tuple(map(layer, program.inputs)),
        outputs=tuple(map(layer, program.outputs)),
    )
