"""What the logs of a dead job tell: failures and ends of its ranks, each once, in the order in which they were written.

A rank is None where the log does not say which one it was, a time 0 where it does not say when.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ddpdoctor.finding import Frame, Trouble

IncidentKind = Literal[
    "raised",
    "timed-out",
    "mismatch",
    "lost-peer",
    "signalled",
    "left",
    "no-rendezvous",
    "nccl",
    "gpu",
    "cuda",
    "stuck",
    "killed-by-kernel",
    "killed-by-scheduler",
    "worker-lost",
    "ended-from-outside",
    "interrupted",
    "said",
]
"""``cuda`` is an error of a kernel that a later call reports; ``stuck``, a watchdog that makes no progress; ``said``, a
line that looks like an exception, without a traceback: it counts where its rank failed, or where nothing else is known.
"""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that went wrong, as the log has it."""

    kind: IncidentKind
    trouble: Trouble
    rank: int | None = None
    position: int = 0
    """Where among the incidents of all logs it stands in the order of reading."""
    attempt: int = 0
    """How often the launcher had started the ranks anew before."""
    time_ns: int = 0
    file: str = ""
    """The log, as the user named it."""
    line: int = 0
    """Of the log, counted from 1; 0 where it was not counted."""
    host: str = ""
    pid: int = 0
    type: str = ""
    """Class of an exception, or what the log calls the event."""
    message: str = ""
    frames: tuple[Frame, ...] = ()
    """Of a traceback, innermost first, libraries included."""
    mixed: bool = False
    """Lines of several ranks stand mixed without a mark, so that frames may be another rank's."""
    collective: str = ""
    """The one that it happened in, as users spell it; empty where that is not known."""
    sequence: int | None = None
    """Number of that collective in its group, as torch counts."""
    group: str = ""
    """The process group, as torch names it."""
    last_enqueued: int | None = None
    timeout_ns: int = 0
    absent: tuple[int, ...] = ()
    """Ranks that did not come, where the message names them."""
    others: tuple[int, ...] = ()
    """Further ranks that the message speaks of."""
    signal: int | None = None
    exit_code: int | None = None
    unused: tuple[str, ...] = ()
    """Names, or indices, of the parameters that it is about."""
    peer: str = ""
    """The host, or the address, of the other end of a connection."""
    process: str = ""
    """Name of the process that it is about, where the system tells it."""
    went_on: int = 0
    """How many lines that look like the job's progress its process wrote afterwards."""
    implies: str = ""
    """What to do about it, where its message says more than its kind."""
    passed_on: bool = False
    """Another part of NCCL had the error first."""
    loose: bool = False
    """It stands in the line of a logger, or without its traceback."""


class RankEnding(msgspec.Struct, frozen=True, kw_only=True):
    """How a launcher says that a rank's process ended."""

    rank: int | None = None
    local_rank: int | None = None
    pid: int = 0
    host: str = ""
    attempt: int = 0
    time_ns: int = 0
    exit_code: int = 0
    """Negative for a signal; 0 where it is not known."""
    was_ended: bool = False
    """The launcher had told it to end."""
    first: bool = False
    """The launcher noticed it first."""
    by_agent: bool = False
    """torchrun's agent reports it, which starts the ranks of its node and ends those that are left."""
    file: str = ""
    position: int = 0


class LogEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that was read in logs."""

    incidents: tuple[Incident, ...] = ()
    endings: tuple[RankEnding, ...] = ()
    ranks: tuple[int, ...] = ()
    """Ranks that wrote at least one line that was looked at."""
    world_size: int = 0
    """0 where it is not known."""
    attempts: int = 1
    finished: bool = False
    """The logs say that the job came to its end, or it went on after everything that they report."""
    endpoint: str = ""
    """Where the ranks meet, as the launcher prints it: ``host:port``."""
    dumps_doubt: str = ""
    """Why what the dumps show is not certain, where no flight recorder wrote them."""
    ordered: bool = False
    """All incidents stand in one log, so that their positions are their order in time."""
