"""The layer-level judge: a TFLite graph computed in the chip's arithmetic, layer by layer; it never sees instructions.

Source: docs/numerics.md, "Layer references".
"""

from coral.evaluate.graph import evaluate, evaluate_all
from coral.evaluate.operands import EvaluateError
from coral.evaluate.operators import OPERATORS

__all__ = ["OPERATORS", "EvaluateError", "evaluate", "evaluate_all"]
