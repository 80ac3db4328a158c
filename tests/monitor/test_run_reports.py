"""A run as JSON, as text, as lines and as a trace."""

from __future__ import annotations

import gzip
import json
from typing import Any

import msgspec
import pytest

from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.performance.summary import RunVerdict
from ddpdoctor.finding import Finding, Frame, Severity
from ddpdoctor.monitor.build_snapshot import Look, build_snapshot
from ddpdoctor.monitor.replay import Series
from ddpdoctor.monitor.snapshot import FindingView, Snapshot, StallSide, StallView, WaitView
from ddpdoctor.record.model import RunRecord, Site
from ddpdoctor.record.streams.measured import Phase, RankHeartbeat
from ddpdoctor.report.formats import html
from ddpdoctor.report.run import run_json, run_text
from ddpdoctor.report.run.chrome_trace import encode
from ddpdoctor.report.run.run_lines import RunLines, progress
from tests.diagnosis.measured_job import MeasuredJob

SECOND_NS = 1_000_000_000
FINDING = Finding(
    code="DDP403",
    name="straggler",
    severity=Severity.WARNING,
    title="rank 1 is late",
    ranks=(1,),
    basis=frozenset({"run"}),
    remedy="Look at rank 1.",
    fingerprint="1",
)


def _record() -> RunRecord:
    job = MeasuredJob()
    return job.run(40, {"data_wait": 2, "forward": 10, "backward": 20}, {1: {"forward": 8}}, transfer=5).record()


def _snapshot(record: RunRecord, now_ns: int = 20 * SECOND_NS, **fields: Any) -> Snapshot:
    verdict = RunVerdict(state="slow", code="DDP403", text="rank 1 is late", why=("by 8 ms",), next="Look at rank 1.")
    look = {"state": "running", "verdict": verdict, "findings": (), **fields}
    return build_snapshot(
        Look(now_ns=now_ns, record=record, summary=summarise(record), **look), Series(), "train.py", "/run"
    )


def test_the_json_has_what_the_schema_promises_and_its_phases_add_up_to_the_step() -> None:
    view = FindingView(finding=FINDING, since_ns=1, until_ns=2)
    read = json.loads(run_json.render(_snapshot(_record(), findings=(view,)), "/job"))
    assert read["schema"] == 1
    assert read["verdict"]["state"] == "slow"
    assert (read["verdict"]["code"], read["verdict"]["text"]) == ("DDP403", "rank 1 is late")
    assert (read["world_size"], read["steps"], read["samples_per_s"] > 0) == (2, 40, True)
    (first, second) = read["ranks"]
    assert set(first["phases_ms"]) == {
        "data_wait", "forward", "backward_compute", "exposed_waiting", "exposed_transfer", "explicit", "optimizer",
        "other",
    }  # fmt: skip
    assert abs(sum(first["phases_ms"].values()) - first["step_ms"]["p50"]) < 0.01
    assert first["phases_ms"]["exposed_waiting"] == 8.0
    assert (second["late_ms"], second["late_phase"], second["gpu"]) == (8.0, "forward", None)
    assert (read["findings"][0]["code"], read["findings"][0]["until_ns"]) == ("DDP403", 2)


def test_what_was_not_measured_is_null_in_json_and_a_dash_in_text() -> None:
    record = MeasuredJob().run(40, {"forward": 10}, sampled=1_000).record()
    snapshot = _snapshot(record)
    assert json.loads(run_json.render(snapshot, "/job"))["ranks"][0]["phases_ms"]["exposed_transfer"] is None
    assert "—" in run_text.render(snapshot, "/job", 80, colour=False)


@pytest.mark.parametrize("width", [40, 48, 60, 72, 80])
def test_the_table_leaves_out_the_shortest_times_where_lines_are_narrow(width: int) -> None:
    lines = run_text.render(_snapshot(_record()), "/job", width, colour=False).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("rank  step"))
    assert max(map(len, lines)) <= width
    assert lines[at].split()[-1] == "late" and len(lines[at + 1].split()) == len(lines[at].split())
    assert ("No room for" in " ".join(lines[at:])) is (width <= 60)
    assert {"step", "p95", "bwd"} <= {*lines[at].split()}, "the longest times"


@pytest.mark.parametrize(("state", "late"), [("slow", ["rank 1"]), ("broken", [])])
def test_a_rank_that_broke_the_job_is_not_said_to_be_late(state: Any, late: list[str]) -> None:
    snapshot = _snapshot(_record(), 4 * SECOND_NS, findings=(FindingView(finding=FINDING, since_ns=1),))
    snapshot = msgspec.structs.replace(snapshot, verdict=msgspec.structs.replace(snapshot.verdict, state=state))
    assert [bar["label"] for bar in html.phase_bars(snapshot) if bar["is_late"]] == late


def test_the_text_begins_with_verdict_why_and_next_and_fits_its_width() -> None:
    view = FindingView(finding=FINDING, since_ns=1)
    snapshot = _snapshot(_record(), 4 * SECOND_NS, findings=(view,))
    lines = run_text.render(snapshot, "/job", 80, colour=False).splitlines()
    assert lines[:3] == ["SLOW: rank 1 is late (DDP403)", "  why  by 8 ms", "  next  Look at rank 1."]
    table = next(number for number, line in enumerate(lines) if line.split()[:2] == ["rank", "step"])
    assert lines[table + 2].split()[0] == "1"
    assert lines[table + 2].split()[-2:] == ["8.00", "forward"]
    assert max(map(len, lines)) <= 80


def test_a_finding_is_said_when_it_arises_and_when_it_is_over_and_not_between() -> None:
    lines, record = RunLines("/job"), _record()
    holding = FindingView(finding=FINDING, since_ns=1)
    first = lines.news(_snapshot(record, 20 * SECOND_NS, findings=(holding,)))
    assert first[0] == "ddpdoctor: warning: straggler (DDP403) on rank 1: rank 1 is late"
    assert first[1] == "ddpdoctor:   do: Look at rank 1."
    assert first[2].startswith("ddpdoctor: step 40, ")
    assert lines.news(_snapshot(record, 21 * SECOND_NS, findings=(holding,))) == []
    over = FindingView(finding=FINDING, since_ns=1, until_ns=2)
    assert lines.news(_snapshot(record, 22 * SECOND_NS, findings=(over,))) == [
        "ddpdoctor: over: straggler (DDP403): rank 1 is late"
    ]


def test_of_ranks_that_have_ended_no_speed_is_said_but_who_still_runs() -> None:
    lines, record = RunLines("/job"), _record()
    now_ns = record.step_tracks[0].ended_at_ns[-1]
    first = msgspec.structs.replace(_snapshot(record, now_ns), now_ns=20 * SECOND_NS)
    assert "steps/s" in lines.news(first)[-1]
    assert lines.news(msgspec.structs.replace(first, now_ns=26 * SECOND_NS)) == []  # Nothing has changed.
    dead = msgspec.structs.replace(
        record, ranks=tuple(msgspec.structs.replace(rank, end="finished", exit_code=0) for rank in record.ranks)
    )
    told = [line for at in range(30, 95) for line in lines.news(_snapshot(dead, at * SECOND_NS, launcher_pid=123))]
    assert told == [
        f"ddpdoctor: all ranks ended {ago} s ago, after step 40; the launcher, PID 123, is still running"
        for ago in ("3.0", "33", "63")
    ]
    again = msgspec.structs.replace(first, now_ns=99 * SECOND_NS)  # It has started others.
    assert "steps/s" in lines.news(again)[-1]


def test_a_stall_is_said_once_with_culprit_line_and_remedy_and_its_end_too() -> None:
    lines, record = RunLines("/job"), _record()
    sides = (
        StallSide(ranks=(1,), text="sleeps", stack=(Frame("/job/train.py", 88, "main"),), culprit=True),
        StallSide(ranks=(0, 2), text="wait in all_reduce at train.py:9", stack=(Frame("/job/train.py", 9, "main"),)),
    )
    stall = StallView(title="rank 1 does not come", since_ns=1, sides=sides, remedy="Wake it.")
    said = lines.news(_snapshot(record, stall=stall, state="stalled"))
    assert said[:4] == [
        "ddpdoctor: STALLED: rank 1 does not come",
        "ddpdoctor:   culprit: rank 1 sleeps (at train.py:88)",
        "ddpdoctor:   ranks 0 and 2 wait in all_reduce at train.py:9",
        "ddpdoctor:   do: Wake it.",
    ]
    assert lines.news(_snapshot(record, stall=stall, state="stalled")) == []
    (later,) = lines.news(_snapshot(record, 50 * SECOND_NS, stall=stall, state="stalled"))
    assert later.startswith("ddpdoctor: step 40, stalled for 50 s, ranks 0 and 1 ")
    # A rank that stirs for a moment has made no step yet.
    assert not any("goes on" in line for line in lines.news(_snapshot(record, 51 * SECOND_NS)))
    assert lines.news(_snapshot(record, 52 * SECOND_NS, stall=stall, state="stalled")) == []
    moved = msgspec.structs.replace(_snapshot(record, 53 * SECOND_NS), steps=41)
    assert lines.news(moved)[0] == "ddpdoctor: the job continues; it stalled for 52 s"
    again = msgspec.structs.replace(stall, since_ns=60 * SECOND_NS, may_go_on=True)
    assert lines.news(_snapshot(record, 66 * SECOND_NS, stall=again, state="stalled"))[0] == (
        "ddpdoctor: STALLED: rank 1 does not come (it may recover)"
    )
    hung = msgspec.structs.replace(again, may_go_on=False)
    assert lines.news(_snapshot(record, 140 * SECOND_NS, stall=hung, state="stalled"))[0] == (
        "ddpdoctor: STALLED: rank 1 does not come"
    )


def test_a_wait_for_a_rank_that_works_is_told_seldom_and_against_the_timeout() -> None:
    lines, since_ns, told = RunLines("/work"), 20 * SECOND_NS, []
    for after_s in range(10, 121, 2):
        text = f"rank 0 has waited {after_s} s for rank 1, busy in `search` at train.py:7"
        wait = WaitView(late=1, since_ns=since_ns, text=text, timeout_at_ns=since_ns + 100 * SECOND_NS)
        snapshot = _snapshot(_record(), since_ns + after_s * SECOND_NS, wait=wait)
        told += [line for line in lines.news(snapshot) if line.startswith("ddpdoctor: waiting: ")]
    said = "ddpdoctor: waiting: rank 0 has waited {} s for rank 1, busy in `search` at train.py:7"
    assert told == [
        said.format(10),
        said.format(40),
        said.format(50) + "; 50% of the group's timeout of 100 s has passed",
        said.format(80) + "; 80% of the group's timeout of 100 s has passed",
        said.format(110),
    ]


def test_a_run_that_makes_no_steps_says_what_its_ranks_do_where_and_for_how_long() -> None:
    record = msgspec.structs.replace(_record(), sites=(Site((Frame("/job/train.py", 88, "validate"),)),))
    ended_at_ns = record.step_tracks[0].ended_at_ns[-1]

    def heartbeat(rank: int, phase: Phase, **fields: Any) -> RankHeartbeat:
        return RankHeartbeat(rank=rank, beat_at_ns=ended_at_ns + 40 * SECOND_NS, phase=phase, step=40, **fields)

    def told(*heartbeats: RankHeartbeat, after_s: float = 40) -> Snapshot:
        return _snapshot(msgspec.structs.replace(record, heartbeats=heartbeats), ended_at_ns + int(after_s * SECOND_NS))

    def progress_of(snapshot: Snapshot) -> str:
        (line,) = RunLines("/job").news(snapshot)
        return line

    evaluating = [heartbeat(rank, "evaluation", site=0, phase_since_ns=ended_at_ns + 39 * SECOND_NS) for rank in (0, 1)]
    both = told(*evaluating)
    assert progress_of(both) == (
        "ddpdoctor: step 40, no step for 40 s, ranks 0 and 1 evaluating at train.py:88 for 40 s"
    )
    assert both.verdict.why[0] == "no step for 40 s: ranks 0 and 1 evaluating at train.py:88 for 40 s"
    saving = heartbeat(0, "saving", site=0, phase_since_ns=ended_at_ns + 10 * SECOND_NS)
    waiting = heartbeat(1, "explicit", collective="barrier", sequence=3, phase_since_ns=ended_at_ns + SECOND_NS)
    assert progress_of(told(saving, waiting)) == (
        "ddpdoctor: step 40, no step for 40 s, rank 0 saving at train.py:88 for 30 s, rank 1 waiting in barrier #3 for "
        "39 s"
    )
    at_work = told(*evaluating, after_s=2)
    assert (at_work.overdue_ns, at_work.meanwhile, at_work.verdict.why) == (None, "", ("by 8 ms",))


def test_a_standstill_before_the_first_step_says_later_for_how_long_it_lasts() -> None:
    lines, record = RunLines("/job"), MeasuredJob().record()
    stall = StallView(title="the ranks part", since_ns=0, sides=())
    lines.news(_snapshot(record, stall=stall, state="stalled"))
    (later,) = lines.news(_snapshot(record, 50 * SECOND_NS, stall=stall, state="stalled"))
    assert later.startswith("ddpdoctor: no step yet, stalled for 50 s")


def test_a_progress_line_tells_waiting_from_transfer_and_the_phase_in_words() -> None:
    record = MeasuredJob().run(40, {"forward": 10, "backward": 20}, {1: {"data_wait": 8}}, transfer=5).record()
    now_ns = record.step_tracks[0].ended_at_ns[-1]
    line = progress(_snapshot(record, now_ns, findings=(FindingView(finding=FINDING, since_ns=1),)))
    assert line.endswith("exposed 21% (9% waiting for ranks), rank 1 late by 8.00 ms (data wait)")


def test_a_rank_that_only_advice_speaks_of_is_no_culprit() -> None:
    for severity in (Severity.WARNING, Severity.ADVICE):
        view = FindingView(finding=msgspec.structs.replace(FINDING, severity=severity), since_ns=1)
        culprits = [rank.rank for rank in _snapshot(_record(), findings=(view,)).ranks if rank.culprit]
        assert culprits == ([1] if severity is Severity.WARNING else [])


def test_of_a_rank_that_broke_the_job_no_phase_is_told() -> None:
    broken = RunVerdict(state="broken", code="DDP706", text="rank 1 raised KeyError")
    snapshot = _snapshot(_record(), findings=(FindingView(finding=FINDING, since_ns=1),), verdict=broken)
    text = run_text.render(snapshot, "/job", 80, colour=False)
    row = next(line for line in text.splitlines() if line.split()[:1] == ["1"])
    assert row.split()[-1] == "8.00"


def test_an_exception_that_was_told_is_not_told_again_as_a_standstill() -> None:
    lines, record = RunLines("/job"), _record()
    raised = msgspec.structs.replace(FINDING, title="rank 1 raised KeyError", severity=Severity.ERROR)
    holding = (FindingView(finding=raised, since_ns=1),)
    assert any("rank 1 raised KeyError" in line for line in lines.news(_snapshot(record, findings=holding)))
    stall = StallView(title=raised.title, since_ns=1, sides=(StallSide(ranks=(0,), text="waits", stack=()),))
    again = lines.news(_snapshot(record, findings=holding, stall=stall, state="stalled"))
    assert not any("KeyError" in line for line in again)
    verdict = RunVerdict(state="broken", code="DDP706", text=raised.title)
    ended = _snapshot(record, findings=holding, stall=stall, state="ended", verdict=verdict)
    assert "STALLED" not in run_text.render(ended, "/job", 80, colour=False)


def test_text_from_outside_obeys_no_terminal() -> None:
    evil = msgspec.structs.replace(FINDING, title="\x1b[2J")
    snapshot = _snapshot(_record(), findings=(FindingView(finding=evil, since_ns=1),))
    said = "".join(RunLines("/job").news(snapshot)) + run_text.render(snapshot, "/job", 80, colour=False)
    assert "\x1b" not in said


def test_the_trace_has_the_fields_that_perfetto_needs_and_true_times() -> None:
    job = MeasuredJob()
    record = job.run(10, {"forward": 10, "backward": 20}, {1: {"forward": 8}}, transfer=5, barrier=True).record()
    trace = json.loads(gzip.decompress(encode(record)))
    events = trace["traceEvents"]
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys()
        assert event["ph"] in ("X", "M", "C")
        assert event["ph"] != "X" or event["dur"] >= 0
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    steps = [event for event in events if event["name"] == "step 2"]
    assert [event["pid"] for event in steps] == [0, 1]
    tracks = {track.rank: track for track in record.step_tracks}
    origin_ns = min(track.started_at_ns[0] for track in tracks.values())
    for step in steps:
        track = tracks[step["pid"]]
        assert step["ts"] == (track.started_at_ns[1] - origin_ns) / 1e3
        assert step["dur"] == (track.ended_at_ns[1] - track.started_at_ns[1]) / 1e3
        inside = [
            event
            for event in events
            if event.get("cat") == "phases"
            and event["pid"] == step["pid"]
            and step["ts"] <= event["ts"] < step["ts"] + step["dur"]
        ]
        assert abs(sum(event["dur"] for event in inside) - step["dur"]) < 0.01
    assert sum(event["name"] == "barrier" for event in events) == 20


def test_a_run_that_is_longer_than_its_rings_says_which_steps_its_figures_are_of() -> None:
    short = _snapshot(_record())
    assert "40 steps, " in run_text.what_was_seen(short)
    begun = msgspec.structs.replace(short, started_at_ns=short.now_ns - 60 * SECOND_NS, ended_at_ns=None)
    assert "60 s in all (about 1.8 s of it in steps), " in run_text.what_was_seen(begun)
    long = msgspec.structs.replace(short, steps=10_000)
    assert "10,000 steps (figures of the newest 37), " in run_text.what_was_seen(long)
