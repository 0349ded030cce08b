"""Files by address: downloaded once, whole and as asked for, or not at all. Source: docs/stories.md, Files."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from coral import CoralError

HUB = "https://huggingface.co/karpathy/tinyllamas/resolve/main"
PUBLIC = {
    "stories260K": f"{HUB}/stories260K/stories260K.bin",
    **{name: f"{HUB}/{name}.bin" for name in ("stories15M", "stories42M", "stories110M")},
}
TOKENIZERS = {
    512: f"{HUB}/stories260K/tok512.bin",
    32000: "https://raw.githubusercontent.com/karpathy/llama2.c/master/tokenizer.bin",
}
"""By number of words."""
MAX_BYTES = 8 << 30
BLOCK_BYTES = 1 << 18


class FetchError(CoralError):
    """No network, no such file, cut short, or not what was asked for; the message says which and what helps."""


def check_hash(path: Path, sha256: str = "") -> str:
    """The file's sha256 if it is ``sha256`` (hexadecimal) or, without one, what was noted when it was downloaded.

    :raises FetchError: it is another file, or was changed
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    note = _beside(path, ".sha256")
    expected = sha256.strip().lower() or (note.read_text()[:64] if note.is_file() else found)
    if found != expected:
        raise FetchError(f"{path} has the sha256 {found}, expected is {expected}: another file, or it was changed")
    return found


def fetch(
    url: str,
    target: Path,
    *,
    sha256: str = "",
    check: Callable[[Path], object] = lambda path: None,
    progress: Callable[[int, int | None], object] = lambda have, total: None,
    timeout_s: float = 30.0,
) -> str:
    """Downloads ``url`` to ``target``, going on where an earlier try ended; its sha256 is noted beside it and returned.

    ``check`` raises a CoralError for a file of the wrong kind, which is then not kept; ``progress(have, total)`` in
    bytes.

    :raises FetchError: see there; OSError: the file cannot be written
    """
    if not url.startswith(("https://", "http://")):
        raise FetchError(f"{url} is no address of http or https")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _beside(target, ".part")
    _download(url, part, progress, timeout_s)
    try:
        digest = check_hash(part, sha256)
        check(part)
    except CoralError as error:
        part.unlink()
        raise FetchError(f"{url} is not what was asked for, nothing is kept: {error}") from None
    _beside(target, ".sha256").write_text(f"{digest}  {target.name}\n")
    part.replace(target)
    return digest


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _download(url: str, part: Path, progress: Callable[[int, int | None], object], timeout_s: float) -> None:
    """Fills ``part``. What is there is used only if the server says, by its tag, that it is of the same file."""
    note = _beside(part, ".tag")
    tag = note.read_text() if note.is_file() else ""
    have = part.stat().st_size if tag and part.is_file() else 0
    headers = {"Range": f"bytes={have}-", "If-Range": tag} if have else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s) as answer:
            new = answer.headers.get("ETag", "")
            note.write_text(new if new.startswith('"') else "")  # a weak one does not stand for the same bytes
            goes_on = answer.status == 206
            if goes_on and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise FetchError(f"{url} cannot be downloaded: the server sends another part than it was asked for")
            have = have if goes_on else 0
            total = None if answer.length is None else have + answer.length
            with part.open("ab" if goes_on else "wb") as file:
                progress(have, total)
                while have <= MAX_BYTES and (block := answer.read(BLOCK_BYTES)):
                    file.write(block)
                    have += len(block)
                    progress(have, total)
    except (urllib.error.URLError, http.client.HTTPException, OSError, UnicodeError) as error:
        if isinstance(error, urllib.error.HTTPError):
            note.unlink(missing_ok=True)
        raise FetchError(
            f"{url} cannot be downloaded ({error}). Try again, what came is kept; or download it elsewhere and name it"
        ) from None
    if have > MAX_BYTES:
        part.unlink()
        raise FetchError(f"{url} has more than {MAX_BYTES} bytes")
    if total is not None and have < total:
        raise FetchError(f"{url} was cut short: {have} of {total} bytes came. Try again, what came is kept")
    note.unlink(missing_ok=True)
