"""Decoders that do not fit a chip: several programs per token against the bit model of the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from codegen.transformer.harness import random_cache, random_model, random_token, run
from coral.chip import Chip
from coral.codegen import ShapeError
from coral.codegen import transformer as tf
from coral.codegen.transformer.model import logits
from coral.codegen.transformer.parts import Part, parts

LONG = tf.Geometry(16, 16, 2, 2, 1200)
STORIES_42M = tf.Geometry(512, 1376, 8, 8, 1024)


def check(model: tf.Transformer, form: tf.Form, positions: list[int], seed: int | None = None) -> list[Part]:
    """Every token at those positions; parameters are loaded for each program of each token."""
    found, chip = parts(model, form), Chip(seed=seed)
    for position in positions:
        cache = random_cache(model, position)
        x = random_token(model, position)
        y, keys, values = x, [], []
        for part in found:
            run(chip, part.program.caching())
            program = part.program.execution(position)
            raw, _ = run(chip, program, part.program.pack(y, position, part.of(cache)))
            names = [layer.name for layer in program.outputs]
            token = part.program.unpack(position, dict(zip(names, raw, strict=True)))
            y = token.result
            assert token.keys is not None
            assert token.values is not None
            keys.append(token.keys)
            values.append(token.values)
        expected = tf.step(model, x, cache, position)
        expected = logits(model, expected) if form.logits else expected
        np.testing.assert_array_equal(y, expected, err_msg=f"position {position}")
        np.testing.assert_array_equal(np.concatenate(keys), cache.keys[:, position])
        np.testing.assert_array_equal(np.concatenate(values), cache.values[:, position])
    return found


def test_layers_in_two_programs() -> None:
    model = random_model(LONG, 18, vocabulary=70)
    found = check(model, tf.Form(logits=True, keep=True, loop=True), [1, 70], 3)
    assert [(part.first, len(part.program.model.blocks)) for part in found] == [(0, 16), (16, 2)]
    assert [part.program.form.logits for part in found] == [False, True]
    assert not any(part.program.form.keep or part.program.form.loop for part in found)
    assert found[0].program.token != found[1].program.token


def test_what_fits_is_one_program() -> None:
    model = random_model(LONG, 3)
    (part,) = parts(model, tf.Form(loop=True))
    assert part.program.form.loop
    assert tf.fitting(model, tf.Form()) is not model
    assert tf.fitting(model, tf.Form()).geometry == LONG


def test_a_layer_that_does_not_fit_says_by_how_much() -> None:
    wide = random_model(tf.Geometry(512, 6400, 8, 8, 256), 2)
    with pytest.raises(ShapeError, match=r"layer 0 alone does not fit: .* \d+ of 6400 hidden units"):
        parts(wide, tf.Form())
    with pytest.raises(ShapeError, match=r"layer 0 alone does not fit"):
        tf.fitting(wide, tf.Form())


def test_contexts_that_leave_no_room_for_weights() -> None:
    """stories42M's context of 1,024 leaves none; half of it does."""
    model = random_model(STORIES_42M, 1)
    with pytest.raises(ShapeError, match=r"352 of 1376 hidden units"):
        parts(model, tf.Form())
    shorter = tf.fitting(model, tf.Form())
    assert shorter.geometry == replace(STORIES_42M, context=512)
    with pytest.raises(ShapeError, match=r"352 of 1376 hidden units"):
        tf.fitting(model, tf.Form(), least=600)


@pytest.mark.slow
def test_the_42m_shape() -> None:
    """Eight layers of dim 512, one per program."""
    model = tf.fitting(random_model(STORIES_42M, 8), tf.Form())
    found = check(model, tf.Form(), [1, 100, 511], 0)
    assert [part.first for part in found] == list(range(8))
    sent = sum(len(part.program.parameters) for part in found)
    assert 25e6 < sent < 30e6
