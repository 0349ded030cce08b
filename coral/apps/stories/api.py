"""The shape of OpenAI's completion requests and answers; everything from outside is checked here.

Source: docs/serve.md, OpenAI's interface.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coral import CoralError
from coral.llm.story import Sampling, SamplingError
from coral.llm.tokenizer import BOS, Tokenizer

DEFAULT_WORDS = 256


class RequestError(CoralError):
    """A request that is refused: HTTP status, the parameter and code as OpenAI has them."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Request:
    """A checked request: one row per prompt and choice."""

    chat: bool
    texts: list[str]
    prompts: list[list[int]]
    how: Sampling
    stream: bool
    usage: bool
    echo: bool
    user: str


NUMBERS = {"temperature": 1.0, "top_p": 1.0}
WITHOUT_EFFECT = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "logprobs": 0, "best_of": 1}
"""Parameters that are refused unless they are null or have these values."""


def parse_request(body: bytes, model: str, tokenizer: Tokenizer, context: int, rows: int, *, chat: bool) -> Request:
    """A completion or chat request for ``model``, at most ``rows`` stories. Raises RequestError."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise RequestError("the body must be a JSON object")
    if given.get("model", model) != model:
        message = f"there is no model {given['model']!r}, only {model!r}"
        raise RequestError(message, status=404, param="model", code="model_not_found")
    for name, harmless in WITHOUT_EFFECT.items():
        if given.get(name) not in (None, harmless, False) and not (name == "best_of" and given[name] == given.get("n")):
            raise RequestError(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
    choices = _integer(given, "n", 1, 1, rows)
    texts, prompts = _prompts(given, tokenizer, chat)
    if len(prompts) * choices > rows:
        raise RequestError(f"{len(prompts)} prompts times {choices} choices, at most {rows} together", param="n")
    for prompt in prompts:
        if len(prompt) + 1 >= context:
            message = f"the prompt has {len(prompt) + 1} words with the story's begin, the context is {context}"
            raise RequestError(message, param="prompt", code="context_length_exceeded")
    repeated = [k for k in range(len(prompts)) for _ in range(choices)]
    options = given.get("stream_options") or {}
    return Request(
        chat=chat,
        texts=[texts[k] for k in repeated],
        prompts=[prompts[k] for k in repeated],
        how=_sampling(given),
        stream=_flag(given, "stream"),
        usage=isinstance(options, dict) and bool(options.get("include_usage")),
        echo=_flag(given, "echo"),
        user=str(given.get("user") or "")[:100],
    )


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    if value not in (None, True, False):
        raise RequestError(f"{name} must be true or false", param=name)
    return bool(value)


def _integer(given: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}, it must be an integer from {low} to {high}", param=name)
    return value


def _sampling(given: Mapping[str, Any]) -> Sampling:
    values: dict[str, Any] = {}
    for name, default in NUMBERS.items():
        value = default if given.get(name) is None else given[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e9:
            raise RequestError(f"{name} must be a number, and a small one", param=name)
        values[name] = value
    stop = given.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise RequestError("stop must be a text or a list of texts", param="stop")
    name = "max_completion_tokens" if given.get("max_tokens") is None else "max_tokens"
    words = _integer(given, name, DEFAULT_WORDS, 1, 1 << 20)
    seed = _integer(given, "seed", secrets.randbits(32), 0, 2**63 - 1)
    try:
        return Sampling(**values, seed=seed, words=words, stop=tuple(stop))
    except SamplingError as error:
        raise RequestError(str(error), param=str(error).split(" ", 1)[0]) from None


def _prompts(given: Mapping[str, Any], tokenizer: Tokenizer, chat: bool) -> tuple[list[str], list[list[int]]]:
    """Texts and ids without BOS of all prompts. A chat is its messages' texts, one after the other."""
    if chat:
        text = _chat_text(given.get("messages"))
        return [text], [tokenizer.encode(text)]
    prompt = given.get("prompt", "")
    prompt = "" if prompt is None else prompt
    if isinstance(prompt, str):
        return [prompt], [tokenizer.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(text, str) for text in prompt):
            return prompt, [tokenizer.encode(text) for text in prompt]
        several = prompt if all(isinstance(part, list) for part in prompt) else [prompt]
        if all(_is_id(number, tokenizer) for ids in several for number in ids):
            lists = [ids[1:] if ids[:1] == [BOS] else list(ids) for ids in several]
            return [tokenizer.decode(ids) for ids in lists], lists
    message = f"prompt must be a text, a list of texts, ids of 0..{len(tokenizer) - 1}, or lists of ids"
    raise RequestError(message, param="prompt")


def _is_id(number: Any, tokenizer: Tokenizer) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(tokenizer)


def _chat_text(messages: Any) -> str:
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", param="messages")
    texts = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise RequestError("the content of every message must be text", param="messages")
        texts.append(content)
    return " ".join(texts)


class Answer:
    """Bodies of one answer: chunks of a stream, or all at once."""

    def __init__(self, request: Request, model: str, engine: str) -> None:
        self.request = request
        kind = "chat.completion" if request.chat else "text_completion"
        chunk = ".chunk" if request.chat and request.stream else ""
        self._head = {
            "id": ("chatcmpl-" if request.chat else "cmpl-") + secrets.token_hex(12),
            "object": kind + chunk,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"tinycoral-{engine}",
        }

    def _choice(self, index: int, text: str, reason: str | None, *, first: bool = False) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if not self.request.chat:
            return {**choice, "text": text}
        role = {"role": "assistant"} if first or not self.request.stream else {}
        content = {} if self.request.stream and reason else {"content": text}
        return {**choice, "delta" if self.request.stream else "message": {**role, **content}}

    def begin(self) -> list[dict[str, Any]]:
        """Chunks before the first word: roles of a chat, prompts to echo."""
        texts = self.request.texts if self.request.echo else [""] * len(self.request.texts)
        if not self.request.chat and not self.request.echo:
            return []
        return [{**self._head, "choices": [self._choice(k, text, None, first=True)]} for k, text in enumerate(texts)]

    def chunk(self, index: int, text: str, reason: str | None = None) -> dict[str, Any]:
        """One piece of a stream."""
        return {**self._head, "choices": [self._choice(index, text, reason)]}

    def usage(self, words: int) -> dict[str, Any]:
        """Counts, as they stand in answers."""
        prompt = sum(map(len, self.request.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": words, "total_tokens": prompt + words}

    def last(self, words: int) -> dict[str, Any]:
        """The chunk with nothing but counts."""
        return {**self._head, "choices": [], "usage": self.usage(words)}

    def whole(self, texts: list[str], reasons: list[str], words: int) -> dict[str, Any]:
        """The answer that is not a stream."""
        if self.request.echo:
            texts = [prompt + text for prompt, text in zip(self.request.texts, texts, strict=True)]
        choices = [self._choice(k, text, reasons[k]) for k, text in enumerate(texts)]
        return {**self._head, "choices": choices, "usage": self.usage(words)}
