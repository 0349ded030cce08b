"""Random decoders and their runs on the simulated chip, compared with the bit model."""

from __future__ import annotations

import numpy as np

from coral.chip import Chip, ChipState
from coral.codegen import transformer as tf
from coral.codegen.transformer.model import logits
from coral.codegen.transformer.program import STAGES
from coral.package.program import Program


def random_model(
    geometry: tf.Geometry, layers: int, seed: int = 0, vocabulary: int = 0, *, own_tables: bool = True
) -> tf.Transformer:
    """A decoder of random weights whose activations use their range."""
    rng = np.random.default_rng(seed)
    g = geometry

    def dense(n, k, out=60.0):
        w = np.clip(np.rint(rng.normal(0, 40, (n, k))) + 128, 1, 255).astype(np.uint8)
        mult = out / (40 * 40 * np.sqrt(k)) * rng.uniform(0.7, 1.3, n)
        return w, mult.astype(np.float32)

    def residual(n, k):
        return tf.Residual(*dense(n, k, 25.0), rng.integers(1, 127, n).astype(np.uint8))

    def block():
        return tf.Block(
            qk=tf.Dense(*dense(g.dim + g.kv_dim, g.dim)),
            v=tf.Dense(*dense(g.kv_dim, g.dim)),
            wo=residual(g.dim, g.dim),
            w1=tf.Dense(*dense(g.hidden, g.dim, 3.0 if own_tables else 50.0)),
            w3=tf.Dense(*dense(g.hidden, g.dim)),
            w2=residual(g.dim, g.hidden),
            score=float(np.float32(rng.uniform(0.5, 1.5) * 40 / (60 * 60 * np.sqrt(g.head_size)))),
            exp=float(np.float32(rng.uniform(0.02, 0.06))),
            product=float(np.float32(rng.uniform(0.02, 0.03))),
            k_scale=0.1,
            v_scale=0.1,
            gate=None if own_tables else tf.Gate(float(np.float32(0.06)), float(np.float32(1 / 256))),
        )

    head = tf.Dense(*dense(vocabulary, g.dim)) if vocabulary else None
    norm = float(np.float32(40 / 65535))
    blocks = tuple(block() for _ in range(layers))
    return tf.Transformer("random", geometry, blocks, norm, 0.06, 0.05, 0.05, head, 0.1, own_tables)


def random_cache(model: tf.Transformer, positions: int, seed: int = 1) -> tf.Cache:
    """Keys and values of the first positions."""
    rng, cache = np.random.default_rng(seed), tf.Cache.empty(model)
    for codes in (cache.keys, cache.values):
        codes[:, :positions] = np.clip(rng.normal(128, 45, codes[:, :positions].shape), 0, 255).astype(np.uint8)
    return cache


def random_token(model: tf.Transformer, position: int) -> np.ndarray:
    """Input codes, the same for a position every time."""
    rng = np.random.default_rng(position)
    return np.clip(rng.normal(128, 40, model.geometry.dim), 0, 255).astype(np.uint8)


def run(chip: Chip, program: Program, data: bytes = b"") -> tuple[list[bytes], list[bytes]]:
    """One run as a host would do it: the outputs, and for each of their bytes 1 if the program wrote it."""
    program.check()
    chip.feed(0, program.bitstreams[0].data)
    if data:
        chip.feed(1, data)
    if program.parameters:
        chip.feed(2, program.parameters)
    assert chip.run() is ChipState.FINISHED
    assert chip.interrupts.popleft() == 0
    results, written = list(chip.outputs), [mask.astype(np.uint8).tobytes() for mask in chip.written]
    chip.outputs.clear()
    chip.written.clear()
    return results, written


class Session:
    """A chip with a decoder's parameters, and the bit model beside it."""

    def __init__(self, program: tf.TransformerProgram, seed: int | None = None) -> None:
        self.program, self.model = program, program.model
        self.chip = Chip(seed=seed, bold=program.form.keep or program.form.loop)
        run(self.chip, program.caching())

    def begin(self, positions: int) -> None:
        """A random cache for the first positions."""
        self.cache = random_cache(self.model, positions)
        self.bring(positions)

    def bring(self, positions: int) -> None:
        """The cache of the first positions to a chip that keeps it."""
        if self.program.form.keep:
            run(self.chip, self.program.initialise(positions), self.program.pack_caches(self.cache, positions))

    def check(self, position: int, x: np.ndarray | None = None) -> np.ndarray:
        """One token on both; every result equal."""
        x = random_token(self.model, position) if x is None else x
        data = self.program.pack(x, position, self.cache)
        results, written = run(self.chip, self.program.execution(position), data)
        names = [layer.name for layer in self.program.execution(position).outputs]
        named = (dict(zip(names, transfers, strict=True)) for transfers in (results, written))
        token, complete = (self.program.unpack(position, transfers) for transfers in named)
        assert complete.result.all()
        expected = tf.step(self.model, x, self.cache, position)
        result = logits(self.model, expected) if self.program.form.logits else expected
        np.testing.assert_array_equal(token.result, result, err_msg=f"position {position}")
        if token.keys is not None:
            assert complete.keys.all()
            assert complete.values.all()
            np.testing.assert_array_equal(token.keys, self.cache.keys[:, position], err_msg=f"keys at {position}")
            np.testing.assert_array_equal(token.values, self.cache.values[:, position], err_msg=f"values at {position}")
        return expected

    def check_stages(self, position: int, layer: int) -> None:
        """Every buffer of a layer, one program per stage, against the bit model's."""
        x, stages = random_token(self.model, position), []
        data = self.program.pack(x, position, self.cache)
        model_cache = tf.Cache(self.cache.keys.copy(), self.cache.values.copy())
        tf.step(self.model, x, model_cache, position, stages)
        for name in STAGES:
            raw, _ = run(self.chip, self.program.probe(position, layer, name), data)
            got = self.program.unpack_probe(position, layer, name, raw[0])
            for share, one in enumerate(got):
                expected = self.program.held(layer, name, share, stages[layer])
                np.testing.assert_array_equal(one, expected, err_msg=f"{name}, share {share}")
