"""The autopsy of a job that hangs now: takes the stacks of its ranks and says which one is not where the others are."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ddpdoctor.autopsy import AutopsyRequest, concluded
from ddpdoctor.diagnosis.live_stacks import whereabouts
from ddpdoctor.errors import UsageError
from ddpdoctor.examination import Examination
from ddpdoctor.launch.running_ranks import RunningRank, running_ranks
from ddpdoctor.monitor.py_spy import Look, look_at
from ddpdoctor.postmortem.read import Postmortem
from ddpdoctor.record.model import Job, Rank, RunRecord, StreamState
from ddpdoctor.record.stacks import StackDump

SSH_PATIENCE_S = 60.0
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


class Seen(msgspec.Struct, frozen=True):
    """A rank and what it did."""

    rank: RunningRank
    look: Look


def look(pids: Sequence[int]) -> list[Seen]:
    """Look at the ranks on this machine; raises UsageError when there is none, or py-spy is missing."""
    ranks = running_ranks(pids)
    looks = look_at([rank.pid for rank in ranks], [rank.directory for rank in ranks])
    return [Seen(rank, seen) for rank, seen in zip(ranks, looks, strict=True)]


def live_autopsy(request: AutopsyRequest, pids: Sequence[int], hosts: Sequence[str]) -> Examination:
    """Look at the ranks here, or on each host over ssh, and say which one the others wait for."""
    started = time.perf_counter()
    notes: list[str] = []
    if hosts:
        with ThreadPoolExecutor(max_workers=32) as pool:
            answers = list(pool.map(_on_host, hosts))
        seen = [one for answer, _ in answers for one in answer]
        notes += [problem for _, problem in answers if problem]
        if not seen:
            raise UsageError(notes[0] if notes else "no host answered")
    else:
        seen = look(pids)
    refused = {one.look.problem for one in seen if one.look.problem}
    if all(one.look.problem for one in seen):
        raise UsageError(f"no stack of the {len(seen)} ranks could be taken: {min(refused)}")
    notes += [f"rank {one.rank.rank} could not be looked at: {one.look.problem}" for one in seen if one.look.problem]
    record = record_of(seen)
    if record.job.world_size > len(seen):
        notes.append(f"{len(seen)} of {record.job.world_size} ranks were looked at: `--hosts` names the other nodes")
    read = Postmortem(record=record, processes=len(seen), notes=tuple(notes))
    examination = concluded(request, read, time.perf_counter() - started)
    if not any(finding.role == "cause" for finding in examination.findings):
        places = (*examination.notes, "no rank waits in a collective now", *whereabouts(record))
        examination = msgspec.structs.replace(examination, notes=places)
    return examination


def record_of(seen: Sequence[Seen]) -> RunRecord:
    """The record of what was seen."""
    world = max(max(one.rank.world_size, one.rank.rank + 1) for one in seen)
    now_ns = time.time_ns()
    return RunRecord(
        job=Job(kind="run", world_size=world, ranks_expected=world, ended_ns=now_ns),
        ranks=tuple(
            Rank(
                rank=one.rank.rank,
                local_rank=one.rank.local_rank,
                host=one.rank.host,
                pid=one.rank.pid,
                end="running",
                stuck=bool(one.look.frames) and not one.look.moved,
            )
            for one in seen
        ),
        stacks=tuple(
            StackDump(rank=one.rank.rank, thread="MainThread", main=True, frames=one.look.frames, time_ns=now_ns)
            for one in seen
        ),
        streams={"ranks": StreamState("complete"), "stacks": StreamState("complete")},
    )


def _on_host(host: str) -> tuple[list[Seen], str]:
    """What the ddpdoctor of another machine sees there, and what went wrong."""
    if host.startswith("-"):
        raise UsageError(f"{host!r} is no host")
    command = shlex.join(("ddpdoctor", "autopsy", "--live", "--raw"))
    try:
        done = subprocess.run(
            (*_SSH, host, command), capture_output=True, timeout=SSH_PATIENCE_S, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            last = done.stderr.decode("utf-8", "replace").strip().splitlines()[:1]
            return [], f"{host} did not answer: {last[0][:160] if last else f'exit code {done.returncode}'}"
        return msgspec.json.decode(done.stdout, type=list[Seen]), ""
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        return [], f"{host} did not answer: {type(error).__name__}"
