"""The LSTM in exact rationals, one time step after the other."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from evaluate_graphs import exact_clamps, fraction, inverse, multiplier, tensor
from exact_float import exact32, exact_requantise
from test_reductions import exact_scaled, exact_spline

from coral import evaluate, numerics
from coral.evaluate import EvaluateError
from coral.package.graph import Graph, Operator

B, T, K, N = 2, 3, 4, 3
S_X, S_H, S_C, Z_X, Z_H = 0.02, 0.0078, 2.0**-12, 100, 127
GATE, CELL, WIDE = (float(np.float32(s)) for s in (1 / 255, 1 / 127.5, 1 / 16383.5))


class Model:
    """Random weights of a small LSTM, and its graph."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.w = [rng.integers(-127, 128, (N, K)).astype(np.int8) for _ in range(4)]
        self.r = [rng.integers(-127, 128, (N, N)).astype(np.int8) for _ in range(4)]
        self.b = [rng.integers(-9000, 9000, N).astype(np.int32) for _ in range(4)]
        self.s_w, self.s_r = np.float32(rng.uniform(0.001, 0.01, 4)), np.float32(rng.uniform(0.001, 0.01, 4))
        self.x = rng.integers(-128, 128, (B, T, K)).astype(np.int8)
        self.h = rng.integers(-128, 128, (B, N)).astype(np.int8)
        self.c = rng.integers(-20000, 20000, (B, N)).astype(np.int16)

    def graph(self, **options: Any) -> Graph:
        tensors = [tensor("x", (B, T, K), "i1", [S_X], [Z_X - 128])]
        tensors += [
            tensor(f"w{i}", (N, K), "i1", [s], [0], w) for i, (w, s) in enumerate(zip(self.w, self.s_w, strict=True))
        ]
        tensors += [
            tensor(f"r{i}", (N, N), "i1", [s], [0], r) for i, (r, s) in enumerate(zip(self.r, self.s_r, strict=True))
        ]
        tensors += [tensor(f"b{i}", (N,), "i4", data=b) for i, b in enumerate(self.b)]
        tensors.append(tensor("h", (B, N), "i1", [S_H], [Z_H - 128], is_variable=True))
        tensors.append(tensor("c", (B, N), "i2", [S_C], [0], is_variable=True))
        tensors.append(tensor("y", (B, T, N), "i1", [S_H], [Z_H - 128]))
        inputs = (0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -1, -1, 9, 10, 11, 12, -1, -1, 13, 14, -1, -1, -1, -1)
        options = {
            "fused_activation_function": "TANH",
            "cell_clip": 10.0,
            "proj_clip": 0.0,
            "time_major": False,
        } | options
        return Graph(
            "main", tuple(tensors), (0,), (15,), (Operator("UNIDIRECTIONAL_SEQUENCE_LSTM", inputs, (15,), options),)
        )

    def gate(self, number: int, x: list[int], h: list[int], n: int) -> int:
        """Codes less zero point of one gate, from centred x and h."""
        clamps = exact_clamps(S_H, Z_H)
        terms = (
            (int(self.b[number][n]), x, self.w[number], multiplier(S_X, self.s_w[number], S_H)),
            (0, h, self.r[number], multiplier(S_H, self.s_r[number], S_H)),
        )
        total = 0
        for bias, values, weights, mult in terms:
            acc = bias + sum(v * int(w) for v, w in zip(values, weights[n], strict=True))
            total += exact_requantise(acc, mult, *clamps, Z_H) - Z_H
        if number == 2:
            return exact_nlu(total, fraction(S_H), numerics.TANH, CELL, 6.8748069, 128, 255)
        return exact_nlu(total, fraction(S_H), numerics.LOGISTIC, GATE, 10.396732, 0, 255)

    def step(self, x: list[int], h: list[int], c: list[int]) -> tuple[list[int], list[int]]:
        new_h, new_c = [], []
        for n in range(N):
            i, f, g, o = (self.gate(number, x, h, n) for number in range(4))
            kept = wide(f * c[n], multiplier(GATE, S_C, S_C), S_C, 32768)
            product = wide(i * g, multiplier(GATE, CELL, WIDE), WIDE, 16384)
            best = (fraction(WIDE) / fraction(S_C)).limit_denominator(32767)
            acc = best.denominator * kept + best.numerator * product
            step = exact32(fraction(S_C) / best.denominator)
            new_c.append(wide(acc, exact32(step * inverse(S_C)), S_C, 32768))
            squashed = exact_nlu(acc, step, numerics.TANH, WIDE, 6.8748069, 16384, 65535)
            new_h.append(
                exact_requantise(o * squashed, multiplier(GATE, WIDE, S_H), *exact_clamps(S_H, Z_H), Z_H) - Z_H
            )
        return new_h, new_c


def wide(acc: int, mult: Fraction, scale: float, zero: int) -> int:
    return exact_requantise(acc, mult, *exact_clamps(scale, zero, top=65535), zero, top=65535) - zero


def exact_nlu(acc: int, mult: Fraction, table: numerics.Spline, s: float, limit: float, zero: int, top: int) -> int:
    x = exact32(exact32(Fraction(acc)) * mult)
    x = min(max(x, -fraction(limit)), fraction(limit))
    scaled = exact_scaled(table, inverse(s))
    y = exact_spline(scaled, abs(x)) * (-1 if x < 0 else 1) if table.odd else exact_spline(scaled, x)
    return min(max(round(y) + zero, 0), top) - zero


@pytest.mark.parametrize("seed", range(4))
def test_steps(seed: int) -> None:
    model = Model(seed)
    given = {"x": model.x, "h": model.h, "c": model.c}
    got = evaluate.evaluate(model.graph(), given, outputs=["y", "h", "c"])
    for b in range(B):
        h, c = [int(v) + 128 - Z_H for v in model.h[b]], [int(v) for v in model.c[b]]
        for t in range(T):
            h, c = model.step([int(v) + 128 - Z_X for v in model.x[b, t]], h, c)
            assert got["y"][b, t].tolist() == [v + Z_H - 128 for v in h]
        assert got["c"][b].tolist() == c
        assert got["h"][b].tolist() == [v + Z_H - 128 for v in h]


def test_states_start_at_zero() -> None:
    model = Model(1)
    zero = {"h": np.full((B, N), Z_H - 128, np.int8), "c": np.zeros((B, N), np.int16)}
    started = evaluate.evaluate(model.graph(), {"x": model.x})["y"]
    assert np.array_equal(started, evaluate.evaluate(model.graph(), {"x": model.x} | zero)["y"])
    assert not np.array_equal(started, evaluate.evaluate(model.graph(), {"x": model.x, "c": model.c})["y"])


def test_errors() -> None:
    model = Model(2)
    for options, message in (
        ({"fused_activation_function": "RELU"}, "option fused_activation_function is 'RELU'"),
        ({"proj_clip": 1.0}, "option proj_clip is 1.0"),
        ({"cell_clip": 3.0}, r"option cell_clip is 3.0, supported is none or at least 8.0"),
        ({"time_major": True}, "hold different batches"),
    ):
        with pytest.raises(EvaluateError, match=message):
            evaluate.evaluate(model.graph(**options), {"x": model.x})
    graph = model.graph()
    (op,) = graph.operators
    peephole = Operator(op.name, (*op.inputs[:9], 9, *op.inputs[10:]), op.outputs, op.options)
    with pytest.raises(EvaluateError, match="input 9: peepholes"):
        evaluate.evaluate(Graph("main", graph.tensors, (0,), (15,), (peephole,)), {"x": model.x})
    coupled = Operator(op.name, (0, -1, *op.inputs[2:]), op.outputs, op.options)
    with pytest.raises(EvaluateError, match="LSTM 'y': input 1 is missing"):
        evaluate.evaluate(Graph("main", graph.tensors, (0,), (15,), (coupled,)), {"x": model.x})
