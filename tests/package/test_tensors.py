"""Tensor bytes: packing, signs and layouts against direct loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral.package import DType, Layer, PackageError
from coral.package.tensors import pack_input, unpack_output
from coral.package.tflite_file import read_edgetpu

from .package_programs import layers

PLAIN = st.sampled_from([DType.U8, DType.U16, DType.I32, DType.F32, DType.F16, DType.I8, DType.I16])


def by_loops(layer: Layer, raw: bytes) -> list[list[list[bytes]]]:
    """Element bytes [y][x][z] by the index formula of the format, the sign bit of signed types inverted."""
    assert layer.layout
    size, out = layer.dtype.itemsize, []
    for y in range(layer.y):
        out.append([])
        for x in range(layer.x):
            out[y].append([])
            for z in range(layer.z):
                layout = layer.layout
                index = layout.tile_byte_offset[layout.y_to_tile[y] + layout.x_to_tile[x]]
                index += layout.y_local_y[y] * layout.x_row_size[x] + layout.x_local_byte_offset[x] + z
                element = bytearray(raw[index * size : index * size + size])
                if layer.dtype in (DType.I8, DType.I16):
                    element[-1] ^= 0x80
                out[y][x].append(bytes(element))
    return out


def as_bytes(array: np.ndarray) -> list[list[list[bytes]]]:
    return [[[element.tobytes() for element in row] for row in plane] for plane in array]


@settings(max_examples=150, deadline=None)
@given(st.data(), PLAIN)
def test_outputs_follow_the_index_formula(data: st.DataObject, dtype: DType) -> None:
    layer = data.draw(layers("t", output=True).filter(lambda layer: layer.layout is not None))
    layer = replace(layer, dtype=dtype, executions=1, size_bytes=layer.size_bytes * 4)
    raw = data.draw(st.binary(min_size=layer.size_bytes, max_size=layer.size_bytes))
    assert as_bytes(unpack_output(layer, raw)) == by_loops(layer, raw)


@settings(max_examples=100, deadline=None)
@given(st.data(), PLAIN)
def test_slices_of_a_row_major_tensor_are_that_tensor(data: st.DataObject, dtype: DType) -> None:
    layer = data.draw(layers("t", output=True).filter(lambda layer: bool(layer.slices)))
    scale = dtype.itemsize / layer.dtype.itemsize
    slices = tuple(replace(box, offset_bytes=int(box.offset_bytes * scale)) for box in layer.slices)
    layer = replace(layer, dtype=dtype, slices=slices, executions=1, size_bytes=layer.size_bytes * 4)
    raw = data.draw(st.binary(min_size=layer.size_bytes, max_size=layer.size_bytes))
    packed = replace(layer, slices=())
    assert unpack_output(layer, raw).tobytes() == unpack_output(packed, raw).tobytes()


def test_slices_may_be_anywhere() -> None:
    from coral.package import Slice

    layer = Layer("t", 16, 1, 2, 3, 0, 1.0, slices=(Slice(((0, 0), (1, 1), (0, 2)), (0, 0, 2), 1),
                                                    Slice(((0, 0), (0, 0), (0, 2)), (0, 0, 1), 8)))  # fmt: skip
    assert unpack_output(layer, bytes(range(16))).tolist() == [[[8, 9, 10], [1, 3, 5]]]


@settings(max_examples=100, deadline=None)
@given(st.data(), PLAIN, st.integers(1, 3))
def test_inputs_are_dense_padded_and_unsigned(data: st.DataObject, dtype: DType, executions: int) -> None:
    y, x, z = (data.draw(st.integers(1, 5)) for _ in range(3))
    used = y * x * z * dtype.itemsize
    layer = Layer("t", -(-used // 8) * 8, y, x, z, 0, 1.0, dtype, executions=executions)
    raw = data.draw(st.binary(min_size=used * executions, max_size=used * executions))
    numpy = {"U": "u", "I": "i", "F": "f"}[dtype.name[0]] + str(dtype.itemsize)
    array = np.frombuffer(raw, "<" + numpy).reshape(executions, y, x, z)
    packed = pack_input(layer, array if executions > 1 else array[0])
    assert len(packed) == layer.size_bytes * executions
    for index in range(executions):
        part = bytearray(packed[index * layer.size_bytes :][: layer.size_bytes])
        assert not any(part[used:])
        if dtype in (DType.I8, DType.I16):
            for position in range(dtype.itemsize - 1, used, dtype.itemsize):
                part[position] ^= 0x80
        assert bytes(part[:used]) == raw[index * used : (index + 1) * used]
    back = unpack_output(layer, packed)
    assert back.tobytes() == raw
    assert back.shape == ((y, x, z) if executions == 1 else (executions, y, x, z))


def test_int8_extremes() -> None:
    layer = Layer("t", 8, 1, 1, 3, 128, 1.0, DType.I8)
    assert pack_input(layer, np.array([-128, 0, 127], np.int8))[:3] == bytes([0, 128, 255])
    assert unpack_output(layer, bytes([0, 128, 255] + [9] * 5)).tolist() == [[[-128, 0, 127]]]


def test_shapes_that_are_accepted() -> None:
    layer = Layer("t", 64, 4, 4, 4, 0, 1.0)
    image = np.arange(64, dtype=np.uint8)
    assert pack_input(layer, image.reshape(1, 4, 4, 4)) == pack_input(layer, image.reshape(4, 4, 4)) == image.tobytes()
    flat = Layer("t", 64, 1, 1, 64, 0, 1.0)
    assert pack_input(flat, image.reshape(1, 8, 8, 1)) == pack_input(flat, image) == image.tobytes()
    strided = np.arange(128, dtype=np.uint8).reshape(4, 4, 8)[:, :, ::2]
    assert pack_input(layer, strided) == bytes(range(0, 128, 2))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4, 4), np.int8), "input 't' must be uint8, got int8"),
        (np.zeros((4, 4, 4), np.float32), "must be uint8, got float32"),
        (np.zeros((4, 4, 3), np.uint8), r"must have shape \(4, 4, 4\), got \(4, 4, 3\)"),
        (np.zeros((4, 16), np.uint8), r"got \(4, 16\)"),
        (np.zeros((2, 4, 4, 4), np.uint8), r"got \(2, 4, 4, 4\)"),
    ],
)
def test_wrong_inputs(array: np.ndarray, message: str) -> None:
    with pytest.raises(PackageError, match=message):
        pack_input(Layer("t", 64, 4, 4, 4, 0, 1.0), array)


def test_wrong_output_length_and_bfloat16() -> None:
    with pytest.raises(PackageError, match="output 't' has 1 x 64 bytes, got 63"):
        unpack_output(Layer("t", 64, 4, 4, 4, 0, 1.0), bytes(63))
    with pytest.raises(PackageError, match="no type for BF16"):
        unpack_output(Layer("t", 8, 1, 1, 4, 0, 1.0, DType.BF16), bytes(8))


def test_corpus_layouts(corpus: Path) -> None:
    """All 30 outputs of the corpus (the large ones re-ordered over 16 tiles) against the loops."""
    rng, count, reordered = np.random.default_rng(1), 0, 0
    for path in sorted(corpus.rglob("*_edgetpu.tflite")):
        for layer in read_edgetpu(path).package.execution.outputs:
            raw = rng.integers(0, 256, layer.size_bytes, np.uint8).tobytes()
            tensor = unpack_output(layer, raw)
            assert tensor.shape == (layer.y, layer.x, layer.z)
            assert as_bytes(tensor) == by_loops(layer, raw)
            assert layer.size_bytes == -(-layer.y * layer.x * (-(-layer.z * layer.dtype.itemsize // 4) * 4) // 8) * 8
            count += 1
            reordered += tensor.tobytes() != np.frombuffer(raw, tensor.dtype)[: tensor.size].tobytes()
        for layer in read_edgetpu(path).package.execution.inputs:
            assert layer.size_bytes == -(-layer.y * layer.x * layer.z * layer.dtype.itemsize // 8) * 8
    assert count == 30
    assert reordered >= 8
