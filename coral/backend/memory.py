"""Buffers of the device: anonymous host memory, readable in place by numpy and by machine code.

Source: docs/backend.md, "Memory".
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinygrad.device import BufferSpec, LRUAllocator
from tinygrad.helpers import mv_address, to_mv

if TYPE_CHECKING:
    from coral.backend.device import CORALDevice


@dataclass(frozen=True)
class HostBuffer:
    """A piece of host memory. ``memory`` (writable bytes) keeps the mapping alive, ``va_addr`` is its address."""

    memory: memoryview
    va_addr: int

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.memory.nbytes


class HostAllocator(LRUAllocator["CORALDevice"]):
    """tinygrad's allocator interface over anonymous mmap; a freed buffer's pages go when its last view goes."""

    def __init__(self, dev: CORALDevice):
        super().__init__(dev, supports_copy_from_disk=False, supports_transfer=False)

    def _alloc(self, size: int, options: BufferSpec) -> HostBuffer:
        if options.external_ptr is not None:
            return HostBuffer(to_mv(options.external_ptr, size), options.external_ptr)
        memory = memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return HostBuffer(memory, mv_address(memory))

    def _as_buffer(self, src: HostBuffer) -> memoryview:
        return src.memory

    def _copyin(self, dest: HostBuffer, src: memoryview) -> None:
        dest.memory[: src.nbytes] = src.cast("B")

    def _copyout(self, dest: memoryview, src: HostBuffer) -> None:
        dest.cast("B")[:] = src.memory[: dest.nbytes]

    def _offset(self, buf: HostBuffer, size: int, offset: int) -> HostBuffer:
        return HostBuffer(buf.memory[offset : offset + size], buf.va_addr + offset)
