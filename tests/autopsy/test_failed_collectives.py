"""The stacks that NCCL's watchdog prints of the collective that it gives up, rank by rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from ddpdoctor.report.formats.json import as_object

TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def _stack(rank: int, call: str, *lines: tuple[str, int]) -> str:
    frames = [
        f"#0 {call} from {TORCH}:3068",
        *(f"#{n} {name} from /job/train.py:{line}" for n, (name, line) in enumerate(lines, 1)),
    ]
    head = f"[rank{rank}]:[E725 02:39:41.244128842 ProcessGroupNCCL.cpp:733] Stack trace of the failed collective: "
    return "\n".join((head, *frames, ""))


def _end(rank: int) -> str:
    return (
        f"[rank{rank}]:[F725 02:47:41.268394894 ProcessGroupNCCL.cpp:1653] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        "Terminating the process after attempting to dump debug info, due to collective timeout or exception."
    )


def _said(directory: Path, *parts: str) -> list[dict[str, Any]]:
    (directory / "job.log").write_text("\n".join(parts) + "\n", encoding="utf-8")
    found: list[dict[str, Any]] = as_object(autopsy(AutopsyRequest(paths=(str(directory / "job.log"),))))["findings"]
    return found


LOSS, SAVE = (("train", 40), ("main", 80)), (("save", 61), ("main", 81))


def test_the_rank_that_stands_at_another_call_is_named(tmp_path: Path) -> None:
    stacks = [
        _stack(rank, "barrier" if rank == 2 else "all_reduce", *(SAVE if rank == 2 else LOSS)) for rank in range(4)
    ]
    first = _said(tmp_path, *stacks, *map(_end, range(4)))[0]
    assert (first["code"], first["severity"], first["ranks"]) == ("DDP301", "error", [2])
    assert "rank 2 waits in barrier at train.py:61" in first["title"]
    assert {fact["basis"] for fact in first["evidence"]} == {"log"}


def test_of_two_ranks_both_places_are_told_and_none_is_blamed(tmp_path: Path) -> None:
    first = _said(tmp_path, _stack(0, "all_reduce", *LOSS), _stack(1, "barrier", *SAVE), _end(0), _end(1))[0]
    assert first["severity"] == "error"
    assert "train.py:40" in first["title"] and "train.py:61" in first["title"]
    assert "is named because" not in str(first["evidence"])


@pytest.mark.parametrize("aborts", [False, True])
def test_ranks_at_the_same_call_have_not_parted(tmp_path: Path, aborts: bool) -> None:
    parts = [_stack(rank, "all_reduce", *LOSS) for rank in range(3)]
    said = _said(tmp_path, *parts, *(map(_end, range(3)) if aborts else ()))
    assert not [one for one in said if one["code"] in ("DDP301", "DDP304")]


def test_an_exception_before_it_stays_the_first_cause(tmp_path: Path) -> None:
    raised = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 22, in <module>
[rank1]:     rows[index]
[rank1]: IndexError: list index out of range"""
    said = _said(tmp_path, raised, _stack(0, "all_reduce", *LOSS), _stack(2, "barrier", *SAVE), _end(0), _end(2))
    assert said[0]["code"] == "DDP706" and "IndexError" in said[0]["title"]


def test_ranks_that_time_out_in_two_groups_have_not_parted(tmp_path: Path) -> None:
    other = _end(1).replace("PG ID 0 PG GUID 0(default_pg)", "PG ID 3 PG GUID 7")
    said = _said(tmp_path, _stack(0, "all_reduce", *LOSS), _stack(1, "barrier", *SAVE), _end(0), other)
    assert not [one for one in said if one["code"] in ("DDP301", "DDP304")]
