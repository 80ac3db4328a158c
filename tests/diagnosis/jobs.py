"""Builds records of small jobs by hand, one event at a time; every event takes one millisecond."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from ddpdoctor.finding import Frame
from ddpdoctor.record.model import STREAMS, Job, Rank, RankEnd, RankException, RunRecord, Site, StreamState
from ddpdoctor.record.streams.collectives import CollectiveTrack, Group, Signature, Wait

SCRIPT = "/job/train.py"
MILLISECOND_NS = 1_000_000
COLUMNS = ("group", "sequence", "signature", "site", "step", "forward_site", "started_ns", "completed_ns")


class JobBuilder:
    """A job under construction; ``record()`` gives what is known of it so far."""

    def __init__(self, ranks: int = 2, backend: str = "gloo", **job: Any) -> None:
        self.ranks = tuple(range(ranks))
        self.now_ns = 1_000 * MILLISECOND_NS
        self.sites: list[Site] = []
        self.signatures: list[Signature] = []
        self.groups = [Group(ranks=self.ranks, backend=backend)]
        self.columns: dict[int, dict[str, array[int]]] = {
            rank: {name: array("q") for name in COLUMNS} for rank in self.ranks
        }
        self.steps = dict.fromkeys(self.ranks, (0, -1))
        self.of_rank: dict[int, dict[str, Any]] = {rank: {"end": "running"} for rank in self.ranks}
        self.waits: list[Wait] = []
        self.job: dict[str, Any] = {"kind": "rehearsal", "script": SCRIPT, "world_size": ranks, **job}
        self.streams: dict[str, Any] = {}

    def tick(self, milliseconds: int = 1) -> int:
        """Let time pass."""
        self.now_ns += milliseconds * MILLISECOND_NS
        return self.now_ns

    def site(self, line: int, *callers: int, function: str = "train", file: str = SCRIPT) -> int:
        """Index of a call chain: the line, then the lines of its callers."""
        frames = [Frame(file, line, function), *(Frame(SCRIPT, caller, "main") for caller in callers)]
        site = Site(tuple(frames))
        if site not in self.sites:
            self.sites.append(site)
        return self.sites.index(site)

    def group(self, *ranks: int, backend: str = "gloo") -> int:
        """Make a process group and return its index."""
        self.groups.append(Group(ranks=ranks, backend=backend))
        return len(self.groups) - 1

    def step(self, ranks: int | Iterable[int], step: int, line: int = 40) -> None:
        """Let ranks run a training forward at a line: the n-th with this call chain."""
        for rank in _ranks(ranks):
            self.steps[rank] = (step, self.site(line))

    def call(
        self,
        ranks: int | Iterable[int],
        kind: str,
        line: int,
        numel: int = 1,
        *callers: int,
        group: int = 0,
        completed: bool = True,
        **signature: Any,
    ) -> None:
        """Let ranks start a collective at a line."""
        fields = {"dtype": "float32", "size_bytes": 4 * numel, **signature}
        entry = Signature(kind=kind, numels=(numel,), **fields)
        if entry not in self.signatures:
            self.signatures.append(entry)
        for rank in _ranks(ranks):
            columns, (step, forward_site) = self.columns[rank], self.steps[rank]
            values = {
                "group": group,
                "sequence": columns["group"].count(group),
                "signature": self.signatures.index(entry),
                "site": self.site(line, *callers),
                "step": step,
                "forward_site": forward_site,
                "started_ns": self.tick(),
                "completed_ns": self.tick() if completed else 0,
            }
            for name in COLUMNS:
                columns[name].append(values[name])

    def reduce_gradients(self, ranks: int | Iterable[int], line: int = 50, numel: int = 100) -> None:
        """Let ranks reduce a gradient bucket of DDP in backward at a line."""
        self.call(ranks, "all_reduce", line, numel, origin="ddp-backward", reduce_op="sum")

    def wait_in_last(self, *ranks: int) -> None:
        """Let ranks hang in the collective that they started last."""
        for rank in ranks:
            self.columns[rank]["completed_ns"][-1] = 0
            self.of_rank[rank]["waiting_in"] = len(self.columns[rank]["group"]) - 1

    def wait_in_store(self, kind: Any, line: int, rank: int, *members: int) -> None:
        """Let a rank hang in the store."""
        self.waits.append(Wait(rank=rank, kind=kind, ranks=members, site=self.site(line), started_ns=self.tick()))

    def leave(self, rank: int, end: RankEnd, **fields: Any) -> None:
        """Let a rank end."""
        self.of_rank[rank].update(end=end, ended_ns=self.tick(), **fields)

    def fail(self, rank: int, type_: str, line: int, message: str = "bad", *, communication: bool = False) -> None:
        """Let a rank end by an exception."""
        raised = RankException(
            time_ns=self.tick(),
            type=type_,
            message=message,
            frames=(Frame(SCRIPT, line, "train"),),
            communication=communication,
        )
        self.leave(rank, "raised", exceptions=(raised,), exit_code=1)

    def track(self, rank: int) -> CollectiveTrack:
        """The collectives of one rank, copied, so that the job can go on."""
        return CollectiveTrack(rank=rank, **{name: array("q", values) for name, values in self.columns[rank].items()})

    def record(self, **streams: Any) -> RunRecord:
        """What is known now; streams given here replace nothing that was built."""
        job = {"ended_ns": self.now_ns, "ranks_expected": len(self.ranks), "ranks_reported": self.ranks, **self.job}
        return RunRecord(
            job=Job(**job),
            sites=tuple(self.sites),
            signatures=tuple(self.signatures),
            streams={name: StreamState("complete") for name in STREAMS},
            ranks=tuple(Rank(rank=rank, **self.of_rank[rank]) for rank in self.ranks),
            groups=tuple(self.groups),
            waits=tuple(self.waits),
            collectives=tuple(self.track(rank) for rank in self.ranks),
            **{**self.streams, **streams},
        )


def _ranks(ranks: int | Iterable[int]) -> Iterable[int]:
    return (ranks,) if isinstance(ranks, int) else ranks


def healthy_job(ranks: int = 2, steps: int = 3) -> JobBuilder:
    """A job that constructs DDP and trains some steps: broadcast of buffers, one bucket, a metric."""
    job = JobBuilder(ranks)
    job.call(job.ranks, "broadcast", 30, 1_000, origin="ddp-construct", root=0)
    for step in range(1, steps + 1):
        job.step(job.ranks, step)
        if step > 1:
            job.call(job.ranks, "broadcast", 40, 64, origin="ddp-forward", root=0)
        job.reduce_gradients(job.ranks)
        job.call(job.ranks, "all_reduce", 60, reduce_op="sum")
    return job
