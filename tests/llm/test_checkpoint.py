"""Checkpoints against files written here from the format's definition, and the public file on the shelf."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from coral.llm.checkpoint import CheckpointError, Config, load, parse, shapes

TINY = Config(dim=16, hidden=24, layers=2, heads=4, kv_heads=2, vocabulary=8, context=5)


def arrays(config, seed=0):
    rng = np.random.default_rng(seed)
    made = {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes(config).items()}
    if not config.tied:
        made["classifier"] = rng.normal(size=(config.vocabulary, config.dim)).astype(np.float32)
    return made


def numbers(c, sign=1):
    return struct.pack("<7i", c.dim, c.hidden, c.layers, c.heads, c.kv_heads, sign * c.vocabulary, c.context)


def v0(c, a):
    keys = ["embedding", "att_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w2", "w3", "norm"]
    tables = b"\x77" * (4 * c.context * c.head_size)
    classifier = b"" if c.tied else a["classifier"].tobytes()
    return numbers(c, 1 if c.tied else -1) + b"".join(a[k].tobytes() for k in keys) + tables + classifier


def new_header(version, c, group=None):
    head = struct.pack("<Ii", 0x616B3432, version) + numbers(c) + struct.pack("<B", c.tied)
    return (head + (struct.pack("<i", group) if group else b"")).ljust(256, b"\0")


def matrices(c):
    return ["embedding", "wq", "wk", "wv", "wo", "w1", "w2", "w3", *([] if c.tied else ["classifier"])]


def v1(c, a):
    return new_header(1, c) + b"".join(a[k].tobytes() for k in ["att_norm", "ffn_norm", "norm", *matrices(c)])


def v2(c, a, group=8):
    """The file, and what its groups stand for."""
    out, meant = new_header(2, c, group), {}
    for k in ["att_norm", "ffn_norm", "norm"]:
        out, meant[k] = out + a[k].tobytes(), a[k]
    for k in matrices(c):
        parts = []
        for m in a[k] if a[k].ndim == 3 else [a[k]]:
            g = m.reshape(-1, group)
            scale = (np.abs(g).max(1) / 127).astype(np.float32)
            q = np.round(g / scale[:, None]).astype(np.int8)
            out += q.tobytes() + scale.tobytes()
            parts.append((q.astype(np.float32) * scale[:, None]).reshape(m.shape))
        meant[k] = np.stack(parts) if a[k].ndim == 3 else parts[0]
    return out, meant


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("write", [v0, v1])
def test_float_files(write, tied):
    c = Config(**{**vars(TINY), "tied": tied})
    a = arrays(c)
    got = parse(write(c, a))
    assert got.config == c
    for key, expected in a.items():
        np.testing.assert_array_equal(getattr(got, key), expected)
    if tied:
        assert got.classifier is got.embedding


@pytest.mark.parametrize("tied", [True, False])
def test_int8_files(tied):
    c = Config(**{**vars(TINY), "tied": tied})
    data, meant = v2(c, arrays(c))
    got = parse(data)
    assert got.config == c
    for key, expected in meant.items():
        np.testing.assert_array_equal(getattr(got, key), expected)


@pytest.mark.parametrize("data", [v0(TINY, arrays(TINY)), v1(TINY, arrays(TINY)), v2(TINY, arrays(TINY))[0]])
def test_every_other_length_is_refused(data):
    for end in [0, 3, 7, 27, 28, 40, 255, 256, 1000, len(data) - 4, len(data) - 1]:
        with pytest.raises(CheckpointError, match="short"):
            parse(data[:end])
    with pytest.raises(CheckpointError, match="too long"):
        parse(data + b"\0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "dim is 0"),
        ({"layers": -1}, "layers is -1"),
        ({"hidden": 1 << 30}, "hidden is"),
        ({"heads": 3}, "no multiple of the 3 heads"),
        ({"kv_heads": 3}, "no multiple of the 3 key/value heads"),
        ({"heads": 16, "kv_heads": 16}, "odd"),
    ],
)
def test_impossible_geometry(change, message):
    with pytest.raises(CheckpointError, match=message):
        Config(**{**vars(TINY), **change})


def test_other_files(tmp_path):
    with pytest.raises(CheckpointError, match="not a llama2"):
        parse(b"\x7fELF" + bytes(5000))
    with pytest.raises(CheckpointError, match="version 9"):
        parse(new_header(9, TINY))
    with pytest.raises(CheckpointError, match="groups of 7"):
        parse(new_header(2, TINY, 7) + bytes(5000))
    a = arrays(TINY)
    a["w2"][0, 0, 0] = np.nan
    path = tmp_path / "x.bin"
    path.write_bytes(v0(TINY, a))
    with pytest.raises(CheckpointError, match=r"x\.bin: w2 contains"):
        load(path)


def test_public_file(data):
    c = load(data / "stories" / "stories260K.bin")
    assert c.config == Config(64, 172, 5, 8, 4, 512, 512)
    rms = np.sqrt((c.embedding**2).mean())
    assert 0.01 < rms < 10
