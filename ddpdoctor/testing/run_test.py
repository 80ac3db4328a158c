"""Runs one test on its ranks: hands it out, watches it, ends it, and collects what each rank says of it.

Stdlib only: what watches is imported once a test lasts, or is over.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.probe.free_port import free_port
from ddpdoctor.testing import ranks
from ddpdoctor.testing.ranks import Body
from ddpdoctor.testing.warm_ranks import WarmRank, WarmRanks, rank_environment

if TYPE_CHECKING:
    from ddpdoctor.testing.verdict import JudgedRanks

LOOK_EVERY_S = 0.1
LOOK_AFTER_S = 0.3
"""No one looks at a test that is over before."""
AFTER_A_FAILURE_S = 5.0
"""Time for the other ranks to end, or to stand still, once one has failed."""
_GONE_WITHIN_S = 3.0


@dataclass
class RankEnd:
    """How the body ended on one rank."""

    rank: int
    result: dict[str, Any] | None = None
    """What the rank says; None where it could not."""
    status: int | None = None
    """Exit code of its process, negative for a signal, where it ended before it could say anything."""
    pid: int = 0
    is_over: bool = False
    output: dict[str, str] = field(default_factory=dict)
    """What it wrote to ``out`` and ``err``."""


@dataclass
class TestEnd:
    """How a test ended."""

    __test__ = False
    ranks: list[RankEnd]
    stopped: str = ""
    """Why it was ended before all ranks had: ``proof``, ``time-limit``, or ``rank-failed``."""
    verdict: str = ""
    """What is wrong between the ranks, in one line; empty where nothing is known to be."""
    account: str = ""
    """The same at length, with lines and stacks."""
    quits: bool = False
    """The user has left the debugger for good."""
    debugged: bool = False


def run_test(warm: WarmRanks, body: Body, lend_terminal: Callable[[socket.socket], bool]) -> TestEnd:
    """Run a test, at most for its time limit; none of its processes is left, whatever happens.

    ``lend_terminal`` gives the terminal to a rank until it gives it back; whether the user wants no more tests. Raises
    RanksFailedToStart.
    """
    processes = warm.of(body.device, body.nproc)
    directory = Path(tempfile.mkdtemp(dir=warm.directory))
    try:
        end = TestEnd([RankEnd(rank) for rank in range(body.nproc)])
        run = _Run(directory, body, warm, processes, lend_terminal, end)
        try:
            return run.to_its_end()
        finally:
            run.end_all()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass
class _Run:
    _directory: Path
    _body: Body
    _warm: WarmRanks
    _processes: list[WarmRank]
    _lend_terminal: Callable[[socket.socket], bool]
    _end: TestEnd
    _talks: dict[int, socket.socket] = field(default_factory=dict)
    _in_place: set[int] = field(default_factory=set)
    """Ranks whose warm process runs the body itself, and is used up by it."""
    _judged: JudgedRanks | None = None
    _ending: bool = False
    """What ends now does so because it was told to."""
    _started_s: float = 0.0
    _lent_s: float = 0.0
    """How long ranks had the terminal: it does not count."""

    def to_its_end(self) -> TestEnd:
        """Start, watch, and collect."""
        self._start()
        self._watch()
        if self._end.stopped or self._is_suspicious():
            self._tell()
        for rank in self._end.ranks:
            for stream in ("out", "err"):
                path = self._directory / ranks.OUTPUT_FILE.format(rank.rank, stream)
                if path.exists():
                    rank.output[stream] = path.read_text(encoding="utf-8", errors="replace")
            self._take_in_coverage(rank.rank)
        return self._end

    def end_all(self) -> None:
        """Have every rank ended: those that are over by themselves, others by force."""
        self._ending = True
        for rank, talk in self._talks.items():
            if self._end.ranks[rank].is_over and not self._end.stopped:
                try:
                    talk.send(b"end")
                except OSError:
                    pass
        deadline_s = time.monotonic() + _GONE_WITHIN_S
        for rank, process in enumerate(self._processes):
            if rank in self._in_place:
                self._warm.discard(process)
            elif self._end.ranks[rank].status is None and self._end.ranks[rank].pid:
                self._await_gone(rank, process, deadline_s)
        for talk in self._talks.values():
            talk.close()
        if self._judged is not None:
            self._judged.close()

    def _await_gone(self, rank: int, process: WarmRank, deadline_s: float) -> None:
        """Wait for the word that the fork is gone, after it is killed where it is not over."""
        try:
            if not self._end.ranks[rank].is_over or self._end.stopped:
                process.ask(do="end")
            while self._end.ranks[rank].status is None:
                if not select.select([process.control], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                    process.ask(do="end")
                    if not select.select([process.control], [], [], _GONE_WITHIN_S)[0]:
                        raise OSError("it does not answer")
                self._hear(rank, process)
        except OSError:
            self._warm.discard(process)

    def _start(self) -> None:
        body = self._body
        # For a body that makes a process group itself.
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        plan = {
            "version": 1,
            "kind": "rehearsal",
            "project_root": body.root,
            "supervisor_pid": os.getpid(),
            "full": True,
            "device": body.device,
            "threads_chosen": True,
            "job": {"started_ns": time.time_ns()},
        }
        test = {
            **{name: value for name, value in vars(body).items() if name != "values"},
            "environment": {"GLOO_SOCKET_IFNAME": "lo", **rank_environment(), **meeting},
            "directory": os.getcwd(),
            "path": sys.path,
            "plan": plan,
        }
        (self._directory / ranks.TEST_FILE).write_text(json.dumps(test))
        (self._directory / ranks.VALUES_FILE).write_bytes(body.values)
        self._started_s = time.monotonic()
        for rank, process in enumerate(self._processes):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._talks[rank] = ours
                process.ask([theirs.fileno()], do="run", directory=str(self._directory), rank=rank)

    def _watch(self) -> None:
        """Listen to the ranks until all are over, or there is a reason to end them."""
        by_control = {process.control: rank for rank, process in enumerate(self._processes)}
        by_talk = {talk: rank for rank, talk in self._talks.items()}
        looked_s = failed_s = 0.0
        while not all(rank.is_over for rank in self._end.ranks):
            heard, _, _ = select.select([*by_control, *by_talk], [], [], LOOK_EVERY_S)
            for one in heard:
                if one in by_control:
                    self._hear(by_control[one], self._processes[by_control[one]])
                elif not self._hear_talk(by_talk[one], one):
                    del by_talk[one]
            for control, rank in list(by_control.items()):
                if not self._processes[rank].is_alive():
                    self._end.ranks[rank].status = self._processes[rank].exit_status()
                    self._end.ranks[rank].is_over = True
                    del by_control[control]
            now_s = time.monotonic()
            spent_s = now_s - self._started_s - self._lent_s
            if self._has_failed():
                failed_s = failed_s or now_s
            if spent_s > self._body.timeout_s:
                self._end.stopped = "time-limit"
                return
            if failed_s and now_s - failed_s > AFTER_A_FAILURE_S:
                self._end.stopped = "rank-failed"
                return
            if spent_s > LOOK_AFTER_S and now_s - looked_s >= LOOK_EVERY_S:
                looked_s = now_s
                deadline_ns = time.time_ns() + int((self._body.timeout_s - spent_s) * 1e9)
                if self._eyes().proves(deadline_ns, self._statuses()):
                    self._end.stopped = "proof"
                    return

    def _hear(self, rank: int, process: WarmRank) -> None:
        """Take in what a warm process says of its rank."""
        end = self._end.ranks[rank]
        content = process.control.recv(ranks.MESSAGE_BYTES)
        if not content:
            end.is_over = True
            end.status = process.exit_status() or 0
            return
        message = json.loads(content)
        if "error" in message:
            end.result = {"outcome": "failed", "echo": False, "text": message["error"], "warnings": []}
            last = next((line for line in reversed(message["error"].splitlines()) if line.strip()), "")
            end.result["reason"] = f"the test's modules cannot be imported on the rank: {last}"
            end.is_over = True
        elif "started" in message:
            end.pid = int(message["started"])
            if not message["forked"]:
                self._in_place.add(rank)
        elif "gone" in message:
            end.status = int(message["status"])
            end.is_over |= not self._ending

    def _hear_talk(self, rank: int, talk: socket.socket) -> bool:
        """Take in what a rank says itself; False where it says no more."""
        try:
            content = talk.recv(ranks.MESSAGE_BYTES)
        except OSError:
            content = b""
        if content == ranks.DONE:
            end = self._end.ranks[rank]
            end.result = pickle.loads((self._directory / ranks.RESULT_FILE.format(rank)).read_bytes())
            end.is_over = True
        elif content == ranks.DEBUG:
            began_s = time.monotonic()
            self._end.debugged = True
            self._end.quits |= self._lend_terminal(talk)
            self._lent_s += time.monotonic() - began_s
        return bool(content)

    def _has_failed(self) -> bool:
        return any(
            rank.is_over and (rank.result is None or rank.result["outcome"] == "failed") for rank in self._end.ranks
        )

    def _is_suspicious(self) -> bool:
        """Return whether the ranks, all of which are over, did something that is wrong between them."""
        if all(rank.result is not None and rank.result["outcome"] in ("skipped", "exit") for rank in self._end.ranks):
            return False
        return self._eyes().is_suspicious(self._statuses())

    def _eyes(self) -> JudgedRanks:
        if self._judged is None:
            from ddpdoctor.testing.verdict import JudgedRanks

            self._judged = JudgedRanks(self._directory, self._body)
        return self._judged

    def _tell(self) -> None:
        self._end.verdict, self._end.account = self._eyes().texts(self._end.stopped, self._statuses())

    def _statuses(self) -> dict[int, int]:
        return {rank.pid: rank.status for rank in self._end.ranks if rank.status is not None}

    def _take_in_coverage(self, rank: int) -> None:
        path = self._directory / ranks.COVERAGE_FILE.format(rank)
        if not self._body.coverage or not path.exists():
            return
        import coverage

        current = coverage.Coverage.current()
        if current is None:
            return
        measured = coverage.CoverageData(str(path))
        measured.read()
        files = measured.measured_files()
        # Not `update`: what it takes in does not count for the hash in the file's name (coverage 7.17), and pytest-cov
        # takes two workers' files of one hash for copies. Added lines do, and they get the context of the test.
        data = current.get_data()
        if measured.has_arcs():
            data.add_arcs({file: measured.arcs(file) or () for file in files})
        else:
            data.add_lines({file: measured.lines(file) or () for file in files})
        data.add_file_tracers({file: name for file in files if (name := measured.file_tracer(file))})
