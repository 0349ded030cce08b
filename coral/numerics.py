"""The chip's arithmetic, defined once: float32 output stage, quantisation formulas, spline unit, layer references.

Everything here is a function of arrays and numbers; nothing knows instructions, files or devices. ``F(x)`` below means
"rounded to float32". Source: docs/numerics.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coral import CoralError

ACTIVATION_RANGES: dict[str, tuple[float, float]] = {
    "NONE": (-np.inf, np.inf),
    "RELU": (0.0, np.inf),
    "RELU6": (0.0, 6.0),
    "RELU_N1_TO_1": (-1.0, 1.0),
}
"""Real-valued range of each fused activation, by its TFLite name."""

SPLINE_SEGMENTS, SPLINE_ORDER = 8, 4
MAX_ADD_WEIGHT = 32767
MAX_K = (2**31 - 1) // 255**2
"""Longest sum of products of two differences of uint8 codes that always fits int32: 33,025."""
_NARROWEST_SCALE = 2.0**-100


class NumericsError(CoralError):
    """A number, dtype or shape for which the chip's arithmetic is not defined; the message gives value and limit."""


def f32(x: ArrayLike) -> Any:
    """``F(x)``: x rounded to float32, half to even, as ``np.float32`` (or a float32 array for an array)."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float32)[()]


def _scale(name: str, s: ArrayLike) -> Any:
    rounded = f32(s)
    if not np.all(np.isfinite(rounded) & (rounded > 0)):
        raise NumericsError(f"{name} is {s}: a scale must be positive and finite in float32")
    return rounded


def inv(s: ArrayLike) -> Any:
    """``F(1 / F(s))``. :raises NumericsError: s is not positive and finite, or its reciprocal is not finite."""
    with np.errstate(over="ignore"):
        reciprocal = np.float32(1) / _scale("scale", s)
    if not np.all(np.isfinite(reciprocal)):
        raise NumericsError(f"scale {s} has no float32 reciprocal: it must be at least {2.0**-128}")
    return reciprocal


def multiplier(s_x: float, s_w: ArrayLike, s_y: float) -> Any:
    """Requantisation multiplier ``F(F(s_x * s_w) * inv(s_y))``: a float32, or a float32 ``[N]`` for an array s_w.

    The order matters: ``F(s_x * s_w / s_y)`` differs from it in the last bit for about a third of all scales.
    :raises NumericsError: a scale is not positive and finite, or the multiplier leaves float32
    """
    with np.errstate(over="ignore", under="ignore"):
        m = f32(f32(_scale("input scale", s_x) * _scale("weight scale", s_w)) * inv(_scale("output scale", s_y)))
    if not np.all(np.isfinite(m) & (m > 0)):
        raise NumericsError(f"scales {s_x} * {s_w} / {s_y} give the multiplier {m}: not a positive float32")
    return m


def rescale_multiplier(s_in: float, s_out: float) -> Any:
    """Multiplier ``F(s_in * inv(s_out))`` of operators without weights: QUANTIZE between codes, RELU, RELU6."""
    return multiplier(s_in, 1.0, s_out)


def clamps(s_y: float, z_y: int, activation: str = "NONE", lo_code: int = 0, hi_code: int = 255) -> tuple[float, float]:
    """Clamps (min, max) in output steps relative to ``z_y``, as Google's compiler computes them; often not integers.

    ``lo = F((lo_code - z_y) * s_y)``, cut to the activation's real range, then ``F(lo * inv(s_y))``; hi likewise.

    :param activation: a key of :data:`ACTIVATION_RANGES`
    :return: Python floats that are exact float32 values
    :raises NumericsError: unknown activation, bad scale, ``z_y`` outside ``lo_code..hi_code``
    """
    if activation not in ACTIVATION_RANGES:
        raise NumericsError(f"activation {activation!r} is not one of {', '.join(ACTIVATION_RANGES)}")
    if not lo_code <= z_y <= hi_code:
        raise NumericsError(f"output zero point {z_y} lies outside its codes {lo_code}..{hi_code}")
    scale, low, high = _scale("output scale", s_y), *ACTIVATION_RANGES[activation]
    lo = f32(max(f32(f32(lo_code - z_y) * scale), low))
    hi = f32(min(f32(f32(hi_code - z_y) * scale), high))
    return float(f32(lo * inv(scale))), float(f32(hi * inv(scale)))


def integer_clamps(z_y: int, lo: int = 0, hi: int = 255) -> tuple[float, float]:
    """Clamps ``(lo - z_y, hi - z_y)`` for output codes lo..hi. :raises NumericsError: not 0 <= lo <= hi <= 255."""
    if not 0 <= lo <= hi <= 255 or not 0 <= z_y <= 255:
        raise NumericsError(
            f"codes lo={lo}, hi={hi}, zero point {z_y} must satisfy 0 <= lo <= hi <= 255, 0 <= z <= 255"
        )
    return float(lo - z_y), float(hi - z_y)


@dataclass(frozen=True)
class Spline:
    """Table of the non-linear unit: eight polynomials of degree 4 between seven breakpoints.

    :param coefficients: float32 ``[8, 5]``, constant term first
    :param breakpoints: float32 ``[7]``, ascending; +inf for unused ones
    :param odd: the table holds ``x >= 0``; the result gets the sign of x (TANH)
    :param range_reduce: ``x = m * 4^e`` with m in [1, 4); the result is ``p(m) * 2^-e`` (reciprocal square root)
    :raises NumericsError: shapes, dtypes or the order of the breakpoints
    """

    coefficients: NDArray[np.float32]
    breakpoints: NDArray[np.float32]
    odd: bool = False
    range_reduce: bool = False

    def __post_init__(self) -> None:
        c, b = self.coefficients, self.breakpoints
        if c.shape != (SPLINE_SEGMENTS, SPLINE_ORDER + 1) or b.shape != (SPLINE_SEGMENTS - 1,):
            raise NumericsError(f"a spline has coefficients [8, 5] and breakpoints [7], not {c.shape} and {b.shape}")
        if c.dtype != np.float32 or b.dtype != np.float32:
            raise NumericsError(f"a spline's tables are float32, not {c.dtype} and {b.dtype}")
        if not np.all(b[1:] >= b[:-1]):
            raise NumericsError(f"a spline's breakpoints must ascend: {b.tolist()}")

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values of the function at x (float32, any shape), in output steps.

        Horner's scheme, each product and each sum rounded to float32. With ``range_reduce`` the chip's result for
        x <= 0 or not finite is not known; here it is NaN (which the output stage stores as code 0).
        """
        with np.errstate(invalid="ignore", over="ignore"):
            if self.range_reduce:
                valid = np.isfinite(x) & (x > 0)
                mantissa, exponent = np.frexp(np.where(valid, x, np.float32(1)))
                quarter = (exponent - 1) // 2
                y = np.ldexp(self._polynomial(np.ldexp(mantissa, exponent - 2 * quarter)), -quarter)
                return f32(np.where(valid, y, np.nan))
            if self.odd:
                return np.where(np.signbit(x), np.float32(-1), np.float32(1)) * self._polynomial(np.abs(x))
            return self._polynomial(x)

    def _polynomial(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        c = self.coefficients[np.searchsorted(self.breakpoints, x, side="right")]
        y: Any = c[..., SPLINE_ORDER]
        for term in range(SPLINE_ORDER - 1, -1, -1):
            y = c[..., term] + x * y
        return y


def requantise(
    acc: NDArray[np.int32],
    mult: ArrayLike,
    clamp_min: float,
    clamp_max: float,
    out_zp: int,
    *,
    bits: int = 8,
    nlu: Spline | None = None,
) -> NDArray[Any]:
    """The op unit's output stage: ``round_half_even(nlu(clamp(F(F(acc) * mult)))) + out_zp``, saturated.

    :param acc: int32 sums (bias included), any shape ``[..., C]``
    :param mult: float32 scalar or ``[C]``
    :param clamp_min: and ``clamp_max``, float32, relative to ``out_zp`` (real values in front of the non-linear unit)
    :param bits: 8 for uint8 or 16 for uint16 codes
    :return: codes of acc's shape; a NaN (0 * inf in padding channels) becomes ``clamp_min``, as ``fmax`` has it
    :raises NumericsError: acc is not int32, bits is neither 8 nor 16, ``out_zp`` does not fit
    """
    if acc.dtype != np.int32:
        raise NumericsError(f"accumulators must be int32, not {acc.dtype}")
    if bits not in (8, 16) or not 0 <= out_zp < 2**bits:
        raise NumericsError(f"bits={bits}, out_zp={out_zp}: bits must be 8 or 16 and the zero point must fit them")
    with np.errstate(over="ignore", invalid="ignore"):
        v = acc.astype(np.float32) * f32(mult)
        v = np.fmin(np.fmax(v, f32(clamp_min)), f32(clamp_max))
        if nlu is not None:
            v = nlu(v)
    y = np.rint(v).astype(np.float64) + out_zp
    return np.fmin(np.fmax(y, 0), 2**bits - 1).astype(np.uint8 if bits == 8 else np.uint16)


def check_accumulator(k: int, bias: NDArray[np.integer[Any]] | None = None) -> None:
    """Whether sums of k products of code differences and a bias always fit int32: ``k * 255^2 + max|bias| < 2^31``.

    :raises NumericsError: they may not; the message gives both terms
    """
    largest = 0 if bias is None or bias.size == 0 else int(np.abs(bias.astype(np.int64)).max())
    if k * 255**2 + largest >= 2**31:
        raise NumericsError(
            f"sums over K = {k} with a bias of up to {largest} can overflow int32: K * 65025 + max|bias| must stay "
            f"below {2**31} (K <= {MAX_K} without bias)"
        )


def fully_connected(
    x: NDArray[np.uint8],
    w: NDArray[np.uint8],
    b: NDArray[np.int32] | None,
    in_zp: int,
    w_zp: ArrayLike,
    mult: ArrayLike,
    clamp_min: float,
    clamp_max: float,
    out_zp: int,
) -> NDArray[np.uint8]:
    """Layer reference of FULLY_CONNECTED: ``requantise(sum_k (x - in_zp) * (w - w_zp) + b)``.

    :param x: uint8 ``[M, K]``
    :param w: uint8 ``[N, K]`` (int8 weights as code + 128)
    :param b: int32 ``[N]`` or None
    :param w_zp: weight zero point, scalar or ``[N]``
    :param mult: float32 scalar or ``[N]``
    :return: uint8 ``[M, N]``; accumulation is modulo 2^32, as on the chip
    :raises NumericsError: shapes, dtypes, zero points outside 0..255
    """
    if x.dtype != np.uint8 or w.dtype != np.uint8 or (b is not None and b.dtype != np.int32):
        dtypes = f"{x.dtype}, {w.dtype}, {None if b is None else b.dtype}"
        raise NumericsError(f"x, w, b must be uint8, uint8, int32, not {dtypes}")
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or (b is not None and b.shape != (w.shape[0],)):
        shapes = f"{x.shape}, {w.shape}, {None if b is None else b.shape}"
        raise NumericsError(f"x, w, b must have shapes [M, K], [N, K], [N], not {shapes}")
    per_channel, scales = np.asarray(w_zp), np.asarray(mult)
    if per_channel.shape not in ((), w.shape[:1]) or scales.shape not in ((), w.shape[:1]):
        raise NumericsError(f"w_zp and mult must be scalars or [{len(w)}], not {per_channel.shape} and {scales.shape}")
    if not 0 <= in_zp <= 255 or not np.all((per_channel >= 0) & (per_channel <= 255)):
        raise NumericsError(f"zero points must lie in 0..255, not in_zp={in_zp}, w_zp={w_zp}")
    # Differences of codes are below 2^8 and K is far below 2^37: float64 sums are exact in any order.
    products = (x.astype(np.float64) - in_zp) @ (w.astype(np.float64) - per_channel.reshape(-1, 1)).T
    acc = products.astype(np.int64) + (0 if b is None else b.astype(np.int64))
    return requantise(acc.astype(np.int32), scales, clamp_min, clamp_max, out_zp)


def add_weights(s_1: float, s_2: float) -> tuple[int, int]:
    """Integers (w1, w2) of ADD with ``w2 / w1`` next to ``F(s_2) / F(s_1)``, both at most 32,767.

    The best rational approximation of whichever of the quotient and its inverse is at most 1.
    :raises NumericsError: a scale is not positive and finite, or their quotient is beyond 32,767
    """
    first, second = (Fraction(float(_scale("operand scale", s))) for s in (s_1, s_2))
    smaller = min(first, second) / max(first, second)
    weights = smaller.limit_denominator(MAX_ADD_WEIGHT)
    if weights == 0:
        raise NumericsError(f"operand scales {s_1} and {s_2} differ by more than a factor of {MAX_ADD_WEIGHT}")
    small, large = weights.numerator, weights.denominator
    return (large, small) if second <= first else (small, large)


def add_multiplier(s_1: float, w_1: int, s_y: float) -> Any:
    """Multiplier ``F(F(s_1 / w1) * inv(s_y))`` of ADD. :raises NumericsError: bad scale, w1 outside 1..32767."""
    if not 1 <= w_1 <= MAX_ADD_WEIGHT:
        raise NumericsError(f"ADD weight {w_1} must lie in 1..{MAX_ADD_WEIGHT}")
    return f32(f32(_scale("operand scale", s_1) / np.float32(w_1)) * inv(s_y))


def add(
    a: NDArray[np.uint8],
    b: NDArray[np.uint8],
    z_a: int,
    z_b: int,
    weights: tuple[int, int],
    mult: float,
    clamp_min: float,
    clamp_max: float,
    out_zp: int,
) -> NDArray[np.uint8]:
    """Layer reference of ADD: ``requantise(w1 * a + w2 * b - (w1 * z_a + w2 * z_b))``, shapes equal or broadcast.

    :raises NumericsError: an operand is not uint8
    """
    if a.dtype != np.uint8 or b.dtype != np.uint8:
        raise NumericsError(f"operands of ADD must be uint8, not {a.dtype} and {b.dtype}")
    w_1, w_2 = weights
    acc = a.astype(np.int64) * w_1 + b.astype(np.int64) * w_2 - (w_1 * z_a + w_2 * z_b)
    return requantise(acc.astype(np.int32), mult, clamp_min, clamp_max, out_zp)


def scale_and_zero_point(lo: float, hi: float) -> tuple[float, int]:
    """Asymmetric uint8 quantisation of the real range lo..hi, widened to contain 0: (scale, zero point).

    ``scale = F((hi - lo) / 255)``, 1.0 for a range without width (also below 2^-100 per step, where float32 arithmetic
    would leave its normal range); ``zero point = round_half_even(-lo / scale)`` in 0..255.
    :raises NumericsError: lo or hi is not finite, lo > hi
    """
    if not (np.isfinite(lo) and np.isfinite(hi) and lo <= hi):
        raise NumericsError(f"a range must be finite and ascending, not {lo}..{hi}")
    low, high = min(float(lo), 0.0), max(float(hi), 0.0)
    scale = float(f32((high - low) / 255))
    if scale < _NARROWEST_SCALE:
        return 1.0, 0
    return scale, min(max(round(-low / scale), 0), 255)


def quantise(array: ArrayLike, s: float, z: int) -> NDArray[np.uint8]:
    """Codes ``round_half_even(clamp(F(F(x) * inv(s)), -z, 255 - z)) + z`` of real values, uint8, same shape.

    :raises NumericsError: bad scale, z outside 0..255, a value is NaN
    """
    x, (low, high) = np.asarray(array, np.float32), integer_clamps(z)
    if np.isnan(x).any():
        raise NumericsError("NaN has no code: quantise finite values or infinities only")
    with np.errstate(over="ignore"):
        return (np.rint(np.clip(x * inv(s), np.float32(low), np.float32(high))) + z).astype(np.uint8)


def dequantise(codes: NDArray[np.uint8], s: float, z: int) -> NDArray[np.float32]:
    """Real values ``F(F(codes - z) * F(s))``, float32, same shape."""
    return (codes.astype(np.float32) - np.float32(z)) * _scale("scale", s)


def quantise_bias(bias: ArrayLike, s_x: float, s_w: ArrayLike) -> NDArray[np.int32]:
    """int32 bias ``round_half_even(b / F(s_x * s_w))``, shape ``[N]``; s_w scalar or ``[N]``.

    :raises NumericsError: a value is not finite or does not fit int32
    """
    step = f32(_scale("input scale", s_x) * _scale("weight scale", s_w)).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        codes = np.rint(np.asarray(bias, np.float64) / step)
    if not np.all(np.abs(codes) < 2**31):
        largest = np.abs(np.asarray(bias)).max()
        raise NumericsError(f"a bias of {largest} in steps of {step} (input scale * weight scale) does not fit int32")
    return codes.astype(np.int32)
