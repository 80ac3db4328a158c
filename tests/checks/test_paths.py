"""Ranks at one path: the family of download-race, unsynchronised-load, shared-path-race and save-on-all-ranks."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdoctor.checks.data import download_race
from ddpdoctor.checks.death import root_exception
from ddpdoctor.checks.state import save_on_all_ranks, shared_path_race, unsynchronised_load
from ddpdoctor.finding import Finding, Location, Refuted, Severity
from ddpdoctor.record.model import Forward
from ddpdoctor.record.streams.training import Access, FileEvent
from tests.diagnosis.jobs import JobBuilder

FAMILY = (download_race, unsynchronised_load, shared_path_race, save_on_all_ranks)
DATA = "/job/data/tokens.bin"


class Paths:
    """A job whose ranks come to paths, one access after the other."""

    def __init__(self) -> None:
        self.job = JobBuilder(2)
        self.accesses: list[Access] = []
        self.files: list[FileEvent] = []

    def come(self, rank: int, action: Any, line: int, path: str = DATA, **fields: Any) -> None:
        """Note an access, and the file event that the no-touch rule makes of a write."""
        site, time_ns = self.job.site(line), self.job.tick()
        if action == "save":
            self.files.append(FileEvent(rank=rank, action="save", path=path, site=site, time_ns=time_ns))
            return
        if action == "write":
            self.files.append(FileEvent(rank=rank, action="create", path=path, site=site, time_ns=time_ns))
        self.accesses.append(Access(rank=rank, action=action, path=path, site=site, time_ns=time_ns, **fields))

    def barrier(self) -> None:
        self.job.call(self.job.ranks, "barrier", 60)

    def train(self) -> None:
        self.job.streams["forwards"] = tuple(
            Forward(rank=rank, wrap=0, training=True, gradients=True, time_ns=self.job.tick()) for rank in (0, 1)
        )

    def finish(self) -> None:
        for rank in self.job.ranks:
            self.job.leave(rank, "finished", main_finished=True)

    def said(self, *checks: Any) -> list[Finding | Refuted]:
        record = self.job.record(accesses=tuple(self.accesses), files=tuple(self.files))
        return [result for check in checks or FAMILY for result in check.in_run(record)]

    def finding(self) -> Finding:
        (finding,) = [result for result in self.said() if isinstance(result, Finding)]
        return finding


def lines(finding: Finding) -> list[int]:
    return [place.line for place in finding.locations]


def test_data_that_every_rank_fetches_is_one_finding() -> None:
    paths = Paths()
    for name in ("train.bin", "test.bin"):
        for rank in (0, 1):
            paths.come(rank, "write", 12, f"/job/data/{name}", through="zipfile")
    paths.train()
    finding = paths.finding()
    assert (finding.code, finding.severity, lines(finding)) == ("DDP109", Severity.WARNING, [12])
    assert finding.title.startswith("ranks 0 and 1 fetch train.bin and 1 more paths (through zipfile) at the same time")


def test_data_that_every_rank_prepares_where_it_is_missing_is_a_race_even_when_one_was_late() -> None:
    paths = Paths()
    paths.come(0, "check", 11, found=False)
    paths.come(0, "write", 12)
    paths.come(1, "check", 11, found=True)
    for rank in (0, 1):
        paths.come(rank, "read", 13, found=True)
    assert paths.finding().code == "DDP109"


def test_data_that_rank_zero_prepares_before_a_barrier_refutes_the_suspicions() -> None:
    paths = Paths()
    paths.come(0, "check", 11, found=False)
    paths.come(0, "write", 12)
    paths.barrier()
    for rank in (0, 1):
        paths.come(rank, "read", 13, found=True)
    paths.finish()
    refuted = paths.said()
    assert all(isinstance(result, Refuted) for result in refuted)
    assert {result.location for result in refuted if isinstance(result, Refuted)} == {
        Location(file="/job/train.py", line=line, function="train") for line in (12, 13)
    }


def test_every_rank_that_writes_what_nobody_reads_is_left_to_save_on_all_ranks() -> None:
    paths = Paths()
    for rank in (0, 1):
        paths.come(rank, "write", 12)
    assert paths.finding().code == "DDP601"


def test_a_checkpoint_that_another_rank_reads_at_once_is_a_warning() -> None:
    paths = Paths()
    paths.train()
    paths.come(0, "save", 80, "/job/last.pt")
    paths.come(1, "read", 81, "/job/last.pt", found=True)
    finding = paths.finding()
    assert (finding.code, finding.severity, lines(finding)) == ("DDP603", Severity.WARNING, [81, 80])
    assert finding.title == "rank 1 reads last.pt, which rank 0 writes, with no barrier between the two"


def test_a_read_that_fails_is_an_error_and_not_another_finding() -> None:
    paths = Paths()
    paths.come(1, "read", 81, "/job/last.pt", found=False)
    paths.job.fail(1, "FileNotFoundError", 81, "[Errno 2] No such file or directory: 'last.pt'")
    paths.come(0, "save", 80, "/job/last.pt")
    paths.job.call(0, "barrier", 90)
    paths.job.wait_in_last(0)
    finding = paths.finding()
    assert (finding.code, finding.severity) == ("DDP603", Severity.ERROR)
    assert finding.title.endswith("and rank 1 dies of FileNotFoundError")
    assert paths.said(root_exception) == []


def test_a_directory_that_both_ranks_make_is_an_error_where_one_dies_of_it() -> None:
    paths = Paths()
    for rank in (0, 1):
        paths.come(rank, "make", 15, "/job/out", found=bool(rank))
    assert paths.said() == [], "the script put up with it"
    paths.job.fail(1, "FileExistsError", 15, "[Errno 17] File exists: 'out'")
    finding = paths.finding()
    assert (finding.code, finding.severity, finding.ranks) == ("DDP608", Severity.ERROR, (0, 1))
    assert finding.title == "ranks 0 and 1 make out at the same time, and rank 1 dies of FileExistsError"


def test_a_race_for_a_hidden_directory_counts_where_a_rank_dies_of_it() -> None:
    paths = Paths()
    for rank in (0, 1):
        paths.come(rank, "make", 15, "/home/user/.cache/models", found=bool(rank))
    paths.job.fail(1, "FileExistsError", 15, "[Errno 17] File exists: '/home/user/.cache/models'")
    assert (paths.finding().code, paths.finding().severity) == ("DDP608", Severity.ERROR)
    paths = Paths()
    for rank in (0, 1):
        paths.come(rank, "remove", 14, "/home/user/.cache/models", found=bool(rank))
        paths.come(rank, "make", 15, "/home/user/.cache/models")
    assert not [result for result in paths.said() if isinstance(result, Finding)]


def test_a_rank_that_deletes_what_another_has_just_made_is_a_warning() -> None:
    paths = Paths()
    for rank in (0, 1):
        paths.come(rank, "remove", 14, "/job/out", found=bool(rank))
        paths.come(rank, "make", 15, "/job/out")
    finding = paths.finding()
    assert (finding.code, lines(finding)) == ("DDP608", [15, 14])
    paths = Paths()
    paths.come(0, "make", 15, "/job/out")
    paths.barrier()
    paths.come(1, "remove", 16, "/job/out", found=True)
    assert not [result for result in paths.said() if isinstance(result, Finding)]


@pytest.mark.parametrize("how", ["write", "rename"])
def test_a_file_that_is_waited_for_must_come_under_its_name_at_once(how: str) -> None:
    paths = Paths()
    paths.come(1, "check", 16, found=False)
    if how == "write":
        paths.come(0, "write", 15)
    else:
        paths.files.append(
            FileEvent(rank=0, action="rename", path=DATA, site=paths.job.site(15), time_ns=paths.job.tick())
        )
    paths.come(1, "check", 16, found=True)
    paths.come(1, "read", 17, found=True)
    codes = [result.code for result in paths.said() if isinstance(result, Finding)]
    assert codes == (["DDP608"] if how == "write" else [])


def test_locks_order_what_collectives_do_not() -> None:
    paths = Paths()
    for rank in (0, 1):
        paths.come(rank, "lock", 10, "/job/data/guard", through="flock")
        paths.come(rank, "write", 12)
        paths.come(rank, "read", 13, found=True)
    assert not [result for result in paths.said(download_race, unsynchronised_load) if isinstance(result, Finding)]
    paths = Paths()
    for rank in (0, 1):
        paths.come(rank, "lock", 10, "/job/guard", found=bool(rank))
        paths.come(rank, "write", 10, "/job/guard")
    assert not [result for result in paths.said(download_race, shared_path_race) if isinstance(result, Finding)]


@pytest.mark.parametrize("path", ["/job/train.log", "/tmp/torchinductor_me/ab.bin", "/job/.cache/x"])
def test_logs_and_caches_are_left_out(path: str) -> None:
    paths = Paths()
    paths.come(0, "write", 12, path)
    paths.come(1, "read", 13, path, found=True)
    assert not [result for result in paths.said() if isinstance(result, Finding)]
