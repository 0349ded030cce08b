"""Figures of docs/transformer.md: bytes and predicted times of token programs, for a shape and forms.

python -m tools.transformer_figures 64 172 5 8 4 512 [position ...]     dim hidden layers heads kv_heads context
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from coral import timing
from coral.apps.timeline import OUTFEED, History, TimedMachine
from coral.chip import Chip, ChipState
from coral.chip.machine import Machine
from coral.codegen import transformer as tf
from coral.codegen.errors import ShapeError
from coral.package.program import Program
from tests.codegen.transformer.harness import Session, random_model, random_token

FORMS = {
    "sent, unrolled": tf.Form(),
    "kept, unrolled": tf.Form(keep=True),
    "sent, looped": tf.Form(loop=True),
    "kept, looped": tf.Form(keep=True, loop=True),
}


def timeline_cycles(chip: Chip, program: Program, data: bytes, clock_hz: float) -> tuple[float, float]:
    """Cycles from the first byte of the call to its last, and those until all instructions and inputs are there."""
    machines: list[TimedMachine] = []
    time = len(program.bitstreams[0].data) / timing.TO_CHIP_BYTES_PER_S * clock_hz
    end = time + len(data) / timing.TO_CHIP_BYTES_PER_S * clock_hz
    arrivals = {0: History(), 1: History()}
    arrivals[1].add(len(data), time, end)

    class Recorded(TimedMachine):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            self.clock_hz, self.arrivals, self.core_time = clock_hz, arrivals, time
            machines.append(self)

    chip.machine_type = Recorded
    chip.feed(0, program.bitstreams[0].data)
    chip.feed(1, data)
    assert chip.run() is ChipState.FINISHED
    for queue in (chip.outputs, chip.written, chip.interrupts):
        queue.clear()
    chip.machine_type = Machine
    machine = machines[-1]
    ends = [s.end for s in machine.slices if s.unit != OUTFEED] + [machine.core_time]
    ends += [s.end for s in machine.slices if s.unit == OUTFEED]
    return max(ends), end


def main() -> int:
    dim, hidden, layers, heads, kv_heads, context, *positions = map(int, sys.argv[1:])
    model = random_model(tf.Geometry(dim, hidden, heads, kv_heads, context), layers)
    for name, form in FORMS.items():
        try:
            program = tf.TransformerProgram(model, form)
        except ShapeError as error:
            print(f"{name}: {error}")
            continue
        plan = program.plan
        print(
            f"{name}{', spread' if plan.spread else ''}{', rows appended' if plan.append else ''}: parameters to row "
            f"{plan.used} of {plan.floor}, narrow memory {plan.narrow_bytes} bytes"
        )
        session = Session(program)
        session.chip.replays = False
        for position in positions:
            session.begin(position)
            token = program.execution(position)
            data = program.pack(random_token(model, position), position, session.cache)
            size, (sent, received) = len(token.bitstreams[0].data), timing.call_bytes(token)
            text = f"  position {position}: {size} bytes of instructions, {sent - size} in, {received} out;"
            for clock in (250e6, 500e6):
                cycles, there = timeline_cycles(session.chip, token, data, clock)
                formula = timing.predicted_seconds(replace(token), clock)
                text += f" {clock / 1e6:.0f} MHz: {1e3 * (timing.CALL_S + cycles / clock):.3f} ms by the timeline"
                text += f" (transfer in {1e3 * there / clock:.3f}), {1e3 * formula:.3f} by the formula;"
                session.begin(position)
            print(text, flush=True)
    return 0


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main())
