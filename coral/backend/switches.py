"""What a user can switch: in the environment, at any time. Source: docs/backend.md, "What a user sees"."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HOST_ONLY = "host-only"
"""``Target.indices`` of a renderer that must not select: part of tinygrad's cache key, and it travels to workers."""


class _Nesting(threading.local):
    off = 0


_nesting = _Nesting()


def _is_set(name: str, default: str) -> bool:
    return (os.environ.get(name) or default) != "0"


def enabled() -> bool:
    """Whether kernels may go to the chip: not inside :func:`selection_off`, nor with CORAL_SELECT=0."""
    return not _nesting.off and _is_set("CORAL_SELECT", "1")


def fusion_enabled() -> bool:
    """Whether several layers may become one program: not with CORAL_FUSE=0."""
    return _is_set("CORAL_FUSE", "1")


def debug() -> bool:
    """Whether decisions are printed: CORAL_DEBUG=1."""
    return _is_set("CORAL_DEBUG", "0")


@contextmanager
def selection_off() -> Iterator[None]:
    """Inside, kernels that this thread compiles or fetches run on the host; a TinyJit keeps what it has captured."""
    _nesting.off += 1
    try:
        yield
    finally:
        _nesting.off -= 1
