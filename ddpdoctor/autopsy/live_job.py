"""The autopsy of a job that hangs now: takes the stacks of its ranks and says which one is not where the others are."""

from __future__ import annotations

import http.client
import os
import shlex
import socket
import stat
import struct
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ddpdoctor.autopsy.dead_job import AutopsyRequest, concluded
from ddpdoctor.diagnosis.stacks import waits_for_a_worker, whereabouts
from ddpdoctor.errors import UsageError
from ddpdoctor.examination import Examination
from ddpdoctor.files.untrusted import read_start
from ddpdoctor.launch.processes import RunningRank, running_ranks
from ddpdoctor.monitor.processes.stacks import LoaderWorker, Look, look_at, workers_of
from ddpdoctor.postmortem.dumps.dump_record import DumpBook
from ddpdoctor.postmortem.dumps.dumps import DumpError, Dumps
from ddpdoctor.postmortem.read import Postmortem
from ddpdoctor.record.model import Job, Rank, RunRecord, StreamState
from ddpdoctor.record.streams.setup import StackDump

PATIENCE_S = 2.0
PIPE_PATIENCE_S = 4.0
"""torch 2.8 looks at the pipe once a second, and a dump of 2,000 entries takes up to one."""
LARGEST_BYTES = 64 << 20
_HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")
_VALIDATE, _GET, _CHECK = 0, 3, 5
_MAGIC = 0x3C85F7CE
"""Requests of torch's TCPStore, alike from torch 2.1 to 2.13."""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What the flight recorder of one rank holds."""

    content: bytes = b""
    """A dump, as JSON or a pickle; empty where there is no way to it."""
    problem: str = ""
    """Why a way that should be there led nowhere, as a clause."""


def recordings(ranks: Sequence[RunningRank]) -> list[Recording]:
    """Return the recording of each rank, all of them asked at once."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        return list(pool.map(_recording, ranks))


def _recording(rank: RunningRank) -> Recording:
    try:
        if path := rank.settings.get("TORCH_WORKER_SERVER_SOCKET"):
            return _of_server(_UnixConnection(path))
        if port := _debug_port(rank):
            return _of_server(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S))
        if stem := rank.settings.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE"):
            return _of_pipe(Path(f"{stem}{rank.rank}.pipe"), rank)
    except (OSError, http.client.HTTPException, struct.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Recording(problem=f"its flight recorder did not answer: {reason}")
    return Recording()


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket of the file system."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(self._path)


def _of_server(connection: http.client.HTTPConnection) -> Recording:
    """Ask for NCCL's recorder and for that of the other backends; a CPU build has the second alone."""
    best = b""
    try:
        for handler in _HANDLERS:
            connection.request("POST", f"/handler/{handler}")
            answer = connection.getresponse()
            content = answer.read(LARGEST_BYTES + 1)
            if answer.status == http.client.OK and len(content) <= LARGEST_BYTES:
                best = max(best, content, key=lambda one: (b'"record_id"' in one, len(one)))
    finally:
        connection.close()
    return Recording(content=best) if best else Recording(problem="its server has no flight recorder")


def _debug_port(rank: RunningRank) -> int | None:
    """Return the port of the rank's own debug server, if the job's store names one on which the rank listens."""
    address, port = rank.settings.get("MASTER_ADDR", ""), rank.settings.get("MASTER_PORT", "")
    listens = _open_ports(rank.pid) - ({int(port)} if port.isdecimal() else set())
    if not address or not port.isdecimal() or not listens:
        return None
    try:
        named = _ask_store(address, int(port), f"/debug_server/rank{rank.rank}")
    except OSError:
        return None  # The store is gone, or no TCPStore: nothing names a server.
    found = urlsplit(named.decode("utf-8", "replace")).port if named else None
    return found if found in listens else None


def _open_ports(pid: int) -> set[int]:
    """Ports on which a process listens for everyone, as a debug server and a store do, and gloo does not."""
    import psutil

    try:
        sockets = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return set()
    return {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr.ip in ("::", "0.0.0.0")}


def _ask_store(address: str, port: int, key: str) -> bytes:
    """Return the value of a key in a TCPStore, if it has one; the store is not made to wait for it."""
    name = struct.pack("=Q", len(key)) + key.encode()
    with socket.create_connection((address, port), timeout=PATIENCE_S) as store:
        store.sendall(struct.pack("=BI", _VALIDATE, _MAGIC) + struct.pack("=BQ", _CHECK, 1) + name)
        if _received(store, 1) != b"\0":
            return b""
        store.sendall(struct.pack("=B", _GET) + name)
        (size,) = struct.unpack("=Q", _received(store, 8))
        return _received(store, size) if size <= 4_096 else b""


def _received(store: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        piece = store.recv(size - len(content))
        if not piece:
            raise OSError("the store closed the connection")
        content += piece
    return content


def _of_pipe(pipe: Path, rank: RunningRank) -> Recording:
    """Have NCCL write a dump, unless one would be overwritten: that is then what is read, if this job wrote it."""
    if not stat.S_ISFIFO(pipe.stat().st_mode):
        return Recording(problem=f"{pipe} is not a pipe")
    places = [Path(f"{stem}{rank.rank}") for stem in _stems(rank)]
    before = [place for place in places if place.exists()]
    if before:
        newest = max(before, key=lambda place: place.stat().st_mtime)
        if newest.stat().st_mtime < _born(rank.pid):
            return Recording(problem=f"{newest}, of an earlier job, is in the place of its dump: move it away")
        return Recording(content=_whole(newest))
    descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)
    limit = time.monotonic() + PIPE_PATIENCE_S
    size = -1
    while time.monotonic() < limit:
        written = next((place for place in places if place.exists()), None)
        if written is not None and 0 < written.stat().st_size == size:
            return Recording(content=_whole(written))
        size = written.stat().st_size if written is not None else -1
        time.sleep(0.1)
    return Recording(problem=f"it wrote no dump after a request on {pipe}")


def _stems(rank: RunningRank) -> tuple[str, ...]:
    """Return where torch writes a dump: as it is set, or where it does by default from 2.9 on and did before."""
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        if rank.settings.get(name):
            return (rank.settings[name],)
    cache = rank.settings.get("XDG_CACHE_HOME") or f"{rank.settings.get('HOME', '')}/.cache"
    return (f"{cache}/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_")


def _whole(path: Path) -> bytes:
    content = read_start(path, LARGEST_BYTES + 1)
    return content if len(content) <= LARGEST_BYTES else b""


def _born(pid: int) -> float:
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


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
                book.add(one.rank.rank, dumps.read(one.recording.content))
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
