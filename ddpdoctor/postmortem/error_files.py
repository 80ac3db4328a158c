"""Reads torchelastic's error files: the exception of one rank as JSON, with its time."""

from __future__ import annotations

import json
from itertools import count
from typing import Any, BinaryIO

from ddpdoctor.postmortem.failures import details_of, own_rank
from ddpdoctor.postmortem.inputs import LARGEST_ERROR_FILE, Found
from ddpdoctor.postmortem.log_reader import LogRead
from ddpdoctor.postmortem.tracebacks import parse
from ddpdoctor.record.streams.devices import Incident


def read_error_file(found: Found, stream: BinaryIO, positions: count[int]) -> LogRead:
    """Return the incident of an error file; raises OSError with a sentence where it is none."""
    content = stream.read(LARGEST_ERROR_FILE + 1)
    try:
        loaded: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise OSError(f"it is not a torchelastic error file ({type(error).__name__})") from error
    message = loaded.get("message") if isinstance(loaded, dict) else None
    extra: Any = {}
    if isinstance(message, dict):
        extra, message = message.get("extraInfo") or {}, message.get("message")
    callstack = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
    stamp = str(extra.get("timestamp", "")) if isinstance(extra, dict) else ""
    raised = parse(callstack)
    kind, _, text = str(message or "").partition(": ")
    if raised is not None and raised.root.type:
        kind, text = raised.root.type, raised.root.text
    frames = () if raised is None else tuple(reversed(raised.root.frames))
    what, trouble, more = details_of(kind, text, frames)
    incident = Incident(
        kind=what,
        trouble=trouble,
        rank=found.rank if found.rank is not None else own_rank(text),
        position=next(positions),
        attempt=found.attempt,
        time_ns=int(stamp) * 1_000_000_000 if stamp.isdigit() else 0,
        file=found.name,
        host=found.host,
        message=text,
        frames=frames,
        **{"type": kind, **more},
    )
    return LogRead(incidents=[incident] if kind else [], lines=content.count(b"\n"), attempts=found.attempt + 1)
