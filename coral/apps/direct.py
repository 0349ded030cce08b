"""Programs on a simulated chip without USB: by their hints, or by the transfers that they ask for themselves.

Source: docs/run.md, section Without USB.
"""

from __future__ import annotations

from collections.abc import Mapping

from coral import CoralError, timing
from coral.chip import Chip, ChipState
from coral.isa import Tag
from coral.package.program import Base, DmaHint, FenceHint, InstructionHint, InterruptHint, Kind, PackageError, Program

SCRATCH = "\0scratch"
"""Key of the scratch buffer; no layer can have this name."""


class DirectError(CoralError):
    """A program and its host do not fit together."""


class DirectChip:
    """A chip that is fed by hand. ``run`` and ``ensure_cached`` as those of ``coral.driver.Stick``."""

    def __init__(self, chip: Chip | None = None) -> None:
        self.chip = chip or Chip()
        self.clock_hz = timing.CLOCK_HZ
        self._token = 0
        self._resident: set[Program] = set()

    def ensure_cached(self, caching: Program) -> bool:
        """Runs a parameter caching program unless its parameters are resident; True when it had to."""
        if caching.token == self._token and caching in self._resident:
            return False
        self.run(caching)
        self._resident.add(caching)
        return True

    def run(self, program: Program, inputs: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
        """Runs a program once: padded bytes of every output by name, for padded bytes of every input.

        :raises DirectError: the program asks for, or gives, something else than its file says
        :raises ChipError, PackageError: the program is wrong
        """
        program.check()
        if program.token == 0 or program.token != self._token:
            self._resident.clear()
            self._token = program.token
        sizes = {layer.name: layer.size_bytes * layer.executions for layer in program.layers()}
        buffers = {name: bytearray(size) for name, size in sizes.items()}
        buffers[SCRATCH] = bytearray(program.scratch_bytes)
        for layer in program.inputs:
            given = (inputs or {}).get(layer.name)
            if given is None or len(given) != sizes[layer.name]:
                got = "nothing" if given is None else f"{len(given)} bytes"
                raise DirectError(f"input {layer.name!r} takes {sizes[layer.name]} bytes, given is {got}")
            buffers[layer.name][:] = given
        try:
            if program.fully_deterministic or program.kind is Kind.PARAMETER_CACHING:
                self._by_hints(program, buffers)
            else:
                self._by_requests(program, buffers)
            self._at_end(program)
        except BaseException:
            self.chip.reset()
            self._resident.clear()
            raise
        for queue in (self.chip.written, self.chip.interrupts, self.chip.events):
            queue.clear()
        return {layer.name: bytes(buffers[layer.name]) for layer in program.outputs}

    def _at_end(self, program: Program) -> None:
        chip, name = self.chip, program.name
        if chip.run() is ChipState.NEEDS_HOST:
            tag, size = chip.missing or (0, 0)
            raise DirectError(f"program {name!r} waits for {size} bytes with tag {tag} that nobody sends")
        if chip.outputs:
            raise DirectError(f"program {name!r} sent {len(chip.outputs)} outputs more than its file says")
        events = sum(isinstance(hint, InterruptHint) for hint in program.hints)
        if len(chip.interrupts) < events:
            raise DirectError(f"program {name!r} ended with {len(chip.interrupts)} interrupts, {events} are announced")

    def _by_hints(self, program: Program, buffers: dict[str, bytearray]) -> None:
        chip = self.chip
        for hint in program.hints:
            if isinstance(hint, InstructionHint):
                chip.feed(Tag.INSTRUCTIONS, program.bitstreams[hint.chunk].data)
            elif isinstance(hint, DmaHint):
                part = slice(hint.offset, hint.offset + hint.size)
                name = SCRATCH if hint.base is Base.SCRATCH else hint.name
                if hint.out:
                    buffers[name][part] = self._output(hint.size)
                elif hint.base is Base.PARAMETER:
                    chip.feed(Tag.PARAMETERS, program.parameters[part])
                else:
                    chip.feed(Tag.INPUT, bytes(buffers[name][part]))
            elif isinstance(hint, InterruptHint | FenceHint):
                chip.run()

    def _output(self, size: int) -> bytes:
        if not self.chip.outputs:
            self.chip.run()
        if not self.chip.outputs:
            raise DirectError(f"the chip waits for {self.chip.missing} while an output of {size} bytes is due")
        data = self.chip.outputs.popleft()
        if len(data) != size:
            raise DirectError(f"the chip sent an output of {len(data)} bytes, {size} are due")
        return data

    def _by_requests(self, program: Program, buffers: dict[str, bytearray]) -> None:
        """Serves the program's own DMA descriptors, whose addresses tell which buffer they mean."""
        chip, places = self.chip, dict(enumerate(buffers, 2))
        memory = {1: program.parameters, **{high: buffers[name] for high, name in places.items()}}
        highs = {name: high for high, name in places.items()}
        for number in range(len(program.bitstreams)):
            chip.feed(Tag.INSTRUCTIONS, _located(program, number, highs))
        served, moved, filled = 0, True, set()
        while moved:
            chip.run()
            requests, addresses = chip.descriptors, chip.addresses
            moved = False
            while served < len(requests):
                (tag, length), (high, low) = requests[served], divmod(addresses[served], 1 << 32)
                if tag in (Tag.INPUT, Tag.PARAMETERS, Tag.OUTPUT):
                    if low + length > len(memory.get(high, b"")) or (tag == Tag.OUTPUT and high not in places):
                        raise DirectError(
                            f"the program asks for {length} bytes at {low:#x} of buffer {high}: beyond it"
                        )
                    if tag != Tag.OUTPUT:
                        chip.feed(tag, bytes(memory[high][low : low + length]))
                    elif not chip.outputs:
                        break
                    else:
                        buffers[places[high]][low : low + length] = self._output(length)
                        filled.add(places[high])
                served, moved = served + 1, True
        missing = [layer.name for layer in program.outputs if layer.name not in filled]
        if missing:
            raise DirectError(f"program {program.name!r} never sent its output {missing[0]!r}")


def _located(program: Program, number: int, highs: Mapping[str, int]) -> bytes:
    """A bitstream with every buffer at its own multiple of 2^32."""
    stream = program.bitstreams[number]
    words = int.from_bytes(stream.data, "little")
    for place in stream.relocations:
        name = SCRATCH if place.base is Base.SCRATCH else place.name
        high = 1 if place.base is Base.PARAMETER else highs.get(name)
        if high is None:
            raise PackageError(f"program {program.name!r} is to be given the address of {place.name!r}, which it lacks")
        words = words & ~(0xFFFFFFFF << place.bit) | (high if place.high else 0) << place.bit
    return words.to_bytes(len(stream.data), "little")
