"""One program per token on the simulated chip, byte for byte what the bit model computes."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import numpy as np
import pytest

from codegen.transformer.harness import Session, random_model, random_token
from coral.codegen import transformer as tf
from coral.codegen.errors import CodegenError, ShapeError
from coral.llm.calibrate import begin, embed, observe, quantise
from coral.llm.checkpoint import load
from coral.llm.reference import sample

TINY = tf.Geometry(dim=32, hidden=48, heads=4, kv_heads=2, context=24)
LARGE_HEADS = tf.Geometry(dim=128, hidden=64, heads=2, kv_heads=1, context=12)
LONG = tf.Geometry(dim=144, hidden=64, heads=3, kv_heads=3, context=512)
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


@pytest.mark.parametrize("form", [FORMS["sent"], FORMS["spread, kept"]], ids=["sent", "spread"])
def test_without_tables_of_our_own(form):
    session = Session(tf.TransformerProgram(random_model(TINY, 2, vocabulary=100, own_tables=False), form))
    session.begin(1)
    for position in (1, 2, 3):
        session.check(position)
    if not form.keep:
        session.check_stages(4, 1)


def test_caches_larger_than_the_staging_buffer():
    program = tf.TransformerProgram(random_model(LONG, 2), tf.Form(spread=True))
    session = Session(program)
    session.begin(510)
    assert len(program.pack(random_token(session.model, 510), 510, session.cache)) > 1 << 18
    session.check(510)


@pytest.mark.parametrize("form", [FORMS["looped"], FORMS["spread, sent"]], ids=["looped", "spread"])
def test_heads_of_64(form):
    """Ones and channels of values in rows of their own."""
    session = Session(tf.TransformerProgram(random_model(LARGE_HEADS, 1, vocabulary=8), form))
    session.begin(2)
    for position in (2, 3):
        session.check(position)


@EVERY
@pytest.mark.slow
def test_random_order_of_units(form):
    """Twenty orders of units: identical bytes."""
    program = tf.TransformerProgram(random_model(TINY, 2, vocabulary=100), form)
    for seed in range(20):
        session = Session(program, seed)
        session.begin(6)
        session.check(6)
        session.check(7)


@pytest.mark.parametrize("form", [FORMS["looped"], FORMS["spread, sent"]], ids=["looped", "spread"])
def test_two_random_orders(form):
    program = tf.TransformerProgram(random_model(TINY, 2, vocabulary=100), form)
    for seed in (1, 2):
        session = Session(program, seed)
        session.begin(6)
        session.check(6)


@pytest.mark.parametrize("form", [tf.Form(), tf.Form(spread=True)], ids=str)
def test_stage_by_stage(form):
    session = Session(tf.TransformerProgram(random_model(TINY, 2), form))
    session.begin(6)
    session.check_stages(6, 1)


def random_case(seed):
    """A program of a random decoder that fits, and a position."""
    rng = np.random.default_rng(seed)
    while True:
        heads, size = int(rng.integers(1, 9)), 8 * int(rng.integers(1, 9))
        kv_heads = int(rng.choice([n for n in range(1, heads + 1) if heads % n == 0]))
        context, hidden, layers = int(rng.integers(4, 150)), 4 * int(rng.integers(1, 100)), int(rng.integers(1, 4))
        spread, loop, keep, report, logits = (bool(flag) for flag in rng.integers(0, 2, 5))
        form = tf.Form(spread, loop and not spread, keep, report, logits)
        if heads * size % 16 or heads * size > 320:
            continue
        geometry = tf.Geometry(heads * size, hidden, heads, kv_heads, context)
        model = random_model(geometry, layers, seed, int(rng.integers(1, 1200)))
        with suppress(ShapeError):
            return tf.TransformerProgram(model, form), int(rng.integers(1, context))


def check_random(seed):
    program, position = random_case(seed)
    session = Session(program, None if seed % 2 else seed)
    session.begin(position)
    session.check(position)


@pytest.mark.parametrize("seed", range(4))
def test_random_decoders(seed):
    check_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 64))
def test_many_random_decoders(seed):
    check_random(seed)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((24, 48, 4, 2, 8), "dim 24 must be a multiple of 16"),
        ((32, 50, 4, 2, 8), "hidden 50"),
        ((32, 48, 3, 1, 8), "dim 32 is no multiple of the 3 heads"),
        ((32, 48, 4, 3, 8), "4 heads share 3 key/value heads unevenly"),
        ((48, 48, 4, 2, 8), "head size 12 must be a multiple of 8"),
        ((256, 48, 2, 2, 8), "head size 128"),
        ((32, 48, 4, 2, 5000), "context 5000"),
        ((32, 48, 0, 2, 8), "positive"),
    ],
)
def test_geometries_that_no_program_has(sizes, message):
    with pytest.raises(ShapeError, match=message):
        tf.Geometry(*sizes)


def test_what_does_not_fit_says_by_how_much():
    large = random_model(tf.Geometry(512, 1376, 8, 8, 64), 8)
    with pytest.raises(ShapeError, match=r"hidden units of a layer find no room|overwritten"):
        tf.TransformerProgram(large)
    with pytest.raises(ShapeError, match=r"\d+ bytes of buffers, keys and values, a tile has 196608"):
        tf.TransformerProgram(random_model(tf.Geometry(512, 64, 8, 8, 512), 2), tf.Form(False))
    with pytest.raises(ShapeError, match=r"buffers take \d+ rows more than a tile has"):
        tf.TransformerProgram(random_model(tf.Geometry(64, 64, 8, 8, 4000), 2), tf.Form(True))
    small = random_model(TINY, 2)
    with pytest.raises(ShapeError, match="one tile per layer"):
        tf.TransformerProgram(small, tf.Form(spread=True, loop=True))
    with pytest.raises(ShapeError, match="needs tables of our own"):
        tf.TransformerProgram(random_model(TINY, 2, own_tables=False), tf.Form(loop=True))
    with pytest.raises(ShapeError, match="17 layers"):
        tf.TransformerProgram(random_model(TINY, 17), tf.Form(loop=True))


def test_arguments():
    program = tf.TransformerProgram(random_model(TINY, 1))
    cache, token = tf.Cache.empty(program.model), np.zeros(32, np.uint8)
    for position in (0, 24):
        for make in (program.execution, program.initialise):
            with pytest.raises(ShapeError, match=f"position {position}"):
                make(position)
    with pytest.raises(ShapeError, match="must be given"):
        program.pack(token, 3)
    with pytest.raises(ShapeError, match=r"uint8 \[32\]"):
        program.pack(token[:8], 3, cache)
    with pytest.raises(CodegenError, match="no stage is called 'x'"):
        program.probe(3, 0, "x")
    looped = tf.TransformerProgram(program.model, tf.Form(loop=True))
    with pytest.raises(CodegenError, match="in a loop"):
        looped.probe(3, 0, "q")


STORIES_15M = tf.Geometry(288, 768, 6, 6, 256)
STORIES_260K = tf.Geometry(64, 172, 8, 4, 512)


@pytest.mark.parametrize(
    ("geometry", "layers", "form", "limit_bytes"),
    [
        (STORIES_260K, 5, tf.Form(keep=True, loop=True, logits=True), 16 << 10),
        (STORIES_15M, 6, tf.Form(keep=True), 110 << 10),
        (STORIES_15M, 6, tf.Form(), 110 << 10),
    ],
    ids=["260K looped", "15M kept", "15M sent"],
)
def test_instruction_bytes_do_not_depend_on_the_position(geometry, layers, form, limit_bytes):
    program = tf.TransformerProgram(random_model(geometry, layers, vocabulary=512), form)
    sizes = {len(program.execution(p).bitstreams[0].data) for p in (1, 2, 63, 64, geometry.context - 1)}
    assert len(sizes) == 1
    assert sizes.pop() <= limit_bytes


def parts(first, behind, size):
    """Ranges of positions, each a test of its own."""
    return [range(at, min(at + size, behind)) for at in range(first, behind, size)]


def ends(positions):
    """A test's name."""
    return f"{positions[0]}-{positions[-1]}"


@pytest.mark.slow
@pytest.mark.parametrize("positions", [*parts(1, 131, 26), range(254, 256)], ids=ends)
@pytest.mark.parametrize("form", [tf.Form(keep=True), tf.Form()], ids=["kept", "sent"])
def test_130_tokens_of_the_15m_shape(form, positions):
    session = Session(tf.TransformerProgram(random_model(STORIES_15M, 6), form))
    session.begin(positions[0])
    for position in positions:
        session.check(position)


@pytest.mark.slow
@pytest.mark.parametrize("form", [tf.Form(keep=True), tf.Form()], ids=["kept", "sent"])
def test_more_than_256_positions_of_the_15m_shape(form):
    session = Session(tf.TransformerProgram(random_model(tf.Geometry(288, 768, 6, 6, 260), 6), form))
    session.begin(254)
    for position in (254, 255, 256):
        session.check(position)


@cache
def stories_260k(path):
    """A decoder, codes of the words of a story that the float model wrote, and the cache behind its last word."""
    checkpoint = load(path)
    model = quantise(checkpoint, observe(checkpoint, [sample(checkpoint, 160, 0.8, s) for s in range(4)]))
    words = sample(checkpoint, 512, 0.8, 7)
    tokens = [embed(model, checkpoint, words[p % len(words)]) for p in range(512)]
    full, _ = begin(model, checkpoint, 1)
    for position in range(1, 512):
        tf.step(model, tokens[position], full, position)
    return model, tokens, full


class Story(Session):
    """Real weights and words."""

    def __init__(self, data, form, seed=None):
        model, self.tokens, self.full = stories_260k(data / "stories" / "stories260K.bin")
        super().__init__(tf.TransformerProgram(model, form), seed)

    def begin(self, positions):
        """The story up to there, by the bit model."""
        self.cache = tf.Cache.empty(self.model)
        for mine, all_of_them in ((self.cache.keys, self.full.keys), (self.cache.values, self.full.values)):
            mine[:, :positions] = all_of_them[:, :positions]
        self.bring(positions)

    def check(self, position, x=None):
        """The story's word unless another is given."""
        return super().check(position, self.tokens[position] if x is None else x)


@pytest.mark.slow
@pytest.mark.parametrize("positions", parts(1, 512, 73), ids=ends)
def test_all_positions_of_stories260k(data, positions):
    story = Story(data, tf.Form(keep=True, loop=True))
    story.begin(positions[0])
    for position in positions:
        story.check(position)


STORY_FORMS = {
    "kept, looped": tf.Form(keep=True, loop=True, logits=True),
    "sent, looped": tf.Form(loop=True, logits=True),
    "kept": tf.Form(keep=True),
    "sent": tf.Form(),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", STORY_FORMS.values(), ids=STORY_FORMS)
def test_random_order_of_units_with_stories260k(data, form):
    """Twenty orders, a different position in each, among them the ends of groups of 4 and 64."""
    for seed in range(20):
        first = (3, 62, 63, 64, 127, 255, 256, 300, 509, 510)[seed % 10]
        story = Story(data, form, seed)
        story.begin(first)
        story.check(first)
        story.check(first + 1)


@pytest.mark.slow
@pytest.mark.parametrize("form", [tf.Form(keep=True), tf.Form()], ids=["kept", "sent"])
def test_random_order_of_units_of_the_15m_shape(form):
    program = tf.TransformerProgram(random_model(STORIES_15M, 6), form)
    for seed in range(20):
        session = Session(program, seed)
        first = (2, 62, 63, 64, 127, 254)[seed % 6]
        session.begin(first)
        session.check(first)
        session.check(first + 1)
