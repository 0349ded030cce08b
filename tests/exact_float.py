"""float32 arithmetic with exact rationals: the reference that shares nothing with numpy or with coral.numerics."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np


def exact32(value: Fraction) -> Fraction:
    """Nearest float32, half to even, of a rational in float32's finite range (subnormals included)."""
    if value == 0:
        return value
    exponent = max(math.floor(math.log2(abs(value))), -126)
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > -126 and abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    ulp = Fraction(2) ** (exponent - 23)
    return round(value / ulp) * ulp


def exact_requantise(acc: int, mult: Fraction, low: Fraction, high: Fraction, zero_point: int, top: int = 255) -> int:
    product = exact32(exact32(Fraction(acc)) * mult)
    return min(max(round(min(max(product, low), high)) + zero_point, 0), top)


def fraction(x: float | np.floating) -> Fraction:
    return Fraction(float(x))
