"""Lets stock tinygrad find ``DEV=CORAL``: a finder that answers ``tinygrad.runtime.ops_coral`` with a file of ours.

A ``.pth`` line imports this module at every interpreter start, so it imports nothing but the standard library.
Source: docs/backend.md, "Being found".
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location

_HERE = os.path.dirname(os.path.abspath(__file__))
_MODULES = {"tinygrad.runtime.ops_coral": "ops_coral.py"}


class Finder:
    """Meta-path finder for the modules tinygrad expects inside its own package."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of one of our stand-in modules, or None for every other name."""
        file = _MODULES.get(name)
        return spec_from_file_location(name, os.path.join(_HERE, file)) if file else None


# Last in line: a tinygrad that ships its own module of that name wins.
if Finder not in sys.meta_path:
    sys.meta_path.append(Finder)
