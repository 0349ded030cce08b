"""The story examples as a user runs them."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_examples import EXAMPLES, run_with


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
    assert re.search(r"no\s+Edge TPU", host)


@pytest.mark.slow
def test_many_stories(data: Path) -> None:
    command = ("stories_batch.py", "--batch", "16", "--steps", "10", "--show", "2")
    out = run_with(*command, MOCKCORAL="1", DEV="CORAL", STORIES_DIR=str(data / "stories"))
    assert "words written" in out
    assert re.search(r"words written\s*│\s*160 ", out)
    assert "named Lily." in out


@pytest.mark.slow
def test_256_stories_at_once(data: Path) -> None:
    command = ("stories_batch.py", "--batch", "256", "--steps", "24", "--show", "1", "--temperature", "0.8")
    out = run_with(*command, MOCKCORAL="1", DEV="CORAL", STORIES_DIR=str(data / "stories"))
    assert int(re.search(r"words written\s*│\s*([\d,]+) ", out)[1].replace(",", "")) > 6000
    assert re.search(r"chip calls per step\s*│\s*21 ", out)


@pytest.mark.slow
@pytest.mark.parametrize("bold", ["", "1"])
def test_a_token_is_a_program(data: Path, bold: str) -> None:
    command = ("--steps", "30", "--prompt", "Once upon a time")
    env = {"MOCKCORAL": "1", "DEV": "CORAL", "STORIES_DIR": str(data / "stories")}
    out = run_with("stories_chip.py", *command, CORAL_BOLD=bold, **env)
    form = "kept on the chip, layers a loop, " if bold else "sent with every call, layers unrolled, "
    assert form in out
    assert "every result was that of the bit model" in out
    assert re.search(r"words written\s*│\s*30 ", out)
    if not bold:
        story = out.split("\n", 1)[1].split("chip on")[0]
        assert story == run_with("stories.py", *command, CHIP="1", **env).split("chip on")[0]


@pytest.mark.slow
def test_the_server_as_a_script(data: Path) -> None:
    env = {**os.environ, "MOCKCORAL": "1", "DEV": "CORAL", "STORIES_DIR": str(data / "stories"), "NO_COLOR": "1"}
    command = [sys.executable, "server.py", "--port", "0"]
    process = subprocess.Popen(command, cwd=EXAMPLES, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        said = next(line for line in process.stderr if "http://" in line)
        server = http.client.HTTPConnection(re.search(r"http://([\d.:]+)/", said)[1], timeout=300)
        server.request(
            "POST", "/v1/completions", json.dumps({"prompt": "Once upon", "max_tokens": 4, "temperature": 0})
        )
        answer = json.loads(server.getresponse().read())
        assert answer["choices"][0]["text"].startswith(" a time")
        assert answer["usage"]["completion_tokens"] == 4
        server.request("GET", "/health")
        assert server.getresponse().status == 200
        server.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, -signal.SIGINT, 128 + signal.SIGINT)
    finally:
        process.kill()
        process.wait()
