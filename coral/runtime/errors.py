"""Errors of the runtime."""

from coral import CoralError


class RuntimeFault(CoralError):
    """A layer, array or use that the runtime refuses; the message has place, value and limit."""


class PlacementError(CoralError):
    """Parameters that do not even fit an empty chip."""
