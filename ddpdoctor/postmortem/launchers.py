"""What launchers, schedulers and the kernel print when processes end.

torchrun, mp.spawn, DeepSpeed, Lightning, Slurm, MPI, a shell, dmesg.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import Any

from ddpdoctor.finding import Trouble
from ddpdoctor.postmortem.catalogue.messages import statement_of_nccl
from ddpdoctor.postmortem.prefixes import nanoseconds
from ddpdoctor.record.streams.setup import NO_CODE, Incident, RankEnding

FAILED = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) (?:of )?local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)")
CLOSING = re.compile(r"Sending process (?P<pid>\d+) closing signal SIG(?P<signal>\w+)")
FORCED = re.compile(r"Unable to shutdown process (?P<pid>\d+) via")
TOLD_TO_END = re.compile(r"Received (?:Signals\.SIG\w+|(?P<number>\d+)) death signal, shutting down workers")
_GOT_SIGNAL = re.compile(r"Process \d+ got signal: (?:(?P<number>\d+)|(?:Signals\.)?SIG(?P<name>\w+))")
_SPAWNED = re.compile(r"-- Process (?P<rank>\d+) terminated with the following error:")
_ENDINGS = tuple(
    map(
        re.compile,
        (
            # mp.spawn, Lightning, Open MPI (which wraps its sentence; on_line joins it), Intel MPI, containers of
            # compose, pods of Kubeflow's operator
            r"process (?P<rank>\d+) terminated with signal SIG(?P<signal>\w+)",
            r"process (?P<rank>\d+) terminated with exit code (?P<code>\d+)",
            r"\[rank: (?P<rank>\d+)\] Child process with PID (?P<pid>\d+) terminated with code (?P<code>-?\d+)",
            r"process rank (?P<rank>\d+) with PID (?:(?P<pid>\d+)|\S+) on node (?P<host>\S+) "
            r"exited on signal (?P<signal>\d+)",
            r" RANK (?P<rank>\d+) PID (?P<pid>\d+) RUNNING AT (?P<host>\S+) += +"
            r"(?:KILLED BY SIGNAL: (?P<signal>\d+)|EXIT STATUS: (?P<code>\d+))",
            r"(?:^|\bPod: )(?P<host>[\w.-]+) exited with code (?P<code>\d+)",
            r"^\s*Exit Code:\s+(?P<code>\d+)",
            r"Process name: (?:\[\[\d+,\d+\],)?(?P<rank>\d+)\]?\s+Exit code:\s+(?P<code>\d+)",
            r"[Rr]ank (?P<rank>\d+) (?:\(PID (?P<pid>\d+)\) exited|crashed) with (?:exit )?code (?P<code>-?\d+)",
            r'"torchelastic\.worker\.status\.FAILED".*?"global_rank": (?P<rank>\d+).*?"worker_id": "(?P<pid>\d+)"',
            r"MPI_ABORT was invoked on rank (?P<rank>\d+) in communicator .*?(?:with errorcode (?P<code>\d+)|Proc: )",
        ),
    )
)
"""How launchers say that a process ended."""
_WORDS_OF_ENDINGS = (
    "terminated with", "exited ", "xit Code:", "srun:", "Process name: ", "MPI_ABORT", " crashed with ",
    "status.FAILED", " RUNNING AT ",
)  # fmt: skip
"""One of them is in each line with such an end: a look for a word costs a tenth of one for a pattern."""
WORDS_OF_WRAPPED = ("noticed that", "(OOM), ", "Process name: ", "MPI_ABORT was", " RUNNING AT ")
WRAPPED = re.compile(
    r"noticed that process rank \d+ .*\bexited on$|Process name: \S+$| RANK \d+ PID \d+ RUNNING AT \S+$"
    r"|MPI_ABORT was invoked on rank \d+ in communicator \S+$|memory pressure \(OOM\), .*\bat$"
)
"""The first line of two."""
_HIGHEST_SIGNAL = 31
_COMMAND = re.compile(
    r"Command '(?P<command>.*)' (?P<end>returned non-zero exit status (?P<code>\d+)"
    r"|died with <Signals\.\w+: (?P<signal>\d+)>)"
)
_LAUNCHES = re.compile(r"torch\.distributed\.(?:run|launch)|\btorchrun\b|\baccelerate\b|\bdeepspeed\b|\b[ms]pirun\b")
_OF_A_RANK = re.compile(r"'--local[-_]rank=\d+'")
_DEEPSPEED = re.compile(r"sigkill_handler\].* exits with return code = (?P<code>-?\d+)")
_SLURM_TASK = re.compile(r"srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>[\d,\-]+): (?P<what>.+?)\s*$")
_SLURM_CANCELLED = re.compile(
    r"\*\*\* (?:JOB|STEP) \S+ ON (?P<host>\S+) CANCELLED AT (?P<time>\S+)(?: DUE TO (?P<why>[A-Z ]+?))? \*\*\*"
)
_XID = re.compile(r"NVRM: Xid \((?P<gpu>[^)]*)\): (?P<number>\d+)(?:, pid='?(?P<pid>\d+)'?)?(?P<text>.*)")
_NCCL_WARN = re.compile(r"(?:(?P<host>[\w.-]+):(?P<pid>\d+)(?::\d+)? \[-?\d+\].*?)?NCCL WARN (?P<text>.*)")
OF_NCCL = "NCCL WARN "
_USAGE = re.compile(r"^\S+: error: (?P<message>.+)")
_ROW = re.compile(r"\s+(?P<key>time|host|rank|exitcode|error_file|traceback)\s+: ?(?P<value>.*)$")
_RANK = re.compile(r"(?P<rank>\d+) \((?:local_rank:? (?P<local>\d+)\))?")
_EXIT = re.compile(r"(?P<code>-?\d+) \((?:SIG\w+\), )?pid:? (?P<pid>\d+)")
"""The log may end behind the parenthesis, and those who write the table anew add the signal's name."""
_WORDS_OF_INCIDENTS = ("Xid", "*** ", "sigkill_handler", ": error: ")
XIDS_THAT_FOLLOW = frozenset({45})
"""The driver cleans up after a process that had ended."""
_OTHERS = ("srun", "sbatch", "salloc", "slurmstepd", "torchrun:", "ddpdoctor:")
"""Programs whose lines with ``error:`` are about the job, not about the arguments of a script."""
MOST_TABLE_LINES = 100_000
_WORDS = {"killed": 9, "segmentation fault": 11, "aborted": 6, "bus error": 7, "terminated": 15, "out of memory": 9}


class FailureTable:
    """The table of failures at the end of what torchrun prints."""

    def __init__(self) -> None:
        self.open = False
        self._row: dict[str, str] = {}
        self._lines = 0

    def begin(self) -> None:
        """The table comes next."""
        self.open, self._row, self._lines = True, {}, 0

    def begins_within(self, text: str) -> bool:
        """Return whether a line is the first that the log has of a table."""
        row = _ROW.match(text)
        return row is not None and row["key"] == "rank" and _RANK.match(row["value"]) is not None

    def take(self, text: str) -> Iterator[dict[str, str]]:
        """Take in a line and give out the row that is complete with it."""
        self._lines += 1
        stripped = text.strip()
        if re.fullmatch(r"\[\d+\]:", stripped) or stripped.startswith(("-----", "Root Cause")):
            yield from self.finish()
        elif row := _ROW.match(text):
            self._row[row["key"]] = row["value"].strip()
        elif stripped.startswith("=====") and self._row:
            yield from self.finish()
            self.open = False
        elif "traceback" in self._row:
            self._row["traceback"] += "\n" + text.removeprefix("  ")
        self.open = self.open and self._lines < MOST_TABLE_LINES

    def finish(self) -> Iterator[dict[str, str]]:
        """Yield the row that is open where another one begins, or the log ends."""
        if "rank" in self._row:
            yield self._row
        self._row = {}


def ending_of(row: dict[str, str]) -> RankEnding | None:
    """Return how a rank ended, by its row in the table."""
    rank, code = _RANK.match(row["rank"]), _EXIT.match(row.get("exitcode", ""))
    if rank is None:
        return None
    return RankEnding(
        rank=int(rank["rank"]),
        local_rank=int(rank["local"]) if rank["local"] else None,
        pid=int(code["pid"]) if code else 0,
        exit_code=int(code["code"]) if code else NO_CODE,
        host=row.get("host", ""),
        by_agent=True,
        time_ns=nanoseconds(row.get("time", "")),
    )


def spawned_rank(text: str) -> int | None:
    """Return the rank whose traceback follows, in the words of ``mp.spawn``."""
    match = _SPAWNED.search(text) if "-- Process" in text else None
    return int(match["rank"]) if match else None


def endings_in(text: str) -> Iterator[RankEnding]:
    """Ends of processes that a line reports."""
    if not any(word in text for word in _WORDS_OF_ENDINGS):
        return
    for pattern in _ENDINGS:
        if match := pattern.search(text):
            found = match.groupdict()
            code = -signal_number(found["signal"]) if found.get("signal") else _code(int(found.get("code") or NO_CODE))
            rank, pid = found.get("rank"), found.get("pid")
            yield RankEnding(
                rank=int(rank) if rank else None, pid=int(pid or 0), host=found.get("host") or "", exit_code=code,
            )  # fmt: skip
    if match := _SLURM_TASK.search(text):
        code = _code_of(match["what"])
        for task in _tasks(match["tasks"]):
            yield RankEnding(rank=task, host=match["host"], exit_code=code)


def incidents_in(text: str) -> Iterator[Incident]:
    """Incidents that a line of a scheduler, of the kernel, of NCCL or of a shell reports."""
    if OF_NCCL in text:
        if match := _NCCL_WARN.search(text):
            yield from _of_nccl(match)
        return
    if not any(word in text for word in _WORDS_OF_INCIDENTS):
        return
    if match := _XID.search(text):
        number = int(match["number"])
        if number not in XIDS_THAT_FOLLOW:
            yield Incident(
                kind="gpu", trouble="gpu-fault", pid=int(match["pid"] or 0), type=f"Xid {number}",
                message=f"Xid {number} on GPU {match['gpu']}{match['text']}".strip(),
            )  # fmt: skip
    elif match := _SLURM_CANCELLED.search(text):
        yield Incident(
            kind="killed-by-scheduler", trouble="killed", host=match["host"], time_ns=nanoseconds(match["time"]),
            type=(match["why"] or "cancelled").lower(), message=text.strip(),
        )  # fmt: skip
    elif match := _DEEPSPEED.search(text):
        # The command in front of it is that of the last rank, whichever failed; one whose last rank is 0 has no other.
        left = int(match["code"])
        yield Incident(
            kind="left" if left > 0 else "signalled", trouble="early-exit" if left > 0 else "killed", type="deepspeed",
            exit_code=left if left > 0 else None, signal=-left if left < 0 else None, message=text.strip(),
            rank=0 if "'--local_rank=0'" in text else None,
        )  # fmt: skip
    elif (match := _USAGE.match(text)) and not text.startswith(_OTHERS):
        # argparse ends a script with exit code 2 and without a traceback.
        old_launcher = re.search(r"unrecognized arguments:.*--local[-_]rank", text)
        trouble: Trouble = "local-rank-argument" if old_launcher else "exception"
        yield Incident(kind="raised", trouble=trouble, type="usage error", message=match["message"], exit_code=2)


def of_command(text: str, *, of_rank: bool = False) -> Incident | None:
    """Return how a launcher ended that another program had started, by what ``subprocess`` says; None for others.

    ``of_rank``: a launcher says it of one of its ranks; of which is not known, as the command is that of the last.
    """
    match = _COMMAND.search(text)
    launcher = _LAUNCHES.search(match["command"]) if match else None
    of_rank = of_rank or (match is not None and _OF_A_RANK.search(match["command"]) is not None)
    if match is None or not (launcher or of_rank):
        return None
    code, number = match["code"], match["signal"]
    return Incident(
        kind="left" if code else "signalled", trouble="early-exit" if code else "killed", type="command",
        exit_code=int(code) if code else None, signal=int(number) if number else None,
        message=f"{launcher[0] if launcher and not of_rank else 'a rank'} {match['end']}",
    )  # fmt: skip


def signal_number(name: str) -> int:
    """Return the number of a signal by its name without ``SIG``, or as digits; 0 when there is none."""
    return int(name) if name.isdigit() else int(getattr(signal, f"SIG{name}", 0))


def signalled_from_outside(kind: str, message: str) -> Incident:
    """Return that a launcher got the signal which the message of its exception names, if it names one."""
    match = _GOT_SIGNAL.search(message)
    return from_outside(signal_number(match["number"] or match["name"]) if match else None, kind, message)


def from_outside(number: int | None, kind: str, message: str) -> Incident:
    """Return that a signal came from outside the job."""
    return Incident(kind="ended-from-outside", trouble="killed", signal=number, type=kind, message=message)


def _of_nccl(match: re.Match[str]) -> Iterator[Incident]:
    text = match["text"].strip()
    found = statement_of_nccl(text)
    if found is not None and found.row.role == "noise":
        return
    host, pid = match["host"] or "", int(match["pid"] or 0)
    more: dict[str, Any] = {"host": host, "pid": pid, "type": "NCCL WARN", "message": text}
    if found is None:
        yield Incident(kind="nccl", trouble="nccl-error", **more)
    else:
        yield Incident(kind=found.row.event, trouble=found.row.trouble, **{**more, **found.fields})


def _code(number: int) -> int:
    """Return the exit code of a shell or a container, negative for the signal that it stands for."""
    return 128 - number if 128 < number <= 128 + _HIGHEST_SIGNAL else number


def _code_of(what: str) -> int:
    if match := re.search(r"exit code (\d+)", what):
        return _code(int(match[1]))
    words = what.lower().removesuffix("(core dumped)").strip()
    return -_WORDS.get(words, 0)


def _tasks(text: str) -> Iterator[int]:
    for part in text.split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            yield from range(int(low), min(int(high or low), int(low) + 100_000) + 1)
