"""Weights resident on the tiles, and calls of the layers that use them. See docs/runtime.md."""

from coral.runtime.placement import Placement, Region
from coral.runtime.runtime import LinearSpec, Runtime, RuntimeFault, Stats

__all__ = ["LinearSpec", "Placement", "Region", "Runtime", "RuntimeFault", "Stats"]
