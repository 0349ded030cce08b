"""What must hold before anything uses a program: lengths, hint ranges, relocations, layers and layouts.

Source: docs/package.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np

from coral.package.program import (
    Base,
    Bitstream,
    DmaHint,
    InstructionHint,
    InterruptHint,
    Kind,
    Layer,
    Layout,
    PackageError,
    Program,
)

Buffers = dict[tuple[Base, str], int]
WORD_BYTES = 16
MAX_BITSTREAM_BYTES = 16384 * WORD_BYTES
MAX_LAYER_BYTES = 1 << 28
MAX_DIMENSIONS = 16
MAX_POSITIONS = 1 << 22
"""Positions (y, x) of one output that a check is willing to sort: 2048 x 2048."""


def check_program(program: Program) -> None:
    """Raises PackageError at the first contradiction inside ``program``."""
    if not program.bitstreams:
        raise PackageError("program has no bitstream")
    _integers(
        "program",
        {
            "batch_size": (program.batch_size, 1, 1 << 20),
            "scratch_bytes": (program.scratch_bytes, 0, (1 << 31) - 1),
            "token": (program.token, int(program.kind is Kind.PARAMETER_CACHING), (1 << 64) - 1),
            "estimated_cycles": (program.estimated_cycles, 0, (1 << 63) - 1),
            "narrow_bytes_per_tile": (program.narrow_bytes_per_tile, 0, (1 << 31) - 1),
        },
    )
    if program.kind is Kind.PARAMETER_CACHING and (program.inputs or program.outputs):
        raise PackageError(f"a parameter caching program has {len([*program.layers()])} layers, it must have none")
    for side, layers in (("input", program.inputs), ("output", program.outputs)):
        names = [layer.name for layer in layers]
        if len(set(names)) != len(names):
            raise PackageError(f"{side} layers share a name: {sorted(names)}")
        for layer in layers:
            check_layer(layer, output=side == "output")
    buffers = {(Base.PARAMETER, ""): len(program.parameters), (Base.SCRATCH, ""): program.scratch_bytes}
    for base, layers in ((Base.INPUT, program.inputs), (Base.OUTPUT, program.outputs)):
        buffers |= {(base, layer.name): layer.size_bytes * layer.executions for layer in layers}
    for index, bitstream in enumerate(program.bitstreams):
        _check_bitstream(buffers, index, bitstream)
    _check_hints(program, buffers)


def _integers(place: str, fields: dict[str, tuple[int, int, int]]) -> None:
    for name, (value, low, high) in fields.items():
        if not low <= value <= high:
            raise PackageError(f"{place}: {name} is {value}, allowed are {low}..{high}")


def _check_bitstream(buffers: Buffers, index: int, bitstream: Bitstream) -> None:
    size = len(bitstream.data)
    if size == 0 or size % WORD_BYTES or size > MAX_BITSTREAM_BYTES:
        raise PackageError(
            f"bitstream {index} is {size} bytes long, it must be a multiple of {WORD_BYTES} in "
            f"{WORD_BYTES}..{MAX_BITSTREAM_BYTES}"
        )
    for relocation in bitstream.relocations:
        place = f"bitstream {index}, relocation of {relocation.base.name} {relocation.name!r} at bit {relocation.bit}"
        if not 0 <= relocation.bit <= size * 8 - 32:
            raise PackageError(f"{place}: outside the bitstream of {size * 8} bits")
        if relocation.bit % 128 != 70:
            raise PackageError(f"{place}: bit {relocation.bit % 128} of an instruction word, immediates are at 70")
        start = relocation.bit // 128 * WORD_BYTES
        word = int.from_bytes(bitstream.data[start : start + WORD_BYTES], "little")
        opcode, alu = word >> 6 & 0x3F, word >> 54 & 0x3F
        if (opcode, alu) != (0x20, 0x2F):
            raise PackageError(
                f"{place}: points at opcode {opcode:#04x} with ALU op {alu:#04x}, not at a move immediate (0x20, 0x2f)"
            )
        _check_base(buffers, place, relocation.base, relocation.name)


def _check_base(buffers: Buffers, place: str, base: Base, name: str) -> int:
    """Size in bytes of the buffer that (base, name) stands for; parameters and scratch have one each, of any name."""
    key = (base, name if base in (Base.INPUT, Base.OUTPUT) else "")
    if key not in buffers:
        raise PackageError(f"{place}: there is no {base.name.lower()} layer of that name")
    return buffers[key]


def _check_hints(program: Program, buffers: Buffers) -> None:
    chunks = []
    written: dict[str, list[tuple[int, int]]] = {layer.name: [] for layer in program.outputs}
    for index, hint in enumerate(program.hints):
        match hint:
            case InstructionHint(chunk):
                chunks.append(chunk)
            case InterruptHint(number):
                if not 0 <= number <= 3:
                    raise PackageError(f"hint {index}: interrupt {number}, the chip has 0..3")
            case DmaHint(base, offset, size, name, out):
                place = f"hint {index}: {base.name} {name!r}, bytes {offset}..{offset + size}"
                if base is not Base.SCRATCH and out != (base is Base.OUTPUT):
                    raise PackageError(f"{place}: wrong direction, out is {out}")
                limit = _check_base(buffers, place, base, name)
                if offset < 0 or size < 1 or offset + size > limit:
                    raise PackageError(f"{place}: outside the buffer of {limit} bytes")
                if base is Base.OUTPUT:
                    written[name].append((offset, offset + size))
    if not program.hints or program.hints[0] != InstructionHint(0) or chunks != [*range(len(program.bitstreams))]:
        raise PackageError(
            f"hints send the chunks {chunks}; they must begin with chunk 0 and send each of the "
            f"{len(program.bitstreams)} chunks once, in order"
        )
    if program.fully_deterministic:
        for layer in program.outputs:
            _check_coverage(layer, written[layer.name])


def _check_coverage(layer: Layer, ranges: Iterable[tuple[int, int]]) -> None:
    position = 0
    for start, end in sorted(ranges):
        if start != position:
            break
        position = end
    size = layer.size_bytes * layer.executions
    if position != size:
        raise PackageError(
            f"output {layer.name!r}: hints {sorted(ranges)} do not deliver its {size} bytes exactly once"
        )


def check_layer(layer: Layer, *, output: bool) -> None:
    """Raises PackageError when dimensions, sizes, quantisation or the layout of ``layer`` contradict each other."""
    place = f"layer {layer.name!r}"
    if not layer.name:
        raise PackageError("a layer has no name")
    _integers(
        place,
        {
            "y": (layer.y, 1, MAX_LAYER_BYTES),
            "x": (layer.x, 1, MAX_LAYER_BYTES),
            "z": (layer.z, 1, MAX_LAYER_BYTES),
            "executions": (layer.executions, 1, 1 << 16),
            "size_bytes": (layer.size_bytes, layer.y * layer.x * layer.z * layer.dtype.itemsize, MAX_LAYER_BYTES),
            "zero_point": (layer.zero_point, -(1 << 31), (1 << 31) - 1),
        },
    )
    if not math.isfinite(layer.scale):
        raise PackageError(f"{place}: scale is {layer.scale}")
    if not output:
        if layer.layout or layer.slices:
            raise PackageError(f"{place}: an input has an output layout")
    elif layer.layout:
        _check_layout(layer, layer.layout)
    elif layer.y * layer.x > 1 and not layer.slices:
        raise PackageError(f"{place}: output of {layer.y} x {layer.x} positions without a layout")
    if len(layer.shape) > MAX_DIMENSIONS:
        raise PackageError(f"{place}: shape has {len(layer.shape)} dimensions, the limit is {MAX_DIMENSIONS}")
    if layer.shape and math.prod(end - start + 1 for start, end in layer.shape) != layer.y * layer.x * layer.z:
        raise PackageError(f"{place}: shape {layer.shape} is not that of {layer.y} x {layer.x} x {layer.z} elements")
    if layer.slices:
        _check_slices(layer)


def _check_slices(layer: Layer) -> None:
    shape, itemsize, elements = extents(layer), layer.dtype.itemsize, 0
    for box in layer.slices:
        place = f"layer {layer.name!r}, {box}"
        if not len(box.ranges) == len(box.strides) == len(shape):
            raise PackageError(f"{place}: must have {len(shape)} dimensions")
        last = box.offset_bytes // itemsize
        for (start, end), stride, limit in zip(box.ranges, box.strides, shape, strict=True):
            if not 0 <= start <= end < limit or stride < 0:
                raise PackageError(f"{place}: leaves the shape {shape}")
            last += (end - start) * stride
        if box.offset_bytes < 0 or box.offset_bytes % itemsize or (last + 1) * itemsize > layer.size_bytes:
            raise PackageError(f"{place}: leaves the layer's {layer.size_bytes} bytes or is not aligned to {itemsize}")
        elements += math.prod(end - start + 1 for start, end in box.ranges)
    if elements != math.prod(shape):
        raise PackageError(f"layer {layer.name!r}: its slices hold {elements} elements, its shape {shape}")


def extents(layer: Layer) -> tuple[int, ...]:
    """Shape that the slices of ``layer`` speak of: the file's where it gives one, else (y, x, z)."""
    return tuple(end - start + 1 for start, end in layer.shape) or (layer.y, layer.x, layer.z)


def _check_layout(layer: Layer, layout: Layout) -> None:
    place = f"layer {layer.name!r}, layout"
    if layer.y * layer.x > MAX_POSITIONS:
        raise PackageError(f"{place}: {layer.y} x {layer.x} positions, the limit is {MAX_POSITIONS}")
    for name, limit in (
        ("y_to_tile", layer.y),
        ("y_local_y", layer.y),
        ("x_to_tile", layer.x),
        ("x_local_byte_offset", layer.x),
        ("x_row_size", layer.x),
    ):
        values = getattr(layout, name)
        if len(values) != limit:
            raise PackageError(f"{place}: {name} has {len(values)} entries, the layer {limit}")
        if min(values) < 0 or max(values) > MAX_LAYER_BYTES:
            raise PackageError(f"{place}: {name} holds {min(values)}..{max(values)}, allowed are 0..{MAX_LAYER_BYTES}")
    tiles = max(layout.y_to_tile) + max(layout.x_to_tile) + 1
    if tiles > len(layout.tile_byte_offset):
        raise PackageError(f"{place}: tile {tiles - 1} of {len(layout.tile_byte_offset)}")
    first = np.sort(element_index(layout), axis=None)
    limit = layer.size_bytes // layer.dtype.itemsize - layer.z
    if first[0] < 0 or first[-1] > limit:
        raise PackageError(f"{place}: elements at {first[0]}..{first[-1]}, the last may start at {limit}")
    if first.size > 1 and int(np.diff(first).min()) < layer.z:
        raise PackageError(f"{place}: two positions share elements")


@functools.lru_cache(maxsize=64)
def element_index(layout: Layout) -> np.ndarray:
    """int64 [y, x]: index of element (y, x, 0) in the raw output; shared, not to be written to."""
    y_tile, y_local = (np.asarray(v, np.int64)[:, None] for v in (layout.y_to_tile, layout.y_local_y))
    x_tile, x_local, x_row = (
        np.asarray(v, np.int64)[None, :] for v in (layout.x_to_tile, layout.x_local_byte_offset, layout.x_row_size)
    )
    return np.asarray(layout.tile_byte_offset, np.int64)[y_tile + x_tile] + y_local * x_row + x_local
