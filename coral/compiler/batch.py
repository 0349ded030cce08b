"""More images per call: the same graph with a longer first axis. Source: docs/compiler.md, section Batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coral.compiler.errors import CompileError
from coral.package.graph import Graph, Operator, Tensor

IMAGEWISE = {
    "CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "AVERAGE_POOL_2D", "MAX_POOL_2D", "MEAN", "SUM", "ADD", "SUB",
    "MUL", "QUANTIZE", "DEQUANTIZE", "RELU", "RELU6", "RELU_N1_TO_1", "LOGISTIC", "TANH", "HARD_SWISH", "SOFTMAX",
    "L2_NORMALIZATION", "RESHAPE", "SQUEEZE", "EXPAND_DIMS", "PAD", "CONCATENATION", "SPLIT", "SPLIT_V",
    "RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "CAST", "ARG_MAX", "SQRT", "DIV", "TRANSPOSE_CONV",
    "STRIDED_SLICE",
}  # fmt: skip
"""Operators that treat images alike, unless their axis is the first."""
AXES = {"CONCATENATION": "axis", "EXPAND_DIMS": 1, "SPLIT": 0, "SPLIT_V": 2, "MEAN": 1, "SUM": 1, "ARG_MAX": 1}
"""Where an operator names axes: an option, or an input."""


SHAPES = {"RESHAPE": 1, "TRANSPOSE_CONV": 0, "STRIDED_SLICE": 2}
"""Input that is the shape of the result, or where slices end."""
BROADCAST = {"ADD", "SUB", "MUL", "DIV"}
"""Operators of several tensors of images, as is CONCATENATION."""


def images_of(graph: Graph) -> int:
    """Images that a graph computes at once: the first axis of its inputs. :raises CompileError: it has no inputs, or
    their first axes differ."""
    first = {graph.tensors[i].shape[:1] for i in graph.inputs}
    if len(first) != 1 or () in first:
        shapes = {graph.tensors[i].name: graph.tensors[i].shape for i in graph.inputs}
        raise CompileError(f"the inputs {shapes} have no common first axis of images")
    return first.pop()[0]


def rebatched(graph: Graph, factor: int) -> Graph:
    """The graph for ``factor`` times as many images. :raises CompileError: an operator or tensor that mixes images."""
    if factor == 1:
        return graph
    images = images_of(graph)
    tensors = list(graph.tensors)
    computed = {*graph.inputs, *(i for op in graph.operators for i in op.outputs)}
    for i in computed:
        tensors[i] = _longer(tensors[i], images, factor)
    operators = []
    for op in graph.operators:
        if op.name not in IMAGEWISE or 0 in _axes(graph, op):
            raise CompileError(f"a batch needs operators that treat images alike: {op.name} does not; compile batch 1")
        if problem := _mixed(graph, op, computed):
            raise CompileError(f"a batch needs operators that treat images alike: {op.name} {problem}; compile batch 1")
        if op.name in SHAPES:
            op = _resized(graph, tensors, op, SHAPES[op.name])
        operators.append(op)
    return replace(graph, tensors=tuple(tensors), operators=tuple(operators))


def _mixed(graph: Graph, op: Operator, computed: set[int]) -> str:
    """Why an operator would not do with longer tensors what it does for every image, or nothing."""
    shapes = {i: graph.tensors[i].shape for i in op.inputs if i >= 0}
    images, fixed = [i for i in shapes if i in computed], [i for i in shapes if i not in computed]
    if not images:
        return "has only constants"
    if op.name == "CONCATENATION" and fixed:
        return f"joins the constant {graph.tensors[fixed[0]].name!r}"
    if op.name == "STRIDED_SLICE" and not _slices_all(graph, op):
        return "takes some of the images, or axes"
    if op.name not in {*BROADCAST, "CONCATENATION"}:
        return f"reads the images {[graph.tensors[i].name for i in images]}" if len(images) > 1 else ""
    rank = len(graph.tensors[op.outputs[0]].shape)
    wrong = [i for i in images if len(shapes[i]) != rank]
    wrong += [i for i in fixed if len(shapes[i]) == rank and shapes[i][0] > 1]
    return f"repeats {graph.tensors[wrong[0]].name!r} of shape {shapes[wrong[0]]}" if wrong else ""


def _longer(tensor: Tensor, images: int, factor: int) -> Tensor:
    if tensor.shape[:1] != (images,):
        raise CompileError(
            f"a batch needs images along the first axis: {tensor.name!r} has shape {tensor.shape}, not [{images}, ..]"
        )
    return replace(tensor, shape=(images * factor, *tensor.shape[1:]))


def _axes(graph: Graph, op: Operator) -> set[int]:
    where = AXES.get(op.name)
    if where is None:
        return set()
    if isinstance(where, str):
        rank, axes = len(graph.tensors[op.outputs[0]].shape), [op.options.get(where, 0)]
    else:
        rank = len(graph.tensors[op.inputs[1 if op.name == "SPLIT" else 0]].shape)
        data = graph.tensors[op.inputs[where]].data
        if data is None:
            return {0}
        axes = data.ravel().tolist()
    return {axis % rank if rank else 0 for axis in axes}


def _slices_all(graph: Graph, op: Operator) -> bool:
    """Whether a slice takes all images, and every axis stays."""
    ends = [graph.tensors[i].data for i in op.inputs[1:4]]
    masks = [op.options.get(f"{name}_mask", 0) for name in ("ellipsis", "new_axis", "shrink_axis")]
    if any(masks) or len(ends) != 3 or any(end is None or not end.size for end in ends):
        return False
    begin, end, stride = (int(values.flat[0]) for values in ends if values is not None)
    images = graph.tensors[op.inputs[0]].shape[0]
    first, last = (op.options.get(f"{name}_mask", 0) & 1 for name in ("begin", "end"))
    return stride == 1 and (first or begin == 0) and (last or end >= images)


def _resized(graph: Graph, tensors: list[Tensor], op: Operator, at: int) -> Operator:
    """The operator with the longer output shape in its constant ``at`` and its option; slices end behind all images."""
    shape = tensors[op.outputs[0]].shape
    inputs = list(op.inputs)
    if at < len(inputs) and inputs[at] >= 0:
        old = graph.tensors[inputs[at]]
        if old.data is None:
            raise CompileError(f"a batch needs constant shapes: {old.name!r} is computed; compile batch 1")
        values = shape if op.name != "STRIDED_SLICE" else (shape[0], *old.data.ravel()[1:].tolist())
        tensors.append(replace(old, name=f"{old.name}:batch{len(tensors)}", data=np.array(values, old.data.dtype)))
        inputs[at] = len(tensors) - 1
    options = op.options | ({"new_shape": shape} if op.options.get("new_shape") else {})
    return replace(op, inputs=tuple(inputs), options=options)
