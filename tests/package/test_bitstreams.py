"""Which streams the tools that read instructions are given."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from coral.package import PackageError
from coral.package.bitstreams import bitstreams_of, find_files


def test_corpus_figures(corpus: Path) -> None:
    """43 files, 62 streams, two pairs of equal bare programs and one equal caching stream; every start word."""
    files = find_files([corpus])
    assert files == sorted(set(files))
    assert Counter(path.suffix for path in files) == {".tflite": 19, ".coral": 24}
    streams = [stream for path in files for stream in bitstreams_of(path)]
    assert Counter(stream.kind for stream in streams) == {"EXECUTION_ONLY": 19, "PARAMETER_CACHING": 19, "RAW": 24}
    assert len({stream.label for stream in streams}) == len(
        {(path, s.kind) for path in files for s in bitstreams_of(path)}
    )
    assert len({stream.data for stream in streams}) == 59
    assert all(len(stream.data) % 16 == 0 and stream.chunk == 0 for stream in streams)
    assert {int.from_bytes(stream.data[:2], "little") >> 6 for stream in streams} == {0x3E}


def test_folders_and_files(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    bare, plain = tmp_path / "inner" / "b.coral", tmp_path / "a.tflite"
    bare.write_bytes(bytes(32))
    plain.write_bytes(b"")
    assert find_files([tmp_path, bare]) == [bare]
    assert find_files([plain]) == [plain]
    assert bitstreams_of(bare) == [("b.coral", "RAW", 0, 0, bytes(32))]
    with pytest.raises(PackageError, match=r"nothing\.here does not exist"):
        find_files([tmp_path / "nothing.here"])
    bare.write_bytes(bytes(31))
    with pytest.raises(PackageError, match=r"b\.coral has 31 bytes, no multiple of the 16-byte word"):
        bitstreams_of(bare)
    with pytest.raises(PackageError, match=r"a\.tflite"):
        bitstreams_of(plain)
    bare.unlink()
    with pytest.raises(PackageError, match=r"no \*_edgetpu\.tflite or \*\.coral in"):
        find_files([tmp_path])
