"""``TFLite_Detection_PostProcess``: boxes from an SSD's two heads, as TFLite's kernel computes them.

Float32 with the kernel's doubles inside; equal scores keep their order. Source: docs/evaluate.md, "Detections".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral.evaluate.host import F32, host, real
from coral.evaluate.operands import Call, EvaluateError

DETECTION = "TFLite_Detection_PostProcess"
SCALES = ("y_scale", "x_scale", "h_scale", "w_scale")
NUMBERS, THRESHOLDS = (
    ("max_detections", "max_classes_per_detection", "num_classes"),
    ("nms_score_threshold", "nms_iou_threshold"),
)
MAX_DETECTIONS = 10_000
Floats = NDArray[np.float32]
Places = dict[int, tuple[int, int]]
"""Place among the results -> (box, class)."""


@host(DETECTION)
def detections(call: Call) -> tuple[NDArray[Any], ...]:
    """Boxes [1, n, 4] (ymin, xmin, ymax, xmax), classes [1, n], scores [1, n], their number [1]; zeros behind the last.

    From encodings [1, boxes, 4 or more], scores [1, boxes, classes with or without a background class], anchors
    [boxes, 4]. The file gives no shapes for the results: n is max_detections * max_classes_per_detection.
    """
    options = call.options
    kinds = dict.fromkeys(NUMBERS, int) | dict.fromkeys((*THRESHOLDS, *SCALES), (int, float))
    if wrong := [key for key, kind in kinds.items() if not isinstance(options.get(key), kind)]:
        raise EvaluateError(f"its options lack {', '.join(wrong)}")
    encodings, scores, anchors = (real(call.input(i)).astype(F32) for i in range(3))
    count, classes = encodings.shape[1] if encodings.ndim == 3 else -1, options["num_classes"]
    fit = encodings.shape[:1] == (1,) and encodings.shape[-1] >= 4 and anchors.shape == (count, 4)
    if not fit or scores.shape[:-1] != (1, count) or classes < 1 or scores.shape[-1] - classes not in (0, 1):
        shapes = f"encodings {encodings.shape}, scores {scores.shape}, anchors {anchors.shape}, {classes} classes"
        raise EvaluateError(f"{shapes} do not belong together")
    most, per_box = options["max_detections"], options["max_classes_per_detection"]
    if not (most > 0 and per_box > 0 and most * per_box <= MAX_DETECTIONS):
        raise EvaluateError(f"{most} detections of {per_box} classes, supported are 1 to {MAX_DETECTIONS} in all")
    boxes = decoded(encodings[0], anchors, [options[key] for key in SCALES])
    if not (np.isfinite(boxes).all() and np.isfinite(scores).all()):
        raise EvaluateError("its boxes or scores are not finite")
    ours = scores[0, :, scores.shape[-1] - classes :]
    number, places = (_regular if options.get("use_regular_nms") else _fast)(boxes, ours, options, most)
    return (*_results(boxes, ours, places, most * per_box), np.array([number], F32))


def decoded(encodings: Floats, anchors: Floats, scales: list[float]) -> Floats:
    """Corners (ymin, xmin, ymax, xmax) of boxes, from centres and sizes relative to anchors [boxes, 4]."""
    e, a = encodings[:, :4].astype(np.float64), anchors.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        centre = (e[:, :2] / scales[:2] * a[:, 2:] + a[:, :2]).astype(F32)
        half = (0.5 * np.exp(e[:, 2:] / scales[2:]) * a[:, 2:]).astype(F32)
        return np.concatenate([centre - half, centre + half], 1)


def kept(boxes: Floats, scores: Floats, options: dict[str, Any], most: int) -> list[int]:
    """Numbers of up to ``most`` boxes, best first, none of which overlaps a better one too much."""
    candidates = np.flatnonzero(scores >= F32(options["nms_score_threshold"]))
    order = candidates[np.argsort(-scores[candidates], kind="stable")]
    chosen: list[int] = []
    while len(order) and len(chosen) < most:
        best, order = order[0], order[1:]
        chosen.append(int(best))
        order = order[~(overlap(boxes[best], boxes[order]) > F32(options["nms_iou_threshold"]))]
    return chosen


def overlap(box: Floats, others: Floats) -> Floats:
    """Common part of the union's area; 0 with boxes that have none."""
    with np.errstate(all="ignore"):
        area, areas = ((b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1]) for b in (box, others))
        sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
        common = np.prod(np.maximum(sides, F32(0)), axis=1, dtype=F32)
        return np.where((area <= 0) | (areas <= 0), F32(0), common / (area + areas - common))


def _fast(boxes: Floats, scores: Floats, options: dict[str, Any], most: int) -> tuple[int, Places]:
    """Overlaps by every box's best score; then each box's best classes."""
    room = options["max_classes_per_detection"]
    best = np.argsort(-scores, axis=1, kind="stable")[:, :room]
    chosen = kept(boxes, scores.max(1), options, most)
    places = {k * room + c: (n, int(label)) for k, n in enumerate(chosen) for c, label in enumerate(best[n])}
    return len(chosen), places


def _regular(boxes: Floats, scores: Floats, options: dict[str, Any], most: int) -> tuple[int, Places]:
    """Overlaps class by class; then the best of all."""
    each = options.get("detections_per_class", 100)
    found = [(n, label) for label in range(scores.shape[1]) for n in kept(boxes, scores[:, label], options, each)]
    places = dict(enumerate(sorted(found, key=lambda pair: -scores[pair])[:most]))
    return len(places), places


def _results(boxes: Floats, scores: Floats, places: Places, size: int) -> list[NDArray[Any]]:
    corners, labels, values = np.zeros((1, size, 4), F32), np.zeros((1, size), F32), np.zeros((1, size), F32)
    for place, (number, label) in places.items():
        corners[0, place], labels[0, place], values[0, place] = boxes[number], label, scores[number, label]
    return [corners, labels, values]


__all__ = ["DETECTION", "decoded", "detections", "kept", "overlap"]
