"""Checks of whole programs: does every bit have a name, does everything survive decoding, are frame and order right?

``check_streams`` takes bitstreams from anywhere; ``coral isa check`` feeds it files. Source: docs/isa/README.md.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coral.isa.core import Instruction
from coral.isa.fields import DecodeError, IsaError
from coral.isa.rules import Credits, Finding, op_findings, wait_findings, walk_findings
from coral.isa.scalar import End, Halt, Start
from coral.isa.stream import WORD_BYTES, Placed, split
from coral.isa.text import format_instruction, parse

MAX_WORDS = 16_384
"""Longest bitstream seen; longer programs are split."""
CACHING_SEQUENCE = 0x8000
"""First sequence number of most parameter caching programs; all others start at 0."""


class Bitstream(NamedTuple):
    """Instructions to check; ``chunk`` > 0: continues the program of the bitstream before it."""

    label: str
    kind: str
    data: bytes
    chunk: int = 0


@dataclass
class Report:
    """What was found. Opcodes, rules, sequence numbers and halt codes count equal bitstreams once."""

    bitstreams: int = 0
    distinct_bitstreams: int = 0
    instructions: int = 0
    distinct_instructions: int = 0
    round_trip_failures: int = 0
    unnamed_bits: int = 0
    decode_errors: int = 0
    sequence_errors: int = 0
    length_errors: int = 0
    frame_errors: int = 0
    rule_violations: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    opcodes: Counter[str] = field(default_factory=Counter)
    rules: dict[str, Counter[str]] = field(default_factory=dict)
    first_sequence: dict[str, Counter[str]] = field(default_factory=dict)
    halt_codes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def problem(self, kind: str, where: str, message: str, count: int = 1) -> None:
        """Add ``count`` to the errors of ``kind`` and keep the sentence."""
        setattr(self, kind, getattr(self, kind) + count)
        self.problems.append(f"{where}: {message}")

    def as_dict(self) -> dict[str, Any]:
        """For JSON: opcodes by number, everything else sorted."""
        return {"ok": self.ok, **vars(self)}


def check_streams(streams: Iterable[Bitstream]) -> Report:
    """Check each bitstream; chunks of one program must follow each other."""
    report, seen = Report(), set()
    known: dict[Instruction, list[Finding]] = {}
    program = _Program()
    for stream in streams:
        if not stream.chunk:
            program = _Program()
        digest = hashlib.sha256(stream.data).digest()
        report.bitstreams += 1
        placed = _decode(stream, report, known)
        report.instructions += len(placed)
        _check_frame(stream, placed, report)
        first = program.check_sequence(stream, placed, report)
        findings = program.check_rules(stream, placed, report, known)
        if digest in seen:
            continue
        seen.add(digest)
        report.distinct_bitstreams += 1
        report.distinct_instructions += len(placed)
        report.kinds[stream.kind] += 1
        report.opcodes.update(f"{i.opcode:#04x} {i.mnemonic}" for _, i in placed)
        report.halt_codes.update(str(i.code) for _, i in placed if isinstance(i, Halt))
        if first is not None and not stream.chunk:
            report.first_sequence.setdefault(stream.kind, Counter())[f"{first:#x}"] += 1
        for rule, outcomes in findings.items():
            report.rules.setdefault(rule, Counter()).update(outcomes)
    return report


def _decode(stream: Bitstream, report: Report, known: dict[Instruction, list[Finding]]) -> list[Placed]:
    """Instructions that decode; a new one is proven to survive fields -> bytes and text -> bytes, and looked at."""
    placed = []
    try:
        for word, cls, raw in split(stream.data):
            try:
                instruction = cls.from_bytes(raw, word)
            except DecodeError as error:
                report.problem("unnamed_bits", stream.label, str(error), error.unnamed)
                continue
            placed.append(Placed(word, instruction))
            if instruction not in known:
                known[instruction] = [
                    *walk_findings(instruction),
                    *wait_findings(instruction),
                    *op_findings(instruction),
                ]
                if not _survives(instruction, bytes(raw)):
                    message = f"word {word}: {cls.mnemonic} does not round-trip"
                    report.problem("round_trip_failures", stream.label, message)
    except DecodeError as error:
        report.problem("decode_errors", stream.label, str(error))
    return placed


def _survives(instruction: Instruction, raw: bytes) -> bool:
    try:
        by_fields = type(instruction)(**instruction.values())
        by_text = parse(format_instruction(instruction))
    except IsaError:
        return False
    return by_fields.to_bytes() == raw and [i.to_bytes() for i in by_text] == [raw]


def _check_frame(stream: Bitstream, placed: list[Placed], report: Report) -> None:
    """start ... halt ... end, each once, and start's length."""
    for cls in (Start, Halt, End):
        if (n := sum(isinstance(i, cls) for _, i in placed)) != 1:
            report.problem("frame_errors", stream.label, f"{n} {cls.mnemonic} instructions, one is needed")
    words = len(stream.data) // WORD_BYTES
    if words > MAX_WORDS:
        report.problem("length_errors", stream.label, f"{words} words, at most {MAX_WORDS} are allowed")
    if not placed:
        return
    start, end = placed[0], placed[-1]
    if not (isinstance(start.instruction, Start) and isinstance(end.instruction, End)):
        report.problem("frame_errors", stream.label, "does not begin with start and end with end")
    elif start.instruction.body_bits != 8 * WORD_BYTES * (end.word - start.word - 1):
        message = f"start says {start.instruction.body_bits} bits for {end.word - start.word - 1} words"
        report.problem("length_errors", stream.label, message)


class _Program:
    """State that continues over the bitstreams of one program."""

    def __init__(self) -> None:
        self.next_sequence: int | None = None
        self.credits = Credits()

    def check_sequence(self, stream: Bitstream, placed: list[Placed], report: Report) -> int | None:
        """Sequence numbers run on without a gap, modulo 2**16; returns the first one."""
        numbered = [(word, i.seq) for word, i in placed if "seq" in i.fields]
        want = self.next_sequence
        for word, seq in numbered:
            if want is None:
                want = CACHING_SEQUENCE if seq & CACHING_SEQUENCE else 0
            if seq != want:
                message = f"word {word}: sequence number {seq:#x}, expected {want:#x}"
                report.problem("sequence_errors", stream.label, message)
            want = (seq + 1) & 0xFFFF
        self.next_sequence = want
        return numbered[0][1] if numbered else None

    def check_rules(
        self, stream: Bitstream, placed: list[Placed], report: Report, known: dict[Instruction, list[Finding]]
    ) -> dict[str, Counter[str]]:
        """Outcomes per rule; a violation is a problem."""
        outcomes: dict[str, Counter[str]] = {}
        for word, i in placed:
            for finding in (*known[i], *self.credits.findings(i)):
                outcomes.setdefault(finding.rule, Counter())[finding.outcome] += 1
                if not finding.ok:
                    message = f"word {word}: {i.mnemonic}: {finding.rule}: {finding.outcome}"
                    report.problem("rule_violations", stream.label, message)
        return outcomes
