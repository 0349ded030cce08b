"""The web server: the page, its data, OpenAI's interface, metrics and health. Source: docs/serve.md."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from coral import CoralError
from coral.apps.stories.api import Answer, RequestError, parse_request
from coral.apps.stories.api import Request as StoryRequest
from coral.apps.stories.scheduler import Busy, End, Job, Scheduler, Step
from coral.llm.checkpoint import shapes

MAX_BODY_BYTES = 1 << 20
MAX_ROWS = 256
TILE_ROWS = 2080
"""256-byte rows of a tile's wide memory."""
PING_SECONDS = 10.0


class Web:
    """Handlers around one scheduler. ``model``: its name outside; ``device``: what it runs on, in words."""

    def __init__(self, scheduler: Scheduler, model: str, device: str, clock_hz: int = 0) -> None:
        self.scheduler, self.model, self.device, self.clock_hz = scheduler, model, device, clock_hz
        self.page = resources.files("coral.apps.stories").joinpath("page.html").read_text()

    def app(self) -> Starlette:
        """The ASGI application."""
        get, post = ["GET"], ["POST"]
        completions = functools.partial(self.completions, chat=False)
        chat = functools.partial(self.completions, chat=True)
        return Starlette(
            routes=[
                Route("/", self.index, methods=get),
                Route("/health", self.health, methods=get),
                Route("/metrics", self.metrics, methods=get),
                Route("/api/state", self.state, methods=get),
                Route("/api/stories", _guarded(self.stories), methods=post),
                Route("/v1/models", self.models, methods=get),
                Route("/v1/models/{name:path}", _guarded(self.one_model), methods=get),
                Route("/v1/completions", _guarded(completions), methods=post),
                Route("/v1/chat/completions", _guarded(chat), methods=post),
            ]
        )

    async def index(self, _: Request) -> Response:
        """The page."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(self.page, headers={"content-security-policy": policy + "; img-src data:"})

    async def health(self, _: Request) -> Response:
        """200 while the stick answers, 503 with the reason otherwise."""
        problem = self.scheduler.problem
        body = {"status": "ok"} if not problem else {"status": "degraded", "reason": problem}
        return JSONResponse(body, 503 if problem else 200)

    async def state(self, _: Request) -> Response:
        """What the page shows beside the stories."""
        engine, (active, waiting) = self.scheduler.engine, self.scheduler.load()
        c = engine.config
        tiles: list[list[dict[str, Any]]] = [[] for _ in range(16)]
        for weights in await asyncio.to_thread(engine.weights):  # it may wait for the chip's call
            tiles[weights.tile].append({"name": weights.name, "row": weights.row, "rows": weights.rows})
        return JSONResponse(
            {
                "model": self.model,
                "engine": engine.name,
                "device": self.device,
                "clock_hz": self.clock_hz,
                "shape": {**vars(c), "parameters": parameters(c)},
                "active": active,
                "waiting": waiting,
                "problem": self.scheduler.problem,
                "rows": MAX_ROWS,
                "totals": vars(self.scheduler.totals),
                "speed": speed(list(self.scheduler.recent)),
                "tile_rows": TILE_ROWS,
                "tiles": tiles,
            }
        )

    async def metrics(self, _: Request) -> Response:
        """Prometheus' text form."""
        totals, usage = self.scheduler.totals, self.scheduler.engine.usage()
        active, waiting = self.scheduler.load()
        numbers = {f"coral_{name}_total": value for name, value in vars(totals).items()}
        numbers |= {
            "coral_usb_to_chip_bytes_total": usage.to_chip_bytes,
            "coral_usb_from_chip_bytes_total": usage.from_chip_bytes,
            "coral_chip_calls_total": usage.calls,
            "coral_chip_predicted_seconds_total": usage.predicted_seconds,
            "coral_requests_active": active,
            "coral_requests_waiting": waiting,
            "coral_healthy": int(not self.scheduler.problem),
        }
        kinds = ((name, "counter" if name.endswith("_total") else "gauge") for name in numbers)
        text = "".join(f"# TYPE {name} {kind}\n{name} {numbers[name]}\n" for name, kind in kinds)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def models(self, _: Request) -> Response:
        """OpenAI's list of models."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        """OpenAI's entry of one model."""
        name = request.path_params["name"]
        if name != self.model:
            raise RequestError(f"there is no model {name!r}, only {self.model!r}", status=404, code="model_not_found")
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "tinycoral"}

    async def completions(self, request: Request, *, chat: bool) -> Response:
        """OpenAI's completions, and those of a chat, which is its messages' texts and what follows them."""
        asked = await self._asked(request, chat=chat)
        running = Running(self.scheduler, asked, visitor_of(request, asked))
        answer = Answer(asked, self.model, self.scheduler.engine.name)
        if asked.stream:
            return _events(self._chunks(running, answer), running)
        texts, reasons = [""] * len(asked.prompts), []
        with running:
            async for event in running.until_gone(request):
                for row, text in event.texts if isinstance(event, Step) else ():
                    texts[row] += text
                reasons = event.reasons if isinstance(event, End) else reasons
        return JSONResponse(answer.whole(texts, reasons, running.words))

    async def _chunks(self, running: Running, answer: Answer) -> AsyncIterator[str]:
        try:
            for chunk in answer.begin():
                yield _data(chunk)
            async for event in running.events():
                if isinstance(event, End):
                    for row, reason in enumerate(event.reasons):
                        yield _data(answer.chunk(row, "", reason))
                elif event is None:
                    yield ": ping\n\n"
                else:
                    for row, text in event.texts:
                        yield _data(answer.chunk(row, text))
            if running.request.usage:
                yield _data(answer.last(running.words))
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _data(error.body())

    async def stories(self, request: Request) -> Response:
        """For the page: a completion request answered by one event per step, with what the step cost."""
        asked = await self._asked(request, chat=False)
        running = Running(self.scheduler, asked, visitor_of(request, asked))
        return _events(self._steps(running), running)

    async def _steps(self, running: Running) -> AsyncIterator[str]:
        try:
            yield _data({"prompt_words": [len(prompt) for prompt in running.request.prompts]})
            async for event in running.events():
                if event is None:
                    yield ": ping\n\n"
                elif isinstance(event, End):
                    yield _data({"ended": event.reasons, "words": running.words})
                else:
                    yield _data({"texts": event.texts, "words": event.words, "ms": round(1e3 * event.seconds, 2)})
        except RequestError as error:
            yield _data(error.body())

    async def _asked(self, request: Request, *, chat: bool) -> StoryRequest:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise RequestError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
        context = self.scheduler.engine.config.context
        return await asyncio.to_thread(
            parse_request, body, self.model, self.scheduler.tokenizer, context, MAX_ROWS, chat=chat
        )


class Running:
    """A request at the scheduler; leaving the ``with`` block, or the stream, takes it back."""

    def __init__(self, scheduler: Scheduler, request: StoryRequest, visitor: str) -> None:
        self.request, self.words, self._scheduler = request, 0, scheduler
        loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[Step | End]()

        def emit(event: Step | End) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._queue.put_nowait, event)

        self._job = Job(visitor, request.prompts, request.how, emit)
        self._ended = False
        scheduler.submit(self._job)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Nobody waits for the rest."""
        if not self._ended:
            self._scheduler.cancel(self._job)

    async def events(self, pause: float = PING_SECONDS) -> AsyncIterator[Step | End | None]:
        """Steps and the End; None when ``pause`` seconds brought nothing. RequestError if the engine gave up."""
        while not self._ended:
            try:
                event = await asyncio.wait_for(self._queue.get(), pause)
            except TimeoutError:
                yield None
                continue
            if isinstance(event, End):
                self._ended = True
                if event.error:
                    raise RequestError(event.error, status=503, code="engine_error")
            else:
                self.words += event.words
            yield event

    async def until_gone(self, request: Request) -> AsyncIterator[Step | End]:
        """Steps and the End, as long as the client is there; ClientDisconnect when he is not."""
        async for event in self.events(0.5):
            if await request.is_disconnected():
                raise ClientDisconnect
            if event is not None:
                yield event


def _events(parts: AsyncIterator[str], running: Running) -> Response:
    async def guarded() -> AsyncIterator[str]:
        with running:
            async for part in parts:
                yield part

    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    leave = BackgroundTask(running.leave)  # a stream that never began is not left by its generator
    return StreamingResponse(guarded(), media_type="text/event-stream", headers=headers, background=leave)


def _data(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def _guarded(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler, its errors as HTTP answers."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except Busy as error:
            refusal = RequestError(str(error), status=503, code="busy")
            return JSONResponse(refusal.body(), 503, {"retry-after": str(error.retry_after)})
        except RequestError as error:
            return JSONResponse(error.body(), error.status, {"retry-after": "5"} if error.status == 503 else None)
        except ClientDisconnect:
            return Response(status_code=499)
        except CoralError as error:
            return JSONResponse(RequestError(str(error)).body(), 400)

    return guarded


def visitor_of(request: Request, asked: StoryRequest) -> str:
    """Who shares a turn: the request's ``user``, else its key or page, else its address."""
    key = request.headers.get("x-visitor") or request.headers.get("authorization")
    return asked.user or (key or "")[:200] or (request.client.host if request.client else "")


def parameters(config: Any) -> int:
    """Weights of the model."""
    return sum(map(math.prod, shapes(config).values())) + (0 if config.tied else config.vocabulary * config.dim)


def speed(steps: list[Step]) -> dict[str, float]:
    """Of the latest steps: words per second measured here, and predicted for a stick: the chip's part as predicted, the
    host's as it was here. Per step: milliseconds of both parts; per word: bytes over USB. Empty before the first."""
    words, seconds = sum(step.words for step in steps), sum(step.seconds for step in steps)
    if not words:
        return {}
    chip, here, sent, received, calls = (
        sum(getattr(step.usage, name) for step in steps)
        for name in ("predicted_seconds", "chip_seconds", "to_chip_bytes", "from_chip_bytes", "calls")
    )
    found = {"measured": words / seconds, "step_ms": 1e3 * seconds / len(steps), "rows": words / len(steps)}
    if calls:
        host = max(seconds - here, 0.0)
        found |= {
            "predicted": words / (chip + host),
            "predicted_chip_only": words / chip,
            "chip_ms_predicted": 1e3 * chip / len(steps),
            "host_ms": 1e3 * host / len(steps),
            "calls": calls / len(steps),
            "to_chip_bytes": sent / words,
            "from_chip_bytes": received / words,
        }
    return found
