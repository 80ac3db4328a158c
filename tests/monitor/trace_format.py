"""What the trace-event format asks of a trace, as Perfetto and chrome://tracing document it.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

REQUIRED = {"X": {"name", "ts", "dur", "pid", "tid"}, "C": {"name", "ts", "pid", "args"}, "M": {"name", "pid", "args"}}
"""Keys without which a viewer drops an event, by its phase: complete, counter, metadata."""
METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
METADATA |= {"thread_sort_index": "sort_index"}
HALF_A_NANOSECOND_US = 0.0005
Trace = dict[str, Any]


def violations(trace: Trace) -> list[str]:
    """What a viewer would drop, misplace or draw wrongly."""
    found = [] if trace.get("displayTimeUnit") in ("ms", "ns") else ["the unit of time is neither ms nor ns"]
    events = trace["traceEvents"]
    for event in events:
        missing = REQUIRED.get(event.get("ph"), {"a known phase"}) - event.keys()
        found += [f"{event} lacks {name}" for name in sorted(missing)]
    if found:
        return found
    tracks: dict[tuple[int, int], list[Any]] = {}
    counters: dict[tuple[int, str], list[Any]] = {}
    named: set[tuple[Any, ...]] = set()
    for event in events:
        numbers = [event[name] for name in ("ts", "dur", "pid", "tid") if name in event]
        if any(isinstance(number, (bool, str)) or number is None or number < 0 for number in numbers):
            found.append(f"{event} has a time or an id that is no number from 0 on")
        elif event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
        elif event["ph"] == "C":
            counters.setdefault((event["pid"], event["name"]), []).append(event)
            if not event["args"] or not all(type(value) in (int, float) for value in event["args"].values()):
                found.append(f"{event} counts something that is no number")
        elif METADATA.get(event["name"]) not in event["args"]:
            found.append(f"{event} does not say what it should")
        elif event["name"].endswith("_name"):
            key = (event["name"], event["pid"], *((event["tid"],) if event["name"] == "thread_name" else ()))
            found += [f"{key} is named twice"] if key in named else []
            named.add(key)
    for (pid, tid), own in tracks.items():
        found += [] if ("process_name", pid) in named else [f"process {pid} has no name"]
        found += [] if ("thread_name", pid, tid) in named else [f"thread {tid} of {pid} has no name"]
        found += _disorder(own)
    for (pid, _), own in counters.items():
        found += [] if ("process_name", pid) in named else [f"process {pid} has no name"]
        if any(after["ts"] <= before["ts"] for before, after in pairwise(own)):
            found.append(f"the counter {own[0]['name']} of {pid} goes back in time")
    return found


def _disorder(slices: list[Any]) -> list[str]:
    """Slices of one thread that go back in time, or that overlap without one being inside of the other."""
    found, open_until = [], [float("inf")]
    for before, event in zip([None, *slices], slices, strict=False):
        start, end = event["ts"], event["ts"] + event["dur"]
        if before is not None and start < before["ts"]:
            found.append(f"{event['name']} at {start} comes after a later one")
        while start >= open_until[-1] - HALF_A_NANOSECOND_US:
            open_until.pop()
        if end > open_until[-1] + HALF_A_NANOSECOND_US:
            found.append(f"{event['name']} at {start} ends after what it began in")
        open_until.append(end)
    return found
