"""``coral bench fc|conv|mnist|cifar``: what our programs move and should take, beside published figures.

Nothing runs: programs are generated for arbitrary weights and timed by the model. Source: docs/BENCHMARKS.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from coral import timing
from coral.codegen import network as nw
from coral.codegen.fc import FcQuant, fully_connected
from coral.driver import CLOCK_HZ
from coral.package.program import Program

PRODUCTS_PER_CYCLE = 4096
"""256 per tile and cycle: what arithmetic alone would need. Source: docs/BENCHMARKS.md."""
QUANT = FcQuant(0, 0, 0, 1.0, 0.0, 255.0)
CLAMPS = (-128.0, 127.0)


@dataclass(frozen=True)
class Published:
    """What others say about the same thing, and where."""

    text: str
    source: str


@dataclass(frozen=True)
class Figures:
    """One program for ``batch`` images or rows. Bytes and cycles are per call; seconds and rates are predictions."""

    name: str
    batch: int
    products: int
    instruction_bytes: int
    bytes_to_chip: int
    bytes_from_chip: int
    parameter_bytes: int
    cycles: float
    bound_cycles: float
    seconds: dict[str, float]
    per_second: dict[str, float]
    published: tuple[Published, ...] = ()


class Sketch:
    """A network by its geometry alone."""

    def __init__(self, name: str, size: int, channels: int) -> None:
        self.name, self.products = name, 0
        self.tensors, self.stages = {"x": nw.Tensor("x", size, size, channels, 128)}, []
        self.last = self.tensors["x"]

    def conv(self, n: int, kernel: int = 1, stride: int = 1, *, same: bool = True) -> Sketch:
        """A convolution with ``n`` outputs."""
        return self._layer(nw.Conv, (n, kernel, kernel, self.last.c), n, kernel, stride, same)

    def depthwise(self, kernel: int = 3, stride: int = 1) -> Sketch:
        """A depthwise convolution."""
        return self._layer(nw.Depthwise, (kernel, kernel, self.last.c), self.last.c, kernel, stride, True)

    def maximum(self, kernel: int = 2) -> Sketch:
        """A maximum pool whose windows do not overlap."""
        x = self.last
        window = nw.Window((kernel, kernel), (kernel, kernel))
        return self._add(x.y // kernel, x.x // kernel, x.c, lambda name: nw.MaxPool((x.name,), name, CLAMPS, window))

    def average(self) -> Sketch:
        """The mean over the whole map."""
        x = self.last
        mult = float(np.float32(1 / (x.y * x.x)))
        window = nw.Window((x.y, x.x))
        return self._add(1, 1, x.c, lambda name: nw.AveragePool((x.name,), name, CLAMPS, mult, window))

    def dense(self, n: int) -> Sketch:
        """A layer that sees the whole map."""
        x, w = self.last, np.zeros((n, self.last.size), np.uint8)
        self.products += w.size
        return self._add(1, 1, n, lambda name: nw.Dense((x.name,), name, CLAMPS, w, None, 128, 2.0**-9))

    def network(self) -> nw.Network:
        """The graph."""
        return nw.Network(self.name, self.tensors, ("x",), tuple(self.stages), (self.last.name,))

    def _layer(self, kind: Any, shape: tuple[int, ...], n: int, kernel: int, stride: int, same: bool) -> Sketch:
        x, k, s = self.last, (kernel, kernel), (stride, stride)
        window = nw.same((x.y, x.x), k, s) if same else nw.Window(k, s)
        y, width = ((-(-size // stride) if same else (size - kernel) // stride + 1) for size in (x.y, x.x))
        w = np.zeros(shape, np.uint8)
        self.products += y * width * w.size
        return self._add(y, width, n, lambda name: kind((x.name,), name, CLAMPS, w, None, 128, 2.0**-9, window))

    def _add(self, y: int, x: int, c: int, stage: Callable[[str], nw.Stage]) -> Sketch:
        name = f"t{len(self.tensors)}"
        self.last = self.tensors[name] = nw.Tensor(name, y, x, c, 128)
        self.stages.append(stage(name))
        return self


def beautiful_mnist() -> Sketch:
    """tinygrad's beautiful_mnist, batch norms folded."""
    s = Sketch("beautiful_mnist", 28, 1)
    s.conv(32, 5, same=False).conv(32, 5, same=False).maximum()
    return s.conv(64, 3, same=False).conv(64, 3, same=False).maximum().dense(10)


def speedy_conv_net() -> Sketch:
    """tinygrad's beautiful_cifar; activations ride on the convolutions."""
    s = Sketch("SpeedyConvNet", 32, 3).conv(24, 2, same=False)
    for n in (64, 256, 512):
        s.conv(n, 3).maximum().conv(n, 3)
    return s.maximum(3).dense(10)


def mobilenet_v1() -> Sketch:
    """MobileNet v1 1.0 224 without softmax."""
    s = Sketch("MobileNet v1 1.0 224", 224, 3).conv(32, 3, 2)
    for n, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)):
        s.depthwise(3, stride).conv(n)
    return s.average().dense(1001)


def fc() -> list[Figures]:
    """Single rows, and matrix products."""
    source = "programs_fused.md 6: a stick, 250 MHz, USB included"
    times = {(64, 64): 0.149, (288, 288): 0.176, (768, 288): 0.195, (1024, 1024): 0.209, (2048, 1024): 0.229}
    found = []
    for (n, k), ms in times.items():
        layer = fully_connected(n, k, QUANT)
        published = Published(f"{ms} ms at 250 MHz", source)
        found.append(figures(f"{n} x {k}", 1, n * k, layer.execution, layer.blob_bytes, published))
    for m in (32, 256):
        layer = nw.matmul(m, 1024, 1024, QUANT)
        size = len(layer.blob(np.zeros((1024, 1024), np.uint8)))
        found.append(figures("1024 x 1024", m, m << 20, layer.execution, size))
    return found


def conv() -> list[Figures]:
    """The convolutions of which a stick's results are known, pointwise ones, and a network of such layers."""
    ran = Published("ran on a stick, time not published", "device_outputs.md")
    found = []
    for y, x, c in ((12, 176, 32), (12, 192, 32), (32, 32, 32), (64, 16, 64), (128, 8, 128)):
        s = Sketch(f"3x3 {y} x {x} x {c}", 1, c)
        s.last = s.tensors["x"] = nw.Tensor("x", y, x, c, 128)
        found.append(of_network(s.conv(c, 3), 1, ran))
    speed = Published("20-34 GOP/s: Google's programs for such layers on a stick", "programs_conv1x1.md 10")
    for n, k in ((288, 288), (288, 768)):
        s = Sketch(f"1x1 16 x 16 x {k} -> {n}", 16, k).conv(n)
        found.append(of_network(s, 1, speed))
    times = Published("3.9 ms at 250 MHz, 2.35 ms at 500 MHz: Google's program on a stick", "beyond.md 1, 14")
    return [*found, of_network(mobilenet_v1(), 1, times)]


def mnist() -> list[Figures]:
    """beautiful_mnist for several numbers of images."""
    images = Published(
        "22,994 images/s (earlier project), 24,178 (Google's program, same trick), at 500 MHz; 57 KB of instructions "
        "for one image (Google's)",
        "issue 5",
    )
    return [of_network(beautiful_mnist(), batch, *([images] if batch == 32 else [])) for batch in (1, 8, 32, 128, 256)]


def cifar() -> list[Figures]:
    """SpeedyConvNet for several numbers of images; nobody has published a time."""
    return [of_network(speedy_conv_net(), batch) for batch in (1, 8, 32)]


BENCHMARKS: dict[str, Callable[[], list[Figures]]] = {"fc": fc, "conv": conv, "mnist": mnist, "cifar": cifar}


def of_network(sketch: Sketch, batch: int, *published: Published) -> Figures:
    """Figures of a network's program."""
    p = nw.NetworkProgram(sketch.network(), batch=batch)
    products, parameters = batch * sketch.products, len(p.parameters)
    return figures(sketch.name, batch, products, p.execution, parameters, *published, passes=p.passes)


def figures(
    name: str, batch: int, products: int, program: Program, parameters: int, *published: Published, passes: int = 1
) -> Figures:
    """Figures of an execution program whose body runs ``passes`` times."""
    to_chip, from_chip = timing.call_bytes(program)
    cycles = passes * timing.chip_cycles(b.data for b in program.bitstreams)
    seconds = {c: timing.call_seconds(cycles, to_chip, from_chip, CLOCK_HZ[c]) for c in ("std", "max")}
    return Figures(
        name,
        batch,
        products,
        sum(len(b.data) for b in program.bitstreams),
        to_chip,
        from_chip,
        parameters,
        cycles,
        products / PRODUCTS_PER_CYCLE,
        seconds,
        {clock: batch / time for clock, time in seconds.items()},
        published,
    )


def bench(name: str, as_json: bool) -> None:
    """Generates the programs of a benchmark and prints their figures."""
    with Console(stderr=True).status("generating programs"):
        found = BENCHMARKS[name]()
    if as_json:
        print(json.dumps({"benchmark": name, "clock_hz": CLOCK_HZ, "programs": [asdict(f) for f in found]}, indent=1))
        return
    table = Table(title=f"{name}: predicted, no stick involved; bytes and cycles per call")
    for column in ("program", "batch", "ms 250 MHz", "ms 500 MHz", "per s 500 MHz", "instructions", "to chip"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for column in ("from chip", "parameters", "cycles", "arithmetic"):
        table.add_column(column, justify="right")
    notes: dict[str, None] = {}
    for f in found:
        times = [f"{f.seconds[clock] * 1e3:.3f}" for clock in ("std", "max")]
        numbers = (f.instruction_bytes, f.bytes_to_chip, f.bytes_from_chip, f.parameter_bytes, f.cycles, f.bound_cycles)
        rate = f"{f.per_second['max']:,.0f}"
        table.add_row(f.name, str(f.batch), *times, rate, *(f"{n:,.0f}" for n in numbers))
        notes |= {f"published, {f.name}: {p.text} ({p.source})": None for p in f.published}
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
