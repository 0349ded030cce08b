"""Hypothesis strategies: valid programs and packages, and damaged files."""

from __future__ import annotations

import struct
from itertools import pairwise

from hypothesis import strategies as st

from coral.package import (
    Base,
    Bitstream,
    DmaHint,
    DType,
    FenceHint,
    InstructionHint,
    InterruptHint,
    Kind,
    Layer,
    Layout,
    Program,
    Relocation,
    Slice,
)
from coral.package.container import Package

MOVE_IMMEDIATE = (0x20 << 6 | 0x2F << 54).to_bytes(16, "little")
I32 = st.integers(-(1 << 31), (1 << 31) - 1)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


def split(draw: st.DrawFn, extent: int) -> list[int]:
    """Cut points of ``extent`` positions into runs, with 0 and the end."""
    inner = draw(st.sets(st.integers(1, extent - 1), max_size=3)) if extent > 1 else set()
    return sorted({0, extent} | inner)


@st.composite
def layouts(draw: st.DrawFn, y: int, x: int, z: int) -> tuple[Layout, int]:
    """(layout, elements used): a grid of tiles, each a row-major slab, the slabs in any order with gaps."""
    rows, columns = split(draw, y), split(draw, x)
    step = z + draw(st.integers(0, 4))
    widths = [end - start for start, end in pairwise(columns)]
    heights = [end - start for start, end in pairwise(rows)]
    row_sizes = [width * step + draw(st.integers(0, 3)) for width in widths]
    tiles = [(r, c) for r in range(len(heights)) for c in range(len(widths))]
    offsets, position = {}, draw(st.integers(0, 5))
    for r, c in draw(st.permutations(tiles)):
        offsets[r, c] = position
        position += heights[r] * row_sizes[c] + draw(st.integers(0, 3))
    row_of = [max(r for r, start in enumerate(rows[:-1]) if start <= i) for i in range(y)]
    column_of = [max(c for c, start in enumerate(columns[:-1]) if start <= i) for i in range(x)]
    layout = Layout(
        y_to_tile=tuple(r * len(widths) for r in row_of),
        x_to_tile=tuple(column_of),
        tile_byte_offset=tuple(offsets[tile] for tile in tiles),
        x_local_byte_offset=tuple((i - columns[c]) * step for i, c in enumerate(column_of)),
        y_local_y=tuple(i - rows[r] for i, r in enumerate(row_of)),
        x_row_size=tuple(row_sizes[c] for c in column_of),
    )
    return layout, position


@st.composite
def layers(draw: st.DrawFn, name: str, *, output: bool) -> Layer:
    y, x, z = (draw(st.integers(1, 6)) for _ in range(3))
    dtype = draw(st.sampled_from(DType))
    layout, slices, elements = None, (), y * x * z
    if output and draw(st.booleans()):
        layout, elements = draw(layouts(y, x, z))
    elif output:
        cut = draw(st.integers(1, y))
        boxes = [(0, cut - 1)] + ([(cut, y - 1)] if cut < y else [])
        slices = tuple(
            Slice(((a, b), (0, x - 1), (0, z - 1)), (x * z, z, 1), a * x * z * dtype.itemsize) for a, b in boxes
        )
    size = elements * dtype.itemsize + draw(st.integers(0, 8))
    shape = ((0, y - 1), (0, x - 1), (0, z - 1)) if slices or draw(st.booleans()) else ()
    return Layer(
        name=name,
        size_bytes=-(-size // 8) * 8,
        y=y,
        x=x,
        z=z,
        zero_point=draw(I32),
        scale=draw(st.floats(width=32, allow_nan=False, allow_infinity=False)),
        dtype=dtype,
        layout=layout,
        shape=shape,
        executions=draw(st.integers(1, 3)),
        cache_on_dram=draw(st.booleans()),
        slices=slices,
        deprecated_dtype=draw(st.sampled_from(DType)) if output else DType.U8,
    )


@st.composite
def bitstreams(draw: st.DrawFn, bases: list[tuple[Base, str]]) -> Bitstream:
    words = draw(
        st.lists(st.sampled_from([MOVE_IMMEDIATE, bytes(16), b"\x80\x0f" + bytes(14)]), min_size=1, max_size=8)
    )
    relocations = [
        Relocation(*draw(st.sampled_from([(b, h) for b, _ in bases for h in (False, True)])), index * 128 + 70)
        for index, word in enumerate(words)
        if word == MOVE_IMMEDIATE
    ]
    named = []
    for relocation in relocations:
        name = draw(st.sampled_from([name for base, name in bases if base is relocation.base]))
        named.append(Relocation(relocation.base, relocation.high, relocation.bit, name, draw(st.integers(0, 3))))
    return Bitstream(b"".join(words), tuple(named))


@st.composite
def programs(draw: st.DrawFn, kind: Kind | None = None, token: int | None = None) -> Program:
    kind = draw(st.sampled_from(Kind)) if kind is None else kind
    caching = kind is Kind.PARAMETER_CACHING
    names = [] if caching else draw(st.lists(NAMES, max_size=4, unique=True))
    cut = draw(st.integers(0, len(names)))
    inputs = tuple(draw(layers(name, output=False)) for name in names[:cut])
    outputs = tuple(draw(layers(name, output=True)) for name in names[cut:])
    parameters = draw(st.binary(max_size=200))
    bases = [(Base.PARAMETER, ""), (Base.SCRATCH, "")]
    bases += [(Base.INPUT, layer.name) for layer in inputs] + [(Base.OUTPUT, layer.name) for layer in outputs]
    chunks = tuple(draw(bitstreams(bases)) for _ in range(draw(st.integers(1, 3))))
    transfers = [FenceHint(), InterruptHint(draw(st.integers(0, 3)))]
    if parameters:
        transfers.append(DmaHint(Base.PARAMETER, 0, len(parameters)))
    transfers += [DmaHint(Base.INPUT, 0, layer.size_bytes, layer.name) for layer in inputs]
    for layer in outputs:
        size, middle = layer.size_bytes * layer.executions, draw(st.integers(1, layer.size_bytes))
        transfers.append(DmaHint(Base.OUTPUT, 0, middle, layer.name, out=True))
        if middle < size:
            transfers.append(DmaHint(Base.OUTPUT, middle, size - middle, layer.name, out=True))
    scratch = draw(st.integers(0, 100))
    if scratch:
        transfers += [DmaHint(Base.SCRATCH, scratch - 1, 1, out=out) for out in (False, True)]
    hints = [InstructionHint(0), *draw(st.permutations(transfers))]
    hints += [InstructionHint(index) for index in range(1, len(chunks))]
    return Program(
        kind=kind,
        bitstreams=chunks,
        hints=tuple(hints),
        parameters=parameters,
        inputs=inputs,
        outputs=outputs,
        token=draw(st.integers(1, (1 << 64) - 1)) if token is None else token,
        name=draw(st.text(st.characters(codec="utf-8"), max_size=5)),
        batch_size=draw(st.integers(1, 9)),
        scratch_bytes=scratch,
        estimated_cycles=draw(st.integers(0, (1 << 63) - 1)),
        narrow_bytes_per_tile=draw(st.integers(0, 196608)),
        chip=draw(st.sampled_from(["beagle", ""])),
        fully_deterministic=draw(st.booleans()),
        version=draw(I32),
        serialized_model=draw(st.binary(max_size=3)),
        parameters_in_dram=draw(st.booleans()),
        estimated_cycles_32bit=draw(I32),
    )


@st.composite
def packages(draw: st.DrawFn) -> Package:
    token = draw(st.integers(1, (1 << 64) - 1))
    kinds = draw(
        st.sampled_from([[Kind.STAND_ALONE], [Kind.EXECUTION_ONLY], [Kind.PARAMETER_CACHING]])
        | st.permutations([Kind.EXECUTION_ONLY, Kind.PARAMETER_CACHING])
        | st.permutations([Kind.STAND_ALONE, Kind.EXECUTION_ONLY, Kind.PARAMETER_CACHING])
    )
    return Package(
        programs=tuple(draw(programs(kind, token)) for kind in kinds),
        min_runtime_version=draw(I32),
        compiler_version=draw(st.text(st.characters(codec="utf-8"), max_size=5)),
        model_identifier=draw(st.text(st.characters(codec="utf-8"), max_size=5)),
        keypair_version=draw(I32),
        signature=draw(st.binary(max_size=5)),
        virtual_chip_id=draw(I32.filter(lambda value: value != -1)),
    )


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """``data`` cut off, with flipped bits, or with 32-bit words overwritten by values that parsers stumble over.

    Zero pages are rarely chosen: most positions are drawn near bytes that are not zero.
    """
    if draw(st.integers(0, 4)) == 0:
        return data[: draw(st.integers(0, len(data) - 1))]
    busy = [position for position, byte in enumerate(data) if byte and position < len(data) - 8]
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        position = draw(st.sampled_from(busy)) + draw(st.integers(0, 4))
        if draw(st.booleans()):
            out[position] ^= 1 << draw(st.integers(0, 7))
        else:
            edges = [0, 1, 4, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFC, 0xFFFF_FFFF, len(data), len(data) - 4]
            struct.pack_into("<I", out, position & ~3, draw(st.sampled_from(edges) | st.integers(0, len(data))))
    return bytes(out)
