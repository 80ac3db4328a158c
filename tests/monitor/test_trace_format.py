"""The exported trace keeps to the trace-event format, for awkward records too."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import msgspec
import pytest

from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import Gpu, GpuSample, StepTrack
from ddpdoctor.report.run.chrome_trace import encode
from tests.diagnosis.measured_job import MeasuredJob
from tests.monitor.trace_format import HALF_A_NANOSECOND_US, Trace, violations


def trace_of(record: RunRecord) -> Trace:
    """What is exported of a record."""
    read: Trace = json.loads(gzip.decompress(encode(record)))
    return read


def whole_record() -> RunRecord:
    """A job with everything in it that a trace shows."""
    job = MeasuredJob(kinds=("barrier", "all_reduce"))
    slower = {1: {"forward": 8.3331}}
    job.run(10, {"data_wait": 1.7, "forward": 10, "backward": 20}, slower, transfer=5, hidden=3, barrier=True)
    job.pause(2_000)
    job.run(10, {"forward": 10, "backward": 20, "optimizer": 0.0003}, transfer=5, barrier=True, sampled=3)
    started_ns = job.rows[0]["started_at_ns"][0]
    looks = tuple(
        GpuSample(taken_at_ns=started_ns + second * 1_000_000_000, utilisation_percent=97.0, power_w=500)
        for second in range(-1, 4)
    )
    return job.record(gpus=(Gpu(index=0, name="H100", ranks=(0,), samples=looks),))


def test_the_trace_of_a_run_keeps_to_the_format() -> None:
    trace = trace_of(whole_record())
    assert violations(trace) == []
    phases = {event["ph"] for event in trace["traceEvents"]}
    assert phases == {"X", "C", "M"}


def with_windows(window_ns: int) -> RunRecord:
    """Windows of communication that were scaled up from one backward of several may be longer than the step."""
    record = whole_record()
    tracks = []
    for track in record.step_tracks:
        window = track.window_ns[:]
        for row in range(len(window)):
            window[row] = window_ns
        tracks.append(msgspec.structs.replace(track, window_ns=window))
    return msgspec.structs.replace(record, step_tracks=tuple(tracks))


def with_lost_end(row: int) -> RunRecord:
    """A collective whose end was never written, though others came after it."""
    record = whole_record()
    calls = record.call_tracks[0]
    left = calls.left_at_ns[:]
    left[row] = 0
    changed = msgspec.structs.replace(calls, left_at_ns=left)
    return msgspec.structs.replace(record, call_tracks=(changed, *record.call_tracks[1:]))


def with_long_phases(track: StepTrack) -> StepTrack:
    """Phases on the GPU and on the CPU together are longer than the step."""
    return msgspec.structs.replace(track, forward_ns=track.backward_ns[:], optimizer_ns=track.backward_ns[:])


def test_a_collective_whose_end_is_lost_ends_where_the_next_begins() -> None:
    events = trace_of(with_lost_end(3))["traceEvents"]
    own = [event for event in events if event["pid"] == 0 and event["name"] == "barrier"]
    assert own[3]["ts"] + own[3]["dur"] == pytest.approx(own[4]["ts"], abs=HALF_A_NANOSECOND_US)
    assert own[3]["args"]["unfinished"] is True


@pytest.mark.parametrize(
    "record",
    [
        with_windows(90_000_000),
        with_lost_end(3),
        with_lost_end(-1),
        msgspec.structs.replace(
            whole_record(), step_tracks=tuple(with_long_phases(track) for track in whole_record().step_tracks)
        ),
        RunRecord(job=whole_record().job),
        msgspec.structs.replace(whole_record(), step_tracks=()),
    ],
    ids=["windows", "lost end", "open", "long phases", "empty", "calls only"],
)
def test_awkward_records_give_traces_that_keep_to_it_too(record: RunRecord) -> None:
    assert violations(trace_of(record)) == []


def _first(trace: Trace, phase: str, name: str = "") -> dict[str, Any]:
    found: dict[str, Any] = next(
        event for event in trace["traceEvents"] if event["ph"] == phase and event["name"].startswith(name)
    )
    return found


def _drop(trace: Trace, name: str) -> None:
    trace["traceEvents"].remove(_first(trace, "M", name))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda trace: _first(trace, "X").pop("dur"), "lacks dur"),
        (lambda trace: _first(trace, "X").pop("tid"), "lacks tid"),
        (lambda trace: _first(trace, "C").pop("args"), "lacks args"),
        (lambda trace: _first(trace, "M").pop("pid"), "lacks pid"),
        (lambda trace: _first(trace, "X").update(ph="Z"), "lacks a known phase"),
        (lambda trace: _first(trace, "X").update(ts="1"), "no number from 0 on"),
        (lambda trace: _first(trace, "X").update(dur=-1), "no number from 0 on"),
        (lambda trace: _first(trace, "C").update(args={"value": None}), "no number"),
        (lambda trace: _first(trace, "M").update(args={}), "does not say what it should"),
        (lambda trace: _drop(trace, "process_name"), "has no name"),
        (lambda trace: _drop(trace, "thread_name"), "has no name"),
        (lambda trace: trace["traceEvents"].append(_first(trace, "M", "thread_name")), "is named twice"),
        (lambda trace: trace["traceEvents"].append(_first(trace, "X", "step 1")), "comes after a later one"),
        (lambda trace: trace["traceEvents"].append(_first(trace, "C")), "goes back in time"),
        (lambda trace: _first(trace, "X", "step 1").update(dur=60_000.0), "ends after what it began in"),
        (lambda trace: trace.pop("displayTimeUnit"), "neither ms nor ns"),
    ],
)
def test_every_violation_is_seen(spoil: Callable[[Trace], object], said: str) -> None:
    trace = deepcopy(trace_of(whole_record()))
    spoil(trace)
    assert any(said in violation for violation in violations(trace)), violations(trace)
