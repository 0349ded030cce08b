"""The types of a program: what the code generators write, the files hold and the driver runs. Pure data.

Source: docs/package.md (tables of the DarwiNN package).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from coral import CoralError


class PackageError(CoralError):
    """A file or program that is damaged or contradicts itself; the message names table, field and value.

    Long messages are cut: names and lists in them come from strangers.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= 400 else f"{message[:400]}...")


class Kind(IntEnum):
    """What an executable is for; values of the file."""

    STAND_ALONE = 0
    PARAMETER_CACHING = 1
    EXECUTION_ONLY = 2


class Base(IntEnum):
    """Which buffer a relocation or a DMA hint speaks of; values of the file."""

    OUTPUT = 0
    INPUT = 1
    PARAMETER = 2
    SCRATCH = 3


class DType(IntEnum):
    """Element type of a layer; values of the file."""

    U8 = 0
    U16 = 1
    I32 = 2
    BF16 = 3
    F16 = 4
    F32 = 5
    I8 = 8
    I16 = 9

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return {DType.U8: 1, DType.I8: 1, DType.I32: 4, DType.F32: 4}.get(self, 2)


@dataclass(frozen=True)
class Relocation:
    """A 32-bit immediate that libedgetpu replaces by one half of a host address; over USB the value has no function.

    ``bit`` is the position of the immediate's lowest bit in its bitstream; ``name`` is the layer, empty for parameters
    and scratch.
    """

    base: Base
    high: bool
    bit: int
    name: str = ""
    batch: int = 0


@dataclass(frozen=True)
class Bitstream:
    """One chunk of instruction words (16 bytes each)."""

    data: bytes
    relocations: tuple[Relocation, ...] = ()


@dataclass(frozen=True)
class InstructionHint:
    """Send bitstream ``chunk`` whole, with tag 0."""

    chunk: int = 0


@dataclass(frozen=True)
class DmaHint:
    """Move ``size`` bytes at byte ``offset`` of a buffer: a layer's padded tensor, the parameters or the scratch.

    ``out`` is the chip's view: True when the chip sends. Scratch goes both ways, inputs and parameters in, outputs out.
    """

    base: Base
    offset: int
    size: int
    name: str = ""
    out: bool = False
    batch: int = 0


@dataclass(frozen=True)
class InterruptHint:
    """Wait for host interrupt ``number`` (0..3)."""

    number: int = 0


@dataclass(frozen=True)
class FenceHint:
    """Complete everything before continuing."""


Hint = InstructionHint | DmaHint | InterruptHint | FenceHint


@dataclass(frozen=True)
class Layout:
    """Where element (y, x, z) of an output lies, counted in elements:

    ``tile_byte_offset[y_to_tile[y] + x_to_tile[x]] + y_local_y[y] * x_row_size[x] + x_local_byte_offset[x] + z``.
    """

    y_to_tile: tuple[int, ...]
    x_to_tile: tuple[int, ...]
    tile_byte_offset: tuple[int, ...]
    x_local_byte_offset: tuple[int, ...]
    y_local_y: tuple[int, ...]
    x_row_size: tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """A box of an output: inclusive ``ranges`` per dimension, at byte ``offset_bytes``, ``strides`` in elements."""

    ranges: tuple[tuple[int, int], ...]
    strides: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True)
class Layer:
    """An input or output tensor: ``y * x * z`` elements in ``size_bytes`` padded bytes per execution.

    ``zero_point`` is in the chip's unsigned domain (TFLite's + 128 for int8, + 32768 for int16); ``scale`` is a float32
    and rounded to one here. ``shape`` holds inclusive (start, end) per dimension, empty where the file has none.
    ``layout`` or ``slices`` say how an output's bytes are ordered; neither means packed.
    """

    name: str
    size_bytes: int
    y: int
    x: int
    z: int
    zero_point: int
    scale: float
    dtype: DType = DType.U8
    layout: Layout | None = None
    shape: tuple[tuple[int, int], ...] = ()
    executions: int = 1
    cache_on_dram: bool = False
    slices: tuple[Slice, ...] = ()
    deprecated_dtype: DType = DType.U8

    def __post_init__(self) -> None:
        try:
            (scale,) = struct.unpack("<f", struct.pack("<f", self.scale))
        except OverflowError:
            raise PackageError(f"layer {self.name!r}: scale {self.scale!r} exceeds float32") from None
        object.__setattr__(self, "scale", scale)


@dataclass(frozen=True)
class Program:
    """One executable: chunks of instructions, the ordered list of transfers that runs them, parameters and tensors.

    ``token`` identifies resident parameters (0: none); ``estimated_cycles`` and ``narrow_bytes_per_tile`` are the
    compiler's, 0 where it gave none.
    """

    kind: Kind
    bitstreams: tuple[Bitstream, ...]
    hints: tuple[Hint, ...]
    parameters: bytes = b""
    inputs: tuple[Layer, ...] = ()
    outputs: tuple[Layer, ...] = ()
    token: int = 0
    name: str = ""
    batch_size: int = 1
    scratch_bytes: int = 0
    estimated_cycles: int = 0
    narrow_bytes_per_tile: int = 0
    chip: str = "beagle"
    fully_deterministic: bool = True
    version: int = 0
    serialized_model: bytes = b""
    parameters_in_dram: bool = False
    estimated_cycles_32bit: int = 0

    def layer(self, name: str) -> Layer:
        """The input or output called ``name``; PackageError lists the names when there is none."""
        for layer in self.layers():
            if layer.name == name:
                return layer
        raise PackageError(f"program has no layer {name!r}, only {[layer.name for layer in self.layers()]}")

    def layers(self) -> Iterator[Layer]:
        """Inputs, then outputs."""
        yield from self.inputs
        yield from self.outputs

    def hint_pattern(self) -> str:
        """Transfers in one line, ``IAO!`` for most execution programs: I instruction, A input, P parameter, O output,
        So and Si scratch out and in, F fence, ! interrupt; a number repeats the letter before it."""
        letters = []
        for hint in self.hints:
            match hint:
                case InstructionHint():
                    letters.append("I")
                case DmaHint(base=Base.SCRATCH, out=out):
                    letters.append("So" if out else "Si")
                case DmaHint(base=base):
                    letters.append({Base.INPUT: "A", Base.PARAMETER: "P", Base.OUTPUT: "O"}[base])
                case InterruptHint():
                    letters.append("!")
                case FenceHint():
                    letters.append("F")
        runs: list[tuple[str, int]] = []
        for letter in letters:
            if runs and runs[-1][0] == letter:
                runs[-1] = (letter, runs[-1][1] + 1)
            else:
                runs.append((letter, 1))
        return "".join(letter + (str(count) if count > 1 else "") for letter, count in runs)

    def check(self) -> None:
        """Raises PackageError where lengths, hints, relocations or layers contradict each other (docs/package.md)."""
        from coral.package.check import check_program  # check.py needs the types above

        check_program(self)
