"""Byte-pair encoding against the plain quadratic form of the definition, on the two public vocabularies."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral.llm.tokenizer import TextStream, Tokenizer, TokenizerError, load, parse


def small() -> Tokenizer:
    """Some merges with ties, and bytes."""
    words = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % b for b in range(256))]
    extra = [b" ", b"a", b"b", b"c", b"ab", b"bc", b"abc", b"aa", b"aaa", b" a", b"ca", "é".encode()]
    return Tokenizer([*words, *extra], [0.0] * 259 + [0, 0, 0, 0, -1, -1, -2, -1, -1, -3, -2, 0])


def plainly(t: Tokenizer, text: str) -> list[int]:
    """The definition: as long as two neighbours make a word, join those with the best score, the leftmost of equals."""
    known = {word: number for number, word in reversed(list(enumerate(t.words))) if number >= 259}
    ids = []
    for character in " " + text:
        raw = character.encode()
        ids += [known[raw]] if raw in known else [3 + byte for byte in raw]
    while True:
        unions = [known.get(t.words[a] + t.words[b]) for a, b in pairwise(ids)]
        possible = [(-t.scores[u], at) for at, u in enumerate(unions) if u is not None]
        if not possible:
            return ids
        at = min(possible)[1]
        ids[at : at + 2] = [unions[at]]


@given(st.text(alphabet="aabbccé €\n", min_size=1, max_size=40))
def test_merges_are_the_definitions(text: str) -> None:
    t = small()
    assert t.encode(text) == plainly(t, text)
    assert t.decode(t.encode(text)) == text


@pytest.mark.parametrize(("file", "size"), [("tok512.bin", 512), ("tokenizer32000.bin", 32000)])
def test_public_vocabularies(data: Path, file: str, size: int) -> None:
    t = load(data / "stories" / file, size)
    for text in ("Once upon a time, there was a girl named Lily.", "Grüße – 漢字 🙂\n\nnew", "  two spaces", " "):
        assert t.encode(text) == plainly(t, text)
        assert t.decode(t.encode(text)) == text
    assert len(t.encode("a very long text " * 5000)) > 1000
    if size == 32000:  # llama's own ids
        assert t.encode("Once upon a time") == [9038, 2501, 263, 931]


def test_a_stream_gives_whole_characters() -> None:
    t = small()
    stream = TextStream(t)
    raw = "€".encode()
    assert [stream.push(3 + byte) for byte in raw] == ["", "", "€"]
    assert stream.push(3 + raw[0]) == ""
    assert stream.push(260) == "\ufffda"
    stream.push(3 + raw[0])
    assert stream.end() == "\ufffd"
    assert TextStream(t, started=True).push(268) == " a"
    assert TextStream(t).push(268) == "a"
    assert t.decode([1, 2, 0]) == ""


def test_surrogates_do_not_break_it() -> None:
    assert small().encode("\ud800") == plainly(small(), "?")


def packed(words: list[bytes], longest: int = 10) -> bytes:
    return struct.pack("<i", longest) + b"".join(struct.pack("<fi", 0, len(w)) + w for w in words)


WORDS = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % b for b in range(256)), b" "]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cut short"),
        (packed(WORDS)[:-1], "not a tokenizer"),
        (packed(WORDS)[:-5], "cut short"),
        (packed(WORDS, longest=3), "not a tokenizer"),
        (packed(WORDS) + struct.pack("<fi", 0, -1), "not a tokenizer"),
        (packed(WORDS) + struct.pack("<fi", float("nan"), 1) + b"x", "not a tokenizer"),
        (packed(WORDS[:-1]), "259 words, but the model has a vocabulary of 260"),
        (packed(WORDS[:100] + WORDS[101:] + [b"x"]), "are not the bytes"),
    ],
)
def test_wrong_files(content: bytes, words: str) -> None:
    with pytest.raises(TokenizerError, match=words):
        parse(content, 260)
    assert len(parse(packed(WORDS), 260)) == 260


def test_ids_outside() -> None:
    with pytest.raises(TokenizerError, match="271"):
        small().decode([271])
    with pytest.raises(TokenizerError, match="at least 259"):
        Tokenizer([b"a"], [0.0])
