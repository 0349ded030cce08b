"""Near misses of the quantised linear layer: the CPU's bytes, and never a chip program.

Each is the layer of coral.quantize.expressions with one thing changed. Where a change can meet exact ties, the data has
them, so that a kernel taken by mistake would show in the bytes as well.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from backend.layers import Data, answer
from coral.backend import reset_stats, selection_off, stats

IN_ZP, W_ZP, OUT_ZP, MULT = 3, 130, 128, 2.0**-9
ROWS, N, K = 6, 6, 24


def _int(x: Tensor, zero_point: int) -> Tensor:
    return x.contiguous().cast(dtypes.int32) - zero_point


def _acc(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    acc = _int(x, IN_ZP).matmul(_int(w, W_ZP).T)
    return acc if b is None else acc + b.contiguous()


def _clip(p: Tensor, lo: float = -OUT_ZP, hi: float = 255 - OUT_ZP) -> Tensor:
    return p.clip(lo, hi)


def _store(q: Tensor) -> Tensor:
    return q.cast(dtypes.uint8).contiguous()


def _finish(acc: Tensor) -> Tensor:
    return _store(_clip(acc.cast(dtypes.float32) * MULT).round() + OUT_ZP)


def _rounded_by(rounding: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, w, b: _store(rounding(_clip(_acc(x, w, b).cast(dtypes.float32) * MULT)) + OUT_ZP)


def _half_away(q: Tensor) -> Tensor:
    return (q < 0).where((q - 0.5).ceil(), (q + 0.5).floor())


def _half_odd(q: Tensor) -> Tensor:
    return ((q * 0.5).trunc() != q.trunc() * 0.5).where((q - 0.5).ceil(), (q + 0.5).floor())


REJECTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "round half up": _rounded_by(lambda q: (q + 0.5).floor()),
    "round half down": _rounded_by(lambda q: (q - 0.5).ceil()),
    "round half away from zero": _rounded_by(_half_away),
    "round half to odd": _rounded_by(_half_odd),
    "truncate": _rounded_by(lambda q: q.trunc()),
    "floor": _rounded_by(lambda q: q.floor()),
    "no rounding": _rounded_by(lambda q: q),
    "no lower clamp": lambda x, w, b: _store(
        (_acc(x, w, b).cast(dtypes.float32) * MULT).minimum(255 - OUT_ZP).round() + OUT_ZP
    ),
    "no upper clamp": lambda x, w, b: _store(
        (_acc(x, w, b).cast(dtypes.float32) * MULT).maximum(-OUT_ZP).round() + OUT_ZP
    ),
    "no clamp": lambda x, w, b: _store((_acc(x, w, b).cast(dtypes.float32) * MULT).round() + OUT_ZP),
    "lower clamp below 0": lambda x, w, b: _store(
        _clip(_acc(x, w, b).cast(dtypes.float32) * MULT, lo=-OUT_ZP - 1).round() + OUT_ZP
    ),
    "upper clamp above 255": lambda x, w, b: _store(
        _clip(_acc(x, w, b).cast(dtypes.float32) * MULT, hi=256 - OUT_ZP).round() + OUT_ZP
    ),
    "fractional clamp": lambda x, w, b: _store(
        _clip(_acc(x, w, b).cast(dtypes.float32) * MULT, lo=-9.5).round() + OUT_ZP
    ),
    "clamp before the multiplication": lambda x, w, b: _store(
        (_clip(_acc(x, w, b).cast(dtypes.float32), -(2.0**16), 2.0**15) * MULT).round() + OUT_ZP
    ),
    "zero point before rounding": lambda x, w, b: _store(
        (_clip(_acc(x, w, b).cast(dtypes.float32) * MULT) + OUT_ZP).round()
    ),
    "fractional zero point": lambda x, w, b: _store(_clip(_acc(x, w, b).cast(dtypes.float32) * MULT).round() + 100.25),
    "result is float": lambda x, w, b: (_clip(_acc(x, w, b).cast(dtypes.float32) * MULT).round() + OUT_ZP).contiguous(),
    "result is int8": lambda x, w, b: (
        _clip(_acc(x, w, b).cast(dtypes.float32) * MULT, -128, 127).round().cast(dtypes.int8).contiguous()
    ),
    "result is shifted after the cast": lambda x, w, b: (
        (_clip(_acc(x, w, b).cast(dtypes.float32) * MULT).round() + OUT_ZP).cast(dtypes.uint8) ^ 1
    ).contiguous(),
    "bias added in float": lambda x, w, b: _store(
        _clip((_acc(x, w).cast(dtypes.float32) + b.contiguous().cast(dtypes.float32)) * MULT).round() + OUT_ZP
    ),
    "bias added after the multiplication": lambda x, w, b: _store(
        _clip(_acc(x, w).cast(dtypes.float32) * MULT + b.contiguous().cast(dtypes.float32)).round() + OUT_ZP
    ),
    "bias by row": lambda x, w, b: _finish(_acc(x, w) + b.contiguous().reshape(ROWS, 1)),
    "two biases": lambda x, w, b: _finish(_acc(x, w, b) + b[::-1].contiguous()),
    "constant beside the bias": lambda x, w, b: _finish(_acc(x, w, b) + 5),
    "constant bias": lambda x, w, b: _finish(_acc(x, w) + 500),
    "bias times two": lambda x, w, b: _finish(_acc(x, w) + b.contiguous() * 2),
    "sum times two": lambda x, w, b: _finish(_acc(x, w, b) * 2),
    "per-channel multiplier": lambda x, w, b: _store(
        _clip(_acc(x, w, b).cast(dtypes.float32) * (b.contiguous().cast(dtypes.float32) * 2.0**-20)).round() + OUT_ZP
    ),
    "run-time multiplier": lambda x, w, b: _store(
        _clip(_acc(x, w, b).cast(dtypes.float32) * b[:1].contiguous().cast(dtypes.float32) * 2.0**-20).round() + OUT_ZP
    ),
    "negative multiplier": lambda x, w, b: _store(_clip(_acc(x, w, b).cast(dtypes.float32) * -MULT).round() + OUT_ZP),
    "multiplier outside float32": lambda x, w, b: _store(
        _clip(_acc(x, w, b).cast(dtypes.float32) * 0.0123).round() + OUT_ZP
    ),
    "division by a run-time scale": lambda x, w, b: _store(
        _clip(_acc(x, w, b).cast(dtypes.float32) / (b[:1].contiguous().cast(dtypes.float32) + 40000.0) * 40).round()
        + OUT_ZP
    ),
    "weights stored transposed": lambda x, w, b: _finish(
        _int(x, IN_ZP).matmul(_int(w.T.contiguous().realize().reshape(K, N), W_ZP)) + b.contiguous()
    ),
    "input stored transposed": lambda x, w, b: _finish(
        _int(x.T.contiguous().realize(), IN_ZP).T.matmul(_int(w, W_ZP).T) + b.contiguous()
    ),
    "weights read with a wider pitch": lambda x, w, b: _finish(
        _int(x[:, : K // 2], IN_ZP).matmul((w.cast(dtypes.int32) - W_ZP)[:, : K // 2].T) + b.contiguous()
    ),
    "input read backwards": lambda x, w, b: _finish(
        (x.contiguous().cast(dtypes.int32) - IN_ZP).flip(1).matmul(_int(w, W_ZP).T) + b.contiguous()
    ),
    "zero point minus code": lambda x, w, b: _finish(
        (IN_ZP - x.contiguous().cast(dtypes.int32)).matmul(_int(w, W_ZP).T) + b.contiguous()
    ),
    "input zero point above 255": lambda x, w, b: _finish(_int(x, 256).matmul(_int(w, W_ZP).T) + b.contiguous()),
    "weight zero point below 0": lambda x, w, b: _finish(_int(x, IN_ZP).matmul(_int(w, -1).T) + b.contiguous()),
    "weights are int8": lambda x, w, b: _finish(
        _int(x, IN_ZP).matmul((w.bitcast(dtypes.int8).contiguous().cast(dtypes.int32) - 1).T) + b.contiguous()
    ),
    "input clamped": lambda x, w, b: _finish(_int(x, IN_ZP).clip(0, 100).matmul(_int(w, W_ZP).T) + b.contiguous()),
    "input squared": lambda x, w, b: _finish(_int(x, IN_ZP).square().matmul(_int(w, W_ZP).T) + b.contiguous()),
    "16-bit products": lambda x, w, b: _finish(
        (x.contiguous().cast(dtypes.int16) - IN_ZP)
        .matmul((w.contiguous().cast(dtypes.int16) - W_ZP).T, dtype=dtypes.int16)
        .cast(dtypes.int32)
        + b.contiguous()
    ),
    "float sum": lambda x, w, b: _store(
        _clip(
            (
                (x.contiguous().cast(dtypes.float32) - IN_ZP).matmul((w.contiguous().cast(dtypes.float32) - W_ZP).T)
                + b.contiguous()
            )
            * MULT
        ).round()
        + OUT_ZP
    ),
    "maximum instead of sum": lambda x, w, b: _finish(
        (_int(x, IN_ZP).reshape(ROWS, 1, K) * _int(w, W_ZP).reshape(1, N, K)).max(2) + b.contiguous()
    ),
    "sum over two axes": lambda x, w, b: _finish(
        (
            _int(x, IN_ZP).reshape(ROWS, 1, K).expand(ROWS, 3, K).reshape(ROWS, 3, 1, K).expand(ROWS, 3, N, K)
            * _int(w, W_ZP).reshape(1, 1, N, K)
        ).sum((1, 3))
        + b.contiguous()
    ),
    "residual before requantisation": lambda x, w, b: _finish(
        _acc(x, w, b) + x.contiguous()[:, :N].cast(dtypes.int32) * 16
    ),
    "producer fused into it": lambda x, w, b: _finish(
        ((x.cast(dtypes.int32) + 1) // 2 - IN_ZP).matmul(_int(w, W_ZP).T) + b.contiguous()
    ),
    "consumer fused into it": lambda x, w, b: (
        (
            (_clip(_acc(x, w, b).cast(dtypes.float32) * MULT).round() + OUT_ZP).cast(dtypes.uint8).cast(dtypes.float32)
            - OUT_ZP
        )
        * 0.25
    ),
}


@pytest.fixture(scope="module")
def data() -> Data:
    """Sums that are multiples of 256, so that with MULT = 2^-9 half of the products end in exactly .5."""
    rng = np.random.default_rng(0)
    x = (rng.integers(-2, 16, (ROWS, K)) * 16 + IN_ZP).clip(IN_ZP, 255).astype(np.uint8)
    w = (rng.integers(-8, 8, (N, K)) * 16 + W_ZP).clip(0, 255).astype(np.uint8)
    w = np.where((w - W_ZP) % 16 == 0, w, W_ZP).astype(np.uint8)
    return Data(x, w, (rng.integers(-40, 40, N) * 256).astype(np.int32))


def test_the_layer_itself_is_taken(chip, cpu: str, data: Data) -> None:
    """The yardstick: unchanged, these operands and this way of writing it do reach the chip."""

    def layer(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return _finish(_acc(x, w, b))

    assert np.array_equal(answer("CORAL", layer, data), answer(cpu, layer, data))
    assert (stats().chip_programs, stats().host_programs) == (1, 0)


def test_the_data_has_ties_of_all_kinds(data: Data) -> None:
    acc = (data.x.astype(np.int64) - IN_ZP) @ (data.w.astype(np.int64) - W_ZP).T + data.b
    doubled = np.unique((acc * 2 // 512)[acc % 512 == 256])
    ties = [d for d in doubled if -2 * OUT_ZP < d < 2 * (255 - OUT_ZP)]
    assert {(d > 0, (d - 1) // 2 % 2) for d in ties} == {(sign, parity) for sign in (True, False) for parity in (0, 1)}


@pytest.mark.parametrize("name", REJECTED)
def test_near_miss_stays_on_the_host(chip, cpu: str, data: Data, name: str) -> None:
    got = answer("CORAL", REJECTED[name], data)
    counted = stats()
    assert (counted.chip_programs, chip.calls) == (0, [])
    assert counted.host_programs >= 1
    want = answer(cpu, REJECTED[name], data)
    assert got.dtype == want.dtype
    assert np.array_equal(got, want)


def test_sum_too_long_for_int32_stays_on_the_host(chip, cpu: str) -> None:
    """K = 33,026 is one more than 32 bits hold; tinygrad also splits such a sum over two kernels."""
    rng = np.random.default_rng(0)
    data = Data(
        rng.integers(0, 256, (1, 33026), dtype=np.uint8), rng.integers(0, 256, (1, 33026), dtype=np.uint8), None
    )

    def layer(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return _finish(_acc(x, w))

    assert np.array_equal(answer("CORAL", layer, data), answer(cpu, layer, data))
    assert stats().chip_programs == 0


def test_selection_switched_off_and_on(chip, cpu: str, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both switches act at once, although tinygrad caches the programs of both kinds."""

    def layer(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return _finish(_acc(x, w, b))

    want = answer(cpu, layer, data)

    def places() -> tuple[int, int]:
        reset_stats()
        assert np.array_equal(answer("CORAL", layer, data), want)
        return stats().chip_programs, stats().host_programs

    for _ in range(2):
        assert places() == (1, 0)
        with selection_off(), selection_off():
            assert places() == (0, 1)
        assert places() == (1, 0)
        monkeypatch.setenv("CORAL_SELECT", "0")
        assert places() == (0, 1)
        monkeypatch.delenv("CORAL_SELECT")
