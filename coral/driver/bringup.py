"""Everything that has to be written before a stick computes, and before it is left: two tables. Source: docs/usb.md.

Google's driver, register by register and in its order, except that a running stick is never reset through its port.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from coral.driver.errors import DriverError
from coral.driver.registers import RUN_CONTROLS, TILE_RUN_CONTROLS, Registers, field

CLOCKS: dict[str, dict[str, int]] = {
    "max": {"gcb_clkdiv": 0, "axi_clk_125m": 0, "usb8051_clk_250m": 0},
    "std": {"gcb_clkdiv": 1, "axi_clk_125m": 1, "usb8051_clk_250m": 0},
    "medium": {"gcb_clkdiv": 2, "axi_clk_125m": 1, "usb8051_clk_250m": 0},
    "low": {"gcb_clkdiv": 3, "axi_clk_125m": 1, "usb8051_clk_250m": 1},
}
CLOCK_HZ = {"max": 500_000_000, "std": 250_000_000, "medium": 125_000_000, "low": 63_000_000}
OUTFEED_CHUNK_BYTES = {"super": 1024, "high": 256}
ALL_TILES = 0x7F
SLEEP, AWAKE, RUN, HALT = 3, 2, 1, 2
GATED, UNGATED = 1, 2


def clock_name(clock: str | None) -> str:
    """``clock``, or CORAL_CLOCK, or "std"; raises DriverError with the names that exist."""
    name = clock or os.environ.get("CORAL_CLOCK") or "std"
    if name not in CLOCKS:
        raise DriverError(f"clock {name!r} is unknown, choose one of {', '.join(CLOCKS)} (argument or CORAL_CLOCK)")
    return name


@dataclass(frozen=True)
class Step:
    """One line of a table. ``read``: for information. ``write``: ``value``. ``modify``: ``fields``. ``poll``: until
    the register, or its field ``name``, is ``value``."""

    action: Literal["read", "write", "modify", "poll"]
    register: str
    value: int = 0
    fields: tuple[tuple[str, int], ...] = ()
    name: str | None = None


def _read(register: str) -> Step:
    return Step("read", register)


def _write(register: str, value: int) -> Step:
    return Step("write", register, value)


def _modify(register: str, **fields: int) -> Step:
    return Step("modify", register, fields=tuple(fields.items()))


def _poll(register: str, value: int, name: str | None = None) -> Step:
    return Step("poll", register, value, name=name)


def _tiles() -> list[Step]:
    # Writes to tileconfig0 and to tile registers are not ordered; only reading it back makes sure of the selection.
    return [_write("tileconfig0", ALL_TILES), _poll("tileconfig0", ALL_TILES)]


def _run_controls(value: int) -> list[Step]:
    return [
        *(_write(f"{unit}RunControl", value) for unit in RUN_CONTROLS),
        *_tiles(),
        *(_write(f"{unit}RunControl", value) for unit in TILE_RUN_CONTROLS),
    ]


_TOP_LEVEL = [f"top_level_int_{i}_control" for i in range(4)]


def wake_steps(clock: str, speed: str) -> list[Step]:
    """From reset to a chip that waits for instructions; ``speed`` is "high" or "super"."""
    return [
        _modify("scu_ctrl_3", force_sleep=AWAKE, **CLOCKS[clock]),
        _poll("scu_ctrl_3", 0, "cur_pwr_state"),
        _poll("scalarCoreRunControl", 0),
        _write("idleRegister", 1),
        *_tiles(),
        _write("deepSleep", 0x1E02),
        _modify("scu_ctrl_2", gated_gcb=GATED),
        _read("omc0_00"),
        _write("descr_ep", 0xF0),
        _write("multi_bo_ep", 0),
        _write("outfeed_chunk_length", OUTFEED_CHUNK_BYTES[speed] // 8),
        *_run_controls(RUN),
        _write("fatal_err_int_control", 1),
        *(_write(name, 1) for name in _TOP_LEVEL),
        _modify("omc0_d4", thm_warn_en=1),
        _modify("rambist_ctrl_1", int_status=0, int_mask=0),
        _modify("scu_ctr_7", pll_lock_failure=0, usb_sel_failure=0, boot_failure_mask=0),
        _write("slv_abm_en", 1),
        _write("mst_abm_en", 1),
        _write("slv_err_resp_isr_mask", 3),
        _write("mst_err_resp_isr_mask", 3),
        _modify("omc0_d8", sd_en=1),
    ]


def close_steps() -> list[Step]:
    """Interrupts off, units halted; the chip's reset comes after."""
    return [
        *(_write(name, 0) for name in _TOP_LEVEL),
        _modify("omc0_d4", thm_warn_en=0),
        _modify("rambist_ctrl_1", int_mask=7),
        _modify("scu_ctr_7", boot_failure_mask=3),
        _write("slv_abm_en", 0),
        _write("mst_abm_en", 0),
        _write("slv_err_resp_isr_mask", 0),
        _write("mst_err_resp_isr_mask", 0),
        _modify("omc0_d8", sd_en=0),
        _write("fatal_err_int_control", 0),
        *_run_controls(HALT),
    ]


def perform(registers: Registers, steps: list[Step]) -> None:
    """Carries a table out; raises TransferFailed or BringUpFailed."""
    for step in steps:
        match step.action:
            case "read":
                registers.read(step.register)
            case "write":
                registers.write(step.register, step.value)
            case "modify":
                registers.modify(step.register, dict(step.fields))
            case "poll":
                registers.poll(step.register, step.value, field_name=step.name)


def sleep(registers: Registers) -> None:
    """Puts the core to sleep, which resets it, and clears the bulk credits; nothing to do if it sleeps."""
    value = registers.read("scu_ctrl_3")
    if field("scu_ctrl_3", "force_sleep", value) == SLEEP:
        return
    registers.write("scu_ctrl_3", value | SLEEP << 22)
    registers.poll("scu_ctrl_3", 2, field_name="cur_pwr_state")
    registers.write("gcbb_credit0", 0xF)
    registers.write("gcbb_credit0", 0)


def bring_up(registers: Registers, *, clock: str, speed: str) -> None:
    """The whole sequence, from any state of the chip to one that is reset and runs."""
    registers.modify("scu_ctrl_0", {"pcie_inact_phy_mode": 0, "usb_inact_phy_mode": 0})
    gated = field("scu_ctrl_2", "gated_gcb", registers.read("scu_ctrl_2")) == GATED
    if gated:
        registers.modify("scu_ctrl_2", {"gated_gcb": UNGATED})
    sleep(registers)
    perform(registers, wake_steps(clock, speed))


def shut_down(registers: Registers) -> None:
    """What Google's driver does before it leaves; an open does without."""
    perform(registers, close_steps())
    sleep(registers)
