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
from functools import lru_cache
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
UNSIGNED = {4: dtypes.uint32, 8: dtypes.uint64}
SIGN = 1 << 31
PART, MAX_TABLE = 2**14, 2**16
"""Values in a table, and in the parts of it: tinygrad makes a sum of a lookup in one of 2^15."""
MAX_ELEMENTS = 2**24
"""Of a tensor: random values for it must fit into memory, too."""
SPECIAL = np.array([0, -0.0, 1e-42, 2.5, -0.5, np.inf, -np.inf], np.float32)
"""Tried with every piece that reads float32."""
_mutex = threading.RLock()
"""tinygrad's scheduler and its queue to the CPU are one per process and not made for threads."""


class InexactError(CoralError):
    """An operator that tinygrad does not compute to the bit; it stays in NumPy."""


@dataclass(frozen=True)
class Inputs:
    """An operator's operands. ``unless``: conditions under which NumPy decides."""

    call: Call
    tensors: list[Tensor]
    unless: list[Tensor]

    def __getitem__(self, index: int) -> Tensor:
        return self.tensors[index]

    def codes(self, index: int) -> NDArray[Any] | None:
        """All values of an operand that has 8 bits, ``[256]``."""
        dtype: Any = self.call.input(index).tensor.dtype
        return np.arange(256, dtype=np.uint8).view(dtype) if dtype in CODE_OFFSETS else None

    def real(self, index: int) -> Tensor:
        """Real values of codes, other dtypes as they are."""
        x, codes = self.call.input(index), self.codes(index)
        return self[index] if codes is None else _at(host.real(_operand(x, codes)), _index(self[index]))


Formula = Callable[[Inputs], Sequence[Tensor]]


def constant(array: NDArray[Any] | np.generic) -> Tensor:
    """An array as a buffer: tinygrad's rules for constants do not round as float32 does."""
    array = np.asarray(array)
    return _kept(array.dtype.str, array.shape, array.tobytes())


@lru_cache(1024)
def _kept(dtype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
    return Tensor(np.frombuffer(data, dtype).reshape(shape).copy(), device=DEVICE).clone().realize()


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
    """What the judge computes of other operands, flat."""
    y = Operand(replace(call.output.tensor, shape=np.broadcast_shapes(*(x.shape for x in operands))[-2:]))
    (values,) = function_of(call, True)(replace(call, inputs=operands, outputs=(y,)))
    return values.reshape(-1)


def result(x: Inputs, values: Tensor) -> Sequence[Tensor]:
    """As the judge's function of this name: a quotient in float32, half away from zero; or the output's dtype."""
    y = x.call.output
    dtype = DTYPES[y.tensor.dtype]
    if y.tensor.dtype in CODE_OFFSETS and len(y.tensor.scales) == 1:
        values = values.cast(dtypes.float32)
        x.unless.append(values.ne(values).max())
        steps = (values / constant(np.float32(y.scale))).clip(-(2.0**20), 2.0**20)
        size = (steps.abs().cast(dtypes.float64) + 0.5).cast(dtypes.int32)
        codes = ((steps < 0).where(-size, size) + y.zero_point).clip(0, 255).cast(dtypes.uint8)
        return [(codes ^ y.offset).bitcast(dtype).contiguous()]
    if dtypes.is_float(values.dtype) and dtypes.is_int(dtype):
        x.unless.append(((values > dtype.min) & (values < dtype.max)).logical_not().max())
    return [values.cast(dtype)]


def _rounded(x: Tensor) -> Tensor:
    down = x.trunc()
    rest, odd = (x - down).abs(), (down * 0.5).trunc().ne(down * 0.5)
    return ((rest > 0.5) | (rest.eq(0.5) & odd)).where(down + (x < 0).where(-1.0, 1.0), down)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "ABS": lambda x: (x.bitcast(dtypes.uint32) & (SIGN - 1)).bitcast(dtypes.float32),
    "NEG": lambda x: (x.bitcast(dtypes.uint32) ^ SIGN).bitcast(dtypes.float32),
    "SQRT": Tensor.sqrt, "SQUARE": lambda x: x * x, "FLOOR": Tensor.floor, "CEIL": Tensor.ceil, "ROUND": _rounded,
}  # fmt: skip
WRAPPING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ADD": Tensor.add, "SUB": Tensor.sub, "MUL": Tensor.mul,
    "SQUARED_DIFFERENCE": lambda a, b: (a - b).contiguous().square(),
}  # fmt: skip
"""On integers modulo their size."""
BINARY = WRAPPING | {"DIV": Tensor.div, "PRELU": lambda x, a: (x < 0).where(x * a, x)}


def unary(x: Inputs) -> Sequence[Tensor]:
    """Of codes by a table, of float32 with one rounding; integers are only cast."""
    name = x.call.name
    if (codes := x.codes(0)) is not None:
        return [_at(judged(x.call, _operand(x.call.input(0), codes)), _index(x[0]))]
    if name in ("CAST", "QUANTIZE"):
        return result(x, x[0])
    if x[0].dtype != dtypes.float32:
        raise InexactError(f"{name} of {x[0].dtype}")
    return result(x, UNARY[name](x[0]).contiguous())


def binary(x: Inputs) -> Sequence[Tensor]:
    """Of two codes by a table; of float32, int32 or int64."""
    call, first, second = x.call, x.codes(0), x.codes(1)
    if first is not None and second is not None:
        return [_of_two_codes(x, first, second)]
    a, b = x.real(0), x.real(1)
    if (
        a.dtype != b.dtype or call.activation != "NONE" or a.uop.base is b.uop.base
    ):  # tinygrad: NaN - NaN = 0, 0 / 0 = 1
        raise InexactError(f"{call.name} of {a.dtype} and {b.dtype}, {call.activation}, or of a tensor with itself")
    if a.dtype == dtypes.float32:
        return result(x, BINARY[call.name](a, b.contiguous()).contiguous())
    unsigned = UNSIGNED[a.dtype.itemsize]
    return result(x, WRAPPING[call.name](a.bitcast(unsigned), b.bitcast(unsigned)).bitcast(a.dtype))


def _of_two_codes(x: Inputs, first: NDArray[Any], second: NDArray[Any]) -> Tensor:
    a, b = x.call.input(0), x.call.input(1)
    for i, (codes, varied, fixed) in enumerate(((first, a, b), (second, b, a))):
        if elementwise.per_channel(fixed, varied):
            n = fixed.array.size
            pair = _operand(varied, np.repeat(codes[:, None], n, 1)), fixed
            channels = constant(np.arange(n, dtype=np.int32)) if n > 1 else 0
            return _at(judged(x.call, *pair[:: 1 - 2 * i]), _index(x[i]) * n + channels)
    table = judged(x.call, _operand(a, first[:, None]), _operand(b, second[None]))
    return _at(table, _index(x[0]) * 256 + _index(x[1]))


def arg_max(x: Inputs) -> Sequence[Tensor]:
    """The greatest of (code, distance from the end), in one number."""
    axis = axis_of(x.call.number(1), x[0].ndim)
    if x.codes(0) is None or (n := int(x[0].shape[axis])) > 2**16:
        raise InexactError("too many values, or no codes")
    values = ~x[0].cast(dtypes.int32) if x.call.name == "ARG_MIN" else x[0].cast(dtypes.int32)
    behind = np.arange(n, dtype=np.int32)[::-1].reshape([-1 if i == axis else 1 for i in range(values.ndim)])
    return result(x, n - 1 - ((values * 2**16 + constant(behind)).max(axis) & (2**16 - 1)))


def reduce(x: Inputs) -> Sequence[Tensor]:
    """Of integers; of codes in place of the real values that rise with them."""
    axes = tuple({axis_of(axis, x[0].ndim) for axis in x.call.constant(1).ravel().tolist()})
    if x[0].dtype not in (dtypes.uint8, dtypes.int8, dtypes.int32):
        raise InexactError(f"zeros of two signs, or numbers that clang warns of: {x[0].dtype}")
    values = x[0].max(axes) if x.call.name == "REDUCE_MAX" else x[0].min(axes)
    return result(x, replace(x, tensors=[values.contiguous()]).real(0))


def resize(x: Inputs) -> Sequence[Tensor]:
    """Neighbours by index, weighted; the chip's own twofold bilinear stays in NumPy."""
    call, values, y, source = x.call, x[0], x.call.output.shape, x.call.image(0).shape
    repeats = reductions.repeats(call) if function_of(call, True) is reductions.resize else (0, 0)
    if repeats is None or max(source[1:3]) > PART:
        raise InexactError(f"the chip's way, or a sum, from {source} to {y}")
    copied = any(repeats) or call.name.endswith("NEIGHBOR")
    for axis, repeat in enumerate(repeats, 1):
        low, high, share = host.places(call, source[axis], y[axis])
        low = np.arange(y[axis]) // repeat if repeat else low
        before, after = (values[(slice(None),) * axis + (constant(i.astype(np.int32)),)] for i in (low, high))
        shares = [constant(s.reshape([-1 if i == axis else 1 for i in range(4)])) for s in (1 - share, share)]
        parts = (_product(before, shares[0]), _product(after, shares[1]))
        values = before if copied else (parts[0] + parts[1]).contiguous()
    if not copied and x[0].dtype != dtypes.float32:
        values = (values + 0.5).floor().cast(x[0].dtype).contiguous()
    return [values]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """float32, by way of double, where it is exact: no compiler can make one operation of it and a sum."""
    return (a.cast(dtypes.float64) * b.cast(dtypes.float64)).cast(dtypes.float32)


def _moved(function: Formula) -> Formula:
    """float32 moves as bits: tinygrad may join by adding zeros."""

    def moved(x: Inputs) -> Sequence[Tensor]:
        bits = [t.bitcast(dtypes.uint32) if t.dtype == dtypes.float32 else t for t in x.tensors]
        results = zip(x.call.outputs, function(replace(x, tensors=bits)), strict=True)
        return [r.bitcast(DTYPES[y.tensor.dtype]) for y, r in results]

    return moved


def _concatenated(x: Inputs) -> Sequence[Tensor]:
    call, y, parts = x.call, x.call.output, list(x.tensors)
    for i in range(len(parts)):
        if (codes := x.codes(i)) is not None and not (operand := call.input(i)).same_quantisation(y):
            alone = replace(call, options={"axis": 0})
            parts[i] = _at(judged(alone, _operand(operand, codes)), _index(parts[i]))
    return [Tensor.cat(*parts, dim=call.options.get("axis", 0))]


def _split(x: Inputs) -> Sequence[Tensor]:
    values, at = (x[1], x.call.constant(0)) if x.call.name == "SPLIT" else (x[0], x.call.constant(2))
    axis = axis_of(int(at.flat[0]), values.ndim)
    return values.split([y.shape[axis] for y in x.call.outputs], axis)


def _packed(x: Inputs) -> Sequence[Tensor]:
    axis = x.call.options.get("axis", 0)
    return [Tensor.stack(*x.tensors, dim=axis)] if x.call.name == "PACK" else x[0].split(1, axis)


def _padded(x: Inputs) -> Sequence[Tensor]:
    return [x[0].pad(tuple(map(tuple, x.call.constant(1).tolist())), value=x.call.output.tensor.zero_point)]


FORMULAS: dict[Function, Formula] = {
    **dict.fromkeys((host.unary, host.leaky_relu, elementwise.requantise), unary),
    **dict.fromkeys((elementwise.dequantize, elementwise.spline), unary),
    **dict.fromkeys((host.binary, elementwise.add, elementwise.mul), binary),
    **dict.fromkeys((host.resize, reductions.resize), resize),
    **dict.fromkeys((host.concatenation, movement.concatenation), _moved(_concatenated)),
    host.arg_max: arg_max, host.reduce: reduce, movement.reshape: _moved(lambda x: [x[0]]),
    movement.split: _moved(_split), movement.pad: _moved(_padded), host.pack: _moved(_packed),
    host.transpose: _moved(lambda x: [x[0].permute(x.call.constant(1).ravel().tolist())]),
    host.cut: _moved(lambda x: [x[0][host.spans(x.call)]]),
}  # fmt: skip
"""By the judge's function, so that a formula is only used where the judge uses what it stands for. What the judge
refuses need not be refused here: a piece is compared with it."""


def is_exact(graph: Graph, number: int) -> bool:
    """Whether an operator has an exact form. :raises Exception: tinygrad has no compiler here."""
    with _mutex:
        Device[DEVICE]  # its first use compiles
        try:
            _add(graph, number, {}, [])
        except (CoralError, LookupError, ValueError, RuntimeError, AssertionError, TypeError):  # tinygrad's, too
            return False
        return True


def _add(graph: Graph, number: int, values: dict[int, Tensor], unless: list[Tensor]) -> None:
    op, tensors = graph.operators[number], graph.tensors
    for i in (*op.inputs, *op.outputs):
        shape = tensors[i].shape
        if i < 0 or tensors[i].is_variable or min(shape, default=1) < 1 or math.prod(shape) > MAX_ELEMENTS:
            raise InexactError(f"tensor {tensors[i].name!r} is a state, empty, too large or left out")
    operands = tuple(Operand(tensors[i], tensors[i].data) for i in op.inputs)
    call = Call(op.name, operands, tuple(Operand(tensors[i]) for i in op.outputs), op.options)
    formula = FORMULAS[function_of(call, True)]
    for i in op.inputs:
        if tensors[i].data is None and i not in values:
            values[i] = Tensor.empty(*tensors[i].shape, dtype=DTYPES[tensors[i].dtype], device=DEVICE)
    given = [values[i] if (data := tensors[i].data) is None else constant(data) for i in op.inputs]
    for i, value in zip(op.outputs, formula(Inputs(call, given, unless)), strict=True):
        values[i] = value.reshape(tensors[i].shape)


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
        read = {i for number in operators for i in graph.operators[number].inputs if i not in made}
        self.inputs = [i for i in sorted(read) if graph.tensors[i].data is None]
        with _mutex:
            shaped = [np.zeros(graph.tensors[i].shape, graph.tensors[i].dtype) for i in self.inputs]
            self._given = [Tensor(array, device=DEVICE).clone().realize() for array in shaped]
            self._memories = [_memory(t) for t in self._given]
            self._expression(*self._given)  # constants must exist before the function is recorded
            self._function = TinyJit(lambda *given: [t.contiguous().realize() for t in self._expression(*given)])
            self._function.cnt = 1  # a first run that is not recorded gains nothing
        self._compare()

    def __call__(self, values: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """Values of the results by tensor number. :raises EvaluateError: as run_operators."""
        if (found := self._run(values)) is None:
            computed = run_operators(self.graph, self.operators, values)
            return {i: computed[i] for i in self.results}
        return found

    def _run(self, values: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]] | None:
        """None: NumPy must decide."""
        with _mutex:
            for i, memory in zip(self.inputs, self._memories, strict=True):
                if (values[i].shape, values[i].dtype) != (memory.shape, memory.dtype):
                    return None
                memory[...] = values[i]
            *results, conditions = (_memory(t) for t in self._function(*self._given))
            found = {i: memory.copy() for i, memory in zip(self.results, results, strict=True)}
            unsure = conditions.any()
        return None if unsure or any(a.dtype.kind == "f" and np.isnan(a).any() for a in found.values()) else found

    def _expression(self, *given: Tensor) -> list[Tensor]:
        values, unless = dict(zip(self.inputs, given, strict=True)), [constant(np.zeros(1, np.bool_))]
        for number in self.operators:
            _add(self.graph, number, values, unless)
        return [*(values[i] for i in self.results), Tensor.cat(*(condition.reshape(1) for condition in unless))]

    def _random(self, number: int, special: bool = False) -> NDArray[Any]:
        tensor, rng = self.graph.tensors[number], np.random.default_rng(number)
        values = rng.integers(*((0, 256) if tensor.dtype in CODE_OFFSETS else (-1000, 1000)), tensor.shape)
        if tensor.dtype == np.float32:
            chosen = rng.random(tensor.shape) < (0.1 if special else 0)
            values = np.where(chosen, rng.choice(SPECIAL, tensor.shape), rng.normal(0, 3, tensor.shape))
        return values.astype(tensor.dtype)

    def _compare(self) -> None:
        for special in {False, any(memory.dtype == np.float32 for memory in self._memories)}:
            values = {i: self._random(i, special) for i in self.inputs}
            try:
                with np.errstate(all="ignore"):
                    expected = run_operators(self.graph, self.operators, values)
            except EvaluateError:  # of infinities it may say no
                if not special:
                    raise
                continue
            for i, array in (self._run(values) or {}).items():
                if array.tobytes() != expected[i].tobytes():
                    raise InexactError(f"tensor {self.graph.tensors[i].name!r} is not what NumPy computes")


def _memory(x: Tensor) -> NDArray[Any]:
    """The bytes of a realised tensor, in place."""
    buffer: Any = x.uop.buffer.ensure_allocated()  # pyright: ignore[reportAttributeAccessIssue]
    return np.frombuffer(buffer.as_memoryview(force_zero_copy=True), buffer.dtype.fmt).reshape(x.shape)
