"""The model on the shelf."""

from __future__ import annotations

from pathlib import Path

import pytest

from coral.llm import checkpoint, tokenizer
from coral.llm.checkpoint import Checkpoint


@pytest.fixture(scope="session")
def stories(data: Path) -> tuple[Checkpoint, tokenizer.Tokenizer]:
    """stories260K and its words."""
    folder = data / "stories"
    return checkpoint.load(folder / "stories260K.bin"), tokenizer.load(folder / "tok512.bin", 512)
