"""Engines on devices: the same words on the simulated stick as on the host, alone as in company; files; quality."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from story_models import CountingEngine, random_checkpoint
from tinygrad.device import Device

from apps.stories.conftest import TOKENIZER
from coral.apps.stories.engines import Both, Model, StoriesError, load_model, open_engine, where
from coral.apps.stories.evaluate import evaluate, predictions, quality, written
from coral.llm.checkpoint import CheckpointError, Config
from coral.llm.engine import Engine, EngineError, Usage
from coral.llm.fetch import PUBLIC, TOKENIZERS, FetchError
from coral.llm.story import Sampling, Stories
from coral.llm.tokenizer import TokenizerError

TINY = Config(dim=16, hidden=24, layers=1, heads=2, kv_heads=1, vocabulary=300, context=24)


def ids_of(engine: Engine, prompts: list[list[int]], words: int) -> list[list[int]]:
    """What it writes, greedily."""
    how = Sampling(temperature=0, words=words)
    stories = Stories(engine.session(len(prompts)), TOKENIZER, prompts, how, engine.config.context)
    while not stories.done:
        stories.advance()
    return [row.ids for row in stories.rows]


def test_the_stick_writes_what_the_host_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOCKCORAL", "1")
    model = Model("tiny", random_checkpoint(TINY), TOKENIZER)
    stick, host = (open_engine("matmul", model, device) for device in ("CORAL", "CPU"))
    assert "simulated stick" in where("CORAL")
    assert "no Edge TPU" in where("CPU")
    prompts = [[261], [262, 263, 264], [265]]
    before = stick.usage()
    one = [ids_of(stick, [prompt], 6)[0] for prompt in prompts]
    used = stick.usage().since(before)
    assert used.calls >= 5 * 21
    assert used.predicted_seconds > 0 < used.chip_seconds
    assert used.to_chip_bytes > used.from_chip_bytes > 0
    assert one == [ids_of(host, [prompt], 6)[0] for prompt in prompts]
    with ThreadPoolExecutor(1) as thread:  # as a server compiles another number of stories
        assert one == thread.submit(ids_of, stick, prompts, 6).result()
    a, b = (engine.session(1) for engine in (stick, host))
    for word in (261, 280, 7):
        np.testing.assert_array_equal(a.step(np.array([word])), b.step(np.array([word])))
    names = {weights.name for weights in stick.weights()}
    assert {"0 qkv", "0 wo", "0 w1 w3", "0 w2", "classifier"} <= names
    assert host.weights() == []
    assert host.usage().calls == 0
    with pytest.raises(EngineError, match="257 stories at once, 1 to 256"):
        stick.session(257)


@pytest.mark.parametrize("name", ["matmul", "blocks"])
def test_weights_that_come_with_every_call_are_bytes_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOCKCORAL", "1")
    engine = open_engine(name, Model("tiny", random_checkpoint(TINY), TOKENIZER), "CORAL")
    stats, before = Device["CORAL"].chip.stats, engine.usage()
    monkeypatch.setattr(stats, "streamed_bytes", stats.streamed_bytes + 1000)
    assert engine.usage().since(before) == Usage(to_chip_bytes=1000)


def test_files_that_are_not_there(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORIES_DIR", str(tmp_path))
    with pytest.raises(StoriesError, match=r"there is no checkpoint .*stories260K.bin.*STORIES_DIR"):
        load_model()
    content = (data / "stories" / "stories260K.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="cut short"):
        load_model(tmp_path / "cut.bin")
    (tmp_path / "m.bin").write_bytes(content)
    with pytest.raises(StoriesError, match="no tokenizer of 512 words"):
        load_model(tmp_path / "m.bin")
    with pytest.raises(TokenizerError, match="32000 words, but the model has a vocabulary of 512"):
        load_model(tmp_path / "m.bin", data / "stories" / "tokenizer32000.bin")
    model = load_model(tmp_path / "m.bin", data / "stories" / "tok512.bin")
    with pytest.raises(StoriesError, match="no engine 'fast'"):
        open_engine("fast", model)


@pytest.fixture
def shelf(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a server that has the shelf's files; nothing else is at hand but an empty home."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("STORIES_DIR", str(tmp_path))

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(data / "stories")))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_models_by_address_and_by_name(
    shelf: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    url = f"{shelf}/stories260K.bin"
    with pytest.raises(FetchError, match="expected is abc"):
        load_model(url, sha256="abc")
    monkeypatch.setitem(TOKENIZERS, 512, f"{shelf}/tok512.bin")
    model = load_model(url)
    assert model.name == "stories260K"
    assert len(model.tokenizer) == model.checkpoint.config.vocabulary == 512
    said = capsys.readouterr().err
    digest = said.split("sha256 ")[1][:64]
    assert "tok512.bin" in said
    assert load_model(url, sha256=digest).checkpoint.config == model.checkpoint.config
    assert capsys.readouterr().err == ""  # nothing came again
    with pytest.raises(FetchError, match=f"sha256 {digest}, expected is {'0' * 64}"):
        load_model(url, sha256="0" * 64)
    monkeypatch.setitem(PUBLIC, "stories15M", url)
    assert load_model("stories15M", sha256=digest).checkpoint.config == model.checkpoint.config
    with pytest.raises(FetchError, match=r"not what was asked for, nothing is kept: .*not a llama2.c checkpoint"):
        load_model(f"{shelf}/tok512.bin")
    with pytest.raises(FetchError, match="404"):
        load_model(f"{shelf}/stories15M.bin")
    with pytest.raises(FetchError, match="names no file"):
        load_model(f"{shelf}/")
    with pytest.raises(StoriesError, match="there is no checkpoint stories16M"):
        load_model("stories16M")


def test_the_sha256_of_a_file(data: Path) -> None:
    with pytest.raises(FetchError, match=r"stories260K.bin has the sha256 [0-9a-f]{64}, expected is 00"):
        load_model(data / "stories" / "stories260K.bin", sha256="00")


def test_quality_is_what_the_words_say() -> None:
    engine = CountingEngine(vocabulary=300, context=400)
    stories = [[1, *range(261, 290)], [1, 5, 6]]
    together = predictions(engine, stories, 2)
    apart = predictions(engine, stories, 1)
    for a, b, story in zip(together, apart, stories, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.shape == (len(story) - 1, 300)
    q = quality("x", together, together, stories)
    surprise = 0.0
    for logits, story in zip(together, stories, strict=True):
        for row, word in zip(logits.astype(float), story[1:], strict=True):
            surprise -= math.log(math.exp(row[word]) / sum(map(math.exp, row)))
    assert q.predictions == 31
    assert q.perplexity == pytest.approx(math.exp(surprise / 31))
    assert q.agreement == 1
    assert q.late_predictions == 0
    long = [[1] + [261] * 299]
    logits = predictions(engine, long, 1)
    assert quality("x", logits, [-a for a in logits], long).late_predictions == 300 - 256
    assert quality("x", logits, [-a for a in logits], long).agreement < 0.1


def greedy(engine: Any, model: Model, texts: list[str], words: int) -> list[str]:
    how = Sampling(temperature=0, words=words)
    prompts = [model.tokenizer.encode(text) for text in texts]
    stories = Stories(engine.session(len(texts)), model.tokenizer, prompts, how, model.checkpoint.config.context)
    grown = [""] * len(texts)
    while not stories.done:
        for row, text in stories.advance():
            grown[row] += text
    return grown


def in_step(a: Engine, b: Engine, words: int = 256) -> list[int]:
    """The likeliest words, from BOS on; both engines' logits are the same bytes at every call."""
    one, other, ids = a.session(1), b.session(1), []
    while len(ids) < words:
        np.testing.assert_array_equal(one.logits(), other.logits(), err_msg=f"after {len(ids)} words")
        ids.append(int(one.logits()[0].argmax()))
        for session in (one, other):
            session.step(np.array(ids[-1:]))
    return ids


BEGINNING = "Once upon a time, there was a little girl named Lily. She loved to play outside in the"
"""Of the published story of stories260K at temperature 0."""


@pytest.mark.slow
def test_stories260k_on_the_stick_and_on_the_host(stories260k: Model, stick260k: Any) -> None:
    """256 words: every logit, and the float model's text is the published kind."""
    ids = in_step(stick260k, open_engine("matmul", stories260k, "CPU"))
    text = stories260k.tokenizer.decode(ids)
    assert text.startswith(BEGINNING)
    assert len(text) > 500
    (floats,) = greedy(open_engine("float", stories260k, "CPU"), stories260k, [""], 256)
    assert floats.startswith(BEGINNING)


@pytest.mark.slow
@pytest.mark.parametrize("bold", ["0", "1"])
def test_stories260k_in_one_program_per_token(
    stories260k: Model, monkeypatch: pytest.MonkeyPatch, bold: str, fresh_stick: None
) -> None:
    """256 words, both forms: codes of the result, keys and values at every call, and every logit."""
    monkeypatch.setenv("MOCKCORAL", "1")
    monkeypatch.setenv("CORAL_BOLD", bold)
    chip, bits = (open_engine(name, stories260k, "CORAL") for name in ("chip", "bits"))
    assert chip.form.keep == chip.form.loop == (bold == "1")
    chip.check = True
    assert stories260k.tokenizer.decode(in_step(chip, bits)).startswith("Once upon a time, there was a little girl")


@pytest.mark.slow
def test_batch_of_32_is_32_single_runs(stories260k: Model, stick260k: Any) -> None:
    who = ["girl", "boy", "cat", "big dog", "bird", "fish that could sing", "bear", "frog"]
    texts = [
        f"{day}, there was a {one}" for day in ("Once upon a time", "One day", "In the park", "At night") for one in who
    ]
    together = greedy(stick260k, stories260k, texts, 32)
    assert len(set(together)) > 20
    assert together == [greedy(stick260k, stories260k, [text], 32)[0] for text in texts]


@pytest.mark.slow
def test_quality_of_stories260k(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than 3,000 predictions; also positions from 256 on."""
    path = data / "stories" / "stories260K.bin"
    names = ["float", "matmul"]
    evaluate(names, checkpoint=path, tokenizer=None, device=None, stories=12, length=512, as_json=True)
    found = {entry["engine"]: entry for entry in json.loads(capsys.readouterr().out)["engines"]}
    base, codes = found["float"], found["matmul"]
    assert base["predictions"] >= 3000
    assert codes["perplexity"] < 1.05 * base["perplexity"]
    assert codes["agreement"] > 0.9
    assert codes["late_predictions"] > 300
    assert codes["late_perplexity"] < 1.1 * base["late_perplexity"]


def test_written_stories_are_the_longest(stories260k: Model) -> None:
    found = written(stories260k.checkpoint, 1, 24)
    assert len(found) == 1
    assert found[0][0] == 1
    assert len(found[0]) == 24


def test_a_whole_token_on_the_chip_and_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOCKCORAL", "1")
    model = Model("tiny", random_checkpoint(TINY), TOKENIZER)
    stick, bits = (open_engine(name, model, "CORAL") for name in ("chip", "bits"))
    both = Both(stick, CountingEngine())
    assert ids_of(both, [[261, 262]], 3) == ids_of(bits, [[261, 262]], 3)
    assert both.usage().calls == stick.usage().calls >= 4
    assert {weights.name for weights in both.weights()} >= {"0 qkv", "classifier"}
    assert both.session(3).rows == 3
    assert both.weights()[0].name == "layer 0 wo"
    assert both.session_bytes(3) == 3000
    assert bits.weights() == []
    with pytest.raises(StoriesError, match="'bits' computes the same"):
        open_engine("chip", model, "CPU")
