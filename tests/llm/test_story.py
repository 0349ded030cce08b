"""How words are chosen and stories end, with a model that needs no arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from story_models import CountingEngine

from coral import CoralError
from coral.llm.engine import EngineError
from coral.llm.story import Sampling, SamplingError, Stories, choose
from coral.llm.tokenizer import Tokenizer

WORDS = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % b for b in range(256))]
TOKENIZER = Tokenizer([*WORDS, *(b" word%d" % n for n in range(40)), b" "], [0.0] * 300)


def told(prompts: list[list[int]], how: Sampling, engine: CountingEngine | None = None) -> list[str]:
    """Texts of all stories, from what ``advance`` gives."""
    engine = engine or CountingEngine()
    stories = Stories(engine.session(len(prompts)), TOKENIZER, prompts, how, engine.config.context)
    texts = [""] * len(prompts)
    while not stories.done:
        for row, text in stories.advance():
            texts[row] += text
    return texts


def test_choices_follow_the_distribution() -> None:
    logits = np.log(np.array([[0.5, 0.05, 0.15, 0.3]], np.float32))
    chances = (np.arange(1000) + 0.5) / 1000
    rows = np.repeat(logits, 1000, 0)
    assert np.bincount(choose(rows, chances, 1.0, 1.0)).tolist() == [500, 50, 150, 300]
    assert np.bincount(choose(rows, chances, 1.0, 0.79), minlength=4).tolist() == [625, 0, 0, 375]
    assert np.bincount(choose(rows, chances, 1.0, 0.81), minlength=4).tolist() == [526, 0, 158, 316]
    assert set(choose(rows, chances, 1.0, 0.0)) == set(choose(rows, chances, 0.0, 1.0)) == {0}
    half = np.array([0.5, 0.05, 0.15, 0.3]) ** 2
    assert np.bincount(choose(rows, chances, 0.5, 1.0)).tolist() == pytest.approx(1000 * half / half.sum(), abs=1)
    assert set(choose(rows * 1e6, chances, 2.0, 1.0)) == {0}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, it must be 0 to 2"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": -1}, "seed"),
        ({"words": 0}, "at least 1"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("a",) * 5}, "up to 4"),
    ],
)
def test_invalid_sampling(values: dict, words: str) -> None:
    with pytest.raises(SamplingError, match=words):
        Sampling(**values)


def test_stories_do_not_depend_on_their_company() -> None:
    prompts = [[261 + n] * n for n in range(5)]
    how = Sampling(temperature=1.0, seed=7, words=20)
    together = told(prompts, how)
    assert len(set(together)) == 5
    alone = told([prompts[0]], how)
    assert together[0] == alone[0]
    assert told(prompts, how) == together != told(prompts, Sampling(temperature=1.0, seed=8, words=20))
    greedy = Sampling(temperature=0, words=20)
    assert told(prompts, greedy) == [told([prompt], greedy)[0] for prompt in prompts]


def test_a_step_that_fails_is_repeated() -> None:
    how, engine = Sampling(temperature=1.0, seed=7, words=20), CountingEngine()
    stories, text = Stories(engine.session(1), TOKENIZER, [[262, 263]], how, 64), ""
    while not stories.done:
        engine.faults = [CoralError("pulled out")]
        try:
            text += "".join(new for _, new in stories.advance())
        except CoralError:
            engine.faults = []
            text += "".join(new for _, new in stories.advance())
    assert text == told([[262, 263]], how)[0]


def test_ends() -> None:
    engine = CountingEngine(context=12)
    engine.table[:] = -100
    engine.table[:, 262] = 100
    stories = Stories(engine.session(1), TOKENIZER, [[264]], Sampling(words=50, temperature=0), 12)
    while not stories.done:
        stories.advance()
    assert stories.rows[0].ended == "length"
    assert len(stories.rows[0].ids) == 11
    engine.table[:, 1] = 101
    assert told([[264]], Sampling(temperature=0), engine) == [""]
    with pytest.raises(SamplingError, match=r"13 words.*12"):
        Stories(engine.session(1), TOKENIZER, [[264] * 12], Sampling(), 12)


@pytest.mark.parametrize(
    ("stop", "wanted"),
    [
        ("d2", " wor"),
        ("2 w", " word"),
        ("word2 word2 word2!", " word2" * 6),
        ("2 word2 word2 wo", " word"),
    ],
)
def test_stops_are_cut_off_and_nothing_of_them_is_shown(stop: str, wanted: str) -> None:
    engine = CountingEngine()
    engine.table[:] = -100
    engine.table[:, 261] = 100
    how = Sampling(words=6, temperature=0, stop=("never", stop))
    stories, parts = Stories(engine.session(1), TOKENIZER, [[264]], how, 64), []
    while not stories.done:
        parts += [text for _, text in stories.advance()]
        assert wanted.startswith("".join(parts))
    assert "".join(parts) == wanted


def test_impossible_steps() -> None:
    session = CountingEngine(context=3).session(1)
    with pytest.raises(EngineError, match="cannot go back to position 2"):
        session.rewind(2)
    with pytest.raises(EngineError, match="1 ids"):
        session.step(np.array([300]))
    session.step(np.array([4]))
    session.step(np.array([4]))
    with pytest.raises(EngineError, match="context of 3"):
        session.step(np.array([4]))
