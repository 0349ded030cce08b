"""Comparison of bitstreams that names the first difference."""

from __future__ import annotations

from coral import isa


def first_difference(ours: bytes, theirs: bytes) -> str:
    """Empty if equal; else the first differing instruction, its word and the fields with both values."""
    if ours == theirs:
        return ""
    a, b = isa.decode(ours), isa.decode(theirs)
    for index, (mine, other) in enumerate(zip(a, b, strict=False)):
        if mine.instruction == other.instruction or (index == 0 and len(ours) != len(theirs)):
            continue  # a length that differs says less than what was left out or added
        where = f"instruction {index}, word {mine.word}"
        if type(mine.instruction) is not type(other.instruction):
            return f"{where}: ours {mine.instruction!r}\ntheirs {other.instruction!r}"
        left, right = mine.instruction.values(), other.instruction.values()
        fields = ", ".join(f"{k} {left[k]} instead of {right[k]}" for k in left if left[k] != right[k])
        return f"{where}, {mine.instruction.mnemonic}: {fields}"
    return f"{len(a)} instructions instead of {len(b)}"


def assert_same(ours: bytes, theirs: bytes, what: str) -> None:
    """Fails with the first difference."""
    difference = first_difference(ours, theirs)
    assert not difference, f"{what}: {difference}"
