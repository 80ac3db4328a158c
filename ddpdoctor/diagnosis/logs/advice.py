"""What a launcher may do about a first cause: start the job again, exclude a node, or leave it to a person."""

from __future__ import annotations

import re

from ddpdoctor.diagnosis.failures import number_of, xid
from ddpdoctor.diagnosis.logs.causes import LogCause
from ddpdoctor.examination import Advice
from ddpdoctor.finding import Trouble

_OF_THE_SCRIPT: frozenset[Trouble] = frozenset(
    {
        "exception", "mismatch", "rank-branch", "unused-parameters", "ready-twice", "no-backend", "local-rank-argument",
        "out-of-memory", "shared-memory",
    }
)  # fmt: skip
_PASSES = frozenset({"ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "TimeoutError"})
"""Exceptions about a service, which may be there again the next time."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_BY_SCHEDULER: dict[str, Advice] = {
    "node failure": "replace-the-node",
    "preemption": "retry",
    "time limit": "retry",
}


def advice_of(cause: LogCause) -> Advice:
    """Return what a launcher may do; ``unknown`` where the logs do not show why a rank ended or did not come."""
    first = cause.first
    if first.kind == "killed-by-scheduler":
        return _BY_SCHEDULER.get(first.type, "unknown")
    if first.kind == "killed-by-kernel":
        return "fix-the-script"
    if first.kind == "gpu":
        number = number_of(first.type)
        return "replace-the-node" if not number or xid(number).blame == "machine" else "fix-the-script"
    if first.kind == "lost-peer":
        return "unknown" if cause.absent else "retry"
    if cause.trouble == "no-rendezvous":
        return "retry" if any(_PORT_TAKEN.search(one.message) for one in cause.incidents) else "unknown"
    if first.kind == "raised" and first.type in _PASSES:
        return "retry"
    return of_trouble(cause.trouble)


def of_trouble(trouble: Trouble | None) -> Advice:
    """Return what a launcher may do where only the kind of the trouble is known, as by dumps."""
    return "fix-the-script" if trouble in _OF_THE_SCRIPT else "unknown"


def hosts_of(cause: LogCause) -> tuple[str, ...]:
    """Return the hosts on which it happened; of a lost connection that of the peer, if the logs name it."""
    if cause.first.kind == "lost-peer" and not cause.absent:
        return tuple(dict.fromkeys(one.peer for one in cause.incidents if one.peer))[:1]
    # RAS names the host of the rank that is gone; whoever else tells of an absent one names its own.
    if cause.absent and cause.first.type != "NCCL RAS":
        return ()
    return tuple(sorted({one.host for one in (*cause.incidents, *cause.behind) if one.host}))
