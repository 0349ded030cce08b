"""Arrays from and to files: .npy, .npz, images for inputs (optional extra ``image``). Source: docs/run.md."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from coral import CoralError
from coral.apps.model import Array, Port
from coral.package.extras import associated_files

IMAGES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff"))
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's colours by number of channels."""
OFFSETS = {"int8": -128, "int16": 0}
"""What an input's codes have more than the pixel values 0..255."""
MAX_PIXELS = 1 << 26


class FileError(CoralError):
    """A file that cannot be used as an input or output; the message names it and says what is possible."""


def given(ports: Sequence[Port], files: Sequence[Path], random: int | None) -> dict[str, Array]:
    """Inputs of a model from files, or by chance. FileError as ``read_inputs``, or if neither is asked for."""
    if files:
        return read_inputs(files, ports)
    if random is None:
        raise FileError(f"no input: give --input FILE for each of {_listed(ports)}, or --random SEED")
    return random_inputs(ports, random)


def _listed(ports: Sequence[Port]) -> str:
    return ", ".join(f"{port.name} {port.shape} {port.dtype}" for port in ports)


def read_inputs(files: Sequence[Path], ports: Sequence[Port]) -> dict[str, Array]:
    """Arrays by input name: one file per input in order, or one .npz with all of them.

    :raises FileError: other number of files, unknown type, damaged file, array or name missing
    """
    if len(files) == 1 and files[0].suffix == ".npz" and len(ports) > 1:
        arrays = _archive(files[0])
        missing = [port.name for port in ports if port.name not in arrays]
        if missing:
            raise FileError(f"{files[0]} lacks the input {missing[0]!r}, it has {sorted(arrays)}")
        return {port.name: arrays[port.name] for port in ports}
    if len(files) != len(ports):
        raise FileError(f"{len(files)} input files are given, the model takes {len(ports)}: {_listed(ports)}")
    return {port.name: read_input(file, port) for file, port in zip(files, ports, strict=True)}


def read_input(file: Path, port: Port) -> Array:
    """The array of one input; an image is resized to the input's height and width. FileError as ``read_inputs``."""
    if file.suffix == ".npy":
        return _numpy(file)
    if file.suffix == ".npz":
        arrays = _archive(file)
        if port.name in arrays or len(arrays) == 1:
            return arrays.get(port.name, next(iter(arrays.values())))
        raise FileError(f"{file} lacks the input {port.name!r}, it has {sorted(arrays)}")
    if file.suffix.lower() in IMAGES:
        return image_input(file, port)
    raise FileError(f"{file}: inputs are .npy, .npz or images ({' '.join(sorted(IMAGES))})")


def image_input(file: Path, port: Port) -> Array:
    """The image as the input's codes: colours by the number of channels, bilinear resizing, pixel values as they are
    (minus 128 for int8)."""
    shape = port.shape[1:] if len(port.shape) >= 3 and port.shape[0] == 1 else port.shape
    shape = (*shape, 1) if len(port.shape) > len(shape) == 2 else shape
    if len(shape) != 3 or shape[2] not in MODES:
        raise FileError(
            f"input {port.name!r} has shape {port.shape}, images need [height, width, 1, 3 or 4], [1, height, width]"
        )
    if importlib.util.find_spec("PIL") is None:
        raise FileError(f"{file}: images need Pillow; install it with pip install 'tinycoral[image]', or give a .npy")
    pillow: Any = importlib.import_module("PIL.Image")
    try:
        with pillow.open(file) as image:
            if image.width * image.height > MAX_PIXELS:
                raise FileError(f"{file} has {image.width} x {image.height} pixels, the limit is {MAX_PIXELS}")
            scaled = image.convert(MODES[shape[2]]).resize((shape[1], shape[0]), pillow.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise FileError(f"{file} cannot be read as an image: {error}") from None
    pixels = np.asarray(scaled, np.uint8).astype(np.int32)
    return (pixels + OFFSETS.get(port.dtype.name, 0)).astype(port.dtype).reshape(port.shape)


def random_inputs(ports: Sequence[Port], seed: int) -> dict[str, Array]:
    """Uniform codes of the whole dtype; floats between -1 and 1."""
    rng, arrays = np.random.default_rng(seed), {}
    for port in ports:
        if port.dtype.kind in "iu":
            limits = np.iinfo(port.dtype)
            arrays[port.name] = rng.integers(limits.min, limits.max, port.shape, port.dtype, endpoint=True)
        else:
            arrays[port.name] = rng.uniform(-1, 1, port.shape).astype(port.dtype)
    return arrays


def check_outputs(files: Sequence[Path], ports: Sequence[Port]) -> None:
    """FileError unless the outputs fit: one .npy per output in order, or one .npz for all."""
    one = len(files) == 1 and files[0].suffix == ".npz"
    wrong = [file for file in files if file.suffix != ".npy"]
    if files and not one and (wrong or len(files) != len(ports)):
        names = ", ".join(port.name for port in ports)
        raise FileError(f"outputs are one .npz, or one .npy for each of: {names}; given: {', '.join(map(str, files))}")


def write_outputs(files: Sequence[Path], arrays: Mapping[str, Array]) -> None:
    """Writes what ``check_outputs`` has accepted."""
    if len(files) == 1 and files[0].suffix == ".npz":
        with files[0].open("wb") as target:
            named: dict[str, Any] = dict(arrays)
            np.savez(target, **named)
        return
    for file, array in zip(files, arrays.values(), strict=False):
        np.save(file, array)


MAX_LABELS = 1 << 16


def read_labels(file: Path) -> list[str]:
    """Lines of a label file; where each has its number in front ("0  background"), by number, "" for those left out."""
    try:
        return labels_of(file.read_text(errors="replace"))
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror}") from None


def attached_labels(model: Path) -> list[str]:
    """Labels from the archive behind a model, if exactly one text file is there; else none."""
    texts = [data for name, data in associated_files(model.read_bytes()).items() if name.endswith(".txt")]
    return labels_of(texts[0].decode(errors="replace")) if len(texts) == 1 else []


def labels_of(text: str) -> list[str]:
    """As :func:`read_labels`, from a text."""
    lines = text.splitlines()
    parts = [line.split(maxsplit=1) or [""] for line in lines]
    numbers = [int(n) if (n := first.rstrip(":")).isascii() and n.isdigit() else -1 for first, *_ in parts]
    if not lines or min(numbers) < 0 or max(numbers) >= MAX_LABELS or any(a >= b for a, b in pairwise(numbers)):
        return lines
    found = [""] * (numbers[-1] + 1)
    for number, (_, *rest) in zip(numbers, parts, strict=True):
        found[number] = rest[0] if rest else ""
    return found


def _numpy(file: Path) -> Array:
    try:
        return np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise FileError(f"{file} cannot be read as an array: {error}") from None


def _archive(file: Path) -> dict[str, Array]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # zipfile and zlib raise many kinds on damaged archives
        raise FileError(f"{file} cannot be read as an archive of arrays: {error}") from None
