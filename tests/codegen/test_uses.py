"""Field values of our programs that no program of Google's in the corpus has: each has a row in ASSUMPTIONS.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from codegen.network.random_networks import draw
from coral import isa, numerics
from coral.apps.probes.convolutions import mixed_graph
from coral.apps.probes.decoder import random_decoder
from coral.apps.probes.layers import random_layer
from coral.codegen import transformer as tf
from coral.codegen.eltwise import Requantise, elementwise
from coral.codegen.fc import FcQuant
from coral.codegen.network import NetworkProgram, matmul
from coral.compiler.lowering import Lowering
from coral.package.bitstreams import bitstreams_of, find_files
from coral.package.program import Program

SMALL_BITS = 6
"""Modes, flags, levels; wider fields are sizes and addresses."""
NUMBERS = ("out_ch", "out_ch_last", "alu_src", "alu_dst", "nz_mask", "last_dim")
"""Narrow fields that hold a count, a register, or what the rules of coral.isa.check derive from a walk."""

NEW = {
    ("op_max", "sig_par_en", 0): 24,
    ("op_max", "sig_par_level", 0): 24,
    ("op_max", "group_loop", 2): 24,
    ("op_max", "group_loop", 3): 41,
    ("op_max", "acc_chain", 1): 41,
    ("op_sum", "acc_chain", 1): 27,
    ("op_sum", "par_slot_level", 0): 27,
    ("op_sum", "sig_par_en", 0): 27,
    ("op_sum", "sig_par_level", 0): 27,
    ("op_sum", "wait0_ctr", 0): 27,
    ("op_sum", "wait0_level", 0): 27,
    ("op_sum", "wait0_valid", 0): 27,
    ("op_sum", "nlu_en", 0): 27,
    ("op_sum", "nlu_range_reduce", 0): 27,
    ("op_sum", "out16", 0): 27,
    ("op_resize", "rs_nearest", 1): 28,
    ("op_resize", "rs_x_nearest", 1): 28,
    ("op_resize", "rs_y_nearest", 1): 28,
    ("op", "nlu_range_reduce", 1): 26,
    ("w2n", "sig_dst_en", 0): 46,
    **{
        (kind, field, value): 43
        for kind in ("nlu_load", "n2w", "op", "w2n", "op_max", "ring_send")
        for field, value in (("tile_mask_reg", 19), ("tile_mask_indirect", 1))
    },
}
"""(instruction, field, value): the row."""


@cache
def googles(corpus: Path) -> dict[tuple[str, str], set[int]]:
    """Values of every small field in the corpus."""
    seen = defaultdict(set)
    for path in find_files([corpus]):
        for stream in bitstreams_of(path):
            for _, i in isa.decode(stream.data):
                for name in small(i):
                    seen[i.mnemonic, name].add(getattr(i, name))
    return seen


def small(i: isa.Instruction) -> Iterator[str]:
    return (n for n, field in type(i).fields.items() if field.width <= SMALL_BITS and not n.endswith(NUMBERS))


def network(batch: int) -> NetworkProgram:
    graph = mixed_graph(1)
    names = tuple(f"t{number}" for number in range(len(graph.tensors)))
    lowering = Lowering(graph, names, 1)
    for number in range(len(graph.operators)):
        lowering.take(number)
    return NetworkProgram(lowering.network("mixed", tuple(names[number] for number in graph.outputs)), batch=batch)


def ours() -> Iterator[Program]:
    maker = [draw(seed) for seed in range(40)]
    networks = [NetworkProgram(m.network(), batch=batch, grid=grid) for m, grid, batch in maker]
    for program in (network(1), network(3), *networks):
        yield from (program.caching(), program.execution)
    yield matmul(256, 100, 300, FcQuant(100, 128, 120, 2.0**-13, *numerics.integer_clamps(120))).execution
    for per_channel in (False, True):
        layer = random_layer(1, 200, 300, per_channel=per_channel)
        yield from (layer.fc.caching(layer.blob), layer.fc.execution)
    yield elementwise(200, [Requantise(0.0625, -9.0, 9.0, 128, spline=numerics.LOGISTIC.scaled(256))])
    for form in (tf.Form(spread=False), tf.Form(spread=True), tf.Form(spread=False, keep=True), tf.Form(loop=True)):
        decoder = tf.TransformerProgram(random_decoder(0), form)
        yield from (decoder.caching(), decoder.execution(6), decoder.execution(7))


def test_what_google_does_not_do_is_listed(corpus: Path) -> None:
    seen = googles(corpus)
    new = {
        (i.mnemonic, name, getattr(i, name))
        for program in ours()
        for stream in program.bitstreams
        for _, i in isa.decode(stream.data)
        for name in small(i)
        if getattr(i, name) not in seen[i.mnemonic, name]
    }
    assert new <= NEW.keys(), f"list these in docs/ASSUMPTIONS.md: {sorted(new - NEW.keys())}"
    assert {24, 26, 27, 28, 41, 43, 46} == {NEW[use] for use in new}, "a row without a use"


@pytest.mark.parametrize("row", sorted(set(NEW.values())))
def test_the_rows_exist(row: int) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "ASSUMPTIONS.md").read_text()
    assert f"\n| {row} | " in text
