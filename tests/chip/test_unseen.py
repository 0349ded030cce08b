"""What no program of the corpus shows: small programs of our own on one tile, against the layer-level judge.

The programs are those of ``coral selftest`` (coral/apps/probes/forms.py); verified on the simulator only
(docs/ASSUMPTIONS.md, rows 4 and 24-30).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from coral.apps.probes import forms
from coral.apps.probes.forms import FORMS, MASK, RESULT, TILE, Form
from coral.chip import Chip, ChipState
from tests.chip.builder import fence, input_to_tile, output_from_tile, program


def on_chip(form: Form, seed: int | None) -> np.ndarray:
    """Codes to words from 0 on, the body, results of at most 64 words a packet (all of them written)."""
    units, words = -(-form.x.size // 8), -(-form.expected.size // 8) * 2
    outputs = [i for k in range(0, words, 64) for i in output_from_tile(TILE, min(64, words - k), RESULT + k)]
    chip = Chip(seed=seed)
    chip.feed(0, program(*input_to_tile(TILE, units), *form.body, *fence(MASK), *outputs))
    chip.feed(1, form.x.tobytes().ljust(units * 8, b"\0"))
    assert chip.run() is ChipState.FINISHED
    assert np.concatenate([*chip.written])[: form.expected.size].all()
    return np.frombuffer(b"".join(chip.outputs), np.uint8)[: form.expected.size]


@pytest.mark.parametrize("data", range(3))
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("make", FORMS, ids=lambda make: make.__name__)
def test_form(make: Callable[[int], Form], seed: int | None, data: int) -> None:
    form = make(data)
    np.testing.assert_array_equal(on_chip(form, seed), form.expected)
    assert form.expected.size == 1 or len(set(form.expected.tolist())) > 3, "not a constant"


def test_copies_among_the_forms() -> None:
    """What the judge must say whatever the arithmetic: unchanged values come out unchanged."""
    resized = forms.nearest_resize(0)
    assert (resized.expected.reshape(6, 10, 4)[1::2, 1::2] == resized.x[0]).all()
    joined = forms.concatenation(0)
    np.testing.assert_array_equal(joined.expected[32:64], joined.x[0, 32:64])


def test_a_form_and_a_copy_through_an_older_identity() -> None:
    form = forms.then_through_the_identity(forms.l2_normalisation(0))
    np.testing.assert_array_equal(on_chip(form, None), form.expected)
