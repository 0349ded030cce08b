"""The registers that the driver touches, and access to them. Source: docs/usb.md.

Below 0x40000 registers are 32 bits wide (bridge, power, thermal), from there on 64 bits (chip, USB unit).
"""

from __future__ import annotations

from typing import Protocol

from coral.driver.errors import BringUpFailed, TransferFailed
from coral.driver.transport import Clock

# fmt: off
RUN_CONTROLS = {
    "scalarCore": 0x44018, "avDataPop": 0x44158, "parameterPop": 0x44198, "infeed": 0x441D8, "outfeed": 0x44218,
}
"""Of the scalar side, in the order in which they are started."""

TILE_RUN_CONTROLS = {
    "op": 0x400C0, "narrowToWide": 0x40150, "wideToNarrow": 0x40110,
    "meshBus0": 0x40250, "meshBus1": 0x40298, "meshBus2": 0x402E0, "meshBus3": 0x40328,
    "ringBusConsumer0": 0x40190, "ringBusConsumer1": 0x401D0, "ringBusProducer": 0x40210,
}
"""Of the tiles; tileconfig0 selects which tiles a write reaches."""

OFFSETS = {
    "scu_ctrl_0": 0x1A30C, "scu_ctrl_2": 0x1A314, "scu_ctrl_3": 0x1A318, "scu_ctr_7": 0x1A33C,
    "gcbb_credit0": 0x1907C, "rambist_ctrl_1": 0x1A704,
    "omc0_00": 0x1A000, "omc0_d4": 0x1A0D4, "omc0_d8": 0x1A0D8, "omc0_dc": 0x1A0DC,
    "slv_abm_en": 0x1A500, "mst_abm_en": 0x1A600,
    "slv_err_resp_isr_mask": 0x1A558, "mst_err_resp_isr_mask": 0x1A658,
    "deepSleep": 0x40020, "tileconfig0": 0x48788, "idleRegister": 0x4A000,
    "currentPc": 0x44028, "scalarCoreRunStatus": 0x44258, "Error_ScalarCore": 0x44260,
    "hib_error_status": 0x486F0, "hib_first_error_status": 0x48700,
    "outfeed_chunk_length": 0x4C058, "descr_ep": 0x4C148, "multi_bo_ep": 0x4C160,
    "fatal_err_int_control": 0x4C060, "fatal_err_int_status": 0x4C068,
    **{f"top_level_int_{i}_control": 0x4C070 + 16 * i for i in range(4)},
    **{f"top_level_int_{i}_status": 0x4C078 + 16 * i for i in range(4)},
    **{f"{unit}RunControl": offset for unit, offset in {**RUN_CONTROLS, **TILE_RUN_CONTROLS}.items()},
}

FIELDS: dict[str, dict[str, tuple[int, int]]] = {
    "scu_ctrl_0": {"pcie_inact_phy_mode": (8, 3), "usb_inact_phy_mode": (11, 3)},
    "scu_ctrl_2": {"gated_gcb": (18, 2)},
    "scu_ctrl_3": {
        "cur_pwr_state": (8, 2), "force_sleep": (22, 2),
        "gcb_clkdiv": (28, 2), "axi_clk_125m": (30, 1), "usb8051_clk_250m": (31, 1),
    },
    "scu_ctr_7": {"pll_lock_failure": (16, 1), "usb_sel_failure": (17, 1), "boot_failure_mask": (18, 2)},
    "omc0_d4": {"thm_warn_en": (31, 1)},
    "omc0_d8": {"sd_en": (31, 1)},
    "omc0_dc": {"data": (16, 10)},
    "rambist_ctrl_1": {"int_status": (16, 3), "int_mask": (20, 3)},
}
"""Bit fields as (lowest bit, width)."""
# fmt: on


def field(register: str, name: str, value: int) -> int:
    """Field ``name`` of a register's value."""
    low, width = FIELDS[register][name]
    return value >> low & (1 << width) - 1


class Control(Protocol):
    """The control pipe: see ``coral.driver.link.Link``."""

    @property
    def clock(self) -> Clock: ...
    def control_in(
        self, request_type: int, request: int, value: int, index: int, length: int, *, timeout_s: float = 1.0
    ) -> bytes: ...
    def control_out(self, request_type: int, request: int, value: int, index: int, data: bytes) -> None: ...


class Registers:
    """Registers by name over a control pipe; raises TransferFailed."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def read(self, name: str, *, timeout_s: float = 1.0) -> int:
        """Value of a register; a short answer is an error."""
        offset, size, request = self._address(name)
        data = self._control.control_in(0xC0, request, offset & 0xFFFF, offset >> 16, size, timeout_s=timeout_s)
        if len(data) != size:
            raise TransferFailed(f"reading register {name} gave {len(data)} bytes instead of {size}")
        return int.from_bytes(data, "little")

    def write(self, name: str, value: int) -> None:
        """Writes a whole register."""
        offset, size, request = self._address(name)
        self._control.control_out(0x40, request, offset & 0xFFFF, offset >> 16, value.to_bytes(size, "little"))

    def modify(self, name: str, fields: dict[str, int]) -> None:
        """Reads, changes the named fields, writes."""
        value = self.read(name)
        for field_name, new in fields.items():
            low, width = FIELDS[name][field_name]
            value = value & ~((1 << width) - 1 << low) | new << low
        self.write(name, value)

    def poll(self, name: str, want: int, *, field_name: str | None = None, timeout_s: float = 1.0) -> None:
        """Reads until the register, or one field of it, is ``want``; raises BringUpFailed after ``timeout_s``."""
        clock = self._control.clock
        deadline = clock.now() + timeout_s
        while True:
            value = self.read(name)
            if (field(name, field_name, value) if field_name else value) == want:
                return
            if clock.now() >= deadline:
                place = f"{name}.{field_name}" if field_name else name
                raise BringUpFailed(
                    f"register {place} did not become {want} within {timeout_s:g} s, it reads {value:#x}; unplug the "
                    "stick and plug it in again"
                )
            clock.sleep(0.001)

    @staticmethod
    def _address(name: str) -> tuple[int, int, int]:
        offset = OFFSETS[name]
        return (offset, 8, 0) if offset >= 0x40000 else (offset, 4, 1)
