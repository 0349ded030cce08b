"""What a user gets: a quick start, and the built wheel in a clean environment of every Python, without root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
NOBODY = 65534
HEAVY = ("numpy", "tinygrad", "usb1", "flatbuffers", "tflite", "rich.table", "coral.isa", "coral.driver", "coral.chip")
TIMEOUT_S = 900


@pytest.mark.parametrize("command", [(), ("selftest",), ("bench", "call"), ("stick", "serve")])
def test_help_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    """What makes a start slow is what it imports; the clock of a shared machine would say less."""
    script = (
        "import sys, contextlib, coral.cli\n"
        f"sys.argv = ['coral', *{command!r}, '--help']\n"
        "with contextlib.suppress(SystemExit): coral.cli.main()\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "Usage: coral" in done.stdout
    assert done.stdout.splitlines()[-1] == "HEAVY []"


@pytest.fixture(scope="module")
def wheel() -> Iterator[Path]:
    """The wheel of this checkout, where everybody can read it."""
    backend = pytest.importorskip("hatchling.build", reason="building the wheel needs hatchling in this environment")
    folder = Path(tempfile.mkdtemp(prefix="coral-wheel-"))
    folder.chmod(0o755)
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        yield folder / backend.build_wheel(str(folder))
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def python_of(version: str) -> str:
    """An interpreter of a version, from PATH or pyenv; skips the test if there is none."""
    found = [*sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))]
    path = shutil.which(f"python{version}")
    for candidate in [*map(str, found), *([path] if path else [])]:
        if subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    pytest.skip(f"there is no Python {version} here")


def not_root(command: list[str]) -> list[str]:
    """The command as another user, who may read everything (pyenv lies in root's home) and write nothing of root's."""
    if os.getuid() != 0:
        return command
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("the test runs as root and has no setpriv to become somebody else")
    readable = [f"--{kind}-caps=-all,+dac_read_search" for kind in ("inh", "ambient")]
    return [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *readable, *command]


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_passes_doctor_and_selftest_without_root(version: str, wheel: Path) -> None:
    """pip gets the dependencies from its index."""
    home = Path(tempfile.mkdtemp(prefix="coral-home-"))
    try:
        subprocess.run([python_of(version), "-m", "venv", str(home / "venv")], check=True, timeout=TIMEOUT_S)
        pip = [str(home / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        installed = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, timeout=TIMEOUT_S)
        if installed.returncode and "Could not find a version" in installed.stderr:
            pytest.skip(f"pip cannot reach its index: {installed.stderr.splitlines()[-1]}")
        assert installed.returncode == 0, installed.stderr
        if os.getuid() == 0:
            os.chown(home, NOBODY, NOBODY)
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}

        def coral(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = not_root([str(home / "venv/bin/coral"), *arguments])
            return subprocess.run(
                command, cwd=home, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )

        who = "import os; print(os.getuid())"
        user = subprocess.run(not_root([sys.executable, "-c", who]), capture_output=True, text=True, check=True)
        assert user.stdout.strip() != "0"
        doctor = coral("doctor", "--json")
        assert doctor.returncode == 0, doctor.stdout + doctor.stderr
        checks = {check["name"]: check for check in json.loads(doctor.stdout)["checks"]}
        assert str(home / "venv") in checks["python"]["message"]
        assert f"{version}." in checks["python"]["message"]
        assert {checks[name]["status"] for name in ("tinygrad", "registration", "host code", "simulator")} == {"ok"}
        selftest = coral("selftest", "--device", "sim", "--bold")
        assert selftest.returncode == 0, selftest.stdout + selftest.stderr
        report = json.loads((home / "coral-selftest-sim.json").read_text())
        assert report["passed"] is True
        assert report["versions"]["python"].startswith(version)
        assert json.loads(coral("devices", "--json").stdout)["simulated"]["select"] == "DEV=SIM+CORAL"
    finally:
        shutil.rmtree(home, ignore_errors=True)
