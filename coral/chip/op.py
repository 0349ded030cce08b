"""The op unit: which operands meet in which accumulator, and where the results go.

A job does no arithmetic. It looks up the identifiers of its operands when the wait records allow, makes identifiers for
the results of every output group as it completes, and leaves a record from which ``coral.chip.nodes`` computes the
values of many groups, slices and tiles at once. Source: docs/chip.md, section Op.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import isa
from coral.chip.errors import Hazard, UnwrittenRead
from coral.chip.layout import (
    BIAS_ENTRY,
    LEVEL_FIXED,
    LEVEL_PENDING,
    NARROW_BYTES,
    PARTIAL,
    ROW_BYTES,
    SCALING_SLOT,
    UNWRITTEN,
    WIDE_ROWS,
)
from coral.chip.machine import BLOCKED, DONE, MORE, Ids, Job, Machine
from coral.chip.plans import COUNTER, Plan, done
from coral.chip.timing import op_cycles
from coral.chip.walks import Addresses, Index, Nest, gates

ELEMENTS = {
    (0, 0, 0): 4,
    (0, 0, 7): 1,
    (0, 1, 0): 2,
    (0, 1, 6): 1,
    (1, 0, 0): 2,
    (1, 0, 6): 1,
    (1, 1, 0): 1,
}
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


class OpRecord:
    """What one op did on one tile, in identifiers: enough to compute every output group."""

    def __init__(self, plan: OpPlan, tile: int, table: Any) -> None:
        self.plan, self.tile, self.table = plan, tile, table
        self.pieces: list[tuple[Ids, bool]] = []
        self.weights: list[NDArray[np.int32]] = []
        self.scales: dict[int, int] = {}
        self.spoilt: NDArray[np.bool_] | None = None
        self.out_base = np.zeros(plan.groups, np.int32)
        self.psum_base = np.zeros(plan.groups, np.int32) if plan.stores_psum else None

    def operands(self) -> tuple[Ids, Ids]:
        """Activation identifiers and weight indices of the steps so far, one row per step.

        Activations are ``[n]`` indices of aligned words if every operand is one, else ``[n, bytes]`` identifiers.
        """
        if len(self.pieces) > 1:
            whole = all(words for _, words in self.pieces)
            parts = [p if whole or not words else (p[:, None] * 4 + np.arange(4)) for p, words in self.pieces]
            self.pieces = [(np.concatenate(parts).astype(np.int32), whole)]
            self.weights = [np.concatenate(self.weights)]
        return self.pieces[0][0], self.weights[0]


class OpJob(Job):
    """One op on one tile."""

    plan: OpPlan

    def __init__(self, machine: Machine, plan: Plan, place: int) -> None:
        super().__init__(machine, plan, place)
        self.record: OpRecord | None = None
        self.groups = 0
        self.iteration = -1

    def begin(self) -> None:
        plan = self.plan
        self.x_phase = self.phase("inp", plan.x.toggles) if plan.x else 0
        self.par_phase = self.phase("par", plan.par.toggles) if plan.par else 0
        self.out = self.slot("out", plan.out) >> 2
        self.scaling_phase = self.phase("scaling", plan.scaling_groups & 1) if plan.scaled else 0

    def advance(self) -> int:
        plan, machine = self.plan, self.machine
        if self.record is None:
            table = machine.tables[self.place] if plan.nlu else None
            if plan.nlu and table is None:
                raise UnwrittenRead(f"{self.where} uses the non-linear unit, but no nlu_load filled its table")
            self.record = OpRecord(plan, self.place, table)
        while self.position < plan.nest.steps:
            start = self.position
            limit = min(self.limit(plan.gates, start), plan.nest.steps)
            if limit == start:
                return BLOCKED
            end = self.trim(start, min(limit, plan.safe_end(start, self.x_phase)))
            self.read(start, end)
            self.position = end
            words = self.finish_groups(start, end)
            if plan.scaled and (end == plan.nest.steps or plan.iteration[end] != self.iteration):
                machine.scaling[self.place].held = None
            machine.bump(self.place, COUNTER.PARAMETERS, done(plan.sig_par, start, end))
            machine.bump(self.place, COUNTER.PARTIAL_SUMS, done(plan.sig_psum, start, end))
            machine.bump(self.place, COUNTER.AVDATA, done(plan.sig_av, *words))
            if machine.rng is not None and end < plan.nest.steps:
                return MORE
        return DONE

    def read(self, start: int, end: int) -> None:
        """Look up the operands of some steps."""
        plan, machine, tile, record = self.plan, self.machine, self.place, self.record
        assert record is not None
        memory = machine.memory
        if plan.scaled or plan.zp_rows is not None:
            for iteration in range(int(plan.iteration[start]), int(plan.iteration[end - 1]) + 1):
                if iteration > self.iteration:
                    self.iteration = iteration
                    record.scales[iteration] = self.scaling(iteration)
        if plan.par is None:
            record.weights.append(plan.coefficients[start:end])
        else:
            addresses, inverse = plan.distinct(start, end, self.par_phase)
            rows = addresses >> 2
            memory.unread[tile, rows] = False
            ids = memory.wide[tile].reshape(WIDE_ROWS, 64, 4)[rows, : plan.columns]
            if plan.w_bytes < 4:
                lanes = (addresses & 3)[:, None, None] + np.arange(plan.w_bytes)
                ids = np.take_along_axis(ids, np.broadcast_to(lanes, (*ids.shape[:2], plan.w_bytes)), 2)
            if ids.min() <= 0:
                self.spoil(ids, addresses, plan.group_of_step[start:end], inverse)
            record.weights.append(machine.trace.weights.intern(ids)[inverse])
        if plan.x_bytes:
            record.pieces.append(self.activations(start, end))
        else:
            record.pieces.append((np.zeros(end - start, np.int32), True))
        if plan.psum is not None and not plan.single_visit:
            self.check_psums(start, end)

    def activations(self, start: int, end: int) -> tuple[Ids, bool]:
        plan, memory, tile = self.plan, self.machine.memory, self.place
        address = plan.x_addresses(self.x_phase)[start:end]
        if plan.x_aligned:
            ids = memory.narrow[tile, address >> 2]
            base = ids[:, 0]
            if base.min() > 0 and not (base & 3).any() and (ids == base[:, None] + np.arange(4)).all():
                return base >> 2, True
        else:
            ids = memory.narrow[tile].reshape(-1)[address[:, None] + np.arange(plan.x_bytes)]
        if ids.min() <= 0:
            self.miss(ids, address, start)
        return ids, False

    def miss(self, ids: Ids, address: Index, start: int) -> None:
        """Activation bytes that nobody wrote spoil the columns in which they meet anything but the zero point."""
        plan, record = self.plan, self.record
        assert record is not None
        bad = np.flatnonzero((ids <= 0).any(axis=1))
        cases, which = np.unique(np.c_[record.weights[-1][bad], ids[bad] <= 0], axis=0, return_inverse=True)
        hits = np.stack([self.meets(int(case[0]), case[1:] != 0) for case in cases])[which.reshape(-1)]
        hopeless = hits[:, : plan.channels_min].all(axis=1) | (ids[bad] < 0).any(axis=1)
        if hopeless.any():
            step = int(bad[hopeless.argmax()])
            self.complain(ids[step : step + 1], address[step:], "activations", "narrow byte")
        if record.spoilt is None:
            record.spoilt = np.zeros((plan.groups, plan.columns), bool)
        np.logical_or.at(record.spoilt, plan.group_of_step[start + bad], hits)

    def meets(self, number: int, missing: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Columns in which a missing activation byte meets a parameter other than the zero point, or an unknown one."""
        plan, values = self.plan, self.machine.values
        weights = self.machine.trace.weights.entries[number]
        if plan.zp_rows is not None or values.level[weights >> 2].max() > LEVEL_FIXED:
            return np.ones(plan.columns, bool)
        elements = values.data[weights]
        elements = elements.view("<u2") if plan.instruction.par16 else elements
        lost = missing.reshape(-1, 1 + plan.instruction.act16).any(axis=1)
        return ((elements != plan.instruction.w_zp) & lost).any(axis=1)

    def spoil(self, ids: Ids, addresses: Index, groups: Index, inverse: Index) -> None:
        """Columns whose parameters nobody wrote have unwritten results; a row without any written byte is an error,
        unless this program moved it there."""
        record, plan = self.record, self.plan
        assert record is not None
        rows, memory = addresses >> 2, self.machine.memory
        bad: Any = (ids <= 0).any(axis=2)
        empty: Any = ~memory.dirty[self.place, rows] & (memory.wide[self.place, rows] == 0).all(axis=1)
        if empty.any() or (ids < 0).any():
            which = np.flatnonzero(empty if empty.any() else (ids < 0).reshape(len(ids), -1).any(axis=1))
            lost = memory.lost[self.place, rows[which]].any()
            what = "parameters (overwritten by a buffer of an earlier program)" if lost else "parameters"
            self.complain(ids[which], addresses[which], what, "64-byte unit")
        if record.spoilt is None:
            record.spoilt = np.zeros((plan.groups, plan.columns), bool)
        np.logical_or.at(record.spoilt, groups, bad[inverse])

    def complain(self, ids: Ids, addresses: Index, what: str, unit: str) -> None:
        """An operand was never written, or is an unfinished partial sum."""
        step = int(np.flatnonzero((ids <= 0).reshape(len(ids), -1).any(axis=1))[0])
        where = f"{self.where}: {what} at {unit} {int(addresses[step])}"
        if (ids[step] == PARTIAL).any():
            raise Hazard(f"{where} are an unfinished partial sum")
        raise UnwrittenRead(f"{where} were never written")

    def scaling(self, iteration: int) -> int:
        """Take the next group of the scaling store and zero points; index of the interned identifiers."""
        plan, machine, memory, tile = self.plan, self.machine, self.machine.memory, self.place
        ids = np.zeros((3, plan.columns, 4), np.int32)
        if plan.scaled:
            slot = iteration + self.scaling_phase & 1
            machine.scaling[tile].take(slot)
            first = slot * SCALING_SLOT
            store = memory.scaling[tile]
            if plan.scale_en:
                ids[0] = store[first : first + SCALING_SLOT].reshape(64, 4)[: plan.columns]
            if plan.bias_en:
                ids[1] = store[BIAS_ENTRY + first : BIAS_ENTRY + first + SCALING_SLOT].reshape(64, 4)[: plan.columns]
        if plan.zp_rows is not None:
            row = plan.zp_rows[iteration % len(plan.zp_rows)]
            memory.unread[tile, row] = False
            ids[2] = memory.wide[tile, row].reshape(64, 4)[: plan.columns]
        last = iteration % plan.iterations == plan.iterations - 1
        used = ids[list(plan.scaling_rows), : plan.channels_last if last else plan.channels]
        if used.min() <= 0:
            raise UnwrittenRead(f"{self.where}: scale, bias or zero point of channel group {iteration} never written")
        return int(machine.trace.scales.intern(ids[None])[0])

    def check_psums(self, start: int, end: int) -> None:
        """Partial sums that are continued must be the ones that this op left in that row."""
        plan, tile = self.plan, self.place
        a, b = np.searchsorted(plan.visit_start, (start, end))
        earlier = plan.previous_visit[a:b]
        rows = plan.psum_rows[a:b][(earlier >= 0) & (earlier < a)]
        if len(rows) and (self.machine.memory.wide[tile, rows] != PARTIAL).any():
            raise Hazard(f"{self.where}: partial sums were overwritten before the accumulation was complete")

    def finish_groups(self, start: int, end: int) -> tuple[int, int]:
        """Make identifiers for the groups that are now complete; (out words before, after)."""
        plan, machine, tile, record = self.plan, self.machine, self.place, self.record
        assert record is not None
        memory = machine.memory
        if plan.psum is not None:
            visits = plan.visits_ending(start, end)
            if len(visits):
                self.store_psums(visits)
        before, after = self.groups, int(np.searchsorted(plan.group_end, end, side="right"))
        a, b = int(plan.out_start[before]), int(plan.out_start[after])
        if after > before:
            base = machine.values.make((b - a) * 4, LEVEL_PENDING)
            record.out_base[before:after] = base + (plan.out_start[before:after] - a) * 4
            ids = base + np.arange((b - a) * 4, dtype=np.int32).reshape(-1, 4)
            if record.spoilt is not None:
                ids[plan.spoilt_bytes(record.spoilt, before, after)] = UNWRITTEN
            memory.narrow[tile, self.out[a:b]] = ids
            machine.trace.items.append((record, before, after))
            self.groups = after
        return a, b

    def store_psums(self, visits: Index) -> None:
        """Leave the int32 sums of finished visits in wide memory."""
        plan, machine, tile = self.plan, self.machine, self.place
        rows = plan.psum_rows[visits]
        if plan.stores_psum:
            assert self.record is not None
            assert self.record.psum_base is not None
            base = machine.values.make(len(visits) * ROW_BYTES, LEVEL_PENDING)
            self.record.psum_base[visits] = base + np.arange(len(visits)) * ROW_BYTES
            ids = (base + np.arange(len(visits) * ROW_BYTES)).reshape(-1, ROW_BYTES)
            ids[:, plan.columns * 4 :] = UNWRITTEN
            machine.memory.wide[tile, rows] = ids
        else:
            machine.memory.wide[tile, rows] = PARTIAL
        machine.memory.note(tile, rows, stay=False)


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
        self.nest = Nest(counts, i.loop_last_dim, i.loop_last_cnt, f"{self.where}, main loops")
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
            self.require(
                nest.kept is None, "a shortened pass in an op that packs steps by its psum walk is not modelled"
            )
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
        psum = self.walk("psum")
        self.sig_psum = self.signal("sig_psum", psum)
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
            walk.steps == self.nest.steps,
            f"walk {name} has {walk.steps} steps, the main loops have {self.nest.steps}",
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


class NluLoadJob(Job):
    """Fills the table of the non-linear unit."""

    plan: NluLoad

    def advance(self) -> int:
        self.machine.tables[self.place] = self.plan.table
        return DONE


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
