"""``python -m coral.install``: is ``DEV=CORAL`` found by a fresh interpreter, and if not, make it so.

The wheel brings a ``coral.pth`` that Python reads from site directories only. A checkout on PYTHONPATH or a
``pip install --target`` folder is not one; the repair is a ``coral.pth`` of our own in a directory that is.
Source: docs/backend.md, "Being found".
"""

from __future__ import annotations

import argparse
import importlib.metadata
import site
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from coral import CoralError

PACKAGE = Path(__file__).resolve().parent
TINYGRAD_VERSION = "0.14.0"
HOOK_LINE = "import importlib.util as _u; _u.find_spec('coral') and __import__('coral._hook')\n"
_PROBE = "import importlib.util as u; s = u.find_spec('tinygrad.runtime.ops_coral'); print(s.origin if s else '')"


class InstallError(CoralError):
    """The registration is broken in a way this program cannot or must not repair."""


def check_tinygrad() -> str:
    """The installed tinygrad's version.

    :raises InstallError: none is installed, or one this package is not made for
    """
    try:
        version = importlib.metadata.version("tinygrad")
    except importlib.metadata.PackageNotFoundError:
        raise InstallError(
            f"tinygrad is not installed for {sys.executable}: pip install tinygrad=={TINYGRAD_VERSION}"
        ) from None
    if version != TINYGRAD_VERSION:
        raise InstallError(
            f"tinygrad {version} is installed, but this package uses internals of {TINYGRAD_VERSION}: "
            f"pip install tinygrad=={TINYGRAD_VERSION}"
        )
    return version


def registered() -> bool:
    """Whether a fresh interpreter, started outside this folder, finds the device.

    :raises InstallError: it cannot import tinygrad, or finds somebody else's CORAL device
    """
    result = subprocess.run([sys.executable, "-c", _PROBE], cwd=tempfile.gettempdir(), capture_output=True, text=True)
    if result.returncode != 0:
        last_line = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise InstallError(f"a fresh {sys.executable} cannot look for the device: {last_line}")
    found = result.stdout.strip()
    if found and Path(found).resolve() != PACKAGE / "ops_coral.py":
        raise InstallError(
            f"DEV=CORAL is answered by {found}, not by this package: delete that file and run this again"
        )
    return bool(found)


def site_directories() -> list[Path]:
    """Directories whose ``.pth`` files this interpreter reads, best place for ours first."""
    directories = [sysconfig.get_path("purelib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        directories.append(site.getusersitepackages())
    return list(dict.fromkeys(Path(directory) for directory in directories))


def repair() -> Path:
    """Writes ``coral.pth`` into the first site directory where that makes the device found, and returns the file.

    :raises InstallError: there is no such directory; everything written is removed again
    """
    attempts = []
    for directory in site_directories():
        file = directory / "coral.pth"
        path_line = "" if PACKAGE.parent in site_directories() else f"{PACKAGE.parent}\n"
        previous = file.read_bytes() if file.exists() else None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file.write_text(path_line + HOOK_LINE)
        except OSError as error:
            attempts.append(f"{file}: {error.strerror}")
            continue
        if registered():
            return file
        attempts.append(f"{file}: not read by a fresh interpreter")
        if previous is None:
            file.unlink()
        else:
            file.write_bytes(previous)
    raise InstallError(
        "this Python reads no .pth file that can register the device, so a program must `import coral._hook` before it "
        f"uses DEV=CORAL. Tried {'; '.join(attempts)}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Checks, reports, repairs; exit status 0 when ``DEV=CORAL`` is found at the end."""
    parser = argparse.ArgumentParser(prog="python -m coral.install", description="Checks that DEV=CORAL is found")
    parser.add_argument("--check", action="store_true", help="only look, change nothing")
    options = parser.parse_args(arguments)
    print(f"python    {sys.executable} ({sys.version.split()[0]})")
    print(f"coral     {PACKAGE}")
    try:
        print(f"tinygrad  {check_tinygrad()}")
        if registered():
            print("DEV=CORAL is found by a fresh interpreter; nothing to do")
        elif options.check:
            raise InstallError(
                "DEV=CORAL is not found by a fresh interpreter: run `python -m coral.install` to repair it"
            )
        else:
            print(f"DEV=CORAL was not found by a fresh interpreter; repaired by writing {repair()}")
    except CoralError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
