"""``coral devices``: the sticks that can be used. Source: docs/driver.md."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

from coral import CoralError, devices
from coral.driver import LibusbMissing, firmware
from coral.driver.lock import default_directory

QUERY_LIMITED_INFORMATION = 0x1000
"""What Windows lets anybody do with a process."""


def _note(path: str, kind: str) -> str:
    """What the driver has left about the stick at ``path``: "lock", its owner, or "hung", why its last run failed."""
    file = Path(default_directory(), f"stick-{path}.{kind}")
    return file.read_text(encoding="utf-8", errors="replace").strip() if file.exists() else ""


def owner(path: str) -> int | None:
    """Process of this user that has the stick."""
    try:
        pid = int(_note(path, "lock"))
        return pid if _alive(pid) else None
    except (OSError, ValueError):
        return None


def _alive(pid: int) -> bool:
    """Whether a process exists; OSError if not, or if it is another user's."""
    if sys.platform == "win32":  # os.kill would send it a Ctrl-C
        process = ctypes.windll.kernel32.OpenProcess(QUERY_LIMITED_INFORMATION, False, pid)
        return bool(process and ctypes.windll.kernel32.CloseHandle(process))
    os.kill(pid, 0)
    return True


def report() -> dict[str, Any]:
    """Everything that the command shows; without libusb there are no sticks, and ``note`` says why."""
    usb, note, image, problem = [], None, None, None
    try:
        for index, stick in enumerate(devices.sticks_on_usb()):
            described = {"index": index, "path": stick.path, "serial": stick.serial or None, "speed": stick.speed}
            described |= {"mode": "application" if stick.running else "boot"}
            usb.append(described | {"owner_pid": owner(stick.path), "trouble": _note(stick.path, "hung") or None})
    except (LibusbMissing, OSError) as error:
        note = f"sticks on USB cannot be searched: {error}"
    try:
        image = firmware.find()
    except CoralError as error:
        problem = str(error)
    state = {"installed": image is not None, "place": image and image[1], "problem": problem}
    simulated = {"select": "DEV=SIM+CORAL", "most": devices.MAX_SIMULATED}
    return {"usb": usb, "simulated": simulated, "firmware": state, "note": note}


def show(as_json: bool) -> None:
    """Prints the sticks."""
    found = report()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for stick in found["usb"]:
        state = f"in use by process {stick['owner_pid']}" if stick["owner_pid"] else "free"
        serial = f"serial {stick['serial']}, " if stick["serial"] else ""
        where = f"USB {stick['path']}, {serial}{stick['speed']} speed, {stick['mode']} mode"
        print(f"CORAL:{stick['index']}  {where}, {state}")
        if stick["trouble"]:
            print(f"         its last run failed: {stick['trouble']}")
    if not found["usb"]:
        print(found["note"] or "no stick on USB; `coral doctor` helps")
    print(f"simulated: DEV=SIM+CORAL, up to {devices.MAX_SIMULATED} sticks in every process")
    state = found["firmware"]
    print(f"firmware: {state['problem'] or state['place'] or 'not installed; `coral firmware` says how'}")
