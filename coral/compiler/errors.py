"""Errors of the compiler."""

from coral import CoralError


class CompileError(CoralError):
    """A model that cannot be compiled; the message names operator or tensor, the value, and what to do."""


class NothingToCompileError(CompileError):
    """A model of which no operator has a program on the chip; the message has reasons."""


class Refused(CoralError):
    """An operator that stays on the host; the message is the reason."""
