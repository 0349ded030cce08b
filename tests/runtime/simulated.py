"""A runtime on a simulated stick of its own, and what networks should answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from codegen.network.reference import run_network

from coral import driver
from coral.codegen import network as nw
from coral.runtime import Runtime
from coral.runtime.canary import canary
from coral.stick import FaultPlan, SoftwareStick, StickBus, stand_in_firmware


@contextmanager
def opened(*faults, **options) -> Iterator[tuple[Runtime, driver.Stick]]:
    """A runtime and its stick; options of the runtime."""
    bus = StickBus([SoftwareStick(fault_plan=FaultPlan(*faults))])
    stick = driver.open_stick(bus, firmware=stand_in_firmware(), check_firmware_hash=False, canary=canary())
    with Runtime(stick, **options) as runtime:
        yield runtime, stick


def images(rng: np.random.Generator, network: nw.Network, batch: int) -> dict[str, np.ndarray]:
    """Random inputs of a network."""
    shapes = {name: network.tensors[name] for name in network.inputs}
    return {name: rng.integers(0, 256, (batch, t.y, t.x, t.c)).astype(np.uint8) for name, t in shapes.items()}


def check(got: dict[str, np.ndarray], network: nw.Network, inputs: dict[str, np.ndarray], step: int = 1) -> None:
    """Every ``step``-th image of every output is what the reference computes."""
    assert got.keys() == set(network.outputs)
    batch = len(next(iter(inputs.values())))
    for name in network.outputs:
        assert len(got[name]) == batch
    for i in range(0, batch, step):
        expected = run_network(network, {name: x[i] for name, x in inputs.items()})
        for name in network.outputs:
            np.testing.assert_array_equal(got[name][i], expected[name], err_msg=f"{name}, image {i}")


def never() -> nw.Network:
    """For networks that the runtime must know."""
    raise AssertionError("a network that is known was built again")


def build_once(network: nw.Network) -> Callable[[], nw.Network]:
    """A function that may be called once."""
    waiting = [network]
    return lambda: waiting.pop()
