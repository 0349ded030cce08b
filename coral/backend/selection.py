"""Which kernels are layers the chip computes: read hints off a kernel, rebuild the layer, require the identical graph.

A hint is never trusted. The proof is that the layer's reference expression (:mod:`coral.quantize`), scheduled on
buffers of the hinted shapes, gives the very same UOp: identical graphs compute identical values on identical buffers.
Source: docs/backend.md, "Selection".
"""

from __future__ import annotations

import functools
import sys
import warnings
from dataclasses import dataclass

import tinygrad.codegen
from tinygrad.helpers import Context, Target, ansistrip
from tinygrad.tensor import Tensor
from tinygrad.uop import GroupOp, Ops
from tinygrad.uop.ops import UOp

from coral import CoralError
from coral.backend import hints, placement, switches
from coral.backend.chain import Chain, Step, Value, without_contents
from coral.backend.chip_program import chip_program, linear_spec
from coral.backend.hints import Match, NoLayer
from coral.backend.layers import Linear


@dataclass(frozen=True)
class Selection:
    """``program`` is the PROGRAM that replaces the kernel, or None; ``reason`` says why, in words."""

    program: UOp | None
    reason: str


@dataclass(frozen=True)
class Decision:
    """What is known of a kernel: the layer that it provably is, or why it is none."""

    match: Match | None
    reason: str


_decisions: dict[bytes, Decision] = {}


def decide(ast: UOp) -> Decision:
    """The layer that one scheduled kernel is. Never raises, opens no device, remembers its answers."""
    if (known := _decisions.get(ast.key)) is None:
        try:
            known = _decide(ast)
        except (NoLayer, CoralError) as reason:
            known = Decision(None, str(reason))
        except Exception as error:
            warnings.warn(f"coral: selection failed, the kernel runs on the host ({error!r})", stacklevel=2)
            known = Decision(None, f"selection failed: {error!r}")
        _decisions[ast.key] = known
    return known


def select(ast: UOp, target: Target) -> Selection:
    """Decides about a kernel on its own, without its neighbours; also in compile workers.

    :raises PlacementError: CORAL_PLACE is none of its values
    """
    if target.indices == switches.HOST_ONLY:
        return Selection(None, "selection is switched off")
    decision = decide(ast)
    if decision.match is None:
        cost = f"predicted {placement.kernel_seconds(ast) * 1e6:,.0f} µs on the host"
        return Selection(None, f"{decision.reason}; computes {_operations(ast)}; {cost}")
    chain = single(decision.match)
    if getattr(ast.arg, "name", "").startswith(ON_HOST) or not placement.on_chip([chain])[0]:
        return Selection(None, f"{decision.reason}, but {placement.prediction(chain)}")
    reason = f"{decision.reason}; {placement.prediction(chain)}"
    return Selection(chip_program(chain, decision.match.buffers), reason)


ON_HOST = "host_"
"""How kernels are named that could run on the chip and shall not."""


def install() -> None:
    """Puts selection in front of ``tinygrad.codegen.do_to_program`` in memory; other devices are not affected."""
    original = tinygrad.codegen.do_to_program
    if hasattr(original, "_coral"):
        return

    @functools.wraps(original)
    def do_to_program(ast: UOp, renderer):
        if ast.op is not Ops.SINK or not hasattr(renderer, "select"):
            return original(ast, renderer)
        selection: Selection = renderer.select(ast)
        program = original(ast if selection.program is None else selection.program, renderer)
        report("host" if selection.program is None else "chip", ansistrip(program.src[0].arg.name), selection.reason)
        return program

    do_to_program._coral = True  # pyright: ignore[reportAttributeAccessIssue]
    tinygrad.codegen.do_to_program = do_to_program


def report(place: str, name: str, reason: str) -> None:
    """With CORAL_DEBUG=1, one line about a decision."""
    if switches.debug():
        print(f"coral: {place} {name}: {reason}", file=sys.stderr, flush=True)


def self_test(device: str) -> bool:
    """Whether a small layer is still recognised by this tinygrad on this device (about 40 ms)."""
    numbers = {"in_zps": (5,), "w_zp": 6, "out_zp": 7, "mult": 0.5, "bias": True}
    layer = Linear(shape=(2, 4), outputs=3, **numbers)
    try:
        ast = _scheduled(device, layer, (0, 1, 2))
        return any(match.layer == layer and _proven(ast, match) for match in hints.read(ast))
    except Exception:
        return False


def single(match: Match) -> Chain:
    """The chain of one layer; arguments are numbered as the match's buffers."""
    layer = match.layer
    image = layer.image
    result = layer.result(image)
    assert result is not None
    zero_points = [zp or 0 for zp in layer.zero_points]
    reads = tuple(range(layer.activations))
    values = [Value(image, zp) for zp in zero_points]
    values.append(Value(result, zero_points[0] if layer.keeps_codes else layer.out_zp))
    parameters = tuple(range(1 + layer.activations, len(match.buffers)))
    step = Step(layer, reads, parameters, len(reads))
    return Chain(tuple(values), (step,), tuple((value, value + 1) for value in reads), ((len(reads), 0),))


def _operations(ast: UOp) -> str:
    """What a kernel does to values, for people who look for what keeps it from the chip."""
    values = [n for n in ast.toposort() if n.dtype.name not in ("weakint", "bool", "void")]
    reductions = {f"{n.arg[0].name} over an axis" for n in values if n.op is Ops.REDUCE}
    return ", ".join(sorted({n.op.name for n in values if n.op in GroupOp.ALU} | reductions)) or "a copy"


def _decide(ast: UOp) -> Decision:
    reasons: list[str] = []
    for match in hints.read(ast):
        kind = type(match.layer).__name__
        try:
            if not _proven(ast, match):
                reasons.append(f"differs from the quantised layer {kind} of its shape and constants")
                continue
            chain = single(match)
            if not isinstance(match.layer, Linear) or linear_spec(match.layer) is None:
                chain.network(without_contents(chain))
            return Decision(match, f"identical to the quantised layer {kind} {match.layer.shape}")
        except CoralError as reason:
            reasons.insert(0, f"{kind}: {reason}")
    raise NoLayer(reasons[0] if reasons else "loops and reads are those of no layer")


def _proven(ast: UOp, match: Match) -> bool:
    places: dict[UOp, int] = {}
    operands = tuple(places.setdefault(buffer, number) for number, buffer in enumerate(match.buffers[1:]))
    rebuilt = _scheduled(match.buffers[0].arg.device, match.layer, operands)
    return rebuilt.replace(arg=ast.arg) is ast


def _scheduled(device: str, layer, buffers: tuple[int, ...]) -> UOp:
    """The scheduled kernel of a layer on fresh, never allocated buffers; equal numbers are one buffer.

    :raises NoLayer: the layer is not one kernel, or two operands of different forms are one buffer
    """
    tensors: dict[int, Tensor] = {}
    for number, (dtype, shape) in zip(buffers, layer.operands, strict=True):
        known = tensors.setdefault(number, Tensor.empty(*shape, dtype=dtype, device=device))
        hints.need(known.shape == shape, "one buffer has two roles")
    with Context(CAPTURING=0, DEBUG=0, TRACK_MATCH_STATS=0), switches.selection_off():
        calls = layer.expression(*(tensors[number] for number in buffers)).schedule_linear().src
    hints.need(len(calls) == 1, f"the layer schedules as {len(calls)} kernels")
    return calls[0].src[0]
