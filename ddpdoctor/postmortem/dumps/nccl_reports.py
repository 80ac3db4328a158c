"""Reads what NCCL itself tells of a job: the report of its RAS subsystem, and what its Inspector wrote of each rank.

``ncclras -f json`` counts the collectives that each rank of each communicator has launched, and names the ranks that it
could not reach. The Inspector writes a line for each collective that has completed. Neither knows a line of the script,
nor who waits: the counts become dumps of the last one or two collectives of each rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from ddpdoctor.postmortem.dumps.dumps import Dump, DumpError, Entry, GroupConfig
from ddpdoctor.record.streams.setup import Incident

REPORT = re.compile(rb'^\s*\{\s*"(?:nccl_version|header)"\s*:')
"""How both begin: a report of RAS, a line of the Inspector."""
RAS_DOUBT = "RAS shows one moment, at which ranks that get on differ in their counts as well: look twice"
INSPECTOR_DOUBT = "the Inspector writes collectives that have completed, at intervals of its own"
_SOME = "nccl:collective"
"""Counts by kind do not say which kind the last one was that all ranks have had."""
_Process = tuple[str, int, int]
"""Host, process and GPU, by which a process is known in all of its communicators."""


class _Status(msgspec.Struct):
    considered_dead: bool = False


class _Rank(msgspec.Struct):
    rank: int
    host: str = ""
    pid: int = 0
    cuda_dev: int = 0
    status: _Status = msgspec.field(default_factory=_Status)
    collective_counts: dict[str, int] = {}

    @property
    def process(self) -> _Process:
        return self.host, self.pid, self.cuda_dev


class _Communicator(msgspec.Struct):
    hash: str = ""
    size: int = 0
    ranks: list[_Rank] = []
    missing_ranks: list[_Rank] = []


class _Ras(msgspec.Struct):
    communicators: list[_Communicator] = []


class _Header(msgspec.Struct):
    id: str
    rank: int
    n_ranks: int


class _Writer(msgspec.Struct):
    hostname: str = ""
    pid: int = 0


class _Completed(msgspec.Struct):
    coll: str
    coll_sn: int


class _Line(msgspec.Struct):
    header: _Header
    metadata: _Writer = msgspec.field(default_factory=_Writer)
    coll_perf: _Completed | None = None


class _Told(msgspec.Struct):
    """One communicator."""

    size: int
    ranks: dict[int, _Process] = {}
    """Its ranks, by their numbers in it."""
    launched: dict[int, dict[str, int]] = {}
    """By RAS: how many of each kind."""
    completed: dict[int, tuple[int, str]] = {}
    """By the Inspector: the number and the kind of the last one."""


class NcclReports:
    """All reports of one job."""

    def __init__(self) -> None:
        self._communicators: dict[str, _Told] = {}
        self._gone: list[tuple[str, _Rank]] = []
        """Files, and the ranks that RAS did not reach."""
        self.doubt = ""
        """Why what the counts show is not certain."""

    def read(self, name: str, content: bytes) -> None:
        """Take in one file; raises DumpError."""
        try:
            if b'"communicators"' in content:
                self._add_ras(name, msgspec.json.decode(content, type=_Ras))
            else:
                decoder = msgspec.json.Decoder(_Line)
                for line in content.splitlines():
                    if line.strip():
                        self._add_line(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DumpError(f"it is no report of NCCL ({type(error).__name__})") from error

    def _add_ras(self, name: str, report: _Ras) -> None:
        self.doubt = RAS_DOUBT
        for one in report.communicators:
            told = self._communicators.setdefault(one.hash, _Told(size=one.size))
            told.ranks |= {rank.rank: rank.process for rank in (*one.ranks, *one.missing_ranks)}
            told.launched |= {rank.rank: rank.collective_counts for rank in one.ranks}
            self._gone += [(name, rank) for rank in one.missing_ranks if one.size == self._world]

    def _add_line(self, line: _Line) -> None:
        self.doubt = self.doubt or INSPECTOR_DOUBT
        header, done = line.header, line.coll_perf
        told = self._communicators.setdefault(header.id, _Told(size=header.n_ranks))
        told.ranks[header.rank] = (line.metadata.hostname, line.metadata.pid, 0)
        if done is not None and done.coll_sn >= told.completed.get(header.rank, (0, ""))[0]:
            told.completed[header.rank] = (done.coll_sn, done.coll)

    @property
    def _world(self) -> int:
        return max((told.size for told in self._communicators.values()), default=0)

    def dumps(self) -> dict[int, Dump]:
        """Return a dump for each rank of the job that is known by the largest communicator."""
        numbers = {
            process: rank
            for told in self._communicators.values()
            if told.size == self._world
            for rank, process in told.ranks.items()
        }
        found: dict[int, Dump] = {}
        for name, told in self._communicators.items():
            members = {own: numbers[process] for own, process in told.ranks.items() if process in numbers}
            entries = _of_launched(told.launched) if told.launched else _of_completed(told.completed)
            group = (name, "default_pg" if told.size == self._world else "")
            ranks = list(range(self._world)) if told.size == self._world else sorted(members.values())
            for own in entries.keys() & members.keys():
                dump = found.setdefault(members[own], Dump(rank=members[own]))
                dump.pg_config[name] = GroupConfig(name=name, ranks=ranks)
                for entry in entries[own]:
                    entry.process_group = group
                    entry.record_id = len(dump.entries)
                    dump.entries.append(entry)
        return found

    def incidents(self) -> list[Incident]:
        """Return that RAS could not reach ranks of the largest communicator."""
        return [
            Incident(
                kind="lost-peer", trouble="early-exit", type="NCCL RAS", file=name, host=rank.host, pid=rank.pid,
                absent=(rank.rank,),
                message=f"RAS could not reach rank {rank.rank} (process {rank.pid} on {rank.host})"
                + (", and takes it for dead" if rank.status.considered_dead else ""),
            )
            for name, rank in self._gone
        ]  # fmt: skip


def _of_launched(counts: Mapping[int, Mapping[str, int]]) -> dict[int, list[Entry]]:
    """Return the collectives by the counts of RAS: those of more than another rank has launched are not over."""
    kinds = sorted({kind for of_rank in counts.values() for kind in of_rank})
    least = {kind: min(of_rank.get(kind, 0) for of_rank in counts.values()) for kind in kinds}
    common = sum(least.values())
    entries: dict[int, list[Entry]] = {}
    for rank, of_rank in counts.items():
        more = {kind: of_rank.get(kind, 0) - least[kind] for kind in kinds}
        entries[rank] = [_entry(common, _SOME, over=True)] if common else []
        if ahead := max(kinds, key=lambda kind: more[kind], default=""):
            entries[rank] += [_entry(common + 1, _name_of(ahead), over=False)] if more[ahead] else []
    return entries


def _of_completed(last: Mapping[int, tuple[int, str]]) -> dict[int, list[Entry]]:
    """Return the collectives by the Inspector's last lines: a rank can be behind the others by one."""
    most = max((number for number, _ in last.values()), default=0)
    if any(number < most - 1 for number, _ in last.values()):
        # No rank completes two collectives of all ranks without this one: what it wrote last is not what it did last.
        return {}
    behind = any(number < most for number, _ in last.values())
    entries: dict[int, list[Entry]] = {}
    for rank, (number, kind) in last.items():
        entries[rank] = [_entry(most - 1 if behind else most, _SOME, over=True)]
        if behind and number == most:
            entries[rank].append(_entry(most, _name_of(kind), over=False))
    return entries


def _entry(number: int, name: str, *, over: bool) -> Entry:
    state = "completed" if over else "started"
    return Entry(collective_seq_id=number, profiling_name=name, state=state, retired=over)


def _name_of(kind: str) -> str:
    """``nccl:all_reduce`` for ``AllReduce``."""
    return "nccl:" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()
