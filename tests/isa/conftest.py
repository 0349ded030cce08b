"""The field table of the reference shelf, as an independent description of the same instructions."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from .laws import Table


@pytest.fixture(scope="session")
def table(corpus: Path) -> Table:
    """mnemonic -> field -> entry of isa_fields.json; skips, loudly, without the shelf."""
    path = corpus.parent / "reference" / "isa_fields.json"
    if not path.is_file():
        warnings.warn(f"{path} is absent: comparisons with the field table are SKIPPED", stacklevel=2)
        pytest.skip(f"{path} is absent")
    opcodes = json.loads(path.read_text())["opcodes"].values()
    return {o["mnemonic"]: {"": o, **{f["name"]: f for f in o["fields"]}} for o in opcodes}
