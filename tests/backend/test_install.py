"""DEV=CORAL is found: from the hook, in fresh virtual environments, from a built wheel; and the repair."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coral import install

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("tinygrad", "numpy", "numpy.libs", "flatbuffers", "tflite", "usb1", "libusb1")
FOUND = "import importlib.util as u; print(u.find_spec('tinygrad.runtime.ops_coral'))"
ADD = "from tinygrad import Tensor; print((Tensor([1, 2, 3]) + 1).tolist())"


class Venv:
    """A virtual environment with tinygrad, linked from ours, and whatever the test puts into it."""

    def __init__(self, folder: Path):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        spec = importlib.util.find_spec("tinygrad")
        assert spec is not None
        assert spec.origin is not None
        ours = Path(spec.origin).parents[1]
        for item in ours.iterdir():
            if item.name in NEEDED or item.name.split("-")[0] in NEEDED:
                (self.site / item.name).symlink_to(item)

    def run(self, *arguments: str, cwd: Path | str = "/", **environment: str) -> subprocess.CompletedProcess[str]:
        """The environment's interpreter; nothing of ours leaks in through PYTHONPATH."""
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DEV", "MOCKCORAL"))
        }
        command = [str(self.python), *arguments]
        return subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=300)

    def finds_the_device(self, **environment: str) -> bool:
        """Whether a fresh interpreter of it answers for DEV=CORAL."""
        return "ops_coral.py" in self.run("-c", FOUND, **environment).stdout


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    return Venv(tmp_path / "venv")


def test_the_hook_is_light(python) -> None:
    modules = "import sys; import coral._hook; print([m for m in ('tinygrad', 'numpy') if m in sys.modules])"
    assert python(modules).stdout == "[]\n"


def test_the_hook_answers_for_nothing_else() -> None:
    from coral._hook import Finder

    assert Finder.find_spec("tinygrad.runtime.ops_cpu") is None
    assert Finder.find_spec("ops_coral") is None
    assert Finder.find_spec("tinygrad.runtime.ops_coral") is not None


def test_a_checkout_on_pythonpath_is_repaired(venv: Venv) -> None:
    """PYTHONPATH is no site directory: its coral.pth is not read until the repair puts one where it is."""
    environment = {"PYTHONPATH": str(ROOT)}
    assert not venv.finds_the_device(**environment)
    checked = venv.run("-m", "coral.install", "--check", **environment)
    assert checked.returncode == 1
    assert "DEV=CORAL is not found by a fresh interpreter: run `python -m coral.install` to repair it" in checked.stderr
    assert not (venv.site / "coral.pth").exists()

    repaired = venv.run("-m", "coral.install", **environment)
    assert repaired.returncode == 0, repaired.stderr
    assert f"repaired by writing {venv.site / 'coral.pth'}" in repaired.stdout
    assert venv.finds_the_device(**environment)
    assert venv.finds_the_device()
    again = venv.run("-m", "coral.install", **environment)
    assert (again.returncode, again.stdout.splitlines()[-1]) == (
        0,
        "DEV=CORAL is found by a fresh interpreter; nothing to do",
    )


def test_what_the_repair_wrote_works_isolated_and_outlives_the_package_quietly(venv: Venv, tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "coral", copy / "coral", ignore=shutil.ignore_patterns("__pycache__"))
    assert venv.run("-m", "coral.install", cwd=copy).returncode == 0
    assert "ops_coral.py" in venv.run("-I", "-c", FOUND).stdout
    shutil.rmtree(copy)
    silent = venv.run("-c", "print('fine')")
    assert (silent.stdout, silent.stderr) == ("fine\n", "")


def test_repair_that_does_not_help_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (old / "coral.pth").write_text("# somebody's\n")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(install, "site_directories", lambda: [old, new, blocked])
    monkeypatch.setattr(install, "registered", lambda: False)
    with pytest.raises(install.InstallError, match=r"import coral\._hook.*old/coral\.pth: not read.*file/coral\.pth: "):
        install.repair()
    assert (old / "coral.pth").read_text() == "# somebody's\n"
    assert not (new / "coral.pth").exists()


def test_a_foreign_device_of_that_name_is_named(venv: Venv) -> None:
    """As the earlier project left it: a file inside tinygrad wins over every finder."""
    (venv.site / "tinygrad").unlink()
    stale = venv.site / "tinygrad" / "runtime" / "ops_coral.py"
    stale.parent.mkdir(parents=True)
    for package in (stale.parent, stale.parent.parent):
        (package / "__init__.py").write_text("")
    stale.write_text("")
    result = venv.run("-m", "coral.install", PYTHONPATH=str(ROOT))
    assert result.returncode == 1
    assert f"DEV=CORAL is answered by {stale}, not by this package: delete that file" in result.stderr


def test_missing_and_wrong_tinygrad_are_named(venv: Venv, monkeypatch: pytest.MonkeyPatch) -> None:
    for item in venv.site.glob("tinygrad*"):
        item.unlink()
    result = venv.run("-m", "coral.install", PYTHONPATH=str(ROOT))
    assert result.returncode == 1
    assert "tinygrad is not installed" in result.stderr
    assert "pip install tinygrad==0.14.0" in result.stderr
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.15.1")
    with pytest.raises(install.InstallError, match=r"tinygrad 0\.15\.1 is installed.*pip install tinygrad==0\.14\.0"):
        install.check_tinygrad()


@pytest.mark.slow
@pytest.mark.parametrize("editable", [False, True])
def test_wheel(venv: Venv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, editable: bool) -> None:
    """The real build backend and pip, no network: the device is found, isolated too, and gone after uninstalling."""
    backend = pytest.importorskip("hatchling.build", reason="building the wheel needs hatchling in this environment")
    if editable:
        pytest.importorskip("editables", reason="an editable wheel needs editables in this environment")
    monkeypatch.chdir(ROOT)
    build = backend.build_editable if editable else backend.build_wheel
    wheel = tmp_path / build(str(tmp_path))
    pip = [sys.executable, "-m", "pip", "--python", str(venv.python), "--disable-pip-version-check"]
    installed = subprocess.run([*pip, "install", "--no-deps", str(wheel)], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    for flags in ([], ["-I"]):
        result = venv.run(*flags, "-c", ADD, DEV="CORAL", MOCKCORAL="1")
        assert result.stdout == "[2, 3, 4]\n", result.stderr
    assert venv.run("-m", "coral.install", "--check").returncode == 0
    removed = subprocess.run([*pip, "uninstall", "--yes", "tinycoral"], capture_output=True, text=True)
    assert removed.returncode == 0, removed.stderr
    assert not (venv.site / "coral.pth").exists()
    assert not venv.finds_the_device()
