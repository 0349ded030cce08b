"""``coral stick serve``: any program that uses libusb sees simulated sticks. Source: docs/stick.md."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from coral import CoralError
from coral.stick import SoftwareStick, Strictness, WallClock
from coral.stick.usbfs import UsbfsServer


@contextmanager
def served(sticks: Iterable[SoftwareStick]) -> Iterator[dict[str, str]]:
    """The environment in which a process sees the sticks; StickError without umockdev. The sticks need WallClocks."""
    server = UsbfsServer(sticks)
    try:
        yield {**os.environ, **server.environment}
    finally:
        server.close()


def serve(command: list[str], count: int, speed: str, running: bool, mode: str, log: bool) -> int:
    """Runs ``command`` and returns its exit code; the sticks are unplugged when it ends.

    ``running``: the sticks are found with their firmware running. ``mode``: see ``Strictness``. ``log``: print what the
    sticks noted (mistakes of the host, errors of the chip) at the end.
    """
    options = {"speed": speed, "firmware_required": not running, "mode": Strictness(mode), "reenumeration_s": 0.1}
    sticks = [SoftwareStick(clock=WallClock(), **options) for _ in range(count)]
    with served(sticks) as environment:
        try:
            code = subprocess.run(command, env=environment, check=False).returncode
        except OSError as error:
            raise CoralError(f"{command[0]} cannot be started: {error.strerror}") from None
    for number, stick in enumerate(sticks if log else []):
        print("\n".join(f"stick {number}: {line}" for line in stick.log or ["nothing to report"]))
    return code
