"""One process per stick: a lock that dies with its owner, and a note of a stick that hung. Source: docs/driver.md."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from coral.driver.errors import DriverError, StickBusy

_WINDOWS_LOCK_BYTE = 1 << 30


def default_directory() -> Path:
    """Per user; another user's process is kept out by the system's own claim of the interface."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "tinycoral"
    return Path(tempfile.gettempdir()) / f"tinycoral-{os.getuid() if hasattr(os, 'getuid') else 'locks'}"


def _planted(folder: Path) -> bool:
    """Whether a folder in the temporary folder, where anybody may make it first, is another user's or a link: its files
    could then be links to files of ours."""
    shared = folder.parent == Path(tempfile.gettempdir()) and hasattr(os, "getuid")
    return shared and (folder.is_symlink() or folder.stat().st_uid != os.getuid())


def _lock(descriptor: int) -> None:
    """Raises OSError when another open file holds the lock."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, _WINDOWS_LOCK_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


_held: weakref.WeakSet[StickLock] = weakref.WeakSet()


def _close_all() -> None:
    for lock in list(_held):
        lock.close_file()


if hasattr(os, "register_at_fork"):
    # a forked child would otherwise keep its parent's locks alive after the parent has died
    os.register_at_fork(after_in_child=_close_all)


class StickLock:
    """Held from construction to ``release``, or to the end of the process however it ends."""

    def __init__(self, path: str, directory: Path | str | None = None) -> None:
        """``path`` is the stick's bus and port; raises StickBusy with the owner's pid."""
        folder = Path(directory) if directory is not None else default_directory()
        name = re.sub(r"[^A-Za-z0-9.-]", "_", path)
        self.file, self._note = folder / f"stick-{name}.lock", folder / f"stick-{name}.hung"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _planted(folder):
                raise DriverError(
                    f"{folder} belongs to another user: remove it, or set XDG_RUNTIME_DIR to a folder of yours"
                )
            self._descriptor: int | None = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise DriverError(f"the lock file {self.file} cannot be opened: {error.strerror}") from None
        try:
            _lock(self._descriptor)
        except OSError:
            owner = os.read(self._descriptor, 32).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise StickBusy(
                f"the stick at {path} is used by process {owner or 'unknown'} ({self.file}); wait for it or stop it"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())
        _held.add(self)

    def release(self) -> None:
        """Frees the stick; the file stays, so that two openers can never lock two different files."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
        self.close_file()

    def close_file(self) -> None:
        """Forgets the lock without freeing it for a process that has it too."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def hung_reason(self) -> str | None:
        """What an earlier user of this stick has noted."""
        try:
            return self._note.read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def note_hung(self, reason: str) -> None:
        """Leaves a note for the next user."""
        with suppress(OSError):  # the error being noted matters more than the note
            self._note.write_text(reason + "\n", encoding="utf-8")

    def clear_note(self) -> None:
        """The stick has computed again."""
        self._note.unlink(missing_ok=True)
