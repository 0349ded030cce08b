"""The server in this process, on a free port, around an engine that needs no arithmetic."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from story_models import CountingEngine

from coral import devices
from coral.apps.stories.engines import Model, load_model, open_engine
from coral.apps.stories.scheduler import Limits, Scheduler
from coral.apps.stories.serve import application
from coral.llm.tokenizer import Tokenizer

WORDS = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % b for b in range(256))]
TOKENIZER = Tokenizer([*WORDS, b" ", *(b" word%d" % n for n in range(40))], [0.0] * 300)


@dataclass
class Server:
    """Where it listens, and its insides."""

    url: str
    scheduler: Scheduler
    engine: Any


@contextmanager
def served(
    engine: Any, tokenizer: Tokenizer, limits: Limits | None = None, name: str = "test", device: str = "a test"
) -> Iterator[Server]:
    """A running server."""
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is absent: tests of the server are SKIPPED")
    pytest.importorskip("starlette", reason="starlette is absent: tests of the server are SKIPPED")
    scheduler, app = application(engine, Model(name, None, tokenizer), device, limits)  # type: ignore[arg-type]
    config = uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < until
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Server(f"http://127.0.0.1:{port}", scheduler, engine)
    finally:
        server.should_exit = True
        thread.join(10)
        scheduler.close()


class PacedEngine(CountingEngine):
    """A CountingEngine whose steps take a while."""

    def __init__(self, seconds: float = 0.0, **shape: int) -> None:
        super().__init__(**shape)
        self.seconds = seconds
        self.table[:, :3] = -100

    def usage(self) -> Any:
        time.sleep(self.seconds / 2)
        return super().usage()


@pytest.fixture(scope="session")
def stories260k(data: Path) -> Model:
    """The model on the shelf."""
    return load_model(data / "stories" / "stories260K.bin")


@pytest.fixture(scope="session")
def stick260k(stories260k: Model) -> Any:
    """Its matrix products on the simulated stick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOCKCORAL", "1")
        return open_engine("matmul", stories260k, "CORAL")


@pytest.fixture
def fresh_stick() -> Iterator[None]:
    """The process's simulated stick is made anew, as CORAL_BOLD says, and so is the next test's."""
    renew_stick()
    yield
    renew_stick()


def renew_stick() -> None:
    """The next use of the simulated stick finds another one."""
    devices.close_all()
    devices._simulated_bus.cache_clear()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers: ``serve(engine=None, limits=None)``."""
    with ExitStack() as stack:

        def start(engine: Any = None, limits: Limits | None = None, tokenizer: Tokenizer = TOKENIZER) -> Server:
            return stack.enter_context(served(engine or PacedEngine(), tokenizer, limits))

        yield start
