"""llama2.c's tokenizer.bin: byte-pair encoding by best score, and text again. Source: docs/stories.md, Tokenizer."""

from __future__ import annotations

import codecs
import heapq
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from coral import CoralError

BOS, EOS = 1, 2
"""Begin and end of a story; training text has BOS between stories, so a model says BOS where a story ends."""
FIRST_BYTE = 3
"""Word 3 + b is the byte b."""
MAX_WORDS = 1 << 20


class TokenizerError(CoralError):
    """A file that is no tokenizer, one of another vocabulary, or ids that it does not have."""


class Tokenizer:
    """Words (bytes) and scores, by id; ids 0..2 are unknown, begin, end, then come the 256 bytes."""

    def __init__(self, words: Sequence[bytes], scores: Sequence[float]) -> None:
        if len(words) < FIRST_BYTE + 256:
            raise TokenizerError(f"{len(words)} words, at least {FIRST_BYTE + 256} are needed: 3 special, 256 bytes")
        self.words = [
            bytes([int(word[3:5], 16)]) if re.fullmatch(rb"<0x[0-9A-F]{2}>", word) else word for word in words
        ]
        self.scores = list(scores)
        if any(word != bytes([b]) for b, word in enumerate(self.words[FIRST_BYTE : FIRST_BYTE + 256])):
            raise TokenizerError(f"words {FIRST_BYTE} to {FIRST_BYTE + 255} are not the bytes <0x00> to <0xFF>")
        self._ids: dict[bytes, int] = {}
        for number in range(len(words) - 1, FIRST_BYTE + 255, -1):
            self._ids[words[number]] = number

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that begins a story, without BOS; the text gets a space in front, as in training."""
        if not text:
            return []
        pieces = (" " + text).encode("utf-8", "replace").decode()
        ids: list[int] = []
        for character in pieces:
            raw = character.encode()
            known = self._ids.get(raw)
            ids.extend([known] if known is not None else [FIRST_BYTE + byte for byte in raw])
        return self._merged(ids)

    def _merged(self, ids: list[int]) -> list[int]:
        """Neighbours whose union is a word become it, best score first, then leftmost."""
        after, before = list(range(1, len(ids) + 1)), list(range(-1, len(ids) - 1))
        heap: list[tuple[float, int, int, int, int]] = []

        def offer(left: int) -> None:
            right = after[left] if left >= 0 else len(ids)
            if right < len(ids):
                union = self._ids.get(self.words[ids[left]] + self.words[ids[right]])
                if union is not None:
                    heapq.heappush(heap, (-self.scores[union], left, union, ids[left], ids[right]))

        for left in range(len(ids)):
            offer(left)
        while heap:
            _, left, union, first, second = heapq.heappop(heap)
            right = after[left]
            if ids[left] != first or right >= len(ids) or ids[right] != second:
                continue
            ids[left], ids[right], after[left] = union, -1, after[right]
            if after[left] < len(ids):
                before[after[left]] = left
            offer(before[left])
            offer(left)
        return [number for number in ids if number >= 0]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a story's ids from its first on; special words have none. TokenizerError for an unknown id."""
        stream = TextStream(self)
        return "".join(map(stream.push, ids)) + stream.end()


class TextStream:
    """Ids one by one to text; a character that needs several bytes appears with its last one."""

    def __init__(self, tokenizer: Tokenizer, *, started: bool = False) -> None:
        """``started``: text stands before it already, so that a first space is a real one."""
        self._tokenizer, self._started = tokenizer, started
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, number: int) -> str:
        """What the next id adds to the text. TokenizerError for an id outside the vocabulary."""
        if not 0 <= number < len(self._tokenizer):
            raise TokenizerError(f"id {number} is not in the vocabulary of {len(self._tokenizer)} words")
        if number < FIRST_BYTE:
            return ""
        word = self._tokenizer.words[number]
        if not self._started:
            self._started, word = True, word.removeprefix(b" ")
        return self._decoder.decode(word)

    def end(self) -> str:
        """A character that was left unfinished, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def load(path: str | Path, vocabulary: int) -> Tokenizer:
    """Reads a tokenizer.bin of exactly ``vocabulary`` words. Raises TokenizerError, OSError."""
    return parse(Path(path).read_bytes(), vocabulary, str(path))


def parse(data: bytes, vocabulary: int, name: str = "tokenizer") -> Tokenizer:
    """Tokenizer from the bytes of a file: int32 longest word, then float32 score, int32 length, bytes of each word.

    :raises TokenizerError: cut short, impossible lengths, or another number of words than the model has
    """
    words: list[bytes] = []
    scores: list[float] = []
    try:
        (longest,) = struct.unpack_from("<i", data)
        at = 4
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            at += 8 + length
            if not 0 <= length <= longest or at > len(data) or score != score or len(words) == MAX_WORDS:
                raise TokenizerError(
                    f"{name}: word {len(words)} has {length} bytes, score {score}; not a tokenizer.bin?"
                )
            words.append(data[at - length : at])
            scores.append(score)
    except struct.error:
        raise TokenizerError(f"{name}: cut short in word {len(words)}, at byte {len(data)}") from None
    if len(words) != vocabulary:
        raise TokenizerError(f"{name}: {len(words)} words, but the model has a vocabulary of {vocabulary}")
    try:
        return Tokenizer(words, scores)
    except TokenizerError as error:
        raise TokenizerError(f"{name}: {error}") from None
