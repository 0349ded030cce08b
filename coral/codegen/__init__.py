"""Program generators: from shapes, quantisation and places to bitstreams, parameters and transfer plans."""

from coral.codegen.errors import CodegenError, ShapeError

__all__ = ["CodegenError", "ShapeError"]
