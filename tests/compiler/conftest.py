"""The command line as it is typed."""

from __future__ import annotations

from typing import Any

import pytest
from apps.conftest import command_line


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """(exit code, standard output, errors) of a command."""

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "200")
        return command_line(monkeypatch, capsys, *arguments)

    return command
