"""Random perturbations of the layer: whatever the selection decides, the bytes are the CPU's; and it decides right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinygrad import Tensor, dtypes

from backend.layers import Data, answer
from coral.backend import reset_stats, stats


@dataclass(frozen=True)
class Variant:
    """The layer's constants and the ways in which it may differ from the layer that the chip computes."""

    rows: tuple[int, ...]
    n: int
    k: int
    in_zp: int
    w_zp: int
    out_zp: int
    lo: int
    hi: int
    exponent: int
    bias: str
    rounding: str
    clamp: str
    swapped: bool

    @property
    def is_the_layer(self) -> bool:
        """Whether nothing but constants and shapes was varied, within their limits."""
        written_so = (self.bias, self.rounding, self.clamp, self.swapped)
        return (
            written_so in (("vector", "even", "before", False), ("none", "even", "before", False))
            and 0 <= self.in_zp <= 255
            and 0 <= self.w_zp <= 255
        )

    @property
    def is_another_layer(self) -> bool:
        """With one row or without a bias, swapped factors are a layer of x's rows as weights: taken or not."""
        return self.swapped and self.bias == "none"

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        assert b is not None
        left = x.contiguous().cast(dtypes.int32) - self.in_zp
        right = (w.contiguous().cast(dtypes.int32) - self.w_zp).T
        acc = (right.T.matmul(left.T)).T if self.swapped else left.matmul(right)
        match self.bias:
            case "vector":
                acc = acc + b.contiguous()
            case "constant":
                acc = acc + 77
            case "twice":
                acc = acc + b.contiguous() + b.contiguous()
        scaled = acc.cast(dtypes.float32) * 2.0**self.exponent
        if self.clamp == "before":
            scaled = scaled.clip(self.lo - self.out_zp, self.hi - self.out_zp)
        rounded = scaled.round() if self.rounding == "even" else (scaled + 0.5).floor()
        if self.clamp == "after":
            rounded = rounded.clip(self.lo - self.out_zp, self.hi - self.out_zp)
        shifted = rounded + self.out_zp
        if self.clamp == "last":
            shifted = shifted.clip(self.lo, self.hi)
        return shifted.cast(dtypes.uint8).contiguous()


@st.composite
def variants(draw: st.DrawFn) -> Variant:
    """Mostly the layer itself, with any constants; each departure from it in about one case of ten."""

    def usually(common: Any, *rare: Any) -> Any:
        return draw(st.sampled_from([common] * (8 * len(rare)) + list(rare)))

    rows = draw(st.sampled_from([(1,), (2,), (5,), (2, 3), (1, 4), (2, 1, 3)]))
    code = st.integers(0, 255)
    lo, hi = sorted(draw(st.lists(code, min_size=2, max_size=2, unique=True)))
    return Variant(
        rows=rows,
        n=draw(st.integers(2, 9)),
        k=draw(st.integers(2, 40)),
        in_zp=usually(draw(code), -1, 256),
        w_zp=usually(draw(code), -1, 300),
        out_zp=draw(code),
        lo=lo,
        hi=hi,
        exponent=draw(st.integers(-12, -4)),
        bias=usually(draw(st.sampled_from(["vector", "none"])), "constant", "twice"),
        rounding=usually("even", "up"),
        clamp=usually("before", "after", "last"),
        swapped=len(rows) == 1 and usually(False, True),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(variant=variants(), seed=st.integers(0, 1000))
def test_bytes_and_decision(chip, cpu: str, variant: Variant, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (*variant.rows, variant.k), dtype=np.uint8)
    w = rng.integers(0, 256, (variant.n, variant.k), dtype=np.uint8)
    data = Data(x, w, rng.integers(-5000, 5000, variant.n).astype(np.int32))
    reset_stats()
    got = answer("CORAL", variant, data)
    counted = stats()
    assert np.array_equal(got, answer(cpu, variant, data))
    if not variant.is_another_layer:
        expected = (1, 0) if variant.is_the_layer else (0, 1)
        assert (counted.chip_programs, counted.host_programs) == expected
