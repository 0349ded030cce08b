"""What a user can switch: in the environment, at any time. Source: docs/backend.md, "What a user sees"."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

HOST_ONLY = "host-only"
"""``Target.indices`` of a renderer that must not select: part of tinygrad's cache key, and it travels to workers."""

_times_off = 0


def _is_set(name: str, default: str) -> bool:
    return (os.environ.get(name) or default) != "0"


def enabled() -> bool:
    """Whether kernels may go to the chip: not inside :func:`selection_off`, nor with CORAL_SELECT=0."""
    return not _times_off and _is_set("CORAL_SELECT", "1")


def fusion_enabled() -> bool:
    """Whether several layers may become one program: not with CORAL_FUSE=0."""
    return _is_set("CORAL_FUSE", "1")


def debug() -> bool:
    """Whether decisions are printed: CORAL_DEBUG=1."""
    return _is_set("CORAL_DEBUG", "0")


@contextmanager
def selection_off() -> Iterator[None]:
    """Inside, kernels that are compiled or fetched run on the host; a TinyJit keeps what it has captured."""
    global _times_off
    _times_off += 1
    try:
        yield
    finally:
        _times_off -= 1
