"""The op unit at work: which operands meet in which accumulator, and where the results go.

A job does no arithmetic. It looks up the identifiers of its operands when the wait records allow, makes identifiers for
the results of every output group as it completes, and leaves a record from which ``coral.chip.nodes`` computes the
values of many groups, slices and tiles at once. Source: docs/chip.md, section Op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coral.chip.errors import Hazard, UnwrittenRead
from coral.chip.layout import (
    BIAS_ENTRY,
    LEVEL_FIXED,
    LEVEL_PENDING,
    PARTIAL,
    ROW_BYTES,
    SCALING_SLOT,
    UNWRITTEN,
    WIDE_ROWS,
)
from coral.chip.machine import BLOCKED, DONE, MORE, Job, Machine
from coral.chip.memories import Ids
from coral.chip.plans import COUNTER, Plan, done
from coral.chip.walks import Index

if TYPE_CHECKING:
    from coral.chip.op_plan import NluLoad, OpPlan


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

    def spoil(self, groups: Index, columns: NDArray[np.bool_]) -> None:
        """The results of these columns of these groups are unwritten."""
        if self.spoilt is None:
            self.spoilt = np.zeros((self.plan.groups, self.plan.columns), bool)
        np.logical_or.at(self.spoilt, groups, columns)

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
        record.spoil(plan.group_of_step[start + bad], hits)

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
        record, rows, memory = self.record, addresses >> 2, self.machine.memory
        assert record is not None
        empty: Any = ~memory.dirty[self.place, rows] & (memory.wide[self.place, rows] == 0).all(axis=1)
        if empty.any() or (ids < 0).any():
            which: Any = np.flatnonzero(empty if empty.any() else (ids < 0).reshape(len(ids), -1).any(axis=1))
            lost = memory.lost[self.place, rows[which]].any()
            what = "parameters (overwritten by a buffer of an earlier program)" if lost else "parameters"
            self.complain(ids[which], addresses[which], what, "64-byte unit")
        bad: Any = (ids <= 0).any(axis=2)
        record.spoil(groups, bad[inverse])

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


class NluLoadJob(Job):
    """Fills the table of the non-linear unit."""

    plan: NluLoad

    def advance(self) -> int:
        self.machine.tables[self.place] = self.plan.table
        return DONE
