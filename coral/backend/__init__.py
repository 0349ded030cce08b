"""The tinygrad device CORAL. Importing this package puts kernel selection and fusion in place; it opens no device.

``DEV=CORAL`` needs none of these names: tinygrad finds the device through ``coral._hook``. Source: docs/backend.md.
"""

from coral.backend import fusion, selection, switches
from coral.backend.counters import Stats, reset_stats, stats
from coral.backend.device import CORALDevice
from coral.backend.errors import BackendError, DeviceUnavailable, HostCompilerMissing

selection_off = switches.selection_off
selection.install()
fusion.install()

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
