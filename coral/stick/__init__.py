"""A simulated USB stick around a chip, and its in-process attachment. See docs/stick.md."""

from coral.stick.bus import StickBus
from coral.stick.clock import Clock, VirtualClock, WallClock
from coral.stick.core import SoftwareStick, Strictness
from coral.stick.dfu import boots, stand_in_firmware
from coral.stick.errors import (
    Broken,
    DeadlockViolation,
    DmaMismatch,
    Gone,
    Later,
    NotStarted,
    ProtocolError,
    Short,
    Stall,
    StickError,
)
from coral.stick.faults import Effect, Fault, FaultPlan, Kind
from coral.stick.host import HostController, HostTransfer

# fmt: off
__all__ = [
    "Broken", "Clock", "DeadlockViolation", "DmaMismatch", "Effect", "Fault", "FaultPlan", "Gone", "HostController",
    "HostTransfer", "Kind", "Later", "NotStarted", "ProtocolError", "Short", "SoftwareStick", "Stall", "StickBus",
    "StickError", "Strictness", "VirtualClock", "WallClock", "boots", "stand_in_firmware",
]
