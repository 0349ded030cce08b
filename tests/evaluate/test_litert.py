"""Against TFLite's own CPU kernels (optional extra ai-edge-litert), operator by operator on the same inputs.

The chip rounds once, half to even, in float32; TFLite twice, in fixed point. So they are not equal; how far apart they
may be is known per class (docs/evaluate.md, "Difference to TFLite").
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coral import evaluate
from coral.evaluate.compare import chip_part, difference

litert: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert: TFLite's kernels NOT compared")
LOWER = {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"}
"""Operators whose results are equal or one lower."""
EQUAL = {"QUANTIZE", "RESHAPE", "CONCATENATION", "SPLIT", "SQUEEZE"}
MODELS = [
    "robotics/bright_64x64", "robotics/looming_64x64_3x3", "robotics/gabor_64x64_p4",
    "vision/movenet_single_pose_lightning_ptq", "vision/mobilenet_v1_0.25_128_quant", "sequence/split_concat",
    "dense/dense_512",
]  # fmt: skip


def interpreter_of(path: Path, inputs: dict[str, np.ndarray]) -> Any:
    """A model run by TFLite's kernels, every tensor kept."""
    resolver = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = litert.Interpreter(
        str(path), experimental_preserve_all_tensors=True, experimental_op_resolver_type=resolver
    )
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], inputs[detail["name"]])
    interpreter.invoke()
    return interpreter


@pytest.mark.parametrize("name", MODELS)
def test_operators(corpus: Path, name: str) -> None:
    path = corpus / f"{name}.tflite"
    part = chip_part(path, corpus / f"{name}_edgetpu.tflite")
    graph, rng = part.graph, np.random.default_rng(0)
    inputs = {graph.tensors[i].name: rng.integers(0, 256, graph.tensors[i].shape, np.uint8) for i in graph.inputs}
    interpreter = interpreter_of(path, inputs)
    amounts: defaultdict[str, Counter[int]] = defaultdict(Counter)
    values: Counter[str] = Counter()
    for number in part.operators:
        op = graph.operators[number]
        sources = [i for i in op.inputs if i >= 0 and graph.tensors[i].data is None]
        given = {graph.tensors[i].name: interpreter.get_tensor(i) for i in sources}
        for i in op.outputs:
            wanted = graph.tensors[i].name
            ours = evaluate.evaluate(graph, given, outputs=[wanted])[wanted]
            found = difference(interpreter.get_tensor(i), ours)
            amounts[op.name].update(found.amounts)
            values[op.name] += found.values
    for op_name, total in values.items():
        print(f"{op_name}: {total} values, differences {dict(amounts[op_name])}")
        allowed = {-1} if op_name in LOWER else set() if op_name in EQUAL else {-1, 1}
        assert set(amounts[op_name]) <= allowed, op_name
        if op_name in LOWER:
            assert sum(amounts[op_name].values()) <= 0.07 * total


@pytest.mark.parametrize("picture", ["grace_hopper.bmp", "cat.bmp"])
@pytest.mark.parametrize(
    "name", ["mobilenet_v1_0.25_128_quant", "mobilenet_v1_0.5_160_quant", "mobilenet_v2_1.0_224_quant_legacy"]
)
def test_pictures(corpus: Path, name: str, picture: str) -> None:
    """The same best class, and nearly all of the scores."""
    image = pytest.importorskip("PIL.Image")
    path = corpus / "vision" / f"{name}.tflite"
    part = chip_part(path, corpus / "vision" / f"{name}_edgetpu.tflite")
    ((input_name, tensor),) = part.inputs.items()
    photo = image.open(corpus / "vision" / picture).convert("RGB")
    x = np.asarray(photo.resize(tensor.shape[2:0:-1], image.Resampling.BILINEAR))[None]
    (ours,) = part.evaluate({input_name: x}).values()
    interpreter = interpreter_of(path, {tensor.name: x})
    theirs = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    assert ours.argmax() == theirs.argmax()
    assert difference(theirs, ours).differing <= 0.02 * ours.size
