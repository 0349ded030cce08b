"""A CORAL device on the simulated stick's interface, its chip replaced by the layer-level reference where asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import pytest
from codegen.network.reference import run_network

import coral._hook  # noqa: F401  (an uninstalled checkout)
from coral import numerics
from coral.codegen import network as nw


class ReferenceRuntime:
    """``Runtime.linear`` by coral.numerics and ``Runtime.network`` stage by stage in NumPy: neither knows anything of
    programs. Remembers what it was asked.
    """

    closed = False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[int, ...], Any]] = []
        self.networks: dict[Hashable, nw.Network] = {}
        self.network_calls: list[tuple[Hashable, int]] = []

    def linear(self, spec: Any, x: np.ndarray, w: np.ndarray, b: np.ndarray | None, key: Any = None) -> np.ndarray:
        self.calls.append((spec, x.shape, key))
        assert x.dtype == w.dtype == np.uint8
        assert b is None or b.dtype == np.int32
        clamps = numerics.integer_clamps(spec.out_zp, spec.lo, spec.hi)
        return numerics.fully_connected(x, w, b, spec.in_zp, spec.w_zp, spec.mult, *clamps, spec.out_zp)

    def network(
        self, key: Hashable, build: Callable[[], nw.Network], inputs: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        if key not in self.networks:
            self.networks[key] = build()
        network = self.networks[key]
        images = {len(codes) for codes in inputs.values()}
        assert set(inputs) == set(network.inputs)
        assert len(images) == 1
        self.network_calls.append((key, images.pop()))
        for name, codes in inputs.items():
            t = network.tensors[name]
            assert codes.dtype == np.uint8
            assert codes.shape[1:] == (t.y, t.x, t.c)
        results = [
            run_network(network, dict(zip(inputs, image, strict=True))) for image in zip(*inputs.values(), strict=True)
        ]
        return {name: np.stack([result[name] for result in results]) for name in network.outputs}

    def close(self) -> None:
        pass


@pytest.fixture(scope="session")
def coral_device() -> Any:
    """The open device "CORAL", behind the simulated stick's interface."""
    from tinygrad import Device

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOCKCORAL", "1")
        return Device["CORAL"]


@pytest.fixture
def chip(coral_device: Any) -> Iterator[ReferenceRuntime]:
    """The device's chip is the reference and every counter is zero, for one test."""
    from coral.backend import reset_stats

    runtime, interface = ReferenceRuntime(), coral_device.iface
    before = interface.__dict__.get("runtime")
    interface.runtime = runtime
    reset_stats()
    yield runtime
    del interface.runtime
    if before is not None:
        interface.runtime = before


@pytest.fixture(scope="session")
def cpu() -> str:
    """The device to compare with; stock tinygrad cannot open it without clang."""
    if shutil.which(os.environ.get("CC", "clang")) is None:
        message = "clang is absent: comparisons of DEV=CORAL with DEV=CPU are SKIPPED (apt-get install clang)"
        warnings.warn(message, stacklevel=2)
        pytest.skip(message)
    return "CPU"


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program text in a fresh interpreter; keyword arguments are environment variables, None removes one."""

    def run(text: str, *options: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        variables = {
            name: value for name, value in os.environ.items() if name not in ("DEV", "MOCKCORAL", "CORAL_DEBUG")
        }
        for name, value in environment.items():
            variables.pop(name, None)
            if value is not None:
                variables[name] = value
        command = [sys.executable, *options, "-c", text]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)

    return run
