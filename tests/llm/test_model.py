"""The tinygrad decoder against its formulas in NumPy: all at once, word by word, and the constants of BOS."""

from __future__ import annotations

import numpy as np
import pytest
from story_models import decoder, random_checkpoint
from tinygrad import Device, Tensor
from tinygrad.uop.ops import UOp

from coral.llm.checkpoint import Config
from coral.llm.model import Llama

CONFIGS = [
    Config(dim=16, hidden=24, layers=1, heads=4, kv_heads=2, vocabulary=300, context=12),
    Config(dim=24, hidden=20, layers=1, heads=3, kv_heads=3, vocabulary=263, context=9, tied=False),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.heads}x{c.kv_heads}")
def test_logits(config: Config) -> None:
    ck = random_checkpoint(config)
    ids = np.random.default_rng(1).integers(3, config.vocabulary, (2, config.context - 1))
    wanted = np.stack([decoder(ck, [1, *row]) for row in ids.tolist()])
    model = Llama(ck, Device.DEFAULT)
    np.testing.assert_allclose(model.first_logits, wanted[0, 0], rtol=1e-4, atol=1e-5)
    at_once = model(Tensor(ck.embedding[ids], device=model.device)).numpy()
    np.testing.assert_allclose(at_once, wanted[:, 1:], rtol=1e-3, atol=1e-4)
    caches = model.cache(2)
    symbol = UOp.variable("position", 1, config.context - 1)
    for position in (1, 2, 3):
        x = Tensor(ck.embedding[ids[:, position - 1]], device=model.device)
        logits = model.step(x, symbol.bind(position), caches).numpy()
        np.testing.assert_allclose(logits, wanted[:, position], rtol=1e-3, atol=1e-4)
