"""One thread for numpy's matrix products.

The products here are small and many. OpenBLAS splits them over all cores and lets the threads wait for each other by
spinning, which costs four times their work on a busy machine. Where numpy's library has other names, nothing happens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np


@cache
def _library() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Functions that tell and set the number of threads."""
    for path in sorted((Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*")):
        library = ctypes.CDLL(str(path))
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", ""):
                names = [f"{prefix}_{verb}_num_threads{suffix}" for verb in ("get", "set")]
                if all(hasattr(library, name) for name in names):
                    return getattr(library, names[0]), getattr(library, names[1])
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrix products inside use one thread."""
    library = _library()
    if library is None:
        yield
        return
    threads = library[0]()
    library[1](1)
    try:
        yield
    finally:
        library[1](threads)
