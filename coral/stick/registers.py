"""The stick's control and status registers: one table, one register file that obeys it. Source: docs/usb.md.

Offsets below 0x40000 are 32-bit registers of the USB bridge and keep their value over a chip reset; the others are
64-bit registers of the chip and fall back to their reset values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

CHIP_REGISTERS = 0x40000


@dataclass(frozen=True)
class Register:
    """``read_only``, ``one_clears`` and ``zero_clears`` are bit masks; ``effect`` names what a write sets off."""

    name: str
    offset: int
    reset: int = 0
    read_only: int = 0
    one_clears: int = 0
    zero_clears: int = 0
    effect: str = ""


# fmt: off
RUN_CONTROLS = {
    "scalarCore": 0x44018, "avDataPop": 0x44158, "parameterPop": 0x44198, "infeed": 0x441D8, "outfeed": 0x44218,
    "op": 0x400C0, "narrowToWide": 0x40150, "wideToNarrow": 0x40110,
    "meshBus0": 0x40250, "meshBus1": 0x40298, "meshBus2": 0x402E0, "meshBus3": 0x40328,
    "ringBusConsumer0": 0x40190, "ringBusConsumer1": 0x401D0, "ringBusProducer": 0x40210,
}
# fmt: on

ALL = (1 << 64) - 1
AWAKE, ASLEEP, STATUS_BITS = 0x404, 0x65C, 0xFFF

TABLE: tuple[Register, ...] = (
    Register("scu_ctrl_0", 0x1A30C, 0xF0959),
    Register("scu_ctrl_2", 0x1A314, 0x190000),
    Register("scu_ctrl_3", 0x1A318, 0x80050410, read_only=STATUS_BITS, effect="power"),
    Register("scu_ctr_7", 0x1A33C, 0xC003F, one_clears=3 << 16),
    Register("gcbb_credit0", 0x1907C, effect="credit"),
    Register("omc0_00", 0x1A000),
    Register("omc0_d4", 0x1A0D4, 1),
    Register("omc0_d8", 0x1A0D8),
    Register("omc0_dc", 0x1A0DC, 0x3FF0000, read_only=0xC3FF << 16, one_clears=3 << 28, effect="thermal"),
    Register("rambist_ctrl_1", 0x1A704, 0x70007F, one_clears=7 << 16),
    Register("slv_abm_en", 0x1A500),
    Register("slv_wr_err_resp", 0x1A540, read_only=ALL),
    Register("slv_rd_err_resp", 0x1A544, read_only=ALL),
    Register("slv_err_resp_isr_mask", 0x1A558),
    Register("mst_abm_en", 0x1A600),
    Register("mst_wr_err_resp", 0x1A640, read_only=ALL),
    Register("mst_rd_err_resp", 0x1A644, read_only=ALL),
    Register("mst_err_resp_isr_mask", 0x1A658),
    Register("deepSleep", 0x40020),
    Register("currentPc", 0x44028, read_only=ALL),
    Register("scalarCoreRunStatus", 0x44258, read_only=ALL),
    Register("hib_error_status", 0x486F0),
    Register("hib_first_error_status", 0x48700),
    Register("hib_first_error_timestamp", 0x48708),
    Register("page_fault_address", 0x48738),
    Register("tileconfig0", 0x48788),
    Register("idleRegister", 0x4A000, 0x9000),
    Register("outfeed_chunk_length", 0x4C058),
    Register("fatal_err_int_control", 0x4C060),
    Register("fatal_err_int_status", 0x4C068, zero_clears=ALL),
    Register("descr_ep", 0x4C148),
    Register("ep_status_credit", 0x4C150, read_only=ALL),
    Register("multi_bo_ep", 0x4C160),
    *(Register(f"top_level_int_{i}_control", 0x4C070 + 16 * i) for i in range(4)),
    *(Register(f"top_level_int_{i}_status", 0x4C078 + 16 * i, zero_clears=ALL) for i in range(4)),
    *(Register(f"{unit}RunControl", offset, effect="run") for unit, offset in RUN_CONTROLS.items()),
)


class Access(NamedTuple):
    """One request as the host made it: ``operation`` is R32, W32, R64 or W64; ``name`` is the offset if unknown."""

    operation: str
    name: str
    offset: int
    value: int


class RegisterFile:
    """Values of all registers; unknown offsets keep what was written, as the bridge does."""

    def __init__(self, table: tuple[Register, ...] = TABLE) -> None:
        self._by_offset = {register.offset: register for register in table}
        self._by_name = {register.name: register for register in table}
        self.values = {register.offset: register.reset for register in table}
        self.log: deque[Access] = deque(maxlen=4096)
        self.live: dict[str, Callable[[], int]] = {"scalarCoreRunStatus": self._run_status}
        self.effects: dict[str, Callable[[int, int], None]] = {"thermal": self._thermal}

    def reset_chip(self) -> None:
        """All 64-bit registers to their reset values."""
        for offset in [offset for offset in self.values if offset >= CHIP_REGISTERS]:
            register = self._by_offset.get(offset)
            self.values[offset] = register.reset if register else 0

    def __getitem__(self, name: str) -> int:
        return self.values[self._by_name[name].offset]

    def __setitem__(self, name: str, value: int) -> None:
        self.values[self._by_name[name].offset] = value

    def read(self, offset: int, bits: int) -> int:
        """Value as the host sees it; logged."""
        register = self._by_offset.get(offset)
        name = register.name if register else hex(offset)
        value = self.live[name]() if name in self.live else self.values.get(offset, 0)
        self.log.append(Access(f"R{bits}", name, offset, value))
        return value

    def write(self, offset: int, bits: int, value: int) -> None:
        """Applies masks, then the register's effect with (old, new) value; logged."""
        register = self._by_offset.get(offset) or Register(hex(offset), offset)
        self.log.append(Access(f"W{bits}", register.name, offset, value))
        old = self.values.get(offset, 0)
        keep = register.read_only
        new = old & keep | value & ~keep & ~(register.one_clears | register.zero_clears)
        new |= old & register.one_clears & ~value | old & register.zero_clears & value
        self.values[offset] = new
        if register.effect in self.effects:
            self.effects[register.effect](old, new)

    def _run_status(self) -> int:
        return {1: 1, 2: 4}.get(self["scalarCoreRunControl"], 0)

    def _thermal(self, old: int, new: int) -> None:
        cleared = (old & ~new) >> 28 & 3
        self["omc0_dc"] = new & ~(cleared << 30)
