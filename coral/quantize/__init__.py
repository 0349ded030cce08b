"""Post-training quantisation: ``coral.quantize(model, calibration_inputs)``.

``coral.quantize`` is the name of this package and of the function that users call. Python stores an imported
subpackage as an attribute of its parent, which would hide the function, so the module itself can be called.
Nothing heavy is imported before the first call.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(
        self, model: Any, calibration_inputs: Any, *, report: bool = False, per_channel: bool | None = None
    ) -> Any:
        """Quantise a float tinygrad model; see :func:`coral.quantize.api.quantize`."""
        from coral.quantize.api import quantize

        return quantize(model, calibration_inputs, report=report, per_channel=per_channel)


sys.modules[__name__].__class__ = _CallableModule
