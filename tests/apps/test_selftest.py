"""``coral selftest``: every step on the simulated stick, steps on sticks that are different, reports, hangs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from apps.conftest import Command, OnBus
from coral import devices, isa, numerics
from coral.apps import selftest
from coral.apps.probes import Finding, Step, all_steps, convolutions, forms, layers, unseen
from coral.apps.probes.bench import REGISTERS, Bench
from coral.chip import Chip, nodes, scalar, scalar_code
from coral.evaluate import evaluate
from coral.isa import Walk
from coral.stick import Effect, Fault, FaultPlan, Kind, SoftwareStick, Strictness

STEPS = {step.name: step for step in all_steps()}
ASSUMPTIONS = Path(__file__).resolve().parents[2] / "docs" / "ASSUMPTIONS.md"


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """The simulated stick, for all steps in turn; whatever tests before left open is closed."""
    devices.close_all()
    bench = Bench("sim")
    yield bench
    bench.close()


@pytest.mark.parametrize("name", STEPS)
def test_the_simulated_stick_gives_the_assumed_answer(name: str, bench: Bench) -> None:
    outcome = selftest.run_step(STEPS[name], bench)
    assert outcome["status"] in ("ok", "observed"), outcome
    if outcome["status"] == "observed" and outcome.get("assumed"):
        assert "refused by the simulated chip" in outcome["answer"]


def test_every_row_of_the_assumptions_has_its_steps_or_a_reason() -> None:
    lines = [line.split("|") for line in ASSUMPTIONS.read_text().splitlines() if line[:2] == "| " and line[2].isdigit()]
    written = {int(cells[1]): cells[-2].strip() for cells in lines}
    assert sorted(written) == list(range(1, len(written) + 1))
    for row, text in written.items():
        names = sorted(step.name for step in STEPS.values() if row in step.rows and not step.name.startswith("field-"))
        for name in names:
            assert f"`{name}`" in text, (row, name)
        assert names or "field-" in text or "not yet" in text, row


def run_alone(name: str, on_bus: OnBus, **options: Any) -> Finding:
    """One step on a new stick."""
    on_bus(SoftwareStick(**options), kind="sim")
    bench = Bench("sim")
    try:
        return STEPS[name].run(bench)
    finally:
        bench.close()


# steps notice what they ask for: the same stick with another answer built in


def test_a_zero_length_packet_is_noticed(on_bus: OnBus) -> None:
    assert run_alone("zero-length-packet", on_bus, zero_length_packets=True).answer == "one, the output is whole"
    assert run_alone("zero-length-packet", on_bus, speed="high").status == "observed"


def _other_output_stage(change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The chip's requantisation replaced; the reference keeps its own."""
    monkeypatch.setattr(nodes, "numerics", SimpleNamespace(**(vars(numerics) | {"requantise": change})))


@pytest.mark.parametrize(
    ("name", "rounded"),
    [
        ("up", lambda v: np.floor(v + 0.5)),
        ("away", lambda v: np.trunc(v + np.copysign(0.5, v))),
        ("zero", np.trunc),
        ("none", np.floor),
    ],
)
def test_other_roundings_are_told_apart(
    name: str, rounded: Callable[[Any], Any], on_bus: OnBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def requantise(acc: Any, mult: Any, low: float, high: float, out_zp: int, **_: Any) -> Any:
        return (rounded(np.clip(acc * np.float32(mult), low, high)) + out_zp).astype(np.uint8)

    _other_output_stage(requantise, monkeypatch)
    found = run_alone("rounding-of-ties", on_bus)
    assert (found.answer.split(":")[0], found.status) == (name, "differs")


def test_wrapping_instead_of_saturating_is_noticed(on_bus: OnBus, monkeypatch: pytest.MonkeyPatch) -> None:
    def requantise(acc: Any, mult: Any, low: float, high: float, out_zp: int, **_: Any) -> Any:
        return (np.rint(acc * np.float32(mult)).astype(np.int64) + out_zp & 255).astype(np.uint8)

    _other_output_stage(requantise, monkeypatch)
    assert run_alone("saturation", on_bus).answer == "wraps"


def test_a_fused_multiply_add_is_noticed(on_bus: OnBus, monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(spline: numerics.Spline, x: np.ndarray) -> np.ndarray:
        """Horner with one rounding per step, by exact arithmetic."""
        rows = spline.coefficients[np.searchsorted(spline.breakpoints, x, side="right")]
        out = []
        for value, row in zip(x.ravel().tolist(), rows.reshape(-1, 5).tolist(), strict=True):
            y = row[4]
            for c in row[3::-1]:
                y = float(np.float32(float(Fraction(value) * Fraction(y) + Fraction(c))))
            out.append(y)
        return np.array(out, np.float32).reshape(x.shape)

    monkeypatch.setattr(numerics.Spline, "_polynomial", fused)
    assert run_alone("nlu-multiply-add", on_bus).answer == "fused"


def test_inexact_special_functions_are_measured(on_bus: OnBus, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = scalar_code.special

    def special(op: int, bits: int) -> int:
        return exact(op, bits) & ~31

    monkeypatch.setattr(scalar_code, "special", special)
    for name in ("reciprocal", "exp2"):
        found = run_alone(name, on_bus)
        assert found.answer == "up to 31 units in the last place off", name


def test_swapped_comparisons_are_noticed(on_bus: OnBus, monkeypatch: pytest.MonkeyPatch) -> None:
    table = scalar_code._ALU
    a, b = table[isa.AluOp.GEU], table[isa.AluOp.GE]
    monkeypatch.setitem(table, isa.AluOp.GEU, b)
    monkeypatch.setitem(table, isa.AluOp.GE, a)
    assert run_alone("comparisons", on_bus).answer == "13 signed, 14 unsigned"


def test_the_order_of_the_fence_bits_is_found(on_bus: OnBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip in which every bit drains one unit: the step reads the order off it."""
    order = ["ring_consumer0", "ring_consumer1", "ring_producer", "wide_to_narrow", "narrow_to_wide"]
    usual = scalar.fenced_units

    def one_each(mask: int) -> list[str]:
        single = [unit for bit, unit in enumerate(order, start=1) if mask >> bit & 1]
        return usual(mask & ~0b111110) + single

    monkeypatch.setattr(scalar, "fenced_units", one_each)
    found = run_alone("fence-units", on_bus, chip=Chip(seed=0))  # else every unit runs to its end at once
    names = {1: ["ring_recv0"], 2: ["ring_recv1"], 3: ["ring_send"], 4: ["w2n"], 5: []}
    assert (found.answer, found.status) == (str(names), "differs")


@pytest.mark.parametrize(
    "name", ["tanh", "l2-normalisation", "sum-and-mean", "concatenation", "relu-n1-to-1", "nlu-sixteen-bits"]
)
def test_forms_notice_another_rounding(name: str, on_bus: OnBus, monkeypatch: pytest.MonkeyPatch) -> None:
    def requantise(acc: Any, mult: Any, low: float, high: float, out_zp: int, *, bits: int = 8, nlu: Any = None) -> Any:
        v = np.clip(acc.astype(np.float32) * np.float32(mult), np.float32(low), np.float32(high))
        v = np.floor(v if nlu is None else nlu(v)) + out_zp
        return np.clip(v, 0, 2**bits - 1).astype(np.uint8 if bits == 8 else np.uint16)

    _other_output_stage(requantise, monkeypatch)
    found = run_alone(name, on_bus)
    assert found.status == "differs"
    assert found.details


@pytest.mark.parametrize("name", ["decoder-looped", "decoder-kept"])
def test_forms_that_take_more_for_granted_are_right_where_it_is_so(name: str, on_bus: OnBus) -> None:
    assert run_alone(name, on_bus, chip=Chip(bold=True)).status == "ok"


def test_codes_that_are_one_too_low_are_found_at_their_stage(on_bus: OnBus, monkeypatch: pytest.MonkeyPatch) -> None:
    def requantise(*arguments: Any, **options: Any) -> Any:
        codes = numerics.requantise(*arguments, **options)
        return codes - (codes > 0)

    _other_output_stage(requantise, monkeypatch)
    found = run_alone("decoder-stages", on_bus)
    assert found.status == "differs"
    assert found.answer.startswith("normal at 4: ")


@pytest.mark.parametrize("seed", [1, 2])
def test_the_mixed_networks_results_are_no_constants(seed: int) -> None:
    graph = convolutions.mixed_graph(seed)
    results = evaluate(graph, {"x": np.random.default_rng(seed).integers(0, 256, (1, 12, 12, 8), np.uint8)})
    assert len(results) == len(graph.operators) == 9
    for name, codes in results.items():
        assert len(np.unique(codes)) > 5, name


def test_a_lost_identity_row_is_noticed(on_bus: OnBus) -> None:
    on_bus(SoftwareStick(), kind="sim")
    bench, l2 = Bench("sim"), forms.l2_normalisation(0)
    over = isa.N2w(tile_mask=forms.MASK, src=Walk(0, [1], [4]), dst=Walk(forms.IDENTITY_ROW), pack_level=1)
    lost = unseen._kept(bench, replace(l2, body=[*l2.body, over]), "L2")
    bench.close()
    assert lost.answer == "lost after L2, which was right"


@pytest.mark.parametrize(
    ("name", "options", "answer"),
    [
        ("all-events", {"zero_length_packets": True}, "tag 1, 64 bytes at 0x0; tag 3, 64 bytes at 0x0; tag 4, "),
        ("halted-core", {"queue_bytes": 16384}, "16392 bytes of 131072; a layer is right afterwards"),
        ("two-dmas-in-one-transfer", {"mode": Strictness.LENIENT}, "taken as two; a layer is right afterwards"),
        ("port-reset", {}, "it comes back with its firmware running; a layer is right afterwards"),
        (
            "port-reset",
            {"firmware_required": False, "fault_plan": FaultPlan(Fault(Kind.RESET, 0, Effect.DISCONNECT))},
            "it vanishes; unplug it",
        ),
    ],
)
def test_other_sticks_on_the_wire(name: str, options: dict[str, Any], answer: str, on_bus: OnBus) -> None:
    assert run_alone(name, on_bus, **options).answer.startswith(answer)


# the command


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces all steps."""

    def use(*steps: Step) -> None:
        monkeypatch.setattr(selftest, "all_steps", lambda: list(steps))

    return use


def copies(bench: Bench) -> Finding:
    """Copies 64 bytes."""
    return layers.canary(bench)


def test_report_and_exit_code(run: Command, on_bus: OnBus, steps: Any, tmp_path: Path) -> None:
    on_bus(SoftwareStick(), kind="sim")
    steps(
        Step("good", "is right", copies, (1, 2)),
        Step("other", "is different", lambda bench: Finding("b", "a", {"x": 1})),
        Step("broken", "has a mistake", lambda bench: Finding(str(1 // 0))),
        Step("wild", "may hang", copies, bold=True),
    )
    report = tmp_path / "report.json"
    result = run("selftest", "--device", "sim", "--report", report)
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == f"1 ok, 1 differs, 1 error; report: {report}"
    found = json.loads(report.read_text())
    assert (found["passed"], found["stopped_at"], found["kind"]) == (False, None, "sim")
    assert found["stick"] == {"path": "1-1", "speed": "super", "running": False} | {
        name: value for name, value in found["stick"].items() if name not in ("path", "speed", "running")
    }
    assert set(found["versions"]) >= {"tinycoral", "python", "system", "numpy", "tinygrad"}
    good, other, broken = found["steps"]
    assert (good["step"], good["status"], good["rows"]) == ("good", "ok", [1, 2])
    assert "registers" not in good
    assert (other["status"], other["answer"], other["assumed"], other["details"]) == ("differs", "b", "a", {"x": 1})
    assert (broken["status"], broken["answer"]) == ("error", "ZeroDivisionError: integer division or modulo by zero")
    assert "1 // 0" in broken["traceback"]
    assert set(other["registers"]) == set(REGISTERS)
    assert run("selftest", "--device", "sim", "--report", report, "--only", "good").returncode == 0
    everything = run("selftest", "--device", "sim", "--bold", "--json").json
    assert [step["step"] for step in everything["steps"]] == ["good", "other", "broken", "wild"]


@pytest.mark.parametrize(
    ("fault", "recovered"),
    [
        (Fault(Kind.INPUT, 0, Effect.TIMEOUT), True),
        (Fault(Kind.INPUT, 0, Effect.TIMEOUT, times=99), False),
        (Fault(Kind.EVENT, 0, Effect.WEDGE), False),
    ],
)
def test_it_stops_at_the_first_hang_even_if_the_driver_recovers(
    fault: Fault, recovered: bool, run: Command, on_bus: OnBus, steps: Any
) -> None:
    on_bus(SoftwareStick(fault_plan=FaultPlan(fault)), kind="sim")
    steps(Step("first", "hangs", copies), Step("second", "never runs", copies))
    result = run("selftest", "--device", "sim", "--json")
    assert (result.returncode, result.json["stopped_at"], len(result.json["steps"])) == (1, "first", 1)
    (hang,) = result.json["steps"]
    assert hang["status"] == "hang"
    assert hang["faults"]
    assert hang["answer"].startswith("all 1 right") is recovered
    if fault.effect is not Effect.WEDGE:
        assert "currentPc" in hang["registers"]


def test_a_stick_that_cannot_be_opened_is_a_hang(run: Command, on_bus: OnBus, steps: Any) -> None:
    silent = SoftwareStick(firmware_required=False, fault_plan=FaultPlan(Fault(Kind.CONTROL, 0, Effect.WEDGE)))
    on_bus(silent, kind="sim")
    steps(Step("first", "opens", copies), Step("second", "never runs", copies))
    result = run("selftest", "--device", "sim", "--json")
    assert (result.returncode, result.json["stopped_at"], len(result.json["steps"])) == (1, "first", 1)
    assert "StickHung" in result.json["steps"][0]["answer"]


def test_a_stick_that_may_not_be_opened_is_no_hang(run: Command, on_bus: OnBus, steps: Any) -> None:
    steps(Step("first", "opens", copies), Step("second", "opens", copies))
    on_bus(SoftwareStick())
    result = run("selftest", "--json")
    assert (result.returncode, result.stdout) == (1, "")
    assert "coral firmware install" in result.stderr
    on_bus(SoftwareStick(firmware_required=False, fault_plan=FaultPlan(Fault(Kind.CLAIM, 0, Effect.STALL, 999))))
    assert "claimed by a program that does not use this driver's lock" in run("selftest", "--json").stderr


def test_a_bold_step_may_be_refused_by_the_simulated_chip_only(run: Command, on_bus: OnBus, steps: Any) -> None:
    on_bus(SoftwareStick(), kind="sim")
    run_acc_on = STEPS["field-acc_on-op"].run
    steps(Step("tame", "is refused", run_acc_on), Step("wild", "is refused", run_acc_on, bold=True))
    tame, wild = run("selftest", "--device", "sim", "--bold", "--json").json["steps"]
    assert (tame["status"], wild["status"]) == ("error", "observed")
    assert "refused by the simulated chip: UnknownInstruction: op" in wild["answer"]


def test_an_interrupt_leaves_a_report(run: Command, on_bus: OnBus, steps: Any, tmp_path: Path) -> None:
    def interrupted(bench: Bench) -> Finding:
        raise KeyboardInterrupt

    on_bus(SoftwareStick(), kind="sim")
    steps(Step("good", "is right", copies), Step("long", "is interrupted", interrupted))
    report = tmp_path / "report.json"
    assert run("selftest", "--device", "sim", "--report", report).returncode == 1
    assert json.loads(report.read_text())["stopped_at"] == "interrupted"
    assert len(json.loads(report.read_text())["steps"]) == 1


def test_names(run: Command, on_bus: OnBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    on_bus(SoftwareStick(), kind="sim")
    listed = run("selftest", "--list").stdout.splitlines()
    assert len(listed) == len(STEPS)
    assert listed[0] == f"registers [12]: {STEPS['registers'].about}"
    assert [" (bold)" in line for line in listed] == [step.bold for step in STEPS.values()]
    assert sorted(" (bold)" in line for line in listed) == [" (bold)" in line for line in listed]
    result = run("selftest", "--device", "sim", "--only", "can*", "--only", "comparisons")
    assert [line.split()[1] for line in result.stdout.splitlines()[:2]] == ["canary", "comparisons"]
    assert json.loads((tmp_path / "coral-selftest-sim.json").read_text())["passed"] is True
    refused = run("selftest", "--device", "sim", "--only", "nosuch")
    assert (refused.returncode, refused.stderr) == (
        1,
        "coral: no step is called nosuch; `coral selftest --list` names them\n",
    )
    on_bus()
    assert "no Coral stick found" in run("selftest", "--only", "canary").stderr
    assert run("selftest", "--device", "nvme").returncode == 2


def test_a_stick_in_boot_mode_shows_both_descriptors(on_bus: OnBus) -> None:
    on_bus(SoftwareStick(), kind="sim")
    bench = Bench("sim")
    _ = bench.stick
    details = STEPS["descriptors"].run(bench).details
    bench.close()
    assert bytes.fromhex(details["boot"]["device"])[8:12] == bytes.fromhex("6e1a9a08")
    assert bytes.fromhex(details["application"]["device"])[8:12] == bytes.fromhex("d1180293")
