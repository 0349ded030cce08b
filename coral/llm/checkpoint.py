"""llama2.c checkpoints (v0, v1 float32, v2 int8 groups) to float32 arrays. Source: docs/transformer.md, Checkpoints.

A file is hostile until its header is plausible and its size is exactly what the header announces.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coral import CoralError
from coral.codegen.transformer.graph import Heads

MAGIC = 0x616B3432
HEADER_BYTES = 256
"""Size of the v1 and v2 header; v0 has seven integers and nothing else."""
MAX_DIMENSION = 1 << 20
"""Above any model of this format; a larger number in a header means that the file is something else."""


class CheckpointError(CoralError):
    """The file is not a llama2.c checkpoint, is cut short, or has dimensions that do not belong together."""


@dataclass(frozen=True)
class Config(Heads):
    """Geometry of a llama-like decoder. ``context``: most positions; ``tied``: classifier = embedding."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    tied: bool = True

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in vars(self).items() if name != "tied"}
        for name, value in sizes.items():
            if not 0 < value <= MAX_DIMENSION:
                raise CheckpointError(f"{name} is {value}, expected 1 to {MAX_DIMENSION}; not a llama2.c checkpoint?")
        if self.dim % self.heads:
            raise CheckpointError(f"dim {self.dim} is no multiple of the {self.heads} heads")
        if self.heads % self.kv_heads:
            raise CheckpointError(f"{self.heads} heads are no multiple of the {self.kv_heads} key/value heads")
        if self.head_size % 2:
            raise CheckpointError(f"head size {self.head_size} is odd, rotary embedding turns pairs")


@dataclass(frozen=True)
class Checkpoint:
    """Float32 weights, every matrix [outputs, inputs], those of layers with the layer in front.

    embedding [vocabulary, dim]; att_norm, ffn_norm [layers, dim]; wq, wo [layers, dim, dim]; wk, wv [layers, kv_dim,
    dim]; w1, w3 [layers, hidden, dim]; w2 [layers, dim, hidden]; norm [dim]; classifier [vocabulary, dim], which is the
    embedding itself when tied.
    """

    config: Config
    embedding: np.ndarray
    att_norm: np.ndarray
    wq: np.ndarray
    wk: np.ndarray
    wv: np.ndarray
    wo: np.ndarray
    ffn_norm: np.ndarray
    w1: np.ndarray
    w2: np.ndarray
    w3: np.ndarray
    norm: np.ndarray
    classifier: np.ndarray


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every array of a checkpoint but the classifier."""
    n, d, h = c.layers, c.dim, c.hidden
    return {
        "embedding": (c.vocabulary, d),
        "att_norm": (n, d),
        "wq": (n, d, d),
        "wk": (n, c.kv_dim, d),
        "wv": (n, c.kv_dim, d),
        "wo": (n, d, d),
        "ffn_norm": (n, d),
        "w1": (n, h, d),
        "w2": (n, d, h),
        "w3": (n, h, d),
        "norm": (d,),
    }


ORDER_V0 = ("embedding", "att_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w2", "w3", "norm")
NORMS = ("att_norm", "ffn_norm", "norm")
MATRICES = ("embedding", "wq", "wk", "wv", "wo", "w1", "w2", "w3")


def load(path: str | Path) -> Checkpoint:
    """Reads a checkpoint file. Raises CheckpointError (what is wrong, where) and, for unreadable files, OSError."""
    return parse(Path(path).read_bytes(), str(path))


def parse(data: bytes, name: str = "checkpoint") -> Checkpoint:
    """Checkpoint from the bytes of a file; ``name`` is for messages. Raises CheckpointError."""
    try:
        version, first = struct.unpack_from("<Ii", data)
        if version != MAGIC:
            return _parse_v0(data)
        if first not in (1, 2):
            raise CheckpointError(f"version {first}, known are 0, 1 and 2")
        return _parse_new(data, first)
    except struct.error:
        raise CheckpointError(f"{name}: {len(data)} bytes, too short for a header") from None
    except CheckpointError as e:
        raise CheckpointError(f"{name}: {e}") from None


def _parse_v0(data: bytes) -> Checkpoint:
    dim, hidden, layers, heads, kv_heads, vocabulary, context = struct.unpack_from("<7i", data)
    c = Config(dim, hidden, layers, heads, kv_heads, abs(vocabulary), context, vocabulary > 0)
    skipped = 2 * context * (c.head_size // 2)
    """Cosines and sines that old readers used."""
    sizes = [math.prod(s) for s in shapes(c).values()]
    _check_size(data, 28 + 4 * (sum(sizes) + skipped + (0 if c.tied else c.vocabulary * dim)))
    arrays = dict(_floats(data, 28, [(key, shapes(c)[key]) for key in ORDER_V0]))
    if not c.tied:
        at = len(data) - 4 * c.vocabulary * dim
        arrays |= _floats(data, at, [("classifier", (c.vocabulary, dim))])
    return _checkpoint(c, arrays)


def _parse_new(data: bytes, version: int) -> Checkpoint:
    fields = struct.unpack_from("<7iB", data, 8)
    c = Config(*fields[:7], bool(fields[7]))
    shape = shapes(c)
    matrices = [*MATRICES, *([] if c.tied else ["classifier"])]
    shape["classifier"] = shape["embedding"]
    norms, weights = ([(key, shape[key]) for key in keys] for keys in (NORMS, matrices))
    count = {key: math.prod(s) for key, s in shape.items()}
    norm_bytes = 4 * sum(count[key] for key in NORMS)
    if version == 1:
        _check_size(data, HEADER_BYTES + norm_bytes + 4 * sum(count[key] for key in matrices))
        return _checkpoint(c, dict(_floats(data, HEADER_BYTES, [*norms, *weights])))
    (group,) = struct.unpack_from("<i", data, 37)
    if group < 1 or any(math.prod(s[-2:]) % group for _, s in weights):
        raise CheckpointError(f"quantisation groups of {group} weights do not divide the matrices")
    values = sum(count[key] for key in matrices)
    _check_size(data, HEADER_BYTES + norm_bytes + values + 4 * (values // group))
    arrays = dict(_floats(data, HEADER_BYTES, norms))
    at = HEADER_BYTES + norm_bytes
    for key, s in weights:
        parts = []
        for _ in range(s[0] if len(s) == 3 else 1):
            size = math.prod(s[-2:])
            q = np.frombuffer(data, np.int8, size, at).reshape(-1, group)
            scale = np.frombuffer(data, "<f4", size // group, at + size)
            parts.append(q * scale[:, None])
            at += size + 4 * (size // group)
        arrays[key] = np.concatenate(parts).reshape(s).astype(np.float32)
    return _checkpoint(c, arrays)


def _floats(data: bytes, at: int, wanted: list[tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays that follow each other from byte ``at`` on."""
    for key, shape in wanted:
        size = math.prod(shape)
        yield key, np.frombuffer(data, "<f4", size, at).reshape(shape).astype(np.float32)
        at += 4 * size


def _check_size(data: bytes, expected: int) -> None:
    if len(data) != expected:
        kind = "cut short" if len(data) < expected else "too long"
        raise CheckpointError(f"{kind}: {len(data)} bytes, its header announces {expected}")


def _checkpoint(c: Config, arrays: dict[str, np.ndarray]) -> Checkpoint:
    for key, a in arrays.items():
        if not np.isfinite(a).all():
            raise CheckpointError(f"{key} contains values that are not finite")
    return Checkpoint(c, **{"classifier": arrays["embedding"], **arrays})
