"""A program as the transfers of its run, ready to be repeated. Source: docs/driver.md, docs/usb.md (deadlock rule)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from coral.driver.errors import DriverError, InputError, TransferFailed
from coral.driver.transport import Buffer
from coral.package.program import Base, Bitstream, DmaHint, FenceHint, InstructionHint, InterruptHint, Kind, Program

INSTRUCTIONS, INPUT, PARAMETERS, OUTPUT = range(4)
SCRATCH = "\0scratch"
"""Key of the scratch buffer among the named buffers; no layer can have it."""

_HEADER = struct.Struct("<IB3x")


@dataclass(frozen=True, eq=False)
class Out:
    """A DMA to the chip: ``data``, or bytes of the buffer ``name``. ``wire`` is kept where it never changes."""

    tag: int
    size: int
    name: str = ""
    offset: int = 0
    data: memoryview | None = None
    wire: bytearray | None = None

    def on_wire(self, buffers: Mapping[str, Buffer]) -> bytearray:
        """Header and payload, one after the other."""
        if self.wire is not None:
            return self.wire
        source = self.data if self.data is not None else memoryview(buffers[self.name]).cast("B")
        wire = bytearray(_HEADER.pack(self.size, self.tag))
        wire += source[self.offset : self.offset + self.size]
        return wire


@dataclass(frozen=True)
class In:
    """A DMA from the chip into the buffer ``name``."""

    name: str
    offset: int
    size: int


@dataclass
class Segment:
    """Transfers that may be under way together: every ``outs`` comes before every ``ins`` in the program."""

    outs: list[Out] = field(default_factory=list)
    ins: list[In] = field(default_factory=list)
    events: list[int] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        """Whether the chip answers in this segment, so that an OUT that follows has to wait for it."""
        return bool(self.ins or self.events)


@dataclass(frozen=True)
class Place:
    """A buffer at an invented address, as a program that asks for its own transfers names it."""

    address: int
    size: int
    base: Base
    name: str = ""


@dataclass(eq=False)
class Prepared:
    """A checked program with its transfers built; make it once per program with ``prepare`` and run it often.

    ``idempotent``: a run depends on its inputs and on what ``ensure_cached`` has loaded only, so that it may be
    repeated. ``in_pieces`` is learned: the chip delivers some output in several DMAs, so reads are queued packet by
    packet. ``places`` is not empty for programs whose hints do not have all transfers: they are sent and read as the
    program asks.
    """

    program: Program
    segments: list[Segment]
    input_bytes: dict[str, int]
    output_bytes: dict[str, int]
    idempotent: bool = True
    in_pieces: bool = False
    places: tuple[Place, ...] = ()

    def check_inputs(self, inputs: Mapping[str, Buffer]) -> None:
        """Raises InputError unless there is exactly one buffer of the padded size for every input layer."""
        if inputs.keys() != self.input_bytes.keys():
            raise InputError(f"inputs {sorted(inputs)} were given, the program takes {sorted(self.input_bytes)}")
        for name, size in self.input_bytes.items():
            try:
                given = memoryview(inputs[name]).nbytes
            except TypeError:
                raise InputError(f"input {name!r} is a {type(inputs[name]).__name__}, not a buffer of bytes") from None
            if given != size:
                raise InputError(f"input {name!r} has {given} bytes, the program takes {size}")

    def kept(self, inputs: Mapping[str, Buffer]) -> dict[str, Buffer]:
        """Copies of the inputs that the run needs beside ``wires``."""
        return {name: bytes(data) for name, data in inputs.items()} if self.places else {}

    def buffers(self, kept: Mapping[str, Buffer]) -> dict[str, Buffer]:
        """Named buffers of one run: ``kept`` inputs, empty outputs and scratch."""
        outputs = {name: bytearray(size) for name, size in self.output_bytes.items()}
        return {**kept, **outputs, SCRATCH: bytearray(self.program.scratch_bytes)}

    def wires(self, inputs: Mapping[str, Buffer]) -> list[list[bytearray | None]]:
        """Header and payload of every OUT, per segment; None for what the run itself produces or is still to come."""
        return [
            [None if out.name and out.name not in inputs else out.on_wire(inputs) for out in segment.outs]
            for segment in self.segments
        ]

    def transfer(self, tag: int, address: int, size: int) -> Segment:
        """The transfer that a running program asks for; raises TransferFailed outside its buffers."""
        for place in self.places:
            offset = address - place.address
            if (
                offset >= 0
                and offset + size <= place.size
                and (tag != OUTPUT or place.base in (Base.OUTPUT, Base.SCRATCH))
            ):
                if tag == OUTPUT:
                    return Segment(ins=[In(place.name, offset, size)])
                data = memoryview(self.program.parameters) if place.base is Base.PARAMETER else None
                return Segment(outs=[Out(tag, size, place.name, offset, data)])
        raise TransferFailed(
            f"the program asks for a transfer with tag {tag} of {size} bytes at {address:#x}: no buffer"
        )


def prepare(program: Program, *, idempotent: bool = True) -> Prepared:
    """Checks a program and cuts its hints into segments; raises PackageError or DriverError.

    ``idempotent`` False: the program reads what an earlier run has left on the chip, so a failed run must not be
    repeated.
    """
    program.check()
    if program.batch_size != 1 or any(isinstance(hint, DmaHint) and hint.batch for hint in program.hints):
        raise DriverError(
            f"program {program.name!r} is compiled for batch {program.batch_size}, the driver runs batch 1"
        )
    shared = {layer.name for layer in program.inputs} & {layer.name for layer in program.outputs}
    if shared:
        raise DriverError(f"program {program.name!r} has inputs and outputs of the same name: {sorted(shared)}")
    sizes = {layer.name: layer.size_bytes * layer.executions for layer in program.layers()}
    places: tuple[Place, ...] = () if program.fully_deterministic else _places(program, sizes)
    return Prepared(
        program,
        [Segment([_by_request(program, places)])] if places else _segments(program),
        {layer.name: sizes[layer.name] for layer in program.inputs},
        {layer.name: sizes[layer.name] for layer in program.outputs},
        idempotent,
        places=places,
    )


def _places(program: Program, sizes: Mapping[str, int]) -> tuple[Place, ...]:
    if len(program.bitstreams) != 1:
        raise DriverError(
            f"program {program.name!r} asks for its own transfers and has {len(program.bitstreams)} chunks of "
            "instructions, the driver runs such programs of one chunk"
        )
    buffers = [
        (len(program.parameters), Base.PARAMETER, ""),
        (program.scratch_bytes, Base.SCRATCH, SCRATCH),
        *((sizes[layer.name], Base.INPUT, layer.name) for layer in program.inputs),
        *((sizes[layer.name], Base.OUTPUT, layer.name) for layer in program.outputs),
    ]
    return tuple(Place((number + 1) << 32, *buffer) for number, buffer in enumerate(buffers))


def _by_request(program: Program, places: tuple[Place, ...]) -> Out:
    bitstream: Bitstream = program.bitstreams[0]
    words = int.from_bytes(bitstream.data, "little")
    for relocation in bitstream.relocations:
        name = SCRATCH if relocation.base is Base.SCRATCH else relocation.name
        address = next(p.address for p in places if (p.base, p.name) == (relocation.base, name))
        value = address >> 32 if relocation.high else address & 0xFFFFFFFF
        words = words & ~(0xFFFFFFFF << relocation.bit) | value << relocation.bit
    data = words.to_bytes(len(bitstream.data), "little")
    return Out(INSTRUCTIONS, len(data), wire=bytearray(_HEADER.pack(len(data), INSTRUCTIONS) + data))


def _segments(program: Program) -> list[Segment]:
    keep = program.kind is not Kind.PARAMETER_CACHING
    segments = [Segment()]
    for hint in program.hints:
        if isinstance(hint, FenceHint):
            segments.append(Segment())
            continue
        segment = segments[-1]
        if isinstance(hint, InterruptHint):
            segment.events.append(hint.number)
        elif isinstance(hint, DmaHint) and hint.out:
            segment.ins.append(In(SCRATCH if hint.base is Base.SCRATCH else hint.name, hint.offset, hint.size))
        else:
            if segment.answered:
                segments.append(segment := Segment())
            segment.outs.append(_out(program, hint, keep))
    return [segment for segment in segments if segment.outs or segment.answered]


def _out(program: Program, hint: InstructionHint | DmaHint, keep: bool) -> Out:
    if isinstance(hint, InstructionHint):
        data = memoryview(program.bitstreams[hint.chunk].data)
        out = Out(INSTRUCTIONS, len(data), data=data)
    elif hint.base is Base.PARAMETER:
        out = Out(PARAMETERS, hint.size, offset=hint.offset, data=memoryview(program.parameters))
    else:
        return Out(INPUT, hint.size, SCRATCH if hint.base is Base.SCRATCH else hint.name, hint.offset)
    return Out(out.tag, out.size, out.name, out.offset, out.data, out.on_wire({})) if keep else out
