"""``coral doctor``: what is missing, and the exact remedy. Source: docs/driver.md, docs/backend.md."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from coral import CoralError, __version__, devices, install
from coral.apps import devices as listing
from coral.driver import UDEV_FILE, UDEV_RULE, find

RULE_FOLDERS = ("/etc/udev/rules.d", "/run/udev/rules.d", "/usr/lib/udev/rules.d", "/lib/udev/rules.d")
SYSFS = Path("/sys/bus/usb/devices")
SELF_POWERED = 0x40
RELOAD = "sudo udevadm control --reload && sudo udevadm trigger, then plug the stick in again"
INSTALL_CLANG = "sudo apt install clang   (Fedora: sudo dnf install clang, macOS: xcode-select --install)"
TINY = "from tinygrad import Tensor; print((Tensor([1.0, 2.0]) + 1).tolist())"


class Check(NamedTuple):
    """One line. ``status``: ok, warn or fail; ``simulated``: the simulated stick needs it, too."""

    name: str
    status: str
    message: str
    remedy: str = ""
    simulated: bool = False


def doctor(as_json: bool) -> bool:
    """Prints all checks in order; False if something fails that the simulated stick needs."""
    checks = []
    for check in (found for part in (software(), sticks()) for found in part):
        checks.append(check._asdict())
        if not as_json:
            print(f"{check.status.upper():5} {check.name:13} {check.message}", flush=True)
            if check.remedy:
                print(f"{'':19} -> {check.remedy}")
    good = not any(check["status"] == "fail" and check["simulated"] for check in checks)
    if as_json:
        print(json.dumps({"ok": good, "checks": checks}, indent=1))
    return good


def write_udev(target: str) -> None:
    """Writes the udev rule to a file, or to the terminal for ``-``."""
    if target == "-":
        print(UDEV_RULE, end="")
    else:
        Path(target).write_text(UDEV_RULE)
        print(f"wrote {target}; now run: {RELOAD}")


def software() -> Iterator[Check]:
    """What every use needs."""
    yield Check("python", "ok", f"{sys.version.split()[0]} ({sys.executable}), tinycoral {__version__}")
    try:
        yield Check("tinygrad", "ok", install.check_tinygrad())
        remedy = "" if install.registered() else f"{sys.executable} -m coral.install"
        found = "does not find" if remedy else "finds"
        yield Check("registration", "fail" if remedy else "ok", f"a fresh interpreter {found} DEV=CORAL", remedy, True)
    except CoralError as error:
        yield Check("tinygrad", "fail", str(error), simulated=True)
    compiler = os.environ.get("CC", "clang")
    where = shutil.which(compiler)
    missing = f"{compiler} is not found: kernels on the host need it, or LLVM's library"
    yield Check("clang", "ok" if where else "warn", where or missing, "" if where else INSTALL_CLANG)
    done = subprocess.run(
        [sys.executable, "-c", TINY],
        env=os.environ | {"DEV": "SIM+CORAL"},
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
    )
    last = [f"it printed {done.stdout!r}", *done.stderr.strip().splitlines()][-1]
    right = done.stdout == "[2.0, 3.0]\n"
    yield Check("host code", "ok" if right else "fail", "DEV=SIM+CORAL runs kernels" if right else last, simulated=True)
    yield _simulator()


def _simulator() -> Check:
    from coral.apps.probes.bench import Bench
    from coral.apps.probes.layers import canary

    bench = Bench("sim")
    try:
        found = canary(bench)
        return Check("simulator", "ok" if found.status == "ok" else "fail", f"canary: {found.answer}", simulated=True)
    except CoralError as error:
        return Check("simulator", "fail", f"{type(error).__name__}: {error}", simulated=True)
    finally:
        bench.close()


def sticks() -> Iterator[Check]:
    """What a real stick needs."""
    found = listing.report()
    state = found["firmware"]
    if state["installed"]:
        yield Check("firmware", "ok", state["place"])
    else:
        message = state["problem"] or "not installed; a stick that was plugged in needs it"
        yield Check("firmware", "warn", message, "coral firmware install --from-libedgetpu, or --download, or FILE")
    if sys.platform == "linux":
        yield _udev()
    yield Check("libusb", "warn" if found["note"] else "ok", found["note"] or "found")
    for stick in found["usb"]:
        yield from _stick(f"CORAL:{stick['index']}", stick)
    if not found["usb"] and not found["note"]:
        try:
            find(devices.bus_of("usb"), devices.which("usb", 0))
        except CoralError as error:
            yield Check("sticks", "warn", str(error))


def _udev() -> Check:
    files = [file for folder in RULE_FOLDERS for file in sorted(Path(folder).glob("*.rules"))]
    for file in files:
        text = file.read_text(errors="replace").lower()
        if "1a6e" in text and "18d1" in text:
            return Check("udev rule", "ok", str(file))
    if os.getuid() == 0:
        return Check("udev rule", "ok", "none, and root needs none")
    remedy = f"coral doctor --write-udev - | sudo tee {UDEV_FILE}; {RELOAD}"
    return Check("udev rule", "warn", "none for the stick: opening one will need root", remedy)


def _stick(name: str, stick: dict[str, Any]) -> Iterator[Check]:
    where, pid = f"at {stick['path']}, {stick['mode']} mode, {stick['speed']} speed", stick["owner_pid"]
    if stick["speed"] == "super":
        yield Check(name, "ok", f"{where} (USB 3)")
    else:
        remedy = "use a USB 3 port (blue, SS) and the cable that came with the stick"
        yield Check(name, "warn", f"{where} (USB 2 or less): transfers take about 8 times longer", remedy)
    yield from _power(name, stick["path"])
    if stick["trouble"]:
        remedy = "if it does not answer: unplug it, wait a second, plug it in"
        yield Check(name, "warn", f"its last run failed: {stick['trouble']}", remedy)
    if pid is not None:
        yield Check(name, "warn", f"in use by process {pid}", f"wait for it, or: kill {pid}")
        return
    try:
        with devices.open_stick("usb", stick["index"]) as opened:
            heat = opened.temperature_c()
        yield Check(name, "ok", f"opens; temperature {'not readable' if heat is None else f'{heat:.1f} degrees C'}")
    except CoralError as error:
        yield Check(name, "fail", f"{type(error).__name__}: {error}")


def _power(name: str, path: str) -> Iterator[Check]:
    """Hints from sysfs: a hub without its own supply, a port that may go to sleep."""

    def read(device: str, attribute: str) -> str:
        file = SYSFS / device / attribute
        return file.read_text().strip() if device and file.exists() else ""

    hub = path.rpartition(".")[0]
    if not int(read(hub, "bmAttributes") or "ff", 16) & SELF_POWERED:
        remedy = "the stick draws up to 0.9 A: use a port of the computer, or a hub with its own supply"
        yield Check(name, "warn", f"behind the hub {hub}, which has no supply of its own", remedy)
    if read(path, "power/control") == "auto":
        remedy = f"echo on | sudo tee {SYSFS / path / 'power/control'}"
        yield Check(name, "warn", "the system may suspend it when it is idle", remedy)
