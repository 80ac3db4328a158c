"""Findings carry what mending them alone brings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddpdoctor.catalogue.registry import load, read_catalogue
from ddpdoctor.finding import MOST_TIMES, Finding, Gain
from ddpdoctor.monitor.snapshot import FindingView
from ddpdoctor.record.model import RunRecord
from ddpdoctor.report.finding_text import finding_lines
from ddpdoctor.report.formats.json import finding_object
from ddpdoctor.report.run.run_lines import finding_lines as live_lines
from ddpdoctor.tui.screens.pages import paint_screen
from ddpdoctor.tui.view import View
from ddpdoctor.what_if.answer import Gains, what_if
from tests.tui import runs
from tests.what_if.conftest import Ddpdoctor
from tests.what_if.records import EVEN, bucketed, record_of


def found(code: str, record: RunRecord) -> Finding:
    entry = next(entry for entry in read_catalogue().entries if entry.code == code)
    check = load(entry)
    assert check.in_run is not None
    findings: list[Any] = list(check.in_run(record))
    (finding,) = Gains().added_to([msgspec.structs.replace(findings[0], fingerprint=code)], record)
    return finding


@pytest.mark.parametrize(
    ("code", "more", "speedup"),
    [
        ("DDP401", {}, 72 / 54),
        ("DDP401", {"hidden": 6.0}, 72 / 54),
        ("DDP403", {"slower": {1: {"forward": 30.0}}}, 102 / 72),
    ],
)
def test_a_finding_of_speed_says_how_much_faster_the_job_is_without_it(
    code: str, more: dict[str, Any], speedup: float
) -> None:
    finding = found(code, record_of(bucketed(4, 80, **more)))
    assert finding.gain is not None
    assert finding.gain.speedup == pytest.approx(speedup, rel=0.03)
    assert finding.gain.low < finding.gain.speedup < finding.gain.high


@pytest.mark.parametrize("workers", [0, 2])
def test_what_more_workers_bring_is_what_the_table_of_what_if_says(workers: int) -> None:
    record = record_of(bucketed(4, 80, durations={**EVEN, "data_wait": 50.0}), workers=workers)
    gain = found("DDP404", record).gain
    (shown,) = (change.speedup for change in what_if(record).changes if "workers" in change.settings)
    assert gain == Gain(speedup=shown.value, low=shown.low, high=shown.high)


def test_the_reports_show_the_gain() -> None:
    finding = found("DDP403", record_of(bucketed(4, 80, slower={1: {"forward": 30.0}})))
    assert finding.gain is not None
    said = f"{finding.gain.speedup:.2f} times as fast"
    assert said in "\n".join(line.plain for line in finding_lines(finding, "/", 100))
    assert said in live_lines(finding, "/")[1]
    assert finding_object(finding, "/")["gain"]["speedup"] == finding.gain.speedup
    assert "gain" not in finding_object(msgspec.structs.replace(finding, gain=None), "/")


def test_the_screen_shows_the_gain() -> None:
    finding = found("DDP403", record_of(bucketed(4, 80, slower={1: {"forward": 30.0}})))
    assert finding.gain is not None
    view = FindingView(finding=finding, since_ns=runs.NOW - runs.S)
    painting = paint_screen(View(snapshot=runs.snapshot(findings=(view,)), page="findings"), 120, 36)
    lines = ["".join(cell.text for cell in cells) for cells in painting.lines]
    assert any(f"{finding.gain.speedup:.2f} times as fast" in line for line in lines)


def test_a_rehearsal_and_a_run_that_is_too_short_promise_nothing() -> None:
    record = record_of(bucketed(4, 80, slower={1: {"forward": 30.0}}))
    finding = found("DDP403", record)
    bare = msgspec.structs.replace(finding, gain=None)
    rehearsed = msgspec.structs.replace(record, job=msgspec.structs.replace(record.job, kind="rehearsal"))
    assert Gains().added_to([bare], rehearsed) == (bare,)
    short = record_of(bucketed(4, 12, slower={1: {"forward": 30.0}}))
    assert Gains().added_to([bare], short) == (bare,)


def test_a_gain_is_worked_out_again_when_the_run_has_twice_as_many_steps() -> None:
    gains = Gains()
    slower = {1: {"forward": 30.0}}
    bare = msgspec.structs.replace(found("DDP403", record_of(bucketed(4, 80, slower=slower))), gain=None)

    def told(steps: int, late_ms: float) -> float:
        job = bucketed(4, steps, slower={1: {"forward": late_ms}})
        (finding,) = gains.added_to([bare], record_of(job))
        assert finding.gain is not None
        return finding.gain.speedup

    first = told(40, 30.0)
    assert told(60, 90.0) == first
    assert told(90, 90.0) > 1.3 * first


def test_the_report_of_a_real_run_says_what_its_straggler_costs(ddpdoctor: Ddpdoctor, late_run: Path) -> None:
    told = ddpdoctor("report", str(late_run), "--output-format", "json")
    assert told.returncode == 0, told.stderr
    (straggler,) = (entry for entry in json.loads(told.stdout)["findings"] if entry["code"] == "DDP403")
    assert straggler["gain"]["speedup"] > 1.1


def test_a_gain_without_an_upper_bound_is_said_so_and_survives_the_record() -> None:
    finding = found(
        "DDP404", record_of(bucketed(4, 80, durations={"data_wait": 400.0, "forward": 0.1, "backward": 0.1}))
    )
    assert finding.gain is not None
    assert finding.gain.high == MOST_TIMES
    assert finding.gain.text.endswith(" or more)")
    assert msgspec.json.decode(msgspec.json.encode(finding.gain), type=Gain) == finding.gain
