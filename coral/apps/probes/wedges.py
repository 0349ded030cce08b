"""What is reported to wedge a stick: the last steps. Source: docs/usb.md, docs/ASSUMPTIONS.md."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np

from coral import numerics
from coral.apps.probes import Finding, forms, step
from coral.apps.probes.bench import Bench
from coral.apps.probes.forms import RESULT, Form
from coral.apps.probes.layers import all_right, check, compare, random_layer
from coral.apps.probes.unseen import run
from coral.apps.probes.wire import PATIENCE_S, STEP_S, raw, wires_of
from coral.codegen.machine import WORD_BYTES
from coral.driver.discovery import APPLICATION_ID, await_stick, identity
from coral.driver.pipes import OUT, OUTPUTS

HALT = 2
"""Value of a run control."""
PIECE_BYTES, PIECES = 4096, 32


def _alive(bench: Bench) -> str:
    """Whether the stick computes after it was opened again; a stick that does not answer raises TransferFailed."""
    return "a layer is right afterwards" if not check(bench, random_layer(1, 64, 64)) else "a layer is wrong afterwards"


@step(14, bold=True)
def logistic_after_l2(bench: Bench) -> Finding:
    """LOGISTIC behind L2_NORMALIZATION without a new identity row: reported to stall the chip."""
    limit = float(numerics.LOGISTIC_CLAMP)
    spline = numerics.LOGISTIC.scaled(256)
    l2 = forms.l2_normalisation(0)
    words, after = l2.x.size // WORD_BYTES, 4 * RESULT + l2.expected.size
    scale = {"mult": 0.0625, "clamp_min": -limit, "clamp_max": limit, "in_zp": 128, "nlu_en": 1}
    body = [*forms.identity(), *l2.body, forms.done(), forms.table(spline), forms.requantise(0, after, words, **scale)]
    codes = numerics.requantise(l2.x.reshape(-1).astype(np.int32) - 128, 0.0625, -limit, limit, 0, nlu=spline)
    form = Form(l2.x, body, np.concatenate([l2.expected, codes]))
    return all_right({"both": compare(run(bench, form, "logistic_after_l2").tobytes(), form.expected)})


@step(31, bold=True)
def halted_core(bench: Bench) -> Finding:
    """How many bytes of an input endpoint 0x01 takes while the scalar core is halted."""
    with raw(bench) as session:
        session.registers.write("scalarCoreRunControl", HALT)
        taken = 0
        for number in range(PIECES):
            header = struct.pack("<IB3x", PIECE_BYTES * PIECES, 1) if number == 0 else b""
            write = session.handle.submit_out(OUT, header + bytes(PIECE_BYTES - len(header)))
            ended = session.link.wait_for(write, STEP_S)
            session.link.abandon([write])
            taken += write.actual
            if not ended:
                break
    return Finding(f"{taken} bytes of {PIECE_BYTES * PIECES}; {_alive(bench)}")


@step(32, bold=True)
def two_dmas_in_one_transfer(bench: Bench) -> Finding:
    """Instructions and input of a copy in one transfer: reported to be misparsed."""
    sent, wires = wires_of(64)
    with raw(bench) as session:
        read = session.handle.submit_in(OUTPUTS, 1024)
        session.handle.submit_out(OUT, b"".join(wires))
        session.link.wait_for(read, PATIENCE_S)
        session.link.abandon([read])
    answer = {sent: "taken as two", b"": "no output"}.get(bytes(read.data), "wrong output")
    return Finding(f"{answer}; {_alive(bench)}")


@step(33, bold=True)
def port_reset(bench: Bench) -> Finding:
    """A port reset of a stick whose program waits for an input that never comes."""
    with raw(bench) as session:
        instructions = session.handle.submit_out(OUT, wires_of(64)[1][0])
        session.link.wait_for(instructions, STEP_S)
        session.link.abandon([instructions])
        with suppress(OSError):  # a device that comes back as another is an error
            session.handle.reset()
        clock = session.link.clock
        session.close(orderly=False)
    clock.sleep(PATIENCE_S)
    back = await_stick(bench.bus, bench.path, clock, seconds=5 * PATIENCE_S)
    if back is None:
        return Finding("it vanishes; unplug it and plug it in again")
    mode = "with its firmware running" if identity(back) == APPLICATION_ID else "in boot mode"
    return Finding(f"it comes back {mode}; {_alive(bench)}")
