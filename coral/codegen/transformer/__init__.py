"""A whole llama-like decoder as one program per token. Source: docs/transformer.md."""

from coral.codegen.transformer.graph import Block, Dense, Geometry, Residual, Transformer
from coral.codegen.transformer.model import Cache, step

__all__ = ["Block", "Cache", "Dense", "Geometry", "Residual", "Transformer", "step"]
