"""Runs of proven layers become one chip program, before tinygrad plans the memory of a schedule.

A run is a set of kernels that can all be executed where its last one stands. What nobody outside reads is never stored.
Source: docs/backend.md, "Fusion".
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import tinygrad.engine.jit
import tinygrad.schedule
from tinygrad.helpers import VALIDATE_WITH_CPU
from tinygrad.tensor import all_tensors
from tinygrad.uop import Ops
from tinygrad.uop.ops import UOp, buffers

from coral import CoralError
from coral.backend import placement, selection, switches
from coral.backend.chain import Chain, Step, Value, without_contents
from coral.backend.chip_program import chip_program
from coral.backend.hints import Match
from coral.backend.layers import Image

LARGEST = 256
"""Layers of one program."""

_reported: set[str] = set()


def install() -> None:
    """Puts fusion in front of tinygrad's memory planner, in memory, where schedules and TinyJit name it."""
    for module, in_jit in ((tinygrad.schedule, False), (tinygrad.engine.jit, True)):
        original = module.memory_plan_rewrite
        if hasattr(original, "_coral"):
            continue

        @functools.wraps(original)
        def plan(linear: UOp, held_bufs: set[UOp] | None = None, *, _original=original, _in_jit=in_jit) -> UOp:
            if switches.enabled() and not VALIDATE_WITH_CPU and held_bufs is not None:
                try:
                    linear = with_chip_programs(linear, held_bufs if _in_jit else None)
                except CoralError:
                    raise
                except Exception as error:
                    warnings.warn(f"coral: fusion failed, kernels run one by one ({error!r})", stacklevel=2)
            return _original(linear, held_bufs)

        plan._coral = True  # pyright: ignore[reportAttributeAccessIssue]
        module.memory_plan_rewrite = plan  # pyright: ignore[reportAttributeAccessIssue]


def with_chip_programs(linear: UOp, held: set[UOp] | None) -> UOp:
    """The schedule with its proven layers as chip programs.

    :param held: buffers that are read after this schedule; None: those that exist or that a live tensor names
    """
    matches = [_match(call) for call in linear.src]
    if not any(matches):
        return linear
    runs = _runs(linear.src, matches)
    if held is None:
        held = _alive() if any(len(members) > 1 for members in runs) else set()
    readers = _readers(linear.src)
    assembled = [(members, run) for members in runs if (run := _assembled(members)) is not None]
    programs = [run.chain(members, held, readers) for members, run in assembled]
    calls: list[UOp | None] = list(linear.src)
    chosen = placement.on_chip([chain for chain, _ in programs])
    for (members, _), (chain, arguments), chip in zip(assembled, programs, chosen, strict=True):
        if chip:
            for member in members:
                calls[member.position] = None
            calls[members[-1].position] = _call(members[-1].call, chain, arguments)
            _report(chain)
        else:
            for member in members:
                calls[member.position] = _on_host(member.call)
    return linear.replace(src=tuple(call for call in calls if call is not None))


@dataclass(frozen=True)
class Member:
    """A kernel of the schedule that is a layer; ``arguments`` are its buffers: result, activations, parameters."""

    position: int
    call: UOp
    match: Match
    arguments: tuple[UOp, ...]

    @property
    def activations(self) -> tuple[UOp, ...]:
        """Buffers of codes that are read."""
        return self.arguments[1 : 1 + self.match.layer.activations]


@dataclass
class _Code:
    """The zero point of values that share a quantisation, as far as it is known."""

    zero_point: int | None

    def must_be(self, zero_point: int | None) -> bool:
        if self.zero_point is None:
            self.zero_point = zero_point
        return zero_point is None or self.zero_point == zero_point


@dataclass
class _Run:
    """Members as a chain with buffers instead of numbers of arguments."""

    images: list[Image] = field(default_factory=list)
    codes: list[_Code] = field(default_factory=list)
    steps: list[tuple[Match, tuple[int, ...], tuple[UOp, ...], int]] = field(default_factory=list)
    inputs: dict[UOp, int] = field(default_factory=dict)
    written: dict[UOp, int] = field(default_factory=dict)

    def value(self, image: Image, code: _Code) -> int:
        self.images.append(image)
        self.codes.append(code)
        return len(self.images) - 1

    def add(self, member: Member) -> bool:
        """Whether the member could be added: it sees its operands as their writers do, in the same quantisation."""
        layer, reads = member.match.layer, []
        known = [self._find(buffer) for buffer in member.activations]
        seen = {self.images[value] for value in known if value is not None} or {layer.image}
        image = seen.pop()
        result = layer.result(image)
        if seen or result is None or (self.images and image[0] != self.images[0][0]):
            return False
        for buffer, zero_point in zip(member.activations, layer.zero_points, strict=True):
            value = self._find(buffer)
            if value is None:
                value = self.inputs[buffer] = self.value(image, _Code(None))
            if not self.codes[value].must_be(zero_point):
                return False
            reads.append(value)
        code = self.codes[reads[0]] if layer.keeps_codes else _Code(layer.out_zp)
        self.written[member.arguments[0]] = written = self.value(result, code)
        self.steps.append((member.match, tuple(reads), member.arguments[1 + layer.activations :], written))
        return True

    def _find(self, buffer: UOp) -> int | None:
        return self.written.get(buffer, self.inputs.get(buffer))

    def has_network(self, members: Sequence[Member]) -> bool:
        """Whether the chip's networks have such layers, one behind the other."""
        chain, _ = self.chain(members, set(), {})
        try:
            chain.network(without_contents(chain))
        except CoralError:
            return False
        return True

    def chain(
        self, members: Sequence[Member], held: set[UOp], readers: dict[UOp, set[int]]
    ) -> tuple[Chain, tuple[UOp, ...]]:
        """The chain and the buffers that are its arguments."""
        inside = {member.position for member in members}
        outputs = [b for b in self.written if b.op is not Ops.BUFFER or b in held or readers.get(b, set()) - inside]
        outputs = outputs or [members[-1].arguments[0]]
        parameters = list(dict.fromkeys(buffer for _, _, operands, _ in self.steps for buffer in operands))
        arguments = (*outputs, *self.inputs, *parameters)
        first = len(outputs) + len(self.inputs)
        numbers = {buffer: first + k for k, buffer in enumerate(parameters)}
        chain = Chain(
            tuple(Value(i, c.zero_point or 0) for i, c in zip(self.images, self.codes, strict=True)),
            tuple(Step(m.layer, reads, tuple(numbers[b] for b in p), w) for m, reads, p, w in self.steps),
            tuple((value, len(outputs) + k) for k, value in enumerate(self.inputs.values())),
            tuple((self.written[buffer], k) for k, buffer in enumerate(outputs)),
        )
        return chain, arguments


@dataclass(eq=False)
class _Open:
    """Members that more may join, until something else needs what they write or changes what they read."""

    members: list[Member]
    reads: set[UOp] = field(default_factory=set)
    writes: set[UOp] = field(default_factory=set)

    def __post_init__(self) -> None:
        for member in self.members:
            self.writes |= _bases(member.arguments[0])
            self.reads |= {base for argument in member.arguments[1:] for base in _bases(argument)}

    def hindered_by(self, reads: set[UOp], writes: set[UOp]) -> bool:
        """Whether a call with these reads and writes must come after the members, or before whatever joins them."""
        return bool(self.writes & (reads | writes) or self.reads & writes)


def _runs(calls: Sequence[UOp], matches: Sequence[Match | None]) -> list[list[Member]]:
    """Layers of the schedule, divided into runs that can be executed where their last member stands."""
    closed: list[_Open] = []
    opened: list[_Open] = []
    for position, (call, match) in enumerate(zip(calls, matches, strict=True)):
        joined, mine = [], []
        if match is not None:
            arguments = tuple(call.src[1 + buffer.arg.slot] for buffer in match.buffers)
            joined, run = _joined(opened, Member(position, call, match, arguments))
            mine = [run]
        accesses = _accesses(call)
        others = [run for run in opened if run not in joined]
        closed += [run for run in others if run.hindered_by(*accesses)]
        opened = [run for run in others if not run.hindered_by(*accesses)] + mine
    return [run.members for run in (*closed, *opened)]


def _joined(opened: list[_Open], member: Member) -> tuple[list[_Open], _Open]:
    """The open runs that the member makes one run with, and that run."""
    alone = _Open([member])
    if not switches.fusion_enabled():
        return [], alone
    operands = set(member.activations)
    bases = {base for operand in operands for base in _bases(operand)}
    related = [run for run in opened if bases & (run.writes | run.reads)]
    for some in (related, *([run] for run in reversed(related))):
        if some and _may_join(some, member):
            members = sorted((m for run in some for m in run.members), key=lambda m: m.position)
            run = _assembled([*members, member])
            if run is not None and len(members) < LARGEST and run.has_network([*members, member]):
                return list(some), _Open([*members, member])
    return [], alone


def _may_join(runs: Sequence[_Open], member: Member) -> bool:
    """Whether all that the member reads of the runs' results are whole buffers of codes, and it overwrites nothing."""
    reads, writes = ({base for run in runs for base in getattr(run, name)} for name in ("reads", "writes"))
    results = {m.arguments[0] for run in runs for m in run.members}
    parameters = member.arguments[1 + len(member.activations) :]
    others = {base for buffer in (*parameters, *(set(member.activations) - results)) for base in _bases(buffer)}
    own = {base for argument in member.arguments[1:] for base in _bases(argument)}
    return not others & writes and not _bases(member.arguments[0]) & (reads | writes | own)


def _assembled(members: Sequence[Member]) -> _Run | None:
    run = _Run()
    return run if all(run.add(member) for member in members) else None


def _match(call: UOp) -> Match | None:
    """The layer that a kernel of the schedule is, if it is one and runs on a CORAL device."""
    body, *arguments = call.src
    device = arguments[0].device if arguments and body.op is Ops.SINK else None
    if not isinstance(device, str) or device.split(":")[0] != "CORAL" or any(b.is_bound_var for b in arguments):
        return None
    return selection.decide(body).match


def _bases(argument: UOp) -> set[UOp]:
    """The whole buffers (and inputs of a TinyJit) that an argument is or lies in."""
    return {node for node in argument.toposort() if node.op in (Ops.BUFFER, Ops.PARAM)}


def _accesses(call: UOp) -> tuple[set[UOp], set[UOp]]:
    """Buffers that a call may read, and those it may write."""
    body, arguments = call.src[0], call.src[1:]
    written = set(range(len(arguments)))
    if body.op is Ops.COPY:
        written = {0}
    elif body.op is Ops.SINK:
        stores = [node.src[0].toposort() for node in body.toposort() if node.op is Ops.STORE]
        written = {node.arg.slot for store in stores for node in store if node.op is Ops.PARAM}
    reads, writes = set(), set()
    for number, argument in enumerate(arguments):
        reads |= _bases(argument)
        writes |= _bases(argument) if number in written else set()
    return reads, writes


def _readers(calls: Sequence[UOp]) -> dict[UOp, set[int]]:
    """Positions of the calls that touch a buffer."""
    positions: dict[UOp, set[int]] = {}
    for position, call in enumerate(calls):
        for base in {base for argument in call.src[1:] for base in _bases(argument)}:
            positions.setdefault(base, set()).add(position)
    return positions


def _alive() -> set[UOp]:
    """Buffers that hold data already, and those that a tensor of the user's stands for."""
    tensors = [tensor for reference in list(all_tensors) if (tensor := reference()) is not None]
    return set(buffers) | {node for tensor in tensors for node in tensor.uop.toposort() if node.op is Ops.BUFFER}


def _call(last: UOp, chain: Chain, arguments: Sequence[UOp]) -> UOp:
    parameters = [UOp.param(k, b.dtype, b.shape, b.device) for k, b in enumerate(arguments)]
    return last.replace(src=(chip_program(chain, parameters), *arguments))


def _on_host(call: UOp) -> UOp:
    """The call marked as one that selection leaves alone."""
    sink = call.src[0]
    layer = selection.decide(sink).match.layer  # pyright: ignore[reportOptionalMemberAccess]
    name = "_".join((selection.ON_HOST + type(layer).__name__.lower(), *map(str, layer.shape)))
    return call.replace(src=(sink.replace(arg=replace(sink.arg, name=name)), *call.src[1:]))


def _report(chain: Chain) -> None:
    """With CORAL_DEBUG=1, once per program: what it computes and the predictions."""
    if switches.debug() and (source := chain.to_source()) not in _reported:
        _reported.add(source)
        layers = " ".join(type(step.layer).__name__ for step in chain.steps)
        reason = f"identical to {layers}, {chain.images} images or rows; {placement.prediction(chain)}"
        selection.report("chip", chain.name, reason)
