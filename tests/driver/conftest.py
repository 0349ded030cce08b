"""Tests that take ``bed`` run twice: on sticks in this process, and on sticks behind the real libusb."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coral.stick import StickError
from coral.stick.usbfs import preload_library
from driver.bed import Bed, LibusbBed, preloaded

TIMEOUT_S = 900


class Child:
    """The preloaded process, started when first needed."""

    def __init__(self, library: str) -> None:
        root = Path(__file__).resolve().parents[2]
        paths = os.pathsep.join([str(root / "tests"), str(root), os.environ.get("PYTHONPATH", "")])
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "driver.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            cwd=root,
            env={**os.environ, "LD_PRELOAD": library, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
        )

    def run(self, module: str, name: str, arguments: dict[str, Any]) -> tuple[str, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            pickle.dump((module, name, arguments), self.process.stdin)
            self.process.stdin.flush()
            if select.select([self.process.stdout], [], [], TIMEOUT_S)[0]:
                return pickle.load(self.process.stdout)
            reason = f"no answer for {TIMEOUT_S} s"
        except (EOFError, OSError) as error:
            reason = f"the process has ended: {error!r}"
        self.end()
        self.errors.seek(0)
        return "failed", f"{reason}\n{self.errors.read()[-4000:].decode(errors='replace')}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


_child: list[Child] = []


@pytest.fixture(scope="session")
def libusb_child() -> Iterator[str]:
    try:
        library = preload_library()
    except StickError as error:
        message = f"tests through the real libusb are SKIPPED: {error}"
        warnings.warn(message, stacklevel=2)
        pytest.skip(message)
    yield library
    for child in _child:
        child.end()
    _child.clear()


@pytest.fixture(params=["in-process", "libusb"])
def bed(request: pytest.FixtureRequest) -> Iterator[Bed | str]:
    """A test bed; for the layer that needs another process, the name of the library to preload there."""
    if request.param == "libusb" and not preloaded():
        yield request.getfixturevalue("libusb_child")
        return
    made = LibusbBed() if request.param == "libusb" else Bed()
    yield made
    made.close()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "waits: takes real time behind libusb, where it is slow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("waits") and "[libusb" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    library = pyfuncitem.funcargs.get("bed")
    if not isinstance(library, str):
        return None
    if not _child or _child[0].process.poll() is not None:
        _child[:] = [Child(library)]
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name != "bed"}
    outcome, text = _child[0].run(pyfuncitem.module.__name__, pyfuncitem.function.__name__, arguments)
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "failed":
        pytest.fail(f"in the process with libusb:\n{text}", pytrace=False)
    return True
