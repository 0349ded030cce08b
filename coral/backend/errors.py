"""Errors of the tinygrad device. All are sentences a user can act on."""

from __future__ import annotations

from coral import CoralError


class BackendError(CoralError):
    """Base of the backend's errors."""


class DeviceUnavailable(BackendError):
    """No stick could be opened, or the simulated stick was not asked for."""


class HostCompilerMissing(BackendError):
    """This machine has no renderer that can build host kernels."""
