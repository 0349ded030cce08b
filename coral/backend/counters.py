"""What ran where: counters over all CORAL devices of this process."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass
class Stats:
    """Program executions since the last reset.

    ``chip_programs`` counts networks and linear layers sent to the chip (one each, whatever their batch),
    ``chip_layers`` the kernels that they stand for, ``chip_rows`` their images or rows, ``host_programs`` kernels run
    as host code, ``host_fallbacks`` selected layers computed on the host after all because their accumulator could
    leave int32, or the chip has no form for them (they count as host programs too), ``chip_seconds`` the time measured
    here from handing layers to the chip until their results were back.
    """

    chip_programs: int = 0
    chip_layers: int = 0
    chip_rows: int = 0
    host_programs: int = 0
    host_fallbacks: int = 0
    chip_seconds: float = 0.0


counters = Stats()


def stats() -> Stats:
    """A snapshot of the counters."""
    return replace(counters)


def reset_stats() -> None:
    """Sets every counter to zero."""
    counters.__dict__.update(vars(Stats()))
