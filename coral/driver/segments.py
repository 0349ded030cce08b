"""A program as the transfers of its run, ready to be repeated. Source: docs/driver.md, docs/usb.md (deadlock rule)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from coral.driver.errors import DriverError, InputError
from coral.driver.transport import Buffer
from coral.package.program import Base, DmaHint, FenceHint, InstructionHint, InterruptHint, Kind, Program

INSTRUCTIONS, INPUT, PARAMETERS = range(3)
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


@dataclass(eq=False)
class Prepared:
    """A checked program with its transfers built; make it once per program with ``prepare`` and run it often.

    ``in_pieces`` is learned: the chip delivers some output in several DMAs, so reads are queued packet by packet.
    """

    program: Program
    segments: list[Segment]
    input_bytes: dict[str, int]
    output_bytes: dict[str, int]
    in_pieces: bool = False

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

    def buffers(self, inputs: Mapping[str, Buffer]) -> dict[str, Buffer]:
        """Named buffers of one run: the inputs, empty outputs and scratch."""
        outputs = {name: bytearray(size) for name, size in self.output_bytes.items()}
        return {**inputs, **outputs, SCRATCH: bytearray(self.program.scratch_bytes)}


def prepare(program: Program) -> Prepared:
    """Checks a program and cuts its hints into segments; raises PackageError or DriverError."""
    program.check()
    if not program.fully_deterministic:
        raise DriverError(
            f"program {program.name!r} does not know its transfers in advance (its hints are not deterministic); it "
            "runs on the simulated chip only"
        )
    if program.batch_size != 1 or any(isinstance(hint, DmaHint) and hint.batch for hint in program.hints):
        raise DriverError(
            f"program {program.name!r} is compiled for batch {program.batch_size}, the driver runs batch 1"
        )
    shared = {layer.name for layer in program.inputs} & {layer.name for layer in program.outputs}
    if shared:
        raise DriverError(f"program {program.name!r} has inputs and outputs of the same name: {sorted(shared)}")
    sizes = {layer.name: layer.size_bytes * layer.executions for layer in program.layers()}
    return Prepared(
        program,
        _segments(program),
        {layer.name: sizes[layer.name] for layer in program.inputs},
        {layer.name: sizes[layer.name] for layer in program.outputs},
    )


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
