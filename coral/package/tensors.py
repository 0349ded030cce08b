"""Between numpy arrays and the padded, re-ordered, unsigned bytes that cross the bus.

The layers are expected to have passed Program.check(). Source: docs/package.md (tensor bytes).
"""

from __future__ import annotations

import numpy as np

from coral.package.check import element_index, extents
from coral.package.program import DType, Layer, PackageError

NUMPY = {
    DType.U8: "u1", DType.U16: "<u2", DType.I32: "<i4", DType.F16: "<f2", DType.F32: "<f4", DType.I8: "i1",
    DType.I16: "<i2",
}  # fmt: skip
SIGN_BITS = {DType.I8: ("u1", 0x80), DType.I16: ("<u2", 0x8000)}


def numpy_dtype(layer: Layer) -> np.dtype:
    """The array type of a layer; PackageError for bfloat16, which numpy lacks."""
    if layer.dtype not in NUMPY:
        raise PackageError(f"layer {layer.name!r}: numpy has no type for {layer.dtype.name}")
    return np.dtype(NUMPY[layer.dtype])


def pack_input(layer: Layer, array: np.ndarray) -> bytes:
    """``size_bytes * executions`` bytes of ``array`` [y, x, z], padded with zeros, signed types made unsigned.

    Axes of length 1 may be left out or added in front; a layer of one position takes any shape of z elements, because
    the compiler flattens such tensors. Several executions are a leading axis. PackageError for another dtype or shape.
    """
    dtype = numpy_dtype(layer)
    if array.dtype != dtype:
        raise PackageError(f"input {layer.name!r} must be {dtype}, got {array.dtype}")
    expected = (layer.executions, layer.y, layer.x, layer.z)
    flat = layer.y == layer.x == 1 and array.size == layer.executions * layer.z
    if not flat and [n for n in array.shape if n != 1] != [n for n in expected if n != 1]:
        raise PackageError(
            f"input {layer.name!r} must have shape {expected[layer.executions == 1 :]}, got {array.shape}"
        )
    raw = np.ascontiguousarray(array).reshape(layer.executions, -1)
    padded = np.zeros((layer.executions, layer.size_bytes), np.uint8)
    padded[:, : raw.shape[1] * dtype.itemsize] = _flip(layer, raw).view(np.uint8)
    return padded.tobytes()


def unpack_output(layer: Layer, raw: bytes | bytearray | memoryview) -> np.ndarray:
    """The tensor [y, x, z] (with a leading axis for several executions) in the ``size_bytes * executions`` raw bytes.

    PackageError when there are more or fewer bytes.
    """
    dtype = numpy_dtype(layer)
    if len(raw) != layer.size_bytes * layer.executions:
        raise PackageError(f"output {layer.name!r} has {layer.executions} x {layer.size_bytes} bytes, got {len(raw)}")
    if layer.layout:
        elements = np.frombuffer(raw, dtype).reshape(layer.executions, -1)
        windows = np.lib.stride_tricks.sliding_window_view(elements, layer.z, axis=1)
        found = windows[:, element_index(layer.layout)]
        return _flip(layer, found if layer.executions > 1 else found[0])
    tensors = [
        _unpack_one(layer, np.frombuffer(raw, dtype, layer.size_bytes // dtype.itemsize, index * layer.size_bytes))
        for index in range(layer.executions)
    ]
    return _flip(layer, np.stack(tensors) if layer.executions > 1 else tensors[0])


def _unpack_one(layer: Layer, elements: np.ndarray) -> np.ndarray:
    shape = (layer.y, layer.x, layer.z)
    if not layer.slices:
        return elements[: layer.y * layer.x * layer.z].reshape(shape)
    tensor = np.zeros(extents(layer), elements.dtype)
    for box in layer.slices:
        axes = [np.arange(end - start + 1) * step for (start, end), step in zip(box.ranges, box.strides, strict=True)]
        index = box.offset_bytes // elements.itemsize + sum(np.ix_(*axes))
        tensor[tuple(slice(start, end + 1) for start, end in box.ranges)] = elements[index]
    return tensor.reshape(shape)


def _flip(layer: Layer, array: np.ndarray) -> np.ndarray:
    """Signed layers travel as unsigned: the top bit of every element is inverted, in both directions."""
    if layer.dtype not in SIGN_BITS:
        return array
    kind, bit = SIGN_BITS[layer.dtype]
    return (array.view(kind) ^ np.array(bit, kind)).view(array.dtype)
