"""What goes over USB beside the driver's calls: packets and events.

Each step opens the stick itself; the next use of ``bench.stick`` opens it anew. Source: docs/usb.md.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from coral.apps.probes import Finding, step
from coral.apps.probes.bench import Bench
from coral.apps.probes.programs import INPUT, OUTPUT
from coral.codegen.eltwise import elementwise
from coral.driver import Counters, clock_name, find, prepare
from coral.driver.pipes import ALL_EVENTS, EVENT_BYTES, EVENTS, OUT, OUTPUTS
from coral.driver.session import Options, Session

EVENT = struct.Struct("<QIB3x")
PATIENCE_S, STEP_S = 1.0, 0.2


@contextmanager
def raw(bench: Bench) -> Iterator[Session]:
    """The stick brought up, its pipes in the step's hands."""
    _ = bench.stick  # its firmware is loaded
    bench.close()
    options = Options(clock_name(None), None, check_firmware_hash=False, stall_timeout_s=2.0, port_reset=False)
    session = Session(bench.bus, find(bench.bus, bench.path), options, Counters())
    try:
        yield session
    finally:
        session.close(orderly=True)


def wires_of(size: int) -> tuple[bytes, list[bytes]]:
    """A copy of ``size`` bytes: input, and the DMAs that the host sends, with headers."""
    sent = np.arange(size).astype(np.uint8).tobytes()
    return sent, [bytes(wire or b"") for wire in prepare(elementwise(size, [])).wires({INPUT: sent})[0]]


@step(1)
def zero_length_packet(bench: Bench) -> Finding:
    """Does a packet without bytes follow an output of 1024 bytes? It would end a read of 2048."""
    if bench.stick.speed == "high":
        return Finding("not measurable on a USB 2 link")
    sent, wires = wires_of(1024)
    with raw(bench) as session:
        read = session.handle.submit_in(OUTPUTS, 2048)
        for wire in wires:
            session.handle.submit_out(OUT, wire)
        packet = session.link.wait_for(read, PATIENCE_S)
        session.link.abandon([read])
    right = "whole" if bytes(read.data) == sent else "wrong"
    return Finding(f"{'one' if packet else 'none'}, the output is {right}", "none, the output is whole")


@step(52)
def instructions_ahead(bench: Bench) -> Finding:
    """A copy whose instructions are sent before its input: at once, after 1 s and after 10 s."""
    program, answers = prepare(elementwise(256, []), idempotent=False), []
    for seconds in (0, 1, 10):
        sent = np.random.default_rng(seconds).integers(0, 256, 256, np.uint8).tobytes()
        call = bench.stick.announce(program)
        time.sleep(seconds if bench.real else 0)
        right = call.give({INPUT: sent}).result()[OUTPUT][:256] == sent
        answers.append(f"{'right' if right else 'wrong'} after {seconds} s")
    return Finding(", ".join(answers), "right after 0 s, right after 1 s, right after 10 s")


@step(20)
def all_events(bench: Bench) -> Finding:
    """Events of a copy of 64 bytes when descr_ep asks for all of them: tag, length and address."""
    sent, wires = wires_of(64)
    with raw(bench) as session:
        session.registers.write("descr_ep", ALL_EVENTS)
        events = [session.handle.submit_in(EVENTS, EVENT_BYTES) for _ in range(8)]
        read = session.handle.submit_in(OUTPUTS, 1024)
        for wire in wires:
            session.handle.submit_out(OUT, wire)
        session.link.wait_for(read, PATIENCE_S)
        session.link.wait_for(events[-1], STEP_S)
        session.link.abandon([read, *events])
    parts = [bytes(event.data) for event in events if event.actual]
    seen = [EVENT.unpack(part) if len(part) == EVENT_BYTES else part.hex() for part in parts]
    answer = "; ".join(f"tag {e[2]}, {e[1]} bytes at {e[0]:#x}" if isinstance(e, tuple) else e for e in seen)
    right = "whole" if bytes(read.data) == sent else "wrong"
    assumed = "tag 1, 64 bytes at 0x0; tag 3, 64 bytes at 0x0; tag 4, 0 bytes at 0x0"
    details = {"events": [part.hex() for part in parts]}
    return Finding(f"{answer}; the output is {right}", f"{assumed}; the output is whole", details)
