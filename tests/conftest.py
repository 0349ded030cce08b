"""Where the test data lies, and a loud skip where it does not."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import settings

# a loaded machine is no reason to fail: what must be fast is measured by `coral bench`, not by a deadline
settings.register_profile("coral", deadline=None)
settings.load_profile("coral")

ROOT = Path(__file__).resolve().parents[1]


def shared(kind: str) -> Path:
    """``../shared/<kind>`` beside the checkout, or ``$CORAL_SHARED/<kind>``; skips the test, loudly, if absent."""
    path = Path(os.environ.get("CORAL_SHARED", ROOT.parent / "shared")) / kind
    if not path.is_dir():
        message = f"{path} is absent: tests against Google's programs and real data are SKIPPED (set CORAL_SHARED)"
        warnings.warn(message, stacklevel=2)
        pytest.skip(message)
    return path


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Folder with Google's compiled programs (see ../shared/corpus/SOURCES.md)."""
    return shared("corpus")


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder with MNIST images, story checkpoints and the stick's firmware."""
    return shared("data")


STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="skip, loudly, what has not begun after that many minutes")


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(f"NOT RUN: the time budget of {minutes:g} minutes is used up")
