"""Assembly language: one instruction per line, ``mnemonic field=value ...  # word``, made from the description alone.

Only what differs from the default is written. A family is written as one operand:

    src=2078[1x64, 64x2; slot 64 @1; last 3 @1]   a walk: address, stride x count innermost first, second buffer slot,
                                                  iterations of dimension 0 in the last pass of a dimension
    wait(RING_READ_A >= 1 + 1*i @2 src)           a wait record: threshold, level, side
    sig_dst=1                                     a signal and its level
    loops=[16, 1, 4]                              a list

and whatever the family cannot say (an unusual ``src_nz_mask``, ``src_last_skip``, a gap between wait records) follows
as single fields, which win. Numbers are decimal or 0x..; named values and bits are joined with ``|``; a float32 without
a decimal text is ``f32(0x7fc00000)``. So bytes -> text -> bytes is the identity.
Source: docs/isa/README.md, section Text.
"""

from __future__ import annotations

import difflib
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import IntEnum
from functools import cache, lru_cache
from typing import Any, NoReturn

from coral.isa.core import Instruction
from coral.isa.families import Family, Repeat, SignalSpec, WaitSpec, WalkSpec
from coral.isa.fields import Field, FieldError, IsaError, f32_bits
from coral.isa.stream import BY_MNEMONIC, Placed, iter_decode
from coral.isa.walk import Wait, Walk

MANY_BITS = 6
"""A bitmap with more named bits set than this is written as a number."""


class TextError(IsaError):
    """Assembly text that cannot be read; the message names line and column."""


def disassemble(data: bytes | memoryview) -> str:
    """Text of a bitstream, one instruction per line; DecodeError names the first word that is not an instruction."""
    return "".join(line + "\n" for line in format_lines(iter_decode(data)))


def format_lines(placed: Iterable[Placed]) -> Iterator[str]:
    """Lines with the word index (and the target of a branch) as a comment."""
    for word, instruction in placed:
        target = f" -> {word + instruction.offset}" if "offset" in instruction.fields else ""
        yield f"{format_instruction(instruction)}  # {word}{target}"


def format_instruction(instruction: Instruction) -> str:
    """Text of one instruction, without a comment."""
    return " ".join([instruction.mnemonic, *_operands(instruction)])


def _operands(instruction: Instruction) -> Iterator[str]:
    fields, changed = instruction.fields, instruction.changed()
    owners = _owners(type(instruction))
    done: set[str] = set()
    for name, value in changed.items():
        family = owners.get(name)
        if family is None:
            yield f"{name}={_value_text(fields[name], value)}"
        elif family.key not in done:
            done.add(family.key)
            texts, said = _family_text(family, instruction, changed)
            yield from texts
            for part in family.names:
                if said.get(part, 0) != changed.get(part, 0):
                    yield f"{part}={_value_text(fields[part], changed.get(part, 0))}"


@cache
def _owners(cls: type[Instruction]) -> dict[str, Family]:
    return {name: family for family in cls.families.values() for name in family.names}


def _family_text(family: Family, instruction: Instruction, changed: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Operands for the family, and the flat field values that they say."""
    value = family.read(instruction)
    if isinstance(family, WalkSpec):
        used = max((k + 1 for k in range(family.levels) if value.strides[k] or value.counts[k] > 1), default=0)
        value = replace(value, strides=value.strides[:used], counts=value.counts[:used], last_skip=None, nz_mask=None)
        texts = [f"{family.key}={_walk_text(value)}"]
    elif isinstance(family, WaitSpec):
        texts = [_wait_text(wait, family) for wait in value]
    elif isinstance(family, SignalSpec):
        texts = [] if value is None else [f"{family.key}={value}"]
    else:
        assert isinstance(family, Repeat)
        raw = [changed.get(name, 0) for name in family.names]
        while not raw[-1] and str(raw[-1]) == "0":
            raw.pop()
        value = [v + family.less if family.less else v for v in raw]
        items = (_value_text(instruction.fields[family.names[0]], v) for v in value)
        texts = [f"{family.key}=[{', '.join(items)}]"]
    return texts, family.expand(value)


def _walk_text(walk: Walk) -> str:
    text = ", ".join(f"{stride}x{count}" for stride, count in zip(walk.strides, walk.counts, strict=True))
    if walk.slot_stride or walk.slot_level:
        text += f"; slot {walk.slot_stride} @{walk.slot_level}"
    if walk.last_dim or walk.last_cnt:
        text += f"; last {walk.last_cnt + 1} @{walk.last_dim}"
    return f"{walk.addr}[{text.lstrip('; ')}]"


def _wait_text(wait: Wait, spec: WaitSpec) -> str:
    step = f" + {wait.step}*i" if wait.step else ""
    side = ("", " src", " dst")[1 + wait.side if spec.side else 0]
    return f"wait({_name(wait.ctr, spec.counters)} >= {wait.base}{step} @{wait.level}{side})"


def _name(value: int, names: type[IntEnum]) -> str:
    return names(value).name if value in names.__members__.values() else str(value)


def _value_text(f: Field, value: Any) -> str:
    if f.kind == "f32":
        return _f32_text(int(value) if isinstance(value, f32_bits) else f.to_raw(value, ""))
    terms = [b.name for b in f.bit_names or () if value >> b & 1]
    if len(terms) > MANY_BITS:
        return hex(value)
    rest = value & ~sum(1 << b for b in f.bit_names or ())
    if rest or not terms:
        plain = hex(rest) if f.unit == "bitmap" or rest >= 1 << 16 else str(rest)
        terms.insert(0, _name(rest, f.names) if f.names and rest in f.names.__members__.values() else plain)
    return "|".join(terms)


@lru_cache(maxsize=4096)
def _f32_text(raw: int) -> str:
    """Shortest decimal that rounds to the float32 of these bits."""
    value = struct.unpack("<f", raw.to_bytes(4, "little"))[0]
    if value != value:
        return f"f32({raw:#010x})"
    if value.is_integer() and abs(value) < 1 << 24:
        return f"{value:.0f}"
    return next(text for digits in range(1, 10) if _f32_raw(text := f"{value:.{digits}g}") == raw)


def _f32_raw(text: str) -> int:
    return int.from_bytes(struct.pack("<f", float(text)), "little")


def parse(source: str | bytes) -> list[Instruction]:
    """Instructions of assembly text; empty lines and ``#`` comments are skipped.

    TextError with line and column if it cannot be read.
    """
    if isinstance(source, bytes):
        try:
            source = source.decode()
        except UnicodeDecodeError as error:
            line = source.count(b"\n", 0, error.start) + 1
            raise TextError(f"line {line}: not UTF-8 text (byte {error.start} of the file)") from None
    lines = (_Line(text, number) for number, text in enumerate(source.split("\n"), 1))
    return [instruction for line in lines if (instruction := line.parse())]


_WORD = re.compile(r"[^\s#]+")
_OPERAND = re.compile(r"wait\(([^()#]*)\)(?!\S)|([^\W\d]\w*)=([^\s\[\]#]*(?:\[[^\[\]#]*\])?)(?!\S)")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]{1,32}|[0-9]{1,32})")
_DECIMAL = re.compile(r"-?(?:inf|[0-9]{1,64}(?:\.[0-9]{0,64})?(?:e[-+]?[0-9]{1,4})?)")
_BITS = re.compile(r"f32\((0x[0-9a-fA-F]{1,8})\)")
_NUMBER = r"(-?\w+)"
_WALK = re.compile(rf"{_NUMBER}\[([^\[\]]*)\]")
_DIMENSION = re.compile(rf"{_NUMBER}x([0-9]+)")
_EXTRA = re.compile(rf"(slot|last) {_NUMBER} @{_NUMBER}")
_WAIT = re.compile(rf"(\w+) >= {_NUMBER}(?: \+ {_NUMBER}\*i)?(?: @{_NUMBER})?(?: (src|dst))?")


class _Line:
    """Parser of one line; columns in messages count from 1."""

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number, self.column = text, number, 0

    def fail(self, message: str, column: int | None = None) -> NoReturn:
        at = self.column if column is None else column
        raise TextError(f"line {self.number}, column {at + 1}: {message}")

    def parse(self) -> Instruction | None:
        body = self.text.split("#", 1)[0]
        head = _WORD.search(body)
        if head is None:
            return None
        self.column = head.start()
        cls = BY_MNEMONIC.get(head[0])
        if cls is None:
            self.fail(f"there is no instruction {_quote(head[0])}{_suggest(head[0], BY_MNEMONIC)}")
        values, columns, waits = {}, {}, []
        end = head.end()
        while word := _WORD.search(body, end):
            self.column = word.start()
            operand = _OPERAND.match(body, self.column)
            if operand is None:
                self.fail(f"expected field=value or wait(...), found {_quote(body[self.column :])}")
            end, name = operand.end(), operand[2] or "waits"
            if name in values and operand[2]:
                self.fail(f"{name} is given twice")
            columns[name] = self.column
            if operand[2] is None:
                waits.append(self._wait(operand[1], cls))
                values[name] = waits
            else:
                values[name] = self._operand(name, operand[3], cls)
        try:
            return cls(**values)
        except FieldError as error:
            owner = _owners(cls).get(error.field)
            self.fail(str(error), columns.get(error.field, columns.get(owner.key if owner else "", head.start())))

    def _operand(self, name: str, text: str, cls: type[Instruction]) -> Any:
        if name in cls.fields:
            return self._value(text, cls.fields[name])
        family = cls.families.get(name)
        if isinstance(family, WalkSpec):
            return self._walk(text)
        if isinstance(family, SignalSpec):
            return self._integer(text)
        if not isinstance(family, Repeat):
            self.fail(f"{cls.mnemonic} has no field {_quote(name)}{_suggest(name, [*cls.fields, *cls.families])}")
        if not (text.startswith("[") and text.endswith("]")):
            self.fail(f"{name} is a list such as [1, 2], found {_quote(text)}")
        items = text[1:-1].split(",") if text[1:-1].strip() else []
        return [self._value(item.strip(), cls.fields[family.names[0]]) for item in items]

    def _integer(self, text: str) -> int:
        if not _INTEGER.fullmatch(text):
            self.fail(f"expected a number, found {_quote(text)}")
        return int(text, 16 if "x" in text.lower() else 10)

    def _value(self, text: str, f: Field) -> Any:
        if f.kind == "f32":
            return self._f32(text, f)
        value = base = 0
        bits = {b.name: 1 << b for b in f.bit_names or ()}
        names = {n.name: int(n) for n in f.names or ()}
        for term in text.split("|"):
            if term in bits:
                value |= bits[term]
                continue
            if base:
                self.fail(f"{f.name} = {_quote(text)}: only named bits can be joined with |")
            if not _INTEGER.fullmatch(term) and term not in names and (bits or names):
                self.fail(f"{f.name} has no value {_quote(term)}{_suggest(term, [*names, *bits])}")
            base = names[term] if term in names else self._integer(term)
        return value | base

    def _f32(self, text: str, f: Field) -> float | f32_bits:
        if match := _BITS.fullmatch(text):
            return f32_bits(int(match[1], 16))
        if not _DECIMAL.fullmatch(text):
            self.fail(f"{f.name}: expected a number or f32(0x...), found {_quote(text)}")
        try:
            return f.from_raw(_f32_raw(text))
        except OverflowError:
            self.fail(f"{f.name} = {_quote(text)}: larger than any float32")

    def _walk(self, text: str) -> Walk:
        match = _WALK.fullmatch(text)
        if match is None:
            self.fail(f"expected a walk such as 768[4x16, 64x2; slot 64 @1; last 3 @1], found {_quote(text)}")
        strides, counts, extra = [], [], {}
        for part in re.split("[;,]", match[2]) if match[2].strip() else []:
            part = " ".join(part.split())
            if dimension := _DIMENSION.fullmatch(part):
                strides.append(self._integer(dimension[1]))
                counts.append(self._integer(dimension[2]))
            elif option := _EXTRA.fullmatch(part):
                number, level = self._integer(option[2]), self._integer(option[3])
                names = ("slot_stride", "slot_level") if option[1] == "slot" else ("last_cnt", "last_dim")
                extra |= dict(zip(names, (number - (option[1] == "last"), level), strict=True))
            else:
                self.fail(f"expected stride x count (4x16), slot 64 @1 or last 3 @1 in a walk, found {_quote(part)}")
        try:
            return Walk(self._integer(match[1]), tuple(strides), tuple(counts), **extra)
        except FieldError as error:
            self.fail(str(error))

    def _wait(self, text: str, cls: type[Instruction]) -> Wait:
        spec, match = cls.wait_spec, _WAIT.fullmatch(" ".join(text.split()))
        if spec is None:
            self.fail(f"{cls.mnemonic} has no wait records")
        if match is None:
            self.fail(f"expected a wait such as wait(RING_READ_A >= 1 + 1*i @2 src), found {_quote(text)}")
        counter, base, step, level, side = match.groups()
        names = {n.name: int(n) for n in spec.counters}
        if counter not in names and not _INTEGER.fullmatch(counter):
            self.fail(f"there is no counter {_quote(counter)}{_suggest(counter, names)}")
        ctr = names[counter] if counter in names else self._integer(counter)
        base, level, step = (self._integer(part or "0") for part in (base, level, step))
        return Wait(ctr, base, level, step, side=int(side == "dst"))


def _quote(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word[:40], list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""
