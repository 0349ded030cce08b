"""``coral trace``: the timeline's laws, the JSON's form, the picture."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coral import timing
from coral.apps.direct import DirectChip
from coral.apps.files import random_inputs
from coral.apps.model import Model, load
from coral.apps.timeline import History, Timeline, record
from coral.chip.layout import TILES
from coral.cli import app
from tests.apps.pairs import pair


def timed(corpus: Path, name: str, clock_hz: float = timing.CLOCK_HZ) -> tuple[Model, Timeline]:
    model = load(pair(corpus, name)[1], device=DirectChip(), host=False)
    inputs = random_inputs(model.inputs, 0)
    return model, record(model.chips[0], {p.number: inputs[p.name] for p in model.inputs}, clock_hz)


def test_history() -> None:
    history = History()
    assert history.when(5) == 0
    history.add(10, 100, 200)
    history.add(12, 150, 300)
    assert [history.when(v) for v in (0, 5, 10, 11, 12, 99)] == [0, 150, 200, 250, 300, 300]


@pytest.mark.parametrize("name", ["dense/dense_256", "robotics/gabor_64x64_p4", "sequence/split_concat"])
def test_laws_of_a_timeline(corpus: Path, name: str) -> None:
    """Units do one job at a time, waits lie inside jobs, nothing before the instructions, nothing after the end."""
    model, timeline = timed(corpus, name)
    instructions = sum(len(b.data) for b in model.program.bitstreams)
    begin = instructions / timing.TO_CHIP_BYTES_PER_S * timing.CLOCK_HZ
    units = defaultdict(list)
    for s in timeline.slices:
        units[s.place, s.unit].append(s)
        assert begin - 1e-6 <= s.begin <= s.end <= timeline.cycles
        for start, end, reason in s.waits:
            assert s.begin <= start < end <= s.end
            assert isinstance(reason, str)
        assert s.busy <= s.end - s.begin - sum(end - start for start, end, _ in s.waits) + 1e-6
    for slices in units.values():
        for earlier, later in itertools.pairwise(slices):
            assert later.begin >= earlier.end - 1e-6
    assert len({place for place, _ in units}) == (5 if name == "dense/dense_256" else TILES + 1)
    predicted = timeline.predicted_seconds
    assert predicted == pytest.approx(model.predicted_seconds, rel=0.05)
    sent = timing.call_bytes(model.program)[0]
    end = max(end for unit, _, _, end in timeline.transfers if unit == "USB to the chip")
    assert end == pytest.approx(sent / timing.TO_CHIP_BYTES_PER_S * timing.CLOCK_HZ)


def test_weights_on_the_map(corpus: Path) -> None:
    """dense_256: four groups of 64 outputs, one per tile; two header rows and 64 weight rows each."""
    _, timeline = timed(corpus, "dense/dense_256")
    readers = timeline.first_readers
    assert readers.shape == (16, 2080)
    read = (readers >= 0).sum(axis=1)
    assert sorted(read[read > 0].tolist()) == [66] * 4
    assert not np.isnan(readers).any()


def test_a_faster_clock_shortens_all_but_transfers(corpus: Path) -> None:
    slow, fast = (timed(corpus, "dense/dense_256", hz)[1] for hz in (250e6, 500e6))
    transfers = timing.call_bytes(load(pair(corpus, "dense/dense_256")[1], device=DirectChip()).program)[0]
    assert fast.predicted_seconds < slow.predicted_seconds
    assert fast.predicted_seconds > timing.CALL_S + transfers / timing.TO_CHIP_BYTES_PER_S


def test_files(corpus: Path, tmp_path: Path) -> None:
    compiled, out, picture = pair(corpus, "dense/dense_256")[1], tmp_path / "t.json", tmp_path / "t.png"
    result = CliRunner().invoke(app, ["trace", str(compiled), "-o", str(out)])
    assert result.exit_code == 0
    assert "predicted 0.1" in result.stdout
    trace = json.loads(out.read_text())
    assert "predicted" in trace["otherData"]["note"]
    events = trace["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {*(f"tile {t}" for t in range(4)), "scalar side", "USB"}
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"op", "ring_producer", "ring_consumer0", "infeed", "scalar core", "USB to the chip"} <= threads
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["cat"] for e in slices} == {"job", "wait", "dma"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in slices)
    assert any(e["name"].startswith("waits: ") and ">=" in e["name"] for e in slices)
    assert "nothing to write" in str(CliRunner().invoke(app, ["trace", str(compiled)]).exception)
    wrong = CliRunner().invoke(app, ["trace", str(compiled), "-o", str(out), "--clock", "fast"])
    assert "clock 'fast' is unknown" in str(wrong.exception)
    pillow = pytest.importorskip("PIL.Image", reason="Pillow: the picture NOT tested")
    assert CliRunner().invoke(app, ["trace", str(compiled), "--picture", str(picture)]).exit_code == 0
    pixels = np.asarray(pillow.open(picture))
    assert pixels.shape[2] == 3
    for colour in ((31, 119, 180), (255, 127, 14), (44, 160, 44)):
        assert (pixels == colour).all(axis=2).any()
    bad = CliRunner().invoke(app, ["trace", str(compiled), "--picture", str(tmp_path / "no" / "t.png")])
    assert "cannot write" in str(bad.exception)
