"""UNIDIRECTIONAL_SEQUENCE_LSTM as Google's compiler lays it out. Source: docs/evaluate.md, "LSTM"."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import numerics
from coral.evaluate.operands import Call, EvaluateError, Operand, operator
from coral.evaluate.products import centred_weights, channel_quantisation

GATE_SCALE = float(np.float32(1 / 255))
"""Of the LOGISTIC gates: uint8, zero point 0."""
CELL_SCALE = float(np.float32(1 / 127.5))
"""Of the TANH gate: uint8, zero point 128."""
WIDE_SCALE, WIDE_ZERO = float(np.float32(1 / 16383.5)), 16384
"""Of (input gate * TANH gate) and of TANH(state): 16 bits."""
STATE_ZERO = 32768
"""What the 16-bit codes of the cell state have more than its values."""
LEFT_OUT = (9, 10, 11, 16, 17, 20, 21, 22, 23)
"""Inputs of peepholes, projection and layer normalisation."""


@operator("UNIDIRECTIONAL_SEQUENCE_LSTM")
def unidirectional_sequence_lstm(call: Call) -> tuple[NDArray[Any], ...]:
    """The sequence, and the new values of the two states (hidden, cell). Four gates, no peepholes, no projection.

    The sums in front of the gates' functions are stored in the hidden state's own quantisation, so they saturate at its
    range, about -1 to 1: this, not rounding, is why the chip's results differ from TFLite's.
    """
    x, y, hidden, cell = call.input(0), call.output, call.input(18), call.input(19)
    call.require(fused_activation_function="TANH", proj_clip=0.0)
    extra = [i for i in LEFT_OUT if call.optional(i) is not None]
    if extra:
        raise EvaluateError(f"input {extra[0]}: peepholes, projection and layer normalisation are not supported")
    if not (hidden.tensor.is_variable and cell.tensor.is_variable) or cell.tensor.dtype != np.int16:
        raise EvaluateError("inputs 18 and 19 must be variables, the second one int16")
    if cell.tensor.zero_point != 0 or not hidden.same_quantisation(y):
        raise EvaluateError("the cell state's zero point must be 0, the hidden state's quantisation the output's")
    clip, reach = call.options.get("cell_clip", 0.0), cell.scale * 2**15
    if 0 < clip < reach:
        raise EvaluateError(f"option cell_clip is {clip}, supported is none or at least {reach}, the state's range")
    time_major = call.options.get("time_major", False)
    if x.array.ndim != 3 or x.array.size == 0 or len(hidden.shape) != 2 or cell.shape != hidden.shape:
        raise EvaluateError(
            f"input {x.shape} must have three axes and values, states {hidden.shape}, {cell.shape} the same two"
        )
    steps = x.centred if time_major else x.centred.swapaxes(0, 1)
    if steps.shape[1] != hidden.shape[0]:
        raise EvaluateError(f"input {x.shape} and states {hidden.shape} hold different batches")
    gates = [_Gate(call, number, hidden.shape[1], steps.shape[2]) for number in range(4)]
    h, c = hidden.codes, cell.array.astype(np.int32)
    sequence = []
    for step in steps:
        h, c = _step(step, h, c, gates, hidden, cell)
        sequence.append(h)
    result = np.stack(sequence, axis=0 if time_major else 1)
    return y.from_codes(result), hidden.from_codes(h), c.astype(np.int16)


class _Gate:
    """Weights and multipliers of one gate: 0 input, 1 forget, 2 cell, 3 output."""

    def __init__(self, call: Call, number: int, units: int, width: int) -> None:
        x, hidden, bias = call.input(0), call.input(18), call.input(12 + number)
        inputs, recurrent = call.input(1 + number), call.input(5 + number)
        for operand, shape in ((inputs, (units, width)), (recurrent, (units, units)), (bias, (units,))):
            if operand.shape != shape:
                raise EvaluateError(f"{operand.tensor.name!r} has shape {operand.shape}, expected is {shape}")
        if bias.array.dtype != np.int32:
            raise EvaluateError(f"bias {bias.tensor.name!r} is {bias.array.dtype}, expected is int32")
        self.bias = bias.array
        self.inputs, self.recurrent = (centred_weights(w, 0).astype(np.int64) for w in (inputs, recurrent))
        self.mults = [
            numerics.multiplier(source.scale, channel_quantisation(w)[0], hidden.scale)
            for source, w in ((x, inputs), (hidden, recurrent))
        ]
        self.spline = numerics.TANH if number == 2 else numerics.LOGISTIC
        self.limit, self.scale, self.zero = (
            (numerics.TANH_CLAMP, CELL_SCALE, 128) if number == 2 else (numerics.LOGISTIC_CLAMP, GATE_SCALE, 0)
        )

    def __call__(self, x: NDArray[np.int32], h: NDArray[np.uint8], hidden: Operand) -> NDArray[np.int64]:
        """The gate's codes less its zero point."""
        z, clamps = hidden.zero_point, numerics.clamps(hidden.scale, hidden.zero_point)
        sums = [
            numerics.requantise(numerics.accumulators(acc, bias), mult, *clamps, z).astype(np.int32)
            for acc, bias, mult in (
                (x @ self.inputs.T, self.bias, self.mults[0]),
                ((h.astype(np.int64) - z) @ self.recurrent.T, None, self.mults[1]),
            )
        ]
        total, mult = sums[0] + sums[1] - 2 * z, numerics.rescale_multiplier(hidden.scale, 1)
        table = self.spline.scaled(numerics.inv(self.scale))
        codes = numerics.requantise(total, mult, -self.limit, self.limit, self.zero, nlu=table)
        return codes.astype(np.int64) - self.zero


def _step(
    x: NDArray[np.int32], h: NDArray[np.uint8], c: NDArray[np.int32], gates: list[_Gate], hidden: Operand, cell: Operand
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Hidden state (codes) and cell state (values) after one time step."""
    i, f, g, o = (gate(x, h, hidden) for gate in gates)
    product = _wide(i * g, numerics.multiplier(GATE_SCALE, CELL_SCALE, WIDE_SCALE), WIDE_SCALE, WIDE_ZERO)
    kept = _wide(f * c, numerics.multiplier(GATE_SCALE, cell.scale, cell.scale), cell.scale, STATE_ZERO)
    w_1, w_2 = numerics.add_weights(cell.scale, WIDE_SCALE)
    acc = numerics.accumulators(w_1 * kept + w_2 * product)
    state = _wide(acc, numerics.add_multiplier(cell.scale, w_1, cell.scale), cell.scale, STATE_ZERO)
    # The compiler adds again in front of TANH, which therefore sees the sum before it is rounded to 16 bits.
    table, limit = numerics.TANH.scaled(numerics.inv(WIDE_SCALE)), numerics.TANH_CLAMP
    mult = numerics.add_multiplier(cell.scale, w_1, 1)
    squashed = numerics.requantise(acc, mult, -limit, limit, WIDE_ZERO, bits=16, nlu=table).astype(np.int64) - WIDE_ZERO
    mult, z = numerics.multiplier(GATE_SCALE, WIDE_SCALE, hidden.scale), hidden.zero_point
    codes = numerics.requantise(numerics.accumulators(o * squashed), mult, *numerics.clamps(hidden.scale, z), z)
    return codes, state.astype(np.int32)


def _wide(acc: NDArray[Any], mult: float, scale: float, zero: int) -> NDArray[np.int64]:
    """16-bit requantisation, less the zero point."""
    low, high = numerics.clamps(scale, zero, hi_code=2**16 - 1)
    return numerics.requantise(numerics.accumulators(acc), mult, low, high, zero, bits=16).astype(np.int64) - zero
