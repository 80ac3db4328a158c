"""Tells causes and echoes that were read in logs in sentences and facts."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

from ddpdoctor.diagnosis.logs.causes import Told, user_frames
from ddpdoctor.diagnosis.wording import count, duration_text, location_of, place, rank_list, verb
from ddpdoctor.finding import Fact, Location
from ddpdoctor.record.exception_summary import headline
from ddpdoctor.record.model import RankException
from ddpdoctor.record.streams.incidents import Incident

MESSAGE_CHARACTERS = 200
FACTS_OF_RANKS = 16
"""Of more ranks than this the facts are not told one by one."""
UNUSED_SHOWN = 6
TEARDOWN = "terminate called without an active exception"


def title(told: Told) -> str:
    """Say in one sentence what happened, to whom, and where."""
    first = told.first
    match first.kind:
        case "timed-out":
            return _of_timeout(told)
        case "mismatch":
            return _of_mismatch(told)
        case "lost-peer":
            return _of_lost_peer(told)
        case "signalled":
            return f"{_who(told)} {_was(told)} killed by {signal_name(first.signal)}"
        case "left":
            return f"{_who(told)} left with exit code {first.exit_code} and without a traceback"
        case "killed-by-kernel":
            return f"the kernel killed {_whom(told)} because memory had run out"
        case "killed-by-scheduler":
            return _of_scheduler(first)
        case "worker-lost":
            how = f" by {signal_name(first.signal)}" if first.signal else ""
            return f"a loader worker of {_who(told)} {'was killed' + how if how else 'disappeared'}{_at(first)}"
        case "ended-from-outside":
            return f"the job was ended externally: its launcher received {signal_name(first.signal)}"
        case "interrupted":
            return f"{_who(told)} {_was(told)} interrupted (Ctrl-C, SIGINT){_at(first)}"
        case "gpu":
            return f"a GPU of {_who(told)} failed: {said(first)}"
        case "nccl":
            return f"NCCL failed on {_who(told)}{_at(first)}: {said(first)}"
        case "no-rendezvous":
            return f"the rendezvous failed: {said(first)}"
    if first.trouble == "unused-parameters":
        return _of_unused(told)
    if first.trouble == "out-of-memory":
        return f"{_who(told)} ran out of memory{_at(first)}"
    if first.type == "usage error":
        return f"{_who(told)} ended with a usage error: {said(first)}"
    if not first.type:
        return f"{_who(told)} raised an exception{_at(first)} whose message is not in the log"
    return (
        f"{_who(told)} raised {first.type}{_at(first)}: {said(first)}"
        if said(first)
        else f"{_who(told)} raised {first.type}{_at(first)}"
    )


def said(one: Incident) -> str:
    """Return what an exception's message says, in one line."""
    raised = RankException(time_ns=0, type=one.type, message=one.message or "")
    text = " ".join((headline(raised) or one.type).split())
    return text if len(text) <= MESSAGE_CHARACTERS else f"{text[: MESSAGE_CHARACTERS - 1]}…"


def locations(told: Told) -> tuple[Location, ...]:
    """Return the user's lines, the first incident's first."""
    found = [location_of(frame) for one in (*told.incidents, *told.behind) for frame in user_frames(one.frames)[:1]]
    return tuple(dict.fromkeys(place for place in found if place is not None))


def facts(told: Told) -> Iterator[Fact]:
    """Yield where the logs hold it, on which ranks, and what else bears on it."""
    incidents = told.incidents
    for one in incidents[:FACTS_OF_RANKS]:
        numbers: dict[str, int | float] = {}
        if one.sequence is not None:
            numbers["sequence"] = one.sequence
        if one.timeout_ns:
            numbers["timeout_s"] = one.timeout_ns / 1e9
        if one.pid:
            numbers["pid"] = one.pid
        own = user_frames(one.frames)
        yield Fact(
            text=_sentence(one),
            basis="log",
            numbers=numbers,
            rank=one.rank,
            location=location_of(own[0]) if own else None,
            stack=own,
        )
    if len(incidents) > FACTS_OF_RANKS:
        yield Fact(text=f"{count(len(incidents) - FACTS_OF_RANKS, 'more line')} say the same", basis="log")
    for one in told.behind[:4]:
        yield Fact(text=_sentence(one), basis="log", rank=one.rank)
    if len(told.attempts) > 1:
        text = f"the launcher started the ranks again, and the same happened in {count(len(told.attempts), 'attempt')}"
        yield Fact(text=text, basis="log", numbers={"attempts": len(told.attempts)})


def signal_name(number: int | None) -> str:
    """``SIGKILL``; what is known where the number is not."""
    if not number:
        return "a signal"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _sentence(one: Incident) -> str:
    who = "a rank" if one.rank is None else f"rank {one.rank}"
    where = f" on {one.host}" if one.host else ""
    log = f"{one.file}:{one.line}: " if one.line else f"{one.file}: " if one.file else ""
    if one.kind in ("signalled", "left") and one.type == "launcher":
        how = f"was killed by {signal_name(one.signal)}" if one.signal else f"left with exit code {one.exit_code}"
        return f"{log}the launcher reports that {who}{where} {how}"
    kind = f"{one.type}: " if one.type and one.type not in ("terminate", "launcher", "shell") else ""
    return f"{log}{who}{where}: {kind}{said(one)}"


def _of_timeout(told: Told) -> str:
    first = told.first
    limit = next((one.timeout_ns for one in told.incidents if one.timeout_ns), 0)
    after = f" after {duration_text(limit)}" if limit else ""
    if told.trouble in ("rank-branch", "mismatch"):
        return f"the ranks timed out{after} in different collectives: {_apart(told.incidents)}"
    names = {one.collective for one in told.incidents if one.collective}
    what = next(iter(names)) if len(names) == 1 else "a collective"
    number = next((one.sequence for one in told.incidents if one.sequence is not None), None)
    what += f" #{number:,}" if number is not None else ""
    waited = f"{_who(told)} timed out in {what}{_at(first)}{after}"
    if told.trouble == "early-exit":
        return f"a rank left early: {waited}, and no other process remained"
    return f"{waited}: {rank_list(told.absent)} did not arrive" if told.absent else waited


def _of_mismatch(told: Told) -> str:
    first = told.first
    if "same model" in first.message or "appears not to match" in first.message:
        return f"the ranks build DDP from different models{_at(first)}: {said(first)}"
    if told.trouble == "rank-branch":
        return f"the ranks were in different collectives: {_apart(told.incidents)}"
    differs = _difference(first.message)
    where = next((_at(one) for one in (*told.incidents, *told.behind) if user_frames(one.frames)), "")
    if "preamble" in first.message:
        return (
            f"the ranks' collectives{where} differ in size or dtype: gloo received a different number of bytes "
            "than expected"
        )
    return f"the ranks' collectives{where} differ{differs}"


def _difference(message: str) -> str:
    """Return what ProcessGroupWrapper lists, as ``in: Op type: BROADCAST vs ALLREDUCE``."""
    _, found, listed = message.partition("differ in the following aspects:")
    text = " ".join(listed.replace("vs ", " vs ").split())
    return f": {text[:MESSAGE_CHARACTERS]}" if found and text else ""


def _apart(incidents: Sequence[Incident]) -> str:
    by_call: dict[str, list[int]] = {}
    for one in incidents:
        by_call.setdefault(f"{one.collective or 'a collective'}{_at(one)}", []).append(
            -1 if one.rank is None else one.rank
        )
    parts = []
    for call, ranks in by_call.items():
        known = [rank for rank in ranks if rank >= 0]
        parts.append(f"{rank_list(known) if known else 'one'} in {call}")
    return "; ".join(parts)


def _of_lost_peer(told: Told) -> str:
    lost = f"{_who(told)} lost the connection to a peer{_in(told.first)}{_at(told.first)}"
    if told.role == "echo":
        return lost
    if told.trouble == "no-rendezvous":
        return f"{_who(told)} lost the store{_at(told.first)}: the process that holds it had ended"
    if told.absent:
        return f"{rank_list(told.absent)} left while {_who(told)} {_was(told)}{_in(told.first)}{_at(told.first)}"
    return f"a rank left early: {lost}"


def _of_scheduler(one: Incident) -> str:
    why = {
        "time limit": "its time limit was reached",
        "node failure": "a node failed",
        "preemption": "it was preempted",
    }
    return f"the scheduler ended the job: {why.get(one.type, 'it was cancelled')}" + (
        f" ({one.host})" if one.host else ""
    )


def _of_unused(told: Told) -> str:
    names = next((one.unused for one in told.incidents if one.unused), ())
    shown = ", ".join(names[:UNUSED_SHOWN]) + (
        f" and {len(names) - UNUSED_SHOWN} more" if len(names) > UNUSED_SHOWN else ""
    )
    what = (
        f"parameters {shown}"
        if names and not names[0].startswith("#")
        else f"parameters with the indices {shown.replace('#', '')}"
    )
    return f"on {_who(told)} {what if names else 'some parameters'} got no gradient{_at(told.first)}"


def _who(told: Told) -> str:
    if told.ranks:
        return rank_list(told.ranks)
    hosts = {one.host for one in told.incidents if one.host}
    return f"a rank on {hosts.pop()}" if len(hosts) == 1 else "a rank"


def _whom(told: Told) -> str:
    return rank_list(told.ranks) if told.ranks else "a process of the job"


def _was(told: Told) -> str:
    return verb(told.ranks or (0,), "was", "were")


def _in(one: Incident) -> str:
    return f" in {one.collective}" if one.collective else ""


def _at(one: Incident) -> str:
    own = user_frames(one.frames)
    return f" at {place(own[0])}" if own else ""
