"""tinycoral: tinygrad on the Google Coral USB Accelerator.

Importing this package is cheap on purpose: a ``.pth`` line imports it at every interpreter start, so nothing here may
import tinygrad or numpy. The public functions are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["CoralError", "__version__", "compile", "export_tflite", "load", "quantize"]


class CoralError(Exception):
    """Base of every error that this package raises on purpose; the message says what to do."""


_LAZY = {
    "compile": ("coral.apps.compile", "compile_model"),
    "export_tflite": ("coral.apps.export", "export_tflite"),
    "load": ("coral.apps.model", "load"),
    "quantize": ("coral.quantize.api", "quantize"),
}

if TYPE_CHECKING:
    from coral.apps.compile import compile_model as compile
    from coral.apps.export import export_tflite as export_tflite
    from coral.apps.model import load as load
    from coral.quantize.api import quantize as quantize


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module 'coral' has no attribute {name!r}") from None
    return getattr(importlib.import_module(module), attribute)
