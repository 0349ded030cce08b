"""Which forms of a decoder a stick was seen to do, by a report of ``coral selftest``. Source: docs/transformer.md."""

from __future__ import annotations

import json
import os
from pathlib import Path

from coral import CoralError
from coral.codegen.errors import ShapeError
from coral.codegen.transformer import Form, Transformer
from coral.codegen.transformer.plan import Plan

BOLD_VARIABLE = "CORAL_BOLD"
"""1: every bold form, whatever a report says; the process's simulated stick then does them. 0: none."""
REPORT_VARIABLE = "CORAL_SELFTEST_REPORT"
REPORT = "coral-selftest-usb.json"
"""Where ``coral selftest`` writes by default."""
AHEAD_VARIABLE, AHEAD_STEP = "CORAL_AHEAD", "instructions-ahead"
STEPS = {"keep": "decoder-kept", "loop": "decoder-looped"}


class ReportError(CoralError):
    """A file that is no report of ``coral selftest``; the message names it."""


def confirmed(report: Path | None = None, *, simulated: bool = False) -> dict[str, bool]:
    """For every field of ``Form`` that relies on what no program of Google's shows: whether a stick has done it.

    ``$CORAL_BOLD``, if set, decides. ``report``: default ``$CORAL_SELFTEST_REPORT`` or the file in the current folder;
    without one, and for the ``simulated`` stick, nothing is confirmed.
    :raises ReportError: it is not a report; another CORAL_BOLD than 0 or 1
    """
    wanted = os.environ.get(BOLD_VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise ReportError(f"{BOLD_VARIABLE} is {wanted!r}, it must be 0 or 1")
    if wanted or simulated:
        return dict.fromkeys(STEPS, wanted == "1")
    status = statuses(report)
    return {field: status.get(step) == "ok" for field, step in STEPS.items()}


def ahead_confirmed(report: Path | None = None, *, simulated: bool = False) -> bool:
    """Whether a program's instructions may go to a stick before its inputs are known.

    ``$CORAL_AHEAD``, if set, decides; the ``simulated`` stick does it; else as ``confirmed``. ReportError.
    """
    wanted = os.environ.get(AHEAD_VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise ReportError(f"{AHEAD_VARIABLE} is {wanted!r}, it must be 0 or 1")
    return wanted == "1" if wanted else simulated or statuses(report).get(AHEAD_STEP) == "ok"


def statuses(report: Path | None = None) -> dict[str, str]:
    """Step and status of a report of a stick on USB; empty without a report, and for one of a simulated stick."""
    path = report or Path(os.environ.get(REPORT_VARIABLE) or REPORT)
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        real = content["kind"] == "usb"
        found = {str(step["step"]): str(step["status"]) for step in content["steps"]}
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        raise ReportError(f"{path} is not a report of `coral selftest` ({error}); run it again or remove it") from None
    return found if real else {}


def confirmed_form(
    model: Transformer, *, logits: bool = False, report: Path | None = None, simulated: bool = False
) -> Form:
    """The fastest form of a model that relies on nothing but what is ``confirmed``; arguments and errors as there."""
    flags = confirmed(report, simulated=simulated)
    if flags["loop"]:
        form = Form(logits=logits, **flags)
        try:
            Plan(model, form)
            return form
        except ShapeError:
            flags["loop"] = False
    return Form(logits=logits, **flags)
