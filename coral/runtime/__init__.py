"""Weights resident on the tiles, and calls of the layers and networks that use them. See docs/runtime.md."""

from coral.runtime.errors import PlacementError, RuntimeFault
from coral.runtime.linear import LinearSpec
from coral.runtime.placement import Footprint, Placement, Region
from coral.runtime.resident import Stats
from coral.runtime.runtime import Runtime

__all__ = ["Footprint", "LinearSpec", "Placement", "PlacementError", "Region", "Runtime", "RuntimeFault", "Stats"]
