"""What code and pages say of each other: sources, links and commands exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from coral.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("coral", "tests", "examples", "tools")
MODULES = sorted({p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")} - {Path(__file__)})
SOURCE = re.compile(r'docs/([\w/-]+\.md)(?:, "?(?:sections? )?([A-Z][^.;:()"]*))?')
LINK = re.compile(r"\]\(([^)#\s:]*)(?:#([^)\s]*))?\)")


@cache
def headings(page: Path) -> frozenset[str]:
    """Of a page, in lower case; one with commas also by its parts."""
    found = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return frozenset(part.strip().lower() for name in found for part in (name, *name.split(",")))


def anchors(page: Path) -> set[str]:
    return {re.sub(r"[^\w\- ]", "", name).replace(" ", "-") for name in headings(page)}


def wrong_sources(text: str) -> Iterator[str]:
    """Pages and headings that a module names and that do not exist."""
    for name, sections in SOURCE.findall(re.sub(r"\s+(?:# )?", " ", text)):
        page = ROOT / "docs" / name
        if not page.is_file():
            yield f"there is no docs/{name}"
        elif sections:
            named = (section.strip() for section in sections.split(", "))
            yield from (f"docs/{name} has no section {section!r}" for section in named if not has(page, section))


def has(page: Path, section: str) -> bool:
    """What goes on in small letters is the sentence around it."""
    return section.lower() in headings(page) or not section[:1].isupper()


def test_sources_exist() -> None:
    wrong = {str(path.relative_to(ROOT)): list(wrong_sources(path.read_text())) for path in MODULES}
    assert not {path: found for path, found in wrong.items() if found}


def test_a_wrong_source_is_found() -> None:
    """Split over lines, in a list, in a comment."""
    assert not list(wrong_sources("Source: docs/network.md,\n    sections Tiling, Bands. (docs/usb.md, Registers)"))
    assert len(list(wrong_sources("Source: docs/network.md, sections Tiling, Bends."))) == 1
    assert len(list(wrong_sources("# docs/nothing.md, docs/network.md,\n# section Bends"))) == 2


def test_links_between_pages_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for target, anchor in LINK.findall(page.read_text()):
            there = (page.parent / target).resolve() if target else page
            if not there.exists() or (anchor and anchor not in anchors(there)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not wrong


FENCED = re.compile(r"^```.*?^```", re.M | re.S)
STARTS = {"coral", ".venv/bin/coral"}
COMMAND = typer.main.get_command(app)


def fragments(text: str) -> Iterator[str]:
    """Code of a page: the lines of blocks, and what stands between backticks."""
    for block in FENCED.findall(text):
        yield from block.splitlines()[1:-1]
    yield from re.findall(r"`([^`]+)`", FENCED.sub("", text))


def wrong_commands(fragment: str) -> Iterator[str]:
    """Subcommands and options of ``coral`` that it does not have."""
    words = re.sub(r"\s#.*", "", fragment).replace("\\|", "|").split()
    for at, word in enumerate(words):
        if word in STARTS and words[max(at - 1, 0)] not in ("import", "from", "as"):
            yield from unknown(words[at + 1 :])


def unknown(words: list[str]) -> Iterator[str]:
    command: Any = COMMAND
    for word in words:
        if word in ("--", "|", "&&", ">", *STARTS):
            return
        if hasattr(command, "commands") and not word.startswith(("-", "[")):
            if word not in command.commands:
                yield f"{command.name} has no command {word!r}"
                return
            command = command.commands[word]
        options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        for name in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", word):
            if name not in options:
                yield f"{command.name} has no option {name}"


def test_commands_exist() -> None:
    wrong = {
        f"{page.relative_to(ROOT)}: {fragment}": list(wrong_commands(fragment))
        for page in PAGES
        for fragment in fragments(page.read_text())
    }
    assert not {where: found for where, found in wrong.items() if found}


def test_a_wrong_command_is_found() -> None:
    assert not list(wrong_commands("DEV=CORAL .venv/bin/coral run MODEL [--json] --break SEQ  # coral walk"))
    assert not list(wrong_commands("coral stick serve --running -- python x.py --fast"))
    assert len(list(wrong_commands("coral stick serve --walking -- coral run MODEL --fast"))) == 2
    assert len(list(wrong_commands("coral stick walk"))) == 1


PATH = re.compile(r"(?<![\w/.])((?:coral|docs|examples|tests|tools)/[\w/-]+\.(?:py|md|sh))(?:::(\w+))?")


def test_files_and_tests_exist() -> None:
    wrong = []
    for page in [*PAGES, ROOT / ".ci" / "run"]:
        for name, test in PATH.findall(page.read_text()):
            path = ROOT / name
            if not path.is_file() or (test and not re.search(rf"^\s*(?:def|class) {test}\b", path.read_text(), re.M)):
                wrong.append(f"{page.relative_to(ROOT)}: {name} {test}")
    assert not wrong


def variables(paths: list[Path]) -> set[str]:
    return {name for path in paths for name in re.findall(r"\bCORAL_[A-Z_]+\b", path.read_text())}


def test_environment_variables_exist_and_are_described() -> None:
    assert variables(PAGES) <= variables(MODULES)
    assert variables([path for path in MODULES if path.is_relative_to(ROOT / "coral")]) <= variables(PAGES)
