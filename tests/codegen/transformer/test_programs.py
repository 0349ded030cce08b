"""One program per token on the simulated chip, byte for byte what the bit model computes."""

from __future__ import annotations

import pytest

from codegen.transformer.harness import Session, random_model
from coral.codegen import transformer as tf

TINY = tf.Geometry(dim=32, hidden=48, heads=4, kv_heads=2, context=24)
WIDE = tf.Geometry(dim=144, hidden=200, heads=3, kv_heads=3, context=72)
FORMS = {
    "sent": tf.Form(),
    "kept": tf.Form(keep=True),
    "looped": tf.Form(keep=True, loop=True),
    "looped, sent": tf.Form(loop=True, logits=True),
    "spread, sent": tf.Form(spread=True, logits=True),
    "spread, kept": tf.Form(spread=True, keep=True),
}
EVERY = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@EVERY
def test_tokens(form):
    session = Session(tf.TransformerProgram(random_model(TINY, 2, vocabulary=100), form))
    session.begin(1)
    for position in (1, 2, 3, 4, 5, 6):
        session.check(position)
    session.begin(21)
    for position in (21, 22, 23):
        session.check(position)


@pytest.mark.parametrize("form", [tf.Form(spread=True), tf.Form(spread=True, keep=True)], ids=str)
def test_several_groups(form):
    """More than 64 positions, outputs of several groups, a last tile with fewer outputs."""
    session = Session(tf.TransformerProgram(random_model(WIDE, 2), form))
    session.begin(62)
    for position in (62, 63, 64, 65):
        session.check(position)


@pytest.mark.parametrize("form", [tf.Form(), tf.Form(spread=True)], ids=str)
def test_stage_by_stage(form):
    session = Session(tf.TransformerProgram(random_model(TINY, 2), form))
    session.begin(6)
    session.check_stages(6, 1)
