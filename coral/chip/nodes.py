"""The arithmetic of the op unit on whole batches: the groups of one instruction that can be computed at once.

``build`` joins the records of an instruction over slices and tiles wherever no group depends on another; a ``Node``
computes all of them with one matrix product per set of parameters. Source: docs/chip.md, section Arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import isa, numerics
from coral.chip.layout import LEVEL_FIXED
from coral.chip.memories import Values
from coral.chip.op import OpRecord
from coral.chip.op_plan import Stage
from coral.chip.trace import Trace

_MIX = 0x9E3779B97F4A7C15
FLOAT32_EXACT = 1 << 24


class Node:
    """``sets`` parameter sets times ``rows`` output groups each, of one instruction on all of its tiles.

    x ``[sets or 1, rows, steps]`` indices of words, or ``[.., bytes]`` identifiers; w ``[sets, steps, columns, bytes]``
    and scales ``[sets, 3, columns, 4]`` identifiers; out ``[sets, rows, words]`` indices of words.
    """

    def __init__(self, stage: Stage, table: Any, channels: int) -> None:
        self.stage, self.table = stage, table
        self.out_words = -(-channels * stage.result_bytes // 4)
        self.columns = self.out_words * 4 // stage.result_bytes
        self.w: NDArray[np.int32] | None = None
        self.scales: NDArray[np.int32] | None = None
        self.psum: NDArray[np.int32] | None = None
        self.fixed = True
        self.constants: tuple[Any, Any, Any] | None = None

    def bind(self, x: NDArray[Any], words: bool, out: NDArray[Any], psum: NDArray[Any] | None) -> None:
        """Take activations and results ``[sets, rows, ..]``."""
        self.x = x[:1] if len(x) > 1 and (x == x[:1]).all() else x
        self.words = words
        self.out = ((out[..., None] >> 2) + np.arange(self.out_words)).astype(np.int32)
        if psum is not None:
            self.psum = ((psum[..., None] >> 2) + np.arange(self.columns)).astype(np.int32)

    def resolve(self, numbers: NDArray[Any], builder: Builder) -> None:
        """Look up the identifiers of weights and scales by their numbers ``[sets, steps + 1]``."""
        trace, weights, scales = builder.trace, numbers[:, :-1], numbers[:, -1]
        if self.stage.kind is isa.OpResize:
            self.coefficients = weights[:, None, :, None].astype(np.int64)
            return
        table, inverse = np.unique(weights, return_inverse=True)
        entries = np.stack([trace.weights.entries[k] for k in table.tolist()])[:, : self.columns]
        self.w = entries[inverse.reshape(weights.shape)]
        self.fixed = builder.weights.highest(weights.reshape(-1), trace.weights.entries) == LEVEL_FIXED
        if scales.any():
            self.scales = np.stack([trace.scales.entries[k] for k in scales.tolist()])[:, :, : self.columns]
            self.fixed &= builder.scales.highest(scales, trace.scales.entries) == LEVEL_FIXED

    def identifiers(self) -> Iterator[NDArray[np.int32]]:
        """Everything that the node reads."""
        yield self.x * 4 if self.words else self.x
        if self.w is not None:
            yield self.w
        if self.scales is not None:
            yield self.scales

    def run(self, values: Values) -> None:
        """Compute the groups and store their bytes."""
        stage = self.stage
        if self.constants is None or not self.fixed:
            self.constants = self.prepare(values)
        w, offset, scale = self.constants
        sums = self.accumulate(values, w)
        total = sums + offset
        nlu = None
        if self.table is not None:
            nlu = numerics.Spline(
                self.table.coefficients, self.table.breakpoints, stage.nlu_odd, stage.nlu_range_reduce
            )
        codes = numerics.requantise(
            total, scale, stage.clamp_min, stage.clamp_max, stage.out_zp, bits=8 * stage.result_bytes, nlu=nlu
        )
        words = values.data.view(np.uint32)
        words[self.out] = np.ascontiguousarray(codes).view(np.uint32)
        if self.psum is not None:
            words[self.psum] = (sums + offset - stage.acc_offset).view(np.uint32)

    def prepare(self, values: Values) -> tuple[Any, Any, Any]:
        """(weights in the type in which their sums are exact, int32 to add to the sums, multipliers)."""
        stage, offset, bias = self.stage, np.int64(self.stage.acc_offset), 0
        scale: Any = stage.mult
        if self.scales is not None:
            raw = values.data[self.scales]
            if stage.bias_en:
                bias = raw[:, None, 1].copy().view(np.int32)[..., 0].astype(np.int64)
            if stage.scale_en:
                scale = raw[:, None, 0].copy().view(np.float32)[..., 0]
        if self.w is None or stage.kind is isa.OpMax:
            return None, _wrap32(bias + offset), scale
        w = self.parameters(values)
        offset = offset - stage.in_zp * w.sum(axis=1, dtype=np.int64)[:, None, :] if stage.kind is isa.Op else offset
        bound = int(np.abs(w).sum(axis=1, dtype=np.int64).max()) * (0xFFFF if stage.act16 else 0xFF)
        return w.astype(np.float32 if bound < FLOAT32_EXACT else np.float64), _wrap32(bias + offset), scale

    def activations(self, values: Values) -> NDArray[Any]:
        """Operands by element, ``[sets or 1, rows, elements]``, uint8 or uint16."""
        data = values.data.view(np.uint32)[self.x].view(np.uint8) if self.words else values.data[self.x]
        return data.view("<u2") if self.stage.act16 else data

    def parameters(self, values: Values) -> NDArray[np.int32]:
        """Differences from the zero points, ``[sets, elements, columns]``."""
        raw = values.data[self.w]
        if self.stage.par16:
            raw = raw.view("<u2")
        sets, steps, columns, elements = raw.shape
        zero: Any = self.stage.w_zp
        if self.stage.zp_rows:
            zero = values.data[self.scales][:, 2].copy().view(np.int32)[:, None, :, 0]
        return raw.astype(np.int32).transpose(0, 1, 3, 2).reshape(sets, steps * elements, columns) - zero

    def accumulate(self, values: Values, w: Any) -> NDArray[np.int32]:
        """Sums (or maxima) modulo 2^32, ``[sets, rows, columns]``, without what ``prepare`` adds."""
        kind = self.stage.kind
        if kind is isa.OpMax:
            return values.data[self.w].max(axis=(1, 3)).astype(np.int32)[:, None, :]
        if kind is isa.OpSum:
            return _wrap32(w.sum(axis=1, dtype=np.float64)[:, None, :])
        x = self.activations(values)
        if kind is isa.OpResize:
            return _wrap32((x.reshape(*x.shape[:2], -1, self.columns) * self.coefficients).sum(axis=2))
        x = x.astype(w.dtype)
        if x.shape[1] == 1 and w.shape[2] <= 4:
            return _wrap32((x[:, 0, :, None] * w).sum(axis=1)[:, None, :])
        return _wrap32(np.matmul(x, w))


def _wrap32(total: Any) -> NDArray[np.int32]:
    """Modulo 2**32; float32 sums are exact and below 2**24."""
    return total.astype(np.int32) if total.dtype == np.float32 else total.astype(np.int64).astype(np.int32)


class Levels:
    """Dependency levels of interned entries, worked out when first asked for."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.known = np.full(0, -1, np.int16)

    def highest(self, numbers: NDArray[Any], entries: list[NDArray[np.int32]]) -> int:
        """Highest level among the entries of these numbers."""
        if len(self.known) < len(entries):
            self.known = np.r_[self.known, np.full(len(entries) - len(self.known), -1, np.int16)]
        levels = self.known[numbers]
        if levels.min() < 0:
            for number in np.unique(numbers[levels < 0]).tolist():
                self.known[number] = self.values.level[entries[number].reshape(-1) >> 2].max()
            levels = self.known[numbers]
        return int(levels.max())


class Builder:
    """Turns the records of a program into nodes, a stretch of the program at a time."""

    def __init__(self, trace: Trace, values: Values) -> None:
        self.trace, self.values = trace, values
        self.weights, self.scales = Levels(values), Levels(values)

    def build(self) -> list[Node]:
        """Nodes of the items recorded since the last call, in an order in which they can run."""
        buckets: dict[tuple[int, int, int], list[tuple[OpRecord, int, int]]] = {}
        for record, first, last in self.trace.items:
            level = self.level(record, first, last)
            parts = buckets.setdefault((level, id(record.plan), id(record.table)), [])
            if parts and parts[-1][0] is record and parts[-1][2] == first:
                first = parts.pop()[1]
            parts.append((record, first, last))
        self.trace.items = []
        nodes: list[Node] = []
        for _, parts in sorted(buckets.items(), key=lambda entry: entry[0][0]):
            nodes += join(parts, self)
        return nodes

    def level(self, record: OpRecord, first: int, last: int) -> int:
        """One more than the highest level among the operands of some groups; noted for their results."""
        plan, values = record.plan, self.values
        x, w = record.operands()
        steps = plan.steps_by_group[plan.group_first[first] : plan.group_first[last]]
        level = 0
        if plan.x_bytes:
            part = x[steps]
            level = int(values.level[part if x.ndim == 1 else part >> 2].max())
        if plan.par is not None:
            level = max(level, self.weights.highest(w[steps], self.trace.weights.entries))
        if record.scales:
            numbers = np.array([record.scales[k] for k in set(plan.group_iteration[first:last].tolist())])
            level = max(level, self.scales.highest(numbers, self.trace.scales.entries))
        level += 1
        start = int(record.out_base[first]) >> 2
        values.level[start : start + int(plan.out_start[last] - plan.out_start[first])] = level
        if record.psum_base is not None:
            start = int(record.psum_base[first]) >> 2
            values.level[start : start + 64 * (last - first)] = level
        return level


def join(parts: list[tuple[OpRecord, int, int]], builder: Builder) -> list[Node]:
    """Nodes for groups of one instruction that depend on nothing of each other."""
    plan, table = parts[0][0].plan, parts[0][0].table
    words = all(record.operands()[0].ndim == 1 for record, _, _ in parts)
    shapes = np.stack((plan.group_size, plan.group_channels), axis=1)
    nodes = []
    for size, channels in np.unique(np.concatenate([shapes[a:b] for _, a, b in parts]), axis=0).tolist():
        xs, ws, outs, psums = [], [], [], []
        for record, first, last in parts:
            groups = first + np.flatnonzero((shapes[first:last] == (size, channels)).all(axis=1))
            if not len(groups):
                continue
            steps = plan.steps_by_group[plan.group_first[groups][:, None] + np.arange(size)]
            x, w = record.operands()
            x = x[steps]
            if not words and x.ndim == 2:
                x = x[..., None] * 4 + np.arange(4)
            xs.append(x.reshape(len(groups), -1).astype(np.int32))
            scales = np.array([record.scales.get(k, 0) for k in plan.group_iteration[groups].tolist()], np.int32)
            ws.append(np.c_[w[steps], scales])
            outs.append(record.out_base[groups])
            if record.psum_base is not None:
                psums.append(record.psum_base[groups])
        x, w, out = np.concatenate(xs), np.concatenate(ws), np.concatenate(outs)
        order, counts = distinct_rows(w)
        psum = np.concatenate(psums) if psums else None
        for count in np.unique(counts).tolist():
            members = order[np.repeat(counts == count, counts)].reshape(-1, count)
            node = Node(plan.stage, table, channels)
            node.bind(x[members], words, out[members], psum[members] if psum is not None else None)
            node.resolve(w[members[:, 0]], builder)
            nodes.append(node)
    return nodes


def distinct_rows(rows: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[Any]]:
    """(row numbers ordered by content, how many rows have each content)."""
    mixed = np.zeros(len(rows), np.uint64)
    for column in rows.T:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(_MIX)
        mixed ^= mixed >> np.uint64(29)
    order = np.argsort(mixed, kind="stable")
    ordered = mixed[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    counts = np.diff(np.r_[starts, len(rows)])
    if (rows[order] != rows[np.repeat(order[starts], counts)]).any():
        raise AssertionError("two sets of parameters with the same hash")
    return order, counts
