"""A whole llama-like decoder as one program per token. Source: docs/transformer.md."""

from coral.codegen.transformer.graph import Block, Dense, Gate, Geometry, Residual, Transformer
from coral.codegen.transformer.model import Cache, step
from coral.codegen.transformer.parts import fitting, parts
from coral.codegen.transformer.plan import Form
from coral.codegen.transformer.program import STAGES, Token, TransformerProgram

__all__ = [
    "STAGES",
    "Block",
    "Cache",
    "Dense",
    "Form",
    "Gate",
    "Geometry",
    "Residual",
    "Token",
    "Transformer",
    "TransformerProgram",
    "fitting",
    "parts",
    "step",
]
