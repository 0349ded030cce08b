"""The tinygrad device CORAL: host memory and host code, with a chip for the kernels proven to be its layers.

Source: docs/backend.md.
"""

from __future__ import annotations

import functools
import os
import platform
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from tinygrad.device import Compiled
from tinygrad.helpers import DEV
from tinygrad.renderer import Renderer

from coral import CoralError
from coral.backend import selection, switches
from coral.backend.chip_program import load_program
from coral.backend.errors import DeviceUnavailable, HostCompilerMissing
from coral.backend.memory import HostAllocator
from coral.backend.renderers import CORALClangRenderer, CORALLLVMRenderer, CORALX86Renderer

if TYPE_CHECKING:
    from coral.runtime import Runtime

_ARCHITECTURES = {"amd64": "x86_64", "aarch64": "arm64"}


class USBIface:
    """A stick on USB. It is opened here, so that a missing stick is reported before anything has run."""

    count = 1

    def __init__(self, dev: CORALDevice, index: int):
        self.index = index
        try:
            self.runtime = self.open()
        except CoralError as error:
            raise DeviceUnavailable(
                f"{dev.device}: {str(error).rstrip('.')}. Plug the stick in; `coral doctor` tells what is wrong; "
                "MOCKCORAL=1 uses the simulated stick."
            ) from error

    def open(self) -> Runtime:
        """The runtime of this process's stick number ``index``; errors of ``coral.devices.open_runtime``."""
        from coral.devices import open_runtime

        return open_runtime("usb", self.index)

    def device_fini(self) -> None:
        """Closes the stick at the end of the process."""
        self.runtime.close()


class SIMIface:
    """The simulated stick. Built when the first chip program runs; nothing of the simulator is imported before."""

    count = 1

    def __init__(self, dev: CORALDevice, index: int):
        self.index = index

    @functools.cached_property
    def runtime(self) -> Runtime:
        """The runtime, opened on first use."""
        return self.open()

    def open(self) -> Runtime:
        """The runtime of this process's simulated stick number ``index``."""
        from coral.devices import open_runtime

        return open_runtime("sim", self.index)

    def device_fini(self) -> None:
        """Closes the stick at the end of the process, if anything used it."""
        if "runtime" in self.__dict__:
            self.runtime.close()


class CORALDevice(Compiled):
    """``DEV=CORAL``, ``CORAL:1`` (second stick), ``DEV=SIM+CORAL``, ``MOCKCORAL=1 DEV=CORAL``, ``DEV=CORAL:X86``.

    :raises DeviceUnavailable: the stick cannot be opened
    :raises HostCompilerMissing: no renderer for host kernels works on this machine
    """

    def __init__(self, device: str = ""):
        machine = platform.machine().lower()
        renderers: list[type[Renderer]] = [CORALClangRenderer, CORALLLVMRenderer, CORALX86Renderer]
        super().__init__(
            device,
            HostAllocator(self),
            renderers,
            load_program,  # pyright: ignore[reportArgumentType]
            arch=_ARCHITECTURES.get(machine, machine) + ",native",
        )
        if DEV.target("CORAL").interface:
            self.ifaces = [USBIface, SIMIface]
        else:
            # tinygrad would try one after the other: a missing stick must not become a simulated one.
            self.ifaces = [SIMIface if os.environ.get("MOCKCORAL", "0") not in ("", "0") else USBIface]
        _ = self.renderer  # a missing compiler is reported before a stick is touched
        self.iface: USBIface | SIMIface = self._select_iface(device)
        if not selection.self_test(device):
            warnings.warn(
                f"{device}: this tinygrad lowers the quantised linear layer in a way coral does not recognise, so "
                "every kernel will run on the host; tinycoral is made for tinygrad 0.14.0",
                stacklevel=2,
            )

    @property
    def chip(self) -> Runtime:
        """The runtime that keeps weights on the chip and runs layers; building it opens the simulated stick. One that
        was closed (``coral.devices.close_all``) is opened again."""
        if self.iface.runtime.closed:
            self.iface.runtime = self.iface.open()
        return self.iface.runtime

    def _select_renderer(self) -> Renderer:
        try:
            renderer = super()._select_renderer()
        except ExceptionGroup as group:
            reasons = "; ".join(str(error) for error in group.exceptions)
            raise HostCompilerMissing(
                f"{self.device}: no compiler for host kernels. Install the package clang (Debian, Ubuntu: apt-get "
                f"install clang). Tried: {reasons}"
            ) from group
        if switches.enabled():
            return renderer
        target = replace(renderer.target, indices=switches.HOST_ONLY)
        key = (type(renderer), target)
        if key not in self.cached_renderer:
            self.cached_renderer[key] = type(renderer)(target)
        return self.cached_renderer[key]
