"""Whole networks as one pair of programs, in a regular form of our own. Source: docs/network.md."""

from coral.codegen.network.graph import (
    POINT,
    Add,
    AveragePool,
    Concatenate,
    Conv,
    Dense,
    Depthwise,
    Interleave,
    MaxPool,
    Multiply,
    Network,
    Pad,
    Requantise,
    Reshape,
    Slice,
    Stage,
    Tensor,
    TransposeConv,
    Window,
    same,
)
from coral.codegen.network.matmul import Matmul, matmul
from coral.codegen.network.program import MAX_BATCH, NetworkProgram
from coral.codegen.network.split import programs, split
from coral.codegen.network.tiling import Grid

__all__ = [
    "MAX_BATCH",
    "POINT",
    "Add",
    "AveragePool",
    "Concatenate",
    "Conv",
    "Dense",
    "Depthwise",
    "Grid",
    "Interleave",
    "Matmul",
    "MaxPool",
    "Multiply",
    "Network",
    "NetworkProgram",
    "Pad",
    "Requantise",
    "Reshape",
    "Slice",
    "Stage",
    "Tensor",
    "TransposeConv",
    "Window",
    "matmul",
    "programs",
    "same",
    "split",
]
