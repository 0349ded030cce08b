"""``coral serve``: opens the engine, makes the server, says where it is. Source: docs/serve.md."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from typing import Any, Literal

from coral import CoralError

PORT = 8642


class ServeError(CoralError):
    """The server's packages are missing, or it cannot have its address."""


def require_packages() -> None:
    """:raises ServeError: starlette or uvicorn is missing; the message has the install line"""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ServeError(f"the server needs {' and '.join(missing)}: pip install 'tinycoral[serve]'")


def choose_device(device: Literal["usb", "sim", "cpu"] | None) -> None:
    """Sets tinygrad's default device before tinygrad is imported; None leaves it to DEV."""
    if device is not None:
        os.environ["DEV"] = "CPU" if device == "cpu" else "CORAL"
        os.environ["MOCKCORAL"] = str(int(device == "sim"))


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    engine: str = "matmul",
    device: Literal["usb", "sim", "cpu"] | None = None,
    checkpoint: str | Path | None = None,
    tokenizer: Path | None = None,
    sha256: str = "",
    warm: tuple[int, ...] = (1,),
) -> None:
    """Serves until it is interrupted. ``warm``: numbers of stories at once that are compiled before.

    :raises ServeError: see there; StoriesError, CheckpointError, TokenizerError: wrong files; errors of the device
    """
    require_packages()
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise ServeError(f"cannot listen at {host}:{port} ({error.strerror}); another one: --port") from None
    choose_device(device)
    import uvicorn
    from rich.console import Console

    from coral.apps.stories.engines import Both, load_model, open_engine, where

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    model = load_model(checkpoint, tokenizer, sha256)
    with console.status("opening the device, quantising, compiling"):
        opened = open_engine(engine, model)
        if engine in ("chip", "bits"):
            opened = Both(opened, open_engine("matmul", model))
        for rows in warm:
            opened.session(rows).step(_first_words(rows))
    place = where()
    console.print(f"{model.name}, engine {engine}, on {place}")
    console.print(f"http://{host}:{listening.getsockname()[1]}/   OpenAI's interface: /v1   Ctrl-C ends it")
    scheduler, app = application(opened, model, place)
    try:
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3)
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        scheduler.close()


def application(engine: Any, model: Any, place: str, limits: Any = None) -> tuple[Any, Any]:
    """(scheduler, ASGI application) of an engine. ServeError as in ``serve``."""
    require_packages()
    from coral.apps.stories.scheduler import Scheduler
    from coral.apps.stories.web import Web

    scheduler = Scheduler(engine, model.tokenizer, limits)
    return scheduler, Web(scheduler, model.name, place).app()


def _first_words(rows: int) -> Any:
    import numpy as np

    return np.full(rows, 1)
