"""Errors of the runtime."""

from coral import CoralError
from coral.codegen.errors import ShapeError


class RuntimeFault(CoralError):
    """A layer, array or use that the runtime refuses; the message has place, value and limit."""


class PlacementError(ShapeError):
    """Parameters that do not even fit an empty chip."""
