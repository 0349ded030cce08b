"""``coral firmware``: is the stick's firmware installed, and installing it. Source: docs/usb.md."""

from __future__ import annotations

import json
from pathlib import Path

from coral.driver import firmware
from coral.driver.errors import BadFirmware


def status(*, as_json: bool = False) -> None:
    """Prints where the firmware is, or how to get it; raises BadFirmware when the file found is another."""
    found = firmware.find()
    if as_json:
        print(json.dumps({"installed": found is not None, "place": found and found[1], "sha256": firmware.SHA256}))
    elif found is not None:
        print(f"firmware found: {found[1]} ({len(found[0])} bytes, sha256 as expected)")
    else:
        print(
            "no firmware found (CORAL_FIRMWARE, "
            f"{firmware.data_file()}, installed libedgetpu). Install it with one of:\n"
            "  coral firmware install --from-libedgetpu   from an installed libedgetpu\n"
            "  coral firmware install --download          from libedgetpu's public repository\n"
            "  coral firmware install FILE                from a file\n"
            "The simulated stick needs none."
        )


def install(file: Path | None = None, *, from_libedgetpu: bool = False, download: bool = False) -> None:
    """Checks the image by its sha256 and puts it where the driver looks; raises BadFirmware."""
    if sum((file is not None, from_libedgetpu, download)) != 1:
        raise BadFirmware("give exactly one of FILE, --from-libedgetpu, --download")
    if file is not None:
        image = firmware.read_file(file)
    elif download:
        image = firmware.download()
    else:
        found = firmware.from_libraries()
        if found is None:
            places = ", ".join(firmware.LIBRARY_PATTERNS)
            raise BadFirmware(f"no installed libedgetpu has the image (looked at {places}); give a FILE or --download")
        image = found[0]
    print(f"firmware installed: {firmware.install(image)}")
