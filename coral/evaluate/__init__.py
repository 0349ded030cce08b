"""The layer-level judge: a TFLite graph computed in the chip's arithmetic, layer by layer; it never sees instructions.

Source: docs/evaluate.md.
"""

from coral.evaluate import detection, elementwise, host_tensors, lstm, movement, products, reductions  # noqa: F401  (they fill OPERATORS)
from coral.evaluate.graph import evaluate
from coral.evaluate.operands import OPERATORS, EvaluateError, Generation

__all__ = ["OPERATORS", "EvaluateError", "Generation", "evaluate"]
