"""Random networks for the sweeps: single layers of every kind, chains, residual blocks, tails."""

from __future__ import annotations

import numpy as np

from codegen.network.harness import Maker
from coral.codegen import network as nw

LARGEST = 600_000
"""Elements of a tensor: more do not fit sixteen narrow memories together with a result."""
GRIDS = [nw.Grid(r, c) for r in (1, 2, 4) for c in (1, 2, 4)]


def extent(rng: np.random.Generator, largest: int) -> int:
    """Log-uniform."""
    return int(np.exp(rng.uniform(0, np.log(largest + 1))))


def draw(seed: int, budget: float = 3e6) -> tuple[Maker, nw.Grid, int]:
    """A network of at most about ``budget`` products, the grid and the number of images for it."""
    rng = np.random.default_rng(seed)
    while True:
        grid = GRIDS[int(rng.integers(len(GRIDS)))]
        y, x = (extent(rng, 64) for _ in range(2))
        c = int(rng.choice([1, 2, 3, 4, extent(rng, 512)]))
        maker = Maker(
            int(rng.integers(2**31)), y, x, c, ties=rng.integers(3) == 0, per_channel=rng.integers(3) == 0, dilate=True
        )
        kind = KINDS[int(rng.integers(len(KINDS)))]
        kind(maker, rng)
        work = sum(cost(maker, stage) for stage in maker.stages)
        batch = int(rng.choice([1, 1, 2, 3, grid.slots, grid.slots + 1]))
        if work * batch <= budget and fits(maker):
            return maker, grid, batch


def fits(maker: Maker) -> bool:
    """Whether no tensor is too large for sixteen narrow memories, and no window for one."""
    tensors, windows = maker.tensors, [(maker.tensors[s.inputs[0]], s) for s in maker.stages]
    whole = [(x.y * x.x if isinstance(s, nw.Dense) else np.prod(s.window.extent)) * (x.c + 3) for x, s in windows]
    return max(t.y * t.x * (t.c + 3) for t in tensors.values()) <= LARGEST and max(whole) <= LARGEST // 5


def cost(maker: Maker, stage: nw.Stage) -> float:
    """Products of a stage."""
    y = maker.tensors[stage.output]
    if isinstance(stage, nw.Conv):
        return y.y * y.x * stage.weights.size
    if not isinstance(stage, nw.MaxPool | nw.AveragePool):
        return y.size
    return y.size * stage.window.kernel[0] * stage.window.kernel[1]


def _kernel(rng: np.random.Generator, maker: Maker, largest: int = 7) -> tuple[int, int]:
    t = maker.tensors[maker.last]
    k = int(rng.integers(1, largest + 1))
    if rng.integers(4) == 0:
        return min(k, t.y), min(int(rng.integers(1, largest + 1)), t.x)
    return min(k, t.y), min(k, t.x)


def _stride(rng: np.random.Generator) -> tuple[int, int]:
    s = int(rng.choice([1, 1, 2, 3]))
    return (s, s) if rng.integers(5) else (s, int(rng.choice([1, 2])))


def _pad(rng: np.random.Generator) -> str:
    return str(rng.choice(["same", "valid"]))


def conv(maker: Maker, rng: np.random.Generator) -> None:
    n = int(rng.choice([extent(rng, 200), 32, 64, 65]))
    maker.layer(nw.Conv, n, _kernel(rng, maker), _stride(rng), _pad(rng))


def pointwise(maker: Maker, rng: np.random.Generator) -> None:
    maker.layer(nw.Conv, extent(rng, 300))


def depthwise(maker: Maker, rng: np.random.Generator) -> None:
    maker.layer(nw.Depthwise, maker.tensors[maker.last].c, _kernel(rng, maker), _stride(rng), _pad(rng))
    if rng.integers(2):
        pointwise(maker, rng)


def pool(maker: Maker, rng: np.random.Generator) -> None:
    if rng.integers(2):
        maker.pool(nw.MaxPool, _kernel(rng, maker, 4), _stride(rng), _pad(rng))
    else:
        maker.pool(nw.AveragePool, _kernel(rng, maker), _stride(rng))


def elementwise(maker: Maker, rng: np.random.Generator) -> None:
    maker.requantise(offset=int(rng.integers(-9, 9)))


def residual(maker: Maker, rng: np.random.Generator) -> None:
    pointwise(maker, rng)
    a, n = maker.last, maker.tensors[maker.last].c
    if rng.integers(2):
        maker.layer(nw.Conv, n, _kernel(rng, maker, 3))
    else:
        maker.layer(nw.Depthwise, n, _kernel(rng, maker, 5))
        maker.layer(nw.Conv, n)
    (maker.add if rng.integers(3) else maker.multiply)(a, maker.last)


def branches(maker: Maker, rng: np.random.Generator) -> None:
    source = maker.last
    parts = []
    for _ in range(int(rng.integers(2, 4))):
        parts.append(maker.layer(nw.Conv, 4 * int(rng.integers(1, 9)), _kernel(rng, maker, 3), source=source))
    maker.concatenate(parts)


def split(maker: Maker, rng: np.random.Generator) -> None:
    """Some of the channels through a layer, added to the others."""
    if maker.tensors[maker.last].c < 8:
        maker.layer(nw.Conv, 8 * int(rng.integers(1, 5)), _kernel(rng, maker, 3))
    source = maker.last
    half = maker.tensors[source].c // 8 * 4
    a, b = maker.slice(0, half, source), maker.slice(half, half, source)
    maker.layer(nw.Conv, half, _kernel(rng, maker, 3), source=b)
    maker.add(a, maker.last)


def tail(maker: Maker, rng: np.random.Generator) -> None:
    if rng.integers(2):
        t = maker.tensors[maker.last]
        maker.pool(nw.AveragePool, (t.y, t.x), (1, 1))
    maker.dense(extent(rng, 300))


def chain(maker: Maker, rng: np.random.Generator) -> None:
    for _ in range(int(rng.integers(2, 6))):
        BODY[int(rng.integers(len(BODY)))](maker, rng)
    if rng.integers(3) == 0:
        tail(maker, rng)


def mixture(maker: Maker, rng: np.random.Generator) -> None:
    """Parts of any number of channels; some channels of them."""
    source = maker.last
    maker.concatenate([maker.layer(nw.Conv, extent(rng, 20), source=source) for _ in range(int(rng.integers(2, 4)))])
    if rng.integers(2):
        channels = int(rng.integers(1, maker.tensors[maker.last].c + 1))
        maker.slice(int(rng.integers(0, maker.tensors[maker.last].c - channels + 1)), channels, maker.last)
    if rng.integers(2):
        maker.layer(nw.Conv, extent(rng, 30), _kernel(rng, maker, 3))


def frame(maker: Maker, rng: np.random.Generator) -> None:
    """Zero points around the map, or a part of it."""
    t = maker.tensors[maker.last]
    if rng.integers(2):
        before, behind = ([int(n) for n in rng.integers(0, 3, 2)] for _ in range(2))
        name = maker.tensor(t.y + before[0] + behind[0], t.x + before[1] + behind[1], t.c, t.zero_point)
        maker.stages.append(nw.Pad((maker.last,), name, (0.0, 0.0), (before[0], before[1])))
    else:
        first = int(rng.integers(t.y)), int(rng.integers(t.x))
        step = int(rng.choice([1, 1, 2])), int(rng.choice([1, 1, 3]))
        size = [int(rng.integers(1, (n - f - 1) // s + 2)) for n, f, s in zip((t.y, t.x), first, step, strict=True)]
        name = maker.tensor(size[0], size[1], t.c, t.zero_point)
        maker.stages.append(nw.Slice((maker.last,), name, (0.0, 0.0), 0, first, step))
    maker.last = name
    if rng.integers(2):
        maker.layer(nw.Conv, extent(rng, 30), _kernel(rng, maker, 5), _stride(rng), "valid")


def transposed(maker: Maker, rng: np.random.Generator) -> None:
    maker.transpose_conv(extent(rng, 40), _kernel(rng, maker, 4), _stride(rng), _pad(rng))


def multiplied(maker: Maker, rng: np.random.Generator) -> None:
    """A depthwise layer with several outputs per channel."""
    n = maker.tensors[maker.last].c * int(rng.integers(2, 6))
    maker.layer(nw.Depthwise, min(n, 512), _kernel(rng, maker, 3)) if n <= 512 else pointwise(maker, rng)


def resized(maker: Maker, rng: np.random.Generator) -> None:
    """Twice the size, beside other readers or in a concatenation."""
    if rng.integers(2):
        maker.layer(nw.Conv, extent(rng, 40), _kernel(rng, maker, 3), _stride(rng))
    source = maker.last
    big = maker.resize(bool(rng.integers(2)))
    if rng.integers(2):
        other = maker.transpose_conv(extent(rng, 12), (2, 2), (2, 2), source=source, spare=0)
        maker.concatenate([other, maker.layer(nw.Conv, extent(rng, 12), source=big)])
    if rng.integers(2):
        maker.layer(nw.Conv, extent(rng, 20), _kernel(rng, maker, 3))


def normalised(maker: Maker, rng: np.random.Generator) -> None:
    maker.normalise(nw.Softmax if rng.integers(2) else nw.L2Normalise)


def joined(maker: Maker, rng: np.random.Generator) -> None:
    """One more input, which meets the map: as it is, or behind a layer."""
    source = maker.last
    t = maker.tensors[source]
    if rng.integers(2):
        maker.input(t.y, t.x, t.c)
    else:
        maker.input(t.y, t.x, extent(rng, 20))
        maker.layer(nw.Conv, t.c, _kernel(rng, maker, 3))
    (maker.add if rng.integers(3) else maker.multiply)(source, maker.last)


BODY = [
    conv,
    pointwise,
    depthwise,
    pool,
    elementwise,
    residual,
    branches,
    split,
    mixture,
    frame,
    transposed,
    multiplied,
    resized,
    normalised,
    joined,
]
KINDS = [*BODY, conv, tail, chain, chain, chain]
