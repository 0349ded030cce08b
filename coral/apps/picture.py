"""``coral trace --picture``: utilisation of the tiles over time and the map of wide memory. Source: docs/run.md."""

from __future__ import annotations

import importlib
import importlib.util
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral import CoralError
from coral.apps.timeline import Timeline
from coral.chip.layout import SCALAR_NODE, TILES

BINS, BAND, MARGIN, LEFT = 1000, 14, 24, 150
"""Columns of the time axis; height of a band, outer margin and width of the labels, in pixels."""
PAPER, INK, GREY = (255, 255, 255), (40, 40, 40), (228, 228, 228)
COLOURS = {"op": (31, 119, 180), "data": (255, 127, 14), "usb": (44, 160, 44)}
STOPS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], float)
UNREAD = (150, 150, 150)


class PictureError(CoralError):
    """A picture that cannot be drawn."""


def utilisation(timeline: Timeline, place: int, op: bool) -> NDArray[np.float64]:
    """Predicted busy part, 0..1, of each of ``BINS`` equal spans of the call: of a place's op unit, or of its busiest
    other unit."""
    edges = np.linspace(0, timeline.cycles, BINS + 1)
    busy: dict[str, NDArray[np.float64]] = {}
    for s in timeline.slices:
        if s.place != place or (s.unit == "op") != op or s.end <= s.begin:
            continue
        gaps = [(s.begin, s.begin), *((start, end) for start, end, _ in s.waits), (s.end, s.end)]
        for (_, start), (end, _) in pairwise(gaps):
            covered = np.minimum(edges[1:], end) - np.maximum(edges[:-1], start)
            share = min(1.0, s.busy / max(1e-9, s.end - s.begin - sum(b - a for a, b, _ in s.waits)))
            busy.setdefault(s.unit, np.zeros(BINS))[:] += np.maximum(covered, 0) * share
    width = max(timeline.cycles / BINS, 1e-9)
    return np.minimum(np.max([np.zeros(BINS), *busy.values()], axis=0) / width, 1.0)


def draw(timeline: Timeline, name: str, file: Path) -> None:
    """Writes the picture. :raises PictureError: Pillow is missing, or the file cannot be written."""
    if importlib.util.find_spec("PIL") is None:
        raise PictureError("pictures need Pillow; install it with pip install 'tinycoral[image]'")
    drawing, pillow = importlib.import_module("PIL.ImageDraw"), importlib.import_module("PIL.Image")
    bands = 2 * TILES + 4
    top = 3 * MARGIN
    map_top = top + bands * BAND + 3 * MARGIN
    image = pillow.new("RGB", (LEFT + BINS + MARGIN, map_top + TILES * (BAND + 2) + 2 * MARGIN), PAPER)
    pen: Any = drawing.Draw(image)
    seconds = timeline.predicted_seconds
    pen.text(
        (MARGIN, 8), f"{name}: predicted {seconds * 1e3:.3f} ms per call at {timeline.clock_hz / 1e6:.0f} MHz", INK
    )
    pen.text((MARGIN, 28), "Utilisation over time (predicted, not measured): op units, and the busiest data mover", INK)
    canvas = np.full((bands * BAND, BINS, 3), GREY, np.uint8)
    for place in range(TILES + 1):
        pen.text((MARGIN, top + 2 * place * BAND), f"tile {place}" if place < TILES else "scalar side", INK)
        for k, kind in enumerate(("op", "data")):
            paint(canvas, 2 * place + k, utilisation(timeline, place, kind == "op"), COLOURS[kind])
    for k, unit in enumerate(dict.fromkeys(unit for unit, *_ in timeline.transfers)):
        pen.text((MARGIN, top + (2 * SCALAR_NODE + 2 + k) * BAND), unit, INK)
        used = np.zeros(BINS)
        for other, _, start, end in timeline.transfers:
            if other == unit:
                used[int(start / timeline.cycles * BINS) : int(np.ceil(end / timeline.cycles * BINS))] = 1
        paint(canvas, 2 * SCALAR_NODE + 2 + k, used, COLOURS["usb"])
    image.paste(pillow.fromarray(canvas), (LEFT, top))
    for k in range(11):
        x = LEFT + k * BINS // 10
        pen.text((x - 10, top + bands * BAND + 2), f"{k * timeline.cycles / timeline.clock_hz * 100:.2f}", INK)
    pen.text((LEFT, top + bands * BAND + 16), "milliseconds after the first byte of the call (predicted)", INK)
    pen.text(
        (MARGIN, map_top - 18),
        "Wide memory of every tile, row 0 left: resident parameters, coloured by the instruction that first reads them "
        "(violet: the first layers, yellow: the last, grey: none)",
        INK,
    )
    colours = memory_colours(timeline.first_readers)
    for tile in range(TILES):
        y = map_top + tile * (BAND + 2)
        pen.text((MARGIN, y), f"tile {tile}", INK)
        strip = colours[tile, np.arange(BINS) * colours.shape[1] // BINS]
        image.paste(pillow.fromarray(np.repeat(strip[None], BAND, axis=0)), (LEFT, y))
    try:
        image.save(file)
    except (OSError, ValueError) as error:
        raise PictureError(f"cannot write {file}: {error}") from None


def paint(canvas: NDArray[np.uint8], band: int, level: NDArray[np.float64], colour: tuple[int, int, int]) -> None:
    """Bars of these heights in a band of the canvas."""
    height = np.ceil(level * (BAND - 2)).astype(int)
    rows = np.arange(BAND)[:, None] >= BAND - height[None, :]
    canvas[band * BAND : (band + 1) * BAND][rows] = colour


def memory_colours(first_readers: NDArray[np.float64]) -> NDArray[np.uint8]:
    """A colour per tile and wide row: of its reader's place in the program, grey where there is none, light grey where
    there are no parameters."""
    readers = np.unique(first_readers[first_readers >= 0])
    rank = np.searchsorted(readers, np.nan_to_num(first_readers))
    part = np.clip(rank / max(len(readers) - 1, 1), 0, 1) * (len(STOPS) - 1)
    low = np.minimum(part.astype(int), len(STOPS) - 2)
    colours = STOPS[low] + (STOPS[low + 1] - STOPS[low]) * (part - low)[..., None]
    colours[np.isnan(first_readers)] = UNREAD
    colours[first_readers < 0] = GREY
    return colours.astype(np.uint8)
