"""Google's firmware for the stick: not ours to ship, so it is found, copied or downloaded. Source: docs/usb.md."""

from __future__ import annotations

import hashlib
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from coral.driver.errors import BadFirmware

SIZE_BYTES = 10783
SHA256 = "3b07311b174b81fd14fd2c887f40d646c0ebf2f140cc5ee5cf8befa0f3e3dc7f"
FILE_NAME = "apex_latest_single_ep.bin"
URL = "https://github.com/google-coral/libedgetpu/raw/master/driver/usb/apex_latest_single_ep.bin"
VERSION_MARK, VERSION_OFFSET = b"GUC-Ver:", 6299

LIBRARY_PATTERNS = (
    "/usr/lib/*/libedgetpu.so*",
    "/usr/lib/libedgetpu.so*",
    "/usr/lib64/libedgetpu.so*",
    "/usr/local/lib/libedgetpu*",
    "/opt/homebrew/lib/libedgetpu*",
)


def data_file() -> Path:
    """Where ``coral firmware install`` puts the image."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "tinycoral" / FILE_NAME


def check(image: bytes, where: object) -> bytes:
    """``image`` if it is the one known to work; raises BadFirmware with both sizes and hashes."""
    digest = hashlib.sha256(image).hexdigest()
    if digest != SHA256:
        raise BadFirmware(
            f"{where} is not the stick's firmware {FILE_NAME}: {len(image)} bytes with sha256 {digest}, expected are "
            f"{SIZE_BYTES} bytes with sha256 {SHA256}"
        )
    return image


def read_file(path: Path) -> bytes:
    """The image in a file of its own; raises BadFirmware."""
    try:
        with path.open("rb") as file:
            return check(file.read(SIZE_BYTES + 1), path)
    except OSError as error:
        raise BadFirmware(f"the firmware file {path} cannot be read: {error.strerror}") from None


def search_library(path: Path) -> bytes | None:
    """The image inside a library that embeds it, found by version mark, length and hash; None if it is not there."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    mark = data.find(VERSION_MARK)
    while mark >= 0:
        start = mark - VERSION_OFFSET
        image = data[start : start + SIZE_BYTES] if start >= 0 else b""
        if hashlib.sha256(image).hexdigest() == SHA256:
            return image
        mark = data.find(VERSION_MARK, mark + 1)
    return None


def installed_libraries() -> list[Path]:
    """Copies of libedgetpu in the usual places."""
    return sorted(
        path for pattern in LIBRARY_PATTERNS for path in Path("/").glob(pattern.lstrip("/")) if path.is_file()
    )


def from_libraries(libraries: Iterable[Path] | None = None) -> tuple[bytes, Path] | None:
    """(image, library) of the first libedgetpu that has the image."""
    for path in installed_libraries() if libraries is None else libraries:
        image = search_library(path)
        if image is not None:
            return image, path
    return None


def download(url: str = URL, *, timeout_s: float = 30.0) -> bytes:
    """Fetches the image from libedgetpu's public repository; raises BadFirmware."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return check(answer.read(SIZE_BYTES + 1), url)
    except (urllib.error.URLError, OSError) as error:
        raise BadFirmware(
            f"the firmware cannot be downloaded from {url} ({error}); download it elsewhere and run "
            "`coral firmware install FILE`"
        ) from None


def install(image: bytes) -> Path:
    """Writes ``image`` where ``find`` looks; the file is there whole or not at all."""
    target = data_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(image)
    part.replace(target)
    return target


def find() -> tuple[bytes, str] | None:
    """(image, where it was) from CORAL_FIRMWARE, the user's data directory or an installed libedgetpu, in this order.

    Raises BadFirmware when CORAL_FIRMWARE or the installed file is something else.
    """
    named = os.environ.get("CORAL_FIRMWARE")
    if named:
        return read_file(Path(named)), f"CORAL_FIRMWARE={named}"
    if data_file().exists():
        return read_file(data_file()), str(data_file())
    found = from_libraries()
    return (found[0], str(found[1])) if found else None
