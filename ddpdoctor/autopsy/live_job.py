"""The autopsy of a job that hangs now: takes the stacks of its ranks and says which one is not where the others are."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ddpdoctor.autopsy.dead_job import AutopsyRequest, concluded
from ddpdoctor.diagnosis.live.stacks import waits_for_a_worker, whereabouts
from ddpdoctor.errors import UsageError
from ddpdoctor.examination import Examination
from ddpdoctor.launch.processes import RunningRank, running_ranks
from ddpdoctor.monitor.processes.flight_recorders import Recording, recordings
from ddpdoctor.monitor.processes.stacks import LoaderWorker, Look, look_at, workers_of
from ddpdoctor.postmortem.dumps.dump_record import DumpBook
from ddpdoctor.postmortem.dumps.dumps import DumpError, Dumps
from ddpdoctor.postmortem.read import Postmortem
from ddpdoctor.record.model import Job, Rank, RunRecord, StreamState
from ddpdoctor.record.streams.setup import StackDump

SSH_PATIENCE_S = 60.0
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


class Seen(msgspec.Struct, frozen=True):
    """A rank and what it did."""

    rank: RunningRank
    look: Look
    recording: Recording = Recording()
    workers: tuple[LoaderWorker, ...] = ()


def look(pids: Sequence[int], *, native: bool = False) -> list[Seen]:
    """Look at the ranks on this machine; raises UsageError when there is none, or py-spy is missing."""
    ranks = running_ranks(pids)
    looks = look_at([rank.pid for rank in ranks], [rank.directory for rank in ranks], native=native)
    seen = [Seen(*one) for one in zip(ranks, looks, recordings(ranks), strict=True)]
    return [
        msgspec.structs.replace(one, workers=workers_of(one.rank.pid, one.rank.directory))
        if waits_for_a_worker(one.look.frames)
        else one
        for one in seen
    ]


def live_autopsy(
    request: AutopsyRequest, pids: Sequence[int], hosts: Sequence[str], *, native: bool = False
) -> Examination:
    """Look at the ranks here, or on each host over ssh, and say which one the others wait for."""
    started = time.perf_counter()
    notes: list[str] = []
    if hosts:
        with ThreadPoolExecutor(max_workers=32) as pool:
            answers = list(pool.map(lambda host: _on_host(host, native=native), hosts))
        seen = [one for answer, _ in answers for one in answer]
        notes += [problem for _, problem in answers if problem]
        if not seen:
            raise UsageError(notes[0] if notes else "no host answered")
    else:
        seen = look(pids, native=native)
    refused = {one.look.problem for one in seen if one.look.problem}
    if all(one.look.problem for one in seen):
        raise UsageError(f"no stack of the {len(seen)} ranks could be taken: {min(refused)}")
    notes += [f"rank {one.rank.rank} could not be examined: {one.look.problem}" for one in seen if one.look.problem]
    unread = sorted({one.look.native_problem for one in seen if one.look.native_problem})
    notes += [f"C++ stacks could not be read: {problem}" for problem in unread]
    launchers = {(one.rank.host, one.rank.launcher) for one in seen if one.rank.launcher}
    if pids and len(launchers) == 1 and not launchers & {(one.rank.host, pid) for one in seen for pid in pids}:
        notes.append(f"the launcher of these ranks is process {next(iter(launchers))[1]}")
    record, recorded = with_recordings(record_of(seen), seen)
    notes += recorded
    if record.job.world_size > len(seen):
        notes.append(f"{len(seen)} of {record.job.world_size} ranks were examined: pass the other nodes with `--hosts`")
    read = Postmortem(record=record, processes=len(seen), dumps=len(record.collectives), notes=tuple(notes))
    examination = concluded(request, read, time.perf_counter() - started)
    if not any(finding.role == "cause" for finding in examination.findings):
        places = (*examination.notes, "no rank is waiting in a collective now", *whereabouts(record))
        examination = msgspec.structs.replace(examination, notes=places)
    return examination


def record_of(seen: Sequence[Seen]) -> RunRecord:
    """Return the record of what was seen."""
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
            StackDump(
                rank=one.rank.rank,
                thread="MainThread",
                main=True,
                frames=one.look.frames,
                native=one.look.native,
                time_ns=now_ns,
            )
            for one in seen
        )
        + tuple(worker.dump(one.rank.rank, now_ns) for one in seen for worker in one.workers),
        streams={"ranks": StreamState("complete"), "stacks": StreamState("complete")},
    )


def with_recordings(record: RunRecord, seen: Sequence[Seen]) -> tuple[RunRecord, list[str]]:
    """Add what the flight recorders say, and say in sentences which ones should have and did not."""
    dumps, book, notes = Dumps(), DumpBook(), []
    for one in seen:
        problem = one.recording.problem
        if one.recording.content:
            try:
                book.add(one.rank.rank, dumps.read(one.recording.content)[0])
            except DumpError as error:
                problem = f"its flight recorder cannot be used: {error}"
        if problem:
            notes.append(f"rank {one.rank.rank}: {problem}")
    if not book.ranks:
        return record, notes
    # That a rank stands still is known from its stacks; a recorder shows only that it is in no collective.
    stuck = {rank.rank for rank in record.ranks if rank.stuck}
    found = book.into(record, record.job.ended_ns)
    ranks = tuple(msgspec.structs.replace(rank, stuck=rank.rank in stuck) for rank in found.ranks)
    return msgspec.structs.replace(found, ranks=ranks, job=record.job), notes


def _on_host(host: str, *, native: bool) -> tuple[list[Seen], str]:
    """Return what the ddpdoctor of another machine sees there, and what went wrong."""
    if host.startswith("-"):
        raise UsageError(f"{host!r} is not a host name")
    command = shlex.join(("ddpdoctor", "autopsy", "--live", "--raw", *(("--native",) if native else ())))
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
