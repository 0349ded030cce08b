"""The steps of ``coral selftest``: each a small program with a question. See docs/selftest.md.

A step is a function with ``@step`` in one of ``MODULES``. Steps run in order of definition, bold ones after all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from coral.apps.probes.bench import Bench

MODULES = (
    "layers",
    "wire",
    "convolutions",
    "arithmetic",
    "unseen",
    "scalar_core",
    "memories",
    "decoder",
    "fields",
    "wedges",
)


@dataclass(frozen=True)
class Finding:
    """What a step found. ``assumed`` is the answer that the code relies on; empty: any answer will do."""

    answer: str
    assumed: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """ok, differs, or observed where nothing is relied on."""
        return "observed" if not self.assumed else "ok" if self.answer == self.assumed else "differs"


Run = Callable[[Bench], Finding]


@dataclass(frozen=True)
class Step:
    """``rows``: lines of docs/ASSUMPTIONS.md that the step settles; ``bold``: it does what no program is known to do, a
    stick may hang and the simulated chip may refuse."""

    name: str
    about: str
    run: Run
    rows: tuple[int, ...] = ()
    bold: bool = False


found: list[Step] = []


def step(*rows: int, bold: bool = False) -> Callable[[Run], Run]:
    """Makes a function a step: named like it, described by the first line of its docstring."""

    def register(run: Run) -> Run:
        about = (run.__doc__ or "").splitlines()[0]
        found.append(Step(run.__name__.replace("_", "-"), about, run, rows, bold))
        return run

    return register


def all_steps() -> list[Step]:
    """Every step, from harmless to bold."""
    for module in MODULES:
        import_module(f"{__name__}.{module}")
    return sorted(found, key=lambda step: step.bold)
