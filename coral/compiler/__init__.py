"""The compiler: quantised TFLite and ONNX models to programs and host operators. Source: docs/compiler.md."""

from coral.compiler.api import Compiled, compile_models, load_model
from coral.compiler.errors import CompileError, NothingToCompileError

__all__ = ["CompileError", "Compiled", "NothingToCompileError", "compile_models", "load_model"]
