"""Files: TFLite container and DarwiNN package, output layouts. The types of a program are re-exported here."""

from coral.package.program import (
    Base,
    Bitstream,
    DmaHint,
    DType,
    FenceHint,
    Hint,
    InstructionHint,
    InterruptHint,
    Kind,
    Layer,
    Layout,
    PackageError,
    Program,
    Relocation,
    Slice,
)

__all__ = [
    "Base",
    "Bitstream",
    "DType",
    "DmaHint",
    "FenceHint",
    "Hint",
    "InstructionHint",
    "InterruptHint",
    "Kind",
    "Layer",
    "Layout",
    "PackageError",
    "Program",
    "Relocation",
    "Slice",
]
