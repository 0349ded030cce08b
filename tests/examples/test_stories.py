"""The story examples as a user runs them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from test_examples import run_with


def written(out: str) -> str:
    """The text above the table of figures."""
    return out.split("matmul on")[0].strip()


@pytest.mark.skipif(shutil.which("clang") is None, reason="DEV=CPU needs clang: apt-get install clang")
@pytest.mark.slow
def test_the_stick_and_the_host_tell_the_same_story(data: Path) -> None:
    command = ("stories.py", "--prompt", "One day, a cat", "--steps", "40", "--temperature", "0.7", "--seed", "5")
    stick = run_with(*command, MOCKCORAL="1", DEV="CORAL", STORIES_DIR=str(data / "stories"))
    host = run_with(*command, DEV="CPU", STORIES_DIR=str(data / "stories"))
    assert written(stick) == written(host)
    assert written(stick).startswith("One day, a cat")
    assert "simulated stick" in stick
    assert re.search(r"chip calls per step\s*│\s*21 ", stick)
    assert "no Edge TPU" in host


@pytest.mark.slow
def test_many_stories(data: Path) -> None:
    command = ("stories_batch.py", "--batch", "16", "--steps", "10", "--show", "2")
    out = run_with(*command, MOCKCORAL="1", DEV="CORAL", STORIES_DIR=str(data / "stories"))
    assert "words written" in out
    assert re.search(r"words written\s*│\s*160 ", out)
    assert "named Lily." in out
