"""The committed reference pages are what the description says, and the prose speaks of things that exist."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

import pytest

from coral import isa
from coral.isa import docs

from .laws import DOCS

ELSEWHERE = {"cnt0", "_cnt", "coral/isa", "coral disasm", "coral asm", "coral isa check", "make docs", "base"}
ELSEWHERE |= {"side", "level", "Walk(addr, strides, counts)", "#"}


def test_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main([str(DOCS), "--check"]) == 0, "run: make docs"


def test_a_difference_a_missing_and_a_surplus_page_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert docs.main([str(tmp_path)]) == 0
    assert docs.main([str(tmp_path), "--check"]) == 0
    (tmp_path / "op.md").write_text("other")
    (tmp_path / "halt.md").unlink()
    (tmp_path / "old.md").write_text("left over")
    assert docs.main([str(tmp_path), "--check"]) == 1
    assert re.findall(r"(\w+)\.md differs", capsys.readouterr().err) == ["halt", "old", "op"]
    assert docs.main([str(tmp_path)]) == 0
    assert docs.main([str(tmp_path), "--check"]) == 0


def test_one_page_per_instruction_with_every_field_every_bit_and_every_section() -> None:
    pages = docs.pages()
    assert set(pages) == {f"{cls.mnemonic}.md" for cls in isa.CLASSES} | {"README.md"}
    for cls in isa.CLASSES:
        page = pages[f"{cls.mnemonic}.md"]
        headings = re.findall(r"^## (.*)$", page, re.M)
        assert headings[:2] == ["Equation", "Operands"]
        assert {"Function", "Numbers", "Cautions", "Example", "Encoding"} <= set(headings)
        for name, f in cls.fields.items():
            bits = f"{f.lo}..{f.lo + f.width - 1}" if f.width > 1 else str(f.lo)
            assert re.search(rf"^\| {re.escape(bits)} \| \w \| `{name}` \|", page, re.M)
        rows = re.findall(r"^ *\d+  ([0-9a-zA-Z ]{71})  \d+$", page, re.M)
        picture = "".join(row.replace(" ", "") for row in rows)
        assert len(picture) == 128 * cls.words
        for m in cls.musts:
            row, bit = divmod(m.lo, 64)
            assert picture[64 * row + 63 - bit] == str(m.value & 1)


def test_the_prose_names_only_things_that_exist() -> None:
    known = set(ELSEWHERE)
    for cls in isa.CLASSES:
        known |= {*cls.fields, *cls.families, cls.mnemonic}
        known |= {f.name.split("_", 1)[1] for spec in cls.walks.values() for f in spec.fields()}
    for enum in vars(isa).values():
        if isinstance(enum, type) and issubclass(enum, IntEnum):
            known |= set(enum.__members__)
    for path in (Path(isa.__file__).parent / "prose").glob("*.md"):
        for word in re.findall(r"`([^`\n]+)`", path.read_text()):
            assert word in known, f"{path.name} speaks of `{word}`"


def test_links_between_pages_lead_somewhere() -> None:
    pages = docs.pages()
    for name, page in pages.items():
        for target in re.findall(r"\]\(([^)]+)\)", page):
            file, _, anchor = target.partition("#")
            assert file in pages, f"{name} links to {target}"
            assert not anchor or f"## {anchor.capitalize()}" in pages[file], f"{name} links to {target}"
