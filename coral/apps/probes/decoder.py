"""A tiny decoder, one program per token, against its bit model. Source: docs/transformer.md."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from coral.apps.probes import Finding, step
from coral.apps.probes.bench import Bench
from coral.apps.probes.layers import all_right
from coral.codegen import transformer as tf
from coral.codegen.stream import INPUT
from coral.driver import prepare

GEOMETRY = tf.Geometry(dim=32, hidden=48, heads=4, kv_heads=2, context=24)
LAYERS, FIRST, TOKENS = 2, 3, 5
"""Tokens from a position on, so that their number is divisible by four once and not the other times."""
STAGES = ("normal", "scores", "weights", "attention", "a")
PAUSE_S = 60.0


def random_decoder(seed: int) -> tf.Transformer:
    """Random weights under which activations use their range."""
    rng, g = np.random.default_rng(seed), GEOMETRY

    def dense(n: int, k: int, out: float = 60.0) -> tuple[np.ndarray, np.ndarray]:
        w = np.clip(np.rint(rng.normal(0, 40, (n, k))) + 128, 1, 255).astype(np.uint8)
        return w, (out / (40 * 40 * np.sqrt(k)) * rng.uniform(0.7, 1.3, n)).astype(np.float32)

    def residual(n: int, k: int) -> tf.Residual:
        return tf.Residual(*dense(n, k, 25.0), rng.integers(1, 127, n).astype(np.uint8))

    def block() -> tf.Block:
        score, exp, product = (float(np.float32(f)) for f in (1 / (90 * np.sqrt(g.head_size)), 0.04, 0.025))
        qk, v = tf.Dense(*dense(g.dim + g.kv_dim, g.dim)), tf.Dense(*dense(g.kv_dim, g.dim))
        w1, w3 = tf.Dense(*dense(g.hidden, g.dim, 3.0)), tf.Dense(*dense(g.hidden, g.dim))
        wo, w2 = residual(g.dim, g.dim), residual(g.dim, g.hidden)
        return tf.Block(
            qk=qk, v=v, wo=wo, w1=w1, w3=w3, w2=w2, score=score, exp=exp, product=product, k_scale=0.1, v_scale=0.1
        )

    blocks = tuple(block() for _ in range(LAYERS))
    return tf.Transformer("tiny", g, blocks, float(np.float32(40 / 65535)), 0.06, 0.05, 0.05, None, 0.1)


def _cache(model: tf.Transformer) -> tf.Cache:
    """Random keys and values of the positions before ``FIRST``."""
    rng, cache = np.random.default_rng(1), tf.Cache.empty(model)
    for codes in (cache.keys, cache.values):
        codes[:, :FIRST] = np.clip(rng.normal(128, 45, codes[:, :FIRST].shape), 0, 255).astype(np.uint8)
    return cache


def _token(position: int) -> np.ndarray:
    return np.clip(np.random.default_rng(position).normal(128, 40, GEOMETRY.dim), 0, 255).astype(np.uint8)


def _tokens(bench: Bench, form: tf.Form, pause_s: float = 0.0) -> Finding:
    """Several tokens; ``pause_s`` seconds before the last on a real stick."""
    program, wrong = tf.TransformerProgram(random_decoder(0), form), {}
    cache = _cache(program.model)
    bench.stick.run(program.caching())
    if form.keep:
        bench.stick.run(program.initialise(FIRST), {INPUT: program.pack_caches(cache, FIRST)})
    for position in range(FIRST, FIRST + TOKENS):
        x = _token(position)
        if position == FIRST + TOKENS - 1 and bench.real:
            time.sleep(pause_s)
        call = prepare(program.execution(position), idempotent=not form.keep)
        outputs = bench.stick.run(call, {INPUT: program.pack(x, position, cache)})
        expected = tf.step(program.model, x, cache, position)
        wrong[f"token {position}"] = int((program.unpack(position, outputs).result != expected).sum())
    return all_right(wrong)


@step(36, 37, 38, 39, 40, 41, 46)
def decoder_stages(bench: Bench) -> Finding:
    """Buffers of a decoder's layer after single stages: norm, scores, weights, attention, SiLU."""
    program, wrong = tf.TransformerProgram(random_decoder(0), tf.Form(spread=False)), {}
    bench.stick.run(program.caching())
    for position in range(FIRST + 1, FIRST + TOKENS):
        x, cache, seen = _token(position), _cache(program.model), []
        data = program.pack(x, position, cache)
        tf.step(program.model, x, cache, position, seen)
        for name in STAGES if position == FIRST + 1 else ("weights",):
            probe = program.probe(position, LAYERS - 1, name)
            (raw,) = bench.stick.run(probe, {INPUT: data}).values()
            wrong[f"{name} at {position}"] = sum(_differ(program, position, name, raw, seen[LAYERS - 1]))
    return all_right(wrong)


def _differ(
    program: tf.TransformerProgram, position: int, name: str, raw: bytes, seen: dict[str, np.ndarray]
) -> Iterator[int]:
    """Values of a stage that differ from the bit model's, per share of the layer."""
    for share, got in enumerate(program.unpack_probe(position, LAYERS - 1, name, raw)):
        yield int((got != program.held(LAYERS - 1, name, share, seen)).sum())


@step(45, 36)
def decoder_tokens(bench: Bench) -> Finding:
    """Tokens of a decoder that is spread over the tiles, keys and values sent with every call."""
    return _tokens(bench, tf.Form(spread=True))


@step(42, 43, bold=True)
def decoder_looped(bench: Bench) -> Finding:
    """The same decoder as a loop of the scalar core."""
    return _tokens(bench, tf.Form(spread=False, loop=True))


@step(44, bold=True)
def decoder_kept(bench: Bench) -> Finding:
    """The same decoder with keys and values that stay on the chip, the last token after a minute."""
    return _tokens(bench, tf.Form(spread=False, keep=True), PAUSE_S)
