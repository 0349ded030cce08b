"""Operators of the host by code that tinygrad makes for its device "CPU", to the bit what coral.evaluate computes.

A piece is a run of operators as one TinyJit function. What an operator does to 8-bit codes is looked up in a table that
the judge itself fills, so its arithmetic is written once. For values where compiled code may differ (NaN, numbers that
an integer cannot hold) and for those that the judge refuses, NumPy computes the piece again.
Source: docs/run.md, "Operators of the host".
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad.device import Device
from tinygrad.dtype import DType, dtypes
from tinygrad.engine.jit import TinyJit
from tinygrad.tensor import Tensor

from coral import CoralError
from coral.evaluate import elementwise, host, movement, reductions
from coral.evaluate.graph import function_of, run_operators
from coral.evaluate.operands import CODE_OFFSETS, Call, EvaluateError, Function, Operand, axis_of
from coral.package.graph import Graph

DEVICE = "CPU"
DTYPES: dict[Any, DType] = {
    np.dtype(np.uint8): dtypes.uint8, np.dtype(np.int8): dtypes.int8, np.dtype(np.int32): dtypes.int32,
    np.dtype(np.int64): dtypes.int64, np.dtype(np.float32): dtypes.float32,
}  # fmt: skip
UNSIGNED = {1: dtypes.uint8, 4: dtypes.uint32, 8: dtypes.uint64}
SIGN = 1 << 31
PART, MAX_TABLE = 2**14, 2**16
"""Values in a table: tinygrad turns a lookup in a larger one into a sum over its parts."""
SPECIAL = np.array([0, -0.0, 1e-42, 2.5, -0.5, np.inf, -np.inf], np.float32)
"""Tried with every piece that reads float32."""
_mutex = threading.RLock()
"""tinygrad's scheduler and its queue to the CPU are one per process and not made for threads."""


class InexactError(CoralError):
    """An operator that tinygrad does not compute to the bit; it stays in NumPy."""


@dataclass(frozen=True)
class Table:
    """Values by 8-bit code, ``[256]``, and the codes."""

    codes: Tensor
    values: NDArray[Any]


@dataclass(frozen=True)
class Inputs:
    """An operator's operands. ``unless``: conditions under which NumPy decides."""

    call: Call
    tensors: list[Tensor | None]
    tables: list[Table | None]
    unless: list[Tensor]

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self.tensors) or (tensor := self.tensors[index]) is None:
            raise InexactError(f"input {index} is missing")
        return tensor

    def is_code(self, index: int) -> bool:
        """Whether an operand has 8 bits."""
        return self.call.input(index).tensor.dtype in CODE_OFFSETS

    def table(self, index: int) -> Table | None:
        """Of an operand that has 8 bits or depends on one that has."""
        if (found := self.tables[index]) is not None or not self.is_code(index):
            return found
        dtype: Any = self.call.input(index).tensor.dtype
        return Table(self[index], np.arange(256, dtype=np.uint8).view(dtype))

    def real(self, index: int) -> Tensor:
        """Real values of codes, other dtypes as they are."""
        x = self.call.input(index)
        if not self.is_code(index) or not len(x.tensor.scales) or (table := self.table(index)) is None:
            return self[index]
        return looked_up(Table(table.codes, host.real(_operand(x, table.values))))


Formula = Callable[[Inputs], Sequence[Tensor | Table]]
FORMULAS: dict[Function, Formula] = {}
"""By the judge's function, so that a formula is only used where the judge uses what it stands for."""


def formula(*functions: Function) -> Callable[[Formula], Formula]:
    """Registers the formula of the judge's ``functions``."""

    def register(found: Formula) -> Formula:
        FORMULAS.update(dict.fromkeys(functions, found))
        return found

    return register


def constant(array: NDArray[Any] | np.generic) -> Tensor:
    """An array as a buffer: tinygrad's rules for constants do not round as float32 does."""
    array = np.asarray(array)
    return _kept(array.dtype.str, array.shape, array.tobytes())


@lru_cache(1024)
def _kept(dtype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
    return Tensor(np.frombuffer(data, dtype).reshape(shape).copy(), device=DEVICE).clone().realize()


def looked_up(table: Table) -> Tensor:
    """The values of a table's codes."""
    return _at(table.values, _index(table.codes))


def _at(table: NDArray[Any], index: Tensor) -> Tensor:
    if table.dtype not in DTYPES or table.size > MAX_TABLE:
        raise InexactError(f"a table of {table.size} values, {table.dtype}")
    parts = [constant(table[start : start + PART]) for start in range(0, table.size, PART)]
    found = parts[-1][index if len(parts) == 1 else index & (PART - 1)]
    for k, part in reversed(tuple(enumerate(parts[:-1], 1))):
        found = (index < k * PART).where(part[index & (PART - 1)], found)
    return found.contiguous()


def _index(x: Tensor) -> Tensor:
    return x.bitcast(dtypes.uint8).cast(dtypes.int32)


def _operand(x: Operand, array: NDArray[Any]) -> Operand:
    return Operand(replace(x.tensor, shape=array.shape, data=None), array)


def judged(call: Call, *operands: Operand) -> NDArray[Any]:
    """What the judge computes of other operands, in their shape."""
    y = Operand(replace(call.output.tensor, shape=np.broadcast_shapes(*(x.shape for x in operands))[-2:]))
    (values,) = function_of(call, True)(replace(call, inputs=operands, outputs=(y,)))
    return np.ascontiguousarray(values)


def _dtype(x: Operand) -> DType:
    if (dtype := DTYPES.get(x.tensor.dtype)) is None:
        raise InexactError(f"a tensor of {x.tensor.dtype}")
    return dtype


def _shaped(y: Operand, x: Tensor) -> Tensor:
    if x.numel() != math.prod(y.tensor.shape):
        raise InexactError(f"{x.shape} to {y.tensor.shape}")
    return x.reshape(y.tensor.shape)


def result(x: Inputs, values: Tensor) -> Sequence[Tensor]:
    """As the judge's function of this name: a quotient in float32, half away from zero; or the output's dtype."""
    y, dtype = x.call.output, _dtype(x.call.output)
    if y.tensor.dtype in CODE_OFFSETS and len(y.tensor.scales) == 1:
        values = values.cast(dtypes.float32)
        x.unless.append(values.ne(values).max())
        steps = (values / constant(np.float32(y.scale))).clip(-(2.0**20), 2.0**20)
        size = (steps.abs().cast(dtypes.float64) + 0.5).cast(dtypes.int32)
        codes = ((steps < 0).where(-size, size) + y.zero_point).clip(0, 255).cast(dtypes.uint8)
        return [_shaped(y, (codes ^ y.offset).bitcast(dtype).contiguous())]
    if dtypes.is_float(values.dtype) and dtypes.is_int(dtype):
        limits = np.iinfo(y.tensor.dtype or np.int32)
        inside = (values >= constant(np.float32(limits.min))) & (values <= constant(np.float32(limits.max)))
        x.unless.append((inside & (values < 2.0**31)).logical_not().max())
    return [_shaped(y, values.cast(dtype))]


def _rounded(x: Tensor) -> Tensor:
    down = x.trunc()
    rest, odd = (x - down).abs(), (down * 0.5).trunc().ne(down * 0.5)
    return ((rest > 0.5) | (rest.eq(0.5) & odd)).where(down + (x < 0).where(-1.0, 1.0), down)


def _bits(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(x.bitcast(dtypes.uint32)).bitcast(dtypes.float32)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "ABS": partial(_bits, function=lambda x: x & (SIGN - 1)), "NEG": partial(_bits, function=lambda x: x ^ SIGN),
    "SQRT": Tensor.sqrt, "SQUARE": lambda x: x * x, "FLOOR": Tensor.floor, "CEIL": Tensor.ceil, "ROUND": _rounded,
}  # fmt: skip
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ADD": Tensor.add, "SUB": Tensor.sub, "MUL": Tensor.mul, "DIV": Tensor.div,
    "SQUARED_DIFFERENCE": lambda a, b: (a - b).contiguous().square(), "PRELU": lambda x, a: (x < 0).where(x * a, x),
}  # fmt: skip
WRAPPING = ("ADD", "SUB", "MUL", "SQUARED_DIFFERENCE")
"""On integers: modulo their size."""


@formula(host.unary, host.leaky_relu, elementwise.requantise, elementwise.dequantize, elementwise.spline)
def unary(x: Inputs) -> Sequence[Tensor | Table]:
    """By a table, or in float32 with one rounding; integers only cast."""
    call, name = x.call, x.call.name
    if (table := x.table(0)) is not None:
        return [Table(table.codes, judged(call, _operand(call.input(0), table.values)))]
    if name in ("CAST", "QUANTIZE"):
        return result(x, x[0])
    if x[0].dtype != dtypes.float32 or name not in UNARY:
        raise InexactError(f"{name} of {x[0].dtype}")
    return result(x, UNARY[name](x[0]).contiguous())


@formula(host.binary, elementwise.add, elementwise.mul)
def binary(x: Inputs) -> Sequence[Tensor]:
    """Two codes by a table; two of float32, int32 or int64."""
    call, name, y = x.call, x.call.name, x.call.output
    if x.is_code(0) and x.is_code(1):
        return [_shaped(y, _of_two_codes(x))]
    a, b = x.real(0), x.real(1)
    if name not in BINARY or a.dtype != b.dtype or call.activation != "NONE":
        raise InexactError(f"{name} of {a.dtype} and {b.dtype}")
    if a.dtype == dtypes.float32:
        return result(x, BINARY[name](a, b).contiguous())
    if name not in WRAPPING:
        raise InexactError(f"{name} of {a.dtype}")
    unsigned = UNSIGNED[a.dtype.itemsize]
    return result(x, BINARY[name](a.bitcast(unsigned), b.bitcast(unsigned)).bitcast(a.dtype))


def _of_two_codes(x: Inputs) -> Tensor:
    call = x.call
    a, b = operands = call.input(0), call.input(1)
    codes = [np.arange(256, dtype=np.uint8).view(operand.tensor.dtype or np.uint8)[:, None] for operand in operands]
    for i, (varied, fixed) in enumerate(((a, b), (b, a))):
        if elementwise.per_channel(fixed, varied):
            n = fixed.array.size
            pair = _operand(varied, np.repeat(codes[i], n, 1)), fixed
            channels = constant(np.arange(n, dtype=np.int32)) if n > 1 else 0
            return _at(judged(call, *pair[:: 1 - 2 * i]).reshape(-1), _index(x[i]) * n + channels)
    table = judged(call, _operand(a, codes[0]), _operand(b, codes[1].T))
    return _at(table.reshape(-1), _index(x[0]) * 256 + _index(x[1]))


@formula(host.arg_max)
def arg_max(x: Inputs) -> Sequence[Tensor]:
    """The greatest of (value, distance from the end), in one number."""
    axis = axis_of(int(x.call.constant(1).ravel()[0]), x[0].ndim)
    if (n := int(x[0].shape[axis])) > 2**16 or x[0].dtype not in (dtypes.uint8, dtypes.int8, dtypes.int32):
        raise InexactError(f"{n} values of {x[0].dtype}")
    values = x[0].cast(dtypes.int32 if x[0].dtype.itemsize == 1 else dtypes.int64)
    values = ~values if x.call.name == "ARG_MIN" else values
    behind = constant(np.arange(n)[::-1].astype(np.int32)).cast(values.dtype)
    best = (values * 2**16 + behind.reshape([-1 if i == axis else 1 for i in range(values.ndim)])).max(axis)
    return result(x, n - 1 - (best & (2**16 - 1)))


@formula(host.reduce)
def reduce(x: Inputs) -> Sequence[Tensor]:
    """Of integers, also in place of the real values that rise with them."""
    axes = tuple({axis_of(axis, x[0].ndim) for axis in x.call.constant(1).ravel().tolist()})
    if dtypes.is_float(x[0].dtype):
        raise InexactError("zeros of two signs")
    values = x[0].max(axes) if x.call.name == "REDUCE_MAX" else x[0].min(axes)
    return result(x, replace(x, tensors=[values.contiguous()]).real(0))


@formula(host.resize, reductions.resize)
def resize(x: Inputs) -> Sequence[Tensor]:
    """Neighbours by index, weighted; the chip's own twofold bilinear stays in NumPy."""
    call, y, values, source = x.call, x.call.output, x[0], x.call.image(0)
    chip, nearest = function_of(call, True) is reductions.resize, call.name.endswith("NEIGHBOR")
    if len(y.shape) != 4 or (chip and not (reductions.repeats(call) and source.same_quantisation(y))):
        raise InexactError(f"{source.shape} to {y.shape}")
    for axis in (1, 2):
        wide = [-1 if i == axis else 1 for i in range(4)]
        low, high, share = host.places(call, source.shape[axis], y.shape[axis])
        if chip:
            low = np.arange(y.shape[axis]) // (y.shape[axis] // source.shape[axis])
        before, after = (values[(slice(None),) * axis + (constant(i.astype(np.int32)),)] for i in (low, high))
        if chip or nearest:
            values = before
        else:
            shares = [constant(s).reshape(wide) for s in (np.float32(1) - share, share)]
            values = (_product(before, shares[0]) + _product(after, shares[1])).contiguous()
    if not (chip or nearest or x[0].dtype == dtypes.float32):
        values = (values + 0.5).floor().cast(x[0].dtype).contiguous()
    return [_shaped(y, values)]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """float32, by way of double, where it is exact: no compiler can make one operation of it and a sum."""
    return (a.cast(dtypes.float64) * b.cast(dtypes.float64)).cast(dtypes.float32)


def _moved(function: Callable[[Inputs], Sequence[Tensor]]) -> Formula:
    """float32 moves as bits: tinygrad may join by adding zeros."""

    def moved(x: Inputs) -> Sequence[Tensor]:
        bits = [t.bitcast(dtypes.uint32) if t is not None and t.dtype == dtypes.float32 else t for t in x.tensors]
        results = zip(x.call.outputs, function(replace(x, tensors=bits)), strict=True)
        return [_shaped(y, r.bitcast(_dtype(y))) for y, r in results]

    return moved


def _concatenated(x: Inputs) -> Sequence[Tensor]:
    call, y, parts = x.call, x.call.output, [x[i] for i in range(len(x.tensors))]
    if function_of(call, True) is movement.concatenation:
        call.require(fused_activation_function="NONE")
        for i in range(len(parts)):
            if not (operand := call.input(i)).same_quantisation(y) and (table := x.table(i)) is not None:
                alone = replace(call, options={"axis": 0})
                parts[i] = looked_up(Table(parts[i], judged(alone, _operand(operand, table.values))))
    return [Tensor.cat(*parts, dim=axis_of(call.options.get("axis", 0), len(y.shape)))]


def _split(x: Inputs) -> Sequence[Tensor]:
    values, at = (x[1], x.call.constant(0)) if x.call.name == "SPLIT" else (x[0], x.call.constant(2))
    axis = axis_of(int(at.flat[0]), values.ndim)
    ends = list(accumulate((y.shape[axis] for y in x.call.outputs), initial=0))
    if ends[-1] != values.shape[axis]:
        raise InexactError("outputs that do not share the axis")
    return [values[(slice(None),) * axis + (slice(*span),)] for span in pairwise(ends)]


def _packed(x: Inputs) -> Sequence[Tensor]:
    axis, call = x.call.options.get("axis", 0), x.call
    if call.name == "PACK":
        parts = [x[i] for i in range(len(x.tensors))]
        return [Tensor.stack(*parts, dim=axis_of(axis, parts[0].ndim + 1))]
    axis = axis_of(axis, x[0].ndim)
    if x[0].shape[axis] != len(call.outputs):
        raise InexactError("parts that are no outputs")
    return [x[0][(slice(None),) * axis + (i,)] for i in range(len(call.outputs))]


def _padded(x: Inputs) -> Sequence[Tensor]:
    if not x.is_code(0) or x.call.constant(1).min(initial=0) < 0:
        raise InexactError("a border that is no zero point")
    borders = tuple((low, high) for low, high in x.call.constant(1).tolist())
    return [x[0].pad(borders, value=x.call.input(0).tensor.zero_point)]


FORMULAS |= {
    movement.reshape: _moved(lambda x: [x[0]]),
    movement.concatenation: _moved(_concatenated),
    host.concatenation: _moved(_concatenated),
    movement.split: _moved(_split),
    movement.pad: _moved(_padded),
    host.pack: _moved(_packed),
    host.transpose: _moved(lambda x: [x[0].permute(x.call.constant(1).ravel().tolist())]),
    host.cut: _moved(lambda x: [x[0][host.spans(x.call)]]),
}  # fmt: skip


class Expression:
    """What operators compute, in tinygrad, from tensors by number: ``values``, and those of them that have a table."""

    def __init__(self, graph: Graph, given: Mapping[int, Tensor] | None = None) -> None:
        self.graph, self.values, self.tables = graph, dict(given or {}), dict[int, Table]()
        self.unless: list[Tensor] = []

    def add(self, number: int) -> None:
        """Another operator; inputs that are not there are added.

        :raises CoralError: it has no exact form
        """
        op, tensors = self.graph.operators[number], self.graph.tensors
        call = Call(
            op.name,
            tuple(None if i < 0 else Operand(tensors[i], tensors[i].data) for i in op.inputs),
            tuple(Operand(tensors[i]) for i in op.outputs),
            op.options,
        )
        if (formula := FORMULAS.get(function_of(call, True))) is None:
            raise InexactError(f"{op.name} has no exact form")
        for i in {*op.inputs, *op.outputs} - {-1}:
            if tensors[i].is_variable or 0 in tensors[i].shape:
                raise InexactError(f"tensor {tensors[i].name!r} is a state, or empty")
        operands = [None if i < 0 else self._operand(i) for i in op.inputs]
        found = formula(Inputs(call, operands, [self.tables.get(i) for i in op.inputs], self.unless))
        for i, value in zip(op.outputs, found, strict=True):
            if isinstance(value, Table):
                self.tables[i] = value
            value = looked_up(value) if isinstance(value, Table) else value
            self.values[i] = _shaped(Operand(tensors[i]), value)

    def _operand(self, number: int) -> Tensor:
        tensor = self.graph.tensors[number]
        if tensor.data is not None:
            return constant(tensor.data)
        if number not in self.values:
            empty = Tensor.empty(*tensor.shape, dtype=_dtype(Operand(tensor)), device=DEVICE)
            self.values[number] = empty
        return self.values[number]


def pieces(graph: Graph, operators: Sequence[int]) -> list[list[int]]:
    """The longest runs of operators that have an exact form. :raises Exception: tinygrad has no compiler here."""
    found: list[list[int]] = []
    with _mutex:
        Device[DEVICE]  # its first use compiles
        expression = None
        for number in operators:
            if expression is not None and _added(expression, number):
                found[-1].append(number)
            elif _added(expression := Expression(graph), number):
                found.append([number])
            else:
                expression = None
    return found


def _added(expression: Expression, number: int) -> bool:
    try:
        expression.add(number)
    except (CoralError, ValueError, IndexError, RuntimeError, AssertionError, TypeError):  # as tinygrad refuses shapes
        return False
    return True


class Piece:
    """A run of operators as one function, compiled and compared with the judge on random values.

    ``results`` are the tensors that anything outside the piece reads.
    """

    def __init__(self, graph: Graph, operators: Sequence[int], results: Sequence[int]) -> None:
        """:raises CoralError: an operator has no exact form, or compiled code differs from the judge
        :raises Exception: whatever tinygrad says where it cannot compile
        """
        self.graph, self.operators, self.results = graph, list(operators), list(results)
        made = {i for number in operators for i in graph.operators[number].outputs}
        read = {i for number in operators for i in graph.operators[number].inputs if i >= 0}
        self.inputs = [i for i in sorted(read - made) if graph.tensors[i].data is None]
        with _mutex:
            self._given = [Tensor(self._random(i), device=DEVICE).clone().realize() for i in self.inputs]
            self._expression(*self._given)  # constants must exist before the function is recorded
            self._function = TinyJit(lambda *given: [t.contiguous().realize() for t in self._expression(*given)])
            self._function.cnt = 1  # a first run that is not recorded gains nothing
            *self._found, self._unsure = (_memory(t) for t in self._function(*self._given))
            self._memories = [_memory(t) for t in self._given]
        self._compare()

    def __call__(self, values: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """Values of the results by tensor number. :raises EvaluateError: as run_operators."""
        if (found := self._run(values)) is not None:
            return found
        computed = run_operators(self.graph, self.operators, values)
        return {i: computed[i] for i in self.results}

    def _run(self, values: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]] | None:
        """None: NumPy must decide."""
        given = [values[i] for i in self.inputs]
        with _mutex:
            if any((x.shape, x.dtype) != (m.shape, m.dtype) for x, m in zip(given, self._memories, strict=True)):
                return None
            for memory, array in zip(self._memories, given, strict=True):
                memory[...] = array
            self._function(*self._given)
            Device[DEVICE].synchronize()
            found = {i: memory.copy() for i, memory in zip(self.results, self._found, strict=True)}
            unsure = self._unsure.any()
        return None if unsure or any(a.dtype.kind == "f" and np.isnan(a).any() for a in found.values()) else found

    def _expression(self, *given: Tensor) -> list[Tensor]:
        expression = Expression(self.graph, dict(zip(self.inputs, given, strict=True)))
        for number in self.operators:
            expression.add(number)
        unless = [constant(np.zeros(1, np.bool_)), *(condition.reshape(1) for condition in expression.unless)]
        return [*(expression.values[i] for i in self.results), Tensor.cat(*unless)]

    def _random(self, number: int, special: bool = False) -> NDArray[Any]:
        tensor, rng = self.graph.tensors[number], np.random.default_rng(number)
        if tensor.dtype == np.float32:
            chosen = rng.random(tensor.shape) < (0.1 if special else 0)
            return np.where(chosen, rng.choice(SPECIAL, tensor.shape), rng.normal(0, 3, tensor.shape)).astype(
                np.float32
            )
        low, high = (0, 256) if tensor.dtype in CODE_OFFSETS else (-1000, 1000)
        return rng.integers(low, high, tensor.shape).astype(tensor.dtype)

    def _compare(self) -> None:
        for special in (False, True):
            values = {i: self._random(i, special) for i in self.inputs}
            try:
                expected = run_operators(self.graph, self.operators, values)
            except EvaluateError:
                continue
            for i, array in (self._run(values) or {}).items():
                if array.tobytes() != expected[i].tobytes():
                    raise InexactError(f"tensor {self.graph.tensors[i].name!r} is not what NumPy computes")


def _memory(x: Tensor) -> NDArray[Any]:
    """The bytes of a realised tensor, in place."""
    buffer: Any = x.uop.buffer.ensure_allocated()  # pyright: ignore[reportAttributeAccessIssue]
    return np.frombuffer(buffer.as_memoryview(force_zero_copy=True), buffer.dtype.fmt).reshape(x.shape)
