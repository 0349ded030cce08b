"""Engine ``blocks`` on the simulated stick and on the host."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from story_models import random_checkpoint

from apps.stories.conftest import TOKENIZER
from coral.apps.stories.blocks import BlocksEngine, predicted_seconds
from coral.apps.stories.engines import Model, open_engine
from coral.llm.checkpoint import Config
from coral.llm.engine import EngineError
from coral.llm.shortlist import Shortlist
from coral.llm.story import Sampling, Stories
from coral.llm.tokenizer import Tokenizer

TINY = Config(dim=16, hidden=24, layers=2, heads=2, kv_heads=1, vocabulary=300, context=24)


def written(
    engine: BlocksEngine, prompts: list[list[int]], how: Sampling, words: Tokenizer = TOKENIZER
) -> list[list[int]]:
    stories = Stories(engine.session(len(prompts)), words, prompts, how, engine.config.context)
    while not stories.done:
        stories.advance()
    return [row.ids for row in stories.rows]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """On the stick and on the host."""
    monkeypatch.setenv("MOCKCORAL", "1")
    model = Model("tiny", random_checkpoint(TINY), TOKENIZER)
    stick, host = (open_engine("blocks", model, device) for device in ("CORAL", "CPU"))
    return stick, host


def test_the_stick_writes_what_the_host_writes(engines: tuple[Any, Any]) -> None:
    stick, host = engines
    prompts = [[261], [262, 263, 264], [265]]
    greedy, warm = Sampling(0, words=6), Sampling(0.9, 0.7, seed=5, words=6)
    before = stick.usage()
    one = [written(stick, [prompt], greedy)[0] for prompt in prompts]
    used = stick.usage().since(before)
    assert 3 * TINY.layers * 18 <= used.calls <= 3 * TINY.layers * 20
    assert used.predicted_seconds > 0 < used.chip_seconds
    assert one == written(host, prompts, greedy) == written(stick, prompts, greedy)
    chosen = written(host, prompts, warm)
    assert not stick.shortlisted(3)
    stick._choice = True
    before = stick.usage()
    assert one == written(stick, prompts, greedy)
    used = stick.usage().since(before)
    assert used.calls > (3 * TINY.layers + 1) * 6
    assert used.predicted_seconds > used.calls * 0.000142
    assert chosen == written(stick, prompts, warm)
    names = {weights.name for weights in stick.weights()}
    assert {"0 qkv", "0 wo", "1 ffn", "classifier"} <= names
    assert host.weights() == []
    assert host.usage().calls == 0
    with pytest.raises(EngineError, match="257 stories at once, 1 to 256"):
        stick.session(257)


def test_sessions(engines: tuple[Any, Any]) -> None:
    """Rewinding, narrowing afterwards, a step that fails and is repeated."""
    stick, host = engines
    stick._choice = True
    a, b = stick.session(1), host.session(1)
    np.testing.assert_array_equal(a.logits(), b.logits())
    for word in (261, 280, 7, 9):
        np.testing.assert_array_equal(a.step(np.array([word])), b.step(np.array([word])))
    for session in (a, b):
        session.rewind(2)
    full = b.step(np.array([270]))
    a.narrow(0.0, 1.0)
    run, stick.run = stick.run, lambda name, x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        a.step(np.array([270]))
    assert a.position == 2
    stick.run = run
    narrowed = a.step(np.array([270]))
    assert narrowed.argmax() == full.argmax()
    a.narrow(1.0, 1.0)
    np.testing.assert_array_equal(a.logits(), full)
    with pytest.raises(EngineError, match="cannot go back to position 9"):
        a.rewind(9)


def test_the_host_has_the_classifier_of_few_stories() -> None:
    """9 MB per call are slower than a host's 1 to 8 products, and faster than those of 256 stories."""
    s = Shortlist(np.random.default_rng(0).normal(size=(32000, 288)).astype(np.float32), 20.0)
    seconds = {rows: predicted_seconds(s, rows, 500_000_000) for rows in (1, 256)}
    assert 0.028 < seconds[1] < 0.032
    assert seconds[256] < 0.040
    engine = BlocksEngine.__new__(BlocksEngine)
    engine._choice, engine._faster = None, {}
    engine.blocks, engine.runtime = type("B", (), {"shortlist": s})(), type("R", (), {"clock_hz": 500_000_000})()  # pyright: ignore
    assert [engine.shortlisted(rows) for rows in (1, 8, 256)] == [False, False, True]


@pytest.mark.slow
def test_stories260k(stories260k: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 different prompts at once on the stick, with the classifier's blocks there, are 32 stories of the host."""
    monkeypatch.setenv("MOCKCORAL", "1")
    stick, host = (cast(BlocksEngine, open_engine("blocks", stories260k, device)) for device in ("CORAL", "CPU"))
    stick._choice = True
    words, how, greedy = stories260k.tokenizer, Sampling(0.7, 0.9, seed=3, words=24), Sampling(0, words=24)
    prompts = [words.encode(f"{begin} {who}") for begin in ("Once", "One day,", "The", "A") for who in "abcdefgh"]
    alone = [written(host, [prompt], greedy, words)[0] for prompt in prompts]
    assert written(stick, prompts, greedy, words) == alone
    assert written(stick, prompts, how, words) == written(host, prompts, how, words)
