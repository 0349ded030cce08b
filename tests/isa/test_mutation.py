"""Do the tests see a wrong description? A field moved by one bit fails encoding, decoding, text, pages and chip."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from chip.harness import programs, random_inputs, run

from coral import CoralError, isa
from coral.chip import Chip
from coral.package import Kind

from .laws import Table, decode_law, docs_law, encode_law, text_law, vector_law
from .vectors import words

PER_CLASS = 4
SAMPLE = [
    (cls, name)
    for cls in isa.CLASSES
    for name in random.Random(cls.mnemonic).sample(sorted(cls.fields), min(PER_CLASS, len(cls.fields)))
]
DENSE_256 = {
    isa.Op: "in_inc0 out_cnt0 par_inc0 loop_cnt0 reduce_mask in_zp out_zp scale_en par_zp_rows",
    isa.RingRecv0: "dst_addr hdr_rows tile_mask",
    isa.RingSend: "src_addr dest_mask wait0_ctr",
    isa.W2n: "src_addr dst_inc0 to_scaling unpack_level",
    isa.N2w: "src_addr pack_level dst_addr",
    isa.Infeed: "dest_mask lanes buf_last_cnt",
    isa.Outfeed: "to_host dst_cnt0",
    isa.Pop: "buf_cnt0 stream",
    isa.TileFence: "token tile_mask",
    isa.ScalarFence: "token_tiles token_wait",
    isa.Scalar: "st_op alu_imm alu_dst",
}
"""Fields whose value matters to dense_256. (Others have slack there: an address 0, a wait that is never the last.)"""


@contextmanager
def moved(cls: type[isa.Instruction], name: str) -> Iterator[None]:
    """The description of ``cls`` with one field one bit away from where it belongs."""
    right = cls.fields[name]
    own = name in vars(cls)
    wrong = replace(right, lo=right.lo + 1 if right.lo + right.width < 128 * cls.words else right.lo - 1)
    cls.fields[name] = wrong
    setattr(cls, name, wrong)
    try:
        yield
    finally:
        cls.fields[name] = right
        if own:
            setattr(cls, name, right)
        else:
            delattr(cls, name)


def case_id(case: object) -> str:
    return case.mnemonic if isinstance(case, type) and issubclass(case, isa.Instruction) else str(case)


@pytest.mark.parametrize(("cls", "name"), SAMPLE, ids=case_id)
def test_encode_decode_text_pages_and_the_description_itself_notice(
    cls: type[isa.Instruction], name: str, table: Table
) -> None:
    for law in (encode_law, decode_law, text_law):
        law(cls, name, table)
    docs_law(cls)
    with moved(cls, name):
        for law in (encode_law, decode_law, text_law):
            with pytest.raises((AssertionError, CoralError)):
                law(cls, name, table)
        with pytest.raises(AssertionError):
            docs_law(cls)
        with pytest.raises(TypeError, match="overlaps"):
            cls._seal()
    encode_law(cls, name, table)


@pytest.mark.parametrize("cls", isa.CLASSES, ids=case_id)
def test_the_vectors_alone_notice_every_field_they_use(cls: type[isa.Instruction]) -> None:
    for name in isa.decode_one(words(cls.mnemonic)).changed():
        with moved(cls, name), pytest.raises((AssertionError, CoralError)):
            vector_law(cls.mnemonic)


@pytest.fixture(scope="module")
def dense(corpus: Path) -> Path:
    return corpus / "dense" / "dense_256_edgetpu.tflite"


def outputs_of(path: Path, seed: int) -> dict[str, bytes]:
    chip, loaded = Chip(budget=100_000), programs(path)
    run(chip, loaded[Kind.PARAMETER_CACHING])
    execution = loaded[Kind.EXECUTION_ONLY]
    return run(chip, execution, random_inputs(execution, seed))


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, name) for cls, names in DENSE_256.items() for name in names.split()], ids=case_id
)
def test_the_chip_notices(cls: type[isa.Instruction], name: str, dense: Path) -> None:
    right = outputs_of(dense, seed=1)
    with moved(cls, name):
        try:
            wrong = outputs_of(dense, seed=1)
        except (AssertionError, CoralError):
            return
    assert wrong != right
