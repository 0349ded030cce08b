"""One engine, many visitors: who is next, what waits, what a fault of the stick means. Source: docs/serve.md, Turns."""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from coral import CoralError
from coral.driver.errors import DriverError
from coral.llm.engine import Engine, Session, Usage
from coral.llm.story import Sampling, Stories
from coral.llm.tokenizer import Tokenizer

RETRIES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Seconds before each new try of a step that the stick did not finish."""
MOST_PAID = 2.0
"""A step costs its visitor at most so many times what such steps took lately, the first (compiled) one nothing: nobody
pays for a recovery or a compiler."""
PATIENCE = 10
"""Seconds for which no request is taken after a step that failed at every try."""


class Busy(CoralError):
    """No place for another request; ``retry_after`` seconds are a guess at when there will be one."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Limits:
    """``active`` stories are being written in turns, ``waiting`` more requests are kept, all others refused.

    ``turn_seconds``: how long one request has the engine; ``memory_bytes``: for keys and values of all that are active.
    """

    active: int = 16
    waiting: int = 48
    turn_seconds: float = 0.25
    memory_bytes: int = 2 << 30
    kept: int = 4


@dataclass(frozen=True)
class Step:
    """New text of some rows, words chosen in this step, seconds it took, and what it cost the stick."""

    texts: list[tuple[int, str]]
    words: int
    seconds: float
    usage: Usage


@dataclass(frozen=True)
class End:
    """Why each row ended ("stop", "length"), or the error that ended them all."""

    reasons: list[str]
    error: str = ""


@dataclass(eq=False)
class Job:
    """A request: prompts (ids without BOS) of all its rows, sampling, who asks, and where results go.

    ``emit`` is called on the engine's thread with Steps and one End.
    """

    visitor: str
    prompts: list[list[int]]
    how: Sampling
    emit: Callable[[Step | End], None]
    cancelled: bool = False
    stories: Stories | None = None
    spent: float = 0.0


@dataclass
class Totals:
    """Counted since the start."""

    words: int = 0
    prompt_words: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    faults: int = 0
    reused_words: int = 0


@dataclass
class Visitor:
    """Engine time that a visitor has had, relative to the others, and what he still wants."""

    spent: float
    jobs: list[Job] = field(default_factory=list)


class Scheduler:
    """Runs jobs on an engine in a thread of its own, in fair turns: next is the visitor who has had the least of the
    engine's time, and of his requests the one that has had the least."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, limits: Limits | None = None) -> None:
        self.engine, self.tokenizer, self.limits = engine, tokenizer, limits or Limits()
        self.totals, self.problem = Totals(), ""
        self.recent: deque[Step] = deque(maxlen=64)
        self._visitors: dict[str, Visitor] = {}
        self._kept: deque[tuple[list[int], Session]] = deque(maxlen=self.limits.kept)
        self._clock = self._refuse_until = 0.0
        self._late: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=15))
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Takes a request. Busy when there is no place, or the stick does not answer."""
        with self._changed:
            queued = sum(len(visitor.jobs) for visitor in self._visitors.values())
            if queued >= self.limits.active + self.limits.waiting:
                self.totals.refused += 1
                raise Busy(f"{queued} requests are being written or wait, no more are taken", self._wait())
            if self._closed or time.monotonic() < self._refuse_until:
                self.totals.refused += 1
                raise Busy(self.problem or "the server is stopping", PATIENCE)
            if self.engine.session_bytes(len(job.prompts)) > self.limits.memory_bytes:
                raise CoralError(f"{len(job.prompts)} stories at once need more than {self.limits.memory_bytes} bytes")
            self._visitors.setdefault(job.visitor, Visitor(self._clock)).jobs.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """The visitor left: his request gets no more turns, and no End."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread after its step; requests that were not finished get an End."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(30)

    def load(self) -> tuple[int, int]:
        """Requests (being written, waiting)."""
        with self._changed:
            jobs = self._jobs()
            active = sum(job.stories is not None for job in jobs)
            return active, len(jobs) - active

    def _jobs(self) -> list[Job]:
        return [job for visitor in self._visitors.values() for job in visitor.jobs]

    def _wait(self) -> int:
        """Seconds until one of the active requests should be finished, from the speed of late."""
        recent = list(self.recent)
        pace = sum(step.seconds for step in recent) / max(len(recent), 1)
        left = [
            job.how.words - min(len(r.ids) - r.prompt for r in job.stories.rows) for job in self._jobs() if job.stories
        ]
        return min(max(1, math.ceil(min(left, default=1) * pace * len(left))), 120)

    def _work(self) -> None:
        while (job := self._awaited()) is not None:
            self._turn(job)
        for job in self._jobs():
            job.emit(End([], "the server is stopping"))

    def _awaited(self) -> Job | None:
        """The next request, when there is one; None at the end."""
        with self._changed:
            while not self._closed:
                self._sweep()
                job = self._next()
                if job is not None:
                    return job
                self._changed.wait()
        return None

    def _sweep(self) -> None:
        """Forgets requests whose visitors left, and visitors without requests."""
        for name, visitor in list(self._visitors.items()):
            gone = [job for job in visitor.jobs if job.cancelled]
            self.totals.cancelled += len(gone)
            visitor.jobs = [job for job in visitor.jobs if not job.cancelled]
            if not visitor.jobs:
                del self._visitors[name]

    def _next(self) -> Job | None:
        jobs = [(visitor.spent, job.spent, job) for visitor in self._visitors.values() for job in visitor.jobs]
        sizes = [self.engine.session_bytes(len(job.prompts)) for *_, job in jobs if job.stories is not None]
        for spent, _, job in sorted(jobs, key=lambda entry: entry[:2]):
            needed = self.engine.session_bytes(len(job.prompts))
            if (
                job.stories
                or not sizes
                or (len(sizes) < self.limits.active and sum(sizes) + needed <= self.limits.memory_bytes)
            ):
                self._clock = max(self._clock, spent)
                return job
        return None

    def _turn(self, job: Job) -> None:
        begin, paid = time.perf_counter(), 0.0
        try:
            if job.stories is None:
                job.stories = self._begin(job)
                paid = time.perf_counter() - begin
            while not job.cancelled and not job.stories.done and time.perf_counter() - begin < self.limits.turn_seconds:
                paid += self._step(job, job.stories)
            if job.stories.done:
                self._end(job, End([row.ended for row in job.stories.rows]))
        except Exception as error:
            if not isinstance(error, CoralError):
                traceback.print_exc(file=sys.stderr)
            self._end(job, End([], str(error) or repr(error)))
        with self._changed:
            job.spent += paid
            if job.visitor in self._visitors:
                self._visitors[job.visitor].spent += paid

    def _begin(self, job: Job) -> Stories:
        """New stories; a single one goes on in a session that knows the begin of its prompt."""
        if len(job.prompts) > 1:
            session = self.engine.session(len(job.prompts))
        else:
            (prompt,) = job.prompts
            known = [_common(ids, prompt) for ids, _ in self._kept]
            session = self.engine.session(1) if max(known, default=0) < 1 else self._resumed(known, len(prompt))
        self.totals.prompt_words += sum(map(len, job.prompts))
        return Stories(session, self.tokenizer, job.prompts, job.how, self.engine.config.context)

    def _resumed(self, known: list[int], prompt: int) -> Session:
        best = max(range(len(known)), key=known.__getitem__)
        _, session = self._kept[best]
        del self._kept[best]
        words = min(known[best], prompt - 1)  # the last word of the prompt is fed again: its logits are needed
        session.rewind(1 + words)
        self.totals.reused_words += words
        return session

    def _price(self, rows: int, seconds: float) -> float:
        late = self._late[rows]
        paid = min(seconds, MOST_PAID * median(late)) if late else 0.0
        late.append(seconds)
        return paid

    def _step(self, job: Job, stories: Stories) -> float:
        """One step; the seconds that its visitor pays for it."""
        begin, before = time.perf_counter(), self.engine.usage()
        count = sum(len(row.ids) for row in stories.rows)
        texts = self._advanced(job, stories)
        words = sum(len(row.ids) for row in stories.rows) - count
        step = Step(texts, words, time.perf_counter() - begin, self.engine.usage().since(before))
        self.totals.words += words
        if words:
            self.recent.append(step)
        job.emit(step)
        return self._price(len(stories.rows), step.seconds)

    def _advanced(self, job: Job, stories: Stories) -> list[tuple[int, str]]:
        """``advance``, again and again while the stick recovers."""
        for pause in RETRIES:
            try:
                texts = stories.advance()
                self.problem = ""
                return texts
            except DriverError as error:
                self.totals.faults += 1
                self.problem = f"the stick does not answer ({error})"
                if job.cancelled or self._closed:
                    break
                time.sleep(pause)
        self._refuse_until = time.monotonic() + PATIENCE
        raise CoralError(self.problem)

    def _end(self, job: Job, end: End) -> None:
        with self._changed:
            visitor = self._visitors.get(job.visitor)
            if visitor and job in visitor.jobs:
                visitor.jobs.remove(job)
        if end.error:
            self.totals.failed += 1
        else:
            self.totals.finished += 1
            if job.stories and len(job.stories.rows) == 1:
                (row,) = job.stories.rows
                self._kept.append((row.ids[: job.stories.session.position - 1], job.stories.session))
        job.emit(end)


def _common(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
