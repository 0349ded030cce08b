"""`coral serve` and `coral eval stories` with files and names that are wrong: a sentence, exit code 1, no server."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.conftest import Command


def test_commands_say_what_is_wrong(run: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = data / "stories"
    monkeypatch.setenv("STORIES_DIR", str(shelf))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    whole, cut = shelf / "stories260K.bin", tmp_path / "cut.bin"
    cut.write_bytes(whole.read_bytes()[:-4])
    for arguments, message in (
        (("--checkpoint", "stories16M"), "there is no checkpoint stories16M"),
        (("--checkpoint", cut), "cut short"),
        (("--checkpoint", shelf / "tok512.bin"), "not a llama2.c checkpoint"),
        (("--checkpoint", "http://127.0.0.1:1/m.bin"), "http://127.0.0.1:1/m.bin cannot be downloaded"),
        (("--checkpoint", whole, "--sha256", "00"), "expected is 00"),
        (("--checkpoint", "stories260K", "--tokenizer", shelf / "tokenizer32000.bin"), "a vocabulary of 512"),
        (("--engine", "fast"), "no engine 'fast'"),
    ):
        for command in (("serve", "--port", "0"), ("eval", "stories", "--stories", "1", "--length", "4")):
            result = run(*command, *arguments)
            assert result.returncode == 1, (command, arguments, result.stderr)
            assert result.stderr.splitlines()[-1].startswith("coral: ")
            assert message in result.stderr
