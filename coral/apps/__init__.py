"""Implementations of the commands of ``coral``, one module each, imported when the command runs."""
