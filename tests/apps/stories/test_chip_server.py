"""A token is one program, behind the server: several visitors, and a stick that fails in the middle of their stories.

In the bold form keys and values live on the chip: they must be brought again after every change of visitor and every
recovery, or the text is another one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from story_models import random_checkpoint

from apps.stories.conftest import TOKENIZER, renew_stick, served
from apps.stories.test_server import post
from coral.apps.stories.chip import ChipEngine
from coral.apps.stories.engines import BitEngine, Model, open_engine
from coral.apps.stories.scheduler import Limits
from coral.chip import Chip
from coral.codegen.transformer import Form
from coral.devices import simulated_stick
from coral.driver import open_stick
from coral.llm.calibrate import observe, quantise
from coral.llm.checkpoint import Config
from coral.llm.story import Sampling, Stories
from coral.runtime.canary import canary
from coral.stick import Effect, Fault, FaultPlan, Kind, SoftwareStick, StickBus, stand_in_firmware

CONFIG = Config(dim=32, hidden=48, layers=2, heads=4, kv_heads=2, vocabulary=300, context=40)
BOLD = Form(keep=True, loop=True, logits=True)
FORMS = {"conservative": Form(logits=True), "bold": BOLD, "bold, unrolled": Form(keep=True, logits=True)}
BODIES = [
    {"prompt": prompt, "max_tokens": words, "temperature": heat, "seed": seed}
    for seed, (prompt, words, heat) in enumerate(
        [(" word1 word2", 12, 0), (" word3", 14, 1.0), (" word1 word2 word9", 9, 0.7), (" word20", 3, 0)]
    )
]
FAULTS = [
    Fault(Kind.OUT, 40, Effect.STALL),
    Fault(Kind.IN, 9, Effect.TIMEOUT),
    Fault(Kind.EVENT, 30, Effect.DROP),
    Fault(Kind.INPUT, 14, Effect.ERROR),
    Fault(Kind.INSTRUCTIONS, 25, Effect.DISCONNECT, seconds=0.1),
    Fault(Kind.IN, 22, Effect.SHORT, size=3),
    Fault(Kind.INSTRUCTIONS, 45, Effect.FATAL, size=1),
]


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    """Checkpoint and quantised decoder."""
    checkpoint, rng = random_checkpoint(CONFIG, 5), np.random.default_rng(4)
    stories = [[1, *rng.integers(259, CONFIG.vocabulary, CONFIG.context - 1)] for _ in range(4)]
    return checkpoint, quantise(checkpoint, observe(checkpoint, stories))


def expected(parts: tuple[Any, Any]) -> list[str]:
    """What every body is told, by the bit model alone."""
    engine, texts = BitEngine("bits", *parts, BOLD), []
    for body in BODIES:
        how = Sampling(body["temperature"], seed=body["seed"], words=body["max_tokens"])
        stories = Stories(engine.session(1), TOKENIZER, [TOKENIZER.encode(body["prompt"])], how, CONFIG.context)
        text = ""
        while not stories.done:
            text += "".join(new for _, new in stories.advance())
        texts.append(text)
    return texts


@pytest.mark.parametrize(
    "form",
    [FORMS["conservative"], FORMS["bold"], pytest.param(FORMS["bold, unrolled"], marks=pytest.mark.slow)],
    ids=FORMS,
)
def test_several_visitors_and_a_stick_that_fails(parts: tuple[Any, Any], form: Form) -> None:
    stick = SoftwareStick(chip=Chip(bold=form.keep or form.loop))
    bus = StickBus([stick])
    with open_stick(bus, firmware=stand_in_firmware(), check_firmware_hash=False, canary=canary()) as device:
        engine = ChipEngine("chip", *parts, device, form, check=True)
        with served(engine, TOKENIZER, Limits(turn_seconds=0.05)) as server:  # a turn is a word or two
            stick.faults = FaultPlan(*FAULTS)
            with ThreadPoolExecutor(len(BODIES)) as pool:
                answers = pool.map(
                    lambda body: post(server, "/v1/completions", {**body, "user": body["prompt"]}), BODIES
                )
                got = [answer["choices"][0]["text"] for _, _, answer in answers]
            assert server.scheduler.totals.failed == 0
        assert stick.faults.unfired == []
    assert got == expected(parts)


def test_the_switch(parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, fresh_stick: None) -> None:
    """CORAL_BOLD=1: the program's simulated stick is a bold one, and the engine takes the bold form."""
    monkeypatch.setenv("MOCKCORAL", "1")
    seen: list[list[np.ndarray]] = []
    for bold, form in (("1", BOLD), ("", Form(logits=True))):
        monkeypatch.setenv("CORAL_BOLD", bold)
        renew_stick()
        engine = open_engine("chip", Model("tiny", parts[0], TOKENIZER), "CORAL")
        assert isinstance(engine, ChipEngine)
        assert engine.form == form
        assert simulated_stick().engine.chip.bold == bool(bold)
        session = engine.session(1)
        seen.append([session.step(np.array([word])) for word in (261, 262, 270)])
    np.testing.assert_array_equal(*seen)
