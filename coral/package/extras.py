"""What a TFLite file holds besides its graphs: metadata, signatures, and files in a ZIP archive behind its end.

Source: docs/package.md, section Writing graphs.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coral.package.flatbuffer import Reader, Record

DROPPED = {"min_runtime_version"}
"""Metadata about the graph as it was, which a graph with other operators does not keep."""
MAX_FILES, MAX_FILES_BYTES = 64, 16 << 20
"""Of an archive whose files are read."""
METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
"""What such archives use; others would let a stranger's file choose how much memory a decoder takes."""


@dataclass(frozen=True)
class Signature:
    """Names of a graph's inputs and outputs, for callers; ``inputs`` and ``outputs``: tensor numbers by name."""

    key: str
    inputs: dict[str, int]
    outputs: dict[str, int]
    graph: int = 0


@dataclass(frozen=True)
class Extras:
    """Metadata by name, and signatures, of a model."""

    metadata: dict[str, bytes] = field(default_factory=dict)
    signatures: tuple[Signature, ...] = ()


NOTHING = Extras()


def read_extras(reader: Reader, record: Record, buffers: list[memoryview], tensors: list[int]) -> Extras:
    """Of a model's record; ``tensors``: how many each graph has. PackageError: they refer to what is not there."""
    metadata, signatures = {}, []
    for entry in record.get("metadata", ()):
        name, buffer = entry.get("name", ""), entry.get("buffer", 0)
        if buffer >= len(buffers):
            raise reader.error(f"Model.metadata {name!r}", f"buffer {buffer} of {len(buffers)}")
        metadata[name] = bytes(buffers[buffer])
    for entry in record.get("signature_defs", ()):
        key, graph = entry.get("signature_key", ""), entry.get("subgraph_index", 0)
        inputs, outputs = (
            {m.get("name", ""): m.get("tensor_index", 0) for m in entry.get(end, ())} for end in ("inputs", "outputs")
        )
        if graph >= len(tensors) or any(i >= tensors[graph] for i in (*inputs.values(), *outputs.values())):
            raise reader.error(f"Model.signature_defs {key!r}", f"names tensors that graph {graph} does not have")
        signatures.append(Signature(key, inputs, outputs, graph))
    return Extras(metadata, tuple(signatures))


def extras_record(extras: Extras, buffers: dict[bytes, int], numbers: Sequence[Mapping[int, int]]) -> Record:
    """For a model's record. ``buffers`` grow; ``numbers``: per graph, what its tensors are called in the file. A
    signature whose tensors are not all there is left out."""
    kept = {name: data for name, data in extras.metadata.items() if name not in DROPPED}
    record: Record = {}
    if kept:
        record["metadata"] = [{"name": n, "buffer": buffers.setdefault(d, len(buffers))} for n, d in kept.items()]
    signatures = []
    for s in extras.signatures:
        own = numbers[s.graph] if s.graph < len(numbers) else None
        if own is not None and own.keys() >= {*s.inputs.values(), *s.outputs.values()}:
            ends = [[{"name": n, "tensor_index": own[i]} for n, i in end.items()] for end in (s.inputs, s.outputs)]
            signatures.append(
                {"inputs": ends[0], "outputs": ends[1], "signature_key": s.key, "subgraph_index": s.graph}
            )
    return record | ({"signature_defs": signatures} if signatures else {})


def associated_files(data: bytes) -> dict[str, bytes]:
    """Files of the archive behind a model (labels, vocabularies), by name; none where there is no sound archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_FILES or sum(entry.file_size for entry in entries) > MAX_FILES_BYTES:
                return {}
            if any(entry.compress_type not in METHODS for entry in entries):
                return {}
            return {entry.filename: archive.read(entry) for entry in entries}
    except (zipfile.BadZipFile, zlib.error, RuntimeError, ValueError, OSError, EOFError):
        return {}


def with_files(data: bytes, files: Mapping[str, bytes]) -> bytes:
    """A model with an archive of these files behind it."""
    if not files:
        return data
    stream = io.BytesIO(data)
    stream.seek(0, io.SEEK_END)
    with zipfile.ZipFile(stream, "a") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return stream.getvalue()
