"""OpenAI's interface by its official client and by hand, and everything that must be refused."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.stories.conftest import TOKENIZER, PacedEngine, Server
from coral import CoralError
from coral.apps.stories import serve as serve_module
from coral.apps.stories.api import RequestError, parse_request
from coral.apps.stories.scheduler import Limits
from coral.driver.errors import TransferFailed
from coral.llm.story import Sampling, Stories

Serve = Callable[..., Server]
REQUEST = {"prompt": " word1", "max_tokens": 12, "seed": 3}


def told(prompt: str, how: Sampling) -> str:
    """What the engine must write, without a server."""
    engine = PacedEngine(context=512)
    stories = Stories(engine.session(1), TOKENIZER, [TOKENIZER.encode(prompt)], how, engine.config.context)
    text = ""
    while not stories.done:
        text += "".join(new for _, new in stories.advance())
    return text


def post(server: Server, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
    """(status, headers, JSON) of one request."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=300)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, raw, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, json.loads(content) if content else None


def get(server: Server, path: str) -> tuple[int, str]:
    """(status, body)."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def opened(server: Server, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a completion request."""
    host, port = urlsplit(server.url).netloc.split(":")
    raw = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    return connection


def waited(condition: Callable[[], Any], seconds: float = 10) -> None:
    """Returns when the condition holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_official_client(serve: Serve) -> None:
    openai = pytest.importorskip("openai", reason="the openai client is absent: its test is SKIPPED")
    server = serve()
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["test"]
    assert client.models.retrieve("test").owned_by == "tinycoral"
    wanted = told(" word1", Sampling(temperature=1.0, seed=3, words=12))
    stream = client.completions.create(model="test", stream=True, stream_options={"include_usage": True}, **REQUEST)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == wanted
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 12
    assert len(chunks) > 8
    whole = client.completions.create(model="test", echo=True, n=2, **REQUEST)
    assert whole.choices[0].text == " word1" + wanted
    assert whole.choices[1].text != whole.choices[0].text
    assert whole.usage.completion_tokens == 24
    greedy = told("a b", Sampling(temperature=0, words=9))
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    chat = client.chat.completions.create(model="test", messages=messages, temperature=0, max_completion_tokens=9)
    assert chat.choices[0].message.content == greedy
    assert chat.choices[0].message.role == "assistant"
    parts = client.chat.completions.create(model="test", messages=messages, temperature=0, max_tokens=9, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == greedy
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9', only 'test'"):
        client.completions.create(model="gpt-9", **REQUEST)
    with pytest.raises(openai.BadRequestError, match="temperature is 3"):
        client.completions.create(model="test", **{**REQUEST, "temperature": 3})


REFUSED = [
    (b"{", 400, "not JSON"),
    (b"[" * 100000, 400, "not JSON"),
    ([], 400, "must be a JSON object"),
    ({"prompt": 5}, 400, "prompt must be"),
    ({"prompt": [300]}, 400, "0..299"),
    ({"prompt": [True]}, 400, "prompt must be"),
    ({"prompt": "x" * 100}, 400, "the prompt has 102 words with the story's begin, the context is 64"),
    ({"prompt": ["a"] * 257}, 400, "257 prompts times 1"),
    ({"n": 257}, 400, "n is 257"),
    ({"n": 2.5}, 400, "n is 2.5"),
    ({"temperature": "hot"}, 400, "temperature must be a number"),
    ({"temperature": 10**400}, 400, "temperature must be a number"),
    ({"temperature": -1}, 400, "0 to 2"),
    (b'{"temperature": NaN}', 400, "temperature is nan"),
    ({"top_p": 2}, 400, "top_p is 2"),
    ({"max_tokens": 0}, 400, "max_tokens is 0"),
    ({"seed": -1}, 400, "seed is -1"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop": ["a"] * 5}, 400, "up to 4"),
    ({"stop": 7}, 400, "stop must be"),
    ({"stream": "yes"}, 400, "stream must be true or false"),
    ({"logprobs": 3}, 400, "logprobs is not supported"),
    ({"best_of": 3}, 400, "best_of is not supported"),
    ({"model": "other"}, 404, "no model 'other'"),
    (b"x" * (1 << 21), 413, "more than 1048576 bytes"),
]


def test_refusals(serve: Serve) -> None:
    server = serve()
    for body, status, words in REFUSED:
        for path in ("/v1/completions", "/api/stories"):
            found, _, answer = post(server, path, body)
            assert found == status, words
            assert words in answer["error"]["message"]
            assert answer["error"]["type"] == "invalid_request_error"
    for messages in (None, [], [{"role": "user"}], [{"content": [{"image": 1}]}], "hello"):
        status, _, answer = post(server, "/v1/chat/completions", {"messages": messages})
        assert status == 400
        assert answer["error"]["param"] == "messages"
    assert server.engine.steps == 0


KEYS = st.sampled_from(["content", "text", "a"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(KEYS, parts, max_size=2),
    max_leaves=5,
)
FIELDS = [
    "model",
    "prompt",
    "messages",
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "stream",
    "echo",
    "user",
]


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES), st.booleans())
def test_whatever_comes_is_a_request_or_refused(body: dict[str, Any], chat: bool) -> None:
    with suppress(RequestError):
        request = parse_request(json.dumps(body).encode(), "test", TOKENIZER, 64, 256, chat=chat)
        assert len(request.prompts) == len(request.texts) <= 256


def test_addresses(serve: Serve) -> None:
    server = serve()
    assert get(server, "/nothing")[0] == 404
    assert get(server, "/v1/completions")[0] == 405
    assert get(server, "/v1/models/none")[0] == 404
    assert json.loads(get(server, "/health")[1]) == {"status": "ok"}
    assert "<!doctype html>" in get(server, "/")[1]
    post(server, "/v1/completions", REQUEST)
    waited(lambda: server.scheduler.totals.finished == 1)
    metrics = get(server, "/metrics")[1]
    assert "coral_words_total 12\n" in metrics
    assert f"coral_usb_to_chip_bytes_total {100 * server.engine.steps}\n" in metrics
    state = json.loads(get(server, "/api/state")[1])
    assert state["speed"]["to_chip_bytes"] == pytest.approx(100, rel=0.2)
    assert state["tiles"][2] == [{"name": "layer 0 wo", "row": 0, "rows": 20}]


def test_full_means_503_and_when_to_come_back(serve: Serve) -> None:
    server = serve(PacedEngine(0.02, context=512), Limits(active=1, waiting=1))
    first = [opened(server, {**REQUEST, "max_tokens": 100, "stream": True}) for _ in range(2)]
    waited(lambda: server.scheduler.load() == (1, 1))
    status, headers, answer = post(server, "/v1/completions", REQUEST)
    assert status == 503
    assert 1 <= int(headers["retry-after"]) <= 120
    assert answer["error"]["code"] == "busy"
    for stream in first:
        stream.close()
    waited(lambda: server.scheduler.load() == (0, 0))
    assert post(server, "/v1/completions", REQUEST)[0] == 200
    assert server.scheduler.totals.refused == 1


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_takes_no_more_turns(serve: Serve, stream: bool) -> None:
    server = serve(PacedEngine(0.01, context=4096))
    with opened(server, {**REQUEST, "max_tokens": 4000, "stream": stream}):
        waited(lambda: server.engine.steps > 5)
    waited(lambda: server.scheduler.totals.cancelled == 1)
    steps = server.engine.steps
    time.sleep(0.1)
    assert server.engine.steps <= steps + 1
    assert server.scheduler.load() == (0, 0)


def test_a_fault_in_a_story_does_not_show(serve: Serve) -> None:
    server = serve()
    server.engine.faults = [TransferFailed("pulled out")] * 3
    status, _, answer = post(server, "/v1/completions", REQUEST)
    assert status == 200
    assert answer["choices"][0]["text"] == told(" word1", Sampling(temperature=1.0, seed=3, words=12))
    assert server.scheduler.totals.faults == 3


def test_a_stick_that_does_not_come_back(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coral.apps.stories.scheduler.RETRIES", (0.0, 0.0))
    server = serve()
    server.engine.faults = [TransferFailed("pulled out")] * 2
    status, headers, answer = post(server, "/v1/completions", REQUEST)
    assert status == 503
    assert headers["retry-after"]
    assert "the stick does not answer (pulled out)" in answer["error"]["message"]
    assert get(server, "/health")[0] == 503
    assert post(server, "/v1/completions", REQUEST)[0] == 503
    server.scheduler._refuse_until = 0.0
    assert post(server, "/v1/completions", REQUEST)[0] == 200
    assert get(server, "/health")[0] == 200


def test_a_stream_that_fails_says_so(serve: Serve) -> None:
    server = serve()
    server.engine.faults = [ValueError("a bug")]
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps({**REQUEST, "stream": True}))
    assert b"a bug" in connection.getresponse().read()
    assert post(server, "/v1/completions", REQUEST)[0] == 200


def test_going_on_starts_where_the_texts_part(serve: Serve) -> None:
    server = serve(PacedEngine(context=512))
    first = post(server, "/v1/completions", {**REQUEST, "temperature": 0})[2]["choices"][0]["text"]
    steps = server.engine.steps
    text = " word1" + first[: len(first) // 2] + " word7"
    again = post(server, "/v1/completions", {"prompt": text, "temperature": 0, "max_tokens": 5})[2]
    assert server.scheduler.totals.reused_words > 0
    assert server.engine.steps - steps < len(TOKENIZER.encode(text)) + 4
    assert again["choices"][0]["text"] == told(text, Sampling(temperature=0, words=5))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(serve_module.ServeError, match=r"starlette and uvicorn: pip install 'tinycoral\[serve\]'"):
        serve_module.require_packages()
    assert issubclass(serve_module.ServeError, CoralError)


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(serve_module.ServeError, match=rf"cannot listen at 127.0.0.1:{port} .*--port"):
            serve_module.serve(port=port)
