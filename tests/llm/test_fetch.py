"""Downloads from a server in this process: whole, in two parts, cut short, another file, no server."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coral import CoralError
from coral.llm.fetch import FetchError, check_hash, fetch

CONTENT = np.random.default_rng(0).bytes(700_001)
HASH = hashlib.sha256(CONTENT).hexdigest()


class Files:
    """What the server has and how it misbehaves; ``ranges`` are what it was asked for."""

    def __init__(self) -> None:
        self.content, self.tag, self.cut, self.chunked, self.status = CONTENT, '"one"', 0, False, 0
        self.shift = 0
        self.ranges: list[str | None] = []
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.ranges.append(wanted)
        first = 0
        if self.status:
            request.send_error(self.status)
            return
        if wanted and request.headers.get("If-Range") == self.tag:
            first = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if first >= len(self.content):
                request.send_error(416)
                return
            request.send_response(206)
            size = len(self.content)
            request.send_header("Content-Range", f"bytes {first + self.shift}-{size - 1}/{size}")
        else:
            request.send_response(200)
        if self.tag:
            request.send_header("ETag", self.tag)
        body = self.content[first:]
        if not self.chunked:
            request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: self.cut] if self.cut else body)


@pytest.fixture
def files() -> Iterator[Files]:
    served = Files()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}/model.bin"
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_whole(files: Files, tmp_path: Path) -> None:
    target, seen = tmp_path / "deep" / "m.bin", []
    digest = fetch(files.url, target, sha256=HASH.upper(), progress=lambda *at: seen.append(at))
    assert target.read_bytes() == CONTENT
    assert digest == HASH == check_hash(target)
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [have for have, _ in seen] == sorted(have for have, _ in seen)
    assert left(target.parent) == {"m.bin", "m.bin.sha256"}
    assert (tmp_path / "deep" / "m.bin.sha256").read_text() == f"{HASH}  m.bin\n"


def test_the_size_is_not_announced(files: Files, tmp_path: Path) -> None:
    files.chunked = True
    assert fetch(files.url, tmp_path / "m.bin") == HASH


def test_cut_short_and_gone_on(files: Files, tmp_path: Path) -> None:
    target = tmp_path / "m.bin"
    files.cut = 300_000
    with pytest.raises(FetchError, match=r"cut short: 300000 of 700001 bytes came. Try again"):
        fetch(files.url, target)
    assert left(tmp_path) == {"m.bin.part", "m.bin.part.tag"}
    files.cut = 200_000
    with pytest.raises(FetchError, match="500000 of 700001"):
        fetch(files.url, target)
    files.cut, seen = 0, []
    assert fetch(files.url, target, progress=lambda *at: seen.append(at)) == HASH
    assert seen[0] == (500_000, 700_001)
    assert files.ranges == [None, "bytes=300000-", "bytes=500000-"]
    assert left(tmp_path) == {"m.bin", "m.bin.sha256"}


@pytest.mark.parametrize("change", [{"tag": '"two"'}, {"tag": 'W/"one"'}, {"tag": ""}])
def test_another_file_is_not_mixed_with_what_came(files: Files, tmp_path: Path, change: dict[str, str]) -> None:
    files.cut = 300_000
    with pytest.raises(FetchError):
        fetch(files.url, tmp_path / "m.bin")
    files.cut, files.content = 0, b"other" * 100_000
    vars(files).update(change)
    fetch(files.url, tmp_path / "m.bin")
    assert (tmp_path / "m.bin").read_bytes() == files.content


def test_all_had_come_already(files: Files, tmp_path: Path) -> None:
    (tmp_path / "m.bin.part").write_bytes(CONTENT)
    (tmp_path / "m.bin.part.tag").write_text('"one"')
    with pytest.raises(FetchError, match="416"):
        fetch(files.url, tmp_path / "m.bin")
    assert fetch(files.url, tmp_path / "m.bin") == HASH


def test_another_part_than_asked_for(files: Files, tmp_path: Path) -> None:
    files.cut = 300_000
    with pytest.raises(FetchError):
        fetch(files.url, tmp_path / "m.bin")
    files.shift = 1
    with pytest.raises(FetchError, match="another part than it was asked for"):
        fetch(files.url, tmp_path / "m.bin")


def refusing(path: Path) -> None:
    raise CoralError(f"{path.stat().st_size} bytes are no model")


def test_what_is_wrong_is_not_kept(files: Files, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=f"not what was asked for.*{HASH}, expected is {'0' * 64}"):
        fetch(files.url, tmp_path / "m.bin", sha256="0" * 64)
    with pytest.raises(FetchError, match="700001 bytes are no model"):
        fetch(files.url, tmp_path / "m.bin", check=refusing)
    assert left(tmp_path) == set()


def test_a_file_that_was_changed_later(files: Files, tmp_path: Path) -> None:
    target = tmp_path / "m.bin"
    fetch(files.url, target)
    target.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(FetchError, match=f"expected is {HASH}"):
        check_hash(target)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://localhost/m.bin", "no address of http"),
        ("file:///etc/passwd", "no address of http"),
        ("http://127.0.0.1:1/m.bin", r"cannot be downloaded.*download it elsewhere"),
        ("http://", "cannot be downloaded"),
        ("http://127.0.0.1:port/m.bin", "cannot be downloaded"),
        ("http://127.0.0.1:1/\u00e4 .bin", "cannot be downloaded"),
        ("http://no-such-host.invalid/m.bin", "cannot be downloaded"),
    ],
)
def test_nobody_answers(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(FetchError, match=message):
        fetch(url, tmp_path / "m.bin")
    assert left(tmp_path) == set()


def test_refused_by_the_server(files: Files, tmp_path: Path) -> None:
    files.status = 404
    with pytest.raises(FetchError, match="404"):
        fetch(files.url, tmp_path / "m.bin")


def test_more_than_any_model(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coral.llm.fetch.MAX_BYTES", 400_000)
    with pytest.raises(FetchError, match="more than 400000 bytes"):
        fetch(files.url, tmp_path / "m.bin")
    assert left(tmp_path) <= {"m.bin.part.tag"}


def test_a_server_that_falls_silent(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(FetchError, match="timed out"):
        fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/m.bin", tmp_path / "m.bin", timeout_s=0.2)
