"""Bulk OUT framing: every legal way to cut a stream into transfers means the same, the illegal ones are errors."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral.stick.errors import ProtocolError
from coral.stick.parser import OutParser
from stick.wire import dma, header

DMAS = st.lists(st.tuples(st.integers(0, 2), st.binary(min_size=1, max_size=300)), min_size=1, max_size=5)


def parse(transfers: list[bytes], *, strict: bool = True) -> list[tuple[int, bytes]]:
    parser, done = OutParser(lambda: 0, strict=strict), []
    for transfer in transfers:
        view = memoryview(transfer)
        parser.start()
        while view:
            taken, item = parser.take(view)
            view = view[taken:]
            done += [(item.tag, item.data)] if item else []
    return done


@given(DMAS, st.data())
def test_any_splitting_parses_the_same(dmas: list[tuple[int, bytes]], data: st.DataObject) -> None:
    transfers: list[bytes] = []
    for tag, payload in dmas:
        cuts = sorted(data.draw(st.sets(st.integers(0, len(payload) - 1), max_size=6)))
        pieces = [payload[a:b] for a, b in zip([0, *cuts], [*cuts, len(payload)], strict=True)]
        transfers += [header(tag, len(payload)) + pieces[0], *pieces[1:]]
    assert parse(transfers) == dmas


@given(DMAS, st.data())
def test_transfers_that_do_not_respect_dmas_are_errors(dmas, data: st.DataObject) -> None:
    stream = b"".join(dma(tag, payload) for tag, payload in dmas)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=6)))
    transfers = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    ends = set(itertools.accumulate(len(payload) + 8 for _, payload in dmas))
    starts = {0, *ends}
    crossing = any(a < end < b for end in ends for a, b in itertools.pairwise([0, *cuts, len(stream)]))
    in_header = any(start < cut < start + 8 for start in starts for cut in cuts)
    if crossing or in_header:
        with pytest.raises(ProtocolError, match=r"two DMAs in one transfer|8-byte header"):
            parse(transfers)
    else:
        assert parse(transfers) == dmas


@given(DMAS)
def test_lenient_parser_takes_all_dmas_of_one_transfer(dmas: list[tuple[int, bytes]]) -> None:
    assert parse([b"".join(dma(tag, payload) for tag, payload in dmas)], strict=False) == dmas


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (b"\1\0\0", "3 bytes into the 8-byte header"),
        (header(3, 8) + bytes(8), "tag is 3"),
        (header(4, 8) + bytes(8), "tag is 4"),
        (header(0, 0), "length 0"),
        (b"\1\0\0\0\x11\0\0\0x", "header 0100000011000000"),
        (b"\1\0\0\0\1\0\0\1x", "header 0100000001000001"),
        (dma(0, b"a") + b"b", "1 bytes follow the end of instructions"),
    ],
)
def test_malformed_streams_are_named(transfer: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse([transfer])
