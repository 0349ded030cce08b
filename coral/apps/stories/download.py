"""Models by public name or address: where they are kept, and their download. Source: docs/stories.md, Files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from coral.driver.firmware import data_file
from coral.llm import checkpoint
from coral.llm.fetch import PUBLIC, FetchError, check_hash, fetch


def address(named: str | Path | None) -> str:
    """Where a checkpoint that is named so can be downloaded; "" for files."""
    name = str(named or "")
    return name if "://" in name else "" if Path(name).is_file() else PUBLIC.get(name, "")


def located(url: str, folder: Path, sha256: str = "") -> Path:
    """The checkpoint of an address: in ``folder``, or among what was downloaded, or downloaded now.

    :raises FetchError: there is no network, or the file is not what was asked for; OSError: it cannot be written
    """
    name = PurePosixPath(urlsplit(url).path).name
    if not name or name.startswith("."):
        raise FetchError(f"{url} names no file")
    public = url in PUBLIC.values()
    kept = (downloads() if public else downloads() / hashlib.sha256(url.encode()).hexdigest()[:16]) / name
    if public and not kept.is_file() and (folder / name).is_file():
        kept = folder / name
    if kept.is_file():
        check_hash(kept, sha256)
    else:
        downloaded(url, kept, sha256=sha256, check=checkpoint.load)
    return kept


def downloads() -> Path:
    """The user's folder for models."""
    return data_file().parent / "stories"


def downloaded(url: str, target: Path, *, sha256: str = "", check: Callable[[Path], object]) -> None:
    """``fetch`` with a bar, and the sha256 for the next time."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(target.name)
        digest = fetch(
            url,
            target,
            sha256=sha256,
            check=check,
            progress=lambda have, total: bar.update(task, completed=have, total=total),
        )
    console.print(f"{target}, from {url}\nsha256 {digest}" + ("" if sha256 else "   (whoever knows it: --sha256)"))
