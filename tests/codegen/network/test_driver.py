"""Networks through the whole driver on a simulated stick: passes, several outputs, residency beside other programs."""

from __future__ import annotations

import numpy as np

from codegen.network.harness import Maker
from codegen.network.reference import run_network
from coral.codegen import network as nw
from coral.devices import shared_stick


def test_passes_and_outputs_over_usb():
    stick = shared_stick("sim", 13)
    m = Maker(21, 40, 36, 4)
    a = m.layer(nw.Conv, 64, (3, 3))
    b = m.layer(nw.Conv, 12, (3, 3), (2, 2))
    p = nw.NetworkProgram(m.network(a, b), batch=20, grid=nw.Grid(1, 1))
    assert p.passes == 2
    images = m.images(20)
    stick.ensure_cached(p.caching())
    stick.run(p.execution, {"x": p.pack(images)})
    got = stick.run(p.execution, {"x": p.pack(images)})
    for name in (a, b):
        result = p.unpack(name, got[name])
        for i in (0, 15, 16, 19):
            np.testing.assert_array_equal(result[i], run_network(p.network, images[i])[name])
