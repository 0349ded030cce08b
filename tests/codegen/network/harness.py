"""Random networks and their runs on the simulated chip."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from codegen.network.reference import run_network
from coral import numerics
from coral.chip import Chip, ChipState
from coral.codegen import network as nw
from coral.package.program import Base, DmaHint, Program

Data = bytes | dict[str, bytes]


def run(chip: Chip, program: Program, data: Data = b"") -> list[bytes]:
    """One run as a host would do it; the outputs' transfers in their order."""
    return transfers(chip, program, data)[0]


def transfers(chip: Chip, program: Program, data: Data) -> tuple[list[bytes], list[bytes]]:
    """The outputs' transfers, and for each of their bytes 1 if the program wrote it."""
    chip.feed(0, program.bitstreams[0].data)
    by_name = data if isinstance(data, dict) else {layer.name: data for layer in program.inputs}
    for k in range(program.inputs[0].executions if program.inputs else 0):
        for x in program.inputs:
            chip.feed(1, by_name[x.name][k * x.size_bytes : (k + 1) * x.size_bytes])
    for hint in program.hints:
        if isinstance(hint, DmaHint) and hint.base is Base.PARAMETER:
            chip.feed(2, program.parameters[hint.offset : hint.offset + hint.size])
    assert chip.run() is ChipState.FINISHED
    assert chip.interrupts.popleft() == 0
    results, written = list(chip.outputs), [np.asarray(mask, np.uint8).tobytes() for mask in chip.written]
    chip.outputs.clear()
    chip.written.clear()
    return results, written


def outputs(p: nw.NetworkProgram, transfers: list[bytes]) -> dict[str, np.ndarray]:
    """Every output [batch, y, x, c] of a call."""
    names = p.network.outputs
    return {name: p.unpack(name, b"".join(transfers[k :: len(names)])) for k, name in enumerate(names)}


def check(
    p: nw.NetworkProgram,
    images: np.ndarray | dict[str, np.ndarray],
    seed: int | None = None,
    chip: Chip | None = None,
) -> Chip:
    """Loads and runs a program on a chip; every byte of every output as the reference has it."""
    images = images if isinstance(images, dict) else {p.network.inputs[0]: images}
    chip = chip or Chip(seed=seed)
    p.execution.check()
    run(chip, p.caching())
    raw, written = transfers(chip, p.execution, p.pack(images))
    got, complete = outputs(p, raw), outputs(p, written)
    for name in p.network.outputs:
        assert complete[name].all(), f"{name}: results that nothing wrote"
    tensors = [p.network.tensors[name] for name in p.network.inputs]
    for i in range(len(images[tensors[0].name])):
        expected = run_network(p.network, {t.name: images[t.name][i].reshape(t.y, t.x, t.c) for t in tensors})
        for name in p.network.outputs:
            np.testing.assert_array_equal(got[name][i], expected[name], err_msg=f"{name}, image {i}")
    return chip


def check_chain(parts: list[nw.NetworkProgram], whole: nw.Network, images: dict[str, np.ndarray], seed: int) -> None:
    """Programs that follow each other, on one chip; every output of the whole as the reference has it."""
    chip, values = Chip(seed=seed), dict(images)
    for p in parts:
        run(chip, p.caching())
        values |= outputs(p, run(chip, p.execution, p.pack({name: values[name] for name in p.network.inputs})))
    tensors = [whole.tensors[name] for name in whole.inputs]
    for i in range(len(images[whole.inputs[0]])):
        expected = run_network(whole, {t.name: images[t.name][i].reshape(t.y, t.x, t.c) for t in tensors})
        for name in whole.outputs:
            np.testing.assert_array_equal(values[name][i], expected[name], err_msg=f"{name}, image {i}")


class Maker:
    """Grows a network with random weights, stage by stage.

    ``ties``: multipliers of a power of two; ``dilate``: some windows with gaps between their taps.
    """

    def __init__(
        self, seed: int, y: int, x: int, c: int, *, ties: bool = False, per_channel: bool = False, dilate: bool = False
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.ties, self.per_channel, self.dilate = ties, per_channel, dilate
        first = nw.Tensor("x", y, x, c, self.zero())
        self.tensors, self.stages, self.last, self.inputs = {"x": first}, [], "x", ["x"]

    def zero(self) -> int:
        return int(self.rng.choice([0, 128, 255, int(self.rng.integers(0, 256))]))

    def input(self, y: int, x: int, c: int) -> str:
        """One more input."""
        name = self.tensor(y, x, c)
        self.inputs.append(name)
        self.last = name
        return name

    def tensor(self, y: int, x: int, c: int, zero: int | None = None) -> str:
        name = f"t{len(self.tensors)}"
        self.tensors[name] = nw.Tensor(name, y, x, c, self.zero() if zero is None else zero)
        return name

    def clamps(self, name: str) -> tuple[float, float]:
        zero = self.tensors[name].zero_point
        if self.rng.integers(3) == 0:
            return float(np.float32(0.0)), float(255 - zero)
        return float(-zero), float(255 - zero)

    def size(self, window: nw.Window | str, kernel: tuple[int, int], stride: tuple[int, int], source: str) -> tuple:
        t = self.tensors[source]
        dilation = (1, 1)
        if self.dilate and self.rng.integers(6) == 0:
            dilation = (int(self.rng.integers(1, 4)), int(self.rng.integers(1, 4)))
        if window == "same":
            return nw.same((t.y, t.x), kernel, stride, dilation), -(-t.y // stride[0]), -(-t.x // stride[1])
        extent = nw.Window(kernel, dilation=dilation).extent
        if extent[0] > t.y or extent[1] > t.x:
            dilation, extent = (1, 1), kernel
        y, x = ((n - k) // s + 1 for n, k, s in zip((t.y, t.x), extent, stride, strict=True))
        return nw.Window(kernel, stride, dilation=dilation), y, x

    def mult(self, n: int, taps: int):
        if self.ties:
            return 0.5 ** int(self.rng.integers(8, 12))
        values = (self.rng.uniform(0.5, 1.5, n) / (80 * 80 * np.sqrt(taps))).astype(np.float32)
        return values if self.per_channel else float(values[0])

    def layer(self, cls, n: int, kernel=(1, 1), stride=(1, 1), pad="same", source: str | None = None) -> str:
        """A convolution (``n`` outputs) or depthwise layer."""
        source = source or self.last
        c = self.tensors[source].c
        window, y, x = self.size(pad, kernel, stride, source)
        name = self.tensor(y, x, n)
        shape = (*kernel, n) if cls is nw.Depthwise else (n, *kernel, c)
        taps = kernel[0] * kernel[1] * (1 if cls is nw.Depthwise else c)
        self._weights(cls, source, name, shape, taps, window)
        return name

    def transpose_conv(
        self, n: int, kernel, stride, pad="same", source: str | None = None, spare: int | None = None
    ) -> str:
        """``spare``: positions less (same) or more (valid) than the windows have room for; None: any."""
        source = source or self.last
        spare = int(self.rng.integers(min(stride))) if spare is None else spare
        t = self.tensors[source]
        if pad == "same":
            y, x = t.y * stride[0] - spare, t.x * stride[1] - spare
            before = nw.same((y, x), kernel, stride).pad
        else:
            y, x = ((m - 1) * s + k + spare for m, s, k in zip((t.y, t.x), stride, kernel, strict=True))
            before = (0, 0)
        name = self.tensor(y, x, n)
        window = nw.Window(kernel, stride, before)
        self._weights(nw.TransposeConv, source, name, (n, *kernel, t.c), t.c * kernel[0] * kernel[1], window)
        return name

    def reshape(self, y: int, x: int, c: int) -> str:
        name = self.tensor(y, x, c, self.tensors[self.last].zero_point)
        self.stages.append(nw.Reshape((self.last,), name, (0.0, 0.0)))
        self.last = name
        return name

    def resize(self, nearest: bool) -> str:
        t = self.tensors[self.last]
        name = self.tensor(2 * t.y, 2 * t.x, t.c, t.zero_point)
        self.stages.append(nw.Resize((t.name,), name, (0.0, 0.0), nearest))
        self.last = name
        return name

    def normalise(self, cls, scale: float = 0.06) -> str:
        """SOFTMAX or L2 normalisation of the last tensor, with this scale."""
        t = self.tensors[self.last]
        if not any(isinstance(stage, nw.Softmax | nw.L2Normalise) and stage.output == t.name for stage in self.stages):
            t = self.tensors[self.last] = replace(t, scale=scale)  # else it has the scale that its stage was made for
        soft = cls is nw.Softmax
        zero = int(self.rng.choice([0, 0, 3])) if soft else 128
        name = self.tensor(t.y, t.x, t.c, zero)
        y = self.tensors[name] = replace(self.tensors[name], scale=1 / 256 if soft else 1 / 128)
        x, out = t.scale, y.scale
        mults = numerics.softmax_multipliers(x, 1.0, out) if soft else numerics.l2_multipliers(x, out)
        self.stages.append(cls((t.name,), name, numerics.clamps(out, zero), mults))
        self.last = name
        return name

    def dense(self, n: int) -> str:
        t = self.tensors[self.last]
        name = self.tensor(1, 1, n)
        self._weights(nw.Dense, self.last, name, (n, t.size), t.size, nw.POINT)
        return name

    def _weights(self, cls, source: str, name: str, shape: tuple, taps: int, window: nw.Window) -> None:
        w_zp = self.zero()
        weights = np.clip(w_zp + self.rng.integers(-80, 81, shape), 0, 255).astype(np.uint8)
        n = self.tensors[name].c
        bias = self.rng.integers(-2000, 2000, n).astype(np.int32) if self.rng.integers(4) else None
        mult = self.mult(n, taps)
        self.stages.append(cls((source,), name, self.clamps(name), weights, bias, w_zp, mult, window))
        self.last = name

    def pool(self, cls, kernel, stride, pad="valid") -> str:
        t = self.tensors[self.last]
        window, y, x = self.size(pad, kernel, stride, self.last)
        name = self.tensor(y, x, t.c, t.zero_point if cls is nw.MaxPool else None)
        extra = {"mult": float(np.float32(1 / (kernel[0] * kernel[1])))} if cls is nw.AveragePool else {}
        self.stages.append(cls((self.last,), name, self.clamps(name), at=window, **extra))
        self.last = name
        return name

    def multiply(self, a: str, b: str) -> str:
        t = self.tensors[a]
        name = self.tensor(t.y, t.x, t.c)
        self.stages.append(nw.Multiply((a, b), name, self.clamps(name), float(np.float32(0.01))))
        self.last = name
        return name

    def add(self, a: str, b: str) -> str:
        t = self.tensors[a]
        name = self.tensor(t.y, t.x, t.c)
        w = (int(self.rng.integers(1, 32768)), int(self.rng.integers(1, 32768)))
        if self.rng.integers(3) == 0:
            w = (w[0], -w[1])
        offset = -(w[0] * t.zero_point + w[1] * self.tensors[b].zero_point)
        self.stages.append(
            nw.Add((a, b), name, self.clamps(name), w, offset, float(np.float32(0.7 / max(map(abs, w)))))
        )
        self.last = name
        return name

    def concatenate(self, parts: list[str]) -> str:
        first = self.tensors[parts[0]]
        for part in parts[1:]:
            if self.tensors[part].zero_point == first.zero_point:
                continue
            self.tensors[part] = replace(self.tensors[part], zero_point=first.zero_point)
            index = next(i for i, s in enumerate(self.stages) if s.output == part)
            self.stages[index] = replace(self.stages[index], clamps=self.clamps(part))
        name = self.tensor(first.y, first.x, sum(self.tensors[p].c for p in parts), first.zero_point)
        self.stages.append(nw.Concatenate(tuple(parts), name, (0.0, 0.0)))
        self.last = name
        return name

    def slice(self, begin: int, channels: int, source: str) -> str:
        t = self.tensors[source]
        name = self.tensor(t.y, t.x, channels, t.zero_point)
        self.stages.append(nw.Slice((source,), name, (0.0, 0.0), begin))
        self.last = name
        return name

    def requantise(self, **fields) -> str:
        t = self.tensors[self.last]
        name = self.tensor(t.y, t.x, t.c)
        fields = {"mult": float(np.float32(self.rng.uniform(0.3, 1.5))), **fields}
        self.stages.append(nw.Requantise((self.last,), name, self.clamps(name), **fields))
        self.last = name
        return name

    def network(self, *outputs: str) -> nw.Network:
        return nw.Network("random", self.tensors, tuple(self.inputs), tuple(self.stages), outputs or (self.last,))

    def images(self, n: int) -> np.ndarray:
        return self.all_images(n)["x"]

    def all_images(self, n: int) -> dict[str, np.ndarray]:
        """Images for every input."""
        tensors = [self.tensors[name] for name in self.inputs]
        return {t.name: self.rng.integers(0, 256, (n, t.y, t.x, t.c)).astype(np.uint8) for t in tensors}
