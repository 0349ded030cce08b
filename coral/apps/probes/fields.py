"""Fields of unknown effect: known programs with one field changed in every instruction that has it.

The list comes from the instruction description: every field marked U. Source: docs/isa/README.md.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from coral import isa, numerics
from coral.apps.probes import Finding, Step, found
from coral.apps.probes.bench import Bench
from coral.apps.probes.layers import random_layer
from coral.apps.probes.programs import INPUT, changed
from coral.apps.probes.scalar_core import backward_jump
from coral.codegen.eltwise import Requantise, elementwise
from coral.package.program import Program


@cache
def _programs() -> tuple[tuple[Program, dict[str, bytes], Program | None], ...]:
    """Programs that use most instructions: (program, inputs, what has to run before)."""
    layers = [random_layer(1, 200, 300), random_layer(2, 200, 300, per_channel=True)]
    logistic = elementwise(200, [Requantise(0.0625, -9.0, 9.0, 128, spline=numerics.LOGISTIC.scaled(256))])
    pairs = [(layer.fc.execution, {INPUT: layer.x}, layer.fc.caching(layer.blob)) for layer in layers]
    return (*pairs, (logistic, {INPUT: np.arange(200, dtype=np.uint8).tobytes()}, None), (backward_jump(0), {}, None))


def _part(name: str) -> str:
    """One name for the same part of different walks."""
    return "nz_mask" if name.endswith("nz_mask") else name


def change_field(bench: Bench, part: str, kind: type[isa.Instruction]) -> Finding:
    """Runs the programs unchanged, and with the field 0 where it was not, else 1."""

    def change(i: isa.Instruction) -> dict[str, int]:
        return {n: int(not getattr(i, n)) for n in kind.fields if _part(n) == part} if type(i) is kind else {}

    for program, inputs, before in _programs():
        other = changed(program, change)
        if other == program:
            continue
        if before is not None:
            bench.stick.run(before)
        right, answer = bench.run(program, inputs), bench.run(other, inputs)
        if differ := sum(a != b for a, b in zip(answer, right, strict=True)):
            return Finding(f"{differ} bytes differ in {program.name}", "no effect")
    return Finding("no effect", "no effect")


_used = {type(i) for program, _, _ in _programs() for b in program.bitstreams for _, i in isa.decode(b.data)}
for _name, _kind in sorted(
    {(_part(name), kind) for kind in _used for name, field in kind.fields.items() if field.mark == "U"},
    key=lambda pair: (pair[0], pair[1].mnemonic),
):
    _about = f"{_name} of {_kind.mnemonic} changed in programs that are known to be right"
    _run = partial(change_field, part=_name, kind=_kind)
    found.append(Step(f"field-{_name}-{_kind.mnemonic}", _about, _run, (11,), bold=True))
