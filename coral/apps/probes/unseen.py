"""Forms without a program of Google's in our corpus, and whether an identity row outlives what the compiler reloads it
after. Source: docs/ASSUMPTIONS.md, docs/codegen.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from coral import isa, numerics
from coral.apps.probes import Finding, forms, step
from coral.apps.probes.bench import Bench
from coral.apps.probes.forms import MASK, RESULT, ROW, TILE, Form
from coral.apps.probes.layers import all_right, compare
from coral.apps.probes.programs import INPUT, add, linear, tile_program
from coral.codegen import blocks, stream
from coral.codegen.builder import V14, Builder
from coral.codegen.fc import FcQuant
from coral.codegen.machine import INPUT_UNIT_BYTES, WORD_BYTES, round_up
from coral.codegen.network import matmul
from coral.isa import Walk
from coral.package.program import Base, DmaHint, Program

FIFO_ROW = 1000
SEEDS = range(3)
OUTPUTS = 64


def _begin(x: np.ndarray) -> Builder:
    """A program up to where ``x`` lies in narrow memory of the tile, from word 0 on."""
    size = round_up(x.size, INPUT_UNIT_BYTES)
    b = stream.begin(V14, size)
    blocks.ring_receive(b, MASK, 0, size, FIFO_ROW)
    blocks.infeed_input(b, 0, size, MASK)
    b.handshake()
    return b


def _end(b: Builder, form: Form, name: str) -> tuple[Program, dict[str, bytes]]:
    """Body and end, and the program's inputs."""
    add(b, form.body)
    size = round_up(form.x.size, INPUT_UNIT_BYTES)
    words = round_up(form.expected.size, INPUT_UNIT_BYTES) // WORD_BYTES
    return tile_program(b, name, TILE, words, size), {INPUT: form.x.tobytes().ljust(size, b"\0")}


def run(bench: Bench, form: Form, name: str) -> np.ndarray:
    """Codes that a stick gives for a form."""
    raw = bench.run(*_end(_begin(form.x), form, name))
    return np.frombuffer(raw, np.uint8)[: form.expected.size]


def _compared(bench: Bench, *makers: Callable[[int], Form]) -> Finding:
    """Each form with three sets of values."""
    wrong, details = {}, {}
    for make in makers:
        for seed in SEEDS:
            form, name = make(seed), f"{make.__name__} {seed}"
            got = run(bench, form, name)
            wrong[name] = compare(got.tobytes(), form.expected)
            if wrong[name]:
                details[name] = {"got": got.tolist(), "expected": form.expected.tolist()}
    return all_right(wrong, **details)


@step(4)
def nlu_sixteen_bits(bench: Bench) -> Finding:
    """LOGISTIC, EXP and the reciprocal square root of all 256 codes with 16-bit results, at three scales."""
    return _compared(bench, forms.logistic_16, forms.exp_16, forms.rsqrt_16)


@step(24)
def max_pool(bench: Bench) -> Finding:
    """MAX_POOL with windows of 2 x 2 over a transposed block, and RELU6."""
    return _compared(bench, forms.max_pool)


@step(25)
def tanh(bench: Bench) -> Finding:
    """TANH of all 256 codes, at three scales."""
    return _compared(bench, forms.tanh)


@step(26)
def l2_normalisation(bench: Bench) -> Finding:
    """L2_NORMALIZATION of 32 values, with two zero points."""
    return _compared(bench, forms.l2_normalisation)


@step(27)
def sum_and_mean(bench: Bench) -> Finding:
    """SUM and MEAN of 64 values."""
    return _compared(bench, forms.sum_of_row, forms.mean_of_row)


@step(28)
def nearest_resize(bench: Bench) -> Finding:
    """RESIZE_NEAREST_NEIGHBOR of 3 x 5 positions by 2, from both starts."""
    return _compared(bench, forms.nearest_resize)


@step(29)
def concatenation(bench: Bench) -> Finding:
    """CONCATENATION of three parts, one of them with the result's scale."""
    return _compared(bench, forms.concatenation)


@step(30)
def relu_n1_to_1(bench: Bench) -> Finding:
    """RELU_N1_TO_1 of random codes."""
    return _compared(bench, forms.relu_n1_to_1)


@step(16, 35)
def large_pointwise(bench: Bench) -> Finding:
    """1 x 1 convolutions of 256 positions with 3,840 and 4,096 input channels, in our generator's form."""
    wrong = {}
    for k in (3840, 4096):
        rng = np.random.default_rng(k)
        x, w = rng.integers(0, 256, (256, k), np.uint8), rng.integers(0, 256, (16, k), np.uint8)
        quant = FcQuant(100, 128, 120, 2.0**-13, *numerics.integer_clamps(120))
        pair = matmul(256, 16, k, quant)
        bench.stick.run(pair.caching(pair.blob(w)))
        got = pair.unpack(bench.stick.run(pair.execution, {INPUT: pair.pack(x)})[stream.OUTPUT])
        limits = (quant.clamp_min, quant.clamp_max)
        expected = numerics.fully_connected(x, w, None, quant.in_zp, quant.w_zp, quant.mult, *limits, quant.out_zp)
        wrong[f"256 x {k}"] = int((got.reshape(-1) != expected.reshape(-1)).sum())
    return all_right(wrong)


def _kept(bench: Bench, form: Form, name: str) -> Finding:
    """A form, and behind it a copy through an identity row that is older than it."""
    both = forms.then_through_the_identity(form)
    got = run(bench, both, name)
    size = form.expected.size
    first = "right" if np.array_equal(got[:size], form.expected) else "wrong"
    row = "kept" if np.array_equal(got[size:], both.expected[size:]) else "lost"
    return Finding(f"{row} after {name}, which was {first}")


@step(14, bold=True)
def identity_row_after_l2(bench: Bench) -> Finding:
    """A copy through an identity row that was made before an L2_NORMALIZATION on its tile."""
    return _kept(bench, forms.l2_normalisation(0), "L2")


@step(14, bold=True)
def identity_row_after_streamed_layer(bench: Bench) -> Finding:
    """A copy through an identity row that was made before a layer whose parameters came with the call."""
    rng = np.random.default_rng(5)
    x, w = rng.integers(0, 256, 64, np.uint8), rng.integers(0, 256, (OUTPUTS, 64), np.uint8)
    quant = FcQuant(99, 130, 120, 2.0**-10, *numerics.integer_clamps(120))
    words = x.size // WORD_BYTES
    layer = isa.Op(
        tile_mask=MASK, loop_cnt0=words - 1, reduce_mask=1, acc_init=1, group_loop=7, out_ch=OUTPUTS - 1,
        out_ch_last=OUTPUTS - 1, inp=Walk(0, [4], [words]), par=Walk(4 * ROW, [4], [words]),
        psum=Walk(0, [0], [words]), out=Walk(4 * RESULT, [4], [OUTPUTS // WORD_BYTES]), in_zp=quant.in_zp,
        w_zp=quant.w_zp, mult=quant.mult, clamp_min=quant.clamp_min, clamp_max=quant.clamp_max, out_zp=quant.out_zp,
    )  # fmt: skip
    limits = (quant.clamp_min, quant.clamp_max)
    expected = numerics.fully_connected(x[None], w, None, quant.in_zp, quant.w_zp, quant.mult, *limits, quant.out_zp)
    form = forms.then_through_the_identity(Form(x, [layer], expected.reshape(-1)))
    b = _begin(x)
    first = len(forms.identity())
    add(b, form.body[:first])
    rows = np.ascontiguousarray(w.reshape(OUTPUTS, words, WORD_BYTES).transpose(1, 0, 2)).tobytes()
    b.parameter_dma(len(rows))
    blocks.pop_parameters(b, len(rows))
    b.emit(isa.RingRecv0, tile_mask=MASK, dst=linear(ROW, words))
    blocks.infeed_parameters(b, 0, len(rows), MASK, OUTPUTS // 16)
    b.handshake()
    program, inputs = _end(b, replace(form, body=form.body[first:]), "streamed")
    sent = DmaHint(Base.PARAMETER, 0, len(rows))
    program = replace(program, parameters=rows, hints=(*program.hints[:2], sent, *program.hints[2:]))
    got = np.frombuffer(bench.run(program, inputs), np.uint8)[: form.expected.size]
    right = "right" if np.array_equal(got[:OUTPUTS], form.expected[:OUTPUTS]) else "wrong"
    row = "kept" if np.array_equal(got[OUTPUTS:], x) else "lost"
    return Finding(f"{row} after a streamed layer, which was {right}")
