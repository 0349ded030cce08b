"""Options of ``TFLite_Detection_PostProcess``."""

from __future__ import annotations

from typing import Any

from flatbuffers import flexbuffers

OPTIONS = {
    "max_detections": 10, "max_classes_per_detection": 1, "detections_per_class": 5, "use_regular_nms": False,
    "nms_score_threshold": 0.3, "nms_iou_threshold": 0.5, "num_classes": 7,
    "y_scale": 10.0, "x_scale": 10.0, "h_scale": 5.0, "w_scale": 5.0,
}  # fmt: skip


def flex(options: dict[str, Any]) -> bytes:
    builder = flexbuffers.Builder()
    with builder.Map():
        for key, value in options.items():
            builder.Key(key)
            builder.Add(value)
    return bytes(builder.Finish())
