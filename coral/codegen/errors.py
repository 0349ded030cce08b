"""Errors of the code generators."""

from coral import CoralError


class CodegenError(CoralError):
    """A program that cannot be generated."""


class ShapeError(CodegenError):
    """A shape, position or size outside what a generator covers; the message has the limit and the number."""
