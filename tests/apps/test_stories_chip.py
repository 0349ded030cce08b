"""A whole token per call, through the driver, on a software stick; every result compared with the bit model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from story_models import random_checkpoint

from coral.apps.stories.chip import ChipEngine, ChipMismatch
from coral.chip import Chip
from coral.codegen.transformer import Form
from coral.driver import GivenUp, open_stick
from coral.llm.calibrate import observe, quantise
from coral.llm.checkpoint import Checkpoint, Config, shapes
from coral.llm.engine import EngineError
from coral.runtime.canary import canary
from coral.stick import Effect, Fault, FaultPlan, Kind, SoftwareStick, StickBus, stand_in_firmware

CONFIG = Config(dim=32, hidden=48, layers=2, heads=4, kv_heads=2, vocabulary=40, context=12)


@pytest.fixture(scope="module")
def checkpoint():
    rng = np.random.default_rng(3)
    made = {k: (rng.normal(size=s) / np.sqrt(s[-1])).astype(np.float32) for k, s in shapes(CONFIG).items()}
    made |= {k: np.ones_like(a) for k, a in made.items() if k.endswith("norm")}
    made["embedding"] *= 6
    return Checkpoint(CONFIG, **made, classifier=made["embedding"])


@pytest.fixture(scope="module")
def model(checkpoint):
    rng = np.random.default_rng(4)
    stories = [[1, *rng.integers(2, CONFIG.vocabulary, CONFIG.context - 1)] for _ in range(4)]
    return quantise(checkpoint, observe(checkpoint, stories))


def stick(bold, **fields):
    bus = StickBus([SoftwareStick(chip=Chip(bold=bold), **fields)])
    return open_stick(bus, firmware=stand_in_firmware(), check_firmware_hash=False, canary=canary())


@pytest.mark.parametrize(
    "form",
    [Form(), Form(spread=True), Form(keep=True, loop=True, logits=True)],
    ids=["sent", "spread", "kept"],
)
def test_two_stories_and_another_end(checkpoint, model, form):
    with stick(form.keep) as device:
        engine = ChipEngine("chip", checkpoint, model, device, form, check=True)
        first, second = engine.session(1), engine.session(1)
        seen = [first.step(np.array([i]))[0] for i in (5, 9)]
        second.step(np.array([7]))
        first.step(np.array([11]))
        first.rewind(2)
        again = first.step(np.array([9]))[0]
        np.testing.assert_array_equal(again, seen[1])
        usage = engine.usage()
        assert usage.calls >= 5
        assert 0 < usage.predicted_seconds < 1
        assert {w.name for w in engine.weights()} >= {"0 qkv", "1 wo w2", "1 w1 w3"}
        with pytest.raises(EngineError, match="ids of"):
            first.step(np.array([CONFIG.vocabulary]))
        for _ in range(second.position, CONFIG.context):
            second.step(np.array([3]))
        with pytest.raises(EngineError, match="context of 12"):
            second.step(np.array([3]))


@pytest.mark.parametrize("form", [Form(), Form(keep=True, loop=True, logits=True)], ids=["sent", "kept"])
def test_instructions_go_ahead(checkpoint, model, form):
    """One program more than inputs is on its way; stories in turn, a fault, another program on the stick, the end."""
    faults = FaultPlan(Fault(Kind.INSTRUCTIONS, 9, Effect.STALL), Fault(Kind.INPUT, 11, Effect.STALL))
    with stick(form.keep, fault_plan=faults) as device:
        engine = ChipEngine("chip", checkpoint, model, device, form, check=True)
        first, second = engine.session(1), engine.session(1)
        for session in (first, first, first, second, second, first, first):
            session.step(np.array([5]))
        call = device.announce(engine.parts[0].program.execution(1))
        device.ensure_cached(engine.caching[0])
        with pytest.raises(GivenUp):
            call.result()
        first.step(np.array([7]))
        first.rewind(3)
        for _ in range(first.position, CONFIG.context):
            first.step(np.array([3]))
        assert engine._ahead is None
        assert faults.unfired == []
        assert device.counters.recoveries == 2


def test_what_went_ahead_takes_no_time(checkpoint, model):
    spent = []
    for ahead in (False, True):
        with stick(False) as device:
            engine = ChipEngine("chip", checkpoint, model, device, Form(), ahead=ahead)
            session = engine.session(1)
            session.step(np.array([5]))
            before = engine.usage()
            session.step(np.array([6]))
            spent.append(engine.usage().since(before))
    assert spent[0].calls == spent[1].calls == 1
    assert spent[0].to_chip_bytes == spent[1].to_chip_bytes
    assert spent[1].predicted_seconds < spent[0].predicted_seconds


def test_caches_are_loaded_again_when_the_stick_forgot(checkpoint, model):
    with stick(True) as device:
        engine = ChipEngine("chip", checkpoint, model, device, Form(keep=True), check=True)
        session = engine.session(1)
        session.step(np.array([5]))
        device.forget()
        session.step(np.array([6]))


def test_a_wrong_result_is_told(checkpoint, model):
    with stick(False) as device:
        engine = ChipEngine("chip", checkpoint, model, device, Form(), check=True)
        engine.model = quantise(checkpoint, observe(checkpoint, [[1, 2, 3]]))
        with pytest.raises(ChipMismatch, match=r"position 1: .* codes differ, first"):
            engine.session(1).step(np.array([5]))
    with pytest.raises(EngineError, match="2 stories at once"):
        engine.session(2)


def test_a_model_in_two_programs():
    """18 layers and keys of 1,200 positions: the parameters of both programs go to the stick with every token."""
    config = Config(dim=16, hidden=16, layers=18, heads=2, kv_heads=2, vocabulary=40, context=1200)
    checkpoint = random_checkpoint(config)
    model = quantise(checkpoint, observe(checkpoint, [[1, *range(2, 12)]]))
    bus = StickBus([stick_ := SoftwareStick(fault_plan=FaultPlan(Fault(Kind.INPUT, 3, Effect.STALL)))])
    with open_stick(bus, firmware=stand_in_firmware(), check_firmware_hash=False, canary=canary()) as device:
        engine = ChipEngine("chip", checkpoint, model, device, Form(keep=True, loop=True, logits=True), check=True)
        assert len(engine.parts) == 2
        session, before = engine.session(1), engine.usage()
        for word in (5, 9, 11):
            session.step(np.array([word]))
        used = engine.usage().since(before)
        assert used.calls == 3 * 4
        assert used.to_chip_bytes > 3 * engine.streamed_bytes > 0
        assert stick_.faults.unfired == []
        assert {w.name for w in engine.weights()} >= {"16 qkv", "17 wo w2", "classifier"}
        whole = ChipEngine("chip", checkpoint, replace(model, blocks=model.blocks[:3]), device, Form())
        assert whole.streamed_bytes == 0
