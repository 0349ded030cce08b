"""A simulated stick with the driver on top, for tests."""

from __future__ import annotations

from typing import Any

from stick.fake_chip import FakeChip, output_bytes

from coral import driver
from coral.driver.segments import Prepared
from coral.package.program import Program
from coral.stick import SoftwareStick, StickBus, stand_in_firmware


def make_bus(count: int = 1, **options: Any) -> StickBus:
    return StickBus([SoftwareStick(chip=FakeChip(), **options) for _ in range(count)])


def open_on(bus: StickBus, **options: Any) -> driver.Stick:
    options.setdefault("firmware", stand_in_firmware())
    return driver.open_stick(bus, check_firmware_hash=False, **options)


def make(**options: Any) -> tuple[driver.Stick, SoftwareStick]:
    """(driver's stick, simulated stick)."""
    bus = make_bus(**options)
    return open_on(bus), bus.sticks[0]


def inputs_of(program: Program) -> dict[str, bytes]:
    """Different bytes for every input."""
    return {
        layer.name: bytes((index * 31 + i) % 256 for i in range(layer.size_bytes))
        for index, layer in enumerate(program.inputs)
    }


def expected(program: Program, resident: bytes = b"") -> dict[str, bytes]:
    """Outputs of a program by the fake chip's definition, from its hints and inputs alone."""
    from coral.package.program import Base, DmaHint

    inputs, consumed, outputs = inputs_of(program), b"", {}
    for hint in program.hints:
        if not isinstance(hint, DmaHint):
            continue
        if hint.base is Base.INPUT:
            consumed += inputs[hint.name][hint.offset : hint.offset + hint.size]
        elif hint.base is Base.PARAMETER:
            consumed += program.parameters[hint.offset : hint.offset + hint.size]
        else:
            outputs[hint.name] = output_bytes(resident, consumed, len(outputs), hint.size)
    return outputs


def check(stick: driver.Stick, program: Program | Prepared, resident: bytes = b"") -> None:
    """Runs a program and compares all outputs."""
    plain = program.program if isinstance(program, Prepared) else program
    assert stick.run(program, inputs_of(plain)) == expected(plain, resident)
