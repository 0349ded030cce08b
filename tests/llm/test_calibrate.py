"""The quantised decoder stays near the float one."""

from __future__ import annotations

import numpy as np
import pytest

from coral.codegen.transformer import step
from coral.codegen.transformer.model import logits
from coral.llm.calibrate import begin, embed, host_logits, observe, quantise
from coral.llm.checkpoint import CheckpointError, load
from coral.llm.reference import Reference, sample


@pytest.fixture(scope="module")
def story_model(data):
    return load(data / "stories" / "stories260K.bin")


def surprise(values, token):
    shifted = values - values.max()
    return float(np.log(np.exp(shifted).sum()) - shifted[token])


def compare(checkpoint, calibration, stories, length):
    """(perplexity in float, with the host's classifier, with the chip's, share of equal best words, predictions)."""
    model = quantise(checkpoint, observe(checkpoint, [sample(checkpoint, length, 0.8, s) for s in calibration]))
    total, equal, count = np.zeros(3), 0, 0
    for seed in stories:
        story = sample(checkpoint, length, 0.8, seed)
        reference = Reference(checkpoint)
        reference.step(story[0], 0)
        cache, _ = begin(model, checkpoint, story[0])
        for p in range(1, len(story) - 1):
            exact = reference.step(story[p], p)
            y = step(model, embed(model, checkpoint, story[p]), cache, p)
            host = host_logits(model, checkpoint, y)
            chip = (logits(model, y).astype(float) - 128) * model.logit_scale
            total += [surprise(v, story[p + 1]) for v in (exact, host, chip)]
            equal, count = equal + (exact.argmax() == host.argmax()), count + 1
    return (*np.exp(total / count), equal / count, count)


def test_quality_of_one_story(story_model):
    exact, host, chip, same, _ = compare(story_model, [100, 101], [0], 64)
    assert host < 1.1 * exact
    assert chip < 1.1 * exact
    assert same > 0.8


@pytest.mark.slow
def test_quality_of_many_stories(story_model):
    exact, host, chip, same, count = compare(story_model, range(100, 108), range(20), 160)
    print(f"{count} predictions: perplexity {exact:.3f}, host {host:.3f}, chip {chip:.3f}, same best word {same:.3f}")
    assert count > 3000
    assert host < 1.1 * exact
    assert chip < 1.1 * exact


def test_nothing_to_observe(story_model):
    with pytest.raises(CheckpointError, match="two tokens"):
        observe(story_model, [[1]])


def test_float_model_writes_a_story(story_model):
    """Greedy tokens are the usual beginning; half of a story must not depend on how the other half is asked for."""
    first = sample(story_model, 40, 0.8, 3)
    again = sample(story_model, 20, 0.8, 3)
    assert first[:20] == again
