"""Finds the ranks of incidents and of ended processes, where a log shows them only indirectly."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from ddpdoctor.finding import Trouble
from ddpdoctor.record.streams.setup import Incident, RankEnding

_BY_EXCEPTION = frozenset(
    {
        "raised", "timed-out", "stuck", "mismatch", "lost-peer", "nccl", "worker-lost", "no-rendezvous", "gpu", "cuda",
        "interrupted",
    }
)  # fmt: skip
"""Kinds that end a process by an exception, with a positive exit code …"""
_ABORTS = frozenset({"timed-out", "stuck", "mismatch", "nccl", "lost-peer", "gpu", "cuda"})
"""… and those in which torch's C++ side ends it by SIGABRT."""
SIGABRT, SIGBUS, SIGKILL, SIGTERM = 6, 7, 9, 15
_SECOND_NS = 1_000_000_000


_COUNTED = frozenset({"rank", "local_rank"})
"""Fields that are known where they are 0."""


def endings_of(told: Iterable[RankEnding], heard: Collection[int] = ()) -> tuple[RankEnding, ...]:
    """Join what the launcher said of one process at several places; ranks that are missing follow from local ranks.

    ``heard`` are ranks that write, which show the first rank of a later node.
    """
    by_process: dict[tuple[str, int], list[RankEnding]] = {}
    for number, one in enumerate(told):
        key = ("rank", one.rank) if one.rank is not None else ("line", number)
        key = ("pid", one.pid) if one.pid else key
        by_process.setdefault(key, []).append(one)
    joined = [_joined(group) for group in by_process.values()]
    ranks = {ending.rank for ending in joined if ending.rank is not None}
    several_nodes = len({ending.host for ending in joined if ending.host}) > 1
    known = {ending.pid: ending.local_rank for ending in joined if ending.pid and ending.local_rank is not None}
    guessed = {} if several_nodes else _by_order(known, [ending.pid for ending in joined if ending.pid])
    found: dict[object, RankEnding] = {}
    first = _first_rank({*known.values(), *guessed.values()}, len({ending.pid for ending in joined}), heard)
    for ending in joined:
        rank = ending.rank
        if rank is None and not several_nodes and first is not None:
            rank = ending.local_rank if ending.local_rank is not None else guessed.get(ending.pid)
            rank = None if rank is None or rank + first in ranks else rank + first
        who = ("rank", rank) if rank is not None else ("other", ending.pid or ending.position)
        found[who] = _joined([*filter(None, [found.get(who)]), replace(ending, rank=rank)])
    return _with_those_ended_after(tuple(found.values()))


def _with_those_ended_after(endings: tuple[RankEnding, ...]) -> tuple[RankEnding, ...]:
    """Mark those that torchrun's agent ended: with SIGTERM when a rank of its node has failed, and 30 s later with
    SIGKILL whoever is still there. The times of its table are whole seconds.
    """
    first_ns: dict[str, int] = {}
    for one in endings:
        if one.by_agent and one.exit_code and one.time_ns:
            first_ns[one.host] = min(one.time_ns, first_ns.get(one.host, one.time_ns))
    return tuple(
        replace(one, was_ended=True)
        if -one.exit_code in (SIGTERM, SIGKILL) and one.time_ns > first_ns.get(one.host, one.time_ns) + _SECOND_NS
        else one
        for one in endings
    )


def _first_rank(local_ranks: Collection[int], processes: int, heard: Collection[int]) -> int | None:
    """Return the rank of a node's first process; None where the ranks that write do not fit any."""
    if not heard or not local_ranks or not set(local_ranks).isdisjoint(heard):
        return 0
    low, high = min(heard), max(heard)
    if high - low + 1 == len(set(heard)) > max(local_ranks):
        return low
    # Nodes have as many ranks each, so the first of one is a multiple of their number.
    first = low // processes * processes
    return first if high < first + processes else None


def with_ranks(incidents: Sequence[Incident], endings: Sequence[RankEnding]) -> tuple[Incident, ...]:
    """Incidents with the rank that remains for them, where the pid or the way in which ranks ended leaves one only."""
    pids = {ending.pid: ending.rank for ending in endings if ending.pid}
    known = [
        incident if incident.rank is not None or not incident.pid else replace(incident, rank=pids.get(incident.pid))
        for incident in incidents
    ]
    taken = {incident.rank for incident in known if incident.kind in _BY_EXCEPTION}
    left = [ending.rank for ending in endings if ending.exit_code > 0 and ending.rank not in taken]
    aborted = [ending.rank for ending in endings if ending.exit_code == -SIGABRT]
    loose = [one for one in known if one.rank is None and one.kind in _BY_EXCEPTION and one.frames]
    native = {one.message for one in known if one.rank is None and one.kind in _ABORTS and not one.frames}
    everyone = [ending.rank for ending in endings if ending.rank is not None]
    likeness = {
        (one.type, one.message.partition("\n")[0], () if one.mixed else one.frames, one.collective) for one in loose
    }
    alike = len(likeness) == 1 and len(loose) > 1
    # As many equal tracebacks as ranks that failed, or as there are at all: one is each one's.
    shared = next((ranks for ranks in (left, everyone) if alike and len(ranks) == len(loose)), [])
    unassigned = list(shared)
    found = []
    for incident in known:
        if unassigned and incident in loose:
            incident = replace(incident, rank=unassigned.pop(0))
        elif incident.rank is None and len(left) == 1 and loose == [incident]:
            incident = replace(incident, rank=left[0])
        elif incident.rank is None and incident.message in native and not incident.frames and len(aborted) == 1:
            incident = replace(incident, rank=aborted[0])
        elif incident.rank is None and (incident.kind in _OF_A_DEVICE or incident.trouble == "out-of-memory"):
            incident = replace(incident, rank=_repeated_by(incident, known))
        elif incident.rank is None and incident.kind == "signalled" and incident.signal:
            same = [ending.rank for ending in endings if ending.exit_code == -incident.signal]
            incident = replace(incident, rank=same[0]) if len(same) == 1 else incident
        found.append(incident)
    return tuple(found)


_OF_A_DEVICE = frozenset({"gpu", "cuda"})
_LEAST_REPEATED = 20
"""Characters of a message that are said by chance alike."""


def _repeated_by(one: Incident, incidents: Sequence[Incident]) -> int | None:
    """Return the only rank that says the same of its device once more: its watchdog, or whoever catches the error."""
    said = one.message.partition("\n")[0].removeprefix(f"{one.type}: ")
    ranks = {other.rank for other in incidents if other.rank is not None and said in other.message}
    return next(iter(ranks)) if len(ranks) == 1 and len(said) >= _LEAST_REPEATED else None


def unexplained(endings: Sequence[RankEnding], incidents: Sequence[Incident]) -> tuple[Incident, ...]:
    """Ends of ranks that no incident accounts for: signals, and exit codes without an exception."""
    found = []
    spoken = {incident.rank for incident in incidents if incident.rank is not None and incident.kind != "signalled"}
    loose = [one for one in incidents if one.rank is None and one.kind in _BY_EXCEPTION]
    silent = [ending for ending in endings if ending.exit_code > 0 and ending.rank not in spoken]
    aborts = any(one.rank is None and one.kind in _ABORTS and not one.frames for one in incidents)
    for ending in endings:
        if ending.was_ended or not ending.exit_code:
            continue
        if ending.exit_code < 0:
            number = -ending.exit_code
            accounted = ending.rank in spoken and number in (SIGABRT, SIGTERM)
            if accounted or (number == SIGABRT and aborts):
                continue
            found.append(_incident("signalled", "killed", ending, signal=number))
        elif ending in silent and len(silent) > len(loose):
            found.append(_incident("left", "early-exit", ending, exit_code=ending.exit_code))
    return tuple(found)


def _incident(kind: str, trouble: Trouble, ending: RankEnding, **more: int) -> Incident:
    return msgspec.convert(
        {
            "kind": kind, "trouble": trouble, "rank": ending.rank, "pid": ending.pid, "host": ending.host, **more,
            "position": ending.position, "file": ending.file, "line": ending.line, "type": "launcher",
            "attempt": ending.attempt,
        },
        Incident,
    )  # fmt: skip


def _joined(group: Sequence[RankEnding]) -> RankEnding:
    """One process: of each field what was said first."""
    said: dict[str, Any] = {
        name: value
        for one in reversed(group)
        for name, value in asdict(one).items()
        if value or (name in _COUNTED and value is not None)
    }
    return RankEnding(**{**said, "time_ns": min((one.time_ns for one in group if one.time_ns), default=0)})


def _by_order(known: dict[int, int], pids: list[int]) -> dict[int, int]:
    """Local ranks by the order of process ids, in which a launcher starts them, where those that are known fit."""
    ordered = sorted(set(pids))
    guessed = {pid: place for place, pid in enumerate(ordered)}
    return guessed if known and all(guessed[pid] == local for pid, local in known.items()) else {}
