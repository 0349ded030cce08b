"""The chip's arithmetic, defined once: float32 output stage, quantisation formulas, spline unit, layer references.

Everything here is a function of arrays and numbers; nothing knows instructions, files or devices. ``F(x)`` below means
"rounded to float32". Source: docs/numerics.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
RSQRT_SCALE = 46340
"""floor(sqrt(2^31)): squares of the tile softmax's reciprocal square root fit int32."""


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

    def scaled(self, factor: float) -> Spline:
        """The table with every coefficient ``F(c * F(factor))``: how the compiler brings it to output steps."""
        return replace(self, coefficients=f32(self.coefficients * f32(factor)))

    def _polynomial(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        c = self.coefficients[np.searchsorted(self.breakpoints, x, side="right")]
        y: Any = c[..., SPLINE_ORDER]
        for term in range(SPLINE_ORDER - 1, -1, -1):
            y = c[..., term] + x * y
        return y


def _table(bits: str, **kind: bool) -> Spline:
    values = np.array([int(word, 16) for word in bits.split()], np.uint32).view(np.float32)
    return Spline(values[:40].reshape(SPLINE_SEGMENTS, SPLINE_ORDER + 1), values[40:], **kind)


LOGISTIC = _table("""
    3e00549c 3d5db7c6 3c111a70 3a29f7bb 3795f260 3f04a187 3eab6803 3daee024 3c251eb8 39f136b6
    3f077562 3ea46b63 3d8371fd 3b05681a ba04c80f 3f00006a 3e7fe396 baa8c7fe bcc9f57d bb94c0e4
    3f0000b8 3e7fb331 3af2682d bccf35b5 3b9cb2b2 3eddc7c6 3ec56c6f bdd72011 3c5be5c6 ba2ff6d3
    3f43d750 3defbc0b bcb6a9cd 3afb0c86 b882c2d7 3f74cc57 3c85560c bb168355 39187e2a b669a584
    c0b479b1 c03dc92e bfaba1f5 3db069f8 3fe71fbc 4099a343 41078f0a""")
TANH = _table("""
    a4900000 3f7ff70c 3b680451 beba0904 3dd5f798 ba573b0b 3f8093c1 3adbd5c7 bec90026 3e18f5d1
    bd3ca9f0 3f9d4c4a bed767c2 bd0dc79e 3d0ba428 be1a30e6 3fcafa1b bf619bbb 3e6d2b1d bcc4f1f0
    3db3d973 3f8fbe7e bf0af73c 3df7f011 bc2af5e5 3ef8c2c6 3f07de5d be581426 3d1c1331 bb2c17e8
    3f542a99 3e103ad2 bd346efe 3bcae85e b9acb424 3f7a3662 3c65a31f bb56a9c4 39b319ae b760dafc
    3eb83694 3f47de0b 3f965533 4001ec93 402bcf21 40630652 409ac3f4""", odd=True)  # fmt: skip
EXP_65535 = _table("""
    44e5f55c 441d8dc9 42a2afa8 4095cab4 3dcf45c2 4659a168 45d554f6 44a0412a 42d9b585 4060d81f
    470121be 46a24017 459fe964 44112fbe 41cb5dd3 47449ff0 4715e4c2 4639c0ca 44da36f1 42ca1d8d
    476d9bf8 4751c52c 469f09c7 45702e8d 4394ba1d 477d4a57 4774d594 46daa6a6 45d3725e 4434d33d
    477ff661 477f9434 46fc2a11 461a0641 44c72aea 477fff00 477ffef3 46fffa9e 462a207c 451c7c63
    c0ff9475 c0af6050 c07bb089 c02cb4ec bfe0f9a9 bf6abd95 be32671f""")
RSQRT = _table("""
    401774aa c03aa03d 401b19a9 bf884aed 3e4375ff 4009d075 c00c8cff 3fc141fd bf0c6a0b 3da66a68
    3ff7d508 bfcc5845 3f632952 be856fdc 3cffb721 3fde2545 bf9325ab 3f0363d0 bdf7eecc 3c3ec282
    3fc6d5cf bf530bc5 3e96feed bd64530c 3b8cc91c 3fb2da7d bf199e29 3e31e7c5 bcd9c230 3ad968d1
    3fa395cf beeb2d04 3de41050 bc69e220 3a43bfa9 3fa395cf beeb2d04 3de41050 bc69e220 3a43bfa9
    3f96545a 3fb9f21d 3fe5fda8 401006eb 40332a53 405bff99 7f800000""", range_reduce=True)  # fmt: skip
"""The compiler's tables, for output steps of 1 (EXP_65535: of 1/65535); ``scaled(inv(s_out))`` is what it loads."""
HARD_SWISH = Spline(
    f32([[0.0] * 5, [0.0, 0.5, 1 / 6, 0.0, 0.0], *[[0.0, 1.0, 0.0, 0.0, 0.0]] * 6]), f32([-3.0, 3.0, *[np.inf] * 5])
)
"""x * min(max(x + 3, 0), 6) / 6, which Google's compiler leaves to the host."""
LOGISTIC_CLAMP, TANH_CLAMP, EXP_CLAMP = (float(np.float32(limit)) for limit in (10.396732, 6.8748069, -13.038098))
"""Real values to which the non-linear unit's input is clamped: both sides for the odd ones, below for EXP."""


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
        v = np.asarray(acc.astype(np.float32) * f32(mult))
        np.fmin(np.fmax(v, f32(clamp_min), out=v), f32(clamp_max), out=v)
        if nlu is not None:
            v = np.asarray(nlu(v))
    # Within the codes' range all of this is exact in float32.
    np.fmin(np.fmax(np.rint(v, out=v), f32(-out_zp), out=v), f32(2**bits - 1 - out_zp), out=v)
    return np.add(v, f32(out_zp), out=v).astype(np.uint8 if bits == 8 else np.uint16)


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
    weights = w.astype(np.int16) - per_channel.astype(np.int16).reshape(-1, 1)
    exact = exact_dtype(weights)
    products = (x.astype(exact) - exact(in_zp)) @ weights.astype(exact).T
    return requantise(accumulators(products, b), scales, clamp_min, clamp_max, out_zp)


def exact_dtype(weights: NDArray[np.int16]) -> type[np.float32] | type[np.float64]:
    """The float type in which sums of products of 8-bit differences with ``weights[n]`` are exact in any order."""
    largest = 255 * int(np.abs(weights.astype(np.int64)).reshape(len(weights), -1).sum(1).max(initial=0))
    return np.float32 if largest <= 2**24 else np.float64


def accumulators(sums: NDArray[Any], bias: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
    """int32 accumulators, modulo 2^32 as on the chip, from exact sums ``[..., N]`` and a bias ``[N]`` or none."""
    return (sums.astype(np.int64) + (0 if bias is None else bias.astype(np.int64))).astype(np.int32)


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
    return requantise(accumulators(acc), mult, clamp_min, clamp_max, out_zp)


def constant_multiplier(s_in: float, c: ArrayLike, s_out: float) -> Any:
    """Multiplier ``F(F(s_in * c) * inv(s_out))`` of a MUL by real constants c (scalar or ``[C]``, any sign).

    :raises NumericsError: a scale is not positive and finite, or a multiplier is not finite
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        m = f32(f32(_scale("input scale", s_in) * f32(c)) * inv(s_out))
    if not np.all(np.isfinite(m)):
        raise NumericsError(f"scales {s_in} / {s_out} and the constants {c} give the multiplier {m}: not finite")
    return m


def constant_bias(s_in: float, codes: ArrayLike, s_c: float) -> NDArray[np.int32]:
    """Integer addend ``round(codes * F(s_c) / F(s_in))`` of an ADD of constants, given as codes less zero point.

    Exact quotient, half away from zero: float32 steps would give 127 instead of 128 in MoveNet.
    :raises NumericsError: an addend does not fit int32
    """
    ratio = Fraction(float(_scale("constant's scale", s_c))) / Fraction(float(_scale("input scale", s_in)))
    values = np.asarray(codes)
    if values.size and ratio * int(np.abs(values).max()) >= 2**31:
        raise NumericsError(f"a constant of scale {s_c} in steps of {s_in} does not fit int32")
    n, d = ratio.numerator, ratio.denominator
    addends = [(1 if v > 0 else -1) * ((2 * abs(v) * n + d) // (2 * d)) for v in values.ravel().tolist()]
    return np.array(addends, np.int32).reshape(values.shape)


def average_multiplier(s_in: float, n: ArrayLike, s_out: float, *, newer: bool) -> Any:
    """Multiplier of an average over n values (scalar or array): ``F(F(s_in * F(1 / n)) * inv(s_out))`` in newer
    programs, ``F(F(s_in * inv(s_out)) / n)`` in older ones.
    """
    if newer:
        return constant_multiplier(s_in, np.float32(1) / f32(n), s_out)
    return f32(rescale_multiplier(s_in, s_out) / f32(n))


def softmax_multipliers(s_in: float, beta: float, s_out: float) -> tuple[float, float, float, float]:
    """Multipliers of SOFTMAX on the tiles: of the exponents, their sum, the squared root, the products.

    :raises NumericsError: bad scales
    """
    s_exp, s_rsqrt = inv(65535), inv(RSQRT_SCALE)
    s_inverse = multiplier(s_rsqrt, s_rsqrt, s_exp)
    square, product = multiplier(s_rsqrt, s_rsqrt, s_inverse), multiplier(s_exp, s_inverse, s_out)
    return float(constant_multiplier(s_in, beta, 1)), float(s_exp), float(square), float(product)


def softmax_on_tiles(x: NDArray[np.uint8], s_in: float, beta: float, s_out: float, z_out: int) -> NDArray[np.uint8]:
    """SOFTMAX of newer programs over the last axis: 16-bit EXP, sum, squared reciprocal square root, products.

    :param x: uint8 ``[..., n]``; their zero point does not matter
    :raises NumericsError: n above 32,768 (the sum would leave int32), bad scales
    """
    if not 0 < x.shape[-1] <= 2**15:
        raise NumericsError(f"SOFTMAX on the tiles takes 1 to {2**15} values a row, not {x.shape[-1]}")
    exp, sums, square, product = softmax_multipliers(s_in, beta, s_out)
    below = x.astype(np.int32) - x.max(axis=-1, keepdims=True)
    e = requantise(below, exp, EXP_CLAMP, 0, 0, bits=16, nlu=EXP_65535).astype(np.int64)
    total = accumulators(e.sum(axis=-1, keepdims=True))
    root = requantise(total, sums, -np.inf, np.inf, 0, bits=16, nlu=RSQRT.scaled(RSQRT_SCALE)).astype(np.int64)
    inverse = requantise(accumulators(root * root), square, 0, 2**15, 0, bits=16)
    return requantise(accumulators(e * inverse), product, *clamps(s_out, z_out), z_out)


def softmax_on_scalar_core(
    x: NDArray[np.uint8], s_in: float, z_in: int, beta: float, s_out: float, z_out: int
) -> NDArray[np.uint8]:
    """SOFTMAX of older programs over the last axis, in float32 steps; exp2 and reciprocal are taken as correctly
    rounded, which the chip's are not always (a result within about 1e-4 of a tie may be one off).
    """
    values = (x.astype(np.float32) - f32(z_in)) * _scale("input scale", s_in)
    exponents = (values - values.max(axis=-1, keepdims=True)) * f32(float(f32(beta)) * np.log2(np.e))
    e = f32(np.exp2(exponents.astype(np.float64)))
    share = e * (np.float32(1) / np.cumsum(e, axis=-1, dtype=np.float32)[..., -1:]) * inv(s_out)
    return np.rint(np.clip(np.rint(share) + f32(z_out), 0, 255)).astype(np.uint8)


def l2_multipliers(s_in: float, s_out: float) -> tuple[float, float, float]:
    """Of L2_NORMALIZATION: multiplier of the squares, factor of the RSQRT table, multiplier of the products.

    :raises NumericsError: bad scales
    """
    k = f32(np.float32(65535) / inv(s_in))
    return float(constant_multiplier(s_in, s_in, 1)), float(k), float(constant_multiplier(s_in, inv(k), s_out))


def l2_normalise(x: NDArray[np.uint8], s_in: float, z_in: int, s_out: float, z_out: int) -> NDArray[np.uint8]:
    """L2_NORMALIZATION over the last axis: 16-bit reciprocal square root of the sum of squares (at least one step).

    :raises NumericsError: more than 33,025 values a row, bad scales
    """
    check_accumulator(x.shape[-1])
    square, k, product = l2_multipliers(s_in, s_out)
    centred = x.astype(np.int64) - z_in
    total = accumulators((centred * centred).sum(axis=-1, keepdims=True))
    root = requantise(total, square, square, np.inf, 0, bits=16, nlu=RSQRT.scaled(k)).astype(np.int64)
    return requantise(accumulators(centred * root), product, *clamps(s_out, z_out), z_out)


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
