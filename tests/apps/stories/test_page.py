"""The page in headless Chromium: a story is written, stopped, edited and continued; many grow; nothing complains.

The slow test does it with stories260K on the simulated stick; ``SCREENSHOTS=docs/pictures`` keeps its pictures.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.stories.conftest import TOKENIZER, PacedEngine, Server, served
from coral.apps.stories.engines import Model, where
from coral.apps.stories.scheduler import Limits

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by playwright."""
    path = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        message = (
            "chromium or playwright is absent: tests of the page are SKIPPED (make system; apt-get install chromium)"
        )
        warnings.warn(message, stacklevel=2)
        pytest.skip(message)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS.split(), headless=True)
        yield chromium
        chromium.close()


class Page:
    """A tab, and everything that it complained about."""

    def __init__(self, browser: Any, url: str, width: int, scheme: str = "light") -> None:
        height = 900 if width > 500 else 844
        self.tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.complaints: list[str] = []
        self.tab.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.goto(url)
        self.until(lambda: self.text("#model") != "")

    def until(self, condition: Callable[[], Any], seconds: float = 60) -> None:
        """Waits until it holds."""
        pause = 50 if seconds <= 60 else 500
        for _ in range(int(1000 * seconds / pause)):
            if condition():
                return
            self.tab.wait_for_timeout(pause)
        raise AssertionError(f"waited in vain; complaints: {self.complaints}")

    def text(self, selector: str) -> str:
        """What stands there."""
        return self.tab.text_content(selector)

    def story(self) -> str:
        """The text area's text."""
        return self.tab.input_value("#story")

    def fits(self) -> bool:
        """Whether nothing has to be scrolled sideways."""
        return self.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def write_stop_edit_go_on(page: Page, begin: str) -> None:
    """With the keyboard alone after the first click."""
    tab = page.tab
    tab.click("#story")
    tab.keyboard.type(begin)
    tab.keyboard.press("Control+Enter")
    page.until(lambda: len(page.story()) > len(begin) + 20)
    tab.keyboard.press("Escape")
    page.until(lambda: page.text("#go") == "Go on")
    stopped = page.story()
    tab.wait_for_timeout(400)
    assert page.story() == stopped
    assert stopped.startswith(begin)
    assert "Stopped" in page.text("#said")
    edited = stopped[: len(begin)] + " word3 "
    tab.fill("#story", edited)
    tab.click("#go")
    page.until(lambda: len(page.story()) > len(edited) + 10)
    assert page.story().startswith(edited.rstrip())
    tab.keyboard.press("Escape")
    page.until(lambda: page.text("#go") == "Go on")
    tab.click("#undo")
    assert page.story() == edited.rstrip()


def grow(page: Page, count: str) -> None:
    """Until every card has gained something."""
    tab = page.tab
    tab.click("#tab-many")
    tab.select_option("#count", count)
    tab.click("#grow")
    cards = "[...document.querySelectorAll('.card')].map(card => card.textContent.length)"
    page.until(lambda: len(tab.evaluate(cards)) == int(count))
    before = tab.evaluate(cards)
    page.until(lambda: all(now > then for now, then in zip(tab.evaluate(cards), before, strict=True)))


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_page(browser: Any, width: int, scheme: str) -> None:
    engine = PacedEngine(0.05, context=512)  # slow, and long stories: a busy browser has time to stop them
    with served(engine, TOKENIZER) as server:
        page = Page(browser, server.url, width, scheme)
        assert page.fits()
        page.tab.fill("#length", "490")
        write_stop_edit_go_on(page, "A word1 word2")
        page.tab.fill("#length", "60")
        engine.seconds = 0.008
        grow(page, "16")
        page.until(lambda: "Press one" in page.text("#grown"))
        page.tab.click(".card >> nth=3")
        assert len(page.story()) > 40
        page.until(lambda: page.text("#measured") != "–" and page.text("#predicted") != "–")
        assert len(page.tab.query_selector_all("#tiles .tile")) == 16
        page.tab.click("#legend button >> nth=0")
        assert page.tab.get_attribute("#legend button >> nth=0", "aria-pressed") == "true"
        background = "getComputedStyle(document.body).backgroundColor"
        before = page.tab.evaluate(background)
        page.tab.click("#theme")
        assert page.tab.evaluate(background) != before
        assert page.fits()
        assert page.complaints == []
        page.tab.close()


def test_errors_are_shown(browser: Any) -> None:
    engine = PacedEngine(0.05, context=512)
    with served(engine, TOKENIZER, Limits(active=1, waiting=0)) as server:
        page = Page(browser, server.url, 1280)
        page.tab.fill("#story", "word " * 200)
        page.tab.click("#go")
        page.until(lambda: "the context is 512" in page.text("#said"))
        other = Page(browser, server.url, 1280)
        for tab in (other, page):
            tab.tab.fill("#story", "word1")
            tab.tab.fill("#length", "490")
            tab.tab.click("#go")
        page.until(lambda: "asking again in" in page.text("#said"))
        other.tab.close()  # its request is taken back
        page.until(lambda: len(page.story()) > 30)
        page.tab.close()


@pytest.mark.slow
def test_pictures(browser: Any, stories260k: Model, stick260k: Any, tmp_path: Path) -> None:
    model, engine = stories260k, stick260k
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    for rows in (1, 16):
        engine.session(rows).step(np.full(rows, 1))
    with served(engine, model.tokenizer, name=model.name, device=where("CORAL")) as server:
        for width, scheme in ((1280, "light"), (390, "light"), (1280, "dark")):
            picture(browser, server, folder, width, scheme)


def picture(browser: Any, server: Server, folder: Path, width: int, scheme: str) -> None:
    """Both views while they are written."""
    page = Page(browser, server.url, width, scheme)
    page.tab.fill("#seed", "7")
    page.tab.fill("#story", "Once upon a time, there was a little robot")
    page.tab.click("#go")
    page.until(lambda: len(page.story()) > 240 and page.text("#predicted") != "–", 300)
    page.tab.screenshot(path=str(folder / f"stories-write-{width}-{scheme}.png"), full_page=True)
    page.tab.keyboard.press("Escape")
    grow(page, "16")
    words = "document.querySelector('.card').textContent.length"
    page.until(lambda: page.tab.evaluate(words) > 150, 300)
    page.tab.screenshot(path=str(folder / f"stories-grow-{width}-{scheme}.png"), full_page=True)
    page.tab.keyboard.press("Escape")
    assert page.fits()
    assert page.complaints == []
    page.tab.close()
