"""One opening of a stick: firmware, pipes, bring-up, and what there is to say when it fails. Source: docs/driver.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from coral.driver import dfu, firmware
from coral.driver.bringup import bring_up, shut_down
from coral.driver.discovery import CLAIM_PATIENCE_S, await_stick, identity, open_and_claim
from coral.driver.errors import DFU_ID, DfuFailed, NoAnswer, NoFirmware, StickHung, TransferFailed
from coral.driver.link import Counters, Link
from coral.driver.pipes import Pipes
from coral.driver.registers import Registers
from coral.driver.segments import Prepared, prepare
from coral.driver.transport import Buffer, Bus, UsbDevice
from coral.package.program import Program

PROBE_TIMEOUT_S = 0.5
CANARY_TIMEOUT_S = 0.7
OPEN_S, CLOSE_S = 6.0, 2.0
"""What all registers of a bring-up may take together, and of a close: there are some 60, and each may answer late."""
REPLUG = "unplug the stick, wait a second and plug it in again"
STATUS_REGISTERS = (
    "hib_error_status",
    "hib_first_error_status",
    "scalarCoreRunStatus",
    "currentPc",
    "Error_ScalarCore",
)


@dataclass(frozen=True)
class Options:
    """How a stick is opened; see ``open_stick``."""

    clock: str
    firmware: bytes | None
    check_firmware_hash: bool
    stall_timeout_s: float
    port_reset: bool


@dataclass(frozen=True)
class Canary:
    """A small program with a known answer, which tells whether a stick computes: ``inputs`` and ``outputs`` are padded
    bytes by layer name, ``caching`` the program that loads its parameters."""

    program: Program
    inputs: Mapping[str, bytes]
    outputs: Mapping[str, bytes]
    caching: Program | None = None


class Session:
    """A handle on an opened stick that is brought up. ``close`` ends it."""

    def __init__(self, bus: Bus, device: UsbDevice, options: Options, counters: Counters, *, until: float = math.inf):
        """Loads the firmware if the stick has none, which may take longer than ``until``. Raises DriverErrors; no
        handle is left open then."""
        self.path, self.counters, self._closed = device.path, counters, False
        found_running = identity(device) != DFU_ID
        if not found_running:
            device = self._boot(bus, device, options)
            until = math.inf
        patience_s = min(CLAIM_PATIENCE_S, until - device.clock.now())
        self.handle = open_and_claim(device, 0, fresh=not found_running, patience_s=patience_s)
        try:
            self.link = Link(self.handle, device.clock, counters, min(until, device.clock.now() + OPEN_S))
            self.registers = Registers(self.link)
            self.pipes = Pipes(self.link, self.registers, device.speed, options.stall_timeout_s)
            self._probe()
            if found_running:
                self.pipes.drain()
            bring_up(self.registers, clock=options.clock, speed=device.speed)
            self.link.until = until
        except BaseException:
            self.close(orderly=False)
            raise

    def run(self, prepared: Prepared, inputs: Mapping[str, Buffer]) -> dict[str, bytes]:
        """A program from begin to end; raises TransferFailed."""
        buffers = prepared.buffers(prepared.kept(inputs))
        self.pipes.finish(self.pipes.begin(prepared, prepared.wires(inputs), buffers))
        return {name: bytes(buffers[name]) for name in prepared.output_bytes}

    def sing(self, canary: Canary) -> None:
        """Runs the canary; raises TransferFailed when it does not answer or answers wrongly."""
        self.pipes.stall_timeout_s, usual = CANARY_TIMEOUT_S, self.pipes.stall_timeout_s
        try:
            if canary.caching is not None:
                self.run(prepare(canary.caching), {})
            outputs = self.run(prepare(canary.program), canary.inputs)
        finally:
            self.pipes.stall_timeout_s = usual
        for name, expected in canary.outputs.items():
            if outputs[name] != expected:
                self.counters.faults["canary"] += 1
                wrong = next(i for i, (a, b) in enumerate(zip(outputs[name], expected, strict=False)) if a != b)
                raise TransferFailed(
                    f"the stick computes wrongly: byte {wrong} of {name!r} of the test program is "
                    f"{outputs[name][wrong]}, not {expected[wrong]}"
                )

    def status(self) -> dict[str, int]:
        """Registers that tell what the chip is doing; raises TransferFailed, StickHung when nothing is answered."""
        self._probe()
        return {name: self.registers.read(name) for name in STATUS_REGISTERS}

    def close(self, *, orderly: bool) -> None:
        """Ends every transfer, if ``orderly`` also stops the chip, and gives the stick back; never fails, once only.

        What is not answered within CLOSE_S is left.
        """
        if self._closed:
            return
        self._closed = True
        with suppress(Exception):  # a stick that does not answer is left as it is; the next open resets the chip
            self.link.until = self.link.deadline(CLOSE_S)
            self.pipes.abandon()
            if orderly:
                shut_down(self.registers)
        with suppress(Exception):
            self.handle.release(0)
        with suppress(Exception):
            self.handle.close()

    def _boot(self, bus: Bus, device: UsbDevice, options: Options) -> UsbDevice:
        if options.firmware is None:
            raise NoFirmware(self.path)
        if options.check_firmware_hash:
            firmware.check(options.firmware, "the given firmware")
        handle = open_and_claim(device, 0)
        try:
            link = Link(handle, device.clock, self.counters)
            interface, block_bytes = dfu.read_interface(link)
            dfu.download(link, options.firmware, interface=interface, block_bytes=block_bytes)
            handle.release(interface)
            with suppress(OSError):  # the device that was reset is gone, which some systems report as an error
                handle.reset()
        finally:
            handle.close()
        running = await_stick(bus, self.path, device.clock, running=True)
        if running is None:
            raise DfuFailed(f"the stick at {self.path} did not come back with its firmware running; {REPLUG}")
        return running

    def _probe(self) -> None:
        try:
            self.registers.read("scu_ctrl_0", timeout_s=PROBE_TIMEOUT_S)
        except NoAnswer as error:
            raise StickHung(f"the stick at {self.path} does not answer: {error}; {REPLUG}") from error
