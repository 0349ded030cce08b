"""What an op will do: its steps, output groups and addresses, worked out once for all tiles.

Source: docs/chip.md, section Op.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import isa
from coral.chip.layout import NARROW_BYTES, WIDE_ROWS
from coral.chip.op import NluLoadJob, OpJob
from coral.chip.plans import Plan
from coral.chip.timing import op_cycles
from coral.chip.walks import Addresses, Index, Nest, gates

ELEMENTS = {(0, 0, 0): 4, (0, 0, 7): 1, (0, 1, 0): 2, (0, 1, 6): 1, (1, 0, 0): 2, (1, 0, 6): 1, (1, 1, 0): 1}
"""Products per column and step, by (act16, par16, lane_off): four 8x8 multipliers, some of them switched off."""


@dataclass(frozen=True)
class Stage:
    """The arithmetic of an op: all that is needed to compute results once operands are found."""

    where: str
    kind: type[Any]
    act16: int
    par16: int
    in_zp: int
    w_zp: int
    zp_rows: bool
    acc_offset: int
    bias_en: int
    scale_en: int
    mult: float
    clamp_min: float
    clamp_max: float
    out_zp: int
    result_bytes: int
    nlu_odd: bool = False
    nlu_range_reduce: bool = False


class OpPlan(Plan):
    """Plan of 0x01, 0x02 and 0x03: steps grouped into visits (an accumulator at work) and output groups.

    A visit is a run of steps that goes to one accumulator without interruption; the visits of one group are its outer
    reduction loops, joined through the partial sums in wide memory.
    """

    job_class = OpJob
    coefficients: NDArray[np.int32]

    def __init__(self, instruction: Any, word: int) -> None:
        super().__init__(instruction, word)
        i = instruction
        counts = tuple(getattr(i, f"loop_cnt{k}") + 1 for k in range(8))
        self.nest = Nest(counts, i.loop_last_dim, i.loop_last_cnt, f"{self.where}, main loops", 0, i.opcode)
        self.gates = gates(i, (self.nest,))
        self.kind = type(i)
        self.measure_operands()
        self.form_groups(counts)
        self.place_results(counts)
        self.bind_walks()
        self.stage = self.arithmetic()
        self.steps = self.nest.steps
        channels = max(self.channels, self.channels_last)
        self.cycles = op_cycles(self.nest.steps, channels)

    def arithmetic(self) -> Stage:
        i = self.instruction
        return Stage(
            self.where, self.kind, i.act16, i.par16, i.in_zp, i.w_zp, bool(i.par_zp_rows), i.acc_offset, i.bias_en,
            i.scale_en, i.mult, i.clamp_min, i.clamp_max, i.out_zp, self.result_bytes, i.nlu_odd == 3,
            bool(i.nlu_range_reduce),
        )  # fmt: skip

    def measure_operands(self) -> None:
        i = self.instruction
        widths = (i.act16, i.par16, i.lane_off)
        if widths not in ELEMENTS:
            self.field_is("lane_off", *(lane for act, par, lane in ELEMENTS if (act, par) == widths[:2]))
        self.elements = 1 if self.kind is isa.OpMax else ELEMENTS[widths]
        self.x_bytes = self.elements * (1 + i.act16) if self.kind is isa.Op else 0
        self.w_bytes = self.elements * (1 + i.par16)
        self.field_is("acc_on", 1)
        self.field_is("nlu_odd", 0, 3)
        self.nlu, self.bias_en, self.scale_en = i.nlu_en, i.bias_en, i.scale_en
        self.require(i.out_zp < 1 << 8 * (1 + i.out16), f"out_zp = {i.out_zp} does not fit the result")
        self.require(self.nlu or not (i.nlu_range_reduce or i.nlu_odd), "nlu_range_reduce and nlu_odd need nlu_en")
        self.scaled = bool(i.bias_en or i.scale_en)
        self.scaling_rows = [k for k, on in enumerate((i.scale_en, i.bias_en, i.par_zp_rows)) if on]
        self.zp_rows: list[int] | None = None
        if i.par_zp_rows:
            first, last, step = i.zp_first_row, i.zp_last_row, i.zp_row_step
            self.require(
                first <= last < WIDE_ROWS and step > 0,
                f"zero-point rows {first}..{last} in steps of {step} do not exist",
            )
            self.zp_rows = list(range(first, last + 1, step))

    def form_groups(self, counts: tuple[int, ...]) -> None:
        """Visits, groups and the order in which the groups are complete."""
        i, nest = self.instruction, self.nest
        psum = i.walk("psum")
        reduced = [bool(i.reduce_mask >> k & 1) for k in range(8)]
        level = next((k for k in range(8) if counts[k] > 1 and not reduced[k]), 8)
        packed = math.prod(psum.counts[: psum.slot_level]) if psum.slot_stride and not i.reduce_mask else 1
        if packed > 1:
            visit_key = group_key = nest.full // packed
            if nest.kept is not None:
                self.field_is("loop_last_dim", 0)
        else:
            visit_key = nest.outer(nest.full, level)
            group_key = np.zeros(nest.steps, np.int64)
            for k in reversed(range(level, 8)):
                if not reduced[k]:
                    group_key = group_key * counts[k] + nest.index(k)
        starts = np.flatnonzero(np.r_[True, visit_key[1:] != visit_key[:-1]])
        self.visit_start = starts
        self.visit_end = np.r_[starts[1:], nest.steps]
        outer = [k for k in range(level, 8) if reduced[k] and counts[k] > 1 and i.reduce_mask]
        last = np.ones(len(starts), bool)
        for k in outer:
            last &= nest.index(k)[starts] == counts[k] - 1
        self.single_visit = not outer
        self.require(self.single_visit or not i.acc_init, "acc_init = 1, but other groups come between the sums of one")
        keys = group_key[starts]
        order = np.argsort(keys[last], kind="stable")
        rank = order[np.searchsorted(keys[last][order], keys)]
        self.previous_visit = np.full(len(starts), -1)
        by_group = np.argsort(rank, kind="stable")
        same = rank[by_group][1:] == rank[by_group][:-1]
        self.previous_visit[by_group[1:][same]] = by_group[:-1][same]
        self.groups = int(last.sum())
        self.group_end = self.visit_end[last]
        self.group_of_step = np.repeat(rank, self.visit_end - self.visit_start)
        self.group_size = np.bincount(self.group_of_step, minlength=self.groups)
        self.steps_by_group = np.argsort(self.group_of_step, kind="stable")
        self.group_first = np.r_[0, np.cumsum(self.group_size)]
        self.group_visit = np.flatnonzero(last)

    def place_results(self, counts: tuple[int, ...]) -> None:
        """Channels and output words of every group."""
        i, nest = self.instruction, self.nest
        self.result_bytes = 1 + i.out16
        self.iterations = counts[i.group_loop]
        self.iteration = nest.outer(nest.full, i.group_loop)
        self.group_iteration = self.iteration[self.visit_start[self.group_visit]]
        self.channels, self.channels_last = i.out_ch + 1, i.out_ch_last + 1
        last = self.group_iteration % self.iterations == self.iterations - 1
        self.group_channels = np.where(last, self.channels_last, self.channels)
        self.channels_min = int(self.group_channels.min())
        words = -(-self.group_channels * self.result_bytes // 4)
        self.columns = min(int(words.max()) * 4 // self.result_bytes, 64)
        self.out_start = np.r_[0, np.cumsum(words)]
        self.scaling_groups = int(self.iteration[-1]) + 1

    def bind_walks(self) -> None:
        i = self.instruction
        self.out = out = self.walk("out").within(NARROW_BYTES - 3, "narrow memory bytes")
        self.require(not (out.at(0) & 3).any(), "results at an address that is no multiple of 4")
        self.require(
            out.steps == int(self.out_start[-1]),
            f"{int(self.out_start[-1])} words are produced, but the out walk has {out.steps} steps",
        )
        self.sig_av = self.signal("sig_av", out)
        self.x: Addresses | None = None
        self.x_offset: Any = 0
        if self.x_bytes:
            self.x = self.bind_activations(self.operand("inp"))
        self.sig_par = self.signal("sig_par", self.walk("par"))
        self.par: Addresses | None = None
        self.bind_parameters()
        self.field_is("sig_psum_en", 0)
        self.psum: Index | None = None
        self.stores_psum = not i.acc_init and self.single_visit
        if not i.acc_init:
            address = self.operand("psum").within(4 * WIDE_ROWS, "64-byte units of wide memory").at(0)
            self.require(not (address & 3).any(), "partial sums at an address that is no whole row")
            self.psum, self.psum_rows = address, address[self.visit_start] >> 2

    def bind_parameters(self) -> None:
        par = self.operand("par").within(4 * WIDE_ROWS, "64-byte units of wide memory")
        self.require(int((par.at(0) & 3).max()) + self.w_bytes <= 4, "parameter operand across the end of a column")
        self.par = par

    def bind_activations(self, walk: Addresses) -> Addresses:
        walk.within(NARROW_BYTES - self.x_bytes + 1, "narrow memory bytes")
        self.x_aligned = self.x_bytes == 4 and not ((walk.at(0) & 3).any() or walk.walk.slot_stride & 3)
        return walk

    def x_addresses(self, phase: int) -> Index:
        """Narrow byte address of the activations of every step."""
        assert self.x is not None
        return self.x.at(phase) + self.x_offset

    def operand(self, name: str) -> Addresses:
        """A walk that makes one step per main-loop step."""
        walk = self.walk(name)
        self.require(
            walk.steps == self.nest.steps, f"walk {name} has {walk.steps} steps, the main loops have {self.nest.steps}"
        )
        return walk

    def spoilt_bytes(self, columns: NDArray[np.bool_], first: int, last: int) -> NDArray[np.bool_]:
        """Which result bytes ``[words, 4]`` of some groups belong to spoilt columns."""
        bytes_of_group = np.repeat(columns[first:last], self.result_bytes, axis=1)
        kept = np.arange(bytes_of_group.shape[1]) < 4 * np.diff(self.out_start[first : last + 1])[:, None]
        return bytes_of_group[kept].reshape(-1, 4)

    def visits_ending(self, start: int, end: int) -> Index:
        a, b = np.searchsorted(self.visit_end, (start, end), side="right")
        return np.arange(a, b)

    def distinct(self, start: int, end: int, phase: int) -> tuple[Index, Index]:
        """Distinct par addresses of some steps, and which of them every step uses; remembered."""
        key = (start, end, phase)
        found = self._distinct.get(key)
        if found is None:
            assert self.par is not None
            part = self.par.at(phase)[start:end]
            addresses = np.flatnonzero(np.bincount(part, minlength=1))
            place = np.zeros(int(addresses[-1]) + 1, np.int64)
            place[addresses] = np.arange(len(addresses))
            found = self._distinct[key] = addresses, place[part]
        return found

    @cached_property
    def _distinct(self) -> dict[tuple[int, int, int], tuple[Index, Index]]:
        return {}

    def safe_end(self, start: int, phase: int) -> int:
        """First step, from ``start`` on, that reads what an earlier one of these steps wrote."""
        if not self.x:
            return self.nest.steps
        if phase not in self._overlaps:
            self._overlaps[phase] = self.overlap(phase)
        overlap = self._overlaps[phase]
        return overlap.next(start) if overlap else self.nest.steps

    @cached_property
    def _overlaps(self) -> dict[int, Overlap | None]:
        return {}

    def overlap(self, phase: int) -> Overlap | None:
        """Whether results land on activations that the same op reads later."""
        words = self.out.at(0) >> 2
        written = np.full(NARROW_BYTES // 4, self.nest.steps, np.int64)
        ends = np.repeat(self.group_end, np.diff(self.out_start))
        written[words[::-1]] = ends[::-1]
        steps, address = np.arange(self.nest.steps), self.x_addresses(phase)
        producer = np.minimum(written[address >> 2], written[address + self.x_bytes - 1 >> 2])
        late = np.flatnonzero(producer <= steps)
        return Overlap(late, producer[late], self.nest.steps) if len(late) else None


class Overlap:
    """Steps of an op that read results of earlier steps of the same op."""

    def __init__(self, readers: Index, producers: Index, steps: int) -> None:
        self.readers, self.producers, self.steps = readers, producers, steps

    def next(self, start: int) -> int:
        """First reader, from ``start`` on, of a result that is produced after ``start`` steps."""
        conflict = self.readers[(self.readers > start) & (self.producers > start)]
        return int(conflict[0]) if len(conflict) else self.steps


class NluLoad(Plan):
    """Plan of 0x19."""

    job_class = NluLoadJob

    def __init__(self, instruction: Any, word: int) -> None:
        super().__init__(instruction, word)
        self.field_is("table_mode", 3)
        value = np.float32
        self.coefficients = np.array([[getattr(instruction, f"c{s}_{k}") for k in range(5)] for s in range(8)], value)
        self.breakpoints = np.array([getattr(instruction, f"brk{k}") for k in range(7)], value)
        self.require(bool((self.breakpoints[1:] >= self.breakpoints[:-1]).all()), "the breakpoints do not ascend")
        self.table = self
        self.cycles = 1
