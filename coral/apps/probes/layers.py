"""The stick as a whole, and whole layers against the layer reference. Source: docs/usb.md, docs/codegen.md."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from coral import isa, numerics
from coral.apps.probes import Finding, step
from coral.apps.probes.bench import REGISTERS, Bench
from coral.apps.probes.programs import changed
from coral.codegen.eltwise import Requantise, elementwise
from coral.codegen.fc import INPUT, FcQuant, FullyConnected, fully_connected, fully_connected_per_channel
from coral.codegen.machine import ROW_BYTES, ROW_UNITS
from coral.driver import CLOCKS, prepare
from coral.package.program import Program

SHAPES = [(1, 1), (8, 4), (16, 60), (64, 64), (65, 61), (100, 256), (256, 256), (300, 700), (1024, 128), (1500, 200)]
LONG_RUN_S, SIMULATED_CALLS = 30.0, 24


@dataclass(frozen=True)
class Layer:
    """A generated layer with an input and the answer of the reference."""

    fc: FullyConnected
    blob: bytes
    x: bytes
    expected: np.ndarray


def random_layer(seed: int, n: int, k: int, *, per_channel: bool = False, **place: Any) -> Layer:
    """Weights, bias, quantisation and input by ``seed``; every third multiplier is a power of two, which makes ties."""
    rng = np.random.default_rng(seed)
    in_zp, w_zp, out_zp = (int(v) for v in rng.integers(0, 256, 3))
    x, w = rng.integers(0, 256, k, np.uint8), rng.integers(0, 256, (n, k), np.uint8)
    bias = rng.integers(-1000, 1000, n).astype(np.int32)
    mult: Any = np.float32(2.0 ** -(10 + seed % 2) if seed % 3 == 0 else 0.006 / np.sqrt(k))
    quant = FcQuant(in_zp, w_zp, out_zp, 1.0 if per_channel else float(mult), *numerics.integer_clamps(out_zp))
    rows: dict[str, Any] = {}
    if per_channel:
        mult = (mult * rng.uniform(0.5, 2, n)).astype(np.float32)
        rows = {"mult": mult, "w_zp": rng.integers(0, 256, n).astype(np.int32)}
    fc = (fully_connected_per_channel if per_channel else fully_connected)(n, k, quant, bias=True, **place)
    expected = numerics.fully_connected(
        x[None], w, bias, in_zp, rows.get("w_zp", w_zp), mult, quant.clamp_min, quant.clamp_max, out_zp
    )
    return Layer(fc, fc.blob(w, bias, **rows), x.tobytes() + bytes([in_zp]) * (fc.input_bytes - k), expected)


def compare(raw: bytes, expected: np.ndarray) -> int:
    """Bytes that differ from the expected codes; padding is not looked at."""
    return int((np.frombuffer(raw, np.uint8)[: expected.size] != expected.reshape(-1)).sum())


def check(bench: Bench, layer: Layer) -> int:
    """Loads and runs a layer; the number of wrong bytes."""
    bench.stick.run(layer.fc.caching(layer.blob))
    return compare(bench.run(layer.fc.execution, {INPUT: layer.x}), layer.expected)


def run_elementwise(bench: Bench, x: np.ndarray, *steps: Requantise) -> tuple[np.ndarray, int]:
    """Codes of an elementwise program of ``x`` uint8 [n], and how many of them the reference has otherwise."""
    program, expected = elementwise(x.size, steps), x
    raw = bench.run(program, {INPUT: x.tobytes() + bytes(program.inputs[0].size_bytes - x.size)})
    for s in steps:
        acc = expected.astype(np.int32) - s.in_zp + s.offset
        expected = numerics.requantise(acc, s.mult, s.clamp_min, s.clamp_max, s.out_zp, nlu=s.spline)
    return np.frombuffer(raw, np.uint8)[: x.size], compare(raw, expected)


def all_right(wrong: dict[str, int], **details: Any) -> Finding:
    """Names with numbers of wrong bytes: all have to be 0."""
    bad = [f"{name}: {count} wrong bytes" for name, count in wrong.items() if count]
    return Finding("; ".join(bad) or f"all {len(wrong)} right", f"all {len(wrong)} right", details)


@step(12)
def registers(bench: Bench) -> Finding:
    """Reads the registers that describe the chip, and its errors."""
    details: dict[str, Any] = {"temperature_c": bench.stick.temperature_c(), "speed": bench.stick.speed}
    values = bench.registers()
    bad = [
        f"{name} {value:#x}"
        for name, value in values.items()
        if name.endswith(("error_status", "Error_Tile")) and value
    ]
    details |= {name: f"{value:#x}" for name, value in values.items()}
    return Finding(f"{len(values)} read, errors: {bad or 'none'}", f"{len(REGISTERS)} read, errors: none", details)


@step(20)
def descriptors(bench: Bench) -> Finding:
    """Descriptors in both modes; those of the boot ROM only when the stick was plugged in just before."""
    _ = bench.stick  # from here on its firmware runs
    return Finding("recorded", details={"boot": bench.boot_descriptors, "application": bench.descriptors()})


@step(21)
def canary(bench: Bench) -> Finding:
    """A layer of 64 x 64 with a known answer: header and payload of every DMA in one transfer."""
    return all_right({"canary": check(bench, random_layer(1, 64, 64))})


@step(22, 17)
def fully_connected_sweep(bench: Bench) -> Finding:
    """Layers of many shapes in both forms, compared byte by byte; measured and predicted microseconds per call."""
    wrong, microseconds = {}, {}
    for seed, (n, k) in enumerate(SHAPES * 2):
        layer = random_layer(seed, n, k, per_channel=seed >= len(SHAPES))
        name = f"{n} x {k}{' per channel' if seed >= len(SHAPES) else ''}"
        wrong[name] = check(bench, layer)
        microseconds[name] = bench.microseconds(layer.fc.execution, {INPUT: layer.x})
    return all_right(wrong, microseconds=microseconds)


@step(22)
def elementwise_programs(bench: Bench) -> Finding:
    """Copies, rescaling, RELU, LOGISTIC and chains of them, on 1 to 4096 elements."""
    relu, shift = Requantise(0.75, 0, 255, 100, 3), Requantise(1.5, -20, 200, 7, 20, offset=-9)
    spline, limit = numerics.LOGISTIC.scaled(256), numerics.LOGISTIC_CLAMP
    logistic = Requantise(0.0625, -limit, limit, 128, spline=spline)
    wrong = {}
    for name, steps in {"copy": (), "relu": (relu,), "logistic": (logistic,), "chain": (shift, relu, shift)}.items():
        for n in (1, 64, 100, 1024, 4096):
            wrong[f"{name} {n}"] = run_elementwise(bench, np.arange(n).astype(np.uint8), *steps)[1]
    return all_right(wrong)


@step(23)
def shifted_tiles(bench: Bench) -> Finding:
    """The same layer on every tile: computed away from where the input arrives, and moved as a whole."""
    places: list[dict[str, Any]] = [{"compute_shift": shift, "parameter_row": 8 * shift} for shift in range(1, 16)]
    places += [{"tile_shift": shift} for shift in (4, 8, 12)]
    return all_right({f"{place}": check(bench, random_layer(2, 64, 256, **place)) for place in places})


@step()
def long_run(bench: Bench) -> Finding:
    """Layers in turn, their parameters staying on the chip, for half a minute."""
    layers = [random_layer(seed, 64 * seed, 256, parameter_row=100 * seed) for seed in (3, 4, 5)]
    calls = [(prepare(layer.fc.execution), layer) for layer in layers]
    count, wrong, start = 0, 0, time.monotonic()
    while count < SIMULATED_CALLS or (bench.real and time.monotonic() - start < LONG_RUN_S):
        for prepared, layer in calls:
            bench.stick.ensure_cached(layer.fc.caching(layer.blob))
            wrong += compare(bench.run(prepared, {INPUT: layer.x}), layer.expected)
            count += 1
    return all_right({"long run": wrong}, calls=count, seconds=round(time.monotonic() - start, 3))


@step(17)
def clocks(bench: Bench) -> Finding:
    """A small and a large layer at every clock: what a call and a cycle really cost."""
    wrong, microseconds, before = {}, {}, bench.clock
    for bench.clock in CLOCKS:
        bench.close()
        for layer in (random_layer(7, 64, 64), random_layer(8, 1024, 1024)):
            name = f"{layer.fc.shape.n} at {bench.clock}"
            wrong[name] = check(bench, layer)
            microseconds[name] = bench.microseconds(layer.fc.execution, {INPUT: layer.x})
    bench.close()
    bench.clock = before
    return all_right(wrong, microseconds=microseconds)


@step(13, bold=True)
def small_groups(bench: Bench) -> Finding:
    """Parameter groups of 16 outputs below, at and above 256 KiB of a tile's parameter memory."""
    layer, answers = random_layer(4, 16, 8), []
    for kib in (255, 256, 257):
        rows = kib * 1024 // ROW_BYTES
        bench.stick.run(_moved(layer.fc.caching(layer.blob), rows))
        wrong = compare(bench.run(_moved(layer.fc.execution, rows), {INPUT: layer.x}), layer.expected)
        answers.append(f"{kib} KiB {'wrong' if wrong else 'right'}")
    return Finding(", ".join(answers))


def _moved(program: Program, rows: int) -> Program:
    """A program pair's parameters, generated at row 0, elsewhere: where the generator refuses to put them."""

    def change(i: isa.Instruction) -> dict[str, int]:
        names: tuple[str, ...] = ()
        if isinstance(i, isa.Op):
            return {"par_addr": i.par_addr + ROW_UNITS * rows}
        if isinstance(i, isa.W2n) and i.to_scaling:
            names = ("src_addr",)
        if isinstance(i, isa.RingRecv0) and i.hdr_en:
            names = ("dst_addr", "hdr_first_row", "hdr_last_row")
        return {name: getattr(i, name) + rows for name in names}

    return changed(program, change)
