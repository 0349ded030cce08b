"""Runs test functions of layer 1 in a process that has umockdev's library preloaded; started by conftest.py.

Protocol on stdin and stdout: pickled (module, function, arguments) there, pickled (outcome, text) back.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever tests print goes to stderr
    import pytest

    from coral.stick.usbfs import preload_library
    from driver.bed import LibusbBed

    preload_library()  # looks for files in /dev, which umockdev answers with a socket that it never closes
    while True:
        try:
            module, name, arguments = pickle.load(requests)
        except EOFError:
            return
        outcome, text = "passed", ""
        try:
            bed = LibusbBed()
            try:
                getattr(importlib.import_module(module), name)(bed=bed, **arguments)
            finally:
                bed.close()
        except pytest.skip.Exception as skipped:
            outcome, text = "skipped", str(skipped)
        except BaseException as error:
            outcome, text = "failed", "".join(traceback.TracebackException.from_exception(error).format())
        pickle.dump((outcome, text), answers)
        answers.flush()


if __name__ == "__main__":
    main()
