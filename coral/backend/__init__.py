"""The tinygrad device CORAL. Importing this package puts kernel selection in place; it opens no device.

``DEV=CORAL`` needs none of these names: tinygrad finds the device through ``coral._hook``. Source: docs/backend.md.
"""

from coral.backend import selection
from coral.backend.counters import Stats, reset_stats, stats
from coral.backend.device import CORALDevice
from coral.backend.errors import BackendError, DeviceUnavailable, HostCompilerMissing

selection_off = selection.selection_off
selection.install()

__all__ = [
    "BackendError",
    "CORALDevice",
    "DeviceUnavailable",
    "HostCompilerMissing",
    "Stats",
    "reset_stats",
    "selection_off",
    "stats",
]
