"""Renderers of the host path: tinygrad's own, made to say no when their compiler is absent, each able to select.

tinygrad takes the first renderer whose constructor does not raise. Source: docs/backend.md, "Host code".
"""

from __future__ import annotations

import functools
import os
import subprocess
from typing import Any, cast

from tinygrad.device import Compiler
from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import Target
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.renderer.isa.x86 import X86Renderer
from tinygrad.renderer.llvmir import CPULLVMRenderer
from tinygrad.uop.ops import UOp

from coral.backend.chip_program import is_chip_source
from coral.backend.errors import HostCompilerMissing
from coral.backend.selection import Selection, select

# What tinygrad's IR relies on: opaque pointers (LLVM 14 refuses them) and intrinsics nobody declared (15 refuses them).
_LLVM_PROBE = """define float @f(ptr %p) {
  %v = load float, ptr %p
  %t = call float @llvm.trunc.float(float %v)
  ret float %t
}
"""


class ChipOrHostCompiler(Compiler):
    """Passes the source of a chip program on as it is (the runtime generates code per placement), compiles the rest."""

    def __init__(self, host: Compiler):
        super().__init__(None)
        self.host = host

    def compile(self, src: str) -> bytes:
        return src.encode() if is_chip_source(src) else self.host.compile(src)

    def compile_cached(self, src: str) -> bytes:
        return src.encode() if is_chip_source(src) else self.host.compile_cached(src)

    def disassemble(self, lib: bytes) -> None:
        if not is_chip_source(lib):
            self.host.disassemble(lib)


class _Selecting:
    """What all three renderers add. ``has_threads`` is off: CPUProgram would run the slices one after the other."""

    has_threads = False

    def __init__(self, target: Target):
        super().__init__(target)  # pyright: ignore[reportCallIssue]
        renderer = cast(Any, self)
        renderer.compiler = ChipOrHostCompiler(renderer.compiler)

    def select(self, ast: UOp) -> Selection:
        """The chip program that provably computes ``ast`` (scheduled kernel), or the reason why there is none."""
        return select(ast, cast(Any, self).target)


class CORALClangRenderer(_Selecting, ClangRenderer):
    """C source through clang (``CC`` names another one)."""

    def __init__(self, target: Target):
        clang = os.environ.get("CC", "clang")
        if not _compiles(clang, "void f(void) {}"):
            raise HostCompilerMissing(
                f"host kernels need clang, and {clang!r} is not one that runs here: install the package clang "
                "(Debian, Ubuntu: apt-get install clang), or name another clang with CC"
            )
        super().__init__(target)

    def supported_dtypes(self) -> set[DType]:
        """Without bfloat16 where this clang has no such type (clang 14 on x86): tinygrad then emulates it."""
        has_bfloat16 = _compiles(os.environ.get("CC", "clang"), "__bf16 *f(__bf16 *p) { return p + 1; }")
        return super().supported_dtypes() - (set() if has_bfloat16 else {dtypes.bfloat16})


class CORALLLVMRenderer(_Selecting, CPULLVMRenderer):
    """LLVM IR through a libLLVM new enough to declare intrinsics itself (``LLVM_PATH`` names the library)."""

    def __init__(self, target: Target):
        try:
            super().__init__(target)
            self.compiler.compile(_LLVM_PROBE)
        except Exception as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise HostCompilerMissing(
                f"host kernels through LLVM need a newer libLLVM (19 works, 15 does not), named by LLVM_PATH: {reason}"
            ) from error


class CORALX86Renderer(_Selecting, X86Renderer):
    """Machine code by tinygrad's own assembler: needs nothing, x86-64 only."""


@functools.cache
def _compiles(clang: str, source: str) -> bool:
    """Whether the compiler takes clang's arguments and this C source; gcc refuses ``--target``."""
    command = [
        clang,
        "-x",
        "c",
        "-c",
        "-ffreestanding",
        f"--target={os.uname().machine}-none-unknown-elf",
        "-",
        "-o",
        "-",
    ]
    try:
        return subprocess.run(command, input=source.encode(), capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
