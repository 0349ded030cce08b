"""Bold forms are used when a stick's report says that their steps were right, and only then."""

from __future__ import annotations

import json

import pytest
from codegen.transformer.harness import random_model

from coral.apps.probes import all_steps
from coral.apps.stories.confirmed import AHEAD_STEP, STEPS, ReportError, ahead_confirmed, confirmed, confirmed_form
from coral.codegen import transformer as tf

SMALL = tf.Geometry(dim=32, hidden=48, heads=4, kv_heads=2, context=24)


def report(tmp_path, kind="usb", **status):
    steps = [{"step": STEPS[field], "status": value} for field, value in status.items()]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"kind": kind, "steps": steps}))
    return path


def test_steps_exist():
    assert {AHEAD_STEP, *STEPS.values()} <= {step.name for step in all_steps()}


def test_form_follows_the_report(tmp_path, monkeypatch):
    small, many = random_model(SMALL, 2), random_model(SMALL, 17)
    monkeypatch.chdir(tmp_path)
    assert confirmed_form(small, logits=True) == tf.Form(logits=True)
    path = report(tmp_path, keep="ok", loop="ok")
    assert confirmed_form(small, report=path) == tf.Form(keep=True, loop=True)
    assert confirmed_form(many, report=path) == tf.Form(keep=True)
    assert confirmed_form(small, report=report(tmp_path, keep="differs", loop="ok")) == tf.Form(loop=True)
    assert confirmed_form(small, report=report(tmp_path, keep="observed")) == tf.Form()
    assert confirmed_form(small, report=report(tmp_path, "sim", keep="ok", loop="ok")) == tf.Form()
    path.rename(tmp_path / "coral-selftest-usb.json")
    assert confirmed_form(small) == tf.Form()
    monkeypatch.setenv("CORAL_SELFTEST_REPORT", str(report(tmp_path, keep="ok")))
    assert confirmed() == {"keep": True, "loop": False}


def test_the_switch_comes_before_the_report(tmp_path, monkeypatch):
    model, path = random_model(SMALL, 2), report(tmp_path, keep="ok")
    assert confirmed_form(model, report=path, simulated=True) == tf.Form()
    monkeypatch.setenv("CORAL_BOLD", "0")
    assert confirmed_form(model, report=path) == tf.Form()
    monkeypatch.setenv("CORAL_BOLD", "1")
    for simulated in (False, True):
        assert confirmed_form(model, report=path, simulated=simulated) == tf.Form(keep=True, loop=True)
    monkeypatch.setenv("CORAL_BOLD", "yes")
    with pytest.raises(ReportError, match="CORAL_BOLD is 'yes', it must be 0 or 1"):
        confirmed(path)


def test_instructions_go_ahead_as_the_report_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good, other = tmp_path / "good.json", tmp_path / "other.json"
    good.write_text(json.dumps({"kind": "usb", "steps": [{"step": AHEAD_STEP, "status": "ok"}]}))
    other.write_text(json.dumps({"kind": "usb", "steps": [{"step": AHEAD_STEP, "status": "hang"}]}))
    assert [ahead_confirmed(path) for path in (good, other, None)] == [True, False, False]
    assert ahead_confirmed(other, simulated=True)
    monkeypatch.setenv("CORAL_AHEAD", "0")
    assert not ahead_confirmed(good, simulated=True)
    monkeypatch.setenv("CORAL_AHEAD", "1")
    assert ahead_confirmed(other)
    monkeypatch.setenv("CORAL_AHEAD", "2")
    with pytest.raises(ReportError, match="CORAL_AHEAD is '2', it must be 0 or 1"):
        ahead_confirmed(good)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "usb", "steps": 3}', '{"kind": 1, "steps": [1]}', "\x00"])
def test_other_files(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ReportError, match=r"x\.json is not a report"):
        confirmed(path)
