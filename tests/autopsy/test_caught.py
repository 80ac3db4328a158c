"""Exceptions that ranks caught, printed and went on after, before something else ended them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from ddpdoctor.report.autopsy_text import render


def raised(rank: int, place: int, what: str, function: str = "step") -> list[str]:
    lines = ("Traceback (most recent call last):", f'  File "/job/train.py", line {place}, in {function}', what)
    return [f"[rank{rank}]: {line}" for line in lines]


def skipped(*samples: int, ranks: tuple[int, ...] = (0, 1)) -> list[str]:
    """What each rank prints of each sample that it leaves out."""
    return [
        line for one in samples for rank in ranks for line in raised(rank, 40, f"ValueError: sample {one} is broken")
    ]


def failed(rank: int, pid: int = 4123) -> list[str]:
    """What torchrun prints of the rank that it saw first."""
    return [
        "E1127 20:00:00.000 1 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) "
        f"local_rank: {rank} (pid: {pid}) of binary: /usr/bin/python3",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "Root Cause (first observed failure):",
        "[0]:",
        f"  rank      : {rank} (local_rank: {rank})",
        f"  exitcode  : 1 (pid: {pid})",
    ]


GONE = raised(1, 77, "RuntimeError: the index is gone", "main")
OF_MEMORY = [
    line
    for size in (2, 1)
    for line in raised(0, 55, f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size}.00 GiB.")
]
TWICE = raised(0, 40, "ValueError: sample 3 is broken") * 2
CASES = {
    "others at the same place, then one of another kind": (skipped(1, 2, 3) + GONE + failed(1), "the index is gone", 1),
    "without a word of the launcher": (skipped(1, 2, 3, ranks=(1,)) + GONE, "the index is gone", 1),
    "the last at the same place was not caught": (skipped(1, 2, 9, ranks=(0,)) + failed(0), "sample 9 is broken", 0),
    "memory that ran out and was asked for again": (OF_MEMORY + GONE + failed(1), "the index is gone", 1),
    "the launcher names a rank of several": (GONE + skipped(4, 5, ranks=(0,)) + failed(1), "the index is gone", 1),
    "one on each rank": (skipped(7, ranks=(0,)) + GONE + failed(0), "sample 7 is broken", 0),
    "its connection was lost after them": (
        skipped(1, 2, ranks=(0,))
        + raised(0, 77, "RuntimeError: [../gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:42", "main")
        + GONE
        + failed(1),
        "the index is gone",
        1,
    ),
    "one death told twice": (TWICE + GONE + failed(0), "sample 3 is broken", 0),
}


@pytest.mark.parametrize(("lines", "words", "rank"), CASES.values(), ids=list(CASES))
def test_what_a_rank_went_on_after_did_not_end_it(lines: list[str], words: str, rank: int, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("\n".join(lines) + "\n")
    examination = autopsy(AutopsyRequest(paths=(str(log),)))
    causes = [finding for finding in examination.findings if finding.role == "cause"]
    assert [(words in one.title, one.ranks) for one in causes] == [(True, (rank,))], [one.title for one in causes]
    passed = [one.title for one in examination.findings if one.remedy.startswith("Nothing shows that a process ended")]
    assert all(title.endswith("the log goes on after it") for title in passed)


@pytest.mark.parametrize("gap", ["\t", "   "])
def test_the_rows_of_a_table_below_a_failure_are_no_progress(gap: str, tmp_path: Path) -> None:
    rows = [gap.join(row) for row in (("PID", "GB", "NAME"), *((str(n), f"{n}.5", "ray::Trainer") for n in (7, 8, 9)))]
    log = tmp_path / "job.log"
    head = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."
    log.write_text("\n".join([head, "Top 10 memory users:", *rows]) + "\n")
    examination = autopsy(AutopsyRequest(paths=(str(log),)))
    assert [finding.role for finding in examination.findings] == ["cause"]


STEPS = [f"[rank{rank}]: step {step} loss 1.{step}" for step in range(4) for rank in range(2)]


@pytest.mark.parametrize("code", [-9, -11, -6, 1])
def test_a_signal_is_no_end_by_an_exception_after_which_the_rank_trained_on(code: int, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    ended = [line.replace("exitcode: 1", f"exitcode: {code}") for line in failed(1)[:1]]
    log.write_text("\n".join(STEPS + skipped(1, ranks=(1,)) + STEPS + ended) + "\n")
    examination = autopsy(AutopsyRequest(paths=(str(log),)))
    assert examination.findings[0].code == ("DDP703" if code in (-9, -11) else "DDP706")
    text = render(examination, examination.autopsy, 100, colour=False) if examination.autopsy else ""
    assert (
        "what the job went on after\n  - rank 1 raised ValueError at train.py:40: sample 1 is broken\n" in text
    ) is (code in (-9, -11))
    if code in (-9, -11):
        assert "what followed" not in text
        assert "job.log:20: the launcher reports that rank 1" in examination.findings[0].evidence[0].text


def test_of_a_job_that_went_on_the_summary_says_so(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("\n".join(STEPS + skipped(1) + STEPS) + "\n")
    examination = autopsy(AutopsyRequest(paths=(str(log),)))
    assert examination.autopsy is not None
    text = render(examination, examination.autopsy, 100, colour=False)
    assert "Inconclusive: the job went on after all that its logs report" in text
