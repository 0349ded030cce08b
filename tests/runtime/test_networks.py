"""Networks and batches of rows on the simulated stick, against numpy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from codegen.network.harness import Maker
from codegen.network.random_networks import draw

from coral.codegen import ShapeError
from coral.codegen import network as nw
from coral.codegen.network.split import part
from coral.runtime import RuntimeFault
from coral.stick import Effect, Fault, Kind
from runtime.simulated import build_once, check, images, never, opened
from runtime.test_runtime import layer, reference


def small(seed: int, channels: int = 8) -> nw.Network:
    """A convolution, a pool and a dense layer."""
    m = Maker(seed, 8, 8, channels)
    m.layer(nw.Conv, 2 * channels, (3, 3))
    m.pool(nw.MaxPool, (2, 2), (2, 2))
    m.dense(10)
    return m.network()


@pytest.mark.parametrize("seed", range(6))
def test_random_networks(seed):
    maker, _, batch = draw(seed, 3e5)
    network, rng = maker.network(), np.random.default_rng(seed)
    with opened() as (runtime, _):
        for n, build in ((batch, build_once(network)), (1, never), (batch + 1, never)):
            x = images(rng, network, n)
            check(runtime.network(seed, build, x), network, x)
        assert runtime.stats.calls == 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_more_random_networks_share_a_chip(seed):
    """Three networks in turn, each with its own numbers of images."""
    rng = np.random.default_rng(seed)
    drawn = [draw(10 * seed + k, 2e5) for k in range(3)]
    with opened() as (runtime, _):
        for turn in range(3):
            for key, (maker, _, batch) in enumerate(drawn):
                network = maker.network()
                x = images(rng, network, (batch, 1, batch + 1)[turn])
                check(runtime.network(key, lambda network=network: network, x), network, x)


def test_several_inputs_and_outputs():
    tensors = {name: nw.Tensor(name, 6, 5, 12, zero) for name, zero in (("a", 3), ("b", 250), ("s", 9), ("p", 77))}
    clamps = {name: (float(-tensors[name].zero_point), float(255 - tensors[name].zero_point)) for name in "sp"}
    stages = (
        nw.Add(("a", "b"), "s", clamps["s"], (300, 200), -(300 * 3 + 200 * 250), float(np.float32(0.002))),
        nw.Multiply(("s", "b"), "p", clamps["p"], float(np.float32(0.01))),
    )
    network = nw.Network("two", tensors, ("a", "b"), stages, ("p", "s"))
    with opened() as (runtime, _):
        for n in (1, 20, 300):
            x = images(np.random.default_rng(n), network, n)
            check(runtime.network("two", lambda: network, x), network, x, step=9)
        with pytest.raises(RuntimeFault, match=r"inputs of \[1, 2\] images"):
            runtime.network("two", never, {"a": x["a"][:1], "b": x["b"][:2]})


def test_networks_in_several_programs(monkeypatch):
    """One that no program can hold runs in parts; tensors in between go over the host, with every number of images."""
    m = Maker(5, 9, 9, 8)
    first = m.layer(nw.Conv, 16, (3, 3))
    m.layer(nw.Depthwise, 16, (3, 3))
    second = m.layer(nw.Conv, 16)
    m.add(first, second)
    m.dense(20)
    network, whole = m.network(m.last, second), nw.NetworkProgram

    def refuses(network: nw.Network, **places) -> nw.NetworkProgram:
        if len(network.stages) > 3:
            raise ShapeError("too many stages")
        return whole(network, **places)

    monkeypatch.setattr(nw, "NetworkProgram", refuses)
    monkeypatch.setattr(nw, "split", lambda n, batch: [part(n, 0, 2, "begin"), part(n, 2, 5, "end")])
    with opened() as (runtime, _):
        for n, calls in ((3, 2), (1, 2), (300, 4), (140, 2)):
            before = runtime.stats.calls
            x = images(np.random.default_rng(n), network, n)
            check(runtime.network(0, lambda: network, x), network, x, step=13)
            assert runtime.stats.calls - before == calls
        assert len(runtime.regions()) == runtime.stats.uploads
        assert runtime.stats.programs == 4, "3 and 150 images, two parts each"


def test_every_batch_and_row_is_what_it_would_be_alone():
    network, rng = small(0), np.random.default_rng(0)
    with opened() as (runtime, _):
        x = images(rng, network, 600)
        every = runtime.network("k", build_once(network), x)
        check(every, network, x, step=50)
        name = network.outputs[0]
        for n in (1, 2, 3, 8, 31, 32, 33, 256, 257):
            got = runtime.network("k", never, {"x": x["x"][:n]})
            np.testing.assert_array_equal(got[name], every[name][:n])
        assert runtime.network("k", never, {"x": x["x"][:0]})[name].shape == (0, 1, 1, 10)


@pytest.mark.parametrize(("n", "k"), [(288, 767), (288, 768), (288, 769), (10, 64)])
def test_linear_batches(n, k):
    """One call per 256 rows, one upload for all numbers of rows."""
    spec, x, w, b = layer(np.random.default_rng(k), n, k, rows=300)
    expected = reference(spec, x, w, b)
    with opened() as (runtime, _):
        for m in (2, 3, 8, 31, 32, 33, 256, 300):
            np.testing.assert_array_equal(runtime.linear(spec, x[:m], w, b, key=0), expected[:m])
        assert (runtime.stats.calls, runtime.stats.uploads) == (9, 1)


def test_a_form_for_one_row_and_one_for_several():
    """The first form that a layer gets serves single rows as long as that hardly costs time."""
    with opened() as (runtime, _):
        for n, k, first, second, uploads in ((64, 64, 3, 1, 1), (64, 64, 1, 3, 2), (1024, 1024, 3, 1, 1)):
            spec, x, w, b = layer(np.random.default_rng(n), n, k, rows=3)
            before = runtime.stats.uploads
            for m in (first, second, first, second):
                np.testing.assert_array_equal(
                    runtime.linear(spec, x[:m], w, b, key=(n, first)), reference(spec, x[:m], w, b)
                )
            assert runtime.stats.uploads - before == uploads
        spec, x, w, b = layer(np.random.default_rng(5), 1024, 2048, rows=2)
        before = runtime.stats.uploads
        for m in (2, 1, 2, 1):
            np.testing.assert_array_equal(runtime.linear(spec, x[:m], w, b, key=5), reference(spec, x[:m], w, b))
        assert runtime.stats.uploads - before == 2


@pytest.mark.parametrize(("n", "k"), [(1100, 4096), (5000, 7), (1100, 3)])
def test_single_rows_that_no_program_for_one_row_takes(n, k):
    spec, x, w, b = layer(np.random.default_rng(n), n, k)
    with opened() as (runtime, _):
        for _ in range(2):
            np.testing.assert_array_equal(runtime.linear(spec, x, w, b, key=0), reference(spec, x, w, b))
        assert (runtime.stats.calls, runtime.stats.uploads) == (2, 1)


@pytest.mark.slow
def test_weights_that_the_chip_cannot_hold():
    """9 MiB of weights: most of them stay, the others come with every call; a small layer fits beside them."""
    spec, x, w, b = layer(np.random.default_rng(0), 3072, 3072, rows=2)
    other = layer(np.random.default_rng(1), 64, 64)
    with opened() as (runtime, stick):
        stats, c, loaders = runtime.stats, stick.counters, []
        for m in (2, 1, 2):
            np.testing.assert_array_equal(runtime.linear(spec, x[:m], w, b, key=0), reference(spec, x[:m], w, b))
            sent = c.instruction_bytes + c.input_bytes + c.parameter_bytes
            loaders.append(sent - stats.to_chip_bytes)
        assert 0 < loaders[0] == loaders[1] == loaders[2] < 16384
        assert (stats.calls, stats.uploads) == (3, 1)
        assert stats.upload_bytes + stats.streamed_bytes // 3 < 10 << 20
        assert stats.streamed_bytes // 3 < 3 << 20
        np.testing.assert_array_equal(runtime.linear(*other, key=1), reference(*other))
        np.testing.assert_array_equal(runtime.linear(spec, x, w, b, key=0), reference(spec, x, w, b))
        assert (stats.uploads, stats.evictions) == (2, 0)


@pytest.mark.parametrize(
    "fault", [Fault(Kind.INPUT, 2, Effect.STALL), Fault(Kind.INSTRUCTIONS, 5, Effect.DISCONNECT, seconds=0.1)]
)
def test_a_stick_that_fails_gets_everything_again(fault):
    """The call during which it fails is repeated; parameters of both networks are back."""
    first, second = small(1), small(2, 16)
    rng = np.random.default_rng(0)
    with opened(fault) as (runtime, stick):
        for _ in range(3):
            for key, network in enumerate((first, second)):
                x = images(rng, network, 2)
                check(runtime.network(key, lambda network=network: network, x), network, x)
        assert stick.counters.recoveries == 1
        assert (runtime.stats.calls, runtime.stats.uploads) == (6, 2)


def test_calls_of_several_threads():
    networks = [small(k, 4 * k + 4) for k in range(4)]
    inputs = [images(np.random.default_rng(k), network, 3) for k, network in enumerate(networks)]
    with opened() as (runtime, _), ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            calls = [pool.submit(runtime.network, k, lambda k=k: networks[k], x) for k, x in enumerate(inputs)]
            for call, network, x in zip(calls, networks, inputs, strict=True):
                check(call.result(), network, x)
        assert (runtime.stats.calls, runtime.stats.uploads) == (12, 4)


def test_odd_numbers_of_images_are_filled_up_until_they_come_often():
    network, rng = small(3), np.random.default_rng(3)
    with opened() as (runtime, _):
        for n, programs in ((16, 1), (9, 1), (9, 1), (9, 1), (9, 2), (1, 3), (300, 4)):
            x = images(rng, network, n)
            check(runtime.network("k", lambda: network, x), network, x, step=7)
            assert runtime.stats.programs == programs
        assert runtime.stats.rows == 16 + 4 * 9 + 1 + 300


def test_a_network_without_a_program_is_refused_and_disturbs_nothing():
    m = Maker(0, 4096, 16, 512)
    m.layer(nw.Conv, 4)
    impossible, possible = m.network(), small(4)
    x = images(np.random.default_rng(4), possible, 1)
    with opened() as (runtime, stick):
        runtime.network(0, lambda: possible, x)
        calls = stick.counters.calls
        with pytest.raises(ShapeError, match="narrow memory"):
            runtime.network(1, lambda: impossible, {"x": np.zeros((1, 4096, 16, 512), np.uint8)})
        assert stick.counters.calls == calls
        check(runtime.network(0, never, x), possible, x)
        assert runtime.stats.uploads == 1


def test_closed():
    with opened() as (runtime, _):
        pass
    with pytest.raises(RuntimeFault, match="closed"):
        runtime.network(0, never, {})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"x": np.zeros((1, 8, 8, 8), np.int8)},
            r"input 'x' is int8 \(1, 8, 8, 8\), needed is uint8 \(images, 8, 8, 8",
        ),
        ({"x": np.zeros((1, 8, 8, 4), np.uint8)}, r"input 'x' is uint8 \(1, 8, 8, 4\)"),
        ({"x": np.zeros((8, 8, 8), np.uint8)}, r"input 'x' is uint8 \(8, 8, 8\)"),
        ({"y": np.zeros((1, 8, 8, 8), np.uint8)}, r"inputs \['y'\] were given, it takes \['x'\]"),
        ({}, r"inputs \[\] were given"),
    ],
)
def test_wrong_inputs_send_nothing(inputs, message):
    with opened() as (runtime, stick):
        with pytest.raises(RuntimeFault, match=message):
            runtime.network(0, lambda: small(0), inputs)
        assert stick.counters.calls == 0


def test_weights_that_are_others_at_every_call():
    """One program for all of them; what is on the chip beside them stays; faults in between."""
    other = small(99)
    rng = np.random.default_rng(0)

    def pointwise(seed: int) -> nw.Network:
        r = np.random.default_rng(seed)
        weights = r.integers(0, 256, (70, 1, 1, 8), dtype=np.uint8)
        mult = r.uniform(1e-3, 3e-3, 70).astype(np.float32)
        layer = nw.Conv(("x",), "y", (-128.0, 127.0), weights, None, 128, mult)
        tensors = {"x": nw.Tensor("x", 2, 3, 8, 7), "y": nw.Tensor("y", 2, 3, 70, 128)}
        return nw.Network("fresh", tensors, ("x",), (layer,), ("y",))

    with opened(Fault(Kind.INPUT, 9, Effect.STALL)) as (runtime, _):
        for turn, n in enumerate((4, 4, 2, 9, 9, 9, 4)):
            network = pointwise(turn)
            x = images(rng, network, n)
            check(runtime.network("fresh", lambda network=network: network, x, fresh=True), network, x)
            x = images(rng, other, 2)
            check(runtime.network("other", lambda: other, x), other, x)
        assert runtime.stats.programs <= 4
        assert runtime.stats.evictions == 0


def test_networks_with_constants_fill_all_tiles_evenly():
    """The feed-forward parts of a decoder: 6 x 2,717 rows take few more than their share of every tile, though
    constants begin above the fullest."""
    rng = np.random.default_rng(0)

    def product(name: str, k: int, n: int) -> nw.Conv:
        weights, mult = rng.integers(0, 256, (n, 1, 1, k), np.uint8), float(np.float32(0.001))
        return nw.Conv((name[0],), name[1], (-128.0, 127.0), weights, None, 128, mult)

    def gated(part: int) -> nw.Network:
        tensors = {name: nw.Tensor(name, 1, 1, 288 if name in "xy" else 768, 128) for name in "xabmy"}
        mult = float(np.float32(1 / 128))
        stages = (product("xa", 288, 768), product("xb", 288, 768), nw.Multiply(("a", "b"), "m", (-128.0, 127.0), mult))
        return nw.Network(f"n{part}", tensors, ("x",), (*stages, product("my", 768, 288)), ("y",))

    with opened() as (runtime, _):
        for part in [*range(6), *range(6)]:
            runtime.network(part, lambda part=part: gated(part), {"x": np.full((16, 1, 1, 288), 128, np.uint8)})
        assert runtime.stats.evictions == 0
        assert runtime.stats.uploads == 6
        assert max(f.end for f in runtime.regions().values()) < 1200
