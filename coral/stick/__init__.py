"""A simulated USB stick around a chip, and its in-process attachment. See docs/stick.md."""

from coral.stick.bus import StickBus
from coral.stick.clock import VirtualClock
from coral.stick.core import SoftwareStick, Strictness
from coral.stick.dfu import boots, stand_in_firmware
from coral.stick.errors import DeadlockViolation, DmaMismatch, Gone, NotStarted, ProtocolError, Stall, StickError
from coral.stick.faults import Effect, Fault, FaultPlan, Kind
from coral.stick.host import HostController, HostTransfer

# fmt: off
__all__ = [
    "DeadlockViolation", "DmaMismatch", "Effect", "Fault", "FaultPlan", "Gone", "HostController", "HostTransfer",
    "Kind", "NotStarted", "ProtocolError", "SoftwareStick", "Stall", "StickBus", "StickError", "Strictness",
    "VirtualClock", "boots", "stand_in_firmware",
]
